"""Compares predicted with measured times: every published training step that edgefl has, and this host's.

A profile's prediction of steps that it was fitted to proves little. Beside it stands the prediction of a fit
without any step of that network. Devices with scaled costs were not fitted to their steps. Errors are
|predicted ÷ measured − 1|; *held* is the share within the steps' intervals.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgefl.devices import measurements
from edgefl.devices.fit import HeldOutPrediction, Row, predicted, summary
from edgefl.devices.fitted import Recipe
from edgefl.devices.measurements import MeasuredStep
from edgefl.devices.prediction import time_model
from edgefl.devices.profiles import bundled_folder, load_device
from edgefl.errors import ConfigError
from edgefl.lab import bars, board_truth
from edgefl.lab.bars import ComparedStep
from edgefl.lab.bench import Say, machine, silent
from edgefl.results import tables
from edgefl.results.tables import many, percent

LAYERS = ("lstm", "softmax output")
"""Name prefixes of measured single layers."""


def run(
    quick: bool = False,
    *,
    files: Sequence[Path] = (),
    say: Say = silent,
) -> dict[str, Any]:
    """Compare all steps; return plain values for `show`, `draw` and a JSON file.

    ``files`` are CSVs of measured steps; default: all that edgefl has, and this host, measured now. ``quick``
    skips the fits without a network, and this host. ``steps`` has an entry per measured step, ``groups`` one
    per device and class of networks, ``limits`` one per figure with a limit, and ``rates`` is
    the result of `board_truth.run`.
    """
    began_s = time.monotonic()
    measured: list[MeasuredStep] = []
    for file in files or sorted((bundled_folder() / "measured").glob("*.csv")):
        say(f"counting the work of the steps in {file.name}")
        measured += measurements.read(file)
    if not measured:
        raise ConfigError("no measured steps to compare with; name a file: --rows FILE")
    steps = [step for alike in _of_one_runtime(measured) for step in compared(alike, quick, say)]
    if not (quick or files):
        steps += this_host(say)
    result: dict[str, Any] = {
        "machine": machine(),
        "groups": groups(steps),
        "limits": bars.judged(steps),
        "steps": [step.plain() for step in steps],
    }
    if not (quick or files):
        result["rates"] = board_truth.run(say=say)
    result["seconds"] = round(time.monotonic() - began_s, 1)
    return result


def _of_one_runtime(measured: Iterable[MeasuredStep]) -> Iterable[list[MeasuredStep]]:
    alike: dict[tuple[str, str], list[MeasuredStep]] = {}
    for step in measured:
        alike.setdefault((step.profile, step.runtime), []).append(step)
    return alike.values()


def compared(measured: Sequence[MeasuredStep], quick: bool = False, say: Say = silent) -> list[ComparedStep]:
    """Compare steps of one device and runtime with its profile and with fits without their network."""
    name, runtime = measured[0].profile, measured[0].runtime
    device = load_device(name)
    known = runtime in device.runtime
    model = time_model(device, runtime if known else None)
    recipe = Recipe.of(device.sources.get(f"runtime.{runtime}", ""))
    own = {key for key in recipe.step_keys() if key[:2] == (name, runtime)} if recipe else set()
    seen = [step for step in measured if step.key in own]
    unseen: dict[int, HeldOutPrediction] = {}
    if recipe and own == {step.key for step in seen} and not quick:
        say(f"fits for {name}, each without one network")
        unseen = {id(found.row): found for found in recipe.fit(seen).unseen}
    return [
        ComparedStep(
            profile=name,
            runtime=runtime if known else f"{runtime} by {device.runtime_name or 'one rate'}",
            kind=kind_of(step.row),
            by_profile=predicted(model, step.row),
            fitted=step.key in own,
            unseen=unseen.get(id(step.row)),
            source=step.source,
        )
        for step in measured
    ]


def this_host(say: Say) -> list[ComparedStep]:
    """Measure networks here, on one thread and on all, and predict them by a fit to the measuring kit."""
    import torch

    from edgefl.lab.host_truth import measure
    from edgefl.measure import kit

    steps = []
    for threads in dict.fromkeys((1, torch.get_num_threads())):
        say(f"this host on {many(threads, 'thread')}")
        load = kit.state().get("load")
        steps += [
            ComparedStep(
                profile="this host",
                runtime=f"torch on {many(threads, 'thread')}",
                kind=kind_of(unseen.row),
                by_profile=unseen,
                fitted=False,
                unseen=None,
                source=f"measured now; load before: {load}",
            )
            for unseen in measure(threads, tell=say)
        ]
    return steps


def kind_of(row: Row) -> str:
    """Return the class of a row's network, from the work of its step.

    >>> from edgefl.learning.operations import StepWork
    >>> kind_of(Row(network="resnet18", work=StepWork(conv_flop=1.0), seconds=1.0))
    'dense convolutions'
    """
    work = row.work
    for layer in LAYERS:
        if row.network.startswith(f"{layer} "):
            return f"layers: {layer}"
    if work.depthwise_planes:
        return "depthwise convolutions"
    if work.recurrent_flop > work.flop / 2:
        return "recurrent"
    return "products, attention" if work.matmul_flop > work.flop / 2 else "dense convolutions"


# ---- tables --------------------------------------------------------------------------------------


def groups(steps: Sequence[ComparedStep]) -> list[dict[str, Any]]:
    """Summarise the errors of each device, and of its classes of networks; fitted steps are separate
    groups."""
    alike: dict[tuple[bool, str, str, str], list[ComparedStep]] = {}
    for step in steps:
        for kind in ("", step.kind):
            alike.setdefault((not step.fitted, step.profile, step.runtime, kind), []).append(step)
    return [
        {
            "profile": profile,
            "runtime": runtime,
            "kind": kind or "all",
            "fitted": not others,
            "profile_says": _errors([step.by_profile for step in found]),
            "unseen": _errors([step.unseen for step in found if step.unseen is not None]),
        }
        for (others, profile, runtime, kind), found in sorted(alike.items())
    ]


def _errors(predictions: Sequence[HeldOutPrediction]) -> dict[str, Any] | None:
    """Summarise errors; None without predictions."""
    return msgspec.to_builtins(summary(predictions)) if predictions else None


def show(result: dict[str, Any]) -> None:
    """Print the steps to which profiles were fitted, the other steps, the limits, and rates of boards."""
    fitted, others = ([g for g in result["groups"] if g["fitted"] is seen] for seen in (True, False))
    four = [">median", ">90%", ">worst", ">held"]
    if fitted:
        heads = ["device", ">steps", ">fitted:\nmedian", ">\nworst", ">unseen:\nmedian", *four[1:]]
        tables.show(tables.table(heads, map(_fitted_line, fitted), "Steps that profiles were fitted on"))
    if others:
        heads = ["device", ">steps", *four]
        tables.show(tables.table(heads, map(_other_line, others), "Steps that no profile was fitted on"))
    tables.show(
        "median, 90%: |predicted ÷ measured - 1|; worst: largest factor between them\n"
        "held: share within their intervals; unseen: by fits without that network"
    )
    heads = ["", ">steps", "", ">found", ">limit", ""]
    tables.show(tables.table(heads, map(bars.line, result["limits"]), "Limits"))
    if "rates" in result:
        board_truth.show(result["rates"])


def _fitted_line(group: dict[str, Any]) -> list[Any]:
    seen = group["profile_says"]
    return [_named(group), seen["rows"], percent(seen["median"]), _worst(seen), *_four(group["unseen"])]


def _other_line(group: dict[str, Any]) -> list[Any]:
    return [_named(group), group["profile_says"]["rows"], *_four(group["profile_says"])]


def _four(found: dict[str, Any] | None) -> list[Any]:
    if found is None:
        return [None] * 4
    return [percent(found["median"]), percent(found["p90"], 0), _worst(found), percent(found["held"], 0)]


def _worst(found: dict[str, Any]) -> str:
    return f"{found['worst_factor']:.2f}"


def _named(group: dict[str, Any]) -> str:
    return _titled(group) if group["kind"] == "all" else f"  {group['kind']}"


def _titled(step: dict[str, Any]) -> str:
    return f"{step['profile']}, {step['runtime']}"


# ---- picture -------------------------------------------------------------------------------------

COLOURS = ("#2a6fc9", "#df6a2c", "#1b9a74", "#7a5bd0", "#cf9a12", "#d4568d", "#4f7f2a", "#5b7083")


def draw(result: dict[str, Any], paths: Sequence[Path]) -> None:
    """Draw predicted over measured seconds, networks beside single layers, to each of ``paths``.

    Predictions are from fits without the network, if there are any.
    """
    from matplotlib.figure import Figure

    steps = result["steps"]
    layers = [step for step in steps if step["kind"].startswith("layers")]
    networks = [step for step in steps if not step["kind"].startswith("layers")]
    panels = [(name, part) for name, part in (("networks", networks), ("single layers", layers)) if part]
    figure = Figure(figsize=(5.6 * len(panels), 5.4), layout="constrained", facecolor="white")
    colours = dict(zip(dict.fromkeys(map(_titled, steps)), COLOURS * 9, strict=False))
    for axes, (name, part) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(axes, name, part, colours)
    for path in paths:
        figure.savefig(path, dpi=110)


def _seconds(step: dict[str, Any]) -> tuple[float, float]:
    """Return measured seconds, and the most independent prediction."""
    return step["measured_s"], step["unseen_s"] or step["predicted_s"]


def _panel(axes: Any, name: str, steps: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    """Draw one point per step, the line of exact predictions, and a band of a factor of 1.5."""
    seconds = [s for step in steps for s in _seconds(step)]
    span = [min(seconds) / 1.4, max(seconds) * 1.4]
    axes.fill_between(span, [s / 1.5 for s in span], [s * 1.5 for s in span], color="#e6e6e1", linewidth=0)
    axes.plot(span, span, color="#686b73", linewidth=0.8)
    few = len(steps) < 300
    for title, colour in colours.items():
        own = [_seconds(step) for step in steps if _titled(step) == title]
        style = {"markersize": 5.5 if few else 3.0, "alpha": 0.8 if few else 0.45, "markeredgewidth": 0}
        if own:
            axes.plot(*zip(*own, strict=True), "o", color=colour, label=title, rasterized=not few, **style)
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span, aspect="equal")
    axes.set(xlabel="measured, seconds", ylabel="predicted, seconds")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_title(f"{len(steps):,} steps of {name}; band: a factor of 1.5", fontsize=10, loc="left")
    axes.grid(visible=True, linewidth=0.4, color="#e6e6e1")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
