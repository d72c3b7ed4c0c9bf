"""Time scale, stolen time and calibration: the arithmetic, and when they refuse."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.emulation import calibration
from edgefl.emulation.calibration import Calibration, Rate, calibrate, stored_calibration
from edgefl.emulation.capacity import (
    CLIENT_SHARE,
    TARGET_LOAD,
    Demand,
    StealMeter,
    choose_time_scale,
    host,
    usable_cores,
)
from edgefl.errors import ConfigError, RunError


def test_auto_never_squeezes_time() -> None:
    chosen = choose_time_scale([Demand(0.01, 10.0)] * 3, cores=2)
    assert chosen.value == 1.0
    assert chosen.verdict == "fits"
    assert chosen.load == pytest.approx(0.0015)
    assert choose_time_scale([], cores=1).value == 1.0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 100)), max_size=50),
    st.integers(1, 64),
)
def test_auto_always_fits(demands: list[tuple[float, float]], cores: int) -> None:
    chosen = choose_time_scale([Demand(*d) for d in demands], cores=cores)
    assert chosen.value >= 1
    assert chosen.load <= TARGET_LOAD * (1 + 1e-9)
    assert chosen.client_share <= CLIENT_SHARE * (1 + 1e-9)
    assert chosen.verdict == "fits"
    if chosen.value > 1.2:
        tighter = choose_time_scale([Demand(*d) for d in demands], cores=cores, scale=chosen.value / 1.2)
        assert tighter.verdict != "fits"


def test_one_client_cannot_use_two_cores() -> None:
    chosen = choose_time_scale([Demand(1.4, 1.0)], cores=64)
    assert chosen.value == 2.0
    assert chosen.load < 0.02


def test_an_explicit_scale_is_judged_and_kept() -> None:
    fleet = [Demand(0.1, 1.0)] * 12
    assert choose_time_scale(fleet, cores=2, scale=2).verdict == "fits"
    assert choose_time_scale(fleet, cores=2, scale=1).verdict == "tight"
    overloaded = choose_time_scale(fleet, cores=2, scale=0.5)
    assert (overloaded.value, overloaded.verdict) == (0.5, "overloaded")
    assert overloaded.load == pytest.approx(1.2)
    assert "INVALID" in overloaded.why


def test_only_active_clients_count() -> None:
    fleet = [Demand(0.5, 1.0)] * 4 + [Demand(0.1, 1.0)] * 100
    assert choose_time_scale(fleet, cores=2, active=4).load == pytest.approx(0.5)


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf])
def test_a_scale_must_be_a_number_above_0(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"clock\.time_scale: got"):
        choose_time_scale([], cores=1, scale=scale)


def test_a_trip_that_takes_no_time_cannot_be_paced() -> None:
    with pytest.raises(ConfigError, match="virtual"):
        choose_time_scale([Demand(0.1, 0.0)], cores=1)
    with pytest.raises(ConfigError, match="cores must be at least 1"):
        choose_time_scale([], cores=0)


def test_the_host_has_a_name_and_cores() -> None:
    assert host().cpu
    assert host().cores == usable_cores() >= 1


def stat(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_stolen_share_is_of_all_time_since_the_start(tmp_path: Path) -> None:
    path = stat(tmp_path / "stat", "cpu  100 0 0 800 0 0 0 100 50 0\ncpu0 1 2 3\n")
    meter = StealMeter(path)
    assert meter.share() == 0.0
    stat(path, "cpu  150 0 0 830 0 0 0 120 90 0\n")
    assert meter.share() == pytest.approx(0.2)


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "intr 1 2 3 4 5 6 7 8\n", "cpu a b c d e f g h\n"])
def test_a_system_that_does_not_tell_gives_none(tmp_path: Path, text: str) -> None:
    assert StealMeter(stat(tmp_path / "stat", text)).share() is None
    assert StealMeter(tmp_path / "absent").share() is None


def made(cv: float = 0.01, at_unix_s: float | None = None) -> Calibration:
    rate = Rate(median=50.0, cv=cv, samples=(50.0,) * 9)
    return Calibration(
        fingerprint=calibration.fingerprint(),
        cpu="x",
        cores=2,
        library="numpy",
        at_unix_s=calibration.time.time() if at_unix_s is None else at_unix_s,
        gemm_gflops={"64": rate},
        triad_gbytes_per_s=rate,
    )


def test_a_calibration_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Calibration] = []

    def measure() -> Calibration:
        measured.append(made())
        return measured[-1]

    monkeypatch.setattr(calibration, "_measure_apart", measure)
    assert stored_calibration(tmp_path) is None
    first = calibrate(folder=tmp_path)
    assert calibrate(folder=tmp_path) == first == stored_calibration(tmp_path)
    assert len(measured) == 1
    calibrate(force=True, folder=tmp_path)
    assert len(measured) == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_an_expired_or_broken_calibration_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_measure_apart", made)
    path = tmp_path / f"calibration-{calibration.fingerprint()}.json"
    old = made(at_unix_s=calibration.time.time() - calibration.EXPIRES_S - 1)
    path.write_bytes(msgspec.json.encode(old))
    assert stored_calibration(tmp_path) is None
    assert calibrate(folder=tmp_path).at_unix_s > old.at_unix_s
    path.write_text("{")
    assert stored_calibration(tmp_path) is None
    assert calibrate(folder=tmp_path).cores == 2
    assert made(at_unix_s=calibration.time.time() + 3600).expired(calibration.time.time())


def test_a_noisy_host_is_refused_and_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_measure_apart", lambda: made(cv=0.11))
    with pytest.raises(RunError, match=r"too noisy now.*gemm 64 11%, triad 11%; allowed: 10%"):
        calibrate(folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.cache_folder() == tmp_path / "edgefl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration.cache_folder() == tmp_path / ".cache" / "edgefl"


def test_measuring_gives_nine_samples_of_each_rate() -> None:
    found = calibration.measure(sizes=(16,), triad_floats=4096)
    for rate in (*found.gemm_gflops.values(), found.triad_gbytes_per_s):
        assert len(rate.samples) == calibration.REPETITIONS >= 9
        assert rate.median > 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Calibration) == found


def test_the_numpy_triad_is_a_triad(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, triad = calibration._numpy_operations()
    product = gemm(8)()
    assert (product == 8).all()
    cells = dict(zip(triad(20_000).__code__.co_freevars, triad(20_000).__closure__ or (), strict=True))
    run = triad(20_000)
    run()
    out = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True))["out"].cell_contents
    assert set(cells) >= {"b", "c", "out"}
    assert (out == 4).all()
