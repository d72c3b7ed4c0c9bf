"""Tests of calls in a forked child: large results, children without a result, processes that survive."""

from __future__ import annotations

import os
import select
import signal
import time
from unittest.mock import Mock

import psutil
import pytest

from edgefl.host import forked
from edgefl.host.channel import Closed, pair
from edgefl.host.children import Exit
from edgefl.host.forked import call_forked

MANY = 10 << 20


def leave_a_process() -> bytes:
    """Return the id of a process that keeps the pipe open. A second forked process returns another result."""
    if (pid := os.fork()) == 0:
        time.sleep(60)
    if os.fork() == 0:
        return b"not mine"
    os.wait3(0)
    return str(pid).encode()


def test_a_result_may_be_larger_than_a_pipe_holds(capfd: pytest.CaptureFixture[str]) -> None:
    def call() -> bytes:
        os.write(2, b"hidden")
        return bytes(MANY)

    data, end = call_forked("edgefl-test", call)
    assert (data == bytes(MANY), end.code) == (True, 0)
    assert capfd.readouterr() == ("", "")
    call_forked("edgefl-test", call, quiet=False)
    assert capfd.readouterr().err == "hidden"


@pytest.mark.parametrize(("number", "code"), [(0, 3), (signal.SIGKILL, -9)])
def test_a_child_that_ends_early_has_no_result(number: int, code: int) -> None:
    def call() -> bytes:
        os.kill(os.getpid(), number)
        os._exit(3)

    data, end = call_forked("edgefl-test", call)
    assert (data, str(end)) == (b"", str(Exit(code)))


def test_data_that_a_child_writes_just_before_its_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`poll` checks the pipe before the child, so it may report the child's end, but not yet the data."""
    read, write = os.pipe()
    os.write(write, b"late")
    os.close(write)
    ended = (-1, select.POLLIN)
    poller = Mock(poll=Mock(side_effect=[[ended], [(read, select.POLLIN), ended], [ended]]))
    monkeypatch.setattr(select, "poll", lambda: poller)
    try:
        data = forked._written(read, -1, None, lambda: 0.0, time.monotonic() + 60)
    finally:
        monkeypatch.undo()
        os.close(read)
    assert data == b"late"


def test_a_result_does_not_wait_for_processes_that_the_call_leaves() -> None:
    data, _ = call_forked("edgefl-test", leave_a_process, limit_s=30.0)
    os.kill(int(data), signal.SIGKILL)


def test_waiting_ends_at_the_limit_or_with_the_caller() -> None:
    before = {*psutil.Process().children()}

    def call() -> bytes:
        os.kill(os.getpid(), signal.SIGSTOP)
        return b""

    with pytest.raises(TimeoutError):
        call_forked("edgefl-test", call, limit_s=0.01)
    ours, theirs = pair()
    theirs.close()
    with ours, pytest.raises(Closed):
        call_forked("edgefl-test", call, caller=ours.fileno())
    left = {*psutil.Process().children()} - before
    assert len(left) == 2
    for child in left:
        child.kill()
        child.wait()


@pytest.mark.parametrize("action", [signal.SIG_IGN, lambda *_: os.waitpid(-1, os.WNOHANG)])
def test_an_action_of_sigchld_does_not_take_the_childs_end(action: object) -> None:
    before = signal.signal(signal.SIGCHLD, action)  # type: ignore[arg-type]
    try:
        data, end = call_forked("edgefl-test", lambda: str(signal.getsignal(signal.SIGCHLD)).encode())
        assert (data.decode(), end.code) == (str(action), 0)
        assert signal.getsignal(signal.SIGCHLD) is action
    finally:
        signal.signal(signal.SIGCHLD, before)
