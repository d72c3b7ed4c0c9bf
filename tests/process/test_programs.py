"""Phones that run real commands: what they are let do, what is passed on, and that nothing is left.

Nothing here is held to seconds: a host may stall. What must hold is an order, a bound that no stall breaks,
or the identity of what was declared.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from edgefl.devices import load_device
from edgefl.devices.presence import churn
from edgefl.host.groups import ACCOUNTING, find
from edgefl.host.memory import private_mib
from edgefl.programs import Phone, ProgramOptions, RunningPhones, run, start
from edgefl.programs.messages import Absence
from edgefl.programs.relay import CLOSE_AT_ONCE, LEAST_WINDOW_BYTES
from edgefl.programs.running import OUT_OF_FILES, no_group
from edgefl.programs.tree import ProcessTree

from .runs import UNPRIVILEGED, Command, needs_unprivileged


def phone(*command: str, **changes: object) -> Phone:
    return Phone(**{"device": "moto-g4", "command": command, "share": 0.3, **changes})  # type: ignore[arg-type]


def python(code: str, **changes: object) -> Phone:
    return phone(sys.executable, "-I", "-S", "-c", code, **changes)


def options(**changes: object) -> ProgramOptions:
    return ProgramOptions(**{"time_scale": 1.0, "throttle": "sigstop", "memory": "watch", **changes})  # type: ignore[arg-type]


@pytest.fixture(params=["sigstop", "cgroup"])
def throttle(request: pytest.FixtureRequest) -> str:
    if request.param == "cgroup" and (why := no_group("cpu") or no_group("memory")):
        pytest.skip(f"control groups: {why}")
    return str(request.param)


class Echo(threading.Thread):
    """A server that sends back what it gets, until the sender's end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def run(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            got = b""
            try:
                while data := peer.recv(1 << 16):
                    got += data
                peer.sendall(got)
            except OSError:
                return

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    server.start()
    yield server
    server.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


SEND = """
import os, socket, sys
host, port = os.environ["EDGEFL_CONNECT_%d"].split(":")
with socket.create_connection((host, int(port))) as peer:
    peer.sendall(bytes(range(256)) * %d)
    peer.shutdown(socket.SHUT_WR)
    got = b""
    while data := peer.recv(65536):
        got += data
print(len(got), got == bytes(range(256)) * %d)
"""


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
    assert summary["exit_code"] == 3
    assert [one["exit_code"] for one in summary["phones"]] == [0, 3, 6]
    assert "moto-g4" in (tmp_path / "out" / "report.html").read_text()


