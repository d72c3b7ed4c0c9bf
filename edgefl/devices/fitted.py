"""Makes a device profile from measured steps: adds a fitted runtime to an existing or new profile.

The profile's source text for the runtime contains the command that fitted it (`Recipe`), so that anyone can
repeat the fit.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgefl import toml
from edgefl.devices import measurements
from edgefl.devices.fit import SPREAD, TYPICAL, Fit, fit, summary
from edgefl.devices.measurements import MeasuredStep
from edgefl.devices.profiles import bundled_folder, bundled_names, load_device, phone_tables
from edgefl.devices.scaling import with_runtime
from edgefl.devices.time_model import TimeModel
from edgefl.errors import ConfigError
from edgefl.validation import convert

COMMAND = "edgefl profiles fit"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The options of `edgefl profiles fit` with which a runtime was fitted.

    >>> known = Recipe.of(load_device("pi-5").sources["runtime.torch"])
    >>> known.prior, known.spread
    ('pi-4', 1.3)
    """

    files: tuple[str, ...] = ()
    """Names of the files of measured steps."""
    profile: str | None = None
    runtime: str | None = None
    prior: str | None = None
    """Name of a similar device, whose costs are the prior of the fit."""
    spread: float = SPREAD
    apart: float = 1.0

    @property
    def command(self) -> str:
        """The command that repeats this fit."""
        options = {f"--{name}": value for name, value in msgspec.to_builtins(self).items() if name != "files"}
        unlike = {name: value for name, value in options.items() if value != _USUAL[name]}
        words = [*self.files, *(str(word) for option in unlike.items() for word in option)]
        return f"{COMMAND} {shlex.join(words)}"

    @classmethod
    def of(cls, source: str) -> Recipe | None:
        """Parse the command in a runtime's source; return None if the runtime was not fitted."""
        found = re.match(rf"fitted: {COMMAND} (.*?) on \d+ steps of ", source)
        if found is None:
            return None
        words = shlex.split(found[1])
        first = next((at for at, word in enumerate(words) if word in _USUAL), len(words))
        options = zip(words[first::2], words[first + 1 :: 2], strict=False)
        given = {option.removeprefix("--"): value for option, value in options}
        numbers = {name: float(given[name]) for name in ("spread", "apart") if name in given}
        return convert({**given, **numbers, "files": words[:first]}, cls)

    def fit(self, measured: Sequence[MeasuredStep]) -> Fit:
        """Fit a time model to these steps, which must all be from one device and runtime."""
        rows, prior = [m.row for m in measured], self.prior_model(measured[0].runtime)
        return fit(rows, prior, spread=self.spread, apart=self.apart)

    def step_keys(self) -> set[tuple[str, ...]]:
        """Return the keys of the bundled measured steps in the recipe's files."""
        files = (bundled_folder() / "measured" / file for file in self.files)
        return {key for file in files if file.exists() for key in measurements.keys(file)}

    def prior_model(self, runtime: str) -> TimeModel:
        """Return the time model of the similar device, or `TYPICAL` if no similar device is given.

        If the similar device lacks ``runtime``, the model is that of the device's default runtime.
        """
        if self.prior is None:
            return TYPICAL
        like = load_device(self.prior)
        return like.time_model(runtime if runtime in like.runtime else None) or TYPICAL


_USUAL = {f"--{name}": value for name, value in msgspec.to_builtins(Recipe()).items()}


def only(files: Sequence[Path], profile: str | None, runtime: str | None) -> tuple[MeasuredStep, ...]:
    """Return the steps in the files that were measured with this profile and runtime; None matches any.

    Raises `ConfigError` if the steps of no pair or of several pairs of profile and runtime match, or if
    results of the measurement kit are from several devices.
    """
    have = sorted({kind for file in files for kind in measurements.kinds(file)})
    chosen = [kind for kind in have if profile in (None, kind[0]) and runtime in (None, kind[1])]
    if len(chosen) != 1:
        number = "several devices or runtimes match" if chosen else "no rows match"
        known = ", ".join(map("/".join, have)) or "none"
        raise ConfigError(f"{number}; choose one with --profile and --runtime; available: {known}")
    steps = tuple(step for file in files for step in measurements.read(file, chosen[0]))
    named = sorted({step.device for step in steps})
    if len(named) > 1 and all(file.suffix == ".json" for file in files):
        raise ConfigError(f"measured on several devices: {', '.join(named)}; fit a profile to each of them")
    return steps


def profile_text(out: Path, measured: Sequence[MeasuredStep], found: Fit, recipe: Recipe) -> str:
    """Return the text of a profile with the fitted runtime.

    The profile is named after the file ``out``. Everything else is copied from the bundled profile that the
    rows name. If there is no such profile, the rate ``train`` is the geometric mean of the rows' FLOP per
    second.
    """
    first = measured[0]
    steps = f"{len(measured)} steps of {_several({m.device or out.stem for m in measured})}"
    source = f"fitted: {recipe.command} on {steps}: {_several({m.source for m in measured})}{_errors(found)}"
    if first.profile in bundled_names("devices"):
        file = bundled_folder() / "devices" / f"{first.profile}.toml"
        text = file.read_text("utf-8") if file.exists() else toml.write(phone_tables(first.profile))
        text = re.sub(r"^id = .*$", f"id = {toml.literal(out.stem)}", text, count=1, flags=re.MULTILINE)
    else:
        about = f"derived: geometric mean of {steps}"
        head = {"schema": 2, "id": out.stem, "name": first.device or out.stem, "class": "board"}
        rate = {"cpu": {"rate_gflops": {"train": _mean_gflops(measured)}}}
        text = toml.write({**head, **rate, "sources": {"cpu.rate_gflops.train": about}})
    return with_runtime(text, first.runtime, found.model, source)


def _several(names: set[str]) -> str:
    """List up to three names; if there are more, give the first one and the number of the others."""
    first, *others = sorted(names)
    return ", ".join([first, *others]) if len(others) < 3 else f"{first} and {len(others)} more"


def _mean_gflops(measured: Sequence[MeasuredStep]) -> float:
    rates = [math.log(m.row.work.flop / m.row.seconds) for m in measured if m.row.work.flop]
    if not rates:
        raise ConfigError("no row has a number of floating-point operations; at least one such row is needed")
    return float(f"{math.exp(sum(rates) / len(rates)) / 1e9:.4g}")


def _errors(found: Fit) -> str:
    if not found.unseen:
        return ""
    errors = summary(found.unseen)
    return f"; of rows left out the median error is {errors.median:.0%}, 90% are within {errors.p90:.0%}"
