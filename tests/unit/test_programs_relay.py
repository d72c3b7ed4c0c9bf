"""Arrival times of bytes on a phone's connections, and its link's energy. No process is started."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from types import SimpleNamespace
from unittest.mock import Mock, call

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.devices import load_network
from edgefl.devices.condition import Power
from edgefl.devices.link import CHUNK_BYTES, Disconnected, Link
from edgefl.devices.schema import Network
from edgefl.host.throttle import Account
from edgefl.programs import RunningPhones, messages
from edgefl.programs.messages import Begin
from edgefl.programs.relay import (
    AHEAD_S,
    MAX_WINDOW_BYTES,
    MIN_WINDOW_BYTES,
    STALL_S,
    EmulatedTime,
    Flow,
    PhoneLink,
    PreciseSelector,
    Relay,
    carry,
    window_bytes,
)
from edgefl.programs.way import LinkWay, Transmission


def with_loss(kind: str, pct: float) -> Network:
    network = load_network("lte")
    way = msgspec.structs.replace(network.up, loss_pct=pct, on_loss=kind)
    return msgspec.structs.replace(network, up=way)


def way_of(network: str | Network, name: str = "down", seed: int = 0) -> LinkWay:
    profile = load_network(network) if isinstance(network, str) else network
    return LinkWay(profile, name, np.random.default_rng(seed))


def flow_at(now: list[float], network: str, name: str = "down") -> Flow:
    """A flow whose clock shows the first number of ``now``."""
    return Flow(way_of(network, name), SimpleNamespace(now=lambda: now[0], scale=1.0))  # type: ignore[arg-type]


@given(
    st.sampled_from(["none", "normal", "uniform", "exponential"]),
    st.lists(st.integers(1, 50_000), min_size=1, max_size=20),
    st.sampled_from(["up", "down"]),
)
def test_bytes_that_enter_without_a_break_arrive_as_one_message(
    jitter: str, sizes: list[int], name: str
) -> None:
    profile = load_network("lte")
    noisy = msgspec.structs.replace(profile.up, jitter_ms=9.0, jitter_dist=jitter, rate_cv=0.0)
    profile = msgspec.structs.replace(profile, up=noisy, down=noisy)
    way = way_of(profile, name, seed=5)
    message = getattr(Link(profile, np.random.default_rng(5)), name)(sum(sizes))
    for size in sizes:
        transmission = way.enter(size, at_s=3.0)
    assert transmission.nbytes == sum(sizes)
    assert way.due_s == pytest.approx(3.0 + message.declared_s, rel=1e-12)
    assert transmission.declared_s == pytest.approx(message.declared_s, rel=1e-9)


def test_bytes_wait_only_for_bytes_before_them() -> None:
    way = way_of("3g-slow")
    first = way.enter(1460, at_s=0.0)
    wire_s = 1500 * 8 / 0.78e6
    assert way.free_s == pytest.approx(wire_s)
    assert way.enter(1460, at_s=wire_s / 2) is first
    assert way.due_s == pytest.approx(0.1 + 2 * wire_s)
    second = way.enter(1460, at_s=5.0)
    assert second is not first
    assert way.due_s == pytest.approx(5.0 + 0.1 + wire_s)


def test_a_relays_delay_is_made_up_for_but_not_a_senders() -> None:
    """Bytes that waited for room in the link enter it at the time at which there was room, even if the relay
    is late. Other bytes enter it now."""
    now = [0.0]
    flow = flow_at(now, "3g-slow")
    wire_s = 1500 * 8 / 0.78e6
    first = flow.enter(1460, waited=False)
    now[0] = 1.0
    assert flow.enter(1460, waited=True) is first
    assert flow.way.free_s == pytest.approx(2 * wire_s)
    now[0] = 2.0
    assert flow.enter(1460, waited=False) is not first
    assert flow.way.free_s == pytest.approx(2.0 + wire_s)
    now[0] = 2.5
    for _ in range(2):
        flow.arrived(first, 1460, held_up=False)
    assert flow.finished() == [first]
    assert first.achieved_s == 2.5
    assert flow.way.busy_s == pytest.approx(3 * wire_s)


def test_a_selector_with_a_high_descriptor_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a relay with a thousand listeners could not start."""
    with contextlib.closing(PreciseSelector()) as selector:
        monkeypatch.setattr(selector, "fileno", lambda: 5000)
        assert selector.select(0.001) == []


