"""Writes the table of measured phones as TOML, with one line per unit (one measured phone of a model)."""

from __future__ import annotations

from typing import Any

import msgspec

from edgefl import toml
from edgefl.devices.phones import PhoneTable

HEAD = """\
# Costs of inference in TFLite on phones, made by `edgefl profiles phones`; see edgefl/devices/phones.py.
# Only class, cores, id, name, soc and year of a phone are written by hand: the command keeps them.

"""


def table_text(table: PhoneTable) -> str:
    """Return the table as the text of its TOML file."""
    plain: dict[str, Any] = msgspec.to_builtins(table)
    phones = plain.pop("phones")
    neighbours = plain.pop("neighbours")
    parts = [HEAD, toml.write(plain)]
    if neighbours:
        points = "".join(f"    {toml.literal(point)},\n" for point in neighbours["points"])
        errors = toml.literal(neighbours["errors"])
        parts.append(
            f"\n[neighbours]\nlength = {neighbours['length']}\nerrors = {errors}\npoints = [\n{points}]\n"
        )
    parts += [_phone(phone) for phone in phones]
    return "".join(parts)


def _phone(phone: dict[str, Any]) -> str:
    units = phone.pop("units")
    head = "".join(f"{key} = {toml.literal(value)}\n" for key, value in phone.items() if value is not None)
    lines = "".join(f"{toml.literal(name)} = {toml.literal(unit)}\n" for name, unit in units.items())
    return f"\n[[phones]]\n{head}[phones.units]\n{lines}"