def test_one_phone_has_the_output_to_itself(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run([phone("sh", "-c", "printf a; kill -9 $$")], options()).exit_code == 137
    assert capfdbinary.readouterr().out == b"a"


def test_a_phone_and_all_that_it_starts_have_one_share(throttle: str) -> None:
    """What two busy processes got while the keeper had to wait for a core is taken back, but for a slice."""
    busy = "while :; do :; done"
    two = phone("sh", "-c", f"({busy}) & {busy}", share=0.2)
    with start([two], options(throttle=throttle)) as running:
        while (state := running.states.get(0)) is None or not 0.4 < state.cpu_s <= 0.2 * state.wall_s + 0.1:
            running.turn(0.5)
    (one,) = running.result().phones
    assert one.wanting_s <= one.wall_s
    assert one.declared_share == 0.2


LOOP = "while :; do :; done"


@pytest.mark.parametrize(
    ("command", "processes", "least", "most"),
    [
        pytest.param(LOOP, 1, 0.095, 0.105, marks=pytest.mark.slow),
        pytest.param(f"({LOOP}) & {LOOP}", 2, 0.19, 0.21, marks=pytest.mark.slow),
        (f"({LOOP}) & ({LOOP}) & ({LOOP}) & {LOOP}", 4, 0.24, 0.26),
        (f"sleep 1000 & {LOOP}", 2, 0.095, 0.195),  # a signal wakes it, and it may wait for a core
    ],
)
def test_each_busy_process_has_a_core_of_the_device(
    throttle: str, command: str, processes: int, least: float, most: float
) -> None:
    """Also those that the shell has just started: they get theirs from the next stop on."""
    with start([phone("sh", "-c", command, share=(0.05, 0.1, 0.1))], options(throttle=throttle)) as running:
        while (first := running.states.get(0)) is None or first.processes < processes:
            running.turn(0.5)
        while not first.cpu_s + 0.4 < (last := running.states[0]).cpu_s <= last.declared_cpu_s + 0.1:
            running.turn(0.5)
    share = (last.declared_cpu_s - first.declared_cpu_s) / (last.wanting_s - first.wanting_s)
    assert least <= share <= most


def test_threads_of_processes_started_since_the_last_look_count_too() -> None:
    """A phone that starts loops between two stops has cores for all of them, not for its shell alone."""
    command = "read line; (while :; do :; done) & (while :; do :; done) & echo started; read line"
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        tree = ProcessTree(shell.pid)
        try:
            tree.refresh()
            assert len(tree) == 1
            assert shell.stdin
            assert shell.stdout
            shell.stdin.write(b"go\n")
            shell.stdin.flush()
            assert shell.stdout.readline() == b"started\n"
            assert tree.runnable() >= 2
        finally:
            tree.kill()
            tree.close()


def test_a_phone_that_sleeps_wants_no_core(throttle: str) -> None:
    (one,) = run([phone("sleep", "1")], options(throttle=throttle)).phones
    assert one.wall_s >= 1.0
    assert one.wanting_s < one.wall_s
    assert one.cpu_error is None


SHORT_CHILDREN = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(150):
    if (pid := os.fork()) == 0:
        while time.process_time() < 3e-3:
            pass
        os._exit(0)
    try:
        os.waitpid(pid, 0)  # returns when the child has ended
    except ChildProcessError:
        pass
"""
CHILDREN_S = 150 * 3e-3


def test_cpu_time_of_children_that_nobody_waits_for_counts(throttle: str) -> None:
    (one,) = run([python(SHORT_CHILDREN, share=0.5)], options(throttle=throttle)).phones
    if no_group("cpuacct"):
        assert one.uncounted
    else:
        assert one.cpu_s >= CHILDREN_S
        assert one.uncounted_s == 0.0


def test_without_control_groups_lost_cpu_time_of_children_is_never_valid() -> None:
    needs_unprivileged()
    out = Path(tempfile.gettempdir()) / "out"  # in the test's own folder, which ``nothing_left`` removes
    out.parent.chmod(0o755)
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    fixed = ["--throttle", "sigstop", "--memory", "off", "--time-scale", "1", "--share", "0.5"]
    command = ["exec", *fixed, "-d", "moto-g4", "--out", str(out / "run"), "--", "python3", "-IBSc"]
    code, _, err = Command(*command, SHORT_CHILDREN, before=UNPRIVILEGED).finish()
    assert (code, "INVALID: phone 0: a process ignores SIGCHLD" in err) == (3, True), err
    (found,) = json.loads((out / "run" / "summary.json").read_text())["phones"]
    assert found["uncounted_s"] >= CHILDREN_S - found["cpu_s"]
    assert found["cpu_error"] is None


def test_a_phone_over_its_memory_is_ended(throttle: str) -> None:
    hog = "b = bytearray(700 << 20); b[::4096] = b'x' * len(b[::4096]); import time; time.sleep(60)"
    by = {"sigstop": "watch", "cgroup": "cgroup"}[throttle]
    shell = '"$0" -I -S -c "$1"; exit $?'
    starts = phone("sh", "-c", shell, sys.executable, hog, share=1.0)
    (one,) = run([starts], options(throttle="off", memory=by)).phones
    assert one.exit_code == 137
    assert one.why.startswith("out of memory")
    assert one.limit_mib == 512


FORKS = """
import os, sys
block = b"x" * (150 << 20)
read, write = os.pipe()
for _ in range(6):
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
open(sys.argv[1]).read()  # until the test has seen the forks
"""


def test_memory_that_forks_share_counts_once(tmp_path: Path) -> None:
    """Counted for each process it would be twice the limit."""
    os.mkfifo(fifo := tmp_path / "fifo")
    forks = phone(sys.executable, "-I", "-S", "-c", FORKS, str(fifo))
    with start([forks], options(throttle="off")) as running:
        seen = None  # the memory is measured less often than the processes are counted
        while not running.ended and (seen is None or seen.processes < 7 or seen.rss_mib < 150):
            running.turn(0.1)
            seen = running.states.get(0)
        assert running.ended == []
        fifo.write_bytes(b"")
        running.wait()
    (one,) = running.result().phones
    assert (one.exit_code, one.why) == (0, "")
    assert seen is not None
    assert seen.rss_mib <= one.peak_mib < 250


SPAWNS = """
import os, sys
block = b"x" * (100 << 20)
opens = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
print("ready", flush=True)
os.posix_spawn("/bin/true", ["true"], {}, file_actions=opens)
"""


def test_a_process_that_waits_for_its_exec_has_no_memory_of_its_own(tmp_path: Path) -> None:
    """After vfork it has its parent's, who waits. Before its exec it waits for a writer here."""
    os.mkfifo(fifo := tmp_path / "fifo")
    command = [sys.executable, "-I", "-S", "-c", SPAWNS, str(fifo)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        parent = psutil.Process(child.pid)
        while not parent.children() or parent.status() != psutil.STATUS_DISK_SLEEP:
            assert child.poll() is None
        used_mib = private_mib([child.pid, parent.children()[0].pid])
        fifo.write_bytes(b"")
    assert 100 < used_mib < 150


def test_bytes_that_are_no_text_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = os.fsdecode(b"\xff")
    monkeypatch.setenv("X", odd)
    (tmp_path / odd).mkdir()
    same = phone(
        "sh", "-c", '[ "$X $PWD" = "$1" ]', "sh", f"{odd} {tmp_path / odd}", folder=str(tmp_path / odd)
    )
    assert run([same], options(out=tmp_path / odd / "out")).exit_code == 0
    assert run([same], options(out=tmp_path / f"out {odd}")).exit_code == 0


def test_streams_arrive_whole_and_never_before_the_link_could(
    echo: Echo, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    port, blocks = free_port(), 256  # 64 KiB
    sender = python(
        SEND % (port, blocks, blocks), network="3g-slow", connects={port: f"localhost:{echo.port}"}, share=1.0
    )
    result = run([sender, sender], options())
    assert result.exit_code == 0
    lines = sorted(capfdbinary.readouterr().out.splitlines())
    assert lines == [f"[{i} moto-g4] 65536 True".encode() for i in range(2)]
    for one in result.phones:
        wire = 65536 + -(-65536 // 1460) * 40
        assert one.up.bytes == one.down.bytes == 65536
        assert one.connections == 1
        assert one.refused == one.broken == 0
        for way, mbps in ((one.up, 0.33), (one.down, 0.78)):
            assert way.declared_s >= wire * 8 / (mbps * 1e6) + 0.1 - 1e-9
            assert way.achieved_s >= way.declared_s
        # a handshake of a round trip, then up and down one after the other
        assert one.wall_s >= 0.2 + one.up.declared_s + one.down.declared_s


def test_what_was_sent_before_the_end_arrives() -> None:
    port = free_port()
    code = f"import socket; socket.create_connection(('127.0.0.1', {port})).sendall(bytes(100))"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        connects = {port: f"127.0.0.1:{server.getsockname()[1]}"}
        (one,) = run([python(code, network="3g-slow", connects=connects)], options()).phones
        peer, _ = server.accept()
    with peer, peer.makefile("rb") as got:
        assert got.read() == bytes(100)
    assert (one.up.bytes, one.refused, one.broken) == (100, 0, 0)


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_server_sent_before_it_reset_the_connection_arrives(ended: bool) -> None:
    """As from a server that rejects an upload before it has read all of it. It may have ended its answer."""
    port = free_port()
    code = (
        "import contextlib, socket\n"
        f"peer, got, reset = socket.create_connection(('127.0.0.1', {port})), b'', False\n"
        "for use in (lambda: peer.sendall(bytes(1 << 20)), lambda: peer.recv(99)):\n"
        "    try:\n        while data := use(): got += data\n"
        "    except BrokenPipeError: pass\n"
        "    except ConnectionResetError: reset = True\n"
        "raise SystemExit(len(got) + reset)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reject() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1)
                peer.sendall(bytes(100))
                if ended:
                    peer.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=reject)
        thread.start()
        connects = {port: f"127.0.0.1:{server.getsockname()[1]}"}
        (one,) = run([python(code, network="3g", connects=connects)], options()).phones
        thread.join()
    assert (one.exit_code, one.down.bytes) == (100 if ended else 101, 100)


def test_a_reset_that_a_phones_sending_meets_first_ends_its_download() -> None:
    """The download takes the link some time, and the phone sends meanwhile. An end of stream would say that
    the download is complete."""
    port = free_port()
    code = (
        f"import socket; peer = socket.create_connection(('127.0.0.1', {port}))\n"
        "try:\n    peer.sendall(b'x')\n    while peer.recv(1 << 12): peer.sendall(b'x')\n"
        "except ConnectionResetError: raise SystemExit(5)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:

        def give_up() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1)
                peer.sendall(bytes(2 * LEAST_WINDOW_BYTES))
                peer.recv(1)  # the phone has received some, and sends
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, CLOSE_AT_ONCE)

        thread = threading.Thread(target=give_up)
        thread.start()
        connects = {port: f"127.0.0.1:{server.getsockname()[1]}"}
        (one,) = run([python(code, network="3g", connects=connects)], options()).phones
        thread.join()
    assert one.exit_code == 5
    assert one.down.bytes > 0


def test_a_server_that_refuses_ends_the_connection() -> None:
    port, nobody = free_port(), free_port()
    code = (
        f"import os, socket; s = socket.create_connection(('127.0.0.1', {port}))\n"
        "try:\n    got = s.recv(1)\nexcept ConnectionResetError:\n    got = b''\n"
        "raise SystemExit(5 if not got else 0)"
    )
    (one,) = run([python(code, connects={port: f"127.0.0.1:{nobody}"})], options()).phones
    assert (one.exit_code, one.refused) == (5, 1)


def test_a_server_with_several_addresses_is_reached_at_the_first_that_accepts(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, localhost is ::1 and 127.0.0.1, and the server listens only at the latter."""
    nobody = ("127.0.0.1", free_port())
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", at) for at in (nobody, ("127.0.0.1", echo.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    port = free_port()
    (one,) = run([python(SEND % (port, 10, 10), connects={port: "server.example:80"})], options()).phones
    assert (one.exit_code, one.up.bytes, one.refused) == (0, 2560, 0)


def test_phones_that_leave_stand_still_and_come_back() -> None:
    """Each comes back: a command that stood still for good would not end."""
    until_stopped = 'while [ ! -e "$0" ]; do sleep 0.02; done'
    ended = Path(tempfile.gettempdir()) / "ended"
    phones = [phone("sh", "-c", until_stopped, str(ended)) for _ in range(3)]
    with start(phones, options(absence=Absence(0.3, 0.2), seed=1)) as running:
        while not sum(state.stops for state in running.states.values()):
            running.turn(0.1)
        ended.touch()
        running.wait()
    assert running.result().exit_code == 0


def test_a_signal_reaches_a_phone_that_is_away() -> None:
    """It is back only after minutes."""
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


def test_a_phone_whose_battery_gets_low_is_switched_off() -> None:
    """Its charge is just above what it keeps back, and computing takes it there."""
    battery = load_device("moto-g4").battery
    assert battery is not None
    assert battery.min_soc is not None
    charge = battery.min_soc + 1e-5  # 0.4 J
    result = run([phone("sh", "-c", "while :; do :; done")], options(charge=charge))
    (one,) = result.phones
    assert one.exit_code == 137
    assert one.why.startswith("battery low")
    assert one.energy_j is not None
    assert one.energy_j > 0.3


def test_a_link_that_breaks_ends_its_connections(echo: Echo, tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    way = 'rate_mbps = 50\nloss_pct = 20\non_loss = "disconnect"\n'
    sources = '[sources]\ndown = "assumed: a test"\nup = "assumed: a test"\n'
    link.write_text(f'id = "link"\nname = "A test\'s"\n[down]\n{way}[up]\n{way}{sources}')
    port = free_port()
    sender = python(SEND % (port, 1024, 1024), network=str(link), connects={port: f"127.0.0.1:{echo.port}"})
    (one,) = run([sender], options(print_lines=False)).phones
    assert one.exit_code == 1
    assert one.broken == one.connections == 1
    assert one.up.bytes < 262144


def test_a_phone_that_is_back_before_its_killed_command_has_ended_starts_again() -> None:
    absence = Absence(0.05, 2e-3, "kill")
    with start([phone("sleep", "600")], options(absence=absence, throttle="off")) as running:
        while not running.ended and (0 not in running.states or running.states[0].stops < 20):
            running.turn(0.1)
        assert running.ended == []


def test_a_killed_phone_starts_again_when_it_is_back(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    count = f"echo x >> {starts}; [ $(wc -l < {starts}) -ge 3 ] || sleep 60"
    result = run([phone("sh", "-c", count)], options(absence=Absence(0.2, 0.05, "kill"), seed=3))
    assert result.exit_code == 0
    # A busy host may have it leave before it has written its line, or before it ends once it has.
    assert result.phones[0].stops >= len(starts.read_text().splitlines()) - 1 >= 2


NESTED = """
trap 'echo trapped; exit 7' INT TERM
(setsid sh -c 'sleep 300 & echo up; sleep 300' &)
while :; do sleep 0.05; done
"""


def command_line(*arguments: str) -> Command:
    """``edgefl exec`` with phones that start processes in sessions of their own and wait."""
    base = ["exec", "--throttle", "sigstop", "--memory", "watch", "--time-scale", "1", "--share", "0.3"]
    command = Command(*base, "--device", "moto-g4=2", *arguments, "--", "sh", "-c", NESTED)
    assert command.process.stdout is not None
    assert {command.process.stdout.readline()[1:2] for _ in range(2)} == {"0", "1"}  # both are up
    return command


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_what_is_left_running_ends(number: int) -> None:
    command = command_line()
    command.process.send_signal(number)
    code, out, _ = command.finish()
    assert sorted(out.splitlines()) == ["[0 moto-g4] trapped", "[1 moto-g4] trapped"]
    assert code == 7


@pytest.mark.parametrize(
    ("number", "trap", "code"), [(signal.SIGINT, "''", 137), (signal.SIGHUP, "'sleep 1; exit 7'", 7)]
)
def test_a_second_signal_kills_but_one_of_a_closed_terminal(number: int, trap: str, code: int) -> None:
    """A terminal that closes says so twice, by its shell and by the kernel."""
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
def test_what_edgefl_ignores_its_commands_ignore(number: int) -> None:
    """As programs do that ``nohup`` starts, or a script in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        running = start([phone("sh", "-c", f"kill -{number} $$; exit 7")], options())
        with running, running.forwarding_signals():
            assert signal.getsignal(number) is signal.SIG_IGN
            running.wait()
    finally:
        signal.signal(number, before)
    assert running.result().exit_code == 7


def test_a_command_may_open_as_many_files_as_without_edgefl() -> None:
    """edgefl itself may open as many as the system lets it."""
    base = [sys.executable, "-m", "edgefl", "exec", "--throttle", "off", "--share", "0.3", "-d", "moto-g4"]
    command = [*base, "--", "sh", "-c", "ulimit -Sn; ulimit -Hn"]
    raised = ["sh", "-c", 'ulimit -Sn 256; ulimit -Hn; exec "$@"', "sh", *command]
    hard, soft, same = subprocess.run(raised, stdout=subprocess.PIPE, check=False).stdout.split()
    assert (soft, same) == (b"256", hard)


def test_connections_for_which_edgefl_has_no_files_are_invalid(echo: Echo) -> None:
    """Half of the command's connections need all 64 files of the relay."""
    port = free_port()
    code = (
        "import socket\n"
        f"all = [socket.create_connection(('127.0.0.1', {port})) for _ in range(50)]\n"
        "for one in all:\n    one.shutdown(socket.SHUT_WR)\n"
        "for one in all:\n    try:\n        one.recv(1)\n    except OSError:\n        pass\n"
    )
    link = ["--connect", f"{port}=127.0.0.1:{echo.port}", "--throttle", "off", "--share", "0.3"]
    command = [sys.executable, "-m", "edgefl", "exec", *link, "-d", "moto-g4", "--", sys.executable, "-ISc"]
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *command, code]
    done = subprocess.run(limited, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, OUT_OF_FILES in done.stderr) == (3, True), done.stderr


def until_up(running: RunningPhones) -> None:
    """Return once every phone has three processes: its shell, what that left, and a sleep."""
    while any(running.states.get(n) is None or running.states[n].processes < 3 for n in range(2)):
        running.turn(0.1)


def test_phones_whose_output_is_cut_off_end_as_in_a_pipeline() -> None:
    base = ["exec", "--throttle", "off", "--share", "0.3", "--device", "moto-g4=2"]
    with Command(*base, "--", "yes").process as child:
        assert child.stdout is not None
        assert child.stdout.readline()[-2:] == "y\n"
        child.stdout.close()  # as ``| head -1`` does
        assert child.wait() == 128 + signal.SIGPIPE


def test_output_that_is_lost_is_reported_once_and_ends_no_phone() -> None:
    base = [sys.executable, "-m", "edgefl", "exec", "--throttle", "off", "--share", "0.3", "-d", "moto-g4=2"]
    command = [*base, "--accept-invalid", "--", "sh", "-c", "echo a; sleep 0.1; echo b; exec true"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    lost, verdict = done.stderr.splitlines()[-2:]
    assert done.stderr.count("cannot be written") == 1
    assert "No space left on device" in lost
    assert "; 2 phones" in verdict  # the verdict itself depends on this host
    assert done.returncode == 1


def test_a_record_that_cannot_be_written_hides_neither_verdict_nor_exit_code(tmp_path: Path) -> None:
    out = tmp_path / "out"
    base = ["exec", "--throttle", "off", "--share", "0.3", "-d", "moto-g4", "--out", str(out)]
    command = Command(*base, "--", "sh", "-c", 'rmdir "$0"; touch "$0"; exit 7', str(out))
    code, _, err = command.finish()
    assert code == 7
    verdict, trouble = err.splitlines()[-2:]
    assert "; 1 phone" in verdict
    assert trouble.startswith(f"edgefl: {out}")
    assert "cannot be written" in trouble


@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.slow) for one in ("<&-", ">&-", "2>&-"))]
)
def test_what_edgefl_has_no_descriptor_for_goes_nowhere(closed: str, echo: Echo) -> None:
    port = free_port()
    base = [sys.executable, "-m", "edgefl", "exec", "--throttle", "off", "--share", "0.3", "-d", "moto-g4"]
    sends = ["--connect", f"{port}=127.0.0.1:{echo.port}", "--", sys.executable, "-c", SEND % (port, 1, 1)]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    subprocess.run([*shell, *base, "--accept-invalid", *sends], check=True)


