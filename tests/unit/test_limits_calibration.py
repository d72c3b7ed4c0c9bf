"""Calibration: what is measured, kept, refused, and what a device's slowdown follows from."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from edgefl.errors import RunError
from edgefl.limits import calibration, host_operations
from edgefl.limits.calibration import Calibration, Measured, Rate, calibrate, stored_calibration


def rate(median: float = 50.0, cv: float = 0.01) -> Rate:
    return Rate(median=median, cv=cv, samples=(median,) * 9)


def measured(cv: float = 0.01) -> Measured:
    return Measured(
        gemm_gflops={"64": rate(40.0, cv), "256": rate(80.0)},
        conv_gflops={"3x3": rate(60.0), "1x1": rate(70.0)},
        depthwise_gflops=rate(10.0),
        train_gflops=rate(30.0),
        triad_gbytes_per_s=rate(9.0, cv),
        triad_mib=64.0,
        cache_mib=8.0,
        blas="mkl",
    )


def made(at_unix_s: float) -> Calibration:
    fingerprint = calibration.fingerprint()
    return Calibration(
        fingerprint=fingerprint, cpu="x", cores=2, library="y", at_unix_s=at_unix_s, measured=measured()
    )


def test_a_calibration_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Mock(side_effect=measured)
    monkeypatch.setattr(calibration, "_measure_apart", measure)
    assert stored_calibration(tmp_path) is None
    first = calibrate(folder=tmp_path)
    assert calibrate(folder=tmp_path) == first == stored_calibration(tmp_path)
    assert measure.call_count == 1
    calibrate(force=True, folder=tmp_path)
    assert measure.call_count == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_an_expired_or_broken_one_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_measure_apart", measured)
    path = tmp_path / f"calibration-{calibration.fingerprint()}.json"
    old = made(at_unix_s=time.time() - calibration.EXPIRES_S - 1)
    path.write_bytes(msgspec.json.encode(old))
    assert stored_calibration(tmp_path) is None
    assert calibrate(folder=tmp_path).at_unix_s > old.at_unix_s
    for broken in ("{", "[]", '{"fingerprint": "x", "cpu": "x", "cores": 2, "gemm_gflops": {}}'):
        path.write_text(broken)
        assert stored_calibration(tmp_path) is None
    assert calibrate(folder=tmp_path).measured == measured()
    assert made(at_unix_s=time.time() + 3600).expired(time.time())


def test_another_version_cpu_or_library_is_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {calibration.fingerprint()}
    monkeypatch.setattr(calibration, "VERSION", calibration.VERSION + 1)
    seen.add(calibration.fingerprint())
    monkeypatch.setattr(calibration, "library", lambda: "torch 99")
    seen.add(calibration.fingerprint())
    other = calibration.host()._replace(cpu="another processor")
    monkeypatch.setattr(calibration, "host", lambda: other)
    seen.add(calibration.fingerprint())
    assert len(seen) == 4


def test_a_noisy_host_is_refused_and_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_measure_apart", lambda: measured(cv=0.11))
    with pytest.raises(
        RunError, match=r"too noisy now.*gemm 64 11%, triad 11%; allowed: 10%.*stop other"
    ) as got:
        calibrate(folder=tmp_path)
    assert "\n" not in str(got.value)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.cache_folder() == tmp_path / "edgefl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration.cache_folder() == tmp_path / ".cache" / "edgefl"


def test_measuring_gives_nine_samples_of_each_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_operations, "_REPETITION_S", 1e-4)
    monkeypatch.setattr(host_operations, "ROUNDS", 1)
    found = host_operations.measure(sizes=(16, 256), triad_mib=0.25)
    rates = list(found.rates())
    assert [name for name, _, _ in rates] == [
        *("gemm 16", "gemm 256", "conv 3x3", "conv 1x1", "depthwise 3x3", "training step", "triad"),
    ]
    for _, one, _ in rates:
        assert len(one.samples) == host_operations.REPETITIONS >= 9
        assert one.median > 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Measured) == found
    assert found.triad_mib == 0.25
    assert found.blas


def test_of_noisy_rounds_the_calmest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def spans(noisy: bool) -> list[float]:
        return [0.1 * (1 + noisy * (at % 2)) for at in range(host_operations.REPETITIONS)]

    taken = itertools.chain([0.1], spans(True), spans(True), spans(False), itertools.repeat(0.5))
    readings = itertools.chain.from_iterable((0.0, span) for span in taken)
    monkeypatch.setattr(host_operations.time, "thread_time", lambda: next(readings))
    found = host_operations.rate(lambda: None, work=3.0)
    assert found.cv == 0
    assert found.median == pytest.approx(30.0 * host_operations._CALLS)


def test_the_triad_is_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, text in (("index0", "48K"), ("index3", "491520K"), ("index4", "none"), ("index2", "2097152")):
        (tmp_path / index).mkdir()
        (tmp_path / index / "size").write_text(f"{text}\n")
    monkeypatch.setattr(host_operations.os, "sysconf", lambda name: 0)
    assert host_operations.last_level_cache_mib(tmp_path) == 480.0
    assert host_operations.last_level_cache_mib(tmp_path / "none") == 0.0
    assert host_operations._triad_mib(0.0) == host_operations.TRIAD_MIN_MIB
    assert host_operations._triad_mib(1e9) < 1e9


def test_a_measuring_process_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration.sys, "executable", "/bin/false")
    with pytest.raises(RunError, match="calibration failed with exit code 1: no message"):
        calibration._measure_apart()
