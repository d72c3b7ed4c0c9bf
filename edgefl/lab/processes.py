"""The processes of a measurement: each a module with a channel to it, all gone at the end.

Child processes of a measurement that share what their parent made.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from edgefl.errors import RunError
from edgefl.run.channel import Channel, pair
from edgefl.run.control import Broken, Refused
from edgefl.run.process import become_child, single_threaded_environment

GRACE_S = 10.0
"""How long a process may take to leave before it is killed."""

M = TypeVar("M")


@contextmanager
def started(module: str, incoming: Any, *arguments: str) -> Iterator[Channel[Any]]:
    """The channel to ``python -m module FD PID arguments…``, which ends with it."""
    ours, theirs = pair()
    channel: Channel[Any] = Channel(ours, incoming)
    with theirs:
        fd = theirs.fileno()
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(fd), str(os.getpid()), *arguments],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            env=single_threaded_environment(dict(os.environ)),
        )
    try:
        yield channel
    finally:
        channel.close()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def expect(channel: Channel[Any], kind: type[M]) -> M:
    """The next message of this kind; others are passed over. `RunError` if the process gave up."""
    while not isinstance(message := channel.receive(), kind):
        if isinstance(message, Broken | Refused):
            raise RunError(message.message)
    return message


def forked(count: int, life: Callable[[int], None]) -> list[int]:
    """``count`` children that run ``life(number)`` and end; their process ids."""
    parent = os.getpid()
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                become_child(parent, f"edgefl-bare-{number}")
                life(number)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return pids
