"""The governor of a run: a process that holds the computing phones to their share of the CPU.

Phones tell it through a pipe when they start to compute, with which share, and when they are done. It was
forked by the zygote, as they were, and ends with it.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from edgefl.errors import RunError
from edgefl.limits.account import Account
from edgefl.limits.duty import SLICE_NS, Duty
from edgefl.limits.governor import Governed, Rota, be_prompt
from edgefl.limits.held import MESSAGE_BYTES, Word
from edgefl.limits.hierarchy import find
from edgefl.limits.quota import Quota
from edgefl.limits.target import Target

SLICE_SHARE = 0.02
"""Of a phase's CPU time, at most `SLICE_NS`: a phase ends within half a slice of when it should."""
SHORTEST_SLICE_NS = 300_000
LONGEST_WAIT_S = 3600.0


class Warden:
    """Answers the words of phones; pure but for what the throttles do."""

    def __init__(self, make: Callable[[Word, Account], Governed]) -> None:
        self._make = make
        self._held: dict[int, Governed] = {}
        self.rota = Rota()

    def hear(self, word: Word) -> None:
        """Start, renew or end the hold on one phone. One that is gone is let go."""
        held = self._held.get(word.pid)
        if held is not None and held not in self.rota:  # an earlier process of that number
            held.close()
            held = None
        if word.share == 0.0:
            if held is not None:
                self.rota.drop(held)
                held.close()
            self._held.pop(word.pid, None)
            return
        account = Account(word.share, word.at_ns, word.used_ns)
        if held is not None:
            if held.renew(account):
                self.rota.add(held, word.at_ns)
            return
        try:
            made = self._make(word, account)
        except ProcessLookupError:
            return
        self._held[word.pid] = made
        self.rota.add(made, word.at_ns)

    def look(self, now_ns: int) -> int | None:
        """Look after who is due; returns when the next one is. `RunError` if one cannot be held any more."""
        due_ns = self.rota.run_due(now_ns)
        for why in self.rota.trouble.values():
            raise RunError(f"a phone cannot be held to its share any more: {why}")
        return due_ns


def duty(word: Word, account: Account) -> Duty:
    """Hold a phone by signals."""
    slice_ns = min(max(SHORTEST_SLICE_NS, int(SLICE_SHARE * word.work_ns)), SLICE_NS)
    return Duty(_sibling(word.pid), account, slice_ns)


def quota(word: Word, account: Account) -> Quota:
    """Hold a phone by the quota of the control group that it is in."""
    return Quota(_sibling(word.pid), account, find("cpu", word.pid))


MAKERS: dict[str, Callable[[Word, Account], Governed]] = {"sigstop": duty, "cgroup": quota}


def govern(warden: Warden, words: int, lifeline: int) -> None:
    """Look after phones until the zygote is gone; ``words`` is the pipe's end that reads."""
    be_prompt()
    rest = b""
    while True:
        due_ns = warden.look(time.monotonic_ns())
        wait_s = LONGEST_WAIT_S if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) * 1e-9)
        ready, _, _ = select.select([words, lifeline], [], [], wait_s)
        if lifeline in ready:
            return
        if words in ready:
            data = rest + os.read(words, 1 << 16)
            whole = len(data) // MESSAGE_BYTES * MESSAGE_BYTES
            rest = data[whole:]
            for word in Word.decode(data[:whole]):
                warden.hear(word)


def _sibling(pid: int) -> Target:
    """A process that the zygote forked too: its number cannot be another's by now."""
    target = Target(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        stat = ""
    if not stat or int(stat.rpartition(")")[2].split()[1]) != os.getppid():
        target.close()
        raise ProcessLookupError(f"no phone {pid}")
    return target