def test_a_relay_handles_messages_that_came_in_while_it_sent() -> None:
    """A channel also reads while it sends, and its descriptor does not signal messages that it read then."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end = messages.EndPhones(now=True)
        channel = Mock(waiting=True, has_room=True, fileno=ours.fileno)
        channel.receive_ready.return_value = [end]
        asyncio.run(asyncio.wait_for(Relay(channel, "run").serve(), 60.0))
    assert channel.send.call_args == call(messages.Drained())


@pytest.mark.parametrize(
    ("interrupted", "whys", "now"),
    [
        (False, ["", ""], False),
        (True, ["", ""], True),
        (False, ["battery low", ""], False),
        (False, ["a", "b"], True),
    ],
)
def test_the_data_of_a_phone_arrives_although_another_one_crashed(
    interrupted: bool, whys: list[str], now: bool
) -> None:
    ended = {phone: Mock(code=-11 * (1 - phone), why=why) for phone, why in enumerate(whys)}
    running = Mock(_held=whys, _ended=ended, _interrupted=interrupted, running=False)
    running._relay_channel.receive.return_value = messages.Drained()
    RunningPhones._finish(running)
    assert running._relay_channel.send.call_args == call(messages.EndPhones(now=now))


@pytest.mark.parametrize(
    ("delivering", "closing", "keeper", "relay"),
    [(False, False, 1, 0), (True, False, 1, 1), (True, True, 0, 0)],
)
def test_a_signal_ends_the_delivery_of_data(delivering: bool, closing: bool, keeper: int, relay: int) -> None:
    """Nothing is sent once edgefl has begun to end its own processes, because their channels are closed."""
    running = Mock(_delivering=delivering, _closing=closing)
    RunningPhones._interrupt(running, messages.Pass(2))
    assert running._keeper_channel.tell.call_args_list == [call(messages.Pass(2))] * keeper
    assert running._relay_channel.tell.call_args_list == [call(messages.EndPhones(now=True))] * relay


def test_the_end_waits_for_a_server_while_it_receives() -> None:
    async def delivered() -> None:
        link = PhoneLink(0, load_network("3g-slow"), Begin(0, 2.0, 0))
        now, up = [10.0], link.flows["up"]
        link.clock = up.clock = SimpleNamespace(now=lambda: now[0], scale=2.0)  # type: ignore[assignment]
        assert not link.is_delivering()
        link.sending.add(asyncio.current_task())  # type: ignore[arg-type]
        part = up.enter(1000, waited=False)
        looks = int(STALL_S / AHEAD_S)
        assert all(link.is_delivering() for _ in range(2 * looks))
        now[0] = up.way.due_s
        assert all(link.is_delivering() for _ in range(looks))
        assert not all(link.is_delivering() for _ in range(looks))
        up.arrived(part, 1000, held_up=True)
        assert link.is_delivering()

    asyncio.run(delivered())


def test_a_transmission_that_its_receiver_delayed_is_not_measured() -> None:
    flow = flow_at([0.0], "lte", "up")
    flow.arrived(flow.enter(10, waited=False), 10, held_up=True)
    assert flow.finished(all_of_them=True) == []
    assert flow.nbytes == 10


def test_the_relay_holds_at_most_its_window_and_one_part() -> None:
    """A receiver that reads nothing stops the sender."""

    entered = 0

    async def carried() -> int:
        nonlocal entered
        clock = EmulatedTime(Begin(time.monotonic_ns(), 1.0, 0))
        flow = Flow(way_of("none"), clock)
        enter = flow.enter

        def counted(nbytes: int, waited: bool) -> Transmission:
            nonlocal entered
            entered += nbytes
            return enter(nbytes, waited)

        flow.enter = counted  # type: ignore[method-assign]
        ends = [*socket.socketpair(), *socket.socketpair()]
        for end in ends:
            end.setblocking(False)
        task = asyncio.create_task(carry(ends[1], ends[2], flow, 0.0, {}))
        sender = asyncio.create_task(asyncio.get_running_loop().sock_sendall(ends[0], bytes(64 << 20)))
        before = -1
        while entered != before or not entered:  # until nothing more enters in many turns of the loop
            before = entered
            for _ in range(500):
                await asyncio.sleep(0)
        assert not sender.done()
        for each in (task, sender):
            each.cancel()
        await asyncio.gather(task, sender, return_exceptions=True)
        for end in ends:
            end.close()
        return entered - flow.nbytes

    assert asyncio.run(carried()) <= MIN_WINDOW_BYTES + CHUNK_BYTES


def test_a_link_with_a_delay_and_no_limit_on_its_rate_holds_many_bytes() -> None:
    """Regression: 10 MB took 30 times the delay, because the link held only 0.3 MB."""
    none, lte = load_network("none"), load_network("lte")
    delayed = msgspec.structs.replace(none, down=msgspec.structs.replace(none.down, delay_ms=100.0))
    assert window_bytes(way_of(delayed)) == MAX_WINDOW_BYTES
    assert window_bytes(way_of(none)) == MIN_WINDOW_BYTES
    jittering = msgspec.structs.replace(none.down, jitter_ms=50.0, jitter_dist="exponential")
    assert window_bytes(way_of(msgspec.structs.replace(none, down=jittering))) == MAX_WINDOW_BYTES
    slower = msgspec.structs.replace(lte, down=msgspec.structs.replace(lte.down, delay_ms=980.0))
    assert window_bytes(way_of(slower)) == pytest.approx(2 * 16.8e6 / 8, abs=1)


def test_lost_packets_cost_their_bytes_and_a_round_trip_once() -> None:
    way = way_of(with_loss("retransmit", 20.0), "up", seed=1)
    for _ in range(50):
        part = way.enter(14_600, at_s=0.0)
    assert part.lost_packets > 50
    wire = part.nbytes + part.packets * 40 + part.lost_packets * 1500
    assert part.declared_s == pytest.approx(0.035 + 0.07 + wire * 8 / 13.4e6)


def test_a_lost_packet_ends_the_connection_if_the_profile_says_so() -> None:
    with pytest.raises(Disconnected):
        way_of(with_loss("disconnect", 50.0), "up", seed=1).enter(146_000, at_s=0.0)


def test_a_trace_sets_the_rate_of_bytes_that_enter_without_a_break() -> None:
    way = way_of("lte-varying")
    message = Link(load_network("lte-varying"), np.random.default_rng(0)).down(500_000)
    for _ in range(50):
        way.enter(10_000, at_s=0.0)
    assert way.due_s == pytest.approx(message.declared_s)


def test_sending_receiving_and_being_offline_draw_their_own_power() -> None:
    phone = PhoneLink(0, load_network("lte"), Begin(time.monotonic_ns(), 1.0, 0))
    for name, times in (("up", 1), ("down", 3)):
        for _ in range(times):
            phone.flows[name].enter(10_000, waited=False)
    sent = phone.state()
    assert (sent.up_s, sent.down_s) == tuple(phone.flows[name].way.busy_s for name in ("up", "down"))
    assert sent.down_s > sent.up_s > 0
    power = Power(idle_w=0.5, busy_w=0.0, down_w=1.0, up_w=100.0, capacity_j=1.0, least_j=0.0, charge_w=0.0)
    state = Mock(cpu_s=0.0, declared_cpu_s=0.0, in_use_s=(0.0,), wall_s=5.0, age_s=8.0)  # 3 s offline
    held = Mock(power=power, core_w=(1.0,))
    running = Mock(_held=[held], _traffic=[Mock(state=sent)], scale=Mock(value=1.0))
    used_j = RunningPhones._energy_j(running, 0, state)
    assert used_j == pytest.approx(0.5 * 8.0 + 100.0 * sent.up_s + sent.down_s)


def test_each_core_draws_power_while_it_is_in_use() -> None:
    """A phone with three cores runs one thread for 6 s of wall time, then eight for 4 s, and gets 90% of its
    CPU time.

    Mutant: the power is computed for the mean share of 0.48, which gives 2.6 W instead of the mean of 2.8 W.
    """
    account = Account((0.4, 0.1, 0.1), now_ns=0, used_ns=0)
    for threads, now_s in ((1, 6), (8, 10)):
        account.follow(threads)
        account.ahead_ns(now_s * 10**9, 0)
    declared_s = account.achieved().declared_cpu_s
    state = Mock(
        cpu_s=0.9 * declared_s, declared_cpu_s=declared_s, age_s=10.0,
        in_use_s=[each / 1e9 for each in account.in_use_ns],
    )  # fmt: skip
    power = Power(idle_w=0.5, busy_w=9.0, down_w=0.0, up_w=0.0, capacity_j=1.0, least_j=0.0, charge_w=0.0)
    held, traffic = Mock(power=power, core_w=(1.0, 2.0, 2.5)), Mock(state=Mock(up_s=0.0, down_s=0.0))
    running = Mock(_held=[held], _traffic=[traffic], scale=Mock(value=2.0))
    used_j = RunningPhones._energy_j(running, 0, state)
    assert used_j == pytest.approx((0.5 * 10 + 0.9 * (10 * 1.0 + 4 * (2.0 + 2.5))) / 2)
