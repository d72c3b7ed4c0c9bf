"""Tasks and measurements that were not answered when a journal ends."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.core.core import Core
from edgefl.core.events import Action, Evaluate, Evaluated, Event, Release, Revoke, Train


class Unfinished:
    """Shown every event of a replay and the core's answer, it knows what was under way at the end.

    >>> from edgefl.core.events import Joined
    >>> from edgefl.experiment import Stop
    >>> from edgefl.strategies.base import Client
    >>> from edgefl.strategies.fedbuff import FedBuff
    >>> core, seen = Core(FedBuff(buffer_size=1), [Client(0, "pi-4", 60)], 1, Stop(versions=1)), Unfinished()
    >>> event = Joined(client=0, at_s=2.0)
    >>> seen.observe(event, core.handle(event), core)
    >>> seen.tasks, seen.assessing
    ({0: (Train(client=0, task=0, version=0, trip=0), 2.0)}, {0: (2.0, 0)})
    """

    def __init__(self) -> None:
        self.tasks: dict[int, tuple[Train, float]] = {}
        """Tasks that were given out and not released, and when they were given out, emulated s."""
        self.cancelled: set[int] = set()
        self.assessing: dict[int, tuple[float, int]] = {}
        """Versions that were to be measured: when each was published, and the client trips until then."""

    def observe(self, event: Event, actions: Sequence[Action], core: Core) -> None:
        """The ``core`` answered ``event`` with ``actions``."""
        if isinstance(event, Evaluated):
            self.assessing.pop(event.version, None)
        for action in actions:
            match action:
                case Train():
                    self.tasks[action.task] = action, core.now_s
                case Revoke():
                    self.cancelled.add(action.task)
                case Release():
                    self.tasks.pop(action.task, None)
                    self.cancelled.discard(action.task)
                case Evaluate():
                    self.assessing[action.version] = core.now_s, core.trips
