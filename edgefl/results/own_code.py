"""Finds which part of a run was made with which version of the user's own code, if the code changed.

The user's profiles, the files that they name, and the file ``data.path`` are treated as code, keyed by path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from edgefl.errors import listed
from edgefl.loading import changed_modules
from edgefl.results.record import Record
from edgefl.results.rows import EarlierCode
from edgefl.results.tables import many


def earlier_code(
    parts: Iterable[EarlierCode], last: Mapping[str, str], now: Mapping[str, str], version: int, trips: int
) -> list[EarlierCode]:
    """Return the earlier code of a run that is resumed, or that replaces a killed process, after ``version``
    and ``trips`` trips.

    ``now`` holds the digests of the code with which the run continues, ``last`` the last recorded digests,
    and ``parts`` the recorded earlier code. Code that was used only after the point from which the run
    continues is left out, because the run repeats everything after that point.

    >>> one = earlier_code([], {"mine": "a"}, {"mine": "b"}, version=3, trips=30)
    >>> one
    [EarlierCode(version=3, trips=30, code={'mine': 'a'})]
    >>> earlier_code(one, {"mine": "b"}, {"mine": "c"}, version=3, trips=30) == one
    True
    >>> earlier_code(one, {"mine": "b"}, {"mine": "a"}, version=3, trips=30)
    []
    """
    made: list[EarlierCode] = []
    for part in (*parts, EarlierCode(version, trips, dict(last))):
        if part.trips >= trips and part.version >= version:
            made.append(EarlierCode(version, trips, part.code))
            break
        made.append(part)
    if not changed_modules(made[-1].code, now):
        made.pop()
    return made


def mixed_code(records: Sequence[Record]) -> list[str]:
    """Return sentences about the user's own modules: which of them differ between runs that use them, and
    which of them changed during a run."""
    kinds = Counter(name for name, _ in {each for record in records for each in _digests(record).items()})
    names = listed(name for name, count in kinds.items() if count > 1)
    what = "files" if any("/" in name for name, count in kinds.items() if count > 1) else "modules"
    said = [f"Some of your own {what} differ between runs that use them: {names}."] if names else []
    return said + [f"{record.folder} {text}." for record in records if (text := resumed_code(record))]


def resumed_code(record: Record) -> str:
    """Return text that names the modules that changed before a resume, or before a killed process was
    replaced, and the version and number of trips after which they changed; "" if none changed.

    Trips that were under way when the code changed may have used either code.
    """
    codes, parts = _codes(record), record.meta.earlier_code
    changes = [
        f"after version {part.version} and {many(part.trips, 'trip')}: {listed(changed_modules(old, new))}"
        for part, (old, new) in zip(parts, pairwise(codes), strict=True)
    ]
    return f"went on with changed code {'; '.join(changes)}" if changes else ""


def _codes(record: Record) -> list[dict[str, str]]:
    return [*(part.code for part in record.meta.earlier_code), record.meta.code]


def _digests(record: Record) -> dict[str, frozenset[str]]:
    """Return the digests that each module had during a run, keyed by module."""
    codes = _codes(record)
    names = {name for code in codes for name in code}
    return {name: frozenset(code[name] for code in codes if name in code) for name in names}
