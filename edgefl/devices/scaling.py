"""Derives a time model for a device without training measurements, by scaling that of a measured device.

Two published values of each device are used: the rate of MobileNet-v1 inference (``gemm``) scales operations
and calls, and memcpy bandwidth scales bytes, if it is known for both devices. The interval combines the
interval of the measured device with the error of such scaling between measured devices (docs/profiles.md;
benchmarks/scaling.py measures this error).
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from edgefl import toml
from edgefl.devices.profiles import bundled_folder, is_path, load_device
from edgefl.devices.schema import Device
from edgefl.devices.time_model import ERRORS, TimeModel, joined
from edgefl.errors import ConfigError

BASES: Final = {
    **dict.fromkeys(("A7", "A53", "A57", "A72", "A73", "A75", "Kryo"), "pi-4"),
    **dict.fromkeys(("A76", "A77", "A78AE", "X3", "X4", "Vortex"), "pi-5"),
}
"""Maps a core type to the measured device with similar cores (pi-4: up to 8 FLOP per cycle; pi-5: 16)."""
UNLIKE: Final = ("A7", "A53", "Vortex")
"""Cores unlike any measured core: A7 and A53 execute in order, Apple's Vortex is wider than all others."""

WITH_BANDWIDTH: Final = 1.48
"""Error factor of scaling by GEMM rate and bandwidth: the predictions for 90% of the steps are within this
factor. It is the larger of two factors, from Pi 4 to Pi 5 and from Pi 5 to Pi 4."""
BY_GEMM: Final = 1.9
"""Error factor of scaling by GEMM rates alone: the predictions for 90% of the steps are within this factor.
It is the largest of four factors, between Pi 4 and Pi 5 and between Redmi Note 8 and Galaxy Note 10, each in
both directions."""
OF_UNLIKE: Final = 1.5
"""Additional error factor that is assumed for cores unlike any measured core."""


class Scaled(NamedTuple):
    """A runtime's time model for an unmeasured device, scaled from a measured device, and a text for the
    profile's ``sources`` that explains how the model was derived."""

    model: TimeModel
    source: str


def scaled_file(name: str, like: str | None = None, runtime: str = "torch", new_id: str | None = None) -> str:
    """Return the text of a device's profile with the runtime ``runtime`` scaled from a measured device.

    Everything else is unchanged.

    ``name`` is the name of a profile or the path of a file. ``like`` is the measured device, by default the
    one with the most similar cores. ``new_id`` replaces the profile's id. Raises `ConfigError` if no device
    with similar cores is known.
    """
    path = Path(name) if is_path(name) else bundled_folder() / "devices" / f"{name}.toml"
    device = load_device(path if is_path(name) else name)
    made = scaled(device, load_device(like or base_of(device)), runtime)
    return with_runtime(renamed(path.read_text("utf-8-sig"), new_id or device.id), runtime, *made)


def base_of(device: Device) -> str:
    """Return the measured device with the most similar cores.

    >>> base_of(load_device("pixel-2")), base_of(load_device("pixel-5"))
    ('pi-4', 'pi-5')
    """
    core = _core(device)
    if core not in BASES:
        raise ConfigError(
            f"{device.id}: no measured device has cores like {core!r}; name the measured device to scale from"
        )
    return BASES[core]


def scaled(device: Device, base: Device, runtime: str = "torch") -> Scaled:
    """Scale the runtime of ``base`` to ``device``. Raises `ConfigError` if either has no ``gemm`` rate."""
    known = base.time_model(runtime)
    assert known is not None
    flop, flop_words = _gemm(device, base)
    moved, moved_words, error = _bandwidth(device, base) or (flop, "the same", BY_GEMM)
    unlike = OF_UNLIKE if device.clusters and _core(device) in UNLIKE else 1.0
    factors = (known.error_factor, error, unlike)
    also = f", and {unlike:g} for cores unlike any measured" if unlike > 1 else ""
    source = (
        f"derived: edgefl profiles scale: {runtime} of {base.id}, operations and calls x {flop:.3g} "
        f"({flop_words}), bytes and parameters {moved_words}; the interval joins {base.id}'s "
        f"{factors[0]:g} and scaling's {error:g}{also}"
    )
    model = _faster(known, flop, moved)
    return Scaled(msgspec.structs.replace(model, error_factor=float(f"{joined(*factors):.3g}")), source)


def renamed(text: str, name: str) -> str:
    """Return the text of a profile with ``name`` as its id; everything else is unchanged.

    >>> renamed("id = 'old'  # mine", "new")
    'id = "new"  # mine'
    """
    tables = toml.parse(text, "the profile")
    line = f"id = {toml.literal(name)}"
    changed = re.sub(r"""^id = ("[^"]*"|'[^']*')""", lambda _: line, text, count=1, flags=re.MULTILINE)
    return _or_rewritten(changed, {**tables, "id": name})


