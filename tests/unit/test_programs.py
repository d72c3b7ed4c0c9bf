"""Phones that run any command: what is checked at the door, and when bytes arrive. No process is started."""

from __future__ import annotations

import asyncio
import math
import os
import pty
import select
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from edgefl.cli import main
from edgefl.cli.programs import phones_of, say_result
from edgefl.devices import load_network
from edgefl.devices.condition import Power
from edgefl.devices.link import CHUNK_BYTES, Disconnected, Link
from edgefl.devices.schema import Network
from edgefl.errors import ConfigError
from edgefl.host.verdict import Conditions, HeldVerdict
from edgefl.programs import Phone, ProgramOptions, RunningPhones, keeper, messages, start, tree
from edgefl.programs.messages import Begin
from edgefl.programs.phone import look_up, open_listeners
from edgefl.programs.relay import (
    AHEAD_S,
    LEAST_WINDOW_BYTES,
    STALL_S,
    EmulatedTime,
    Flow,
    PhoneLink,
    Relay,
    carry,
)
from edgefl.programs.result import ModelError, PhoneResult, ProgramsResult, judge, way_result
from edgefl.programs.view import PhonesTable, PhonesView, waiting_text
from edgefl.programs.way import LinkWay, Transmission

CAT = Phone(device="moto-g4", command=("cat",), share=0.1)


def with_loss(kind: str, pct: float) -> Network:
    network = load_network("lte")
    way = msgspec.structs.replace(network.up, loss_pct=pct, on_loss=kind)
    return msgspec.structs.replace(network, up=way)


@given(sizes=st.lists(st.integers(1, 50_000), min_size=1, max_size=20), name=st.sampled_from(["up", "down"]))
@pytest.mark.parametrize("jitter", ["none", "normal", "uniform", "exponential"])
def test_bytes_that_enter_without_a_break_arrive_as_one_message(
    jitter: str, sizes: list[int], name: str
) -> None:
    """Whatever the parts, jitter included: the way draws as the link does."""
    profile = load_network("lte")
    noisy = msgspec.structs.replace(profile.up, jitter_ms=9.0, jitter_dist=jitter, rate_cv=0.0)
    profile = msgspec.structs.replace(profile, up=noisy, down=noisy)
    way = LinkWay(profile, name, np.random.default_rng(5))
    message = getattr(Link(profile, np.random.default_rng(5)), name)(sum(sizes))
    for size in sizes:
        transmission = way.enter(size, at_s=3.0)
    assert transmission.nbytes == sum(sizes)
    assert way.due_s == pytest.approx(3.0 + message.declared_s, rel=1e-12)
    assert transmission.declared_s == pytest.approx(message.declared_s, rel=1e-9)


def test_what_enters_late_waits_for_nothing_and_what_enters_early_for_its_turn() -> None:
    way = LinkWay(load_network("3g-slow"), "down", np.random.default_rng(0))
    first = way.enter(1460, at_s=0.0)
    wire_s = 1500 * 8 / 0.78e6
    assert way.free_s == pytest.approx(wire_s)
    assert way.enter(1460, at_s=wire_s / 2) is first
    assert way.due_s == pytest.approx(0.1 + 2 * wire_s)
    second = way.enter(1460, at_s=5.0)
    assert second is not first
    assert way.due_s == pytest.approx(5.0 + 0.1 + wire_s)


def test_a_relay_that_looks_late_makes_up_for_it_and_a_sender_that_does_not() -> None:
    """Bytes that waited for room are taken to have been there when there was room; others came now."""
    now = [0.0]
    clock = SimpleNamespace(now=lambda: now[0], scale=1.0)
    flow = Flow(LinkWay(load_network("3g-slow"), "down", np.random.default_rng(0)), clock)  # type: ignore[arg-type]
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


