"""The measuring process: imports the user's function once, then forks a process for each repetition.

``python -m edgefl.regression.worker CHANNEL_FD PARENT_PID``, started by `edgefl.regression.process`. It never
runs the function itself, so that every repetition starts from the same memory, and it has one thread, so that
a fork is safe. Addresses and hashes are not random in it: code and data lie in the same place every time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial

from edgefl.devices import load_device, load_network
from edgefl.errors import ConfigError, EdgeflError
from edgefl.regression import orders
from edgefl.regression.apart import apart, end_children, has_children
from edgefl.regression.imports import find
from edgefl.regression.peak import return_free_memory
from edgefl.run.channel import Channel, Closed
from edgefl.run.process import adopt_orphans, become_child, outlive_parent

_ADDR_NO_RANDOMIZE = 0x0040000


class Worker:
    """Answers orders until the channel ends."""

    def __init__(self, channel: Channel[orders.ToWorker]) -> None:
        self._channel = channel
        self._measure: Callable[[orders.Repeat], orders.Repetition] | None = None
        self._limit_s = 0.0

    def run(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                message = self._channel.receive()
                if isinstance(message, orders.Order):
                    self._channel.send(self._prepare(message))
                else:
                    assert self._measure is not None
                    measure = partial(self._measure, message)
                    self._channel.send(apart(measure, self._channel, self._limit_s, quiet=True))

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
            _alone_and_single_threaded(order.function.file)
            return_free_memory()
            gc.freeze()
            outlive_parent()
            self._limit_s = order.limit_s
            ready = apart(
                lambda: repetition.get_ready(subject, order.against),
                self._channel,
                self._limit_s,
                quiet=False,
            )
            if isinstance(ready, orders.Ready):
                # Making the first optimizer imports 800 modules: a second, which no repetition shall take.
                for name in ready.imported:
                    with contextlib.suppress(ImportError):
                        importlib.import_module(name)
                _alone_and_single_threaded(order.function.file)
                gc.freeze()
                reference = references.make(ready.against.reference)
                reference.run(1)
                found = ready
                self._measure = lambda repeat: repetition.repeat(
                    subject, found, reference, repeat.time_scale, repeat.index
                )
                return_free_memory()
            return ready
        except EdgeflError as error:
            return orders.Refused(str(error))


def _alone_and_single_threaded(file: str) -> None:
    if has_children():
        raise ConfigError(
            f"{file}: importing it starts processes, which every repetition would share; start them in the "
            "function or its setup"
        )
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
    adopt_orphans()
    try:
        Worker(Channel.inherit(channel_fd, orders.ToWorker)).run()
    finally:
        end_children()


if __name__ == "__main__":
    _fixed_addresses()
    main(int(sys.argv[1]), int(sys.argv[2]))
