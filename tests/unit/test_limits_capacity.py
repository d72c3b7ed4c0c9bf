"""Tests of the time scale, of stolen time, and of calibration."""

from __future__ import annotations

import itertools
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from edgefl.errors import ConfigError, RunError
from edgefl.files import cache_folder
from edgefl.host import calibration, capacity, code_operations, host_operations
from edgefl.host.calibration import (
    Calibration,
    Measured,
    Rate,
    calibrate,
    calibrate_code,
    stored_calibration,
)
from edgefl.host.capacity import Burst, Demand, StealMeter, UsageMeter, choose_time_scale
from edgefl.kernels import cuda_library
from edgefl.processes import usable_cores
from edgefl.run.hosting import ThisHost

HALF = "at most 50% of 2 is allowed"


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 100)), max_size=50), st.integers(1, 64))
def test_an_automatic_scale_always_fits(demands: list[tuple[float, float]], cores: int) -> None:
    chosen = choose_time_scale([Demand(*d) for d in demands], cores=cores)
    assert chosen.value >= 1
    stretch = 1.0 if chosen.value > 1 else capacity.MIN_STRETCH
    assert chosen.load <= capacity.TARGET_LOAD * stretch * (1 + 1e-9)
    assert chosen.client_share <= capacity.CLIENT_SHARE * (1 + 1e-9)
    assert chosen.verdict == "fits"
    if chosen.value > 1.2:
        tighter = choose_time_scale([Demand(*d) for d in demands], cores=cores, scale=chosen.value / 1.2)
        assert tighter.verdict != "fits"


def test_a_given_scale_is_kept_and_judged() -> None:
    fleet = [Demand(0.1, 1.0)] * 12
    assert choose_time_scale(fleet, cores=2, scale=2).verdict == "fits"
    assert choose_time_scale(fleet, cores=2, scale=1).verdict == "tight"
    overloaded = choose_time_scale(fleet, cores=2, scale=0.5)
    assert (overloaded.value, overloaded.verdict) == (0.5, "overloaded")
    assert overloaded.load == pytest.approx(1.2)
    assert "INVALID" in overloaded.why


def test_a_client_that_needs_nearly_a_whole_core_does_not_overload_a_larger_host() -> None:
    """Regression: the first output and the live verdict said INVALID, although the run could end as VALID."""
    assert choose_time_scale([Demand(0.95, 1.0)], cores=4, scale=1).verdict == "tight"
    assert choose_time_scale([Demand(1.2, 1.0)], cores=4, scale=1).verdict == "overloaded"
    assert choose_time_scale([Demand(0.95, 1.0)], cores=1, scale=1).verdict == "overloaded"


def test_load_counts_only_active_clients() -> None:
    fleet = [Demand(0.5, 1.0)] * 4 + [Demand(0.1, 1.0)] * 100
    assert choose_time_scale(fleet, cores=2, active=4).load == pytest.approx(0.5)


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf])
def test_a_scale_must_be_a_number_above_0(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"clock\.time_scale: got"):
        choose_time_scale([], cores=1, scale=scale)


def test_trips_without_duration_and_wrong_numbers_of_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="virtual"):
        choose_time_scale([Demand(0.1, 0.0)], cores=1)
    for cores in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="cores must be a finite number above 0"):
            choose_time_scale([], cores=cores)


def test_half_a_core_needs_twice_the_scale() -> None:
    fleet = [Demand(0.1, 1.0)] * 12
    assert choose_time_scale(fleet, cores=0.5).value == 2 * choose_time_scale(fleet, cores=1).value
    alone = [Demand(0.35, 1.0, Burst(0.3, 0.0, 1.0))]
    assert choose_time_scale(alone, cores=0.5).value == 2 * choose_time_scale(alone, cores=1).value


WIFI = Demand(0.0031, 0.0509, Burst(0.0011, 0.0253, 0.0003))
"""Demand for a small model. The scale is limited by the total demand of 60 clients, not by their training,
which takes 0.3 ms."""
SERVED = Demand(0.0021, 0.1, Burst(0.0001, 0.05, 0.001))
TRAINS = Demand(0.1, 1.0, Burst(0.1, 0.1, 0.8))
APART = [Demand(0.1, 1.0, Burst(0.1, begin, 0.4)) for begin in (0.0, 0.5)]
SERVER = "for rounds of 60 clients, which the server takes 18.0 ms to answer, and trips of 100 ms"
AT_FIRST = {"together": "at first"}
"""Clients start together, and so train at the same moment, only at the start of the run."""
ALWAYS = {"together": "always"}
"""Clients start together in every round, and wait for the server, which answers them one after another."""


