"""Reads results of the measurement kit, and counts the work of each measured part from the part's module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Final

import msgspec

from edgefl.devices.fit import SPREAD, TYPICAL, Fit, HeldOutPrediction, Row, fit, widened
from edgefl.devices.schema import Name
from edgefl.devices.time_model import TimeModel, joined
from edgefl.errors import ConfigError
from edgefl.learning.operations import StepWork
from edgefl.measure import kit
from edgefl.validation import wrong

KIT_ERROR_FACTOR = 1.3
"""Error factor of a fit to the kit's parts, within which 90% of networks were predicted (docs/measure.md). It
cannot be estimated by leaving out parts, because each part is the only one of its kind."""
MAX_FLOP_PER_S: Final = 5e12
MAX_BYTES_PER_S: Final = 2.5e12
"""Maximum rates of one thread, about twice those of the fastest known cores: 2.3 TFLOPS of float32 on Apple's
M4 (Remke and Breuer 2024), and 192 bytes per cycle from the first-level cache at 6 GHz."""
MAX_S: Final = 1e6
"""Longest plausible time of a step, in seconds: eleven days."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_S)]
Number = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """Median wall time and median CPU time of a step of one part of the kit, in seconds."""

    wall_s: Seconds
    cpu_s: Seconds
    work: StepWork | None = None
    """Work of the step. If it is None, the part must be one of `kit.workloads`."""


class KitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a kit result that edgefl uses; the file also describes the measured host."""

    kit: int
    device: str
    runtime: Name
    threads: Number
    cores: Number
    parts: Annotated[dict[str, Timed], msgspec.Meta(min_length=1)]

    @property
    def runtime_name(self) -> str:
        """Name of the runtime in a profile, with the number of threads if there are fewer threads than cores.

        >>> KitResult(kit=1, device="", runtime="torch", threads=1, cores=4, parts={}).runtime_name
        'torch-1'
        """
        return self.runtime if self.threads >= self.cores else f"{self.runtime}-{self.threads}"

    def rows(self) -> tuple[Row, ...]:
        """Return the parts as measured steps.

        With one thread, the time is the CPU time, which other load does not affect; with more threads, it is
        the wall time. Raises `ConfigError` for an unknown part, and for a time that is too short for any
        processor.
        """
        works, time = _works(self), "cpu_s" if self.threads == 1 else "wall_s"
        rows = []
        for name, part in self.parts.items():
            work, seconds = works[name], getattr(part, time)
            check_seconds(f"parts.{name}.{time}", seconds, work, self.threads)
            rows.append(Row(network=name, work=work, seconds=seconds))
        return tuple(rows)


def check_seconds(key: str, seconds: float, work: StepWork, threads: int) -> None:
    """Raise a `Fault` if the time is too short for any processor with this many threads."""
    least_s = max(work.flop / MAX_FLOP_PER_S, work.bytes / MAX_BYTES_PER_S) / threads
    if seconds < least_s:
        raise wrong(key, f"at least {least_s:.2g} seconds, since no processor is faster", seconds)


def fit_kit(
    rows: Sequence[Row], prior: TimeModel = TYPICAL, spread: float = SPREAD, apart: float = 1.0
) -> Fit:
    """Fit the time model of a device to the rows of a kit result.

    Pooling has a separate bandwidth, because a byte moved by pooling took ten times as long as one moved by
    other operations. Cost variations are widened until the intervals contain 90% of the rows. See `fit` for
    ``apart``.
    """
    prior = msgspec.structs.replace(prior, error_factor=KIT_ERROR_FACTOR)
    others = [row for row in rows if not row.work.pool_bytes]
    model = fit(others or rows, prior, spread=spread, hold_out=False).model
    if others:
        model = _with_pooling(model, [row for row in rows if row.work.pool_bytes])
    model = widened(model, rows)
    model = msgspec.structs.replace(model, error_factor=float(f"{joined(model.error_factor, apart):.4g}"))
    return Fit(model=model, rows=tuple(rows), unseen=())


def misfit(fitted: Sequence[HeldOutPrediction]) -> str | None:
    """Describe the parts that the fit misses by more than `KIT_ERROR_FACTOR`; None if there are none."""
    far = sorted((part for part in fitted if part.off > KIT_ERROR_FACTOR), key=lambda part: -part.off)
    if not far:
        return None
    worst = " and ".join(f"{part.row.network} (ratio {part.factor:.2f})" for part in far[:2])
    held = sum(part.held for part in fitted)
    return (
        f"{len(far)} of {len(fitted)} parts are not within a factor of {KIT_ERROR_FACTOR:g} of the fit, "
        f"worst {worst}; the profile's intervals contain {held} of {len(fitted)}"
    )


def _with_pooling(model: TimeModel, rows: Sequence[Row]) -> TimeModel:
    """Return the model with pooling's bandwidth fitted to ``rows``, but not above its previous value."""
    without = msgspec.structs.replace(model, pool_gbytes_per_s=None)
    pool_s = sum(row.seconds - without.seconds(row.work) for row in rows)
    shared_s = sum(model.seconds(row.work) - without.seconds(row.work) for row in rows)
    if pool_s <= shared_s or model.pool_gbytes_per_s is None:
        return model
    rate = model.pool_gbytes_per_s * shared_s / pool_s
    return msgspec.structs.replace(model, pool_gbytes_per_s=float(f"{rate:.4g}"))


def _works(result: KitResult) -> Mapping[str, StepWork]:
    given = {name: part.work for name, part in result.parts.items() if part.work is not None}
    unknown = result.parts.keys() - given.keys()
    if unknown and result.kit != kit.VERSION:
        raise ConfigError(f"measured with version {result.kit} of the kit, not {kit.VERSION}; measure again")
    known = _parts().keys()
    if not unknown <= known:
        raise ConfigError(f"the kit has no part {min(unknown - known)!r}; measure again")
    return {**given, **{name: _work(name) for name in unknown}}


@cache
def _parts() -> dict[str, kit.Part]:
    return {f"{workload}/{name}": part for workload, m in kit.workloads().items() for name, part in m.items()}


@cache
def _work(name: str) -> StepWork:
    from edgefl.learning.work import step_work

    part = _parts()[name]
    module = part.make()
    return step_work(module, part.shape, part.batch, inference=not part.train, loss=kit.loss)
