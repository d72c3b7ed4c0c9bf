"""Tests of the measuring kit in Python, of its results, and of running it over ssh."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from shell import Shell
from typer.testing import CliRunner

from edgefl.cli import app, main
from edgefl.devices import check_file, load_device
from edgefl.devices.fit import TYPICAL, Row, predicted, summary
from edgefl.devices.kit_result import KIT_ERROR_FACTOR, KitResult, Timed, fit_kit
from edgefl.devices.time_model import COSTS, TimeModel
from edgefl.errors import ConfigError, RunError
from edgefl.lab import truth
from edgefl.learning.operations import StepWork
from edgefl.measure import kit, remote

QUICK = ["--minutes", "0.01", "--threads", "1"]
PARTS = [f"{workload}/{name}" for workload, parts in kit.workloads().items() for name in parts]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the kit's file without edgefl, with batches of one example; return the path of its result."""
    folder = tmp_path_factory.mktemp("device")
    before, batch, after = Path(kit.__file__).read_text().partition(f"\nBATCH = {kit.BATCH}\n")
    assert batch
    (folder / "kit.py").write_text(f"{before}\nBATCH = 1\n{after}")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "kit.py", "--out", "result.json", *QUICK]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return folder / "result.json"


def test_the_kits_file_measures_all_parts_without_edgefl(result: Path) -> None:
    found = json.loads(result.read_text())
    assert list(found["parts"]) == PARTS
    assert found["threads"] == 1
    assert found["device"]
    assert found["host"]["torch"] == torch.__version__


def test_the_kits_file_is_python_3_8_and_imports_only_torch() -> None:
    tree = ast.parse(Path(kit.__file__).read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"torch"}


def test_the_parts_cover_each_term_of_a_time_model(result: Path) -> None:
    rows = msgspec.convert(json.loads(result.read_text()), KitResult).rows()
    assert [row.network for row in rows] == PARTS
    assert len(kit.workloads()) <= 8
    assert all(any(getattr(row.work, name) for row in rows) for name in COSTS)


def parts_of(model: TimeModel, slower: Mapping[str, float] = MappingProxyType({})) -> list[Row]:
    """Return the rows of a device with this model's costs. ``slower`` multiplies the times of some parts."""
    parts = dict.fromkeys(PARTS, Timed(wall_s=1.0, cpu_s=1.0))
    blank = KitResult(kit=kit.VERSION, device="", runtime="torch", threads=1, cores=1, parts=parts)
    times = {r.network: model.seconds(r.work) * slower.get(r.network, 1.0) for r in blank.rows()}
    return [Row(network=r.network, work=r.work, seconds=times[r.network]) for r in blank.rows()]


def held(model: TimeModel, rows: Sequence[Row]) -> int:
    return sum(predicted(model, row).held for row in rows)


def test_intervals_contain_90_percent_of_the_parts_however_badly_they_fit() -> None:
    """Mutant: each part's interval is a factor of about 1.3, so that at most 22 of the 32 parts are within
    theirs."""
    draw = np.random.default_rng(3)
    rows = parts_of(TYPICAL, {part: math.exp(draw.normal(0, 0.6)) for part in PARTS})
    model = fit_kit(rows).model
    assert held(msgspec.structs.replace(model, cost_variations=()), rows) <= 22
    assert held(model, rows) >= 0.9 * len(PARTS)
    assert model.error_factor == KIT_ERROR_FACTOR


def test_intervals_are_wide_only_for_operations_whose_parts_fit_badly() -> None:
    """Mutant: all operations get the same larger ``error_factor``."""
    slower = {part: 2.5 ** (-1) ** at for at, part in enumerate(PARTS) if part.startswith("memory/")}
    model = fit_kit(parts_of(TYPICAL, slower)).model
    products, bytes_moved = StepWork(matmul_flop=1e12), StepWork(elementwise_bytes=1e12)
    assert model.error_factor_of(products) < 1.6 < 1.8 < model.error_factor_of(bytes_moved)


def test_the_interval_of_parts_that_fit_is_that_of_networks() -> None:
    model = fit_kit(parts_of(TYPICAL)).model
    assert (model.error_factor, model.cost_variations) == (KIT_ERROR_FACTOR, ())


def test_pooling_has_a_cost_of_its_own() -> None:
    """Mutant: all moved bytes have the same cost, except those of convolutions and matrix products."""
    slow = msgspec.structs.replace(TYPICAL, pool_gbytes_per_s=TYPICAL.pool_gbytes_per_s / 10)
    found = fit_kit(parts_of(slow)).model
    for step in (StepWork(pool_bytes=1e9), StepWork(elementwise_bytes=1e9), StepWork(norm_bytes=1e9)):
        assert found.seconds(step) == pytest.approx(slow.seconds(step), rel=0.15), step
    fast = fit_kit(parts_of(TYPICAL, {"memory/pool": 0.1})).model
    assert fast.pool_gbytes_per_s == fast.elementwise_gbytes_per_s


