"""Count executed bytecode instructions by function.

The number depends on the code, its inputs and the version of Python, but not on the host or its load. Python
3.12 and newer report each instruction to `sys.monitoring`; older versions report it to a trace function.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from edgefl.host.process import ThreadSchedule, thread_schedule

MAX_INSTRUCTIONS = 20_000_000
"""Maximum number of instructions that one function may execute. Counting takes 0.2 to 2 μs per instruction,
that is, at most 40 s for a function."""
SOME_NS = 1_000_000
"""Maximum CPU time in nanoseconds of a thread that is assumed to have only waited for work."""
_OWN = __file__
Trace = Callable[[FrameType, str, Any], Any]
_ends: list[Callable[[], None]] = []
"""Functions that end the current counting. A forked child calls them, because only its parent is counted."""
os.register_at_fork(after_in_child=lambda: [end() for end in _ends])


class CodeName(NamedTuple):
    """The file of a function and its qualified name."""

    file: str
    qualname: str


class NotCounted(BaseException):
    """Raised if a function's instructions cannot all be counted.

    It is raised inside a function to end it when it has executed more instructions than allowed.
    """


def count_instructions(run: Callable[[], object], most: int = MAX_INSTRUCTIONS) -> dict[CodeName, int]:
    """Call ``run``; return how many instructions each function executed, in all threads that ``run`` uses.

    Before Python 3.12, threads that exist before the call are not counted (`KeptThreads`). Raises
    `NotCounted` if a function executes more than ``most`` instructions or ends the counting.

    >>> def add(a, b):
    ...     return a + b
    >>> counts = count_instructions(lambda: [add(1, 2) for _ in range(3)])
    >>> 9 <= next(count for code, count in counts.items() if code.qualname == "add") <= 18
    True
    """
    cells = _Cells(most)
    (_monitored if sys.version_info >= (3, 12) else _traced)(run, cells)
    # The exception ends only the thread in which it is raised, and the function may catch it.
    if any(cell[0] > most for _, cell, _ in cells.values()):
        raise NotCounted
    return cells.counts()


class KeptThreads:
    """The other threads that exist when this object is created; none from Python 3.12 on.

    Before Python 3.12, such threads cannot be traced.
    """

    def __init__(self) -> None:
        threads = () if sys.version_info >= (3, 12) else threading.enumerate()
        self._threads = [one.native_id for one in threads if one is not threading.current_thread()]
        self._before = self._schedules()

    def computed(self) -> bool:
        """Return True if one of the threads has ended, or has computed for more than `SOME_NS`."""
        pairs = zip(self._before, self._schedules(), strict=True)
        return any(
            before is not None and (now is None or now.ran_ns - before.ran_ns > SOME_NS)
            for before, now in pairs
        )

    def _schedules(self) -> list[ThreadSchedule | None]:
        return [thread_schedule(f"self/task/{thread}") for thread in self._threads]


class _Cells(dict[int, tuple[CodeType, list[int], Trace]]):
    """Instruction counters, keyed by the ids of code objects.

    The code objects themselves are not the keys, because their hash depends on all instructions and is slow.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def trace(self, code: CodeType) -> Trace:
        """Return the trace function that counts the code's instructions."""
        if (known := self.get(id(code))) is None:
            cell, most = [0], self.most

            def count(frame: FrameType, event: str, arg: object) -> None:
                # Returning None keeps this as the frame's trace function.
                if event == "opcode":
                    cell[0] += 1
                    if cell[0] > most:
                        raise NotCounted

            known = self[id(code)] = code, cell, count
        return known[2]

    def counts(self) -> dict[CodeName, int]:
        """Return the counts by function, leaving out the code of this module."""
        found: Counter[CodeName] = Counter()
        for code, (count,), _ in self.values():
            if code.co_filename != _OWN and count:
                found[CodeName(code.co_filename, code.co_qualname)] += count
        return dict(found)


def _traced(run: Callable[[], object], cells: _Cells) -> None:
    def enter(frame: FrameType, event: str, arg: object) -> Trace:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return cells.trace(frame.f_code)

    def end() -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type,unused-ignore]

    _ends.append(end)
    threading.settrace(enter)
    sys.settrace(enter)
    try:
        run()
        # Python also removes a trace function that raised an exception, such as a RecursionError.
        if sys.gettrace() is not enter:
            raise NotCounted
    finally:
        end()
        _ends.remove(end)


def _monitored(run: Callable[[], object], cells: _Cells) -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    events = monitoring.events
    tool = next(number for number in (3, 4, 5, 2, 1, 0) if monitoring.get_tool(number) is None)

    def count(code: CodeType, offset: int) -> None:
        if (known := cells.get(id(code))) is None:
            cells.trace(code)
            known = cells[id(code)]
        cell = known[1]
        cell[0] += 1
        if cell[0] > cells.most:
            raise NotCounted

    def end() -> None:
        monitoring.set_events(tool, 0)

    _ends.append(end)
    monitoring.use_tool_id(tool, "edgefl")
    monitoring.register_callback(tool, events.INSTRUCTION, count)
    monitoring.set_events(tool, events.INSTRUCTION)
    try:
        run()
    finally:
        end()
        _ends.remove(end)
        monitoring.register_callback(tool, events.INSTRUCTION, None)
        monitoring.free_tool_id(tool)
