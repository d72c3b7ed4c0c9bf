"""Tests of phones that run any command: their settings and their keeper. No process is started."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import msgspec
import pytest
from shell import Shell

from edgefl.cli import main
from edgefl.cli.programs import phones_of
from edgefl.errors import ConfigError
from edgefl.host.groups import Place
from edgefl.programs import Phone, ProgramOptions, keeper, messages, options, start, tree
from edgefl.programs.messages import Begin
from edgefl.programs.phone import look_up, open_listeners
from edgefl.programs.running import remove_outputs, remove_record

CAT = Phone(device="moto-g4", command=("cat",), share=0.1)
LAUNCH = messages.Launch(0, (b"cat",), {}, None, (1.0,), None, "off", "off", (0, 1, 2))
replace = msgspec.structs.replace


@pytest.mark.parametrize(
    ("like", "device", "command", "code"),
    [
        (None, "pi-4", "python3 x.py", "interpreter"),
        ("auto", "pi-4", "7z b", "integer"),
        ("crypto", "pi-4", "python3 x.py", "crypto"),
        ("torch", "pi-4", "python3 x.py", "torch"),
        ("torch:cnn-femnist@8=0.5,float=0.5", "pi-4", "x", "torch:cnn-femnist@8=0.5,float=0.5"),
        (None, "tier-p50", "python3 x.py", "torch"),
    ],
)
def test_a_commands_class_of_code_is_given_or_follows_from_its_name(
    like: str | None, device: str, command: str, code: str
) -> None:
    """Profile `tier-p50` lists no cores, so every program runs at its training speed."""
    (phone,) = phones_of(command.split(), [device], None, None, None, [], None, like, seed=0)
    assert (phone.like, phone.share) == (code, None)
    (fixed,) = phones_of(command.split(), [device], None, None, None, [], "0.2", seed=0)
    assert fixed.share == 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "moto-g5"}, "did you mean 'moto-g4'"),
        ({"command": ()}, "no command"),
        ({"command": "sleep 5"}, "command must be a sequence of strings, .*, got 'sleep 5'"),
        ({"command": ("sleep", 5)}, r"command must be a sequence of strings, .*, got \('sleep', 5\)"),
        ({"command": 5}, "command must be a sequence of strings, .*, got 5"),
        ({"command": {"sleep"}}, "command must be a sequence of strings, .*, got {'sleep'}"),
        ({"command": ("no-such-program",)}, "'no-such-program' not found"),
        ({"command": ("/dev/null",)}, "'/dev/null' not found, or not executable"),
        ({"command": ("cat", "a\0b")}, "NUL"),
        ({"environment": {"": "x"}}, "a name must not be empty or contain '=', got ''"),
        ({"environment": {"A": 5}}, "environment: names and values must be strings, got 'A': 5"),
        ({"environment": {"A=B": "x"}}, "a name must not be empty or contain '=', got 'A=B'"),
        ({"threads": 0, "share": (0.1, 0.2)}, "threads must be at least 1, got 0"),
        ({"threads": -1, "share": (0.1, 0.2)}, "threads must be at least 1, got -1"),
        ({"share": 0.0}, "share must be a finite number of cores above 0, got 0"),
        ({"share": math.nan}, "got nan"),
        ({"network": "6g"}, "network"),
        ({"network": ""}, "network profile '' not found"),
        ({"folder": "/no/such"}, "folder '/no/such'"),
        ({"connects": {9092: "server"}}, "must be HOST:PORT"),
        ({"connects": {9092: "localhost:99999"}}, "must be HOST:PORT"),
        ({"connects": {0: "localhost:80"}}, "port from 1 to 65535"),
        ({"connects": {9092: "no.such.host.invalid:80"}}, "not found"),
        ({"connects": {9092: "127.0.0.1:9092"}}, r"^connect 9092=127\.0\.0\.1:9092: must lead elsewhere"),
        ({"connects": {9092: "0.0.0.0:9092"}}, "must lead elsewhere; the phone itself listens there"),
    ],
)
def test_an_invalid_phone_is_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_listeners(look_up([replace(CAT, **changes)]))
    assert "\n" not in str(caught.value)


def test_a_relative_command_is_found_in_the_phones_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "command").touch(mode=0o755)
    command = replace(CAT, command=("./command",))
    look_up([replace(command, folder=str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    look_up([command])


def test_the_first_phone_in_a_control_group_may_have_no_memory_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def groups(controllers: Iterable[str]) -> Mock:
        places = dict.fromkeys(controllers, Path())
        return Mock(group=lambda _: Mock(place=places.__getitem__))

    monkeypatch.setattr(keeper, "Groups", groups)
    memory = Mock()
    monkeypatch.setattr(keeper, "GroupMemory", memory)
    held = keeper.Keeper(Mock())
    held._handle(replace(LAUNCH, throttle="cgroup"))
    held._handle(replace(LAUNCH, throttle="cgroup", phone=1, limit_mib=64.0, memory="cgroup"))
    memory.assert_called_once_with(Path(), 64.0)


@pytest.mark.parametrize(("version", "moves"), [(1, []), (2, [call(["cpu"]), call(["memory"])])])
def test_under_version_2_edgefl_moves_into_a_group_of_its_own_before_the_keeper_starts(
    version: int, moves: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper cannot limit groups below a group that holds edgefl's main process."""
    monkeypatch.setattr(options, "find", lambda _: Place(Path(), version))
    groups = MagicMock()
    monkeypatch.setattr(options, "Groups", groups)
    with options.own_groups(ProgramOptions(throttle="cgroup", memory="cgroup")):
        assert groups.call_args_list == moves
    with options.own_groups(ProgramOptions(throttle="sigstop", memory="watch")):
        assert groups.call_args_list == moves


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the record could not be written when the phones have ended."""
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(ConfigError, match="no file can be created"):
        start([CAT], ProgramOptions(out=tmp_path))


@pytest.mark.parametrize(
    ("share", "verdict"),
    [((0.3,) * 5, "fits"), ((0.8, 0.1), "tight"), ((1.5, 0.1), "overloaded"), (1.5, "overloaded")],
)
def test_a_given_time_scale_is_judged_by_the_share_of_each_core(
    share: float | tuple[float, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: shares of 0.3 on five cores were "overloaded" on any host, because they add up to 1.5."""
    monkeypatch.setattr("edgefl.host.capacity.capacity_cores", lambda: 16.0)
    held = look_up([replace(CAT, share=share)])
    assert options.scale_for(held, ProgramOptions(time_scale=1.0)).verdict == verdict


