"""Makes a device profile of a fit: a runtime's table and its source, in a known profile or a new one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgefl.devices.fit import Fit, summary
from edgefl.devices.measurements import MeasuredStep
from edgefl.devices.profiles import as_written, bundled_names
from edgefl.devices.schema import to_json
from edgefl.errors import ConfigError


def only(
    measured: Sequence[MeasuredStep], profile: str | None, runtime: str | None
) -> tuple[MeasuredStep, ...]:
    """The steps of that profile and runtime; `ConfigError` where that leaves several, or none."""
    chosen = tuple(m for m in measured if profile in (None, m.profile) and runtime in (None, m.runtime))
    kinds = sorted({(m.profile, m.runtime) for m in chosen})
    if len(kinds) != 1:
        have = ", ".join("/".join(kind) for kind in sorted({(m.profile, m.runtime) for m in measured}))
        number = "several devices or runtimes" if kinds else "no such rows"
        raise ConfigError(f"{number}; choose one with --profile and --runtime; have: {have or 'none'}")
    return chosen


def profile_tables(out: Path, measured: Sequence[MeasuredStep], found: Fit) -> dict[str, Any]:
    """The tables of a profile named as the file ``out`` that has the fitted runtime.

    All other figures are those of the bundled profile that the rows name. Without one, ``train`` is the
    geometric mean of what the rows compute a second.
    """
    first = measured[0]
    source = f"fitted: edgefl profiles fit on {len(measured)} steps of {first.device}, {first.source}"
    if first.profile in bundled_names("devices"):
        tables = to_json(as_written("devices", first.profile))
    else:
        rate = _mean_gflops(measured)
        tables = {"name": first.device, "class": "board", "cpu": {"rate_gflops": {"train": rate}}}
        tables["sources"] = {"cpu.rate_gflops.train": f"derived: geometric mean of {source[8:]}"}
    model = {name: value for name, value in msgspec.to_builtins(found.model).items() if value is not None}
    runtimes = {**tables.pop("runtime", {}), first.runtime: model}
    sources = {**tables.pop("sources"), f"runtime.{first.runtime}": source + _errors(found)}
    default = tables.pop("default_runtime", None) or first.runtime
    head = {"schema": 2, "default_runtime": default, "id": out.stem}
    return {**tables, **head, "runtime": runtimes, "sources": sources}


def _mean_gflops(measured: Sequence[MeasuredStep]) -> float:
    rates = [math.log(m.row.work.flop / m.row.seconds) for m in measured if m.row.work.flop]
    if not rates:
        raise ConfigError("no row computes anything; need one with floating-point operations at least")
    return float(f"{math.exp(sum(rates) / len(rates)) / 1e9:.4g}")


def _errors(found: Fit) -> str:
    if not found.unseen:
        return ""
    told = summary(found.unseen)
    return f"; of rows left out the median error is {told.median:.0%}, 90% are within {told.p90:.0%}"
