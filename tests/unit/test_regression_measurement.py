"""Tests of the device's time as computed from CPU times, its bounds, and reasons to doubt a measurement."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from regression_samples import TRIAL, draws, measured, noisy, repetition

from edgefl.devices import load_device, load_network
from edgefl.devices.energy import draw_of
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import Invalid, NotMet, OutOfDeviceMemory, ProfileError
from edgefl.regression import measure as measuring
from edgefl.regression.measure import Tell, TimeLimit, count, measure
from edgefl.regression.measurement import Interval, Measurement, median_interval, profile_sha256
from edgefl.regression.process import Failure, PrepareRequest, RepeatRequest, Repetition, TrialRun

RUNS = 400


def test_the_90_percent_interval_holds_the_true_median_in_about_90_percent() -> None:
    intervals = [median_interval(draws(run)) for run in range(RUNS)]
    assert 0.85 * RUNS <= sum(one.low <= 1.0 <= one.high for one in intervals) <= 0.96 * RUNS
    assert sum(one.high >= 1.0 for one in intervals) >= 0.92 * RUNS  # the bound that is compared with budgets
    assert intervals[3] == median_interval(draws(3))


def test_a_width_without_a_median_is_infinite() -> None:
    assert [Interval(0.0, 0.0, high).half_width for high in (1.0, 0.0)] == [math.inf, 0.0]


def test_device_time_is_that_of_the_reference_times_the_ratio_of_cpu_times() -> None:
    # A call takes 6/5 of the time of five units of the reference. The device needs 1/1750 s for one unit.
    one = measured([repetition(cpu_s=0.0012)] * 9)
    assert one.cpu_s == pytest.approx([6 / 1750] * 9)
    assert one.seconds == pytest.approx([6 / 1750] * 9)
    assert one.host_cpu_s == pytest.approx([0.0012] * 9)
    assert one.reference_cpu_s == pytest.approx([0.0002] * 9)
    trial = msgspec.structs.replace(TRIAL, shots=msgspec.structs.replace(TRIAL.shots, calls=3))
    assert measured([repetition(0.003)] * 9, trial=trial).host_cpu_s == pytest.approx([0.001] * 9)


@pytest.mark.parametrize("slower", [1.0, 2.0, 3.1])
def test_a_host_that_is_slower_for_both_gives_the_same_figures(slower: float) -> None:
    quiet, busy = repetition(0.0012, 0.001), repetition(0.0012 * slower, 0.001 * slower)
    assert measured([busy] * 9).seconds == pytest.approx(measured([quiet] * 9).seconds)


@pytest.mark.parametrize(("rest", "expected"), [(0.0, 4.0), (0.5, 5.0), (1.0, 6.0)])
def test_time_of_torch_and_of_the_rest_are_added(rest: float, expected: float) -> None:
    """Mutant: the device's time is the larger of the two."""
    trial = msgspec.structs.replace(TRIAL, model_s=4 / 1750, rest=rest)
    # Converted to the device's speed, the CPU time is 2/1750 s.
    one = measured([repetition(cpu_s=0.0004, blocked_s=0.25)] * 9, trial=trial)
    assert one.seconds == pytest.approx([expected / 1750 + 0.25] * 9)
    assert one.cpu_s == pytest.approx([2 / 1750 + 0.25] * 9)


@pytest.mark.parametrize("slower", [1.0, 2.0, 3.1])
def test_the_rest_goes_by_its_own_program_in_the_same_repetition(slower: float) -> None:
    """A call uses 1 ms, half of it outside torch. Whatever the host's load, the device needs 1.5 ms for that
    half."""
    trial = msgspec.structs.replace(TRIAL, model_s=0.25, rest=0.5, rest_s=0.006)
    noisy = [0.002 * slower, 0.009 * slower]
    one = repetition(0.001 * slower, 0.0013 * slower, rest_cpu_s=noisy)
    assert measured([one] * 9, trial=trial).seconds == pytest.approx([0.25 + 0.0005 * 3] * 9)


def test_transfers_and_blocked_time_are_added() -> None:
    one = measured([repetition(0.001, blocked_s=0.25, radio_s=2.0, sent_bytes=1 << 20)] * 9)
    assert one.seconds == pytest.approx([5 / 1750 + 2.25] * 9)
    assert one.cpu_s == pytest.approx([5 / 1750 + 0.25] * 9)  # without the link
    assert one.sent_mib == [1.0] * 9


