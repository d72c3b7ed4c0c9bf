"""The zygote loads torch, the data and the model once, tries a few training steps, and forks all peers.

A peer is a client, a worker or the evaluator. The zygote has one thread, no ZeroMQ context, and no open file
of the run except its channel, because every forked process would inherit them.
"""

from __future__ import annotations

import gc
import mmap
import os
import selectors
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgefl import kernels
from edgefl.devices.fleet import fleet_of
from edgefl.errors import ConfigError, EdgeflError
from edgefl.host.channel import Channel, Closed, Refused
from edgefl.host.children import OUT_OF_MEMORY_EXIT, ChildWatch, collect, end_children, fork, kill
from edgefl.host.confinement import ClientLimits, Enforcement
from edgefl.host.held import govern
from edgefl.host.pacing import set_time_slice, set_timer_slack
from edgefl.host.process import (
    adopt_orphans,
    become_child,
    keep_freed_memory,
    kill_forks_with_parent,
    without_gpus,
)
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.run import control
from edgefl.run.client import ClientProcess
from edgefl.run.worker import VirtualWorker, run_evaluator
from edgefl.terminal import printable

if TYPE_CHECKING:
    from edgefl.run.workload import Workload


WORKLOAD = "edgefl.run.workload:Workload"
"""The workload class. Measurements pass another class with the same interface on the command line."""
SLICE_NS = 400_000
"""Scheduler time slice of a peer's process, in nanoseconds. It is longer than the server's, so that the
server is scheduled first, and long enough that context switches cost little."""
NO_TASK = -1


