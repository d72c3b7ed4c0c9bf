"""Compares predicted with measured times of training steps: published times, and times on this host.

A small error on the steps to which a profile was fitted proves little. Each such step is therefore predicted
a second time, by a fit that excludes all steps of its network. A profile that is scaled from another device
was not fitted to steps of its own device, so it needs no second prediction. The error is
|predicted ÷ measured − 1|; *held* is the share of steps whose measured time is within the predicted interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from scipy import stats

from edgefl.devices import measurements
from edgefl.devices.fit import HeldOutPrediction, Row, predicted, summary
from edgefl.devices.fitted import Recipe
from edgefl.devices.kit_result import KitResult, fit_kit
from edgefl.devices.measurements import IMAGE, MeasuredStep
from edgefl.devices.prediction import time_model
from edgefl.devices.profiles import bundled_folder, load_device
from edgefl.errors import ConfigError
from edgefl.lab import board_truth
from edgefl.lab.bench import Say, machine, silent
from edgefl.learning.models import timm_module, timm_network
from edgefl.learning.work import step_work
from edgefl.measure import kit
from edgefl.results import tables
from edgefl.results.tables import many, percent

LAYERS = ("lstm", "softmax output")
"""Name prefixes of the measured steps that train a single layer and not a whole network."""


def run(
    quick: bool = False,
    *,
    files: Sequence[Path] = (),
    say: Say = silent,
) -> dict[str, Any]:
    """Compare the times of all steps; return plain values for `show`, `draw` and a JSON file.

    ``files`` are CSV files of measured steps. By default, all files bundled with edgefl are used, and this
    host is also measured. ``quick`` skips this host and the fits that leave out a network. In the result,
    ``steps`` contains an entry for each measured step, ``groups`` an entry for each device and class of
    networks, ``limits`` an entry for each metric that has a limit, and ``rates`` the result of
    `board_truth.run`.
    """
    began_s = time.monotonic()
    if not files:
        timm_module()  # if timm is missing, fail now and not after a minute of work
    measured: list[MeasuredStep] = []
    for file in files or sorted((bundled_folder() / "measured").glob("*.csv")):
        say(f"counting the work of the steps in {file.name}")
        measured += measurements.read(file)
        if not all(step.profile for step in measured):
            why = "each step must name a device profile, whose prediction is compared with it"
            raise ConfigError(f"{file}: {why}; results of edgefl measure do not")
    if not measured:
        raise ConfigError("no measured steps to compare with; name a file: --rows FILE")
    steps = [step for alike in _of_one_runtime(measured) for step in compared(alike, quick, say)]
    if not (quick or files):
        steps += this_host(say)
    result: dict[str, Any] = {
        "machine": machine(),
        "groups": groups(steps),
        "limits": judged(steps),
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
    """Compare measured steps of one device and runtime with two predictions.

    One uses the device's profile, and the other uses a fit without the steps of the same network."""
    name, runtime = measured[0].profile, measured[0].runtime
    device = load_device(name)
    known = runtime in device.runtime
    model = time_model(device, runtime if known else None)
    recipe = Recipe.of(device.sources.get(f"runtime.{runtime}", ""))
    own = {key for key in recipe.step_keys() if key[:2] == (name, runtime)} if recipe else set()
    seen = [step for step in measured if step.key in own]
    unseen: dict[int, HeldOutPrediction] = {}
    if recipe and own and own == {step.key for step in seen} and not quick:
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
    """Measure the neural networks `NETWORKS` on this host, on one thread and on all threads.

    Their times are predicted by a fit to the steps of the measurement kit, which also runs on this host.
    """
    import torch

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
    """Return the class of the network in a row.

    The class of a single layer follows from its name, that of a whole network from the work of its step.

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
    """Summarise the errors for each device, and for each class of networks on it.

    Steps to which a profile was fitted form separate groups.
    """
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
    """Summarise the errors of predictions. Returns None if there are no predictions."""
    return msgspec.to_builtins(summary(predictions)) if predictions else None


def show(result: dict[str, Any]) -> None:
    """Print tables of the errors, the limits and the rates of boards.

    Steps to which a profile was fitted have a table of errors of their own.
    """
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
    heads = ["of", ">steps", "measure", ">found", ">limit", "verdict"]
    tables.show(tables.table(heads, map(_limit_line, result["limits"]), "Limits"))
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
    """Plot predicted against measured seconds, and save the plot to each of ``paths``.

    One panel shows whole networks, and another shows single layers. Each step is predicted by a fit that
    leaves out its network. If there is no such fit, it is predicted by the device's profile, and the legend
    says *fitted* if the profile was fitted to this step.
    """
    from matplotlib.figure import Figure

    steps = result["steps"]
    layers = [step for step in steps if step["kind"].startswith("layers")]
    networks = [step for step in steps if not step["kind"].startswith("layers")]
    panels = [(name, part) for name, part in (("networks", networks), ("single layers", layers)) if part]
    figure = Figure(figsize=(5.6 * len(panels), 5.4), layout="constrained", facecolor="white")
    colours = dict(zip(dict.fromkeys(map(_label, steps)), COLOURS * 9, strict=False))
    for axes, (name, part) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(axes, name, part, colours)
    for path in paths:
        figure.savefig(path, dpi=110)


def _seconds(step: dict[str, Any]) -> tuple[float, float]:
    """Return the measured and the predicted time of a step, in seconds.

    The prediction comes from the fit without the step's network, if there is such a fit.
    """
    return step["measured_s"], step["unseen_s"] or step["predicted_s"]


def _label(step: dict[str, Any]) -> str:
    """Return the device and runtime, plus *fitted* if the step is in the data of the fit that predicts it."""
    return f"{_titled(step)}, fitted" if step["fitted"] and step["unseen_s"] is None else _titled(step)


def _panel(axes: Any, name: str, steps: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    """Draw a point for each step, the line of exact predictions, and a band within a factor of 1.5 of it."""
    seconds = [s for step in steps for s in _seconds(step)]
    span = [min(seconds) / 1.4, max(seconds) * 1.4]
    axes.fill_between(span, [s / 1.5 for s in span], [s * 1.5 for s in span], color="#e6e6e1", linewidth=0)
    axes.plot(span, span, color="#686b73", linewidth=0.8)
    few = len(steps) < 300
    for title, colour in colours.items():
        own = [_seconds(step) for step in steps if _label(step) == title]
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


# ---- limits: no step is judged by a model that was fitted to it ----------------------------------

ENOUGH: Final = 20
"""Minimum number of steps that are needed to judge either the errors on this host or the share of a device's
steps that are within their predicted intervals."""
HELD: Final = (0.85, 0.97)
CONFIDENCE: Final = 0.95
"""Level of the confidence interval for the true share of steps within their predicted intervals."""


class ComparedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step, with predictions by the device's profile and by a fit without the step's network."""

    profile: str
    runtime: str
    kind: str
    """Class of this step's network."""
    by_profile: HeldOutPrediction
    """Prediction by the device's profile."""
    fitted: bool
    """True if the profile was fitted to this step."""
    unseen: HeldOutPrediction | None
    """Prediction by a fit without this step's network; None if there is no such fit."""
    source: str

    @property
    def title(self) -> str:
        return f"{self.profile}, {self.runtime}"

    @property
    def judged(self) -> HeldOutPrediction | None:
        """The prediction by a model that was not fitted to this step; None if there is no such model."""
        return self.unseen if self.fitted else self.by_profile

    def plain(self) -> dict[str, Any]:
        """Return the step as plain values for a JSON file, without the counts of its work."""
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
    """A selection of steps that are judged together, and upper limits on their errors."""

    name: str
    chooses: Callable[[ComparedStep], bool]
    median: float | None = None
    p90: float | None = None
    worst_factor: float | None = None
    least: int = 1
    """Minimum number of steps for a verdict."""


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
    """Judge each metric that has a limit.

    Returns, for each metric, the steps that it describes, its name, the number of steps, ``found`` (its
    value), ``limit`` and ``met``. ``found`` and ``met`` are None if there are too few steps. ``met`` is also
    None if a share is outside its limits, but this may be chance because there are few steps.
    """
    return [*_by_error(steps), *_by_interval(steps)]


