"""``edgefl calibrate`` and ``edgefl doctor``: their figures and findings about this machine."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from shell import Shell

from edgefl.cli import doctor, main
from edgefl.host import calibration
from edgefl.host.calibration import Measured, Rate


def test_calibrate_shows_rates(monkeypatch: pytest.MonkeyPatch, edgefl: Shell) -> None:
    rate = Rate(median=50.0, cv=0.02, samples=(50.0,) * 9)
    rates = dict.fromkeys(("depthwise_gflops", "train_gflops", "triad_gbytes_per_s"), rate)
    shapes = {"gemm_gflops": {"64": rate}, "conv_gflops": {"3x3": rate}}
    measured = Measured(**rates, **shapes, triad_mib=64.0, cache_mib=480.0, blas="mkl")
    found = calibration.Calibration(
        fingerprint="f", cpu="a processor", cores=2, library="a library", at_unix_s=0.0, measured=measured
    )
    forced: list[bool] = []
    monkeypatch.setattr(calibration, "calibrate", lambda force: forced.append(force) or found)
    out = edgefl.fits("calibrate")
    for words in (
        "a processor",
        "training step",
        "conv 3x3",
        "50",
        "(192 MiB) are less than twice the cache",
    ):
        assert words in out
    shown = json.loads(edgefl.shows("calibrate", "--fresh", "--json"))
    assert shown["measured"]["gemm_gflops"]["64"]["median"] == 50.0
    assert forced == [False, True]
    older = msgspec.structs.replace(found, at_unix_s=-1.0)
    for stored, words in ((found, "valid until"), (older, "not stored"), (None, "not stored")):
        monkeypatch.setattr(calibration, "stored_calibration", lambda stored=stored: stored)
        assert words in edgefl.fits("calibrate")


def test_doctor_describes_the_machine(edgefl: Shell) -> None:
    found = {finding["what"]: finding for finding in json.loads(edgefl.shows("doctor", "--json"))}
    assert {"python", "cores", "memory", "torch", "cuda", "kernel c", "memfd"} <= set(found)
    assert {"throttle cgroup", "open files"} <= set(found)
    assert found["kernel reference"]["problem"] == ""
    assert not any("check failed" in finding["problem"] for finding in found.values())
    assert "memfd" in edgefl.fits("doctor")


@pytest.mark.parametrize(
    ("limit", "says"),
    [(512, "at most 170 clients under the wall clock: raise the container's limit"), (10**6, "")],
)
def test_doctor_shows_how_many_clients_fit_a_containers_limit(
    limit: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr("edgefl.host.capacity.thread_limit", lambda: limit)
    monkeypatch.setattr(resource, "getrlimit", lambda which: unlimited)
    monkeypatch.setattr(doctor, "_LOOKS", (doctor._limits,))
    (processes,) = [found for found in doctor.examine() if found.what == "processes"]
    assert processes.problem == says


def test_a_deleted_current_folder_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    codes = [main(["run", str(tmp_path / "e.toml")]), main(["doctor"]), main(["profiles"])]
    monkeypatch.undo()
    assert codes == [2, 2, 2]
    line = "edgefl: the current folder was deleted; change to another one (cd)\n"
    assert capsys.readouterr() == ("", 3 * line)


def test_doctor_reports_that_numba_cannot_cache_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.kernels.backend_numba.cached_in", lambda: None)
    monkeypatch.setattr(doctor, "_LOOKS", (doctor._kernels,))
    (numba,) = [found for found in doctor.examine() if found.what == "kernel numba"]
    assert numba.problem.startswith("numba has no writable cache folder")


def test_doctor_continues_after_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def _odd_thing() -> Iterator[doctor.Check]:
        raise OSError("no such thing here")

    monkeypatch.setattr(doctor, "_LOOKS", (_odd_thing, doctor._python))
    odd, python = doctor.examine()
    assert odd == ("odd thing", "?", "check failed: OSError: no such thing here")
    assert python.what == "python"
