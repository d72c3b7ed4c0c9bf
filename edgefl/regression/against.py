"""Compares a function of the working tree (head) with the same function of an earlier commit (base).

Each runs in its own process. The two processes take turns every few milliseconds (base, head, head, base), so
a disturbance of the host affects both. No baseline is stored, and no other host is needed.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from edgefl.errors import ConfigError, NotMet
from edgefl.host.channel import Channel, Closed
from edgefl.regression.checkout import Base, Checkout
from edgefl.regression.counts import share_text
from edgefl.regression.paired import Estimate, ProcessPair, block_ratio, decide, estimate
from edgefl.regression.process import Failure, Surroundings, alone
from edgefl.regression.sides import (
    HOOK,
    BranchAnswer,
    CallRequest,
    Ended,
    EndRequest,
    Imported,
    Ready,
    Shot,
    ShotRequest,
    SideFiles,
    Stem,
)
from edgefl.regression.verdict import MIN_MIB, Verdict, figure
from edgefl.results.tables import many, short_time

LIMIT_S = 40.0
"""Default limit on the wall-clock time for comparing one function, in seconds, excluding the time that
interpreters take to start."""
MAX_WAITS = 2.0
"""The time limit is extended by the time that the measured processes spent waiting for a core, but by no more
than this multiple of the limit."""
SHOT_S, PAIR_S = 0.005, 0.6
"""Target duration of a shot (calls that are timed together), and minimum duration of all shots of a pair of
processes, in seconds."""
MIN_BLOCKS = 4
LONG_CALL_S = PAIR_S / (4 * MIN_BLOCKS)
"""Duration of a call, in seconds, above which the shots of a pair of processes take longer than `PAIR_S`."""
SCHEDULE = ((5, 1), (5, 2), (5, 3), (5, 4), (7, 4), (9, 4), (10, 4))
"""Stages after which the comparison may end: (number of memory layouts, pairs of processes in each)."""
EDITABLE = "install it with pip install -e, or put its folder on pytest's pythonpath"
_LONGER = " or with a larger --edgefl-limit"
_SHORTER = (
    ", with a larger --edgefl-limit, or with a function that does less: calls of 1 to 20 ms can be repeated "
    "more often"
)
BROKEN_BASE = (
    "if this change repairs it, run once with --edgefl-invalid=skip; if it needs generated files, make them "
    "in the base's checkout with --edgefl-build='COMMAND'"
)
LACKING = (
    "so the base does not have it; make it in the base's checkout with --edgefl-build='COMMAND' (for a "
    "submodule: 'git submodule update --init')"
)
SIDES = ("base", "head")
SENT_GROWTH = 0.01
"""Allowed growth in sent bytes, as a share of the base's number."""
MIN_LAYOUTS = SCHEDULE[0][0]
MAX_PAIRS = math.prod(SCHEDULE[-1])
PADDING = 97
"""Number of bytes by which each stem's environment is longer than the previous stem's, so that their memory
layouts differ. A stem is the process from which the processes of base and head are forked."""

Tell = Callable[[str], None]
A = TypeVar("A", Imported, Ready, Shot, Ended)


class Comparison(NamedTuple):
    """The result of a comparison with the base."""

    base: str
    pairs: Sequence[ProcessPair] = ()
    missing: str = ""
    """Why the function does not exist in the base; empty if it does."""
    unjudged: str = ""
    """Why base and head could not be compared; empty if they were compared."""


