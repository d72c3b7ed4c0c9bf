"""Tests of edgefl exec with real commands: their output, signals and absences, and that nothing is left.

A host may stall, so no assertion depends on a duration in seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from edgefl.devices.presence import churn
from edgefl.errors import RunError
from edgefl.host.channel import Channel, pair
from edgefl.host.groups import ACCOUNTING, find
from edgefl.host.process import start_process
from edgefl.programs import RunningPhones, run, start
from edgefl.programs.messages import Absence
from edgefl.programs.options import no_group

from .runs import Command, options, phone

EXEC = ("exec", "--throttle", "off", "--share", "0.3")


def test_exit_codes_and_placeholders_are_passed_on(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    shell = 'echo "{i} {device} $WHO $EDGEFL_PHONE"; echo >&2 no; exit $(({i} * 3))'
    phones = [phone("sh", "-c", shell, environment={"WHO": "n{i}"}) for _ in range(3)]
    result = run(phones, options(out=tmp_path / "out"))
    assert [one.exit_code for one in result.phones] == [0, 3, 6]
    assert result.exit_code == 3
    printed = sorted(capfdbinary.readouterr().out.splitlines())
    assert printed == [f"[{i} moto-g4] {i} moto-g4 n{i} {i}".encode() for i in range(3)]
    raw = sorted((tmp_path / "out" / "phones").iterdir())
    assert [path.name for path in raw[:2]] == ["0-moto-g4.err", "0-moto-g4.out"]
    assert raw[1].read_text() == "0 moto-g4 n0 0\n"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["exit_code"], summary["awake"]) == (3, False)
    assert [one["exit_code"] for one in summary["phones"]] == [0, 3, 6]
    assert "moto-g4" in (tmp_path / "out" / "report.html").read_text()


def test_the_output_of_a_single_phone_has_no_prefix(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run([phone("sh", "-c", "printf a; kill -9 $$")], options()).exit_code == 137
    assert capfdbinary.readouterr().out == b"a"


def test_a_script_without_a_first_line_is_run_by_the_shell(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell, env and timeout do this, too. A program for another processor type is not run as a script."""
    for name, content in (("true", b'echo "$0 $1"'), ("arm", b"\x7fELF\2\1\1\0\0")):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert run([phone(str(tmp_path / "true"), "a b")], options()).exit_code == 0
    assert run([phone("true", "c")], options()).exit_code == 0
    assert run([phone("arm")], options()).exit_code == 126
    printed = capfd.readouterr()
    assert printed.out.splitlines() == [f"{tmp_path}/true a b", f"{tmp_path}/true c"]
    assert printed.err == "edgefl: arm: Exec format error\n"


def test_bytes_that_are_not_utf8_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = os.fsdecode(b"\xff")
    monkeypatch.setenv("X", odd)
    (tmp_path / odd).mkdir()
    same = phone(
        "sh", "-c", '[ "$X $PWD" = "$1" ]', "sh", f"{odd} {tmp_path / odd}", folder=str(tmp_path / odd)
    )
    assert run([same], options(out=tmp_path / odd / f"out {odd}")).exit_code == 0


def test_phones_that_leave_are_stopped_and_continue_later() -> None:
    until_stopped = 'while [ ! -e "$0" ]; do sleep 0.02; done'
    ended = Path(tempfile.gettempdir()) / "ended"
    phones = [phone("sh", "-c", until_stopped, str(ended)) for _ in range(3)]
    with start(phones, options(absence=Absence(0.3, 0.2), seed=1)) as running:
        # Up to three of these stops are absences at the start.
        while sum(state.stops for state in running.states.values()) < 4:
            running.turn(0.1)
        ended.touch()
        running.wait()
    assert running.result().exit_code == 0


