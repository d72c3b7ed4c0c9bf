"""The findings of `edgefl.lab.chaos`: the runs that were disturbed, and the kills with their recoveries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from edgefl import failpoints

KINDS = ("supervisor", "zygote", "server", "client", "worker", "evaluator", "governor")
"""Kinds of processes of a run."""
PLACES = ("die", *failpoints.OF_SERVER)
"""Failpoints: the client's, under the wall clock, and the server's."""


class Kill(msgspec.Struct):
    """One kill: of which process, in which round, and how long the run took to be ahead of it again."""

    kind: str
    round: int
    command: int
    """The command of the round that it hit, from 1."""
    at_s: float
    recovery_s: float | None = None
    """Until a version was on record that had never been before; None where the run was over without one."""


class DisturbedRun(msgspec.Struct, kw_only=True):
    """One run: killed, resumed, judged."""

    seed: int
    kills: int = 0
    commands: int = 0
    """Commands that it took: the run, and each time that it was resumed."""
    wall_s: float = 0.0
    versions: int = 0
    trips: int = 0
    acknowledged: int = 0
    """Updates that the server acknowledged, by the clients' account (wall clock)."""
    outlived_s: float = 0.0
    """The longest that a process of the run outlived its supervisor."""
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
        """One line for each promise that was not held."""
        return [f"seed {each.seed}: {line}" for each in self.rounds for line in each.violations]

    @property
    def kinds(self) -> list[str]:
        """Kinds of processes, and places, of the kills."""
        made = {kill.kind for kill in self.kills}
        return [kind for kind in (*KINDS, *PLACES) if kind in made]

    def recovery(self, kind: str | None = None) -> tuple[int, dict[str, float]]:
        """The number of kills, of one kind or all; median, 95th percentile and worst of their recoveries."""
        kills = [kill for kill in self.kills if kind in (None, kill.kind)]
        seconds = [kill.recovery_s for kill in kills if kill.recovery_s is not None]
        if not seconds:
            return len(kills), {}
        found = np.quantile(seconds, (0.5, 0.95, 1.0)).tolist()
        return len(kills), dict(zip(("median_s", "p95_s", "worst_s"), found, strict=True))

    def document(self) -> dict[str, Any]:
        """All of it as plain values, for a JSON file."""
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
