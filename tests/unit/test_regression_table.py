"""The table at the end of a session, and what a JUnit file says."""

from __future__ import annotations

import json

import msgspec
import pytest
from regression_samples import entry

from edgefl.regression.table import WIDTH, ResultRow, lines, properties

PASSED = ResultRow(
    test="tests/test_step.py::test_step[pixel-3a]", function="step", device="pixel-3a", outcome="PASS",
    why="", seconds=2.0123, host_cpu_s=0.000312, peak_mib=118.25, sent_mib=0.0, joules=None, repetitions=15,
)  # fmt: skip
replace = msgspec.structs.replace


def test_a_device_is_a_line_below_its_test_measured_or_not() -> None:
    test = "tests/test_step.py::test_step[moto-g4]"
    failed = ResultRow(test=test, function="", device="moto-g4", outcome="FAIL", why="out of memory")
    assert list(lines([PASSED, replace(PASSED, device="moto-g4", test=test), failed])) == [
        "                         device  host CPU    MiB  sent MiB        J   n",
        "tests/test_step.py::test_step: step",
        "  pixel-3a               2.01 s    312 µs  118.2         0        –  15  PASS",
        "  moto-g4                2.01 s    312 µs  118.2         0        –  15  PASS",
        "tests/test_step.py::test_step",
        "  moto-g4                     –         –      –         –        –   –  FAIL",
        "    out of memory",
    ]


@pytest.mark.parametrize("seconds", [0.0, 1.22e-9, 3.11e-6, 0.0009996, 0.9996, 999.6, 123456.7])
def test_columns_do_not_run_together(seconds: float) -> None:
    row = replace(
        PASSED, seconds=seconds, host_cpu_s=seconds, peak_mib=123456.7, sent_mib=1.2345e-7, joules=1.2345e-5
    )
    figures = list(lines([row]))[2].split()
    time = figures[1:3]
    assert float(time[0]) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[time[1]] == pytest.approx(seconds, rel=0.01)
    assert figures == ["pixel-3a", *time, *time, "123457", "1.23e-07", "1.23e-05", "15", "PASS"]


def test_what_did_not_pass_says_why_and_no_line_is_too_wide() -> None:
    failed = replace(
        PASSED,
        test="a/very/" + "long/" * 20 + "test_step.py::test_step[pixel-3a]",
        device="a-device-with-a-name-that-does-not-fit",
        outcome="INVALID",
        why="too noisy:\n" + "because " * 40,
        seconds=123456.0,
        sent_mib=123456.7,
    )
    found = list(lines([failed]))
    assert max(map(len, found)) <= WIDTH
    assert found[2].endswith("INVALID")
    assert found[3].startswith("    too noisy: because")


def test_properties_are_named_by_device_and_function() -> None:
    found = dict(properties(replace(PASSED, outcome="FAIL", why="too slow")))
    figures = {name: getattr(PASSED, name) for name in ("seconds", "host_cpu_s", "peak_mib", "sent_mib")}
    said = {"outcome": "FAIL", **figures, "repetitions": 15, "why": "too slow"}
    assert found == {f"edgefl.pixel-3a.step.{name}": value for name, value in said.items()}


def test_a_row_crosses_processes_as_plain_data() -> None:
    row = replace(PASSED, entry=entry(), seconds=None)
    plain = json.loads(json.dumps(msgspec.to_builtins(row)))
    assert msgspec.convert(plain, ResultRow) == row
