"""Tests of links: exact times, declared distributions, reproducible random numbers, recorded traces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from trip_parts import device, network, paced, plan, rng

from edgefl.devices import load_network, network_names
from edgefl.devices.link import CHUNK_BYTES, OPPORTUNITY_BYTES, Disconnected, Link, Trace, move, read_trace
from edgefl.devices.plan import plan_trip
from edgefl.devices.schema import Network
from edgefl.errors import ProfileError
from edgefl.seeds import stream


def test_a_transfer_takes_its_size_divided_by_the_rate() -> None:
    fast = Link(network(rate_mbps=8.0), rng()).down(1_000_000)
    assert (fast.declared_s, fast.chunk_bytes) == (1.0, CHUNK_BYTES)
    assert fast.wire_bytes == fast.nbytes == 1_000_000
    slow = Link(network(rate_mbps=8.0, delay_ms=250.0), rng()).down(1_000_000)  # a delay uses no bandwidth
    assert slow.declared_s == fast.declared_s + 0.25
    assert slow.rate_bytes_per_s == fast.rate_bytes_per_s
    headers = Link(network(header_bytes=40, rate_mbps=8.0), rng()).up(1461)
    assert headers.wire_bytes == 1461 + 2 * 40
    assert headers.declared_s == pytest.approx(1541e-6)
    unlimited = Link(load_network("none"), rng()).down(10_000_000)
    assert (unlimited.declared_s, unlimited.chunk_bytes) == (0.0, 10_000_000)
    with pytest.raises(ValueError, match="at least 0"):
        Link(network(), rng()).down(-1)


@pytest.mark.parametrize("name", network_names())
def test_an_empty_transfer_takes_the_delay_alone(name: str) -> None:
    profile = load_network(name)
    assert Link(profile, rng()).down(0).declared_s == pytest.approx(profile.down.delay_ms / 1e3)


def leads(**way: Any) -> np.ndarray[Any, Any]:
    link = Link(network(**way, jitter_ms=10.0), rng(3))
    return np.array([link.down(1).lead_s for _ in range(4000)]) * 1e3


@pytest.mark.parametrize(
    ("jitter", "declared"),
    [
        ("normal", stats.norm(100, 10)),
        ("uniform", stats.uniform(90, 20)),
        ("exponential", stats.expon(100, 10)),
    ],
)
def test_jitter_has_its_declared_distribution(jitter: str, declared: Any) -> None:
    assert stats.kstest(leads(delay_ms=100.0, jitter_dist=jitter), declared.cdf).pvalue > 0.01


def test_jitter_never_makes_a_delay_negative() -> None:
    assert leads(delay_ms=1.0, jitter_dist="normal").min() == 0.0


def within_99_percent(share: float, chance: float, count: int) -> bool:
    return abs(share - chance) < 2.576 * math.sqrt(chance * (1 - chance) / count)


def test_packets_are_lost_at_the_declared_rate_and_cost_bytes_and_a_round_trip() -> None:
    link = Link(network(rate_mbps=8.0, delay_ms=10.0, loss_pct=2.0), rng(5))
    transfers = [link.down(1_500_000) for _ in range(100)]
    lost = sum(t.lost_packets for t in transfers)
    assert within_99_percent(lost / (100 * 1000 + lost), 0.02, 100 * 1000 + lost)
    for t in transfers:
        assert t.wire_bytes == 1_500_000 + t.lost_packets * 1500
        assert t.lead_s == pytest.approx(0.010 + (0.020 if t.lost_packets else 0.0))
        assert t.declared_s == pytest.approx(t.lead_s + t.wire_bytes / 1e6)


def test_a_link_without_loss_uses_no_random_numbers() -> None:
    generator = rng(1)
    Link(network(rate_mbps=1.0), generator).down(100_000)
    assert generator.random() == rng(1).random()


def lossy(pct: float) -> Network:
    return network(rate_mbps=8.0, delay_ms=10.0, loss_pct=pct, on_loss="disconnect")


def test_a_lost_packet_may_break_the_connection() -> None:
    link = Link(lossy(1.0), rng(5))
    transfers = [link.down(146_000) for _ in range(2000)]  # 97.3 packets of 1500 bytes without headers
    breaks = [t.breaks_after for t in transfers if t.breaks_after is not None]
    assert within_99_percent(1 - len(breaks) / 2000, 0.99**98, 2000)
    assert all(t.wire_bytes == 146_000 and t.lost_packets == 0 for t in transfers)
    assert all(after % 1500 == 0 and after < 146_000 for after in breaks)
    assert within_99_percent(breaks.count(0) / 2000, 0.01, 2000)  # the very first packet


def test_a_broken_connection_has_moved_the_bytes_before_the_lost_packet() -> None:
    copied = [0]

    def copy(start: int, stop: int) -> None:
        copied[0] += stop - start

    link = Link(lossy(1.0), rng(5))
    transfer = next(t for t in (link.up(1_000_000) for _ in range(100)) if (t.breaks_after or 0) > 70_000)
    pacer, now = paced()
    with pytest.raises(Disconnected, match=f"after {transfer.breaks_after} of 1000000 bytes"):
        move(pacer, transfer, copy)
    assert copied[0] == transfer.breaks_after
    assert now[0] == pytest.approx(transfer.breaks_s * 1e9) == pytest.approx(10e6 + copied[0] * 1e3)


def test_a_trip_breaks_at_its_first_broken_transfer() -> None:
    net = lossy(0.05)
    for trip in range(200):
        generator = stream(1, "trip", 0, trip)
        found = plan(device(), net, generator)
        if found.down.breaks_after is not None:
            assert found.breaks_s == 0.01 + found.down.breaks_after / 1e6
        elif found.up.breaks_after is not None:
            assert found.breaks_s == pytest.approx(1.01 + 2.0 + 0.01 + found.up.breaks_after / 1e6)
        else:
            assert found.breaks_s == math.inf


def traced(tmp_path: Path, lines: str, **way: Any) -> Network:
    (tmp_path / "t.trace").write_text(lines)
    return network(trace=str(tmp_path / "t.trace"), **way)


def test_a_traced_link_delivers_at_its_opportunities(tmp_path: Path) -> None:
    net = traced(tmp_path, "0\n500\n1000\n", delay_ms=100.0)  # two at each whole second, one at each half
    sent = Link(net, rng(), at_s=0.0).down(3 * 1504)
    assert sent.flows_at_s == 0.1
    assert sent.declared_s == pytest.approx(1.0)  # at 0.5 s, 1.0 s and 1.0 s
    later = Link(net, rng(), at_s=7.7, shift=0.25).down(1504)  # 0.25 of a second on: flows at 8.05
    assert later.declared_s == pytest.approx(8.5 - 7.95)
    assert Link(net, rng()).down(0).declared_s == 0.1


def test_an_upload_starts_in_the_trace_where_training_ends(tmp_path: Path) -> None:
    net = traced(tmp_path, "\n".join(str(ms) for ms in range(1, 1001)) + "\n5000\n")
    generator = rng()
    found = plan_trip(device(), Link(net, generator, at_s=5.0), generator, 150_400, 1.5, 150_400)
    assert found.down_s == pytest.approx(0.1)
    assert found.compute_s == pytest.approx(1.5)
    # From 1.6 s to the end of the period there is no delivery opportunity; then there is one per millisecond.
    assert found.up_s == pytest.approx(5.0 - 1.6 + 0.099)
    short = found.within(0.5004, [0.1] * 15)
    assert short.up_s == pytest.approx(0.0996)


def test_the_paced_client_follows_a_trace(tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    times = np.sort(generator.integers(1, 2000, 500))
    net = traced(tmp_path, "\n".join(map(str, times)) + "\n", delay_ms=30.0)
    pacer, now = paced()
    reached: list[tuple[int, int]] = []
    transfer = Link(net, rng(), at_s=3.1).down(1_500_000)
    spent = move(pacer, transfer, lambda start, stop: reached.append((start, now[0])))
    assert spent.achieved_s == pytest.approx(transfer.declared_s)
    for start, at_ns in reached[1:]:  # never before the device could have received the bytes before it
        assert at_ns >= (transfer.lead_s + transfer.takes_s(start)) * 1e9 - 50e6 - 1


def test_move_copies_every_byte_once_in_order_at_the_rate_of_the_link() -> None:
    pacer, now = paced()
    seen: list[tuple[int, int, int]] = []
    transfer = Link(network(rate_mbps=8.0, delay_ms=100.0), rng()).down(200_001)
    spent = move(pacer, transfer, lambda start, stop: seen.append((start, stop, now[0])))
    assert [(a, b) for a, b, _ in seen] == [(0, 65536), (65536, 131072), (131072, 196608), (196608, 200001)]
    assert seen[1][2] == pytest.approx(0.1e9 + 65536e3, abs=2)
    assert spent.declared_s == spent.achieved_s == pytest.approx(transfer.declared_s)
    pacer, _ = paced()
    nothing = move(pacer, Link(network(delay_ms=30.0), rng()).up(0), lambda start, stop: None)
    assert nothing.achieved_s == nothing.declared_s == 0.03


def delivered(trace: Trace, start_s: float, end_s: float) -> int:
    """Count the delivery opportunities in [``start_s``, ``end_s``], one line of the trace at a time."""
    count = turn = 0
    while turn * trace.period_ms <= end_s * 1e3:
        count += sum(start_s * 1e3 <= turn * trace.period_ms + at <= end_s * 1e3 for at in trace.at_ms)
        turn += 1
    return count


def test_a_packet_waits_for_its_opportunity() -> None:
    steady = Trace((1,), 1)
    assert steady.rate_mbps == pytest.approx(12.032)
    assert steady.delivers_s(0.0, 1000 * OPPORTUNITY_BYTES) == pytest.approx(1.0)
    assert steady.delivers_s(0.0, 1000 * OPPORTUNITY_BYTES + 1) == pytest.approx(1.001)
    trace = Trace((10, 30), 40)
    assert trace.delivers_s(0.011, 0.0) == 0.0
    assert trace.delivers_s(0.011, 1.0) == pytest.approx(0.019)
    assert trace.delivers_s(0.031, 1.0) == pytest.approx(0.019)  # the next period's first
    assert trace.delivers_s(4.010, 1.0) == pytest.approx(0.0)


def test_delivery_times_agree_with_counted_opportunities() -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        times = np.sort(rng.integers(0, 500, rng.integers(1, 60)))
        trace = Trace(times.tolist(), max(1, int(times[-1])))
        start_s = float(rng.integers(0, 3000)) / 1e3 + 0.0003
        for packets in (1, 2, 17, 200):
            end_s = start_s + trace.delivers_s(start_s, packets * OPPORTUNITY_BYTES)
            assert delivered(trace, start_s, end_s + 1e-7) >= packets
            assert delivered(trace, start_s, end_s - 1e-7) < packets


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must have at least one line"),
        (b"0\n0\n", "the last time must be at least 1 ms (got 0)"),
        (b"1\n-2\n", "line 2: got '-2'"),
        (b"3\n2\n", "line 2: got '2'"),
        (b"1\n2.5\n", "line 2: got '2.5'"),
        (b"1\nabc\n", "line 2: got 'abc'"),
        (b"1\n" + b"9" * 400 + b"\n", "line 2"),
        (b"\xff\xfe\n", "not text"),
        (None, "No such file"),
    ],
)
def test_an_invalid_trace_file_is_refused(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProfileError) as error:
        read_trace(str(path))
    assert says in str(error.value)
    assert len(str(error.value)) < 300