def _by_error(steps: Sequence[ComparedStep]) -> Iterator[dict[str, Any]]:
    for bar in BARS:
        chosen = [step.judged for step in steps if bar.chooses(step) and step.judged]
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
    """Judge the share of steps within their predicted intervals, for each device with enough steps."""
    devices: dict[str, list[HeldOutPrediction]] = {}
    for step in steps:
        if step.judged:
            devices.setdefault(step.title, []).append(step.judged)
    for title, chosen in devices.items():
        if len(chosen) >= ENOUGH:
            held = sum(step.held for step in chosen)
            yield {
                "of": title,
                "figure": "held",
                "steps": len(chosen),
                "found": held / len(chosen),
                "limit": HELD,
                "met": _share_met(held, len(chosen)),
            }


def _share_met(held: int, steps: int) -> bool | None:
    """Judge the share of steps within their predicted intervals: ``held`` of ``steps``.

    Return True if the share is within `HELD`. If it is outside, return None if this may be chance (the exact
    binomial interval for the true share overlaps `HELD`), and otherwise False.

    >>> _share_met(30, 33), _share_met(33, 33), _share_met(20, 33)
    (True, None, False)
    """
    if HELD[0] <= held / steps <= HELD[1]:
        return True
    low, high = stats.binomtest(held, steps).proportion_ci(CONFIDENCE)
    return None if low <= HELD[1] and high >= HELD[0] else False