def test_a_signal_reaches_a_phone_that_is_away() -> None:
    """The phone is away for minutes, so the signal must not wait for its return."""
    absence = Absence(1.0, 400.0)

    def leaves_soon(seed: int) -> bool:
        presence = churn(seed, 0, absence.mean_online_s, absence.mean_offline_s)
        left_s = presence.changes_s(0.0)
        return presence.on(0.0) and 1.0 < left_s < 2.0 and presence.changes_s(left_s) > 300.0

    seed = next(filter(leaves_soon, itertools.count()))
    with start([phone("sleep", "600")], options(absence=absence, seed=seed)) as running:
        while (state := running.states.get(0)) is None or state.state != "away":
            running.turn(0.1)
        running.forward_signal(signal.SIGTERM)
        running.wait()
    (one,) = running.result().phones
    assert (one.exit_code, one.stops) == (128 + signal.SIGTERM, 1)


def test_a_phone_that_returns_before_its_killed_command_has_ended_starts_it_again() -> None:
    absence = Absence(0.05, 2e-3, "kill")
    with start([phone("sleep", "600")], options(absence=absence, throttle="off")) as running:
        while not running.ended and (0 not in running.states or running.states[0].stops < 20):
            running.turn(0.1)
        assert running.ended == []


def test_a_phone_starts_its_killed_command_again_when_it_returns(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    count = f"echo x >> {starts}; [ $(wc -l < {starts}) -ge 3 ] || sleep 60"
    result = run([phone("sh", "-c", count)], options(absence=Absence(0.2, 0.05, "kill"), seed=3))
    assert result.exit_code == 0
    # On a busy host, the phone may leave before it has written its line, or between the line and its end.
    assert result.phones[0].stops >= len(starts.read_text().splitlines()) - 1 >= 2


NESTED = """
trap 'echo trapped; exit 7' INT TERM
(setsid sh -c 'sleep 300 & echo up; sleep 300' &)
while :; do sleep 0.05; done
"""


def command_line(*arguments: str) -> Command:
    """Start ``edgefl exec`` with two phones that start processes in new sessions; wait until both are up."""
    base = ["exec", "--throttle", "sigstop", "--memory", "watch", "--time-scale", "1", "--share", "0.3"]
    command = Command(*base, "--device", "moto-g4=2", *arguments, "--", "sh", "-c", NESTED)
    assert command.process.stdout is not None
    assert {command.process.stdout.readline()[1:2] for _ in range(2)} == {"0", "1"}  # both are up
    return command


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_remaining_processes_end(number: int) -> None:
    command = command_line()
    command.process.send_signal(number)
    code, out, _ = command.finish()
    assert sorted(out.splitlines()) == ["[0 moto-g4] trapped", "[1 moto-g4] trapped"]
    assert code == 7


@pytest.mark.parametrize(
    ("number", "trap", "code"), [(signal.SIGINT, "''", 137), (signal.SIGHUP, "'sleep 1; exit 7'", 7)]
)
def test_a_second_signal_kills_except_that_of_a_closed_terminal(number: int, trap: str, code: int) -> None:
    """A closing terminal sends SIGHUP twice, from its shell and from the kernel."""
    traps = f"trap {trap} {number}; (setsid sleep 300 &); echo up; while :; do sleep 0.05; done"
    running = start([phone("sh", "-c", traps) for _ in range(2)], options(print_lines=False))
    with running, running.forwarding_signals():
        until_up(running)
        os.kill(os.getpid(), number)
        assert running.running
        os.kill(os.getpid(), number)
        running.wait()
    assert [one.exit_code for one in running.result().phones] == [code, code]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_commands_ignore_the_signals_that_edgefl_ignores(number: int) -> None:
    """``nohup``, or a shell that starts a background job, makes the started programs ignore signals."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        running = start([phone("sh", "-c", f"kill -{number} $$; exit 7")], options())
        with running, running.forwarding_signals():
            assert signal.getsignal(number) is signal.SIG_IGN
            running.wait()
    finally:
        signal.signal(number, before)
    assert running.result().exit_code == 7


def test_a_command_has_the_limits_and_the_descriptors_that_edgefl_was_started_with() -> None:
    """edgefl raises only its own limit of open files. A shell passes the descriptors of ``<(…)`` to a
    command. No other descriptor is open.
    """
    with tempfile.TemporaryFile() as given:
        given.write(b"given")
        given.flush()
        number = given.fileno()
        shell = f"ulimit -Sn; ulimit -Hn; cat /dev/fd/{number}; echo; ls /proc/self/fd"
        command = [sys.executable, "-m", "edgefl", *EXEC, "-q", "-d", "moto-g4", "--", "sh", "-c", shell]
        limited = ["sh", "-c", 'ulimit -Sn 256; ulimit -Hn; exec "$@"', "sh", *command]
        done = subprocess.run(limited, pass_fds=[number], stdout=subprocess.PIPE, check=False)
    hard, soft, same, text, *numbers = done.stdout.split()
    assert (soft, same) == (b"256", hard)
    assert text == b"given"
    assert {int(one) for one in numbers} <= {0, 1, 2, number, 3, 4}  # ls itself opens 3 or 4


def until_up(running: RunningPhones) -> None:
    """Wait until both phones have three processes: a shell, a child that it left running, and a sleep."""
    while any(running.states.get(n) is None or running.states[n].processes < 3 for n in range(2)):
        running.turn(0.1)


def test_phones_end_when_the_reader_of_their_output_ends() -> None:
    with Command(*EXEC, "--device", "moto-g4=2", "--", "yes").process as child:
        assert child.stdout is not None
        assert child.stdout.readline()[-2:] == "y\n"
        child.stdout.close()  # like ``| head -1``
        assert child.wait() == 128 + signal.SIGPIPE


def test_a_network_without_connections_is_said_to_limit_nothing() -> None:
    command = [*EXEC, "-d", "moto-g4", "--accept-invalid", "--network", "3g-slow", "--", "true"]
    with Command(*command).process as child:
        _, errors = child.communicate()
    assert errors.splitlines()[0] == (
        "edgefl: --network 3g-slow limits nothing without --connect PORT=HOST:PORT"
    )


def test_lost_output_is_reported_once_and_ends_no_phone() -> None:
    command = [sys.executable, "-m", "edgefl", *EXEC, "-d", "moto-g4=2", "--accept-invalid", "--"]
    command += ["sh", "-c", "echo a; sleep 0.1; echo b; exec true"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    lost, verdict = done.stderr.splitlines()[-2:]
    assert done.stderr.count("cannot be written") == 1
    assert "No space left on device" in lost
    assert "; 2 phones" in verdict  # the verdict itself depends on this host
    assert done.returncode == 1


def test_an_unwritable_record_hides_neither_verdict_nor_exit_code(tmp_path: Path) -> None:
    out = tmp_path / "out"
    deletes = 'rmdir "$0"; touch "$0"; exit 7'
    command = Command(*EXEC, "-d", "moto-g4", "--out", str(out), "--", "sh", "-c", deletes, str(out))
    code, _, err = command.finish()
    assert code == 7
    verdict, trouble = err.splitlines()[-2:]
    assert "; 1 phone" in verdict
    assert trouble.startswith(f"edgefl: {out}")
    assert "cannot be written" in trouble


@pytest.mark.parametrize(
    "victims", [("main",), ("main", "keeper"), ("main", "relay"), ("keeper",), ("relay",)], ids="-".join
)
def test_nothing_outlives_killed_processes_of_edgefl(victims: tuple[str, ...]) -> None:
    command = command_line()
    for part in [part_of(command, name) for name in victims]:
        part.kill()
    _, _, err = command.finish()  # the fixture `nothing_left` looks for the phones
    if "main" not in victims:
        assert "ended" in err.splitlines()[-1]
        assert command.process.returncode == 1


def part_of(command: Command, name: str) -> psutil.Process:
    return psutil.Process(command.process.pid) if name == "main" else command.child(f"edgefl-{name}")


def test_no_group_outlives_a_killed_keeper() -> None:
    if why := no_group("memory") or no_group("cpu"):
        pytest.skip(f"control groups: {why}")
    command = command_line("--throttle", "cgroup", "--memory", "cgroup")
    part_of(command, "keeper").kill()
    command.ends(1)


def test_a_process_without_its_environment_does_not_outlive_a_killed_keeper() -> None:
    """Only its control group shows which phone it belongs to."""
    if why := no_group(ACCOUNTING):
        pytest.skip(f"control groups: {why}")
    hides = "env -i setsid sh -c 'echo $$; exec sleep 300' & wait"
    command = Command(*EXEC, "--device", "moto-g4", "--", "sh", "-c", hides)
    assert command.process.stdout is not None
    left, keeper = psutil.Process(int(command.process.stdout.readline())), part_of(command, "keeper")
    keeper.kill()
    command.ends(1)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    assert not list(find(ACCOUNTING).folder.glob(f"edgefl-{keeper.pid}-*"))


def test_ctrl_z_stops_neither_the_phones_nor_their_links() -> None:
    """A terminal sends SIGTSTP to all processes of edgefl's group."""
    with start([phone("sleep", "300")], options()):
        parts = {child.name(): child.pid for child in psutil.Process().children()}
        for name in ("edgefl-keeper", "edgefl-relay"):
            status = Path(f"/proc/{parts[name]}/status").read_text()
            (ignored,) = re.findall(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
            assert int(ignored, 16) >> (signal.SIGTSTP - 1) & 1, name


def test_leaving_the_context_ends_the_phones() -> None:
    with start([phone("sleep", "300"), phone("sleep", "300")], options()) as running:
        assert running.running
    assert [one.exit_code for one in running.result().phones] == [137, 137]


def test_a_process_of_edgefl_that_ends_at_its_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(_: str, incoming: object, *__: object, **___: object) -> tuple[object, Channel[object]]:
        ours, theirs = pair()
        theirs.close()
        return subprocess.Popen(["true"]), Channel(ours, incoming)

    monkeypatch.setattr("edgefl.programs.running.start_process", ended)
    with pytest.raises(RunError, match="failed to start"):
        start([phone("true")], options())


def test_a_start_that_fails_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture `nothing_left` finds the pipes of the phones' output."""
    (tmp_path / "phones").touch()
    with pytest.raises(FileExistsError):
        start([phone("true"), phone("true")], options(out=tmp_path))
    monkeypatch.setattr(RunningPhones, "_process", Mock(side_effect=RunError("no process")))
    with pytest.raises(RunError, match="no process"):
        start([phone("true"), phone("true")], options())


def test_modules_of_the_current_folder_are_not_edgefls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder of a program may contain a file named like a module that edgefl imports.

    Python processes that the program starts still import from the current folder.
    """
    for name in ("asyncio", "select", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr("edgefl.programs.running.start_process", start_process)  # not forked: imports anew
    assert run([phone("sh", "-c", '[ -z "$PYTHONSAFEPATH" ]')], options()).exit_code == 0


def test_output_that_a_process_out_of_reach_holds_open_does_not_delay_the_end(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    with contextlib.ExitStack() as held, start([phone("printf", "a"), phone("true")], options()) as running:
        for output in running._outputs:
            held.callback(os.close, os.open(f"/proc/self/fd/{output}", os.O_WRONLY))
        running.wait()
    assert capfdbinary.readouterr().out == b"[0 moto-g4] a\n"


def test_a_process_out_of_reach_that_writes_on_does_not_delay_the_end() -> None:
    """Mutant: after all phones have ended, edgefl keeps waiting for more output."""

    def write_on(pipe: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            while True:
                os.write(pipe, b".")
                time.sleep(0.05)

    with start([phone("true"), phone("true")], options()) as running:
        pipe = os.open(f"/proc/self/fd/{next(iter(running._outputs))}", os.O_WRONLY)
        writer = threading.Thread(target=write_on, args=(pipe,), daemon=True)
        writer.start()
        running.wait()
    writer.join()
    os.close(pipe)


def test_a_process_without_its_environment_ends_with_its_phone(tmp_path: Path) -> None:
    left = tmp_path / "left"
    leaves = phone("sh", "-c", f"env -i sh -c 'sleep 300 & echo $! > {left}'")
    with start([leaves, phone("sleep", "300")], options(throttle="off")) as running:
        while not running.ended:
            running.turn(0.1)
        assert running.ended == [0]
        assert not psutil.pid_exists(int(left.read_text()))


def test_a_process_without_its_environment_and_session_ends_with_the_last_phone() -> None:
    hidden = phone("sh", "-c", "env -i setsid sh -c 'sleep 300 &'")
    assert run([hidden, hidden], options(throttle="off")).exit_code == 0


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "programs.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.startswith("[0, 1] ")