@pytest.mark.parametrize(
    ("demands", "options", "value", "why"),
    [
        ([Demand(1.4, 1.0)], {"cores": 64}, 2.0, ""),  # one client cannot use two cores
        ([WIFI] * 60, AT_FIRST, 3.7, "3.7 was chosen for a load of at most 50%: the fleet needs 3.65 cores"),
        ([WIFI] * 10, AT_FIRST, 1.0, ""),
        ([TRAINS] * 16, AT_FIRST, 2.0, "at the same moment and then need 2.00 cores"),
        ([TRAINS] * 16, {}, 1.6, ""),
        (APART * 4, AT_FIRST, 1.0, ""),
        ([Demand(0.9, 1.0)], AT_FIRST, 1.3, "one client, which needs 90% of a core"),
        ([Demand(0.01, 1.0, Burst(0.01, 0.5, 0.02))] * 12, AT_FIRST, 1.0, "time_scale 1 was chosen: "),
        ([SERVED] * 60, AT_FIRST, 1.3, ""),
        ([SERVED] * 60, {**ALWAYS, "active": 30}, 3.0, ""),
    ],
)
def test_the_scale_is_the_smallest_that_suffices_and_its_rule_is_named(
    demands: list[Demand], options: dict[str, Any], value: float, why: str
) -> None:
    chosen = choose_time_scale(demands, **{"cores": 2, **options})
    assert chosen.value == value
    assert why in chosen.why
    assert chosen.verdict == "fits"


@pytest.mark.parametrize(
    ("demands", "options", "line"),
    [
        ([], {}, "1 was chosen: real time; 0.0 0.0"),
        (
            [Demand(0.07, 1.0)] * 16,
            {},
            "1 was chosen: real time, since only scales of 1.15 or more are applied for a load of at most "
            "50%: the fleet needs 1.12 cores at scale 1; 56.0 7.0",
        ),
        (
            [Demand(0.08, 1.0)] * 16,
            {},
            "1.3 was chosen for a load of at most 50%: the fleet needs 1.28 cores at scale 1; 49.2 6.2",
        ),
        (
            [Demand(0.01, 1.0, Burst(0.01, 0.97, 0.02))] * 12,
            AT_FIRST,
            "4 was chosen for clients that train at the same moment and then need 4.00 cores at scale 1 "
            f"({HALF}); 1.5 0.2",
        ),
        (
            [Demand(0.9, 1.0)],
            {},
            "1.3 was chosen for one client, which needs 90% of a core at scale 1 (at most 70% is allowed); "
            "34.6 69.2",
        ),
        (
            [Demand(0.1, 1.0, Burst(0.1, 0.1, 0.1))],
            {},
            "3.4 was chosen for one client's training, which needs 100% of a core at scale 1 (at most 30% "
            "is allowed); 1.5 2.9",
        ),
        (
            [SERVED] * 60,
            ALWAYS,
            f"6 was chosen {SERVER}: that is 18.0% of a trip (at most 3% is allowed); 10.5 0.3",
        ),
        ([Demand(0.1, 1.0)], {"scale": 2.0}, "2 was given; 2.5 5.0"),
    ],
)
def test_the_line_has_rule_load_and_share(demands: list[Demand], options: dict[str, Any], line: str) -> None:
    chosen = choose_time_scale(demands, **{"cores": 2, **options})
    rule, load, share = re.split(r"; (\S+) (\S+)$", line)[:3]
    assert (chosen.value, chosen.verdict) == (float(rule.split()[0]), "fits")
    assert chosen.why == (
        f"time_scale {rule}; over whole trips the fleet then uses {load}% of the host's 2 cores, "
        f"and its most demanding client {share}% of a core"
    )
    assert "of the host's 1 core, and its" in choose_time_scale(demands, cores=1, scale=1.0).why


@pytest.mark.parametrize(("quota", "cores"), [(0.25, 0.25), (1000.0, usable_cores()), (None, usable_cores())])
def test_the_cores_of_the_host_are_limited_by_its_quota(
    quota: float | None, cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "cpu_quota", lambda: quota)
    assert capacity.capacity_cores() == cores


