"""All that the golden results import of edgefl: a restructuring that moves it changes this file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec


def command(arguments: Sequence[str]) -> int:
    """The ``edgefl`` command, in this process; returns its exit code."""
    from edgefl.cli import main

    return main(arguments)


def experiment(table: Mapping[str, Any]) -> Any:
    """The experiment that a TOML file with this table is."""
    from edgefl import Experiment

    return msgspec.convert(table, Experiment)


def write(table: Mapping[str, Any], file: Path) -> None:
    """Write the experiment's TOML file."""
    from edgefl import config

    file.write_text(config.dump(experiment(table)))


def started_warm() -> AbstractContextManager[Any]:
    """What starts runs without importing torch for each, for `run`."""
    from edgefl.run.sweep import warm

    return warm()


def run(table: Mapping[str, Any], folder: Path, base: Path, warm: Any) -> None:
    """Make a run, whose user's files are in ``base``."""
    from edgefl.run.lanes import finished

    finished(experiment(table), folder, base, warm)


def device_result(repetitions: Sequence[Mapping[str, Any]], doubt: str = "") -> Any:
    """What the pytest plugin knows of a function that ran so on a pixel-3a over LTE."""
    from tests.unit.regression_samples import measured, repetition, result_of

    found = measured([repetition(**each) for each in repetitions])
    vars(found)["doubts"] = [doubt] if doubt else []
    return result_of(found)


def doubts(repetitions: Sequence[Mapping[str, Any]]) -> list[str]:
    """The reasons why these figures do not count."""
    from tests.unit.regression_samples import measured, repetition

    return measured([repetition(**each) for each in repetitions]).doubts


def against_baseline(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """The pytest plugin's comparison of two measurements."""
    from edgefl.regression.verdict import changed, compare, loads_apart
    from tests.unit.regression_samples import entry, repetition

    then, later = (entry([repetition(**each) for each in part]).samples for part in (before, now))
    found = compare(then, later)
    lines = [f"{one}: {grew}, {one.undecided}" for one, grew in zip(found, changed(found, 4), strict=True)]
    return [*lines, str(loads_apart(then, later))]


def programs_verdict(
    phones: Sequence[Mapping[str, Any]],
    transmissions: Sequence[tuple[float, float]],
    time_scale: float,
    conditions: Mapping[str, Any],
) -> tuple[list[str], float | None, float | None]:
    """The verdict of ``edgefl exec``: reasons, and the errors' median and 95th percentile."""
    from edgefl.host.verdict import Conditions
    from edgefl.programs.result import PhoneResult, judge

    found = [msgspec.convert(one, PhoneResult) for one in phones]
    held = judge(found, transmissions, time_scale, Conditions(**conditions))
    return list(held.reasons), held.median_abs_error, held.p95_abs_error


def fidelity(profiles: Sequence[str], declared_s: Any, achieved_s: Any, **more: Any) -> Any:
    """A run's verdict, as plain data."""
    from edgefl.host.fidelity import assess
    from edgefl.host.verdict import Conditions

    conditions = Conditions(**more.pop("conditions", {}))
    return msgspec.to_builtins(assess(profiles, declared_s, achieved_s, conditions=conditions, **more))


def estimate(values: Sequence[float]) -> tuple[float, float | None]:
    """A mean over seeds, and half the width of its interval."""
    from edgefl.results.statistics import estimate as found

    return found(values)


def cost_ratio(*costs: Sequence[float]) -> Any:
    """The ratio of two costs over seeds, for `race_verdict`."""
    from edgefl.results.statistics import ratio

    return ratio(*costs)


def passage(costs: Sequence[float], accuracies: Sequence[float], target: float, window: int) -> float:
    """The cost at which a learning curve reaches its target."""
    from edgefl.results.statistics import passage as found

    return found(costs, accuracies, target, window)


def race_verdict(found: Any, paper: float | None, seeds: int) -> tuple[str, float]:
    """The verdict of ``edgefl reproduce`` on a ratio, and its p-value."""
    from edgefl.lab.claims import judged
    from edgefl.results.statistics import p_of_ratio

    return judged(found, paper), p_of_ratio(found, seeds)


def corrected(claims: Sequence[tuple[Any, float | None, Mapping[str, Any]]]) -> list[str]:
    """What ``edgefl reproduce`` says of claims: verdict, p-value and mutants of each, and of all together."""
    from edgefl.lab.claims import corrected as all_of
    from edgefl.lab.claims import correction
    from edgefl.lab.study import Finding

    given = [
        Finding(f"claim {n}", "", "", "", verdict, mine=("A",), p=p, mutants=mutants)
        for n, (verdict, p, mutants) in enumerate(claims)
    ]
    found = all_of(given)
    return [*(f"{one.says}; {one.survives}; {one.remark}" for one in found), correction(found)]


def epsilon(rules: Mapping[str, Any], clients: int, steps: Sequence[Sequence[int]], sampling: Any) -> float:
    """The ε of versions made with updates of these clients."""
    from edgefl.experiment import Privacy
    from edgefl.privacy.accounting import PrivacyAccount

    account = PrivacyAccount(Privacy(**rules), clients, sampling)
    for step in steps:
        account.version(step)
    return account.epsilon()


def transfers(network: str, sizes: Sequence[int], seed: int) -> list[tuple[float, ...]]:
    """What downloads and uploads of so many bytes take on a link, one after the other."""
    import numpy as np

    from edgefl.devices import load_network
    from edgefl.devices.link import Link

    link = Link(load_network(network), np.random.default_rng(seed))
    found = [way(size) for size in sizes for way in (link.down, link.up)]
    return [(one.declared_s, one.breaks_s, one.takes_s(1000)) for one in found]
