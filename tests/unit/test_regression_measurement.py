"""From shots of CPU time to the device's seconds, and when they are not believed."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from regression_samples import TRIAL, measured, noisy, repetition

from edgefl.devices import load_device, load_network
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import ProfileError
from edgefl.regression import measurement
from edgefl.regression.measurement import profile_sha256


def test_device_time_is_cpu_time_over_the_references_times_what_that_takes_the_device() -> None:
    # A call takes 6/5 of the shot of five units; a unit takes the device 1/1750 s.
    one = measured([repetition(cpu_s=0.0012)] * 9)
    assert one.cpu_s == pytest.approx([6 / 1750] * 9)
    assert one.seconds == pytest.approx([6 / 1750] * 9)
    assert one.host_cpu_s == pytest.approx([0.0012] * 9)
    assert one.reference_cpu_s == pytest.approx([0.0002] * 9)


@pytest.mark.parametrize("slower", [1.0, 2.0, 3.1])
def test_a_host_that_is_slower_for_both_gives_the_same_figures(slower: float) -> None:
    quiet, busy = repetition(0.0012, 0.001), repetition(0.0012 * slower, 0.001 * slower)
    assert measured([busy] * 9).seconds == pytest.approx(measured([quiet] * 9).seconds)


def test_short_calls_are_divided_by_how_many_are_in_a_shot() -> None:
    trial = msgspec.structs.replace(TRIAL, shots=msgspec.structs.replace(TRIAL.shots, calls=3))
    assert measured([repetition(0.003)] * 9, trial=trial).host_cpu_s == pytest.approx([0.001] * 9)


def test_the_model_clock_is_the_time_where_it_is_the_larger() -> None:
    one = measured([repetition(cpu_s=0.0004)] * 9)  # 2/1750 s by the CPU clock
    assert one.model_s == pytest.approx(4 / 1750)
    assert one.seconds == pytest.approx([4 / 1750] * 9)
    assert one.cpu_s == pytest.approx([2 / 1750] * 9)


def test_transfers_and_being_blocked_are_added() -> None:
    one = measured([repetition(0.001, blocked_s=0.25, radio_s=2.0, sent_bytes=1 << 20)] * 9)
    assert one.seconds == pytest.approx([5 / 1750 + 2.25] * 9)
    assert one.cpu_s == pytest.approx([5 / 1750 + 0.25] * 9)  # the link is no business of the code's
    assert one.sent_mib == [1.0] * 9


def test_half_a_devices_rate_is_twice_the_time() -> None:
    fast, slow = measured(), measured(device="moto-g4")
    rates = fast.device.train_flop_per_s / slow.device.train_flop_per_s
    assert slow.seconds == pytest.approx([rates * s for s in fast.seconds])


def test_joules_are_those_of_computing_and_of_the_radio() -> None:
    phone = load_device("pixel-4")
    assert phone.battery is not None
    phone = msgspec.structs.replace(phone, battery=msgspec.structs.replace(phone.battery, radio_ma=100.0))
    computing = measured(device=phone).joules[0]
    sending = measured([repetition(radio_s=2.0)] * 9, device=phone).joules[0]
    assert computing > 0
    idle_ma = phone.battery.idle_ma or 0.0
    assert sending - computing == pytest.approx(2.0 * (100.0 + idle_ma) / 1e3 * 3.85)
    with pytest.raises(ProfileError, match=r"has no \[battery\], so what it draws is not known"):
        _ = measured(device="pi-4").joules


def test_a_few_disturbed_shots_do_not_move_the_figure() -> None:
    calm = repetition()
    disturbed = msgspec.structs.replace(calm, cpu_s=[0.001, 0.001, 0.02, 0.05])
    assert measured([disturbed] * 9).cpu_s == pytest.approx(measured([calm] * 9).cpu_s)


def test_a_calm_measurement_is_believed() -> None:
    assert list(measured(noisy()).reasons()) == []


@pytest.mark.parametrize(
    ("one", "steal", "says"),
    [
        (repetition(), 0.021, "the hypervisor stole 2.1% of the time, at most 2% is allowed"),
        (repetition(waited=0.61), 0.0, "overloaded: the function waited for a core 61% of the time"),
    ],
)
def test_steal_and_overload_are_not_believed(one: measurement.Repetition, steal: float, says: str) -> None:
    (reason,) = measured([one] * 9, steal=steal).reasons()
    assert says in reason


def test_scattered_times_are_too_noisy() -> None:
    (reason,) = measured(noisy(spread=0.2)).reasons()
    assert reason.startswith("too noisy: the median time is known to ±")


def test_a_reference_that_varies_is_no_calibration() -> None:
    varying = [repetition(0.001 * f, 0.001 * f) for f in (1, 1, 1, 1, 2, 2, 2, 2, 3)]
    (reason,) = measured(varying).reasons()
    assert "the reference train-small varied by" in reason


def test_unknown_steal_is_no_reason() -> None:
    assert list(measured(noisy(), steal=None).reasons()) == []


def test_the_pace_is_that_of_the_paced_calls() -> None:
    assert measured([repetition(achieved_s=0.0101)] * 9).pace == pytest.approx([1.01] * 9)
    assert measured(time_scale=0.0).pace == []


def test_a_profiles_hash_is_of_its_figures() -> None:
    device, network = load_device("pixel-3a"), load_network("lte")
    assert profile_sha256(device, network) == profile_sha256(load_device("pixel-3a"), load_network("lte"))
    assert len({profile_sha256(device, n) for n in (network, load_network("3g"), None)}) == 3
    other = msgspec.structs.replace(device, year=1999)
    assert profile_sha256(other, network) != profile_sha256(device, network)


def test_a_trace_counts_by_what_is_in_it_and_not_by_where_it_lies(tmp_path: Path) -> None:
    device, shipped = load_device("pixel-3a"), load_network("lte-varying")
    shutil.copytree(bundled_folder() / "networks", tmp_path / "networks")
    file = tmp_path / "networks" / "lte-varying.toml"
    assert profile_sha256(device, load_network(file)) == profile_sha256(device, shipped)
    trace = tmp_path / "networks" / "traces" / "lte-varying-up.trace"
    trace.write_text(f"0\n{trace.read_text()}")
    assert profile_sha256(device, load_network(file)) != profile_sha256(device, shipped)
