"""The channel between two processes of a run, page faults of a process, and its limit on descriptors."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from edgefl import kernels
from edgefl.errors import RunError
from edgefl.host.channel import Channel, Closed, pair
from edgefl.run import secure_process, server_process
from tests.patience import Patience

BOUND_S = 20.0
"""Maximum time in seconds for a thread to end."""

Ends = tuple[Channel[Any], Channel[Any]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = tuple(Channel[Any](end, Any) for end in pair())
    yield made
    for end in made:
        end.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel[Any]]]:
    """A socket that writes any bytes, and the channel that reads them."""
    a, b = pair()
    channel = Channel[Any](b, Any)
    yield a, channel
    a.close()
    channel.close()


@pytest.fixture
def passed() -> Iterator[list[int]]:
    """Descriptors to be sent."""
    fds = [os.memfd_create("passed") for _ in range(2)]
    yield fds
    for fd in fds:
        os.close(fd)


def same_file(got: int, sent: int) -> None:
    assert got != sent
    assert os.fstat(got).st_ino == os.fstat(sent).st_ino
    assert not os.get_inheritable(got)
    os.close(got)


def framed(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    patience = Patience(BOUND_S)
    while thread.is_alive() and not patience.over():
        thread.join(1.0)
    return not thread.is_alive()


def test_a_channel_can_be_opened_where_tests_must_not_open_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-socket replaces the class ``socket.socket``."""
    monkeypatch.setattr(socket, "socket", None)
    left, right = (Channel[Any](end, Any) for end in pair())
    left.send(7)
    assert right.receive() == 7
    left.close()
    right.close()


def test_any_split_of_the_stream_gives_the_same_messages(raw: tuple[socket.socket, Channel[Any]]) -> None:
    writer, channel = raw
    messages = [0, "", "x" * 300, {"a": [1, 2.5, None]}, b"\x00" * 1000]
    stream = b"".join(map(framed, messages))
    draw = random.Random(1)
    for _ in range(50):
        got, at = [], 0
        while at < len(stream):
            step = draw.choice([1, 2, 3, 5, 50, 700])
            writer.sendall(stream[at : at + step])
            got += list(channel.receive_ready())
            at += step
        assert got == messages


def test_messages_read_together_are_received_one_by_one(ends: Ends) -> None:
    left, right = ends
    for number in range(5):
        left.send(number)
    assert [right.receive(), right.receive()] == [0, 1]
    assert list(right.receive_ready()) == [2, 3, 4]  # read from the socket earlier
    assert list(right.receive_ready()) == []


def test_a_message_that_arrives_in_parts_does_not_block_its_reader(ends: Ends) -> None:
    left, right = ends
    body = random.Random(3).randbytes(3 << 20)
    sender = in_thread(lambda: left.send(body))
    got: list[Any] = []
    while not got:
        got += list(right.receive_ready())
    assert got == [body]
    assert ended(sender)


def test_many_requests_and_answers_do_not_deadlock_both_ends() -> None:
    """A socket holds about 280 small messages, so neither end may wait in `send` while its input is unread.

    A supervisor orders a thousand clients at once, and the zygote answers for each client.
    """
    requests, a_b = 3000, pair()
    left, right = (Channel[Any](end, int) for end in a_b)

    def ask() -> None:
        for number in range(requests):
            left.send(number)

    def answer() -> None:
        answered = 0
        while answered < requests:
            for number in right.receive_ready():
                right.send(number)
                answered += 1

    asker, answerer = in_thread(ask), in_thread(answer)
    try:
        assert ended(asker), "both ends wait for the other to read"
        assert [left.receive() for _ in range(requests)] == list(range(requests))
        assert ended(answerer)
    finally:
        for end in a_b:
            end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_messages_that_arrive_during_a_send_are_received(ends: Ends) -> None:
    """The next `receive_ready` returns them without any new input."""
    left, right = ends
    for number in range(100):
        right.send(number)
    reader = in_thread(lambda: [right.receive() for _ in range(2)])
    for _ in range(2):
        left.send(bytes(4 << 20))
    assert ended(reader)
    assert left.waiting
    assert list(left.receive_ready()) == list(range(100))
    assert not left.waiting


def test_a_channel_has_room_until_its_reader_falls_behind(ends: Ends) -> None:
    left, right = ends
    sent = 0
    while left.has_room:
        left.send(sent)
        sent += 1
    assert sent > 10
    for _ in range(sent):
        right.receive()
    assert left.has_room


def test_descriptors_arrive_with_their_message(ends: Ends, passed: list[int]) -> None:
    left, right = ends
    for message, fds in (("before", []), ("with them", passed), ("after", [])):
        left.send(message, *fds)
    assert [right.receive() for _ in range(3)] == ["before", "with them", "after"]
    for fd in passed:
        same_file(right.descriptor(), fd)


