"""Honest clients' pace while others on the machine attack their run, and the server's memory.

    python -m benchmarks.hostile [--messages N] [--transport shm|wire|door] [--phase-s 10] [--most-s 600]
    python -m benchmarks.hostile --inside|--outside [--messages N] [--transport door]

A run of twelve phones goes on while an attack is switched on and off. Attackers are processes of the lowest
priority, of this user and (started by root) of ``nobody``: each reads the addresses of the run's peers,
connects, and sends eight messages, rubbish, greetings, wrong passwords and well-formed ones, or keeps the
connection open without a word. Meanwhile four of the run's own go bad (``tests/fault/bad_clients.py``).
Counted are trips a second of the eight honest ones with and without the attack, hostile messages, and the
server's memory. With ``--transport door`` the clients are on a node and come by TCP, and the run's two doors
are attacked, also by connections with a key that nobody knows. Linux, from the repository's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from edgefl import Clock, Data, Evaluation, Experiment, Fleet, Model, Server, Stop, Training
from edgefl.host.process import start_process
from edgefl.regression.memory import kib, own_kib
from edgefl.results.record import Record
from edgefl.run import control, messages, node, supervisor
from edgefl.run.connection import ServerSocket
from edgefl.run.gate import Refusal
from edgefl.run.nodes import opened
from edgefl.zeromq import keys
from edgefl.zeromq.door import CallerSocket
from edgefl.zeromq.sockets import Frame, Full
from tests.fuzz.test_wire_fuzz import WAYS
from tests.raw_caller import GREETING as CURVE
from tests.raw_caller import RawCaller
from tests.raw_peer import COMMAND, GREETING, RawPeer, frame
from tests.unit.run_parts import Parts
from tests.wire_samples import DONE

HONEST = 8
BAD = {"beats": 8, "others": 9, "parts": 10}
NOBODY = 65534
KEPT_OPEN = 2000
WORKLOAD = "tests.fault.bad_clients:Workload"
HELLO = b"\x05HELLO\x01\x00" + bytes(72)
GREETINGS = (GREETING, CURVE, GREETING.replace(b"PLAIN", b"NULL\0"))
AT_ONCE = 8
"""Messages that a connection brings; its end at the run closes it unread."""


def experiment(transport: str) -> Experiment:
    """Twelve slow phones whose trips take a few tenths of a second."""
    return Experiment(
        name="hostile",
        fleet=Fleet(devices={"pi-zero-2w": HONEST + len(BAD)}, network="fios"),
        data=Data(name="digits"),
        model=Model(args={"hidden": [16]}, flops_per_example=1e7),
        clock=Clock(kind="wall", time_scale=1.0),
        training=Training(steps=3),
        strategy={"name": "fedbuff", "buffer_size": 3},
        server=Server(transport=transport, heartbeat_s=30.0),  # type: ignore[arg-type]
        evaluation=Evaluation(every_versions=10**6),
        stop=Stop(versions=10**9),
    )


def hostile(draw: random.Random, greetings: Sequence[bytes] = (GREETING,)) -> bytes:
    """A hostile message: malformed or well-formed, but never with a password."""
    body, greeting = draw.randbytes(draw.randrange(1, 200)), draw.choice(greetings)
    match draw.randrange(6):
        case 0:
            return body
        case 1:
            return greeting[: draw.randrange(1, len(greeting))]
        case 2:
            name = b"client-%d-%d" % (draw.randrange(12), draw.randrange(3))
            word = bytes([len(name)]) + name + bytes([64]) + draw.randbytes(32).hex().encode()
            return greeting + frame(b"\x05HELLO" + word, COMMAND)
        case 3:
            return greeting + frame(draw.choice((b"", HELLO)) + body, draw.randrange(8)) * 3
        case 4:
            ready = messages.Ready(draw.randrange(12), 0, "client", "00" * 32)
            return greeting + frame(messages.encode(ready))
        case _:
            return greeting + frame(messages.encode(DONE))


def attack(user: int, where: Any, on: Any, counts: Any) -> None:
    """Attack the addresses that are put into ``where`` while ``on`` is set; counts messages, connections."""
    os.nice(19)
    if user != os.geteuid():
        os.setgid(user)
        os.setuid(user)
    draw = random.Random(user)
    made = [hostile(draw, GREETINGS) for _ in range(5000)]
    known: list[str] = []
    silent: list[socket.socket] = []
    while True:
        on.wait()
        while where.poll():
            known = where.recv()
        for _ in range(100 if known else 0):
            try:
                raw = reach(draw.choice(known))
            except OSError:  # its process has ended, or has a hundred others to look at first
                continue
            counts[1] += 1
            if draw.random() < 0.1:
                silent.append(raw)  # half-open: it never says a word
                continue
            with contextlib.suppress(OSError):
                raw.sendall(b"".join(draw.choices(made, k=AT_ONCE)))
                counts[0] += AT_ONCE
            raw.close()
        for old in silent[:-KEPT_OPEN]:
            old.close()
        del silent[:-KEPT_OPEN]


def reach(where: str) -> socket.socket:
    """A connection to a name in the abstract namespace, or to a door: ``tcp:PORT`` on this host."""
    by_tcp = where.startswith("tcp:")
    raw = socket.socket(socket.AF_INET if by_tcp else socket.AF_UNIX)
    try:
        raw.settimeout(1.0 if by_tcp else 0.0)
        raw.connect(("127.0.0.1", int(where[4:])) if by_tcp else "\0" + where)
    except OSError:
        raw.close()
        raise
    return raw


def addresses(family: list[psutil.Process]) -> list[str]:
    """The addresses at which these processes wait; anybody can read them in /proc/net/unix and tcp."""
    inodes = set()
    for process in family:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    found = {line[7][1:] for line in lines if len(line) == 8 and line[6] in inodes}
    tcp = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    doors = {f"tcp:{int(line[1][9:], 16)}" for line in tcp if line[9] in inodes and line[3] == "0A"}
    return sorted(doors) or sorted(one for one in found if one.startswith("edgefl-"))


def honest_trips(folder: Path) -> tuple[int, int]:
    """Trips of honest clients on record, and incidents of the others."""
    with Record(folder) as record:
        trips = record.trips
        arrived = trips["arrived_s"] == trips["arrived_s"]
        return int((arrived & (trips["client"] < HONEST)).sum()), len(record.incidents)


class Attack:
    """The attackers, switched on and off."""

    def __init__(self, switch: Path) -> None:
        self._switch = switch
        self._on = multiprocessing.Event()
        self._ends, self._counts, self._processes = [], [], []
        for user in {os.geteuid(), NOBODY if os.geteuid() == 0 else os.geteuid()}:
            theirs, ours = multiprocessing.Pipe(duplex=False)
            self._counts.append(memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q"))
            given = (user, theirs, self._on, self._counts[-1])
            process = multiprocessing.Process(target=attack, args=given, daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    @property
    def sent(self) -> int:
        """Hostile messages so far."""
        return sum(count[0] for count in self._counts)

    @property
    def opened(self) -> int:
        """Connections so far, those that say nothing among them."""
        return sum(count[1] for count in self._counts)

    def aim(self, family: list[psutil.Process]) -> None:
        for end in self._ends:
            end.send(addresses(family))

    def switch(self, *, on: bool) -> None:
        if on:
            self._switch.touch()
            self._on.set()
        else:
            self._on.clear()
            self._switch.unlink(missing_ok=True)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
            process.close()


@contextlib.contextmanager
def run_of(transport: str, folder: Path, switch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run, in a process of its own that is interrupted in the end."""
    code = (
        "import sys; from pathlib import Path; from benchmarks import hostile;"
        "hostile.serve(sys.argv[1], Path(sys.argv[2]))"
    )
    bad = ",".join(f"{what}:{number}" for what, number in BAD.items())
    environment = {**os.environ, "EDGEFL_BAD": bad, "EDGEFL_BAD_WHILE": str(switch)}
    command = [sys.executable, "-c", code, transport, str(folder)]
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def serve(transport: str, folder: Path) -> None:
    """The run itself, until it is interrupted; its clients on a node if they come by a door."""
    with contextlib.suppress(KeyboardInterrupt):
        if transport != "door":
            supervisor.run(experiment(transport), folder, quiet=True, workload=WORKLOAD)
            return
        known = folder.with_suffix(".keys")
        keys.make(known, ["host"])
        with opened("tcp://127.0.0.1:*", known, 1) as nodes:
            code = "import sys; from benchmarks import hostile; hostile.host(*sys.argv[1:])"
            with subprocess.Popen([sys.executable, "-c", code, nodes.address, known / "host.key"]):
                supervisor.run(experiment("wire"), folder, quiet=True, nodes=nodes)