def test_a_misspelt_way_to_leave_is_refused() -> None:
    absence = messages.Absence(60.0, 20.0, "kil")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave 'kil'"):
        start([CAT], ProgramOptions(absence=absence))


def test_the_output_of_an_earlier_commands_phones_is_removed(tmp_path: Path) -> None:
    """Otherwise `edgefl flower` would take messages in it for messages of its own phones."""
    for name in ("0-pixel-4.out", "12-moto-g4.err", "0-pixel-4.txt", "my-notes.out"):
        (tmp_path / name).touch()
    remove_outputs(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"0-pixel-4.txt", "my-notes.out"}
    remove_outputs(tmp_path / "none")


def test_the_record_of_an_earlier_command_is_removed(tmp_path: Path) -> None:
    """Otherwise its verdict would remain there if the new command were killed."""
    (tmp_path / "report.html").touch()
    remove_record(tmp_path)
    assert (tmp_path / "report.html").exists()  # it belongs to another program
    (tmp_path / "summary.json").touch()
    remove_record(tmp_path)
    assert not any(tmp_path.iterdir())


def test_out_must_be_a_path() -> None:
    given: list[Any] = [5, ""]
    for out in given:
        with pytest.raises(ConfigError, match=f"^out: must be a path, got {out!r}$"):
            start([CAT], ProgramOptions(out=out))


