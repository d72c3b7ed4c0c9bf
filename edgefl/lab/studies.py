"""Loads the studies (reproductions of papers) that ``edgefl reproduce`` runs.

The file ``experiments/papers/studies/NAME.toml`` defines a study's arms (the algorithms to compare) and its
claims (`edgefl.lab.claims`). If a paper also makes other claims, the function ``claims(curves)`` of a module
in `edgefl.lab` judges these claims after those of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import msgspec

from edgefl import toml
from edgefl.lab import fedbuff, fedstaleweight
from edgefl.lab.claims import Gain, Lead, Race
from edgefl.lab.study import SEEDS, Arm, Curves, Finding, Study, Tuning, folder
from edgefl.validation import convert

FURTHER: Mapping[str, Callable[[Curves], Sequence[Finding]]] = {
    "fedbuff": fedbuff.claims,
    "fedstaleweight": fedstaleweight.claims,
}
"""Functions that judge the claims that are not in a study's file, keyed by the name of the study."""


class StudyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a study's file: fields of `Study`, and the claims."""

    title: str
    citation: str
    arms: tuple[Arm, ...]
    races: tuple[Race, ...] = ()
    races_at: dict[str, tuple[Race, ...]] = {}
    """Races (claims that one arm reaches the target accuracy at a lower cost than another) that replace
    ``races`` for particular settings, keyed by the name of the settings."""
    gains: tuple[Gain, ...] = ()
    leads: tuple[Lead, ...] = ()
    notes: tuple[str, ...] = ()
    notes_at: dict[str, tuple[str, ...]] = {}
    seeds: tuple[int, ...] = SEEDS
    small_seeds: tuple[int, ...] = SEEDS
    tuning: Tuning | None = None


@cache
def load(name: str) -> Study:
    """Load the study with the given name. Raises `ConfigError` if the study's file is invalid.

    >>> [arm.label for arm in load("table2-fedbuff").arms]
    ['FedBuff', 'FedBuff, K = 1', 'FedBuff, K = 100']
    """
    file = convert(toml.read(folder() / "studies" / f"{name}.toml"), StudyFile)

    def judge(curves: Curves) -> list[Finding]:
        races = file.races_at.get(curves.settings, file.races)
        leads = [lead for lead in file.leads if not lead.only or curves.settings in lead.only]
        claims: list[Race | Gain | Lead] = [*races, *file.gains, *leads]
        more = FURTHER[name](curves) if name in FURTHER else ()
        return [*(claim.finding(curves) for claim in claims), *more]

    fields = msgspec.structs.asdict(file)
    for key in ("races", "races_at", "gains", "leads"):
        del fields[key]
    return Study(name, judge=judge, **fields)