def host(address: str, key: str) -> None:
    """A node of the run, whose clients may go bad."""
    node.start_process = lambda *given: start_process(*given, WORKLOAD)  # type: ignore[attr-defined]
    node.join(address, keys.read(Path(key)))


class Found(NamedTuple):
    """What an attack came to: messages of strangers, offences of the run's own, honest trips/s by attack."""

    sent: int
    offences: int
    rates: dict[bool, float]
    verified: int
    """The exit code of ``edgefl verify``."""


def measure(transport: str, folder: Path, target: int, phase_s: float, most_s: float) -> Found:
    """Attack a live run, every other phase, until so many messages are sent or the time is over."""
    switch = folder.with_suffix(".attacked")
    with run_of(transport, folder, switch) as process:
        while not folder.exists() or not _versions(folder):
            assert process.poll() is None, "the run has ended"
            time.sleep(0.2)
        family = psutil.Process(process.pid)
        children = family.children(recursive=True)
        server = next(child for child in children if child.name().startswith("edgefl-server"))
        attackers = Attack(switch)
        trips, seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}
        pss_mib, began = [], time.monotonic()
        time.sleep(phase_s / 2)
        resident_mib = kib("status", server.pid)["VmRSS"] / 1024
        try:
            while attackers.sent < target and time.monotonic() - began < most_s:
                for on in (False, True):
                    attackers.switch(on=on)
                    before, start = honest_trips(folder)[0], time.monotonic()
                    while time.monotonic() - start < phase_s:
                        attackers.aim([family, *family.children(recursive=True)])
                        pss_mib.append(server.memory_full_info().pss / 2**20)
                        time.sleep(0.5)
                    trips[on] += honest_trips(folder)[0] - before
                    seconds[on] += time.monotonic() - start
            attackers.switch(on=False)
        finally:
            attackers.end()
        time.sleep(phase_s)
        pss_mib.append(server.memory_full_info().pss / 2**20)
        assert server.is_running()
        assert process.poll() is None
        rates = {on: trips[on] / seconds[on] for on in trips}
        fds, highest_mib = server.num_fds(), kib("status", server.pid)["VmHWM"] / 1024
    with Record(folder) as record:
        incidents = sorted({(row.client, row.kind) for row in record.incidents})
        count = len(record.incidents)
    verified = subprocess.run([sys.executable, "-m", "edgefl", "verify", str(folder)], check=False).returncode
    ratio = rates[True] / rates[False]
    lines = [
        f"{transport}: {attackers.sent} hostile messages, {attackers.opened} connections, "
        f"in {seconds[True]:.0f} s of attack",
        f"beside {count} offences of {len(BAD)} clients of the run: {incidents}",
        f"honest trips/s {rates[False]:.2f} without, {rates[True]:.2f} with: {ratio:.3f}",
        f"server's PSS {pss_mib[0]:.1f} MiB at first, {max(pss_mib):.1f} at most, {pss_mib[-1]:.1f} after; "
        f"{highest_mib - resident_mib:.0f} MiB more than at first were resident for a moment",
        f"server's descriptors {fds}; verify: exit {verified}",
    ]
    print("\n  ".join(lines), flush=True)
    return Found(attackers.sent, count, rates, verified)


