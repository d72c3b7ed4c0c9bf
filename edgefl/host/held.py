"""A compute phase that the governor slows down; the governor is a process that throttles a run's clients.

At the start of a phase the client sends its CPU share to the governor through a pipe. Between steps it
sends corrections, computed from the measured cost of its work; finally it reports the end of the phase. The
share is chosen so that the work ends slightly earlier than on the device, because throttles are not exact.
The client then sleeps until the device would end the phase.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from edgefl.errors import RunError
from edgefl.host.groups import NoGroup, find, process_stat
from edgefl.host.pacing import Phase, PhaseTime
from edgefl.host.throttle import (
    SLICE_NS,
    Account,
    DutyCycle,
    Quota,
    Target,
    Throttled,
    TurnQueue,
    cpu_ns,
    reduce_wakeup_latency,
)

RENEW_NS = {"sigstop": 20_000_000, "cgroup": 200_000_000}
"""Wall time in ns between two corrections of the share, keyed by the kind of throttle. Each correction costs
the governor a wake-up or a new quota."""
MAX_SHARE = 1.0  # training has one thread
MIN_SHARE = 1e-3
EARLY = {"sigstop": 0.02, "cgroup": 0.2}
"""Fraction of a phase by which the work should end early, keyed by the kind of throttle. It is large for
``cgroup``, because a quota is inaccurate by a tick or more."""
PRIOR = 0.2
"""Weight of the cost that was estimated before the phase, as a fraction of the total work of the phase."""

_FORMAT = struct.Struct("<qqqdq")
MESSAGE_BYTES = _FORMAT.size


class HoldRequest(NamedTuple):
    """A client's message to the governor. It is smaller than PIPE_BUF, so that writes are atomic."""

    pid: int
    at_ns: int
    used_ns: int
    share: float
    """Requested share, in cores; 0 means that the phase has ended."""
    work_ns: int
    """CPU time that the client is expected to need until the end of the phase, in ns."""

    def encode(self) -> bytes:
        return _FORMAT.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> list[HoldRequest]:
        """Decode the requests in ``data``, whose length must be a multiple of `MESSAGE_BYTES`."""
        return [cls(*fields) for fields in _FORMAT.iter_unpack(data)]


class Cost:
    """Estimate of the CPU time that a process needs per unit of work, updated after each phase.

    >>> cost = Cost(2.0)                     # ns per unit of work, measured beforehand
    >>> cost.learn(work=100.0, used_ns=400.0)
    >>> cost.ns_per_work
    3.0
    """

    def __init__(self, ns_per_work: float) -> None:
        self.ns_per_work = ns_per_work

    def learn(self, work: float, used_ns: float) -> None:
        """Replace the estimate by the mean of the old estimate and the measured cost of a finished phase."""
        if work > 0 and used_ns > 0:
            self.ns_per_work = (self.ns_per_work + used_ns / work) / 2

    def within(self, total: float, work: float, used_ns: float) -> float:
        """Return the estimated ns per unit of work after ``work`` of ``total`` units took ``used_ns``."""
        prior = PRIOR * total
        return (self.ns_per_work * prior + used_ns) / (prior + work)


class HeldPhase:
    """A `Phase` that the governor process slows down; ``end`` waits for the deadline, ``done`` does not."""

    def __init__(self, phase: Phase, total: float, cost: Cost, governor: int, kind: str) -> None:
        self._phase, self._total, self._cost, self._governor = phase, total, cost, governor
        self._renew_ns = RENEW_NS[kind]
        due_ns = phase.due_ns(total)
        self._aim_ns = due_ns - EARLY[kind] * (due_ns - phase.due_ns(0.0))
        self._began_ns = cpu_ns(0)
        self._request_share(time.monotonic_ns())

    def done(self, work: float) -> None:
        """Record that additional ``work`` has been done."""
        self._phase.work += work
        now_ns = time.monotonic_ns()
        if now_ns >= self._next_ns and self._phase.work < self._total:
            self._request_share(now_ns)

    def end(self) -> PhaseTime:
        """End the throttling, wait until the device would end the phase, and report the phase."""
        self._cost.learn(self._phase.work, self.release() - self._began_ns)
        return self._phase.end()

    def release(self) -> int:
        """End the throttling; return the CPU time that the process has used, in ns."""
        used_ns = cpu_ns(0)
        os.write(self._governor, HoldRequest(os.getpid(), time.monotonic_ns(), used_ns, 0.0, 0).encode())
        return used_ns

    def _request_share(self, now_ns: int) -> None:
        """Request the share at which the remaining work ends slightly before the device would end it."""
        self._next_ns = now_ns + self._renew_ns
        used_ns = cpu_ns(0)
        work, total = self._phase.work, self._total
        left_ns = self._cost.within(total, work, used_ns - self._began_ns) * (total - work)
        wall_ns = self._aim_ns - now_ns
        share = left_ns / wall_ns if wall_ns > 0 else MAX_SHARE
        share = min(max(share, MIN_SHARE), MAX_SHARE)
        os.write(self._governor, HoldRequest(os.getpid(), now_ns, used_ns, share, int(left_ns)).encode())


