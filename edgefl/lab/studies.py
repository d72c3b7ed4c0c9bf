"""The studies of ``edgefl reproduce``: ``experiments/papers/studies/NAME.toml`` has a paper's arms and races.

A paper with claims other than races also has a module in `edgefl.lab`; its ``claims(curves)`` judges these
claims after the races.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import msgspec

from edgefl import toml
from edgefl.lab import ablations_fedbuff, ablations_privacy, fedbuff, fedstaleweight
from edgefl.lab.claims import Race
from edgefl.lab.study import SEEDS, Arm, Curves, Finding, Study, Tuning, folder
from edgefl.validation import convert

FURTHER: Mapping[str, Callable[[Curves], Sequence[Finding]]] = {
    "fedbuff": fedbuff.claims,
    "fedstaleweight": fedstaleweight.claims,
    "ablations-fedbuff": ablations_fedbuff.claims,
    "ablations-privacy": ablations_privacy.claims,
}
"""Functions that judge a study's claims other than races, by study."""


class StudyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A study's file: the fields of `Study`, and the races."""

    title: str
    citation: str
    arms: tuple[Arm, ...]
    races: tuple[Race, ...] = ()
    races_at: dict[str, tuple[Race, ...]] = {}
    """Races by settings; they replace ``races``."""
    notes: tuple[str, ...] = ()
    notes_at: dict[str, tuple[str, ...]] = {}
    seeds: tuple[int, ...] = SEEDS
    small_seeds: tuple[int, ...] = SEEDS
    tuning: Tuning | None = None


@cache
def load(name: str) -> Study:
    """Load a study by its name. Raises ConfigError for an invalid file.

    >>> [arm.label for arm in load("table2-fedbuff").arms]
    ['FedBuff', 'FedBuff, K = 1', 'FedBuff, K = 100']
    """
    file = convert(toml.read(folder() / "studies" / f"{name}.toml"), StudyFile)

    def judge(curves: Curves) -> list[Finding]:
        races = file.races_at.get(curves.settings, file.races)
        more = FURTHER[name](curves) if name in FURTHER else ()
        return [*(race.finding(curves) for race in races), *more]

    fields = msgspec.structs.asdict(file)
    del fields["races"], fields["races_at"]
    return Study(name, judge=judge, **fields)
