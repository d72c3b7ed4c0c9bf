"""One measurement in a process of its own, and the end of all that it started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil

from edgefl.errors import ConfigError
from edgefl.regression import orders
from edgefl.run.channel import Channel, Closed
from edgefl.run.process import become_child

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[orders.FromWorker] = msgspec.msgpack.Decoder(orders.FromWorker)


def apart(
    measure: Callable[[], Any], channel: Channel[orders.ToWorker], limit_s: float, *, quiet: bool
) -> orders.FromWorker:
    """What ``measure`` returns in a process of its own, or how that ended; `Closed` if nobody waits any more.

    When this returns or raises, that process and whatever it started have ended.
    """
    read, write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        channel.close()
        _become_device(parent, write, measure, quiet)
    os.close(write)
    process = os.pidfd_open(pid)
    try:
        data = _read_until_it_ends(read, process, channel, time.monotonic() + limit_s)
        return _ending(data, pid, limit_s)
    finally:
        os.close(process)
        os.close(read)
        end_children()


def has_children() -> bool:
    """Whether this process has any, running or ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_children() -> None:
    """Kill every child, and theirs, which fall to this process where `adopt_orphans` was called."""
    while has_children():
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become_device(parent: int, write: int, measure: Callable[[], Any], quiet: bool) -> NoReturn:
    """The whole life of a repetition's process."""
    try:
        become_child(parent, "edgefl-device")
        own = os.getpid()
        if quiet:  # what the function prints is wanted once, not once a repetition
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        result: Any = _result(measure)
        if os.getpid() == own:  # and not a fork of the function's that came back from it, too
            data = memoryview(_encode(result))
            while data:
                data = data[os.write(write, data) :]
        sys.stdout.flush()
    finally:
        os._exit(0)


def _result(measure: Callable[[], Any]) -> Any:
    try:
        return measure()
    except MemoryError:
        return orders.Ended("memory", "")
    except ConfigError as error:
        return orders.Refused(str(error))
    except BaseException as error:
        if "can't allocate memory" in str(error):  # how torch says MemoryError
            return orders.Ended("memory", "")
        return orders.Ended("raised", _told(error))


def _told(error: BaseException) -> str:
    """The traceback, from the user's own code on."""
    here = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename.startswith(here):
        frames.pop(0)
    return "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).rstrip()


def _read_until_it_ends(
    read: int, process: int, channel: Channel[orders.ToWorker], until_s: float
) -> bytes | None:
    """What it wrote; None if it is not done by then. Its children may hold the pipe open beyond its end."""
    data = bytearray()
    poller = select.poll()
    for descriptor in (read, process, channel.fileno()):
        poller.register(descriptor, select.POLLIN)
    while (left_s := until_s - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in poller.poll(left_s * 1e3)}
        if channel.fileno() in ready:
            raise Closed  # the test's process says nothing while it waits: it is gone
        if read in ready:
            part = os.read(read, 1 << 16)
            data += part
            if not part:
                poller.unregister(read)
        elif process in ready:
            return bytes(data)
    return None


def _ending(data: bytes | None, pid: int, limit_s: float) -> orders.FromWorker:
    if data is None:
        return orders.Ended("late", f"{limit_s:g}")
    _, status = os.waitpid(pid, 0)
    if data:
        return _decoder.decode(data)
    if os.WIFSIGNALED(status):
        return orders.Ended("signal", signal.Signals(os.WTERMSIG(status)).name)
    return orders.Ended("raised", f"the function ended its process with exit code {os.WEXITSTATUS(status)}")
