"""Who used the host: shares from the system's own counters, and none where it does not tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgefl.limits import capacity
from edgefl.limits.capacity import UsageMeter

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two cores and clocks that stand still."""
    monkeypatch.setattr(capacity, "STAT", tmp_path / "stat")
    monkeypatch.setattr(capacity, "usable_cores", lambda: 2)
    monkeypatch.setattr(capacity.time, "monotonic", iter([0.0, 10.0]).__next__)
    monkeypatch.setattr(capacity, "_own_cpu_s", iter([1.0, 5.0]).__next__)
    return tmp_path / "stat"


def ticks(busy_s: float) -> str:
    part = int(busy_s / TICK_S / 5)
    return f"cpu {part} {part} {part} 99999 12345 {part} {part} 777 0 0\n"


def test_the_run_and_the_others_share_the_cores(host: Path) -> None:
    host.write_text(ticks(100.0))
    meter = UsageMeter()
    host.write_text(ticks(116.0))
    found = meter.usage()
    assert found.used == pytest.approx(0.2)  # 4 of 20 core seconds
    assert found.others == pytest.approx(0.6)  # 12 of them
    assert (found.steal, found.throttled) == (None, None)  # nothing had begun


@pytest.mark.parametrize("text", ["", "cpu 1 2\n", "cpu a b c d e f g\n"])
def test_a_system_that_does_not_tell(host: Path, text: str) -> None:
    host.write_text(text)
    found = UsageMeter().usage()
    assert found.used == pytest.approx(0.2)
    assert found.others is None


def test_steal_and_quota_are_of_the_time_in_which_the_phones_ran() -> None:
    meter = UsageMeter()
    meter.begin()
    meter.end()
    found = meter.usage()
    assert found.steal is None or 0.0 <= found.steal <= 1.0
    assert found.throttled is None or 0.0 <= found.throttled <= 1.0
