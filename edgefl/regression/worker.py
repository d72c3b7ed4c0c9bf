"""The measuring process: imports the user's function once, then forks a process for each repetition.

``python -m edgefl.regression.worker CHANNEL_FD PARENT_PID``, started by `edgefl.regression.process`. It never
runs the function itself, so that every repetition starts from the same memory, and it has one thread, so that
a fork is safe. Addresses and hashes are not random in it: code and data lie in the same place every time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from edgefl.channel import Channel, Closed
from edgefl.emulation import load_device, load_network
from edgefl.errors import ConfigError, EdgeflError
from edgefl.processes import become_child
from edgefl.regression import orders
from edgefl.regression.imports import find
from edgefl.regression.peak import return_free_memory

_ADDR_NO_RANDOMIZE = 0x0040000
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[orders.FromWorker] = msgspec.msgpack.Decoder(orders.FromWorker)


class Worker:
    """Answers orders until the channel ends."""

    def __init__(self, channel: Channel[orders.ToWorker]) -> None:
        self._channel = channel
        self._measure: Callable[[orders.Repeat], orders.Repetition] | None = None

    def run(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                message = self._channel.receive()
                if isinstance(message, orders.Order):
                    self._channel.send(self._prepare(message))
                else:
                    assert self._measure is not None
                    self._channel.send(self._apart(partial(self._measure, message), quiet=True))

    def _prepare(self, order: orders.Order) -> orders.FromWorker:
        try:
            sys.path[:] = order.path
            function = find(order.function)
            setup = None if order.setup is None else find(order.setup)
            # After the user's module, which may have a reason to be the first to import torch.
            import torch

            from edgefl.regression import reference as references
            from edgefl.regression import repetition

            torch.set_num_threads(1)
            device = load_device(order.device)
            network = None if order.network is None else load_network(order.network)
            subject = repetition.Subject(
                function, setup, order.args, order.kwargs, device, network, order.seed
            )
            references.make("train-small").run(1)  # what torch does on its first step is done
            _one_thread(order.function.file)
            return_free_memory()
            gc.freeze()
            ready = self._apart(lambda: repetition.get_ready(subject, order.reference), quiet=False)
            if isinstance(ready, orders.Ready):
                reference = references.make(ready.reference)
                reference.run(1)
                found = ready
                self._measure = lambda repeat: repetition.repeat(
                    subject, found, reference, repeat.time_scale, repeat.index
                )
                return_free_memory()
            return ready
        except EdgeflError as error:
            return orders.Refused(str(error))

    def _apart(self, measure: Callable[[], Any], *, quiet: bool) -> orders.FromWorker:
        """Measure in a process of its own; `Closed` if the test's process ends meanwhile."""
        read, write = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            self._channel.close()
            _become_device(parent, write, measure, quiet)
        os.close(write)
        try:
            return _ending(_read_all(read, self._channel), pid)
        except Closed:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            os.close(read)


def _become_device(parent: int, write: int, measure: Callable[[], Any], quiet: bool) -> NoReturn:
    """The whole life of a repetition's process."""
    try:
        become_child(parent, "edgefl-device")
        if quiet:  # what the function prints is wanted once, not once a repetition
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        result: Any = _result(measure)
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


def _read_all(read: int, channel: Channel[orders.ToWorker]) -> bytes:
    data = bytearray()
    while True:
        ready, _, _ = select.select([read, channel.fileno()], [], [])
        if channel.fileno() in ready:
            raise Closed  # the test's process says nothing while it waits: it is gone
        part = os.read(read, 1 << 16)
        if not part:
            return bytes(data)
        data += part


def _ending(data: bytes, pid: int) -> orders.FromWorker:
    _, status = os.waitpid(pid, 0)
    if data:
        return _decoder.decode(data)
    if os.WIFSIGNALED(status):
        return orders.Ended("signal", signal.Signals(os.WTERMSIG(status)).name)
    return orders.Ended("raised", f"the function ended its process with exit code {os.WEXITSTATUS(status)}")


def _one_thread(file: str) -> None:
    try:
        count = len(os.listdir("/proc/self/task"))
    except OSError:
        return
    if count > 1:
        raise ConfigError(
            f"{file}: importing it starts {count - 1} threads, and a process with threads cannot be forked "
            "safely; start them in the function or its setup"
        )


def _fixed_addresses() -> None:
    """Start again without random addresses and hashes, where the system lets a process choose."""
    if not sys.platform.startswith("linux") or os.environ.get("PYTHONHASHSEED") == "0":
        return
    with contextlib.suppress(OSError, AttributeError):
        personality = ctypes.CDLL(None).personality
        current = personality(0xFFFFFFFF)
        if current >= 0:
            personality(current | _ADDR_NO_RANDOMIZE)
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "edgefl.regression.worker", *sys.argv[1:]])


def main(channel_fd: int, parent_pid: int) -> None:
    become_child(parent_pid, "edgefl-regression")
    Worker(Channel.inherit(channel_fd, orders.ToWorker)).run()


if __name__ == "__main__":
    _fixed_addresses()
    main(int(sys.argv[1]), int(sys.argv[2]))