SLICE_SHARE = 0.02
"""Length of a slice (the CPU time that a client may use before it is stopped) as a fraction of the CPU time
of the phase. The error of the phase is at most half of this fraction."""
SHORTEST_SLICE_NS = 300_000


def govern(kind: str, requests: int, lifeline: int) -> None:
    """Throttle clients according to their ``requests``, until the zygote (this process's parent) ends."""
    reduce_wakeup_latency()
    governor = Governor(partial(make_throttle, kind))
    rest = b""
    while True:
        due_ns = governor.run_due(time.monotonic_ns())
        wait_s = None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) * 1e-9)
        ready, _, _ = select.select([requests, lifeline], [], [], wait_s)
        if lifeline in ready:
            return
        if requests in ready:
            data = rest + os.read(requests, 1 << 16)
            whole = len(data) // MESSAGE_BYTES * MESSAGE_BYTES
            rest = data[whole:]
            for request in HoldRequest.decode(data[:whole]):
                governor.handle(request)


class Governor:
    """Handles the requests of clients to start, change or end the throttling of a phase.

    It has no side effects except those of the throttles, so that tests need no processes.
    """

    def __init__(self, make: Callable[[HoldRequest, Account], Throttled]) -> None:
        self._make = make
        self._held: dict[int, Throttled] = {}
        self._queue = TurnQueue()

    def handle(self, request: HoldRequest) -> None:
        """Start, change or end the throttle of one client."""
        held = self._held.get(request.pid)
        if request.share == 0.0:
            if held is not None:
                self._queue.drop(held)
                held.close()
                del self._held[request.pid]
            return
        account = Account(request.share, request.at_ns, request.used_ns)
        with contextlib.suppress(ProcessLookupError):
            if held is None:
                held = self._held[request.pid] = self._make(request, account)
            elif not held.renew(account):
                return
            self._queue.add(held, request.at_ns)

    def run_due(self, now_ns: int) -> int | None:
        """Run the throttles that are due, and drop clients that have ended.

        Return the time in ns at which the next throttle is due, or None. Raises `RunError` if one fails.
        """
        due_ns = self._queue.run_due(now_ns)
        for why in self._queue.trouble.values():
            raise RunError(f"a phone can no longer be limited to its CPU share: {why}")
        if len(self._held) > len(self._queue):  # each throttle holds a descriptor
            for pid in [pid for pid, held in self._held.items() if held not in self._queue]:
                self._held.pop(pid).close()
        return due_ns


def make_throttle(kind: str, request: HoldRequest, account: Account) -> Throttled:
    """Create a client's throttle, which works by signals or by the quota of the client's control group."""
    target = Target(request.pid)
    if process_stat(request.pid)[1:2] != [str(os.getppid())]:
        # not a child of the zygote: the pid has been reused
        target.close()
        raise ProcessLookupError(f"no client {request.pid}")
    if kind == "cgroup":
        try:
            place = find("cpu", request.pid)
        except NoGroup:
            with contextlib.closing(target):
                target.cpu_ns()  # raises ProcessLookupError if the client has just ended
            raise
        return Quota(target, account, place)
    slice_ns = min(max(SHORTEST_SLICE_NS, int(SLICE_SHARE * request.work_ns)), SLICE_NS)
    return DutyCycle(target, account, slice_ns)