class AgainstBase:
    """Compares the functions of a test session with one base. Call `close` at the end."""

    def __init__(self, base: Base, build: str | None = None) -> None:
        self.base, self._build = base, build
        self._checkout: Checkout | None = None
        self._refused = ""
        """Why the base could not be checked out or built, which is not tried again; empty if it could."""
        self._stems: list[Stem] = []
        self._modules: list[str] | None = None
        """Modules that are imported in a stem before it forks; None if they are not known yet. Empty if the
        import of a test's module changes environment variables, because other modules must then be imported
        after this change."""
        self._file = ""
        self._surroundings: Surroundings | None = None
        self._branches: dict[int, tuple[Channel[BranchAnswer], Channel[BranchAnswer]]] = {}
        """Channels to the branches of base and head (the processes that import the functions' module, whose
        path is `_file`), keyed by memory layout."""
        self._starting_s = 0.0
        """Wall-clock time in seconds that the current comparison has spent on process starts and imports."""
        self._waited_s = 0.0
        """Time in seconds that the processes of the current comparison have waited for a core."""

    def compare(
        self, label: str, call: CallRequest, tolerance: float, limit_s: float | None, tell: Tell
    ) -> Comparison:
        """Measure until the growth of the function's time is known, or until ``limit_s`` seconds have passed.

        Raises `NotMet` if the head's function fails, ConfigError if the base cannot be checked out.
        """
        __tracebackhide__ = True
        file, repository = call.function.file, self.base.repository
        if not Path(file).is_relative_to(repository):
            why = (
                f"its code is {file}, outside the repository {repository}, so base and head are the same code"
            )
            return Comparison(self.base.name, unjudged=f"{why}; {EDITABLE}")
        if self._refused:
            raise ConfigError(self._refused)
        with alone():
            if self._checkout is None:
                tell(f"checking out {self.base.name}")
                try:
                    self._checkout = Checkout(self.base, self._build)
                except ConfigError as error:
                    self._refused = str(error)
                    raise
            self._follow(file)
            try:
                found = self._compared(label, call, tolerance, limit_s or LIMIT_S, tell)
            except BaseException:
                self._end_branches()  # pending answers would be mistaken for answers to the next request
                raise
            files = [Path(one.file) for one in (call.function, call.setup) if one is not None]
            why = next(filter(None, map(self._checkout.why_without, files)), "") if found.missing else ""
            return Comparison(self.base.name, unjudged=f"{why}, {LACKING}") if why else found

    def _follow(self, file: str) -> None:
        """End the processes that do not suit the module ``file`` and the test's environment, folder and path.

        If the environment has changed, or if a stem has ended (such as one that the system killed because
        memory was short), end all processes; otherwise end only the branches.
        """
        before, self._surroundings = self._surroundings, Surroundings.now()
        ended = any(stem.popen.poll() is not None for stem in self._stems)
        if ended or (before is not None and before.environment != self._surroundings.environment):
            self._end_stems()
        elif file != self._file or before != self._surroundings:
            self._end_branches()
        self._file = file

    def _compared(
        self, label: str, call: CallRequest, tolerance: float, limit_s: float, tell: Tell
    ) -> Comparison:
        __tracebackhide__ = True
        until_s, last_s, self._starting_s, self._waited_s = time.monotonic() + limit_s, 0.0, 0.0, 0.0
        pairs: list[ProcessPair] = []
        for layouts, turns in SCHEDULE:
            for layout, turn in due(pairs, layouts, turns):
                began_s, starting_s = time.monotonic(), self._starting_s
                more_s = self._starting_s + min(self._waited_s, MAX_WAITS * limit_s)
                if pairs and began_s + last_s > until_s + more_s:
                    return Comparison(self.base.name, pairs)
                pair = f"pair {len(pairs) + 1}, of at least {MIN_LAYOUTS} and at most {MAX_PAIRS}"
                tell(f"comparing with {self.base.name}, {pair}")
                found = self._pair(call, layout, turn, limit_s)
                if isinstance(found, _Fault):
                    if found.failure.kind == "late":
                        self._end_stems()  # a branch that still imports does not notice a closed channel
                    else:
                        self._end_branches()
                    return _faulty(label, self.base.name, found)
                pairs.append(found)
                last_s = time.monotonic() - began_s - (self._starting_s - starting_s)
            if decide(estimate(pairs), tolerance) != "unknown":
                break
        return Comparison(self.base.name, pairs)

    def _pair(self, call: CallRequest, layout: int, turn: int, limit_s: float) -> ProcessPair | _Fault:
        """Measure a process of the base and a process of the head, which take turns."""
        began_s, new = time.monotonic(), layout not in self._branches
        both = self._branches.get(layout) or self._new_branches(layout)
        cores = sorted(os.sched_getaffinity(0))
        seeded = msgspec.structs.replace(
            call,
            layout=layout * 1000 + turn,
            core=cores[(layout + turn) % len(cores)],
            modules=self._modules or [],
        )
        try:
            running = _RunningPair(both, seeded)
            if running.modules is None and self._modules:
                self._end_stems()
                self._modules = []
                return self._pair(call, layout, turn, limit_s)
            if self._modules is None:
                self._modules = running.modules or []
            if new:
                self._starting_s += time.monotonic() - began_s
            found = running.measure(layout, limit_s, reverse=bool((layout + turn) % 2))
            self._waited_s += running.waited_s
            return found
        except _Fault as fault:
            return fault

    def _new_branches(self, layout: int) -> tuple[Channel[BranchAnswer], Channel[BranchAnswer]]:
        assert self._checkout is not None
        if layout >= len(self._stems):
            self._start_stems(layout + 1 if self._modules is None else max(layout + 1, MIN_LAYOUTS))
        head = str(self.base.repository)
        path = [one if one.endswith(HOOK) else os.path.abspath(one) for one in Surroundings.now().path]
        base_files, head_files = (
            SideFiles(root=root, head=head, folder=os.getcwd(), path=path)
            for root in (str(self._checkout.root), head)
        )
        stem = self._stems[layout]
        made = self._branches[layout] = (stem.branch(base_files), stem.branch(head_files))
        return made

    def _start_stems(self, number: int) -> None:
        """Start stems until ``number`` of them run; wait until the new stems have imported their modules."""
        began = len(self._stems)
        self._stems += [Stem(layout, PADDING * layout) for layout in range(began, number)]
        if self._modules:
            for stem in self._stems[began:]:
                stem.preload(self._modules)
            for stem in self._stems[began:]:
                stem.wait()

    def _end_branches(self) -> None:
        for channel in (one for both in self._branches.values() for one in both):
            channel.close()
        self._branches.clear()

    def close(self) -> None:
        """End all processes and remove the checkout."""
        with contextlib.ExitStack() as stack:
            if self._checkout is not None:
                stack.callback(self._checkout.close)
            stack.callback(self._end_stems)
        self._checkout = None

    def _end_stems(self) -> None:
        self._end_branches()
        with contextlib.ExitStack() as stack:
            for stem in self._stems:
                stack.callback(stem.close)
        self._stems = []