class Counted:
    """The server's socket, and how many messages it has handed on."""

    def __init__(self, socket: ServerSocket) -> None:
        self.count, self.secret = 0, socket.secret
        self._receive = socket.receive

    def receive(self) -> Iterator[tuple[bytes, Sequence[Frame]]]:
        for message in self._receive():
            self.count += 1
            yield message


class Live(NamedTuple):
    """A live socket and gate, and a peer that may come: its name, password and where it is."""

    server: ServerSocket
    parts: Parts
    name: bytes
    password: str
    where: str
    key: bytes


@contextlib.contextmanager
def live(*, door: bool) -> Iterator[Live]:
    """A socket and gate that wait for one client, at an address or at a door."""
    bind = "tcp://127.0.0.1:*" if door else ""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(ServerSocket(2**17, bind)) as server:
        parts = Parts(Path(folder), transport="wire")
        parts.gate.socket = Counted(server)  # type: ignore[assignment]
        name, about = parts.peer("client", 0).identity, server.listening
        (server.admit if door else server.call)(name)
        where = about.door or control.address(server.root, server.secret, name)
        yield Live(server, parts, name, control.password(server.secret, name), where, about.key)
        parts.close()


def inside(count: int, *, door: bool = False) -> int:
    """Have a peer with a password send so many malformed and well-formed messages to a live socket and gate.

    Returns how many were refused: again and again, which in a run would be its end at once.
    """
    with live(door=door) as here:
        child = multiprocessing.Process(target=fuzz, args=(here[2:], count), daemon=True)
        child.start()
        counted: Any = here.parts.gate.socket
        refused, began, own_mib = 0, time.monotonic(), []
        while counted.count < count:
            here.server.wait(1000)
            refused += sum(type(message) is Refusal for _, message in here.parts.gate.receive())
            if len(own_mib) <= 20 * counted.count // count:
                own_mib.append(own_kib(kib("status")) / 1024)
        took_s = time.monotonic() - began
        child.join()
        child.close()
    print(
        f"inside: {counted.count} messages of a peer with a password, {refused} refused, in {took_s:.0f} s; "
        f"own memory {own_mib[0]:.1f} MiB at first, {own_mib[-1]:.1f} at last, {max(own_mib):.1f} at most"
    )
    return refused