@pytest.mark.parametrize("victims", [("main",), ("main", "keeper"), ("main", "relay")])
def test_nothing_outlives_a_killed_edgefl(victims: tuple[str, ...]) -> None:
    command = command_line()
    parts = [part_of(command, name) for name in victims]
    for part in parts:
        part.kill()
    command.finish()  # the fixture finds what is left


def part_of(command: Command, name: str) -> psutil.Process:
    return psutil.Process(command.process.pid) if name == "main" else command.child(f"edgefl-{name}")


def test_no_group_outlives_a_killed_keeper() -> None:
    if why := no_group("memory") or no_group("cpu"):
        pytest.skip(f"control groups: {why}")
    command = command_line("--throttle", "cgroup", "--memory", "cgroup")
    part_of(command, "keeper").kill()
    command.ends(1)


def test_what_clears_its_environment_does_not_outlive_a_killed_keeper() -> None:
    """Only its phone's group still tells whose it is."""
    if why := no_group(ACCOUNTING):
        pytest.skip(f"control groups: {why}")
    hides = "env -i setsid sh -c 'echo $$; exec sleep 300' & wait"
    command = Command(
        "exec", "--throttle", "off", "--share", "0.3", "--device", "moto-g4", "--", "sh", "-c", hides
    )
    assert command.process.stdout is not None
    left, keeper = psutil.Process(int(command.process.stdout.readline())), part_of(command, "keeper")
    keeper.kill()
    command.ends(1)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    assert not list(find(ACCOUNTING).folder.glob(f"edgefl-{keeper.pid}-*"))