def test_joules_are_the_sum_of_computing_and_radio() -> None:
    device = load_device("pixel-4")
    device = msgspec.structs.replace(device, battery=msgspec.structs.replace(device.battery, radio_ma=100.0))
    computing = measured(device=device).joules[0]
    sending = measured([repetition(radio_s=2.0)] * 9, device=device).joules[0]
    assert computing > 0
    idle_ma = device.battery.idle_ma or 0.0
    assert sending - computing == pytest.approx(2.0 * (100.0 + idle_ma) / 1e3 * 3.85)
    with pytest.raises(ProfileError, match=r"has no \[battery\], so its power is unknown"):
        _ = measured(device="pi-4").joules


def test_torch_draws_the_power_of_all_cores_and_other_code_that_of_the_fastest() -> None:
    """The Pixel 4's fastest core draws 224 mA, three other cores 302 mA each, and four cores 85 mA each."""
    device = load_device("pixel-4")
    idle_w = (device.battery.idle_ma or 0.0) / 1e3 * device.voltage_v
    of_all = device.busy_w or 0.0
    one = repetition(0.001)
    torch_only = msgspec.structs.replace(TRIAL, model_s=0.25, rest=0.0)
    assert measured([one] * 9, trial=torch_only, device=device).joules[0] == pytest.approx(
        0.25 * (idle_w + of_all)
    )
    other = measured([one] * 9, trial=msgspec.structs.replace(TRIAL, model_s=0.0, rest=1.0), device=device)
    of_one = of_all * 223.89 / (223.89 + 3 * 302.04 + 4 * 85.05)
    assert other.joules[0] == pytest.approx(other.seconds[0] * (idle_w + of_one))


def test_sending_draws_the_power_of_uploads() -> None:
    draw = draw_of(load_device("pixel-4"), load_network("5g"))
    computing, sending = (
        measured([repetition(radio_s=radio_s)] * 9, device="pixel-4", network="5g").joules[0]
        for radio_s in (0.0, 2.0)
    )
    assert draw.upload_w != draw.download_w
    assert sending - computing == pytest.approx(2.0 * (draw.idle_w + draw.upload_w))


def test_a_few_disturbed_shots_do_not_move_the_figure() -> None:
    calm = repetition()
    disturbed = msgspec.structs.replace(calm, cpu_s=[0.001, 0.001, 0.02, 0.05])
    assert measured([disturbed] * 9).cpu_s == pytest.approx(measured([calm] * 9).cpu_s)


@pytest.mark.parametrize("steal", [0.0, None])
def test_a_calm_measurement_has_no_doubts_also_if_steal_is_unknown(steal: float | None) -> None:
    assert measured(noisy(), steal=steal).doubts == []


@pytest.mark.parametrize(
    ("repetitions", "steal", "message"),
    [
        ([repetition()] * 9, 0.021, "time stolen by the hypervisor 2.1%, at most 2% is allowed"),
        ([repetition(waited=0.61)] * 9, 0.0, "time that the function waited for a core 61.0%"),
        (noisy(spread=0.2), 0.0, "uncertainty of the median time after 15 repetitions "),
        (
            [repetition(0.001 * f, 0.001 * f) for f in (1, 1, 1, 1, 2, 2, 2, 2, 3)],
            0.0,
            "variation of the reference train-small ",
        ),
    ],
)
def test_a_disturbed_measurement_is_doubted(
    repetitions: list[Repetition], steal: float, message: str
) -> None:
    (reason,) = measured(repetitions, steal=steal).doubts
    assert message in reason


def test_the_pace_is_that_of_the_paced_calls() -> None:
    assert measured([repetition(achieved_s=0.0101)] * 9).pace == pytest.approx([1.01] * 9)
    assert measured(time_scale=0.0).pace == []


def test_a_profiles_hash_depends_on_all_its_figures() -> None:
    device, network = load_device("pixel-3a"), load_network("lte")
    assert profile_sha256(device, network) == profile_sha256(load_device("pixel-3a"), load_network("lte"))
    assert len({profile_sha256(device, n) for n in (network, load_network("3g"), None)}) == 3
    other = msgspec.structs.replace(device, year=1999)
    assert profile_sha256(other, network) != profile_sha256(device, network)
    slowed = load_device("paper-defedavg-slowdowns")  # the device that is measured is the median device
    assert profile_sha256(slowed, None) == profile_sha256(slowed.median(), None)


def test_a_profiles_hash_depends_on_a_traces_content_but_not_its_path(tmp_path: Path) -> None:
    device, shipped = load_device("pixel-3a"), load_network("lte-varying")
    shutil.copytree(bundled_folder() / "networks", tmp_path / "networks")
    file = tmp_path / "networks" / "lte-varying.toml"
    assert profile_sha256(device, load_network(file)) == profile_sha256(device, shipped)
    trace = tmp_path / "networks" / "traces" / "lte-varying-up.trace"
    trace.write_text(f"0\n{trace.read_text()}")
    assert profile_sha256(device, load_network(file)) != profile_sha256(device, shipped)


