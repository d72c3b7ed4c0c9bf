"""Limits on the errors of predicted step times, for the results of `edgefl bench truth`.

Each step is judged by its most independent prediction: by a fit without its network, or by a profile that was
not fitted to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from edgefl.devices.fit import HeldOutPrediction, summary
from edgefl.results.tables import percent

ENOUGH: Final = 20
"""Minimum number of a device's steps, or of this host's networks, for which intervals are judged."""
HELD: Final = (0.85, 0.97)


class ComparedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step with its predictions by the device's profile and by a fit without its network."""

    profile: str
    runtime: str
    kind: str
    """Class of its network."""
    by_profile: HeldOutPrediction
    """Prediction by the profile."""
    fitted: bool
    """True if the profile was fitted to this and other steps."""
    unseen: HeldOutPrediction | None
    """Prediction from a fit that held out this step's network architecture; None if there is no such fit."""
    source: str

    @property
    def title(self) -> str:
        """Device and runtime."""
        return f"{self.profile}, {self.runtime}"

    @property
    def best(self) -> HeldOutPrediction:
        """Prediction by the fit without this network, if there is one, else by the profile."""
        return self.unseen or self.by_profile

    def plain(self) -> dict[str, Any]:
        """Return the step as plain values, without its work."""
        row = self.by_profile.row
        return {
            "profile": self.profile,
            "runtime": self.runtime,
            "kind": self.kind,
            "network": row.network,
            "measured_s": row.seconds,
            "predicted_s": self.by_profile.predicted_s,
            "error_factor": self.by_profile.error_factor,
            "fitted": self.fitted,
            "unseen_s": self.unseen and self.unseen.predicted_s,
            "unseen_error_factor": self.unseen and self.unseen.error_factor,
            "source": self.source,
        }


class Bar(NamedTuple):
    """Steps that are judged together, and upper limits on their errors."""

    name: str
    chooses: Callable[[ComparedStep], bool]
    median: float | None = None
    p90: float | None = None
    worst_factor: float | None = None
    least: int = 1
    """Minimum number of steps for a judgement."""


def _of(title: str, kind: str = "") -> Callable[[ComparedStep], bool]:
    return lambda step: step.title == title and step.kind.startswith(kind)


def _layers(profile: str, layer: str, median: float) -> Bar:
    return Bar(f"{profile}, unseen {layer} layers", _of(f"{profile}, dl4j", f"layers: {layer}"), median)


def _on_all_threads(step: ComparedStep) -> bool:
    return step.profile == "this host" and step.runtime != "torch on 1 thread"


PHONES: Final = ("nexus-6", "redmi-note-8", "galaxy-note-10")
BARS: Final = (
    Bar("pi-4, unseen networks", _of("pi-4, torch"), 0.12, 0.30, 1.7),
    Bar("pi-5, by three networks", _of("pi-5, torch"), 0.15, 0.35),
    *(_layers(name, "lstm", 0.20 if name == "galaxy-note-10" else 0.10) for name in PHONES),
    *(_layers(name, "softmax output", 0.10) for name in PHONES),
    Bar(
        "these phones, unseen whole models",
        lambda step: step.title.endswith(", dl4j") and not step.kind.startswith("layers"),
        worst_factor=1.5,
    ),
    Bar(
        "another phone of pixel-4's SoC",
        lambda step: step.title == "pixel-4, mnn" and not step.fitted,
        median=0.20,
        worst_factor=2.0,
    ),
    Bar("this host, one thread", _of("this host, torch on 1 thread"), 0.15, 0.35, least=ENOUGH),
    Bar("this host, all threads", _on_all_threads, 0.15, 0.35, least=ENOUGH),
)


def judged(steps: Sequence[ComparedStep]) -> list[dict[str, Any]]:
    """Judge each figure with a limit: name, number of steps, ``found``, ``limit``, and whether it is ``met``.

    ``found`` and ``met`` are None if there are too few steps.
    """
    return [*_by_error(steps), *_by_interval(steps)]


def _by_error(steps: Sequence[ComparedStep]) -> Iterator[dict[str, Any]]:
    for bar in BARS:
        chosen = [step.best for step in steps if bar.chooses(step)]
        errors = summary(chosen) if len(chosen) >= bar.least else None
        for figure in ("median", "p90", "worst_factor"):
            limit = getattr(bar, figure)
            if limit is not None:
                found = None if errors is None else getattr(errors, figure)
                yield {
                    "of": bar.name,
                    "figure": figure,
                    "steps": len(chosen),
                    "found": found,
                    "limit": limit,
                    "met": None if found is None else found <= limit,
                }


def _by_interval(steps: Sequence[ComparedStep]) -> Iterator[dict[str, Any]]:
    """Judge, for each device with enough steps, the share of steps within their intervals."""
    devices: dict[str, list[HeldOutPrediction]] = {}
    for step in steps:
        devices.setdefault(step.title, []).append(step.best)
    for title, chosen in devices.items():
        if len(chosen) >= ENOUGH:
            held = summary(chosen).held
            met = HELD[0] <= held <= HELD[1]
            yield {
                "of": title, "figure": "held", "steps": len(chosen), "found": held, "limit": HELD, "met": met,
            }  # fmt: skip


def _limit_line(bar: dict[str, Any]) -> list[Any]:
    """Return a row of the table: name, steps, figure, found, limit, met."""
    words = {"p90": "90%", "worst_factor": "worst", "held": "held"}
    met = {None: "not judged", True: "met", False: "NOT MET"}[bar["met"]]
    found = "" if bar["found"] is None else _formatted(bar["figure"], bar["found"])
    if bar["figure"] == "held":
        limit = "–".join(percent(share, 0) for share in bar["limit"])
    else:
        limit = f"≤ {_formatted(bar['figure'], bar['limit'])}"
    return [bar["of"], bar["steps"], words.get(bar["figure"], bar["figure"]), found, limit, met]


def _formatted(figure: str, value: float) -> str:
    return f"{value:.2f}" if figure == "worst_factor" else percent(value)
