"""Mahimahi's format: bytes by opportunity, looped; wrong files in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgefl.devices.link import OPPORTUNITY_BYTES, Trace, read_trace
from edgefl.errors import ProfileError


def delivered(trace: Trace, start_s: float, end_s: float) -> int:
    """Opportunities in [start, end], by going through the trace line by line."""
    count = turn = 0
    while turn * trace.period_ms <= end_s * 1e3:
        count += sum(start_s * 1e3 <= turn * trace.period_ms + at <= end_s * 1e3 for at in trace.at_ms)
        turn += 1
    return count


def test_one_packet_a_millisecond_is_12_mbps() -> None:
    trace = Trace((1,), 1)
    assert trace.rate_mbps == pytest.approx(12.032)
    assert trace.delivers_s(0.0, 1000 * OPPORTUNITY_BYTES) == pytest.approx(1.0)
    assert trace.delivers_s(0.0, 1000 * OPPORTUNITY_BYTES + 1) == pytest.approx(1.001)


def test_nothing_takes_no_time() -> None:
    assert Trace((5,), 5).delivers_s(3.0, 0.0) == 0.0


def test_a_packet_waits_for_its_opportunity() -> None:
    trace = Trace((10, 30), 40)
    assert trace.delivers_s(0.011, 1.0) == pytest.approx(0.019)
    assert trace.delivers_s(0.031, 1.0) == pytest.approx(0.019)  # the next period's first
    assert trace.delivers_s(4.010, 1.0) == pytest.approx(0.0)


def test_it_delivers_what_counting_opportunities_says() -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        times = np.sort(rng.integers(0, 500, rng.integers(1, 60)))
        trace = Trace(times.tolist(), max(1, int(times[-1])))
        start_s = float(rng.integers(0, 3000)) / 1e3 + 0.0003
        for packets in (1, 2, 17, 200):
            end_s = start_s + trace.delivers_s(start_s, packets * OPPORTUNITY_BYTES)
            assert delivered(trace, start_s, end_s + 1e-7) >= packets
            assert delivered(trace, start_s, end_s - 1e-7) < packets


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("0\n0\n3\n10\n")
    trace = read_trace(str(tmp_path / "t"))
    assert (list(trace.at_ms), trace.period_ms) == ([0, 0, 3, 10], 10)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "got 0 lines"),
        (b"0\n0\n", "its last time is 0 ms"),
        (b"1\n-2\n", "line 2: got '-2'"),
        (b"3\n2\n", "line 2: got '2'"),
        (b"1\n2.5\n", "line 2: got '2.5'"),
        (b"1\nabc\n", "line 2: got 'abc'"),
        (b"1\n" + b"9" * 400 + b"\n", "line 2"),
        (b"\xff\xfe\n", "not text"),
    ],
)
def test_a_wrong_file_is_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ProfileError) as error:
        read_trace(str(tmp_path / "t"))
    assert says in str(error.value)
    assert len(str(error.value)) < 300


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        read_trace(str(tmp_path / "none"))