class Known:
    """A measuring process that returns these repetitions. By its own clock, each request takes one second."""

    def __init__(self, repetitions: list[Repetition]) -> None:
        self.repetitions, self.now_s = repetitions, 0.0
        self.asked: list[int] = []

    def ask(self, request: PrepareRequest | RepeatRequest) -> TrialRun | Repetition:
        self.now_s += 1.0
        if isinstance(request, PrepareRequest):
            return TRIAL
        self.asked.append(request.index)
        return self.repetitions[request.index]

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def nothing_stolen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report no stolen CPU time: if a hypervisor took some from this host, measurements would be repeated."""
    monkeypatch.setattr(measuring, "StealMeter", lambda: SimpleNamespace(share=lambda: 0.0))


def made(
    process: Any, limit_s: float | None = None, tell: Tell = lambda _: None, *, precise: bool = True
) -> Measurement:
    return measure(process, measured().plan._replace(precise=precise), TimeLimit(limit_s), tell)


@pytest.mark.parametrize(("spread", "asked"), [(0.0, 9), (0.035, 18), (0.1, 60)])
def test_repetitions_end_when_the_median_is_known(spread: float, asked: int) -> None:
    process = Known(noisy(spread=spread, count=60))
    assert len(made(process).repetitions) == asked


def test_nothing_is_repeated_for_a_time_that_nothing_asks_for() -> None:
    process = Known(noisy(spread=0.1, count=60))
    found = made(process, precise=False)
    assert found.doubts
    assert process.asked == [*range(9)]


@pytest.mark.parametrize(("stolen", "measurements"), [([], 1), ([0.5], 2), ([0.5, 0.5, 0.0], 2)])
def test_a_disturbed_measurement_is_made_again_once(
    stolen: list[float], measurements: int, monkeypatch: Any
) -> None:
    shares = iter([*stolen, 0.0])
    monkeypatch.setattr(measuring, "StealMeter", lambda: SimpleNamespace(share=lambda: next(shares)))
    process = Known([repetition()] * 9)
    found = made(process)
    assert process.asked == [*range(9)] * measurements
    assert bool(found.doubts) == (len(stolen) > 1)


@pytest.mark.parametrize(("limit_s", "asked"), [(None, 60), (61.0, 60), (21.0, 20), (10.0, 9)])
def test_the_time_of_a_test_is_limited(
    limit_s: float | None, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, texts = Known(noisy(spread=0.1, count=60)), list[str]()
    monkeypatch.setattr(measuring, "time", process)
    assert len(made(process, limit_s, texts.append).repetitions) == asked
    assert len(process.asked) >= asked
    assert limit_s is None or process.now_s <= limit_s or asked == 60
    least = "of at least 9 and at most 60"
    assert texts[:2] == [f"time on the device, repetition {k} {least}" for k in (1, 2)]
    assert len(texts) == asked


def test_too_few_repetitions_within_the_limit_are_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Known(noisy())
    monkeypatch.setattr(measuring, "time", process)
    with pytest.raises(Invalid, match="5 repetitions fit into the 6 s that --edgefl-limit allows; at least"):
        made(process, 6.0)
    assert process.asked == [*range(5)]


@pytest.mark.parametrize(("limit_s", "error", "why"), [
    (4.0, Invalid, "step on pixel-3a: not finished in the 4 s that --edgefl-limit allows"),
    (90.0, NotMet, "step on pixel-3a: not finished in 60 s; set a larger limit_s= in the mark"),
])  # fmt: skip
def test_a_function_that_takes_longer_than_the_limit_of_the_session_is_not_judged(
    limit_s: float, error: type[Exception], why: str
) -> None:
    late = SimpleNamespace(ask=lambda request: Failure("late", f"{request.limit_s:g}"))
    with pytest.raises(error) as raised:
        made(late, limit_s)
    assert str(raised.value) == why


def test_a_function_that_uses_up_the_hosts_memory_fails_on_a_device_without_a_limit() -> None:
    plan = measured().plan._replace(device=load_device("paper-defedavg"))
    process: Any = SimpleNamespace(ask=lambda request: Failure("memory", ""))
    with pytest.raises(OutOfDeviceMemory) as raised:
        measure(process, plan, TimeLimit())
    assert str(raised.value) == "out of memory on paper-defedavg: no memory was left"


def test_a_function_that_hangs_while_its_work_is_counted_names_the_limit_of_the_mark() -> None:
    process: Any = SimpleNamespace(ask=lambda request: Failure("late", f"{request.limit_s:g}"))
    with pytest.raises(NotMet) as raised:
        count(process, measured().plan)
    why = "not counted in 600 s, 10 times limit_s; set a larger limit_s= in the mark"
    assert str(raised.value) == f"step on pixel-3a: {why}"
