"""Golden verdicts and texts: what edgefl says of given figures, predicts, and prints."""

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

from tests.golden import adapters
from tests.golden.runs import digest

NAN = math.nan


def figures(count: int, middle: float = 1.0, spread: float = 0.05) -> list[float]:
    """Figures around one, always the same; decimal, so that no library's last bit is in them."""
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
    """Measurements against budgets, at their pace, and against others as their baselines."""
    found: dict[str, Any] = {}
    for (name, repetitions), doubt in itertools.product(MEASURED.items(), ("", "the host is overloaded")):
        for budget in (*BUDGETS, None):
            result = adapters.device_result(repetitions, doubt)
            says = _raised(result.assert_pace if budget is None else partial(result.assert_budget, **budget))
            found[f"{name}, {doubt}, {budget}"] = [says, result.outcome, result.note]
        found[name] = [repr(result), *adapters.doubts(repetitions)]
    pairs = itertools.permutations(MEASURED, 2)
    for before, now in (pair for pair in pairs if "steady" in pair or "busy host" in pair):
        found[f"{before} -> {now}"] = adapters.against_baseline(MEASURED[before], MEASURED[now])
    return found


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
"""Factors on both sides of every bound."""
HOSTS: tuple[Mapping[str, float], ...] = (
    {}, {"load": 0.901}, {"load": 0.899, "steal": 0.0201, "throttled": 0.0201}, {"step_cost": 1.99},
    {"steal": 0.0199, "others": 0.251}, {"throttled": 0.0199, "others": 0.249, "step_cost": 2.01},
    {"step_cost": 0.49},
)  # fmt: skip


def programs() -> Any:
    """Phones that were too slow, too fast or not counted, and links, on several hosts."""
    shares = [figures(3, 0.1 / edge, 0.0001) for edge in EDGES] + [figures(4, 0.2)]
    links: tuple[list[tuple[float, float]], ...]
    links = ([], [(2.0, 2.0 * EDGES[1])], [(1.0, EDGES[2])] * 3, [(0.009, 0.9), (1.0, 0.95)])
    found, lost_s = [], itertools.cycle((0.0, 0.0299, 0.0301))
    for (share, link), host, lost in zip(
        itertools.product(shares, links), itertools.cycle(HOSTS), lost_s, strict=False
    ):
        figures_of = ({"phone": n, "achieved_share": s, "uncounted_s": lost} for n, s in enumerate(share))
        found.append(adapters.programs_verdict([PHONE | each for each in figures_of], link, 0.5, host))
    return found


def fidelity() -> Any:
    """Runs that were on time, late in one phase or on one device, disturbed, or not measured."""
    takes = {"compute": 3.0, "down": 1.0, "up": 1.5, "delay": 0.2, "trip": 5.5, "round": 5.6}
    plan = {name: figures(20, middle) for name, middle in takes.items()}
    names, found = ["pixel-4", "moto-g4"] * 10, [adapters.fidelity([], {}, {})]
    wrong = itertools.product((*plan, "none"), (*EDGES, NAN))
    for (phase, factor), host in zip(wrong, itertools.cycle(({}, {}, *HOSTS)), strict=False):
        took = {name: [s * (factor if name == phase else 1.0) for s in each] for name, each in plan.items()}
        late = figures(20, 0.1)
        found.append(adapters.fidelity(names, plan, took, time_scale=0.5, lateness_s=late, conditions=host))
    slow = {name: [s * (1.1, 1.0)[k % 2] for k, s in enumerate(each)] for name, each in plan.items()}
    found.append(adapters.fidelity(names, plan, slow))
    told = ("valid", "reasons", "warnings", "median_abs_error", "worst")
    return [{key: each[key] for key in told} | {"all": digest(each)} for each in found]


def statistics() -> Any:
    """Estimates and ratios of costs over seeds, with runs that did not get there, and verdicts on them."""
    series = [figures(n, middle, spread) for n in (1, 3, 5) for middle in (1.0, 2.5) for spread in (0.1, 0.8)]
    found: dict[str, Any] = {"estimates": [adapters.estimate(each) for each in series]}
    for (a, other), (b, mine) in itertools.permutations(enumerate(series), 2):
        if len(other) == len(mine):
            for missing in ("", "other", "mine", "both"):
                there = [NAN, *other[1:]] if missing in ("other", "both") else other
                here = [*mine[:-1], NAN] if missing in ("mine", "both") else mine
                ratio = adapters.cost_ratio(there, here, [9.0] * len(there), [9.5] * len(here))
                sizes = (None, 1.5, *(() if ratio is None else (ratio[0] ** 1.99, ratio[0] ** 2.01)))
                says = [adapters.race_verdict(ratio, size, len(mine)) for size in sizes]
                found[f"{a}/{b} {missing}"] = [str(ratio), ratio, says]
    curve = [0.1, 0.3, 0.25, 0.4, 0.55, 0.5, 0.62, 0.7]
    costs, goals = [10.0 * k for k in range(8)], itertools.product((0.3, 0.6, 0.9), (1, 3, 5))
    found["passages"] = [adapters.passage(costs, curve, *goal) for goal in goals]
    return found


def claims() -> Any:
    """A study's claims after the correction."""
    said = ("reproduced", "smaller", "reproduced", "not reproduced", "holds", "reproduced", "out of reach")
    mutants: list[dict[str, str]] = [{}, {"α²": "smaller"}, {"α²": "reproduced", "α^¼": "smaller"}]
    found = []
    for count, last in ((1, 0), (5, 2), (8, 0), (8, 3), (8, 7), (8, 8)):  # the last p-value below its bound
        ps = [round((k + 1) / count * 0.05 * (0.999 if k == last else 1.001), 6) for k in range(count)]
        found.append(
            adapters.corrected([(said[n % 7], p, mutants[n % 3]) for n, p in enumerate([*ps, None])])
        )
    return found


def privacy() -> Any:
    """ε of runs: trees, steps, quantiles, cohorts drawn in two ways, clients that took part differently."""
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
    return [adapters.epsilon({**plain, **more}, 7, steps, sampling) for more, sampling in rules]


LINKS = (
    "3g-slow", "5g", "cable", "dial-up", "edge-lossy", "flash-median", "hsdpa-lossy", "lte", "lte-driving",
    "lte-verizon-varying", "none", "wifi",
)  # fmt: skip


def links() -> Any:
    """What transfers take on a dozen links, drawn from three seeds."""
    sizes = (0, 1500, 40_000, 2_000_000)
    return {name: [adapters.transfers(name, sizes, seed) for seed in range(3)] for name in LINKS}


DEVICES = ("pixel-3a", "pixel-4", "moto-g4", "watch-a7", "pi-4", "jetson-nano", "iphone-xs", "tier-p50")
MODELS = {"mlp": 32, "cnn-femnist": 16, "cnn-fedbuff": 32, "cnn-groupnorm": 10, "lstm-shakespeare": 4}


def predictions() -> Any:
    """Predicted steps of five models on eight devices, and of one on all its runtimes."""
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
    """Every figure of every profile that comes with edgefl."""
    kinds = json.loads(said(["profiles", "--json"]))
    return {name: digest(profile) for each in kinds.values() for name, profile in each.items()}


def said(arguments: Iterable[str]) -> str:
    """What ``edgefl`` prints; raises an error if it fails."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = adapters.command(list(arguments))
    if code:
        raise RuntimeError(f"exit code {code}")
    return out.getvalue()


def _helps(*command: str) -> str:
    """The help of a command and of all below it."""
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
