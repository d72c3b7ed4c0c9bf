"""The table at the end of a session, and what a JUnit file says."""

from __future__ import annotations

import json

import msgspec
import pytest

from edgefl.regression.table import WIDTH, Row, lines, properties

PASSED = Row(
    test="tests/test_step.py::test_step[pixel-3a]",
    function="step",
    device="pixel-3a",
    outcome="PASS",
    why="",
    seconds=2.0123,
    host_cpu_s=0.000312,
    peak_mib=118.25,
    sent_mib=0.0,
    joules=None,
    repetitions=15,
)


def test_a_device_is_a_line_below_its_test() -> None:
    other = msgspec.structs.replace(PASSED, device="moto-g4", test="tests/test_step.py::test_step[moto-g4]")
    assert list(lines([PASSED, other])) == [
        "                         device  host CPU    MiB  sent MiB        J   n",
        "tests/test_step.py::test_step: step",
        "  pixel-3a               2.01 s  0.312 ms  118.2         0        –  15  PASS",
        "  moto-g4                2.01 s  0.312 ms  118.2         0        –  15  PASS",
    ]


def test_what_did_not_pass_says_why_and_no_line_is_too_wide() -> None:
    failed = msgspec.structs.replace(
        PASSED,
        test="a/very/" + "long/" * 20 + "test_step.py::test_step[pixel-3a]",
        device="a-device-with-a-name-that-does-not-fit",
        outcome="INVALID",
        why="too noisy:\n" + "because " * 40,
        seconds=123456.0,
        peak_mib=12345.6,
        sent_mib=123456.7,
        joules=98765.4,
        repetitions=60,
    )
    found = list(lines([failed]))
    assert max(map(len, found)) <= WIDTH
    assert found[2].endswith("INVALID")
    assert found[3].startswith("    too noisy: because")


def test_a_test_that_measured_nothing_has_a_line_too() -> None:
    row = Row(test="test_a.py::test_a[pi-4]", function="", device="pi-4", outcome="FAIL", why="out of memory")
    assert list(lines([row]))[1:] == [
        "test_a.py::test_a",
        "  pi-4                        –         –      –         –        –   –  FAIL",
        "    out of memory",
    ]


def test_properties_are_named_by_device_and_function() -> None:
    found = dict(properties(msgspec.structs.replace(PASSED, outcome="FAIL", why="too slow")))
    assert found == {
        "edgefl.pixel-3a.step.outcome": "FAIL",
        "edgefl.pixel-3a.step.seconds": 2.0123,
        "edgefl.pixel-3a.step.host_cpu_s": 0.000312,
        "edgefl.pixel-3a.step.peak_mib": 118.25,
        "edgefl.pixel-3a.step.sent_mib": 0.0,
        "edgefl.pixel-3a.step.repetitions": 15,
        "edgefl.pixel-3a.step.why": "too slow",
    }


@pytest.mark.parametrize("row", [PASSED, msgspec.structs.replace(PASSED, entry={"a": [1.0]}, seconds=None)])
def test_a_row_crosses_processes_as_plain_data(row: Row) -> None:
    plain = json.loads(json.dumps(msgspec.to_builtins(row)))
    assert msgspec.convert(plain, Row) == row