def _or_rewritten(text: str, tables: dict[str, Any]) -> str:
    """Return ``text`` if it has the content ``tables``; otherwise return these tables as new text.

    The callers change a profile's text line by line, to keep its comments. This fails if the profile is not
    laid out like edgefl's own; the new text then has no comments.
    """
    with suppress(ConfigError):
        if toml.parse(text, "the profile") == tables:
            return text
    return toml.write(tables)


def with_runtime(text: str, runtime: str, model: TimeModel, source: str) -> str:
    """Set a runtime, and the source of its numbers, in the profile ``text``; everything else is unchanged.

    If the profile has another runtime but no default runtime, the other runtime becomes the default.
    """
    tables = toml.parse(text, "the profile")
    if "sources" not in tables:
        raise ConfigError("the profile has no [sources] table")
    key = f"runtime.{runtime}"
    others = sorted(set(tables.get("runtime", {})) - {runtime})
    costs = {name: value for name, value in msgspec.json.decode(msgspec.json.encode(model)).items() if value}
    tables["runtime"] = {**tables.get("runtime", {}), runtime: costs}
    tables["sources"] = {**tables["sources"], key: source}
    if others:
        tables.setdefault("default_runtime", others[0])
    table = f"[{key}]\n" + "".join(f"{name} = {toml.literal(value)}\n" for name, value in costs.items())
    line = f'"{key}" = {toml.literal(source)}\n'
    text = _put(text, rf"^\[{re.escape(key)}\]\n(?:.+\n)+", table, f"{table}\n[sources]\n")
    text = _put(text, rf'^"{re.escape(key)}" = .*\n', line, f"[sources]\n{line}")
    if others and "\ndefault_runtime" not in text:
        text = text.replace("\nname = ", f'\ndefault_runtime = "{others[0]}"\nname = ', 1)
    return _or_rewritten(text, tables)


def _put(text: str, old: str, new: str, sources: str) -> str:
    """Replace all matches of ``old`` with ``new``.

    If nothing matches, replace the header line ``[sources]`` with ``sources``, which repeats the header.
    """
    if re.search(old, text, re.MULTILINE):
        return re.sub(old, lambda _: new, text, flags=re.MULTILINE)
    return text.replace("\n[sources]\n", f"\n{sources}", 1)


def _core(device: Device) -> str:
    """Return the type of the cores with the highest clock, as Arm's short name (such as A76) if possible."""
    if not device.clusters:
        raise ConfigError(f"{device.id}: has no cpu.clusters, so a similar measured device cannot be chosen")
    fastest = max(device.clusters, key=lambda each: each.max_mhz)
    cortex = re.search(r"Cortex[- ](\w+)", fastest.uarch, re.IGNORECASE)
    return cortex[1].upper() if cortex else fastest.uarch


def _gemm(device: Device, base: Device) -> tuple[float, str]:
    """Return the ratio of two devices' computing rates, and a note that states the rates.

    The rates are those of all cores or, if one of them is unknown, those of one thread.
    """
    found = []
    for each in (device, base):
        rates = each.cpu.rate_gflops.gemm if each.cpu is not None else None
        if rates is None:
            raise ConfigError(f"{each.id}: has no cpu.rate_gflops.gemm to scale by")
        found.append(rates)
    for what, rate in (("gemm", "all"), ("gemm of one thread", "one")):
        own, its = (getattr(rates, rate) for rates in found)
        if own and its:
            return own / its, f"{what} {own:g} / {its:g} GFLOPS"
    lacks = "nt" if found[0].all is None else "1t"
    raise ConfigError(f"{device.id}: cpu.rate_gflops.gemm needs {lacks}, the only rate that {base.id} has")


def _bandwidth(device: Device, base: Device) -> tuple[float, str, float] | None:
    """Return the ratio of two devices' bandwidths, a note that states the bandwidths, and the error factor of
    scaling by this ratio; None if one of the bandwidths is unknown."""
    own, its = (each.memory and each.memory.bandwidth_gbytes_per_s for each in (device, base))
    if not own or not its:
        return None
    return own / its, f"x {own / its:.3g} (memcpy {own:g} / {its:g} GB/s)", WITH_BANDWIDTH


def _faster(model: TimeModel, flop: float, moved: float) -> TimeModel:
    """Return the model with operations ``flop`` times as fast and bytes ``moved`` times as fast.

    The costs of the new model are rounded to four digits.
    """
    changed = {}
    for name in model.__struct_fields__:
        value = getattr(model, name)
        if name not in ERRORS and value is not None:
            times = moved if name.endswith("_per_s") or name == "parameter_ns" else flop
            is_rate = name.endswith(("_gflops", "_per_s"))
            changed[name] = float(f"{value * times if is_rate else value / times:.4g}")
    return msgspec.structs.replace(model, **changed)
