"""A phase of computing that a run's governor slows: it holds the client to the CPU time that it should take.

The client tells the governor through a pipe when it starts and with which share, and when it has ended;
between steps it corrects the share by what its work has really cost. The share aims at an end a little before
the device's, and what is then left is waited out: no throttle stops a process to the microsecond.
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
from edgefl.limits.groups import find, process_stat
from edgefl.limits.pacing import Phase, PhaseTime
from edgefl.limits.throttle import (
    SLICE_NS,
    Account,
    DutyCycle,
    Quota,
    Target,
    Throttled,
    TurnQueue,
    be_prompt,
    cpu_ns,
)

RENEW_NS = {"sigstop": 20_000_000, "cgroup": 200_000_000}
"""Wall time between two corrections of the share: each costs the governor a wake-up, or a new quota."""
MOST_SHARE = 1.0  # training has one thread
LEAST_SHARE = 1e-3
EARLY = {"sigstop": 0.02, "cgroup": 0.2}
"""Share of a phase by which the throttle aims before its end: a quota is off by a tick and more."""
PRIOR = 0.2
"""Share of a phase's work with which its cost as known before counts beside what the phase itself tells."""

_FORMAT = struct.Struct("<qqqdq")
MESSAGE_BYTES = _FORMAT.size


class HoldRequest(NamedTuple):
    """A client's message to the governor; far below PIPE_BUF, so that no other's gets between its bytes."""

    pid: int
    at_ns: int
    used_ns: int
    share: float
    """0: the phase is over."""
    work_ns: int
    """CPU time that is expected until the end of the phase."""

    def encode(self) -> bytes:
        return _FORMAT.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> list[HoldRequest]:
        """The requests in ``data``, whose length is a multiple of `MESSAGE_BYTES`."""
        return [cls(*fields) for fields in _FORMAT.iter_unpack(data)]


class Cost:
    """CPU time that a process takes for its work, learnt from each phase.

    >>> cost = Cost(2.0)                     # ns for one unit of work, as measured beforehand
    >>> cost.learn(work=100.0, used_ns=400.0)
    >>> cost.ns_per_work
    3.0
    """

    def __init__(self, ns_per_work: float) -> None:
        self.ns_per_work = ns_per_work

    def learn(self, work: float, used_ns: float) -> None:
        """A phase is over: count half of what it told."""
        if work > 0 and used_ns > 0:
            self.ns_per_work = (self.ns_per_work + used_ns / work) / 2

    def within(self, total: float, work: float, used_ns: float) -> float:
        """Its cost as known after ``work`` of a phase's ``total``."""
        prior = PRIOR * total
        return (self.ns_per_work * prior + used_ns) / (prior + work)


class HeldPhase:
    """Like a `Phase`, for a process under a governor: ``done`` never waits, only ``end`` does."""

    def __init__(self, phase: Phase, total: float, cost: Cost, governor: int, kind: str) -> None:
        self._phase, self._total, self._cost, self._governor = phase, total, cost, governor
        self._renew_ns = RENEW_NS[kind]
        due_ns = phase.due_ns(total)
        self._aim_ns = due_ns - EARLY[kind] * (due_ns - phase.due_ns(0.0))
        self._began_ns = cpu_ns(0)
        self._tell(time.monotonic_ns())

    def done(self, work: float) -> None:
        """``work`` more has really been done."""
        self._phase.work += work
        now_ns = time.monotonic_ns()
        if now_ns >= self._next_ns and self._phase.work < self._total:
            self._tell(now_ns)

    def end(self) -> PhaseTime:
        """Close the phase: be held no more, wait out what is left of it, and report it."""
        self._cost.learn(self._phase.work, self.let_go() - self._began_ns)
        return self._phase.end()

    def let_go(self) -> int:
        """Be held no more; returns the CPU time that the process has used."""
        used_ns = cpu_ns(0)
        os.write(self._governor, HoldRequest(os.getpid(), time.monotonic_ns(), used_ns, 0.0, 0).encode())
        return used_ns

    def _tell(self, now_ns: int) -> None:
        """The share with which the rest is done just before the device would have done it."""
        self._next_ns = now_ns + self._renew_ns
        used_ns = cpu_ns(0)
        work, total = self._phase.work, self._total
        left_ns = self._cost.within(total, work, used_ns - self._began_ns) * (total - work)
        wall_ns = self._aim_ns - now_ns
        share = left_ns / wall_ns if wall_ns > 0 else MOST_SHARE
        share = min(max(share, LEAST_SHARE), MOST_SHARE)
        os.write(self._governor, HoldRequest(os.getpid(), now_ns, used_ns, share, int(left_ns)).encode())


SLICE_SHARE = 0.02
"""A slice's part of a phase's CPU time, at most `SLICE_NS`: a phase ends within half a slice of its due."""
SHORTEST_SLICE_NS = 300_000
LONGEST_WAIT_S = 3600.0


def govern(kind: str, requests: int, lifeline: int) -> None:
    """Hold clients until the zygote, whose child this process is, is gone; read their ``requests``."""
    be_prompt()
    governor = Governor(partial(hold, kind))
    rest = b""
    while True:
        due_ns = governor.look(time.monotonic_ns())
        wait_s = LONGEST_WAIT_S if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) * 1e-9)
        ready, _, _ = select.select([requests, lifeline], [], [], wait_s)
        if lifeline in ready:
            return
        if requests in ready:
            data = rest + os.read(requests, 1 << 16)
            whole = len(data) // MESSAGE_BYTES * MESSAGE_BYTES
            rest = data[whole:]
            for request in HoldRequest.decode(data[:whole]):
                governor.hear(request)


class Governor:
    """Answers the requests of clients; pure but for what the throttles do."""

    def __init__(self, make: Callable[[HoldRequest, Account], Throttled]) -> None:
        self._make = make
        self._held: dict[int, Throttled] = {}
        self._queue = TurnQueue()

    def hear(self, request: HoldRequest) -> None:
        """Start, renew or end the hold on one client. One that is gone is let go."""
        held = self._held.get(request.pid)
        if held is not None and (request.share == 0.0 or held not in self._queue):
            # the phase is over, or it was an earlier process of that number
            self._queue.drop(held)
            held.close()
            del self._held[request.pid]
            held = None
        if request.share == 0.0:
            return
        account = Account(request.share, request.at_ns, request.used_ns)
        with contextlib.suppress(ProcessLookupError):
            if held is None:
                held = self._held[request.pid] = self._make(request, account)
            elif not held.renew(account):
                return
            self._queue.add(held, request.at_ns)

    def look(self, now_ns: int) -> int | None:
        """Look after all that are due; returns when the next is. `RunError` if one can be held no more."""
        due_ns = self._queue.run_due(now_ns)
        for why in self._queue.trouble.values():
            raise RunError(f"a phone cannot be held to its share any more: {why}")
        return due_ns


def hold(kind: str, request: HoldRequest, account: Account) -> Throttled:
    """A throttle on a client: by signals, or by the quota of the control group that it is in."""
    target = Target(request.pid)
    if process_stat(request.pid)[1:2] != [str(os.getppid())]:
        # not a process that the zygote forked too: the number is another's by now
        target.close()
        raise ProcessLookupError(f"no client {request.pid}")
    if kind == "cgroup":
        return Quota(target, account, find("cpu", request.pid))
    slice_ns = min(max(SHORTEST_SLICE_NS, int(SLICE_SHARE * request.work_ns)), SLICE_NS)
    return DutyCycle(target, account, slice_ns)