def test_a_quota_limits_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is a container that may use one and a half of eight cores."""
    monkeypatch.setattr(capacity, "usable_cores", lambda: 8)
    monkeypatch.setattr(capacity, "cpu_quota", lambda: 1.5)
    assert ThisHost().carries() == 2


def test_the_host_has_a_name_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert capacity.host().cpu
    assert capacity.host().cores == 3


def test_an_arm_processor_without_a_name_is_identified_by_its_part_number(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nCPU part\t: 0xd0c\n\nprocessor\t: 1\nCPU part\t: 0xd0c\n")
    assert capacity.host(file).cpu.endswith(", CPU part 0xd0c")
    file.write_text(f"{file.read_text()}\nModel\t: A Board\n")
    assert capacity.host(file).cpu == "A Board"


class Times(NamedTuple):
    """CPU times in s, as returned by psutil. ``user`` includes ``guest``."""

    user: float
    steal: float
    nice: float = 1.0
    system: float = 2.0
    idle: float = 99.0
    iowait: float = 7.0
    irq: float = 3.0
    softirq: float = 4.0
    guest: float = 50.0
    guest_nice: float = 0.0


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The CPU times that the system will return next, one item per reading."""
    coming: list[object] = []
    monkeypatch.setattr(capacity.psutil, "cpu_times", lambda: coming.pop(0))
    return coming


def test_the_stolen_share_counts_all_time_since_the_start(times: list[object]) -> None:
    times += [Times(100, 100), Times(100, 100), Times(150, 120)._replace(idle=129.0, guest=90.0)]
    meter = StealMeter()
    assert meter.share() == 0.0
    assert meter.share() == pytest.approx(0.2)


def test_the_stolen_share_is_none_if_the_system_does_not_report_it(times: list[object]) -> None:
    times += [object(), object()]
    assert StealMeter().share() is None


@pytest.mark.parametrize(("idle_s", "used"), [(0.0, 0.2), (1.0, 0.15)])
def test_usage_is_split_between_the_run_and_other_processes(
    idle_s: float, used: float, times: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "usable_cores", lambda: 2)
    monkeypatch.setattr(capacity.time, "monotonic", iter([0.0, 10.0]).__next__)
    monkeypatch.setattr(capacity, "_own_cpu_s", iter([1.0, 5.0]).__next__)
    times += [Times(100, 100), Times(116, 900)._replace(idle=500.0, iowait=70.0)]
    found = UsageMeter().usage(idle_s)
    assert found["used"] == pytest.approx(used)  # 4 or 3 of 20 core seconds
    assert found["others"] == pytest.approx(0.6)  # 12 of 20
    assert (found["steal"], found["throttled"]) == (None, None)  # not measured yet