def due(pairs: Sequence[ProcessPair], layouts: int, turns: int) -> Iterator[tuple[int, int]]:
    """Yield the layout and the turn of each pair of processes that is still to be measured.

    All layouts of a turn come before those of the next turn.

    >>> list(due([], 2, 2))
    [(0, 0), (1, 0), (0, 1), (1, 1)]
    """
    made = {layout: sum(pair.layout == layout for pair in pairs) for layout in range(layouts)}
    for turn in range(turns):
        yield from ((layout, turn) for layout in range(layouts) if made[layout] <= turn)


class _Fault(Exception):
    """The process of one side (base or head) did not answer as expected."""

    def __init__(self, side: int, failure: Failure) -> None:
        self.side, self.failure = side, failure


class _RunningPair:
    """A running process of the base and a running process of the head, which take turns."""

    def __init__(self, both: tuple[Channel[BranchAnswer], Channel[BranchAnswer]], call: CallRequest) -> None:
        self._both, self._limit_s, began_s = both, call.limit_s, time.monotonic()
        self.waited_s = 0.0
        """Time in seconds that the two processes have waited for a core during their turns."""
        for channel in both:
            channel.tell(call)
        # The head first, so that its fault is reported if both sides fail. Its import has no limit, because
        # torch's import takes long on a busy host. The base's import may take as long again, or `limit_s`.
        self._receive(1, Imported, None)
        again_s = time.monotonic() - began_s
        head_ready = self._receive(1, Ready, call.limit_s)
        self._receive(0, Imported, max(math.ceil(again_s), call.limit_s), "its import ")
        self._ready = self._receive(0, Ready, call.limit_s), head_ready
        base, head = (one.modules for one in self._ready)
        self.modules = None if base is None or head is None else list(dict.fromkeys((*base, *head)))
        """Modules that a stem (the process from which such pairs are forked) may import before it forks; None
        if it must not import any."""

    def measure(self, layout: int, limit_s: float, *, reverse: bool) -> ProcessPair:
        """Time shots (groups of calls) of base and head alternately, then end both processes.

        Shots are timed until their costs add up to `PAIR_S`, or until ``limit_s`` seconds have passed and
        there are `MIN_BLOCKS` blocks. Waits for a core do not count towards ``limit_s``. The limit is for
        calls that mostly wait for child processes: they cost so little that it would take minutes to reach
        `PAIR_S`. Raises `_Fault` if a side fails.
        """
        base, head = self._ready
        calls = max(1, round(SHOT_S / max(base.call_s, head.call_s)))
        began_s = time.monotonic()
        blocks: list[tuple[float, float]] = []
        shots: tuple[list[float], list[float]] = ([], [])
        while len(blocks) < MIN_BLOCKS or (
            sum(map(sum, blocks)) < PAIR_S and time.monotonic() - began_s - self.waited_s < limit_s
        ):
            order = (0, 1, 1, 0) if (len(blocks) % 2) == reverse else (1, 0, 0, 1)
            block = [0.0, 0.0]
            for side in order:
                self._both[side].tell(ShotRequest(calls))
                shot = self._receive(side, Shot, self._limit_s)
                self.waited_s += shot.waited_ns / 1e9
                took_s = shot.cost_ns / 1e9
                block[side] += took_s
                shots[side].append(took_s / calls)
            blocks.append((max(block[0], 1e-9), max(block[1], 1e-9)))
        for channel in self._both:
            channel.tell(EndRequest())
        for side in (0, 1):
            self._receive(side, Ended, self._limit_s)
        base_s, head_s = map(statistics.median, shots)
        return ProcessPair(
            layout=layout,
            log_ratio=block_ratio(blocks),
            base_s=base_s,
            head_s=head_s,
            base_mib=base.peak_mib,
            head_mib=head.peak_mib,
            base_sent_mib=base.sent_mib,
            head_sent_mib=head.sent_mib,
        )

    def _receive(self, side: int, kind: type[A], limit_s: float | None, what: str = "") -> A:
        channel = self._both[side]
        try:
            if not channel.waiting and not _arrives(channel, limit_s):
                raise _Fault(side, Failure("late", f"{what}within {limit_s:g} s"))
            answer = channel.receive()
        except Closed:
            answer = Failure("signal", "its parent's exit")
        if isinstance(answer, kind):
            return answer
        # The process ends too early without a failure if the function calls ``os._exit(0)``.
        raise _Fault(side, answer if isinstance(answer, Failure) else Failure("signal", "exit code 0"))


