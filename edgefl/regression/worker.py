"""The measuring process: imports the user's function once, then forks a process for each repetition.

It never runs the function itself, so that every repetition starts from the same memory. It has one thread, so
that a fork is safe. Its addresses and hashes are not randomized.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from edgefl.devices import load_device, load_network
from edgefl.errors import ConfigError, EdgeflError
from edgefl.host.channel import Channel, Closed
from edgefl.host.children import end_children, has_children
from edgefl.host.forked import call_forked
from edgefl.host.process import adopt_orphans, become_child, keep_stops, outlive_parent
from edgefl.processes import command_of
from edgefl.regression import process
from edgefl.regression.counts import CountedRun

if TYPE_CHECKING:
    from edgefl.regression import repetition
    from edgefl.regression.memory import TreeWatch

_ADDR_NO_RANDOMIZE = 0x0040000
inherit_stops = keep_stops()
"""Function that restores the signal handlers that this process inherited from the tests' process, for the
user's code and the processes that it starts. For example, SIGHUP is ignored under ``nohup``."""
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[process.Answer] = msgspec.msgpack.Decoder(process.Answer)


class RegressionWorker:
    """The loop of the measuring process, which answers requests until the channel is closed."""

    def __init__(self, channel: Channel[process.Request]) -> None:
        self._channel = channel
        self._measure: Callable[[process.RepeatRequest], process.Repetition] | None = None
        self._watch: TreeWatch | None = None
        self._limit_s = 0.0
        self._printed: process.FunctionLocation | None = None
        """The last function whose work was counted. Its output was printed then, and is not printed again."""
        self._threads = 1
        """Number of threads of this process that the user's code did not start."""

    def serve(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                self._channel.send(self._answered(self._channel.receive()))

    def _answered(self, request: process.Request) -> process.Answer:
        if isinstance(request, process.RepeatRequest):
            assert self._measure is not None
            return self._in_a_fork(partial(self._measure, request), quiet=True)
        try:
            if isinstance(request, process.CountRequest):
                return self._counted(request)
            return self._prepared(request)
        except EdgeflError as error:
            return process.Failure("refused", str(error))

    def _counted(self, request: process.CountRequest) -> process.Answer:
        call = self._call(request)
        from edgefl.regression import counted

        self._printed = request.function
        run = self._in_a_fork(lambda: counted.count(call), quiet=False)
        if isinstance(run, CountedRun):
            _import_all(run.imported)
        return run

    def _prepared(self, request: process.PrepareRequest) -> process.Answer:
        call = self._call(request)
        from edgefl.regression import repetition

        quiet = self._printed == request.function
        trial = self._in_a_fork(lambda: repetition.try_out(call, request.shots), quiet=quiet)
        if isinstance(trial, process.TrialRun):
            assert self._watch is not None
            _import_all(trial.imported)
            self._measure = repetition.prepared(call, trial, self._watch)
            become_forkable(request.function.file, self._threads)
        return trial

    def _call(self, request: process.PrepareRequest) -> repetition.DeviceCall:
        """Import the function, and make this process ready to be forked."""
        try:
            os.chdir(request.folder)
        except OSError as error:
            raise ConfigError(f"{request.folder}: cannot be the working folder: {error.strerror}") from None
        sys.path[:] = request.path
        function = process.find(request.function)
        setup = None if request.setup is None else process.find(request.setup)
        # Import these after the user's module, which may have a reason to be the first to import torch.
        from edgefl.regression import memory, repetition

        if self._watch is None:
            self._watch = memory.TreeWatch()
        device = load_device(request.device).median()
        network = None if request.network is None else load_network(request.network)
        refuse_started(request.function.file, self._threads)
        repetition.warm_up()
        self._threads = num_threads()  # with a GPU driver, torch's first backward pass starts a thread
        become_forkable(request.function.file, self._threads)
        outlive_parent()
        self._limit_s = request.limit_s
        arguments = request.args, request.kwargs
        return repetition.DeviceCall(function, setup, *arguments, device, network, request.like)

    def _in_a_fork(self, measure: Callable[[], Any], *, quiet: bool) -> process.Answer:
        """Run ``measure`` in a forked process; return its result, or a `Failure` that states how it ended.

        All processes that ``measure`` started are killed. Raises `Closed` if the test's process has ended.
        """
        assert self._watch is not None
        self._watch.reset()

        def call() -> bytes:
            self._channel.close()
            inherit_stops()
            return _encode(process.result_of(measure))

        try:
            data, end = call_forked(
                "edgefl-device",
                call,
                quiet=quiet,  # print the function's output once, not once for each repetition
                limit_s=self._limit_s,
                caller=self._channel.fileno(),
                look=self._watch.look,
                end_all=True,
            )
        except TimeoutError:
            return process.Failure("late", f"{self._limit_s:g}")
        if data:
            return _decoder.decode(data)
        if end.signal:
            known = (one.name for one in signal.Signals if one == end.signal)
            return process.Failure("signal", next(known, str(end)))
        return process.Failure("raised", f"the function ended its process with {end}")


def _import_all(names: Iterable[str]) -> None:
    """Import the modules that a first call imported, so that forked processes need not.

    For example, an optimizer imports 800 modules, which takes a second.
    """
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def refuse_started(file: str, threads: int = 1) -> None:
    """Raise ConfigError if the user's module started processes or threads.

    ``threads`` is the number of threads of this process that the user's code did not start.
    """
    if has_children():
        raise ConfigError(
            f"{file}: importing it starts processes, which every repetition would share; start them in the "
            "function or its setup"
        )
    if (count := num_threads() - threads) > 0:
        started = "1 thread" if count == 1 else f"{count} threads"
        raise ConfigError(
            f"{file}: importing it starts {started}, and a process with threads cannot be forked safely; "
            "start them in the function or its setup"
        )


def become_forkable(file: str, threads: int = 1) -> None:
    """Make this process safe to fork. Raises the same exceptions as `refuse_started`."""
    refuse_started(file, threads)
    gc.collect()
    # Return the allocator's free pages to the system, so that reused memory counts as growth.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()


def restart_without_randomness(module: str) -> None:
    """Restart this program, which runs the given module, once, without randomized addresses and hashes."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        personality = ctypes.CDLL(None).personality
        if (current := personality(0xFFFFFFFF)) >= 0:  # if the system allows a process to change this
            personality(current | _ADDR_NO_RANDOMIZE)
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, command_of(module, *sys.argv[1:]))


def main() -> None:
    become_child(int(sys.argv[2]), "edgefl-regression")
    adopt_orphans()
    try:
        RegressionWorker(Channel.inherit(int(sys.argv[1]), process.Request)).serve()
    finally:
        end_children()


if __name__ == "__main__":
    restart_without_randomness("edgefl.regression.worker")
    main()