class Zygote:
    """Handles the supervisor's requests until the channel is closed."""

    def __init__(self, channel: Channel[control.ToZygote], make_workload: Callable[..., Workload]) -> None:
        self._channel = channel
        self._make_workload = make_workload
        self._request: control.Prepare
        self._workload: Workload | None = None
        """The workload that all forks share; None if each fork loads its own because it computes on a GPU."""
        self._buffer: ParameterBuffer
        self._enforcement = Enforcement()
        self._children: dict[int, tuple[control.Spawn, ClientLimits, memoryview[int]]] = {}
        self._governor = 0
        """Id of the governor, the process that throttles clients; 0 if there is no governor."""
        self._requests: int | None = None
        """Write end of the pipe through which clients send requests to the governor."""
        self._lifeline = os.pipe()
        self._ends: ChildWatch

    def run(self) -> None:
        self._ends = ChildWatch()
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._ends, selectors.EVENT_READ)
            try:
                while True:
                    ready = {key.fd for key, _ in selector.select(0 if self._channel.waiting else None)}
                    if self._channel.fileno() in ready or self._channel.waiting:
                        for message in self._channel.receive_ready():
                            self._answer(message)
                    if self._ends.fileno() in ready:
                        self._reap()
            except Closed:
                pass
        self._end_children()

    def _answer(self, message: control.ToZygote) -> None:
        match message:
            case control.Prepare():
                self._enforcement, self._request = message.enforcement, message
                if not self._on_gpu:
                    os.environ.update(without_gpus({}))  # CUDA reads these variables when it starts
                self._run_without_cuda("edgefl-prepare", self._prepare)
            case control.Adopt(initialise=initialise, shape=shape):
                if shape is None:
                    self._buffer = ParameterBuffer.attach(self._channel.descriptor())
                else:
                    self._buffer = ParameterBuffer.create(shape, sparse=True)
                if initialise:
                    self._run_without_cuda("edgefl-first-model", self._write_first_model)
                    self._buffer.publish(version=0, entry=0)
                self._ends.watch()  # the user's code that was tried out may have replaced its handlers
                # Freeze these permanent objects: a garbage collection in a fork would copy their pages.
                gc.collect()
                gc.freeze()
                if (throttle := self._enforcement.throttle) != "paced":
                    ours, self._requests = os.pipe()
                    self._governor = fork("edgefl-governor", lambda: self._govern(throttle, ours))
                    os.close(ours)
                self._channel.send(control.Adopted())
            case control.Spawn():
                self._spawn(message)
            case control.Clear(restarts=restarts):
                self._end_peers()
                self._channel.send(control.Cleared(restarts))
            case control.Expel(role=role, peer=peer, epoch=epoch):
                for pid, (spec, *_) in self._children.items():
                    if (spec.role, spec.peer, spec.epoch) == (role, peer, epoch):
                        kill(pid)

    @property
    def _on_gpu(self) -> bool:
        return self._request.experiment.training.device != "cpu"

    def _run_without_cuda(self, name: str, main: Callable[[], None]) -> None:
        """Run ``main`` here, or in a child if the workers compute on a GPU.

        If torch sees a GPU, its first backward pass starts CUDA, which cannot be used in later forks.
        """
        if not self._on_gpu:
            main()
        elif (end := collect(fork(name, main))).code:
            self._channel.send(Refused(f"{name} ended early ({end})", config=False))

    def _prepare(self) -> None:
        try:
            kernels.backend()
            self._workload = workload = self._load()
            prepared = workload.prepared()
            if self._request.fingerprint:
                if self._on_gpu:  # the bits of the device on which the workers train are compared
                    workload.settle()
                prepared = msgspec.structs.replace(prepared, fingerprint=workload.fingerprint())
            self._channel.send(prepared)
        except EdgeflError as error:
            self._channel.send(Refused(printable(str(error)), config=isinstance(error, ConfigError)))

    def _load(self) -> Workload:
        """Return the workload, and load it if necessary.

        Forked processes start five times faster if the workload is loaded before the fork.
        """
        if self._workload is not None:
            return self._workload
        experiment = self._request.experiment
        made = self._make_workload(experiment, fleet_of(experiment), Path(self._request.base))
        made.phones_secret = self._request.phones
        return made

    def _write_first_model(self) -> None:
        self._buffer.model(0)[:] = self._load().flat.whole

    def _spawn(self, spec: control.Spawn) -> None:
        client = spec.role == control.CLIENT
        limit_mib = self._load().device(spec.peer).app_limit_mib if client else None
        held = client and not spec.as_is
        enforcement, governor = (self._enforcement, self._requests) if held else (Enforcement(), None)
        limits = ClientLimits(enforcement, f"{spec.role}-{spec.peer}-{spec.epoch}", limit_mib, governor)
        begun = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")  # shared only with the forked process
        begun[0] = NO_TASK
        pid = fork(f"edgefl-{spec.role}-{spec.peer}", lambda: self._run_peer(spec, limits, begun))
        self._children[pid] = spec, limits, begun
        self._channel.send(control.Spawned(spec.role, spec.peer, spec.epoch, pid))

    def _close_own(self) -> None:
        """Close, in a forked process, the descriptors that only the zygote uses.

        The channel stays open. The supervisor therefore sees it close only after all forked processes have
        ended, so that none can still write into the buffer.
        """
        self._ends.close()
        os.close(self._lifeline[1])

    def _govern(self, throttle: str, requests: int) -> None:
        self._close_own()
        govern(throttle, requests, self._lifeline[0])

    def _run_peer(self, spec: control.Spawn, limits: ClientLimits, begun: memoryview[int]) -> None:
        """Run a client, a worker or the evaluator in the forked process, until the server ends it."""
        self._close_own()
        workload, buffer, lifeline = self._load(), self._buffer, self._lifeline[0]
        limits.enter()
        set_timer_slack()
        set_time_slice(SLICE_NS)
        if spec.role == control.CLIENT:
            ClientProcess(spec, workload, buffer, lifeline, limits).run()
            return
        keep_freed_memory()  # not in clients, because there may be a thousand of them
        workload.settle()
        if spec.role == control.WORKER:
            VirtualWorker(spec, workload, buffer, lifeline, begun).run()
        else:
            run_evaluator(spec, workload, buffer, lifeline)

    def _reap(self) -> None:
        for pid in self._ends.ended():
            end = collect(pid)
            if pid == self._governor:
                self._governor = 0
                how = f"the governor of fleet.throttle = {self._enforcement.throttle!r} ended early"
                self._channel.send(Refused(f"{how} ({end})", config=False))
            elif pid in self._children:  # false for processes forked by the user's code
                spec, limits, begun = self._children.pop(pid)
                memory = limits.out_of_memory(gave_up=end.code == OUT_OF_MEMORY_EXIT)
                reason = f"{control.OUT_OF_MEMORY}: {memory}" if memory else str(end)
                task = None if begun[0] == NO_TASK else begun[0]
                self._channel.send(control.Departed(spec.role, spec.peer, spec.epoch, reason, task))
                limits.remove()

    def _end_children(self) -> None:
        if self._governor:
            kill(self._governor)
        self._end_peers()
        if self._governor:
            collect(self._governor)
        end_children()

    def _end_peers(self) -> None:
        for pid in self._children:
            kill(pid)
        for pid, (_, limits, _) in self._children.items():
            collect(pid)
            limits.remove()
        self._children.clear()


def main(channel_fd: int, parent_pid: int, workload: str = WORKLOAD) -> None:
    become_child(parent_pid, "edgefl-zygote")
    kill_forks_with_parent()
    adopt_orphans()  # reap programs that training code started
    kernels.set_threads(1)  # like torch; more threads would also count towards a phone's memory limit
    if os.environ.get("EDGEFL_BACKEND") == "cuda":  # it is meant for the server; phones see no GPU
        del os.environ["EDGEFL_BACKEND"]
    channel: Channel[control.ToZygote] = Channel.inherit(channel_fd, control.ToZygote)
    module, _, name = workload.partition(":")
    Zygote(channel, getattr(import_module(module), name)).run()