def _limit_line(bar: dict[str, Any]) -> list[Any]:
    """Return a row of the table: name, number of steps, metric, measured value, limit and verdict."""
    words = {"p90": "90%", "worst_factor": "worst", "held": "held"}
    if bar["found"] is None:
        found, met = "", "not judged"
    else:
        found = _formatted(bar["figure"], bar["found"])
        met = {None: "undecided", True: "met", False: "NOT MET"}[bar["met"]]
    if bar["figure"] == "held":
        limit = "–".join(percent(share, 0) for share in bar["limit"])
    else:
        limit = f"≤ {_formatted(bar['figure'], bar['limit'])}"
    return [bar["of"], bar["steps"], words.get(bar["figure"], bar["figure"]), found, limit, met]


def _formatted(figure: str, value: float) -> str:
    return f"{value:.2f}" if figure == "worst_factor" else percent(value)


# ---- this host: timm's networks, predicted by a fit to the parts of the measurement kit -------------

BATCH: Final = 4
NETWORK_S: Final = 8.0
"""Maximum number of seconds for which the steps of a network are repeated."""
NETWORKS: Final = (
    "resnet18", "resnet50", "resnext50_32x4d", "vgg11", "densenet121", "inception_v3", "dla34", "repvgg_a0",
    "mobilenetv2_100", "mobilenetv3_large_100", "efficientnet_b0", "tf_efficientnetv2_b0", "mnasnet_100",
    "ghostnet_100", "ghostnetv2_100", "regnetx_008", "regnety_016", "lcnet_100", "convnext_atto",
    "convnext_tiny", "inception_next_tiny", "vit_tiny_patch16_224", "vit_small_patch16_224",
    "swin_tiny_patch4_window7_224", "mixer_s16_224", "resmlp_12_224", "poolformer_s12", "mobilevit_s",
    "mobilevitv2_100", "fastvit_t8", "edgenext_small", "levit_128", "pvt_v2_b0",
)  # fmt: skip


def measure(
    threads: int = 1,
    networks: Sequence[str] = NETWORKS,
    tell: Callable[[str], None] = lambda line: None,
) -> list[HeldOutPrediction]:
    """Run the measurement kit and the networks on this host, with ``threads`` torch threads.

    On one thread, CPU time is measured. Returns each network with its prediction, which comes from a fit to
    the parts of the kit.
    """
    result = kit.measure(kit.MINUTES, threads, tell)
    found = fit_kit(msgspec.convert(result, KitResult).rows())
    unseen = []
    for network in networks:
        row = network_row(network, threads)
        unseen.append(predicted(found.model, row))
        tell(f"{network}: {row.seconds:.3f} s, predicted ÷ measured {unseen[-1].factor:.2f}")
    return unseen


def network_row(network: str, threads: int) -> Row:
    """Return the work of a training step of a timm network, and the step's time on this host."""
    module = timm_network(network, IMAGE, 1000)
    part = kit.Part(lambda: module, IMAGE, BATCH)
    took = kit.timed(kit.stepper(part), NETWORK_S)
    work = step_work(module, IMAGE, BATCH, loss=kit.loss)
    return Row(network=network, work=work, seconds=took["cpu_s" if threads == 1 else "wall_s"])
