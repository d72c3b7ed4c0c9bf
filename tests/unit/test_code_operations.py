"""This host's speed in each class of code: timed programs, their units, and devices' relative speeds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from edgefl.devices import load_device
from edgefl.devices.code import CLASSES, CodeCluster, clusters_of, host_rate, relative, throughput
from edgefl.errors import ConfigError
from edgefl.host import code_operations
from edgefl.host.calibration import Calibration, Measured, Rate
from edgefl.host.code_operations import PROGRAMS, SCALE_SPREADS, program, python_bodies, simd

PI_5 = [CodeCluster("Cortex-A76", 2400.0, 4)]


def calibrated(cv: float = 0.0, **code: float) -> Calibration:
    rate = Rate(median=50.0, cv=0.0, samples=(50.0,))
    measured = Measured(
        gemm_gflops={}, conv_gflops={}, depthwise_gflops=rate, train_gflops=rate, triad_gbytes_per_s=rate,
        triad_mib=1.0, cache_mib=1.0, blas="",
        code={name: Rate(median=median, cv=cv, samples=(median,)) for name, median in code.items()},
    )  # fmt: skip
    return Calibration(fingerprint="", cpu="", cores=1, library="", at_unix_s=0.0, measured=measured)


def test_the_bodies_move_alike_in_c_and_in_python() -> None:
    programs = pytest.importorskip("edgefl.host._code")
    for steps in (1, 500):
        assert abs(programs.floats(steps) - int(1e6 * python_bodies(steps)) % 2**64) <= 1
    assert programs.floats(500) != programs.floats(501)


@pytest.mark.parametrize("name", ["integer", "crypto", "floats"])
def test_equal_work_has_an_equal_result_and_more_work_another(name: str) -> None:
    run = getattr(pytest.importorskip("edgefl.host._code"), name)
    assert run(32_000) == run(32_000) != run(64_000)
    with pytest.raises(ValueError, match=r"must be above 0 \(got 0\)"):
        run(0)


def test_the_match_finder_finds_matches() -> None:
    """A match has 4 to 32 bytes. If the trees stayed empty, the mean length would be 1."""
    programs = pytest.importorskip("edgefl.host._code")
    assert 4 < programs.memory(20_000) / 20_000 <= 32


def test_the_search_finds_all_primes() -> None:
    """The search starts at 3, so it finds 1228 of the 1229 primes below 10,000."""
    programs = pytest.importorskip("edgefl.host._code")
    assert [programs.division(searches) for searches in (1, 3)] == [1228, 3 * 1228]


def test_aes_instructions_are_detected() -> None:
    programs = pytest.importorskip("edgefl.host._code")
    flags = Path("/proc/cpuinfo").read_text().split()
    assert programs.aes() == ("aes" in flags)


def test_each_class_has_a_program_whose_work_is_in_published_units() -> None:
    pytest.importorskip("edgefl.host._code")
    assert {*PROGRAMS, "simd"} == set(CLASSES) == SCALE_SPREADS.keys()
    found = {name: program(name, copy_mib=2.0) for name in PROGRAMS}
    work = {name: amount for name, (_, amount) in found.items()}
    assert work["copy"] == pytest.approx(2.097152)  # MB of one copy
    assert work["interpreter"] == code_operations.PYTHON_STEPS
    assert work["float"] == code_operations.AMOUNTS["float"]
    assert work["crypto"] == pytest.approx(10 * 0.94)
    assert work["integer"] == pytest.approx(2e6 * code_operations.SCALES["integer"])
    for run, _ in found.values():
        run()


def test_simd_is_mobilenets_mix_of_convolutions() -> None:
    pointwise, depthwise = (Rate(median=m, cv=c, samples=(m,) * 9) for m, c in ((60.0, 0.01), (2.0, 0.04)))
    found = simd(pointwise, depthwise)
    assert found.median == pytest.approx(1 / (0.97 / 60 + 0.03 / 2))
    assert (found.cv, len(found.samples)) == (0.04, 9)


def test_relative_speed_is_the_devices_rate_divided_by_the_hosts() -> None:
    once, twice = (relative(PI_5, "integer", 1, calibrated(integer=mips)) for mips in (3000.0, 6000.0))
    assert once.value == pytest.approx(throughput(PI_5, "integer", 1).value / 3000)
    assert once.value == pytest.approx(2 * twice.value)
    assert relative(PI_5, "integer", 4, calibrated(integer=3000.0)).value > 3 * once.value


def test_the_interval_combines_the_spreads_of_device_and_scale_and_the_noise() -> None:
    device = math.log(throughput(PI_5, "memory", 1).spread)
    scale = math.log(SCALE_SPREADS["memory"])
    found = relative(PI_5, "memory", 1, calibrated(cv=0.05, memory=3000.0))
    assert math.log(found.spread) == pytest.approx(math.hypot(device, scale, 1.645 * 0.05))


def test_without_the_c_extension_the_hosts_rate_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"this host's rate of integer code is unknown: .*C compiler"):
        host_rate(calibrated(copy=5000.0), "integer")


def test_python_on_a_raspberry_pi_4_is_three_to_six_times_slower_than_on_zen_3() -> None:
    """A Zen 3 core (2021) makes 160,000 steps/s of the five-body problem in Python 3.11."""
    found = relative(clusters_of(load_device("pi-4")), "interpreter", 1, calibrated(interpreter=160_000.0))
    assert 1 / 6 < found.value < 1 / 3
