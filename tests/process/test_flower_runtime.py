"""Tests of a Flower app that Flower's own programs run on emulated phones."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from unittest.mock import MagicMock, Mock, PropertyMock

import pytest
from msgspec.structs import replace

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'edgefl[flower]'")

from edgefl.errors import ConfigError, RunError
from edgefl.flower import runtime
from edgefl.programs import Phone, ProgramOptions

from .runs import Command

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        any(shutil.which(name, path=runtime._path()) is None for name in runtime.COMMANDS),
        reason="Flower's commands are not on the PATH",
    ),
]
PROJECT = """
[project]
name = "words"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "edgefl"

[tool.flwr.app.components]
serverapp = "words.server_app:app"
clientapp = "words.client_app:app"

[tool.flwr.app.config]
rounds = 7
"""
CLIENT = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    part = context.node_config["partition-id"]
    assert context.node_config["num-partitions"] == 2
    metrics = MetricRecord({"num-examples": 1, "part": part})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
"""
SERVER = """
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=context.run_config["rounds"])
    print("the mean part is", result.train_metrics_clientapp[1]["part"], flush=True)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "words_app"
    (folder / "words").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "words" / "__init__.py").touch()
    (folder / "words" / "client_app.py").write_text(CLIENT)
    (folder / "words" / "server_app.py").write_text(SERVER)
    return folder


def phones(count: int = 2) -> list[Phone]:
    return [Phone(device="pi-4", command=(), network="fios", share=0.9) for _ in range(count)]


OPTIONS = ProgramOptions(time_scale=1.0, throttle="sigstop", memory="off")


def test_an_app_runs_to_its_end_on_phones(
    app: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = runtime.run(app, phones(), OPTIONS._replace(out=tmp_path / "out"), ["rounds=1"])
    assert result.exit_code == 0
    assert "the mean part is 0.5" in capfd.readouterr().out
    assert sorted(one[:3] for one in result.messages) == [(0, "train", 1), (1, "train", 1)]
    for phone in result.phones.phones:
        assert phone.connections > 0
        assert phone.up.bytes > 0
        assert phone.down.bytes > 0
    assert (tmp_path / "out" / "superlink.log").stat().st_size > 0


def test_a_failing_app_gives_exit_code_1(app: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (app / "words" / "server_app.py").write_text(SERVER + "    raise KeyError('lost')\n")
    assert runtime.run(app, phones(), OPTIONS, ["rounds=1"]).exit_code == 1
    assert "edgefl: the Flower run is finished:failed" in capfd.readouterr().err


def test_a_supernode_that_ends_before_the_start_ends_the_run(app: Path, tmp_path: Path) -> None:
    whole, broken = phones()
    broken = replace(broken, environment={"PYTHONHOME": str(tmp_path)})  # so that Python cannot start
    with pytest.raises(RunError, match="the SuperNode of phone 1 ended: "):
        runtime.run(app, [whole, broken], OPTIONS)


def test_a_run_without_supernodes_ends(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example if all phones ran out of memory. The app would wait for them forever."""
    nodes, server = MagicMock(ended=[0, 1], why=lambda phone: "out of memory"), MagicMock()
    type(server).running = PropertyMock(side_effect=[True, False])
    for started in (nodes, server):
        started.__enter__.return_value = started
    monkeypatch.setattr(runtime, "start", Mock(side_effect=[nodes, server]))
    monkeypatch.setattr(runtime._NodeLog, "active", True)
    with pytest.raises(RunError, match="the SuperNode of phone 0 ended: out of memory"):
        runtime.run(app, phones(), OPTIONS)


def test_connections_to_this_host_use_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would use the proxy in ``http_proxy`` even for 127.0.0.1, and no SuperNode could connect."""
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert runtime._environment(tmp_path)["no_grpc_proxy"] == "127.0.0.1"
    monkeypatch.setenv("no_proxy", "a.example")
    assert runtime._environment(tmp_path)["no_grpc_proxy"] == "a.example,127.0.0.1"


def test_a_folder_without_an_app_is_refused(tmp_path: Path) -> None:
    command = Command("flower", str(tmp_path), "--device", "pi-4")
    command.ends(2, "must be the folder of a Flower app with a pyproject.toml that has [tool.flwr")
    with pytest.raises(ConfigError, match="must be the folder of a Flower app"):
        runtime.run(tmp_path, phones(), OPTIONS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_ended_edgefl_leaves_no_process(number: int, app: Path, tmp_path: Path) -> None:
    own = {"TMPDIR": str(tmp_path)}
    command = Command("flower", str(app), "--device", "pi-4=2", "--time-scale", "1", environment=own)
    assert command.process.stdout is not None
    while "Successfully started run" not in (line := command.process.stdout.readline()):
        assert line
    os.kill(command.process.pid, number)
    code, _, err = command.finish()
    assert code == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in err
