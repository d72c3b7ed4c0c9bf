"""Cells: max-min shares by hand, transfers against small steps through time, the meter of forked clients."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
from trip_parts import network, rng

from edgefl.devices.cells import Cell, CellMeter, FinishedTrip, SharedCells, fair_level
from edgefl.devices.link import Link, move
from edgefl.devices.plan import TripPlan
from edgefl.host.pacing import Pacer


def plan(down_bytes: int, compute_s: float, up_bytes: int, **way: Any) -> TripPlan:
    link = Link(network(**way), rng())
    return TripPlan(link.down(down_bytes), 1.0, 0.0, 1.0 / compute_s, link.up(up_bytes))


def cells_of(capacity: float | None, limits: list[float], cells: int = 1) -> SharedCells:
    return SharedCells(cells, {"down": limits, "up": limits}, {"down": capacity, "up": capacity})


def test_the_level_fills_from_below() -> None:
    assert fair_level([], 5.0) == math.inf
    assert fair_level([math.inf] * 4, 10.0) == 2.5
    assert fair_level([1.0, 2.0, math.inf], 9.0) == 6.0
    assert fair_level([1.0, 2.0, 3.0], 6.0) == 3.0
    assert fair_level([1.0, 2.0, 3.0], 7.0) == math.inf


def test_no_capacity_is_lost_and_nobody_gets_more_than_its_link() -> None:
    generator = rng(1)
    for _ in range(200):
        limits = generator.uniform(0.1, 10.0, generator.integers(1, 12)).tolist()
        capacity = float(generator.uniform(0.1, 40.0))
        rates = [min(limit, fair_level(limits, capacity)) for limit in limits]
        assert sum(rates) == pytest.approx(min(capacity, sum(limits)))


def simulated(starts: list[tuple[float, float, float]], capacity: float, step_s: float) -> list[float]:
    """When each transfer (start, bytes, limit) ends, by small steps through time."""
    left, ends = [nbytes for _, nbytes, _ in starts], [math.nan] * len(starts)
    at_s = 0.0
    while any(math.isnan(end) for end in ends):
        active = [i for i, (start, _, _) in enumerate(starts) if start <= at_s and left[i] > 0]
        level = fair_level([starts[i][2] for i in active], capacity)
        for i in active:
            left[i] -= min(starts[i][2], level) * step_s
            if left[i] <= 0:
                ends[i] = at_s + step_s
        at_s += step_s
    return ends


def test_a_cell_is_what_small_steps_through_time_say() -> None:
    generator = rng(7)
    for _ in range(5):
        starts = [
            (*generator.uniform((0, 10), (3, 200)).tolist(), float(generator.choice([30.0, 80.0, math.inf])))
            for _ in range(8)
        ]
        cell, found = Cell(100.0), [math.nan] * len(starts)
        waiting = sorted(range(len(starts)), key=lambda i: starts[i][0])
        while waiting or cell.ends:
            ends = cell.ends
            if waiting and (ends is None or starts[waiting[0]][0] < ends[0]):
                i = waiting.pop(0)
                cell.start(i, *starts[i])
            else:
                cell.stop(ends[1], ends[0])
                found[ends[1]] = ends[0]
        assert found == pytest.approx(simulated(starts, 100.0, 1e-3), abs=0.02)


def test_one_trip_alone_takes_what_its_plan_says() -> None:
    trip = plan(1_000_000, 2.0, 500_000, rate_mbps=8.0, delay_ms=100.0)
    alone = cells_of(None, [1e6])
    alone.begin(7, 0, trip, 3.0)
    (through,) = alone.advance(100.0)
    at_s = pytest.approx(3 + trip.total_s)
    assert through == FinishedTrip(at_s, 7, 0, pytest.approx(1.1), pytest.approx(0.6))
    assert alone.next_s == math.inf


def test_two_downloads_at_once_take_twice_as_long() -> None:
    trip = plan(1_000_000, 1.0, 0, rate_mbps=None)
    shared = cells_of(1e6, [math.inf] * 2)
    shared.begin(0, 0, trip, 0.0)
    shared.begin(1, 1, trip, 0.5)
    # 0.5 s alone, then half each: the first has 0.5 MB left and takes 1 s for it; the other then 0.5 s alone
    found = [(through.task, through.down_s, through.at_s) for through in shared.advance(100.0)]
    assert found == [(task, pytest.approx(1.5), pytest.approx(2.5 + task / 2)) for task in (0, 1)]


def test_phones_in_other_cells_do_not_matter() -> None:
    trip = plan(1_000_000, 1.0, 1_000_000, rate_mbps=None)
    shared = cells_of(1e6, [math.inf] * 4, cells=2)
    for client in (0, 1, 3):
        shared.begin(client, client, trip, 0.0)
    found = {through.client: through.down_s for through in shared.advance(100.0)}
    assert found == {0: pytest.approx(1.0), 1: pytest.approx(2.0), 3: pytest.approx(2.0)}


def test_a_trip_that_is_given_up_leaves_its_share_to_the_others() -> None:
    trip = plan(1_000_000, 1.0, 0, rate_mbps=None)
    shared = cells_of(1e6, [math.inf] * 2)
    shared.begin(0, 0, trip, 0.0)
    shared.begin(1, 1, trip, 0.0)
    assert shared.advance(1.0) == []
    shared.drop(1, 1.0)
    shared.drop(1, 1.0)
    (through,) = shared.advance(100.0)
    assert (through.task, through.down_s) == (0, pytest.approx(1.5))


def test_how_far_it_is_advanced_at_a_time_changes_no_bit() -> None:
    def ends(steps: list[float]) -> list[FinishedTrip]:
        generator, shared, found = rng(3), cells_of(3e5, [2e5, 1e5, math.inf] * 4, cells=3), []
        for task in range(40):
            begun_s = float(generator.uniform(0, 20))
            shared.begin(task, task % 12, plan(int(generator.integers(1000, 400_000)), 0.5, 50_000), begun_s)
        for at_s in steps:
            found += shared.advance(at_s)
        return found + shared.advance(1e9)

    assert ends([]) == ends(np.linspace(0.0, 100.0, 977).tolist())


def test_a_broken_link_ends_the_trip_where_it_breaks() -> None:
    trip = plan(1_000_000, 1.0, 500_000, rate_mbps=None)
    broken = trip._replace(up=trip.up._replace(breaks_after=100_000))
    shared = cells_of(1e6, [math.inf])
    shared.begin(0, 0, broken, 0.0)
    (through,) = shared.advance(100.0)
    assert (through.down_s, through.up_s) == (pytest.approx(1.0), pytest.approx(0.1))


def meter(capacity: float | None = 1e6, limits: list[float] | None = None, cells: int = 1) -> CellMeter:
    limits = [math.inf] * 4 if limits is None else limits
    return CellMeter(cells, {"down": limits, "up": limits}, {"down": capacity, "up": None})


def test_a_meter_counts_who_transfers() -> None:
    shared = meter(limits=[math.inf, 2e5, math.inf, 1.0], cells=2)
    assert shared.rate(0, "down") == 1e6
    shared.transfers(0, "down", True)
    shared.transfers(2, "down", True)
    shared.transfers(1, "down", True)
    assert [shared.rate(client, "down") for client in (0, 1, 2)] == [5e5, 2e5, 5e5]
    assert shared.rate(0, "up") == math.inf
    shared.gone(2)
    assert shared.rate(0, "down") == 1e6


def test_forked_processes_share_a_meter() -> None:
    shared = meter()
    shared.transfers(0, "down", True)
    pid = os.fork()
    if pid == 0:
        shared.transfers(1, "down", True)
        os._exit(int(shared.rate(1, "down") != 5e5))
    assert os.waitpid(pid, 0)[1] == 0
    assert shared.rate(0, "down") == 5e5


@pytest.mark.parametrize("time_scale", [1.0, 4.0])
def test_a_paced_transfer_slows_down_while_another_shares(time_scale: float) -> None:
    now, shared, copied = [0], meter(), bytearray(1_000_000)

    def wait(deadline_ns: int) -> None:
        for flips_s, busy in ((0.3, True), (0.9, False)):  # another transfers from 0.3 to 0.9 s
            if now[0] < flips_s * time_scale * 1e9 <= deadline_ns:
                shared.transfers(1, "down", busy)
        now[0] = max(now[0], deadline_ns)

    def copy(start: int, stop: int) -> None:
        assert start % 256 == 0
        copied[start:stop] = b"\x01" * (stop - start)

    pacer = Pacer(time_scale=time_scale, wait=wait, clock=lambda: now[0])
    pacer.begin(0)
    trip = plan(1_000_000, 1.0, 0, rate_mbps=None, delay_ms=100.0)
    spent = move(pacer, trip.down, copy, shared.share(0, "down"))
    assert copied == b"\x01" * 1_000_000
    # 0.1 s delay, 0.2 s alone, 0.6 s at half, and the rest alone; a look at each 20 ms of the wall
    assert spent.achieved_s == pytest.approx(0.1 + 0.2 + 0.6 + 0.5, abs=0.025 / time_scale)
    assert spent.declared_s == pytest.approx(spent.achieved_s)
    assert shared.rate(2, "down") == 1e6  # nobody transfers any more


def test_a_cancelled_transfer_no_longer_counts() -> None:
    shared = meter()

    def wait(deadline_ns: int) -> None:
        raise InterruptedError

    pacer = Pacer(time_scale=1.0, wait=wait, clock=lambda: 0)
    pacer.begin(0)
    with pytest.raises(InterruptedError):
        move(pacer, plan(1_000_000, 1.0, 0).down, lambda a, b: None, shared.share(0, "down"))
    assert not shared._busy["down"].any()
