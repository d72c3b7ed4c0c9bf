"""The seam: ``open`` a throttle on any process, and ``close`` it."""

from __future__ import annotations

import time
from types import TracebackType

from edgefl.errors import ConfigError, unknown
from edgefl.limits.account import Account, Achieved, checked_share
from edgefl.limits.duty import SLICE_NS, Duty
from edgefl.limits.governor import Governed, Governor
from edgefl.limits.groups import Groups
from edgefl.limits.hierarchy import NoGroup
from edgefl.limits.quota import Quota
from edgefl.limits.target import Target

KINDS = ("sigstop", "cgroup")
SAVED_NS = 2_000_000
"""CPU time that a process which sleeps may save up."""

_governor = Governor()


def open(kind: str, pid: int, share: float, *, saved_ns: float = SAVED_NS) -> Throttle:
    """Hold process ``pid`` to ``share`` cores of this host (0.2: a fifth of one) until it is closed.

    ``sigstop`` needs no privileges, holds this very process with all its threads, and stops it for
    milliseconds at a time. ``cgroup`` needs a control group that may be written to, and holds what the
    process starts from then on too. Either is steered by the CPU time really used. A process that does not
    want to run saves at most ``saved_ns`` of its share.

    ConfigError, in one line, if the mechanism is unknown or does not work here; ProcessLookupError if there
    is no such process; ValueError if ``share`` is not a finite number above 0.
    """
    checked_share(share)
    if kind not in KINDS:
        raise ConfigError(unknown("throttle", kind, KINDS))
    target = Target(pid)
    try:
        account = Account(share, time.monotonic_ns(), target.cpu_ns(), saved_ns)
        if kind == "sigstop":
            return Throttle(kind, Duty(target, account, SLICE_NS), None)
        return _in_group(target, account)
    except BaseException:
        target.close()
        raise


def _in_group(target: Target, account: Account) -> Throttle:
    try:
        groups = Groups(["cpu"])
    except NoGroup as why:
        raise ConfigError(f"throttle 'cgroup' cannot be used here: {why}") from None
    try:
        leaf = groups.leaf(f"cpu-{target.pid}")
        leaf.enter(target.pid)
        return Throttle("cgroup", Quota(target, account, leaf.place("cpu")), groups)
    except BaseException:
        groups.close()
        raise


class Throttle:
    """One process held to a share of the CPU; made by `open`, ended by `close` or a ``with``."""

    def __init__(self, kind: str, governed: Governed, groups: Groups | None) -> None:
        self.kind = kind
        self._governed = governed
        self._groups = groups
        self._open = True
        _governor.add(governed)

    @property
    def share(self) -> float:
        """Cores of this host; may be set while it runs."""
        return self._governed.account.share

    @share.setter
    def share(self, share: float) -> None:
        self._governed.account.share = checked_share(share)
        _governor.add(self._governed)

    @property
    def trouble(self) -> str:
        """Why the process is held no more, such as a control group that somebody removed; else empty."""
        return _governor.trouble(self._governed)

    def achieved(self) -> Achieved:
        """What the process was let have so far: by a quota now, by signals when it last stood still."""
        if self._open and isinstance(self._governed, Quota):
            _governor.look(self._governed.look)
        return self._governed.account.achieved()

    def close(self) -> None:
        """Let the process run on for good; does nothing the second time."""
        if not self._open:
            return
        self._open = False
        _governor.drop(self._governed)
        self._governed.close()
        if self._groups is not None:
            self._groups.close()

    def __enter__(self) -> Throttle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