def test_a_relay_handles_messages_that_came_in_while_it_sent() -> None:
    """A channel reads them while it sends; its descriptor does not become readable again."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end = messages.EndPhones(now=True)
        channel = Mock(waiting=True, has_room=True, fileno=ours.fileno)
        channel.receive_ready.return_value = [end]
        asyncio.run(asyncio.wait_for(Relay(channel, "run").serve(), 60.0))
    assert channel.send.call_args == call(messages.Drained())


def test_a_server_is_waited_for_at_the_end_while_it_takes_something() -> None:
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


def test_what_a_receiver_held_up_is_not_measured() -> None:
    clock = SimpleNamespace(now=lambda: 0.0, scale=1.0)
    flow = Flow(LinkWay(load_network("lte"), "up", np.random.default_rng(0)), clock)  # type: ignore[arg-type]
    flow.arrived(flow.enter(10, waited=False), 10, held_up=True)
    assert flow.finished(all_of_them=True) == []
    assert flow.nbytes == 10


def test_what_may_be_on_its_way_is_bounded() -> None:
    """A receiver that takes nothing stops the sender: the relay holds no more than its window and a part."""

    entered = 0

    async def carried() -> int:
        nonlocal entered
        clock = EmulatedTime(Begin(time.monotonic_ns(), 1.0, 0))
        flow = Flow(LinkWay(load_network("none"), "down", np.random.default_rng(0)), clock)
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
        while entered != before or not entered:  # many turns of the loop, and nothing more has entered
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

    assert asyncio.run(carried()) <= LEAST_WINDOW_BYTES + CHUNK_BYTES


def test_lost_packets_cost_their_bytes_and_a_round_trip_once() -> None:
    network = with_loss("retransmit", 20.0)
    way = LinkWay(network, "up", np.random.default_rng(1))
    for _ in range(50):
        part = way.enter(14_600, at_s=0.0)
    assert part.lost_packets > 50
    wire = part.nbytes + part.packets * 40 + part.lost_packets * 1500
    assert part.declared_s == pytest.approx(0.035 + 0.07 + wire * 8 / 13.4e6)


def test_a_lost_packet_ends_the_connection_where_the_profile_says_so() -> None:
    way = LinkWay(with_loss("disconnect", 50.0), "up", np.random.default_rng(1))
    with pytest.raises(Disconnected):
        way.enter(146_000, at_s=0.0)


def test_a_trace_sets_the_rate_of_what_enters_without_a_break() -> None:
    network = load_network("lte-varying")
    way = LinkWay(network, "down", np.random.default_rng(0))
    message = Link(network, np.random.default_rng(0)).down(500_000)
    for _ in range(50):
        way.enter(10_000, at_s=0.0)
    assert way.due_s == pytest.approx(message.declared_s)


@pytest.mark.parametrize(
    ("like", "device", "command", "code"),
    [
        (None, "pi-4", "python3 x.py", "interpreter"),
        (None, "pi-4", "7z b", "integer"),
        ("auto", "pi-4", "env node x.js", "interpreter"),
        ("crypto", "pi-4", "python3 x.py", "crypto"),
        ("torch", "pi-4", "python3 x.py", "torch"),
        ("torch:cnn-femnist@8=0.5,float=0.5", "pi-4", "x", "torch:cnn-femnist@8=0.5,float=0.5"),
        (None, "tier-p50", "python3 x.py", "torch"),
    ],
)
def test_a_commands_class_of_code_is_the_given_one_or_by_its_name(
    like: str | None, device: str, command: str, code: str
) -> None:
    """A training step's ratio for every program was off by up to nine times. `tier-p50` lists no cores."""
    (phone,) = phones_of(command.split(), [device], None, None, None, [], None, like)
    assert (phone.like, phone.share) == (code, None)
    (fixed,) = phones_of(command.split(), [device], None, None, None, [], "0.2")
    assert fixed.share == 0.2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "moto-g5"}, "did you mean 'moto-g4'"),
        ({"command": ()}, "no command"),
        ({"command": ("no-such-program",)}, "'no-such-program' not found"),
        ({"command": ("/dev/null",)}, "'/dev/null' not found, or not executable"),
        ({"command": ("cat", "a\0b")}, "NUL"),
        ({"environment": {"": "x"}}, "a name must not be empty or contain '=', got ''"),
        ({"environment": {"A=B": "x"}}, "a name must not be empty or contain '=', got 'A=B'"),
        ({"threads": 0, "share": (0.1, 0.2)}, "threads must be at least 1, got 0"),
        ({"threads": -1, "share": (0.1, 0.2)}, "threads must be at least 1, got -1"),
        ({"share": 0.0}, "share must be a finite number of cores above 0, got 0"),
        ({"share": math.nan}, "got nan"),
        ({"network": "6g"}, "network"),
        ({"folder": "/no/such"}, "folder '/no/such'"),
    ],
)
def test_what_cannot_be_is_one_line(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        look_up([msgspec.structs.replace(CAT, **changes)])
    assert "\n" not in str(caught.value)


def test_a_command_may_lie_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "command").touch(mode=0o755)
    command = msgspec.structs.replace(CAT, command=("./command",))
    look_up([msgspec.structs.replace(command, folder=str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    look_up([command])


def test_a_phone_without_a_memory_limit_may_be_the_first_of_those_in_control_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def groups(controllers: Iterable[str]) -> Mock:
        places = dict.fromkeys(controllers, Path())
        return Mock(group=lambda _: Mock(place=places.__getitem__))

    monkeypatch.setattr(keeper, "Groups", groups)
    memory = Mock()
    monkeypatch.setattr(keeper, "GroupMemory", memory)
    held = keeper.Keeper(Mock())
    launch = messages.Launch(0, (b"cat",), {}, None, 1.0, None, "cgroup", "off", (0, 1, 2))
    held._handle(launch)
    held._handle(msgspec.structs.replace(launch, phone=1, limit_mib=64.0, memory="cgroup"))
    memory.assert_called_once_with(Path(), 64.0)


def test_a_folder_that_takes_no_files_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the record is lost when the phones have ended."""
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(ConfigError, match="no file can be created"):
        start([CAT], ProgramOptions(out=tmp_path))


@pytest.mark.parametrize(
    ("shown", "says"), [("1", "shows the pids of another PID namespace"), (None, "is not mounted")]
)
def test_a_proc_of_other_processes_is_refused(
    shown: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper would wait for, and kill, processes that are not the phones'."""
    monkeypatch.setattr(os, "readlink", Mock(return_value=shown, side_effect=None if shown else OSError))
    with pytest.raises(ConfigError, match=says):
        start([CAT])


@pytest.mark.parametrize(
    ("connects", "says"),
    [
        ({9092: "server"}, "must be HOST:PORT"),
        ({9092: "localhost:99999"}, "must be HOST:PORT"),
        ({0: "localhost:80"}, "port from 1 to 65535"),
        ({9092: "no.such.host.invalid:80"}, "not found"),
    ],
)
def test_a_wrong_connection_is_one_line(connects: dict[int, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_listeners(look_up([msgspec.structs.replace(CAT, connects=connects)]))


@pytest.mark.parametrize(
    "arguments",
    [
        ["cat"],
        ["--device", "moto-g4", "--fleet", "x", "cat"],
        ["--device", "moto-g4=0", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--connect", "80", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--churn", "5", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--churn", "5,-1", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--churn", "inf,20", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--churn", "20,1e300", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--leave", "x", "--churn", "5,5", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--leave", "kil", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--leave", "kill", "cat"],
        ["--device", "moto-g4=3", "--share", "0.1", "--count", "2", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "cat", "{connect:9}"],
        ["--device", "moto-g4", "--share", "0.1", "--connect", "9=a:1", "--connect", "9=b:1", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--time-scale", "fast", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--throttle", "x", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--charge", "2", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--seed", str(2**63), "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--out", "/dev/null/x", "cat"],
        ["--device", "moto-g4", "--share", "0.1"],
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["exec", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("edgefl: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    "many", [["--count", "1000000000", "--device", "moto-g4"], ["-d", "moto-g4=1000000000"]]
)
def test_too_many_phones_are_refused_before_one_is_made(
    many: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgefl.programs.Phone", Mock(side_effect=AssertionError))
    assert main(["exec", *many, "--share", "0.1", "cat"]) == 2
    assert capsys.readouterr().err == "edgefl: phones: must be from 1 to 10000, got 1000000000\n"


def phone_result(**changes: object) -> PhoneResult:
    still = way_result(0, [], [])
    fields = {
        "phone": 0, "device": "moto-g4", "network": "lte", "command": ("cat",), "exit_code": 0, "why": "",
        "wall_s": 10.0, "cpu_s": 1.0, "wanting_s": 10.0, "declared_share": 0.1, "achieved_share": 0.1,
        "limit_mib": 512.0, "peak_mib": 1.0, "stops": 0, "connections": 0, "refused": 0, "broken": 0,
        "energy_j": None, "up": still, "down": still,
    }  # fmt: skip
    return PhoneResult(**{**fields, **changes})


def test_the_last_line_has_the_phones_time_and_the_model_error(capsys: pytest.CaptureFixture[str]) -> None:
    held = judge((), [], 1.0, Conditions())
    two = (phone_result(wall_s=8.0), phone_result(phone=1, wall_s=30.0))
    result = ProgramsResult(two, 4.0, 0, 30.0, "sigstop", "off", held, (ModelError("integer", "pi-4", 1.2),))
    say_result(result, quiet=False)
    said = capsys.readouterr().err
    assert "; 2 phones, 2 s to 7.5 s of emulated time, time_scale 4, " in said
    assert "; integer code on a real pi-4: within a factor of 1.20 (90%)" in said
    assert result.summary()["model_errors"] == [{"code": "integer", "device": "pi-4", "factor": 1.2}]
    assert "model_errors" not in result._replace(model_errors=()).summary()
    say_result(result._replace(phones=two[:1]), quiet=False)
    assert "; 1 phone, 2 s of emulated time, " in capsys.readouterr().err


def test_what_was_too_fast_or_too_slow_is_invalid() -> None:
    assert judge([phone_result()], [(1.0, 1.0)], 1.0, Conditions())[:3] == (0.0, 0.0, ())
    median, _, reasons, _ = judge([phone_result(achieved_share=0.2)], [(1.0, 1.0)], 1.0, Conditions())
    assert median == pytest.approx(0.5)
    assert [reason.split()[0] for reason in reasons] == ["median", "95th", "computing"]
    median, _, reasons, _ = judge([phone_result()], [(1.0, 1.5)] * 3, 1.0, Conditions())
    assert median == pytest.approx(0.5)
    assert reasons[-1].startswith("transmissions took 50.0% longer")
    busy = Conditions(others=0.9)
    assert judge([phone_result(achieved_share=0.2)], [], 1.0, busy).reasons[1:2] == (
        "other processes used 90% of the host",
    )
    assert judge([phone_result()], [], 1.0, busy).valid


def test_computing_whose_cpu_time_is_lost_is_neither_valid_nor_slow() -> None:
    """What was counted is half of the share: "longer than declared" would be the wrong way around."""
    lost = phone_result(cpu_s=0.5, achieved_share=0.05, uncounted_s=0.5)
    median, _, reasons, _ = judge([lost, phone_result(), lost], [], 1.0, Conditions())
    assert median == 0.0
    assert len(reasons) == 1
    assert reasons[0].startswith("phone 0: a process ignores SIGCHLD")
    assert "up to 100% of what was counted" in reasons[0]
    assert reasons[0].endswith(" (and 1 more)")
    assert judge([phone_result(uncounted_s=0.02)], [], 1.0, Conditions()).valid


def test_an_absence_is_no_time_of_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, away_ns = SimpleNamespace(ns=0), 3_000_000_000
    tree = MagicMock(
        uncounted_ns=0, **{"used_ns.return_value": 0, "wanting_ns.side_effect": lambda now_ns: now_ns}
    )
    tree.rss_mib.return_value = 0.0
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic_ns=lambda: clock.ns))
    monkeypatch.setattr(keeper, "os", SimpleNamespace(getpid=os.getpid, fork=lambda: 1))
    monkeypatch.setattr(keeper, "ProcessTree", lambda *_: tree)
    launch = messages.Launch(0, (b"cat",), {}, None, 1.0, None, "off", "off", (0, 1, 2))
    kept = keeper.KeptPhone(launch, None, accounted=False)
    for happens in (kept.start, kept.suspend, kept.resume, kept.suspend):
        happens()
        clock.ns += 2_000_000_000 if happens != kept.suspend else away_ns
    assert kept.state().wall_s == 4.0
    kept.ended()
    assert kept.state().wall_s == 4.0
    assert tree.skip.call_args_list == [call(away_ns)] * 2


@pytest.mark.parametrize(("group_mib", "peak_mib"), [(512.0, 512.0), (math.nan, 1197.0)])
def test_the_peak_of_a_limited_control_group_is_the_kernels(
    group_mib: float, peak_mib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples may be higher than the limit that the kernel enforced; an old kernel has no peak."""
    monkeypatch.setattr(keeper, "GroupMemory", Mock(return_value=Mock(peak_mib=group_mib)))
    launch = messages.Launch(0, (b"cat",), {}, None, (1.0,), 512.0, "off", "cgroup", (0, 1, 2))
    kept = keeper.KeptPhone(launch, Mock(), accounted=False)
    kept.tree = MagicMock(**{"rss_mib.return_value": 1197.0})
    kept.watch()
    assert kept.state().peak_mib == peak_mib


def test_memory_is_read_a_twentieth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(ns=1, reads=0)

    def read(_: object) -> float:
        clock.ns += 1000
        clock.reads += 1
        return float(clock.reads)

    now = SimpleNamespace(monotonic_ns=lambda: clock.ns, thread_time_ns=lambda: clock.ns)
    kept = tree.ProcessTree(os.getpid())
    try:
        monkeypatch.setattr(tree, "time", now)
        monkeypatch.setattr(tree, "private_mib", read)
        assert kept.rss_mib() == kept.rss_mib() == 1.0
        clock.ns += 20 * 1000
        assert kept.rss_mib() == 2.0
    finally:
        monkeypatch.undo()
        kept.close()


def test_a_command_of_another_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a command under ``sudo``: edgefl may not send it a signal."""
    kept = keeper.Keeper(Mock())
    kept._phones[0] = Mock(tree=SimpleNamespace(root=7), leaving=False)
    monkeypatch.setattr(keeper.os, "killpg", refused := Mock(side_effect=PermissionError))
    kept._handle(messages.Pass(2))
    assert refused.call_args == call(7, 2)


def test_sending_and_receiving_draw_their_own_power() -> None:
    phone = PhoneLink(0, load_network("lte"), Begin(time.monotonic_ns(), 1.0, 0))
    for name, times in (("up", 1), ("down", 3)):
        for _ in range(times):
            phone.flows[name].enter(10_000, waited=False)
    sent = phone.state()
    assert (sent.up_s, sent.down_s) == tuple(phone.flows[name].way.busy_s for name in ("up", "down"))
    assert sent.down_s > sent.up_s > 0
    power = Power(idle_w=0.0, busy_w=0.0, down_w=1.0, up_w=100.0, capacity_j=1.0, least_j=0.0, charge_w=0.0)
    state = Mock(cpu_s=0.0, wall_s=5.0)
    running = Mock(_held=[Mock(power=power)], _traffic=[Mock(state=sent)], scale=Mock(value=1.0))
    running._declared_share.return_value = 1.0
    used_j = RunningPhones._energy_j(running, 0, state)
    assert used_j == pytest.approx(100.0 * sent.up_s + sent.down_s)


@pytest.mark.parametrize(("leave", "leaving"), [("stop", False), ("kill", True)])
def test_after_a_signal_a_phone_leaves_no_more(
    leave: str, leaving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped command could not act on the signal, and a killed one would be started again."""
    order = Mock()
    monkeypatch.setattr(keeper.os, "killpg", order.killpg)
    kept = keeper.Keeper(Mock())
    kept._begin = Begin(time.monotonic_ns(), 1.0, 0, messages.Absence(1.0, 1.0, leave))  # type: ignore[arg-type]
    presence = Mock(on=Mock(return_value=False), changes_s=Mock(return_value=1e6))
    phone = Mock(presence=presence, present=False, leaving=leaving, over=False, throttled=None)
    phone.resume = order.resume
    kept._phones[0] = phone
    kept._handle(messages.Pass(15))
    assert order.mock_calls == [call.killpg(phone.tree.root, 15), *([] if leaving else [call.resume()])]
    kept._follow_presence()
    assert phone.present is not leaving
    assert not phone.leaving
    phone.suspend.assert_not_called()


def test_what_is_too_little_to_measure_is_not_judged() -> None:
    slept = phone_result(cpu_s=0.01, wanting_s=0.1, achieved_share=0.5)
    assert slept.cpu_error is None
    assert judge([slept], [(0.001, 0.01)], 1.0, Conditions())[:3] == (None, None, ())


def test_the_report_page_has_the_verdict_and_its_reasons() -> None:
    from edgefl.programs.report import programs_page

    carried = way_result(1000, [1.0], [1.01])
    one = phone_result(connections=1, up=carried, down=carried, why="out of memory", command=("<b>",))
    held = HeldVerdict(0.1, 0.2, ("slow <x>",), Conditions())
    result = ProgramsResult((one,), 1.0, 0, 10.0, "sigstop", "watch", held)
    text = programs_page(result, "name")
    assert "INVALID" in text
    assert "slow &lt;x&gt;" in text
    assert "out of memory" in text
    assert result.summary()["phones"][0]["up"]["bytes"] == 1000


def test_the_live_table_has_a_row_for_each_phone(capsys: pytest.CaptureFixture[str]) -> None:
    from edgefl.host.capacity import Demand, capacity_cores, choose_time_scale
    from edgefl.programs.messages import PhoneState, TrafficState

    held = look_up([CAT] * 30)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    view = PhonesTable(console)
    view.begin(held, choose_time_scale([Demand(0.5, 1.0)] * 6, cores=capacity_cores(), scale=2.0))
    said = capsys.readouterr().err
    assert said.startswith("edgefl: time_scale 2: a second of a phone takes 2 s here.")
    assert "need 3.0 cores of this host at time_scale 1" in said
    assert "--threads N" in said
    states = {
        number: PhoneState(
            phone=number, state="ended" if number < 5 else "running", wall_s=10.0, cpu_s=0.5, wanting_s=10.0,
            declared_cpu_s=0.5, rss_mib=12.0, peak_mib=12.0, stops=0, processes=1,
        )
        for number in range(30)
    }  # fmt: skip
    traffic = [TrafficState(number, 2_000_000, 0, 1, 1, 0, 0, 0.0, 0.0) for number in range(30)]
    console.print(view.picture(states, traffic))
    text = console.export_text()
    assert text.splitlines()[2].split() == ["5", "moto-g4", "running", "0.5", "100.0%", "12", "2", "0"]
    assert "and 10 more" in text
    console.file.close()


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_all() -> None:
    data = bytes(range(256)) * 4096  # 1 MiB, several times what the pipe holds
    read, write = os.pipe()
    os.set_blocking(write, False)
    with ThreadPoolExecutor(1) as pool, open(read, "rb") as reader:
        got = pool.submit(reader.read)
        with open(write, "wb") as writer:
            assert PhonesView().write(writer, data)
        assert got.result() == data


def test_a_slow_terminal_that_does_not_block_gets_all() -> None:
    lines = [f"line {number} {'x' * 60}" for number in range(200)]
    ours, theirs = pty.openpty()
    os.set_blocking(theirs, False)
    data = bytearray()
    with (
        ThreadPoolExecutor(1) as pool,
        open(theirs, "w") as terminal,
        open(ours, "rb", buffering=0) as reader,
    ):
        view = PhonesTable(Console(file=waiting_text(terminal), force_terminal=True, width=200))
        with suppress(BlockingIOError):
            while True:
                os.write(theirs, b"-" * 1000)
        writing = pool.submit(view.write, terminal.buffer, "\n".join(lines).encode())
        assert not wait([writing], timeout=0.1).done  # the terminal is full
        while not data.endswith(f"{lines[-1]}\r\n".encode()):
            assert select.select([reader], [], [], 20)[0]
            data += reader.read(1 << 16)
        assert writing.result()
    assert data.decode().lstrip("-").splitlines() == lines


def test_only_a_missing_reader_ends_a_phones_output(capsys: pytest.CaptureFixture[str]) -> None:
    view = PhonesView()
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as unread:
        assert not view.write(unread, b"a\n")
    assert not view.write(unread, b"a\n")  # closed
    assert not view.failed
    with open("/dev/full", "wb") as full:
        assert all(view.write(full, b"a\n") for _ in range(2))
    assert view.failed
    lost = "edgefl: output of the phones is lost: /dev/full cannot be written: No space left on device\n"
    assert capsys.readouterr().err == lost