def fuzz(peer: tuple[bytes, str, str, bytes], count: int) -> None:
    """Send messages of all the ways that the codec's tests make them in."""
    os.nice(19)
    name, password, where, key = peer
    draw = random.Random(1)
    made = [way(draw) for way, share in WAYS.items() for _ in range(round(10_000 * share))]
    stream = (
        RawCaller(where, control.secret_key(password), key, timeout_s=600.0)
        if key
        else RawPeer(where, name, password, timeout_s=600.0)
    )
    stream.greet()
    for number in range(count):
        rest = [draw.randbytes(16)] if number % 7 == 0 else []
        stream.say(draw.choice(made), *rest)


def outside(count: int) -> int:
    """Have strangers open so many connections to a door: without a key, with a wrong one, with rubbish.

    Returns how many messages of theirs came through. An honest client says a word now and then meanwhile.
    """
    with live(door=True) as here:
        counted: Any = here.parts.gate.socket
        opened = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        child = multiprocessing.Process(target=knock, args=(here.where, here.key, count, opened), daemon=True)
        child.start()
        honest = CallerSocket(here.where, control.secret_key(here.password), here.key)
        own, said, began = psutil.Process(), 0, time.monotonic()
        began_cpu_s = sum(own.cpu_times()[:2])
        own_mib, fds = [], []
        while child.is_alive() or counted.count < said:
            if said == counted.count:
                own_mib.append(own_kib(kib("status")) / 1024)
                with contextlib.suppress(Full):
                    honest.send([messages.encode(messages.Beat())])
                    said += 1
            fds.append(own.num_fds())
            here.server.wait(10)
            list(here.parts.gate.receive())
        took_s, spent = time.monotonic() - began, own.cpu_times()
        child.close()
        honest.close()
    print(
        f"outside: {opened[0]} connections of strangers in {took_s:.0f} s, {opened[1]} of them let in; "
        f"{spent.user + spent.system - began_cpu_s:.1f} s of processor time; "
        f"{counted.count} messages came through, {said} of the honest client; "
        f"own memory {own_mib[0]:.1f} MiB at first, {own_mib[-1]:.1f} at last, {max(own_mib):.1f} at most; "
        f"descriptors {fds[0]}, {fds[-1]}, {max(fds)}"
    )
    return counted.count - said


def knock(where: str, key: bytes, count: int, opened: Any) -> None:
    """Open connections one after the other; half come with a key, which nobody knows."""
    os.nice(19)
    draw = random.Random(2)
    made = [hostile(draw, GREETINGS) for _ in range(1000)]
    while opened[0] < count:
        stream = RawCaller(where, draw.randbytes(32), key, timeout_s=60.0)
        opened[0] += 1
        with contextlib.suppress(OSError, AssertionError):
            if opened[0] % 2:
                stream.greet()  # raises, unless it is let in
                opened[1] += 1
            stream.socket.sendall(b"".join(draw.choices(made, k=AT_ONCE)))
        stream.close()


def _versions(folder: Path) -> int:
    try:
        with Record(folder) as record:
            return len(record.versions["version"])
    except Exception:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--transport", choices=["shm", "wire", "door"], default="shm")
    parser.add_argument("--inside", action="store_true", help="messages of a peer that has a password")
    parser.add_argument("--outside", action="store_true", help="connections of strangers to a door")
    parser.add_argument("--phase-s", type=float, default=10.0)
    parser.add_argument("--most-s", type=float, default=600.0)
    given = parser.parse_args()
    if given.inside or given.outside:
        if given.inside:
            inside(given.messages, door=given.transport == "door")
        else:
            outside(given.messages)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(given.transport, Path(folder) / "run", given.messages, given.phase_s, given.most_s)


if __name__ == "__main__":
    main()
