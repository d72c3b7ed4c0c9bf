"""Delays drawn at random: how long a trip takes when a distribution, not a device, says so."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec
import numpy as np

Dist = Literal["uniform", "half-normal", "exponential", "log-normal", "pareto", "list"]

MOST_S = 1e9
"""30 years. With it and the next two every draw is a finite number."""
MOST_SIGMA = 10.0
LEAST_ALPHA = 0.1


class Delay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A delay in emulated seconds, drawn once a trip from the client's seeded stream.

    ====================== ============================== ==================================
    ``dist``               fields                         draw
    ====================== ============================== ==================================
    ``uniform``            ``low_s``, ``high_s``          U(low, high)
    ``half-normal``        ``scale_s``                    abs(N(0, scale²)), mean scale·√(2/π)
    ``exponential``        ``mean_s``                     Exp(1/mean)
    ``log-normal``         ``median_s``, ``sigma``        median·exp(sigma·N(0, 1))
    ``pareto``             ``min_s``, ``alpha``           min·(1−U)^(−1/alpha)
    ``list``               ``values_s``                   one of the values, each equally likely
    ====================== ============================== ==================================

    ``mode`` says what it does to a trip: ``replace`` (the whole trip takes the draw; FedStaleWeight
    §6.2, FedBuff §5) or ``add`` (the draw is added to the computing time). With ``per = "example"`` the draw
    is for one example, and a client takes it times the examples that it holds: ``exponential`` is then
    FedBuff's T_i ~ Exp(1/(λ·n_i)) with λ = ``mean_s`` (C.2).

    >>> d = Delay(dist="uniform", low_s=1.0, high_s=2.0)
    >>> 1.0 <= d.draw(np.random.default_rng(0)) < 2.0, d.mean
    (True, 1.5)
    """

    dist: Dist
    mode: Literal["replace", "add"] = "replace"
    per: Literal["trip", "example"] = "trip"
    low_s: float | None = None
    high_s: float | None = None
    scale_s: float | None = None
    mean_s: float | None = None
    median_s: float | None = None
    sigma: float | None = None
    min_s: float | None = None
    alpha: float | None = None
    values_s: tuple[float, ...] | None = None

    FIELDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "uniform": ("low_s", "high_s"),
        "half-normal": ("scale_s",),
        "exponential": ("mean_s",),
        "log-normal": ("median_s", "sigma"),
        "pareto": ("min_s", "alpha"),
        "list": ("values_s",),
    }

    def problem(self) -> tuple[str, object, str] | None:
        """The first thing wrong as (field, got, allowed), or None."""
        wanted = self.FIELDS[self.dist]
        for names in self.FIELDS.values():
            for name in names:
                got = getattr(self, name)
                if name not in wanted and got is not None:
                    return name, got, f"{', '.join(wanted)} for dist = {self.dist!r}"
                if name in wanted and got is None:
                    return name, "nothing", f"a value, needed for dist = {self.dist!r}"
        for name in wanted:
            got = getattr(self, name)
            figures = got if isinstance(got, tuple) else (got,)
            if not figures or any(not math.isfinite(x) or x < 0 for x in figures):
                return name, got, "finite figures of at least 0"
            if name not in ("low_s", "values_s") and got == 0:
                return name, got, "above 0"
            if name.endswith("_s") and max(figures) > MOST_S:
                return name, got, f"at most {MOST_S:g} s"
        if self.dist == "log-normal" and self._f("sigma") > MOST_SIGMA:
            return "sigma", self.sigma, f"at most {MOST_SIGMA:g}"
        if self.dist == "pareto" and self._f("alpha") < LEAST_ALPHA:
            return "alpha", self.alpha, f"at least {LEAST_ALPHA:g}"
        if self.values_s is not None and not any(self.values_s):
            return "values_s", self.values_s, "one value above 0 at least, or time would stand still"
        if self.dist == "uniform" and self._f("low_s") >= self._f("high_s"):
            return "high_s", self.high_s, f"above low_s = {self.low_s}"
        return None

    def _f(self, name: str) -> float:
        return float(getattr(self, name))

    def draw(self, rng: np.random.Generator, examples: int = 1) -> float:
        """One delay, emulated seconds, from exactly one draw of ``rng``, for a client of so many examples."""
        return self._draw(rng) * (examples if self.per == "example" else 1)

    def _draw(self, rng: np.random.Generator) -> float:
        match self.dist:
            case "uniform":
                return float(rng.uniform(self._f("low_s"), self._f("high_s")))
            case "half-normal":
                return abs(float(rng.normal(0.0, self._f("scale_s"))))
            case "exponential":
                return float(rng.exponential(self._f("mean_s")))
            case "log-normal":
                return self._f("median_s") * math.exp(self._f("sigma") * float(rng.standard_normal()))
            case "pareto":
                return self._f("min_s") * float((1.0 - rng.random()) ** (-1.0 / self._f("alpha")))
            case "list":
                assert self.values_s is not None
                return float(self.values_s[int(rng.integers(len(self.values_s)))])

    @property
    def mean(self) -> float:
        """The distribution's mean, emulated seconds (infinite for a Pareto with alpha ≤ 1), of one example
        with ``per = "example"``."""
        match self.dist:
            case "uniform":
                return (self._f("low_s") + self._f("high_s")) / 2
            case "half-normal":
                return self._f("scale_s") * math.sqrt(2 / math.pi)
            case "exponential":
                return self._f("mean_s")
            case "log-normal":
                return self._f("median_s") * math.exp(self._f("sigma") ** 2 / 2)
            case "pareto":
                alpha = self._f("alpha")
                return self._f("min_s") * alpha / (alpha - 1) if alpha > 1 else math.inf
            case "list":
                assert self.values_s is not None
                return sum(self.values_s) / len(self.values_s)
