"""What a reproduction consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from edgefl import config, toml
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.lab.curves import Curves
from edgefl.lab.findings import Finding

SEEDS = (1, 2, 3)
IN_SMALL = "In small (--quick): scikit-learn's digits and an MLP, whatever is said of data and models."

Judge = Callable[[Curves], Sequence[Finding]]


@dataclass(frozen=True)
class Arm:
    """One algorithm of a comparison: what it changes in the settings."""

    label: str
    changes: tuple[str, ...]
    """As ``edgefl run --set`` takes them."""
    full: tuple[str, ...] = ()
    """What else it changes at the paper's own size, such as the steps that the paper tuned there."""
    quick: tuple[str, ...] = ()
    """What else it changes with ``--quick``."""


@dataclass(frozen=True)
class Study:
    """One paper's comparison."""

    name: str
    title: str
    citation: str
    settings: str
    """File name in ``experiments/papers``; with ``-quick`` before its ending, the one of ``--quick``."""
    arms: tuple[Arm, ...]
    judge: Judge
    notes: tuple[str, ...] = ()
    """What differs from the paper, and why."""
    seeds: tuple[int, ...] = field(default=SEEDS)
    changes: tuple[str, ...] = ()
    """What a user changes in the settings of every arm, as ``edgefl run --set`` takes it."""

    def remarks(self, quick: bool) -> tuple[str, ...]:
        """The notes of a comparison at the paper's size, or in small."""
        return (*self.notes, IN_SMALL) if quick else self.notes

    def changed(self, changes: Sequence[str]) -> Study:
        """The same comparison under other settings. ConfigError for one that tells the arms apart."""
        for change in changes:
            keys, _ = toml.assignment(change)
            if keys == ("seed",):
                raise ConfigError(
                    f"--set {change}: every arm runs with seeds {', '.join(map(str, self.seeds))}"
                )
            for arm in self.arms:
                for own, _ in map(toml.assignment, (*arm.changes, *arm.full, *arm.quick)):
                    if own[: len(keys)] == keys[: len(own)] or own == config.ONE_OF.get(keys):
                        what = f"{'.'.join(own)} is what tells {arm.label} from the other arms"
                        raise ConfigError(f"--set {change}: {what}")
        note = (f"Changed by --set in every run: {', '.join(changes)}.",) if changes else ()
        return replace(self, changes=tuple(changes), notes=(*self.notes, *note))

    def experiment(self, arm: Arm, seed: int, *, quick: bool) -> Experiment:
        """The run of one arm and seed."""
        steps = arm.quick if quick else arm.full
        made = config.load(self.file(quick), (*arm.changes, *steps, *self.changes), seed=seed)
        if made.stop.accuracy is None and config.load(self.file(quick)).stop.accuracy is not None:
            given = " ".join(f"--set {change}" for change in self.changes)
            raise ConfigError(f"{given}: takes stop.accuracy away, the target that the claims are about")
        return made

    def file(self, quick: bool) -> Path:
        """The settings, as they lie in the package or beside it in a source tree."""
        name = self.settings.replace(".toml", "-quick.toml") if quick else self.settings
        return folder() / name


def folder() -> Path:
    """Where the papers' settings are."""
    try:
        found = Path(str(resources.files("edgefl._experiments"))) / "papers"
    except ModuleNotFoundError:
        found = Path(__file__).parents[2] / "experiments" / "papers"
    return found if found.is_dir() else Path(__file__).parents[2] / "experiments" / "papers"