def _arrives(channel: Channel[BranchAnswer], limit_s: float | None) -> bool:
    """Wait up to ``limit_s`` seconds; return True if the channel can be read, or is closed."""
    poller = select.poll()  # select() accepts no descriptor above 1023
    poller.register(channel, select.POLLIN)
    return bool(poller.poll(None if limit_s is None else 1e3 * limit_s))


def _faulty(label: str, base: str, fault: _Fault) -> Comparison:
    """Return the result of a comparison with a side that failed. Raises `NotMet` if that side is the head."""
    __tracebackhide__ = True
    kind, why = fault.failure.kind, fault.failure.why
    if kind == "absent":
        return Comparison(base, missing=why)
    if kind == "foreign":
        return Comparison(base, unjudged=f"{why}; {EDITABLE}")
    failed = {
        "late": f"did not finish {why}; set a larger limit_s= in the mark",
        "memory": "ran out of memory",
        "signal": f"was ended by {why}",
        "refused": f"cannot be measured: {why}",
        "skipped": f"skips the test: {why}",
        "expected": f"is expected to fail: {why}",
    }.get(kind, f"failed:\n{why}")
    if fault.side == 1:
        raise NotMet(f"{label} {failed}")
    return Comparison(base, unjudged=f"at {base} it {' '.join(failed.split())}; {BROKEN_BASE}")


def verdict_of(found: Comparison, tolerance: float) -> Verdict:
    """Judge whether sent bytes, memory or time have grown from the base to the head."""
    if found.missing:
        why = f"new: {found.missing} at {found.base}, so there is nothing to compare with yet"
        return Verdict("PASS", why)
    if found.unjudged:
        return Verdict("INVALID", found.unjudged)
    grew = [*_more_sent(found), *_more_memory(found, tolerance)]
    time = estimate(found.pairs)
    decision = decide(time, tolerance)
    if decision == "grew":
        grew.append(("cpu_s", _time_text(found, time)))
    if grew:
        return Verdict("FAIL", "; ".join(text for _, text in grew), grew=tuple(name for name, _ in grew))
    if decision == "unknown":
        unknown = f"exclude growth of {tolerance:.1%}" if time.most >= tolerance else "say whether it grew"
        why = f"{_time_text(found, time)}, too uncertain to {unknown}"
        advice = _SHORTER if _base_s(found) > LONG_CALL_S else _LONGER
        return Verdict("INVALID", f"{why}; run again, on a quieter host{advice}")
    return Verdict("PASS", _time_text(found, time))


def _time_text(found: Comparison, time: Estimate) -> str:
    grew, least, most = (share_text(1.0, 1.0 + share) for share in (time.growth, time.least, time.most))
    sure = f" ({least} to {most})" if math.isfinite(time.most) else ""
    return (
        f"time {grew}{sure} since {found.base}, where a call takes {short_time(_base_s(found))}; measured "
        f"alternately, {many(len(found.pairs), 'pair')} of processes"
    )


def _base_s(found: Comparison) -> float:
    return statistics.median(pair.base_s for pair in found.pairs)


def _more_sent(found: Comparison) -> Iterator[tuple[str, str]]:
    base, head = (
        statistics.median(getattr(pair, f"{side}_sent_mib") for pair in found.pairs) for side in SIDES
    )
    if head > base * (1 + SENT_GROWTH):
        yield "sent_mib", f"{figure(head - base)} MiB more sent per call: {figure(base)} → {figure(head)} MiB"


def _more_memory(found: Comparison, tolerance: float) -> Iterator[tuple[str, str]]:
    """Yield the metric's name and a description of the memory growth if every pair shows too much growth."""
    base, head = (statistics.median(getattr(pair, f"{side}_mib") for pair in found.pairs) for side in SIDES)
    least = min(pair.head_mib - pair.base_mib for pair in found.pairs)
    if least > max(MIN_MIB, tolerance * base):
        yield "peak_mib", f"peak memory +{figure(head - base)} MiB: {figure(base)} → {figure(head)} MiB"