@pytest.mark.parametrize("name", ["keeper", "relay"])
def test_nothing_outlives_a_killed_part_of_it(name: str) -> None:
    command = command_line()
    part_of(command, name).kill()
    assert "ended" in command.ends(1).splitlines()[-1]


def test_whoever_leaves_early_ends_them() -> None:
    with start([phone("sleep", "300"), phone("sleep", "300")], options()) as running:
        assert running.running
    assert [one.exit_code for one in running.result().phones] == [137, 137]


def test_what_clears_its_environment_ends_with_its_phone(tmp_path: Path) -> None:
    left = tmp_path / "left"
    leaves = phone("sh", "-c", f"env -i sh -c 'sleep 300 & echo $! > {left}'")
    with start([leaves, phone("sleep", "300")], options(throttle="off")) as running:
        while not running.ended:
            running.turn(0.1)
        assert running.ended == [0]
        assert not psutil.pid_exists(int(left.read_text()))


def test_what_leaves_its_session_too_ends_with_the_last_phone() -> None:
    hidden = phone("sh", "-c", "env -i setsid sh -c 'sleep 300 &'")
    assert run([hidden, hidden], options(throttle="off")).exit_code == 0


def test_a_port_that_is_taken_is_refused_before_anything_starts(echo: Echo) -> None:
    from edgefl.errors import ConfigError

    with pytest.raises(ConfigError, match="Address already in use"):
        run([phone("true", connects={echo.port: "localhost:1"})], options())


def test_the_documents_example_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "programs.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.startswith(b"[0, 1] ")