@pytest.mark.parametrize(
    ("usable", "listed", "user"), [({1, 2}, 3, 50.0), ({0, 1, 2}, 3, 9.0), ({1, 2}, 2, 9.0), ({1, 3}, 3, 9.0)]
)
def test_only_work_on_the_usable_cores_counts(
    usable: set[int], listed: int, user: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = [Times(user, steal=0) for user in (10, 20, 30)][:listed]
    monkeypatch.setattr(capacity.os, "sysconf", lambda _: 3)
    monkeypatch.setattr(
        capacity.psutil, "cpu_times", lambda percpu=False: each if percpu else Times(9, steal=0)
    )
    assert capacity._cpu_times(usable).user == user


def rate(median: float = 50.0, cv: float = 0.01) -> Rate:
    return Rate(median=median, cv=cv, samples=(median,) * 9)


def measured(cv: float = 0.01) -> Measured:
    return Measured(
        gemm_gflops={"64": rate(40.0, cv), "256": rate(80.0)},
        conv_gflops={"3x3": rate(60.0), "1x1": rate(70.0)}, depthwise_gflops=rate(10.0),
        train_gflops=rate(30.0), triad_gbytes_per_s=rate(9.0, cv), triad_mib=64.0, cache_mib=8.0, blas="mkl",
    )  # fmt: skip


def printed(cv: float = 0.01) -> bytes:
    """Return the JSON that the measuring process prints."""
    return msgspec.json.encode(measured(cv))


def made(at_unix_s: float) -> Calibration:
    fingerprint = calibration.fingerprint()
    return Calibration(
        fingerprint=fingerprint, cpu="x", cores=2, library="y", at_unix_s=at_unix_s, measured=measured()
    )


def test_a_calibration_is_measured_once_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Mock(side_effect=printed)
    monkeypatch.setattr(calibration, "_measure_apart", measure)
    assert stored_calibration(tmp_path) is None
    first = calibrate(folder=tmp_path)
    assert calibrate(folder=tmp_path) == first == stored_calibration(tmp_path)
    assert measure.call_count == 1
    calibrate(force=True, folder=tmp_path)
    assert measure.call_count == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_an_old_or_damaged_calibration_is_remeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_measure_apart", printed)
    path = tmp_path / f"calibration-{calibration.fingerprint()}.json"
    old = made(at_unix_s=time.time() - calibration.EXPIRES_S - 1)
    path.write_bytes(msgspec.json.encode(old))
    assert stored_calibration(tmp_path) is None
    assert calibrate(folder=tmp_path).at_unix_s > old.at_unix_s
    wrong = '{"fingerprint": "x", "cpu": "x", "cores": 2, "gemm_gflops": {}}'
    for broken in ("{", "[]", wrong, '{"fingerprint": "\udcff"}'):
        path.write_bytes(broken.encode(errors="surrogateescape"))
        assert stored_calibration(tmp_path) is None
    assert calibrate(folder=tmp_path).measured == measured()
    assert made(at_unix_s=time.time() + 3600).expired(time.time())


def test_only_an_old_rate_of_code_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This test measures the real program. Mutant: `calibrate` is used, which keeps a rate for a week."""
    wrong = Rate(median=1.0, cv=0.0, samples=(1.0,))
    code = {"interpreter": wrong, "integer": wrong}
    old = replace(made(time.time() - calibration.RECENT_S - 1), measured=replace(measured(), code=code))
    path = tmp_path / f"calibration-{calibration.fingerprint()}.json"
    path.write_bytes(msgspec.json.encode(old))
    found = calibrate_code("interpreter", folder=tmp_path)
    assert found.measured.code["interpreter"].median > 1000
    assert found == stored_calibration(tmp_path) == calibrate_code("interpreter", folder=tmp_path)
    assert replace(found.measured, code=code) == old.measured
    assert found.measured.code["integer"] == wrong
    young = replace(old, at_unix_s=time.time())
    path.write_bytes(msgspec.json.encode(young))
    assert calibrate_code("integer", folder=tmp_path) == young


@pytest.mark.parametrize("installed", [False, True])
def test_a_missing_rate_is_measured_once_the_c_extension_is_installed(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Rate(median=2.0, cv=0.0, samples=(2.0,))
    monkeypatch.setattr(calibration, "find_spec", lambda _: object() if installed else None)
    monkeypatch.setattr(calibration, "_measure_apart", lambda *_: msgspec.json.encode(new))
    path = tmp_path / f"calibration-{calibration.fingerprint()}.json"
    path.write_bytes(msgspec.json.encode(replace(made(time.time()), measured=replace(measured(), code={}))))
    found = calibrate_code("integer", folder=tmp_path).measured.code
    assert found == ({"integer": new} if installed else {})


def test_the_fingerprint_depends_on_version_cpu_and_library(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(calibration, "_measure_apart", lambda: printed(cv=0.11))
    message = r"too noisy now.*gemm 64 11%, triad 11%; allowed: 10%.*stop other"
    with pytest.raises(RunError, match=message) as caught:
        calibrate(folder=tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_folder_is_xdgs_or_in_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "edgefl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "edgefl"


def test_measuring_gives_nine_samples_of_each_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_operations, "_REPETITION_S", 1e-4)
    monkeypatch.setattr(host_operations, "ROUNDS", 1)
    monkeypatch.setattr(host_operations, "_CALLS", 1)
    monkeypatch.setattr(host_operations, "CODE_S", 0.001)
    monkeypatch.setattr(code_operations, "PYTHON_STEPS", 20)
    few = {name: max(1, amount // 100) for name, amount in code_operations.AMOUNTS.items()}
    monkeypatch.setattr(code_operations, "AMOUNTS", few)
    found = host_operations.measure(sizes=(16, 256), triad_mib=0.25)
    rates = list(found.rates())
    assert [name for name, _, _ in rates] == [
        *("gemm 16", "gemm 256", "conv 3x3", "conv 1x1", "depthwise 3x3", "training step", "triad")
    ]
    for _, one, _ in rates:
        assert len(one.samples) == host_operations.REPETITIONS >= 9
        assert one.median > 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Measured) == found
    assert found.triad_mib == 0.25
    assert found.blas


def readings_of(*spans: Iterable[float]) -> Iterator[float]:
    """Return a clock's readings before and after each of these spans."""
    return (reading for span in itertools.chain(*spans) for reading in (0.0, span))


def test_the_least_noisy_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def spans(noisy: bool) -> list[float]:
        return [0.1 * (1 + noisy * (at % 2)) for at in range(host_operations.REPETITIONS)]

    readings = readings_of([0.1], spans(True), spans(True), spans(False), itertools.repeat(0.5))
    monkeypatch.setattr(host_operations.time, "thread_time", lambda: next(readings))
    found = host_operations.rate(lambda: None, work=3.0)
    assert found.cv == 0
    assert found.median == pytest.approx(30.0 * host_operations._CALLS)


def test_a_programs_rate_is_the_median_over_fast_and_slow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round has half the speed, but little noise. Mutant: `rate` is used, which accepts that
    round."""
    readings = readings_of([0.1], [0.2] * host_operations.REPETITIONS, itertools.repeat(0.1))
    monkeypatch.setattr(host_operations.time, "thread_time", lambda: next(readings))
    found = host_operations.usual_rate(lambda: None, work=1.0)
    rate = host_operations._CALLS / 0.1
    assert found.median == pytest.approx(rate)
    assert sorted(set(found.samples)) == pytest.approx([rate / 2, rate])
    assert found.cv > 0.2


def test_a_slow_step_is_repeated_only_as_often_as_necessary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the number of rounds is fixed, which takes minutes."""
    readings = readings_of([1.0], [3.0] * host_operations.REPETITIONS)
    monkeypatch.setattr(host_operations.time, "thread_time", lambda: next(readings))
    assert len(host_operations.usual_rate(lambda: None, work=1.0).samples) == host_operations.REPETITIONS


def test_the_triad_is_larger_than_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, text in (("index0", "48K"), ("index3", "491520K"), ("index4", "none"), ("index2", "2097152")):
        (tmp_path / index).mkdir()
        (tmp_path / index / "size").write_text(f"{text}\n")
    monkeypatch.setattr(host_operations.os, "sysconf", lambda name: 0)
    assert host_operations.last_level_cache_mib(tmp_path) == 480.0
    assert host_operations.last_level_cache_mib(tmp_path / "none") == 0.0
    assert host_operations._triad_mib(0.0) == host_operations.TRIAD_MIN_MIB
    assert host_operations._triad_mib(1e9) < 1e9


def test_the_available_memory_is_at_most_the_limit_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "memory_limit_bytes", lambda: None)
    assert capacity.available_bytes() > 1 << 20
    monkeypatch.setattr(capacity, "memory_limit_bytes", lambda: 1 << 20)
    assert capacity.available_bytes() == 1 << 20
    assert host_operations._triad_mib(1e9) == host_operations.TRIAD_MIN_MIB


