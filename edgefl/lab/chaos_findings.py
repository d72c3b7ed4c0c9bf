"""Findings of `edgefl.lab.chaos`: disturbed runs, and kills with the times of recovery."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from edgefl import failpoints

KINDS = ("supervisor", "zygote", "server", "client", "worker", "evaluator", "governor")
"""Processes of a run."""
PLACES = ("die", *failpoints.OF_SERVER)
"""Failpoints of clients (under the wall clock) and of the server."""


class Kill(msgspec.Struct):
    """One kill of a process, and the run's time to recover."""

    kind: str
    round: int
    command: int
    """Number of the round's command that it hit, from 1."""
    at_s: float
    recovery_s: float | None = None
    """Seconds until a version newer than all before was recorded; None if the run ended without one."""


class DisturbedRun(msgspec.Struct, kw_only=True):
    """A run that was killed, resumed and judged."""

    seed: int
    kills: int = 0
    commands: int = 0
    """Number of commands: the run, and each time that it was resumed."""
    wall_s: float = 0.0
    versions: int = 0
    trips: int = 0
    acknowledged: int = 0
    """Number of updates acknowledged by the server, by the clients' own logs (wall clock)."""
    outlived_s: float = 0.0
    """Maximum seconds that a process of the run outlived its supervisor."""
    judged: bool = False
    violations: list[str] = []


@dataclass
class Findings:
    """All rounds and kills."""

    clock: str
    transport: str
    rounds: list[DisturbedRun] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    interrupted: bool = False

    @property
    def violations(self) -> list[str]:
        """One line per violated promise."""
        return [f"seed {each.seed}: {line}" for each in self.rounds for line in each.violations]

    @property
    def kinds(self) -> list[str]:
        """Processes and failpoints of the kills."""
        made = {kill.kind for kill in self.kills}
        return [kind for kind in (*KINDS, *PLACES) if kind in made]

    def recovery(self, kind: str | None = None) -> tuple[int, dict[str, float]]:
        """Return the number of kills, of one kind or all, and median, 95th percentile and worst of the
        recoveries."""
        kills = [kill for kill in self.kills if kind in (None, kill.kind)]
        seconds = [kill.recovery_s for kill in kills if kill.recovery_s is not None]
        if not seconds:
            return len(kills), {}
        found = np.quantile(seconds, (0.5, 0.95, 1.0)).tolist()
        return len(kills), dict(zip(("median_s", "p95_s", "worst_s"), found, strict=True))

    def document(self) -> dict[str, Any]:
        """Return everything as plain values for a JSON file."""
        kinds = {kind: self.recovery(kind) for kind in self.kinds}
        return {
            "clock": self.clock,
            "transport": self.transport,
            "kills": len(self.kills),
            "interrupted": self.interrupted,
            "violations": self.violations,
            "recovery": {kind: {"kills": count, **found} for kind, (count, found) in kinds.items()},
            "rounds": msgspec.to_builtins(self.rounds),
            "each_kill": msgspec.to_builtins(self.kills),
        }