@pytest.mark.parametrize(
    ("shown", "message"), [("1", "shows the pids of another PID namespace"), (None, "is not mounted")]
)
def test_a_proc_of_another_pid_namespace_is_refused(
    shown: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the keeper would wait for processes that are not the phones', and kill them."""
    monkeypatch.setattr(os, "readlink", Mock(return_value=shown, side_effect=None if shown else OSError))
    with pytest.raises(ConfigError, match=message):
        start([CAT])


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
        ["--device", "moto-g4", "--share", "0.1", "--churn", "1e-6,1e-6", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--leave", "x", "--churn", "5,5", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--leave", "kil", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--leave", "kill", "cat"],
        ["--device", "moto-g4=3", "--share", "0.1", "--count", "2", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "cat", "{connect:9}"],
        ["--device", "moto-g4", "--share", "0.1", "--connect", "9=a:1", "--connect", "9=b:1", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--time-scale", "fast", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--time-scale", "1e-300", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--time-scale", "1e300", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--time-scale", "nan", "cat"],
        ["--device", "moto-g4", "--share", "1e-9", "cat"],
        ["--device", "moto-g4", "--share", "0.1x2", "--time-scale", "200000", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--throttle", "x", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--charge", "2", "cat"],
        ["--device", "pi-4", "--share", "0.1", "--charge", "0.5", "cat"],
        ["--device", "pi-4", "--device", "moto-g4", "--share", "0.1", "--charge", "0.15", "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--seed", str(2**63), "cat"],
        ["--device", "moto-g4", "--share", "0.1", "--out", "/dev/null/x", "cat"],
        ["--device", "moto-g4", "--share", "0.1"],
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(arguments: list[str], edgefl: Shell) -> None:
    edgefl.refuses(2, "exec", *arguments)


@pytest.mark.parametrize("many", ["--count 1000000000 --device moto-g4", "-d moto-g4=1000000000"])
def test_too_many_phones_are_refused_before_the_first_is_made(
    many: str, monkeypatch: pytest.MonkeyPatch, edgefl: Shell
) -> None:
    monkeypatch.setattr("edgefl.programs.Phone", Mock(side_effect=AssertionError))
    error = edgefl.refuses(2, "exec", *many.split(), "--share", "0.1", "cat")
    assert error == "phones: must be from 1 to 10000, got 1000000000"


@pytest.mark.parametrize(
    ("memory", "says"), [("cgroup", True), ("watch", True), ("auto", False), ("off", False)]
)
def test_devices_that_a_memory_mechanism_does_not_limit_are_named(
    memory: str, says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgefl.programs.run", Mock(side_effect=ConfigError("not started")))
    devices = ("-d", "paper-uniform=2", "-d", "moto-g4")
    assert main(["exec", *devices, "--share", "0.1", "--memory", memory, "cat"]) == 2
    note = (
        f"edgefl: --memory {memory} does not limit paper-uniform: without app_limit_mib in its profile, a "
        "device has no memory limit"
    )
    assert capsys.readouterr().err.splitlines() == [note] * says + ["edgefl: not started"]


def test_a_charge_needs_a_device_with_a_known_power_of_computing(tmp_path: Path) -> None:
    """Otherwise its battery would never run low."""
    (file := tmp_path / "own.toml").write_text(
        'id = "own"\nname = "Own"\nclass = "budget"\ncpu.rate_gflops.train = 1.0\n'
        "battery = { capacity_mah = 9 }\n"
        'sources = { "cpu.rate_gflops.train" = "a", battery = "a" }\n'
    )
    with pytest.raises(ConfigError, match=r"^device 'own' does not give its power while computing"):
        start([replace(CAT, device=str(file))], ProgramOptions(charge=0.5))


def test_an_absence_does_not_count_as_time_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, away_ns = SimpleNamespace(ns=0), 3_000_000_000
    tree = MagicMock(
        uncounted_ns=0, **{"used_ns.return_value": 0, "wanting_ns.side_effect": lambda now_ns: now_ns}
    )
    tree.rss_mib.return_value = 0.0
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic_ns=lambda: clock.ns))
    monkeypatch.setattr(keeper, "os", SimpleNamespace(getpid=os.getpid, fork=lambda: 1))
    monkeypatch.setattr(keeper, "ProcessTree", lambda *_: tree)
    kept = keeper.KeptPhone(LAUNCH, None, accounted=False)
    for happens in (kept.start, kept.suspend, kept.resume, kept.suspend):
        happens()
        clock.ns += 2_000_000_000 if happens != kept.suspend else away_ns
    assert (kept.state().wall_s, kept.state().age_s) == (4.0, 10.0)
    kept.ended()
    assert kept.state().wall_s == 4.0
    assert tree.skip.call_args_list == [call(away_ns)] * 2


@pytest.mark.parametrize(("group_mib", "peak_mib"), [(512.0, 512.0), (math.nan, 1197.0)])
def test_a_limited_phones_peak_and_end_are_those_of_its_control_group(
    group_mib: float, peak_mib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of memory use may exceed the limit that the kernel enforced. Old kernels report no peak."""
    memory = Mock(peak_mib=group_mib, kills=0)
    monkeypatch.setattr(keeper, "GroupMemory", Mock(return_value=memory))
    kept = keeper.KeptPhone(replace(LAUNCH, limit_mib=512.0, memory="cgroup"), Mock(), accounted=False)
    kept.tree = MagicMock(**{"rss_mib.return_value": 1197.0})
    kept.watch()
    assert kept.state().peak_mib == peak_mib
    assert (kept.why, kept.tree.kill.called) == ("", False)
    memory.kills = 1
    kept.watch()
    assert (kept.why, kept.tree.kill.called) == ("out of memory: the device allows an app 512 MiB", True)


def test_memory_is_counted_only_after_a_new_process_has_become_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before that, the process has a copy of the keeper's memory."""
    kept = tree.ProcessTree(os.getpid())
    try:
        monkeypatch.setattr(kept, "_refresh_if_old", Mock())
        monkeypatch.setattr(tree, "private_mib", lambda _: 30.0)
        monkeypatch.setattr(tree, "is_fork", lambda _: True)
        assert kept.rss_mib() == 0.0
        monkeypatch.setattr(tree, "is_fork", lambda _: False)
        assert kept.rss_mib() == 30.0
    finally:
        kept.close()


def test_reading_memory_takes_at_most_a_twentieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
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
        monkeypatch.setattr(tree, "is_fork", lambda _: False)  # it is true if tests run in forks
        assert kept.rss_mib() == kept.rss_mib() == 1.0
        clock.ns += 20 * 1000
        assert kept.rss_mib() == 2.0
    finally:
        monkeypatch.undo()
        kept.close()


def test_a_signal_to_another_users_command_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a command under ``sudo`` cannot be signalled."""
    kept = keeper.Keeper(Mock())
    kept._phones[0] = Mock(tree=SimpleNamespace(root=7), leaving=False, signals=[])
    monkeypatch.setattr(keeper, "is_fork", lambda pid: False)
    monkeypatch.setattr(keeper.os, "killpg", refused := Mock(side_effect=PermissionError))
    kept._handle(messages.Pass(2))
    assert refused.call_args == call(7, 2)


@pytest.mark.parametrize(("turn_ns", "turns"), [(0, 2), (10**9, 1)])
def test_phones_are_throttled_for_up_to_half_of_the_time_while_others_start(
    turn_ns: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, clock = list[str](), SimpleNamespace(ns=0)

    def now() -> int:
        clock.ns += 1_000
        return int(clock.ns)

    def turn(number: int, now_ns: int) -> int:
        order.append(f"throttle {number}")
        clock.ns += turn_ns
        return now_ns + 10**12

    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic_ns=now))
    kept = keeper.Keeper(Mock())
    for number in range(2):
        start = partial(order.append, f"start {number}")
        kept._phones[number] = Mock(start=start, throttled=Mock(turn=partial(turn, number)))
    kept._handle(Begin(0, 1.0, 0))
    assert order == ["start 0", "throttle 0", "start 1", "throttle 1"][: 2 + turns]


def test_an_absence_at_the_start_counts_as_an_absence() -> None:
    kept = keeper.Keeper(Mock())
    kept._phones[0] = phone = Mock()
    kept._handle(Begin(0, 1.0, 0, messages.Absence(1e-3, 1e9)))
    assert (phone.start.called, phone.stops) == (False, 1)


def test_a_signal_waits_until_a_new_process_has_become_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, the process is not in a group of its own, or ignores the signal."""
    kept = keeper.Keeper(Mock())
    processes = SimpleNamespace(root=7, orphans=set())
    kept._phones[0] = Mock(tree=processes, leaving=False, present=True, signals=[])
    monkeypatch.setattr(keeper.os, "killpg", sent := Mock())
    monkeypatch.setattr(keeper, "children_of", lambda pid: [7])
    monkeypatch.setattr(keeper, "is_fork", lambda pid: True)
    kept._handle(messages.Pass(15))
    kept._check()
    assert not sent.called
    monkeypatch.setattr(keeper, "is_fork", lambda pid: False)
    kept._check()
    kept._check()
    assert sent.mock_calls == [call(7, 15)]


def test_a_process_that_has_become_one_of_another_user_does_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An example is ``sudo`` in the background, which edgefl cannot kill."""
    left = MagicMock()
    left.__len__.return_value, left.kill.return_value = 1, False
    phone = Mock(tree=left, throttled=None, leaving=False, why="", launch=LAUNCH)
    kept = keeper.Keeper(Mock())
    monkeypatch.setattr(kept, "_check", Mock())
    monkeypatch.setattr(kept, "_finish", finish := Mock())
    kept._codes[0] = 0
    kept._end_phone(phone)
    assert finish.call_args == call(phone, 0)


@pytest.mark.parametrize(("leave", "leaving"), [("stop", False), ("kill", True)])
def test_a_phone_does_not_go_offline_after_a_signal(
    leave: str, leaving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped command could not act on the signal, and a killed one would be started again."""
    order = Mock()
    monkeypatch.setattr(keeper.os, "killpg", order.killpg)
    kept = keeper.Keeper(Mock())
    kept._begin = Begin(time.monotonic_ns(), 1.0, 0, messages.Absence(1.0, 1.0, leave))  # type: ignore[arg-type]
    presence = Mock(on=Mock(return_value=False), changes_s=Mock(return_value=1e6))
    phone = Mock(presence=presence, present=False, leaving=leaving, over=False, throttled=None, signals=[])
    phone.resume = order.resume
    kept._phones[0] = phone
    kept._handle(messages.Pass(15))
    assert order.mock_calls == [call.killpg(phone.tree.root, 15), *([] if leaving else [call.resume()])]
    kept._follow_presence()
    assert phone.present is not leaving
    assert not phone.leaving
    phone.suspend.assert_not_called()
