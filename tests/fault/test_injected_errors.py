"""A system call that fails costs a run at most the time to resume it, and says so in one line."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from edgefl import Checkpoint, Experiment, Server, Stop, config
from tests.fault import shim
from tests.fault.injected import ERRORS, GOOD, Fault, Runs
from tests.process.runs import virtual

pytestmark = [pytest.mark.timeout(1200)]


def small_run() -> Experiment:
    return virtual(1, stop=Stop(versions=12), checkpoint=Checkpoint(every_s=1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["supervisor", "server", "zygote"])
def test_one_line_and_the_same_outcome_when_resumed(who: str, tmp_path: Path) -> None:
    runs = Runs(small_run(), tmp_path / "runs", shim.build(tmp_path))
    assert {kind for _, kind in runs.calls} == ERRORS.keys()
    wanted = [fault for fault in runs.faults(1, seed=7) if fault.who == who]
    for fault in wanted[:5]:
        found = runs(fault)
        assert found in GOOD, (fault, found)


@pytest.mark.slow
def test_a_server_that_may_open_no_socket_ends_with_one_line(tmp_path: Path) -> None:
    """It tried to reach its clients for ten minutes."""
    wanted = msgspec.structs.replace(small_run(), server=Server(heartbeat_s=5.0))
    runs = Runs(wanted, tmp_path / "runs", shim.build(tmp_path))
    assert runs(Fault("server", "socket", 0, "EMFILE", on=True)) == "one line"


def test_without_memory_it_ends_with_one_line(tmp_path: Path) -> None:
    """The zygote cannot load torch in 300 MiB of addresses."""
    (tmp_path / "experiment.toml").write_text(config.dump(small_run()))
    words = ["run", str(tmp_path / "experiment.toml"), "--quiet", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "edgefl", *words],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20)),
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("edgefl: ")
    assert not (tmp_path / "run").exists()