def test_an_error_of_the_measuring_process_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RunError, match="calibration failed with exit code 1: no message"):
        calibration._measure_apart()


def test_modules_of_the_current_folder_are_not_those_of_the_measuring_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = Mock(return_value=Mock(returncode=0, stdout=b"{}"))
    monkeypatch.setattr(calibration.subprocess, "run", ran)
    assert calibration._measure_apart() == b"{}"
    assert "-P" in ran.call_args.args[0]


def test_without_a_home_folder_nothing_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("EDGEFL_CUDA_LIBRARY", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    monkeypatch.setattr(calibration, "_measure_apart", printed)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^no home folder is known: set HOME or XDG_CACHE_HOME$"):
        cache_folder()
    assert stored_calibration() is None
    assert calibrate().measured == measured()
    assert stored_calibration() is None
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(cuda_library, "DEVICE_NODES", (str(tmp_path),))
    assert str(cuda_library.problem()).startswith("no home folder is known: set HOME or XDG_CACHE_HOME")


def test_a_calibration_that_takes_too_long_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Mock(side_effect=calibration.subprocess.TimeoutExpired("python", 300))
    monkeypatch.setattr(calibration.subprocess, "run", late)
    message = "^calibration failed: it took more than 300 s; stop other work and try again$"
    with pytest.raises(RunError, match=message):
        calibration._measure_apart()
