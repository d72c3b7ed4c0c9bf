"""Runs that differ only in their seed, and labels that tell other runs apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgefl import toml
from edgefl.results.record import Record
from edgefl.results.targets import settings_of

NO_RESULT = ("name", "seed", "checkpoint", "clock.workers", "server.transport")
"""Keys and tables of an experiment that do not change the results of one seed."""
LONGEST = 60
"""Maximum length of a label that consists of settings; beyond it, the folder's name is shorter."""


def settings(record: Record) -> dict[str, Any]:
    """Return the run's settings that change its results, by dotted key, and all fields of its strategy."""
    tables = settings_of(record).tables
    found = dict(_flat({**tables, "strategy": {**tables.get("strategy", {}), **record.meta.strategy_fields}}))
    if "data.path" in found:  # a copy of the data is the same data
        found["data.path"] = Path(str(found["data.path"])).name
    dropped = tuple(f"{name}." for name in NO_RESULT)
    return {key: value for key, value in found.items() if not f"{key}.".startswith(dropped)}


def kind(record: Record) -> str:
    """Return a text that is equal for runs that differ only in their seed."""
    meta = record.meta
    parts = [meta.strategy, meta.clock, meta.partition, meta.model, meta.parameters, record.kinds()]
    parts += [msgspec.structs.asdict(meta.privacy)] if meta.privacy is not None else []
    return json.dumps([*parts, settings(record)], sort_keys=True, default=str)


def labels(records: Sequence[Record]) -> list[str]:
    """Return a label for each row of a comparison, given one record per row.

    It is the strategy's name, or that of the folder. Rows of one name are labelled by the settings that
    differ, or by their folders if these settings are many or equal.
    """
    names = [record.meta.strategy or record.folder.name for record in records]
    found = list(names)
    for name in dict.fromkeys(names):
        places = [place for place, each in enumerate(names) if each == name]
        if len(places) > 1:
            same = [records[place] for place in places]
            for place, label in zip(places, _apart(name, same), strict=True):
                found[place] = label
    return [
        label if found.index(label) == place else str(records[place].folder)
        for place, label in enumerate(found)
    ]


def _apart(name: str, records: Sequence[Record]) -> list[str]:
    """Return labels for rows of one name."""
    every = [settings(record) for record in records]
    keys = [key for key in dict.fromkeys(key for each in every for key in each) if _differs(key, every)]
    last = [key.rpartition(".")[2] for key in keys]
    short = {key: end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True)}
    found = []
    for each in every:
        inner = ", ".join(f"{short[key]}={_text(each[key])}" for key in keys if key in each)
        found.append(f"{name} ({inner})" if inner else name)
    if len({*found}) == len(found) and max(map(len, found)) <= LONGEST:
        return found
    return [f"{name} {record.folder.name}" for record in records]


def _differs(key: str, every: Sequence[Mapping[str, Any]]) -> bool:
    return any(each.get(key) != every[0].get(key) for each in every)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else toml.literal(value)


def _flat(tables: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted key, without missing ones."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        elif value is not None:
            yield f"{above}{name}", value
