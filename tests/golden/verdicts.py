"""Golden verdicts and texts: edgefl's verdicts on given figures, its predictions, and its output."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import msgspec
import numpy as np

from edgefl.cli import main
from edgefl.devices import load_network
from edgefl.devices.link import Link
from edgefl.experiment import Privacy
from edgefl.host.fidelity import assess
from edgefl.host.verdict import Conditions
from edgefl.lab.claims import corrected, correction, judged
from edgefl.lab.study import Finding, Verdict
from edgefl.privacy.accounting import PrivacyAccount
from edgefl.programs.result import PhoneResult, judge
from edgefl.regression.verdict import changed, compare, loads_apart
from edgefl.results.statistics import estimate, p_of_ratio, passage, ratio
from tests.golden.runs import digest
from tests.unit.regression_samples import entry, measured, repetition, result_of

NAN = math.nan


def figures(count: int, middle: float = 1.0, spread: float = 0.05) -> list[float]:
    """Return fixed figures around ``middle``, rounded so that they are the same on every machine."""
    return [round(middle * (1 + spread * ((k * 0.618034) % 1 - 0.5)), 9) for k in range(count)]


def _repetitions(milliseconds: float, spread: float = 0.02, load: float = 1.0, **more: Any) -> list[Any]:
    took = figures(15, milliseconds * load / 1000, spread)
    return [{"cpu_s": each, "reference_cpu_s": load / 1000, **more} for each in took]


MEASURED = {
    "steady": _repetitions(1.0),
    "a tenth more": _repetitions(1.1),
    "busy host": _repetitions(1.0, load=1.15, waited=0.3),
    "much busier": _repetitions(1.0, load=1.4, waited=0.7),
    "noisy": _repetitions(1.0, spread=0.5),
    "5.1% more": _repetitions(1.051),
    "4.9% more": _repetitions(1.049),
    "14.1 MiB": _repetitions(1.0, peak_mib=14.1),
    "13.9 MiB": _repetitions(1.0, peak_mib=13.9),
    "sends": _repetitions(1.0, sent_bytes=300_000, radio_s=0.2),
    "blocked": _repetitions(0.9, blocked_s=0.05),
}
BUDGETS: tuple[dict[str, float], ...] = (
    {"seconds": 0.0029}, {"seconds": 0.006}, {"peak_mib": 12}, {"sent_mib": 0.2, "joules": 0.00178},
)  # fmt: skip


def plugin() -> Any:
    """Return the results of `assert_budget`, `assert_pace` and baseline comparisons for many measurements."""
    found: dict[str, Any] = {}
    for (name, repetitions), doubt in itertools.product(MEASURED.items(), ("", "the host is overloaded")):
        for budget in (*BUDGETS, None):
            result = _result(repetitions, doubt)
            says = _raised(result.assert_pace if budget is None else partial(result.assert_budget, **budget))
            found[f"{name}, {doubt}, {budget}"] = [says, result.outcome, result.note]
        found[name] = [repr(result), *_measured(repetitions).doubts]
    pairs = itertools.permutations(MEASURED, 2)
    for before, now in (pair for pair in pairs if "steady" in pair or "busy host" in pair):
        found[f"{before} -> {now}"] = _against(MEASURED[before], MEASURED[now])
    return found


def _measured(repetitions: Iterable[Mapping[str, Any]]) -> Any:
    return measured([repetition(**each) for each in repetitions])


def _result(repetitions: Iterable[Mapping[str, Any]], doubt: str) -> Any:
    found = _measured(repetitions)
    vars(found)["doubts"] = [doubt] if doubt else []
    return result_of(found)


def _against(before: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]]) -> list[str]:
    """Compare two measurements as the pytest plugin does."""
    then, later = (entry([repetition(**each) for each in part]).samples for part in (before, now))
    found = compare(then, later)
    lines = [f"{one}: {grew}, {one.undecided}" for one, grew in zip(found, changed(found, 4), strict=True)]
    return [*lines, str(loads_apart(then, later))]


def _raised(check: Callable[[], object]) -> str:
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "holds"


WAY = {"bytes": 0, "transmissions": 0, "declared_s": 0.0, "achieved_s": 0.0, "median_error": None}
PHONE = {
    "device": "moto-g4", "network": "lte", "command": ["cat"], "exit_code": 0, "why": "", "wall_s": 10.0,
    "cpu_s": 1.0, "wanting_s": 10.0, "declared_share": 0.1, "limit_mib": 512.0, "peak_mib": 1.0, "stops": 0,
    "connections": 0, "refused": 0, "broken": 0, "energy_j": None, "up": WAY, "down": WAY,
}  # fmt: skip
EDGES = (1.0, 1.0299, 1.0301, 1.0499, 1.0501, 1.199, 1.201)
"""Factors by which phones or links are too slow: values just below and just above each bound."""
HOSTS: tuple[Mapping[str, float], ...] = (
    {}, {"load": 0.901}, {"load": 0.899, "steal": 0.0201, "throttled": 0.0201}, {"step_cost": 1.99},
    {"steal": 0.0199, "others": 0.251}, {"throttled": 0.0199, "others": 0.249, "step_cost": 2.01},
    {"step_cost": 0.49},
)  # fmt: skip


def programs() -> Any:
    """Return verdicts on links and on phones that are too slow, too fast or not counted, on several hosts."""
    shares = [figures(3, 0.1 / edge, 0.0001) for edge in EDGES] + [figures(4, 0.2)]
    links: tuple[list[tuple[float, float]], ...]
    links = ([], [(2.0, 2.0 * EDGES[1])], [(1.0, EDGES[2])] * 3, [(0.009, 0.9), (1.0, 0.95)])
    found, lost_s = [], itertools.cycle((0.0, 0.0299, 0.0301))
    for (share, link), host, lost in zip(
        itertools.product(shares, links), itertools.cycle(HOSTS), lost_s, strict=False
    ):
        figures_of = ({"phone": n, "achieved_share": s, "uncounted_s": lost} for n, s in enumerate(share))
        phones = [msgspec.convert(PHONE | each, PhoneResult) for each in figures_of]
        held = judge(phones, link, 0.5, Conditions(**host))
        found.append((list(held.reasons), held.median_abs_error, held.p95_abs_error))
    return found


def fidelity() -> Any:
    """Return verdicts on runs: on time, late in one phase or on one device, disturbed, or not measured."""
    takes = {"compute": 3.0, "down": 1.0, "up": 1.5, "delay": 0.2, "trip": 5.5, "round": 5.6}
    plan = {name: figures(20, middle) for name, middle in takes.items()}
    names, found = ["pixel-4", "moto-g4"] * 10, [_assessed([], {}, {})]
    wrong = itertools.product((*plan, "none"), (*EDGES, NAN))
    for (phase, factor), host in zip(wrong, itertools.cycle(({}, {}, *HOSTS)), strict=False):
        took = {name: [s * (factor if name == phase else 1.0) for s in each] for name, each in plan.items()}
        late = figures(20, 0.1)
        found.append(_assessed(names, plan, took, time_scale=0.5, lateness_s=late, host=host))
    slow = {name: [s * (1.1, 1.0)[k % 2] for k, s in enumerate(each)] for name, each in plan.items()}
    found.append(_assessed(names, plan, slow))
    told = ("valid", "reasons", "warnings", "median_abs_error", "worst")
    return [{key: each[key] for key in told} | {"all": digest(each)} for each in found]


def _assessed(*trips: Any, host: Mapping[str, float] = {}, **more: Any) -> Any:
    return msgspec.to_builtins(assess(*trips, conditions=Conditions(**host), **more))


def statistics() -> Any:
    """Return estimates and cost ratios over seeds, of which some missed the target, and verdicts on them."""
    series = [figures(n, middle, spread) for n in (1, 3, 5) for middle in (1.0, 2.5) for spread in (0.1, 0.8)]
    found: dict[str, Any] = {"estimates": [estimate(each) for each in series]}
    for (a, other), (b, mine) in itertools.permutations(enumerate(series), 2):
        if len(other) == len(mine):
            for missing in ("", "other", "mine", "both"):
                there = [NAN, *other[1:]] if missing in ("other", "both") else other
                here = [*mine[:-1], NAN] if missing in ("mine", "both") else mine
                costs = ratio(there, here, [9.0] * len(there), [9.5] * len(here))
                sizes = (None, 1.5, *(() if costs is None else (costs[0] ** 1.99, costs[0] ** 2.01)))
                says = [(judged(costs, size), p_of_ratio(costs, len(mine))) for size in sizes]
                found[f"{a}/{b} {missing}"] = [str(costs), costs, says]
    curve = [0.1, 0.3, 0.25, 0.4, 0.55, 0.5, 0.62, 0.7]
    trips, goals = [10.0 * k for k in range(8)], itertools.product((0.3, 0.6, 0.9), (1, 3, 5))
    found["passages"] = [passage(trips, curve, *goal) for goal in goals]
    return found


def claims() -> Any:
    """Return the claims of a study after the correction for multiple tests."""
    said: tuple[Verdict, ...] = (
        "reproduced", "smaller", "reproduced", "not reproduced", "holds", "reproduced", "out of reach",
    )  # fmt: skip
    mutants: list[dict[str, Verdict]] = [{}, {"α²": "smaller"}, {"α²": "reproduced", "α^¼": "smaller"}]
    found = []
    for count, last in ((1, 0), (5, 2), (8, 0), (8, 3), (8, 7), (8, 8)):  # the last p-value below its bound
        ps = [round((k + 1) / count * 0.05 * (0.999 if k == last else 1.001), 6) for k in range(count)]
        findings = corrected(
            [
                Finding(f"claim {n}", "", "", "", said[n % 7], mine=("A",), p=p, mutants=mutants[n % 3])
                for n, p in enumerate([*ps, None])
            ]
        )
        lines = [f"{one.says}; {one.survives}; {one.remark}" for one in findings]
        found.append([*lines, correction(findings)])
    return found


def privacy() -> Any:
    """Return ε for tree and Gaussian noise, restarts, quantiles, cohorts that are sampled in two ways, and
    clients that take part at different rates."""
    plain = {"clip_norm": 1.0, "noise_multiplier": 2.0}
    steps = [[k % 7, (3 * k + 1) % 7, k % 3] for k in range(40)]
    rules: list[tuple[dict[str, Any], Any]] = [
        ({}, None),
        ({"restart_every": 8}, None),
        ({"honaker": True, "restart_every": 8}, None),
        ({"delta": 1e-4, "noise_multiplier": 0.7}, None),
        ({"mechanism": "gaussian"}, None),
        ({"mechanism": "gaussian", "quantile": 0.5}, None),
        ({"mechanism": "gaussian", "noise_multiplier": 5.0}, (0.3, False)),
        ({"mechanism": "gaussian", "noise_multiplier": 5.0}, (0.3, True)),
        ({"mechanism": "gaussian", "quantile": 0.8, "quantile_noise": 2.0}, (0.1, True)),
        ({"noise_multiplier": 0.0}, None),
    ]
    found = []
    for more, sampling in rules:
        account = PrivacyAccount(Privacy(**{**plain, **more}), 7, sampling)
        for step in steps:
            account.version(step)
        found.append(account.epsilon())
    return found


LINKS = (
    "3g-slow", "5g", "cable", "dial-up", "edge-lossy", "flash-median", "hsdpa-lossy", "lte", "lte-driving",
    "lte-verizon-varying", "none", "wifi",
)  # fmt: skip


def links() -> Any:
    """Return the times of transfers on twelve links, with three seeds."""
    sizes = (0, 1500, 40_000, 2_000_000)
    return {name: [_transfers(name, sizes, seed) for seed in range(3)] for name in LINKS}


def _transfers(network: str, sizes: Iterable[int], seed: int) -> list[tuple[float, ...]]:
    """Return the times of a download and an upload of each size, one after the other."""
    link = Link(load_network(network), np.random.default_rng(seed))
    found = [way(size) for size in sizes for way in (link.down, link.up)]
    return [(one.declared_s, one.breaks_s, one.takes_s(1000)) for one in found]


DEVICES = ("pixel-3a", "pixel-4", "moto-g4", "watch-a7", "pi-4", "jetson-nano", "iphone-xs", "tier-p50")
MODELS = {"mlp": 32, "cnn-femnist": 16, "cnn-fedbuff": 32, "cnn-groupnorm": 10, "lstm-shakespeare": 4}


def predictions() -> Any:
    """Return predicted steps of five models on eight devices, and of one also for inference and with MNN."""
    on = [word for name in DEVICES for word in ("-d", name)]
    asked = [("predict", model, "--batch", str(batch), *on) for model, batch in MODELS.items()]
    one = ("predict", "cnn-femnist", "-d", "pixel-4")
    asked += [(*one, "--inference"), (*one, "--runtime", "mnn")]
    found = {}
    for words in asked:
        answer = json.loads(said([*words, "--json"]))
        found[" ".join(words)] = {"work": digest(answer["work"])} | {
            each["device"]: [each[key] for key in ("seconds", "low_s", "high_s", "energy_j")] + [digest(each)]
            for each in answer["devices"]
        }
    return found


def profiles() -> Any:
    """Return a digest of each profile that comes with edgefl."""
    kinds = json.loads(said(["profiles", "--json"]))
    return {name: digest(profile) for each in kinds.values() for name, profile in each.items()}


def said(arguments: Iterable[str]) -> str:
    """Return what ``edgefl`` prints; raise RuntimeError if it fails."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(list(arguments))
    if code:
        raise RuntimeError(f"exit code {code}")
    return out.getvalue()


def _helps(*command: str) -> str:
    """Return the help of a command and of all its subcommands."""
    text = said([*command, "--help"])
    below = re.findall(r"^  (\S+)", text.partition("\nCommands:\n")[2], re.MULTILINE)
    return "".join([text, *(_helps(*command, name) for name in below)])


def _printed(*commands: str) -> list[str]:
    return [line for command in commands for line in said(command.split()).splitlines()]


PREDICT = ("predict cnn-femnist -d pixel-3a", "predict mlp -d pi-4 -d moto-g4")
CASES: Mapping[str, Callable[[], Any]] = {
    **{
        f"verdict-{made.__name__}": made
        for made in (plugin, programs, fidelity, statistics, claims, privacy, links, predictions, profiles)
    },
    "text-help": lambda: _helps().splitlines(),
    "text-keys": partial(_printed, "keys"),
    "text-predict": partial(_printed, *PREDICT),
    "text-profiles": partial(_printed, "profiles", "profiles pixel-4", "profiles lte"),
}