def test_times_that_no_model_fits_are_refused() -> None:
    """Mutant: the fit returns a profile that edgefl refuses, because one cost variation is above 5."""
    rows = parts_of(TYPICAL, {part: 1e4 ** (-1) ** at for at, part in enumerate(PARTS)})
    with pytest.raises(
        ConfigError, match="no time model fits these steps within a factor of 100; check their"
    ):
        fit_kit(rows)


def test_the_fit_names_the_parts_that_fit_worst(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(slower: dict[str, float]) -> list[str]:
        parts = {row.network: {"wall_s": 1, "cpu_s": row.seconds} for row in parts_of(TYPICAL, slower)}
        facts = {"kit": kit.VERSION, "device": "Board", "runtime": "torch", "threads": 1, "cores": 1}
        (tmp_path / "kit.json").write_text(json.dumps({**facts, "parts": parts}))
        out = tmp_path / f"mine-{len(slower)}.toml"
        assert main(["profiles", "fit", str(tmp_path / "kit.json"), "--out", str(out)]) == 0
        return capsys.readouterr().out.splitlines()[len(PARTS) : -1]

    assert said({}) == []
    (line,) = said({"depthwise/112": 0.3, "conv/groups": 1.5})
    assert line.startswith("2 of 32 parts are not within a factor of 1.3 of the fit, worst depthwise/112 (")
    assert ") and conv/groups (ratio 0." in line
    assert line.endswith("); the profile's intervals contain 30 of 32")


def test_a_devices_costs_are_fitted_from_its_times_for_the_parts() -> None:
    pi_4 = load_device("pi-4").time_model("torch")
    model = msgspec.structs.replace(pi_4, conv_gflops=5.0, matmul_gflops=90.0)
    rows = parts_of(model)
    found = fit_kit(rows, load_device("pi-5").time_model("torch")).model
    for work in ({"conv_flop": 1e9}, {"pointwise_flop": 1e9}, {"matmul_flop": 1e9}, {"parameters": 1e6}):
        step = StepWork(**work)
        assert found.seconds(step) == pytest.approx(model.seconds(step), rel=0.15), work


def test_a_result_becomes_a_profile(result: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    assert main(["profiles", "fit", str(result), "--out", str(out)]) == 0
    assert check_file(out) == []
    device = load_device(out)
    assert device.time_model() == device.time_model("torch-1" if kit.cores() > 1 else "torch")


def cpu_s(part: str, seconds: float) -> dict[str, Any]:
    return {"parts": {part: {"wall_s": 1, "cpu_s": seconds}}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([], "must be a table, got []"),
        ({"parts": {}}, "parts: must be a table that is not empty, got {}"),
        ({"runtime": "Torch"}, "runtime: must be a name of lower-case letters, digits, dots and dashes"),
        ({"threads": 0}, "threads: must be a whole number from 1 to 10000, got 0"),
        ({"kit": 99}, "measured with version 99 of the kit, not 1; measure again"),
        (cpu_s("conv/new", 1), "the kit has no part 'conv/new'; measure again"),
        (cpu_s("conv/7", -1), "parts.conv/7.cpu_s: must be a number above 0 and at most 1e+06"),
        (cpu_s("conv/7", 1e-12), "parts.conv/7.cpu_s: must be at least 0.00092"),
        (cpu_s("memory/relu", 1e-12), "since no processor is faster, got 1e-12"),
    ],
)
def test_a_wrong_result_is_refused_in_one_line_with_the_file(
    result: Path, tmp_path: Path, edgefl: Shell, changed: Any, message: str
) -> None:
    file, out = tmp_path / "wrong.json", tmp_path / "mine.toml"
    file.write_text(json.dumps({**json.loads(result.read_text()), **changed} if changed else changed))
    line = edgefl.refuses(2, "profiles", "fit", str(file), "--out", str(out))
    assert line.startswith(f"{file}: ")
    assert message in line
    assert not out.exists()


def fake_ssh(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_over_ssh_the_kit_runs_and_returns_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit runs without torch and without measuring its parts, which takes seconds and is tested above."""
    there = f'test "$1" = pi@board || exit 9; shift; PYTHONPATH={tmp_path} exec sh -c "$*"'
    fake_ssh(tmp_path, there, monkeypatch)
    (tmp_path / "torch.py").touch()
    measured = "def measure(*of): return {'of': of[:2], 'torch': sys.modules['torch'].__file__}"
    source = Path(kit.__file__).read_text().replace("\nif __name__", f"\n{measured}\n\n\nif __name__")
    (tmp_path / "kit.py").write_text(source)
    monkeypatch.setattr(kit, "__file__", str(tmp_path / "kit.py"))
    out = tmp_path / "Pi_4.json"
    options = ["--ssh", "pi@board", "--python", sys.executable, "--out", str(out), *QUICK]
    ran = CliRunner().invoke(app, ["measure", *options])
    assert ran.exit_code == 0, ran.output
    assert json.loads(out.read_text()) == {"of": [0.01, 1], "torch": str(tmp_path / "torch.py")}
    assert f"edgefl profiles fit {out} --out {tmp_path / 'pi-4.toml'}" in ran.output


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'ssh: no such board' >&2; exit 255", "measuring pi failed: ssh: no such board"),
        ("echo 'No module named torch' >&2; exit 1", "measuring pi failed: No module named torch"),
        ("echo welcome", "it printed no JSON: 'welcome"),
    ],
)
def test_an_error_over_ssh_is_one_line(
    script: str, message: str, tmp_path: Path, monkeypatch: Any, edgefl: Shell
) -> None:
    fake_ssh(tmp_path, script, monkeypatch)
    assert message in edgefl.refuses(1, "measure", "--ssh", "pi", "--out", str(tmp_path / "pi.json"))


def test_a_greeting_before_the_result_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, r"""echo welcome; printf '{\n "parts": {}\n}\n'""", monkeypatch)
    assert remote.run([], lambda _: None, ssh="pi") == {"parts": {}}


def test_the_last_part_is_not_the_reason_why_the_kit_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, lines = "memory/layer norm: 12.00 ms, 5 steps, CV 1%", list[str]()
    fake_ssh(tmp_path, f"echo '{line}' >&2; exit 137", monkeypatch)
    with pytest.raises(RunError, match="measuring pi failed: exit code 137"):
        remote.run([], lines.append, ssh="pi")
    assert lines == [line]


def test_output_of_a_device_need_not_be_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, r"printf 'Gr\374\337e\n' >&2; echo '{}'", monkeypatch)
    lines: list[str] = []
    assert remote.run([], lines.append, ssh="pi") == {}
    assert lines == ["Gr\ufffd\ufffde"]


def test_a_device_without_torch_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell
) -> None:
    fake_ssh(tmp_path, 'shift; exec sh -c "$*"', monkeypatch)
    without_torch = tmp_path / "python"
    without_torch.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    without_torch.chmod(0o755)
    line = edgefl.refuses(1, "measure", "--ssh", "pi", "--python", str(without_torch))
    assert line.startswith("measuring pi failed: torch cannot be imported (No module named 'torch')")


def test_a_result_that_cannot_be_written_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_ssh(tmp_path, """echo '{"parts": {}}'""", monkeypatch)
    (tmp_path / "file").touch()
    assert main(["measure", "--ssh", "pi", "--out", str(tmp_path / "file" / "pi.json")]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {"parts": {}}
    assert err.startswith("edgefl: --out ")
    assert "cannot be written" in err


def test_a_missing_ssh_and_wrong_hosts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ssh: No such file" in edgefl.refuses(2, "measure", "--ssh", "pi")
    assert "must be HOST or USER@HOST" in edgefl.refuses(2, "measure", "--ssh=-oProxyCommand=x")
    monkeypatch.setattr(remote, "run", lambda *_: pytest.fail("this machine was measured"))
    for option in ("--ssh", "--python"):
        assert f"{option} '': must not be empty" in edgefl.refuses(2, "measure", option, "")
    for name in ("none", "none.toml"):
        assert f"--out {name}: must end in .json" in edgefl.refuses(2, "measure", "--out", name)


@pytest.mark.parametrize("given", [("--minutes", "0"), ("--minutes", "1e4"), ("--threads", "0")])
def test_the_kits_file_refuses_impossible_numbers(
    given: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        kit.main(given)
    assert caught.value.code == 2
    assert "--threads must be at least 1, and --minutes above 0 and below 10000" in capsys.readouterr().err


def test_the_kits_file_prints_a_result_that_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kit, "measure", lambda *_: {"parts": {}})
    out = tmp_path / "none" / "result.json"
    with pytest.raises(SystemExit, match=r"result\.json cannot be written .*; the result was printed"):
        kit.main(["--out", str(out)])
    assert json.loads(capsys.readouterr().out) == {"parts": {}}


def test_this_hosts_networks_are_compared_with_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {row.network: {"wall_s": 1.0, "cpu_s": row.seconds} for row in parts_of(TYPICAL)}
    facts = {"kit": kit.VERSION, "device": "Board", "runtime": "torch", "threads": 1, "cores": 1}
    measured = {**facts, "parts": parts}
    monkeypatch.setattr(kit, "measure", lambda *_: measured)
    work = StepWork(conv_flop=1e9)
    expected = fit_kit(msgspec.convert(measured, KitResult).rows()).model.seconds(work)
    rows = {"right": Row(network="right", work=work, seconds=expected)}
    rows["slow"] = Row(network="slow", work=work, seconds=2 * expected)
    monkeypatch.setattr(truth, "network_row", lambda name, threads: rows[name])
    found = truth.measure(networks=("right", "slow"))
    assert [unseen.factor for unseen in found] == pytest.approx([1.0, 0.5])
    assert summary(found).held == 0.5