def test_messages_sent_before_the_other_end_closes_arrive(ends: Ends) -> None:
    left, right = ends
    right.send("never read")  # Linux then reports a reset instead of the stream's end
    left.send("last words")
    left.close()
    assert right.receive() == "last words"
    for _ in range(2):
        with pytest.raises(Closed):
            right.receive()


def test_receive_ready_returns_the_last_messages_before_it_raises_closed(ends: Ends) -> None:
    left, right = ends
    left.send(1)
    left.send(2)
    left.close()
    arrived = right.receive_ready()
    assert [next(arrived), next(arrived)] == [1, 2]
    assert list(arrived) == []  # the end of the stream has not been read yet
    with pytest.raises(Closed):
        list(right.receive_ready())


def test_half_a_message_at_the_end_raises_closed(
    raw: tuple[socket.socket, Channel[Any]],
) -> None:
    writer, channel = raw
    writer.sendall(framed("whole")[:-2])
    writer.close()
    with pytest.raises(Closed):
        channel.receive()


def test_sending_to_a_closed_end_raises_closed(ends: Ends, passed: list[int]) -> None:
    left, right = ends
    right.close()
    for fds in ([], passed):
        with pytest.raises(Closed):
            left.send("hello?", *fds)


def test_a_waiting_sender_notices_that_the_other_end_closes(ends: Ends) -> None:
    left, right = ends
    heard: list[str] = []

    def send_more_than_fits() -> None:
        try:
            left.send(bytes(64 << 20))
        except Closed:
            heard.append("closed")

    sender = in_thread(send_more_than_fits)
    right._read(0)  # at least one part has been sent
    right.close()
    assert ended(sender)
    assert heard == ["closed"]


@pytest.mark.usefixtures("nothing_left")
def test_the_channel_of_a_killed_process_is_closed() -> None:
    a, b = pair()
    pid = os.fork()
    if pid == 0:
        a.close()
        Channel[Any](b, Any).send("ready")
        signal.pause()
    b.close()
    channel = Channel[Any](a, Any)
    assert channel.receive() == "ready"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Closed):
        channel.receive()
    os.waitpid(pid, 0)
    channel.close()


def test_a_channel_is_made_from_an_inherited_descriptor() -> None:
    a, b = pair()
    left, right = Channel[Any](a, Any), Channel[Any].inherit(b.detach(), Any)
    right.send({"pid": 1})
    assert left.receive() == {"pid": 1}
    for end in (left, right, right, left):  # in any order, and twice
        end.close()


_FAULTS = """
import resource
from edgefl.host.process import keep_freed_memory

if {keep}:
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [bytearray(6 * 2**20) for _ in range(4)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(sum(faults() for _ in range(20)))
"""


def faults(*, keep: bool) -> int:
    """Return the number of page faults when 24 MiB are allocated, written and freed twenty times."""
    command = [sys.executable, "-c", _FAULTS.format(keep=keep)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")), reason="not the GNU C library"
)
def test_freed_memory_is_reused_without_page_faults() -> None:
    assert faults(keep=True) < 100
    assert faults(keep=False) > 1000


def test_too_few_descriptors_are_an_error_and_not_an_abort_of_libzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    server_process._require_descriptors(1)
    monkeypatch.setattr(server_process.resource, "getrlimit", lambda _: (200, 200))
    with pytest.raises(RunError, match=r"^300 processes need .* but the limit is 200: .*ulimit -n"):
        server_process._require_descriptors(300)


@pytest.mark.parametrize("secure", [False, True])
def test_the_servers_kernels_use_no_more_threads_than_a_cpu_quota_allows(
    monkeypatch: pytest.MonkeyPatch, ends: Ends, secure: bool
) -> None:
    """This also applies to the process that unmasks or decrypts sums."""

    def refuse(*_: object, **__: object) -> None:
        raise RunError("enough")

    monkeypatch.setattr(server_process, "_require_descriptors", refuse)
    monkeypatch.setattr(secure_process, "become_child", lambda *_: None)
    monkeypatch.setattr(secure_process.Channel, "inherit", lambda *_: ends[0])
    monkeypatch.setattr("edgefl.host.capacity.cpu_quota", lambda: 1.5)
    monkeypatch.setattr("edgefl.kernels.selection.usable_cores", lambda: 8)
    monkeypatch.setattr("edgefl.host.capacity.usable_cores", lambda: 8)
    kernels.set_threads(None)
    try:
        if secure:
            ends[1].close()  # so that the process ends
            assert secure_process.main(ends[0].fileno(), os.getpid()) == 0
        else:
            assert server_process._serve(ends[0], types.SimpleNamespace(workers=1, door="")) == 1
        assert kernels.threads() == 2
    finally:
        kernels.set_threads(None)
