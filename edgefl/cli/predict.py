"""``edgefl predict``: predict the time of a training step on devices, or the speed of other code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from edgefl.cli.paths import AsJson
from edgefl.cli.predict_code import CLASSES, predict_code
from edgefl.errors import ConfigError, ProfileError
from edgefl.terminal import say

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edgefl.devices.energy import Energy
    from edgefl.devices.schema import Device
    from edgefl.devices.time_model import Prediction

PARTS = {
    "conv_flop": "convolutions",
    "thin_flop": "convolutions of few channels",
    "pointwise_flop": "1×1 convolutions",
    "depthwise_flop": "depthwise, forward",
    "depthwise_backward_flop": "depthwise, backward",
    "depthwise_planes": "depthwise, each plane",
    "matmul_flop": "matrix products",
    "recurrent_flop": "recurrent cells",
    "conv_bytes": "memory of convolutions",
    "matmul_bytes": "memory of products",
    "norm_bytes": "memory of norms",
    "pool_bytes": "memory of pools",
    "elementwise_bytes": "memory of elementwise",
    "copy_bytes": "memory of copies",
    "calls": "calls",
    "parameters": "updating parameters",
    "fixed": "fixed part of a step",
}
SHOWN = 0.01
"""A part of a step is shown separately if it takes at least this fraction of the step's time."""
BATCH = 16
BAR = 30
"""Maximum length of a bar, in columns of the terminal."""


class _Found(NamedTuple):
    """The prediction for one device."""

    device: str
    runtime: str
    prediction: Prediction
    energy: Energy | None
    """Energy of the step, computed from the currents in the profile; None if the profile has no currents."""


def predict(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="cnn-femnist, mlp, …, my_module:make or timm:NAME.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", "-d", metavar="D", help="A profile; may be repeated.")
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS", help=f"Instead of MODEL, a class of code without torch: {', '.join(CLASSES)}."
        ),
    ] = None,
    cores: Annotated[
        str | None,
        typer.Option(metavar="CORE@MHZxN,…", help="With --code: the cores themselves, instead of --device."),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="With --code: number of busy threads, on the fastest cores."),
    ] = 1,
    without_aes: Annotated[
        bool, typer.Option("--without-aes", help="With --cores: the cores have no AES instructions.")
    ] = False,
    runtime: Annotated[
        str | None, typer.Option(metavar="R", help="A library: torch, mnn, dl4j, …; by default the device's.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="B", min=1, help="Number of examples in a step.")] = BATCH,
    input_: Annotated[
        str | None,
        typer.Option("--input", metavar="C,H,W", help="Shape of an example; by default the model's."),
    ] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Only the forward pass.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict a training step's time, or other code's speed.

    The prediction is for a real device; a step's time is shown part by part.
    """
    if code is not None:
        for name, used in (
            ("--runtime", runtime is not None), ("--batch", batch != BATCH),
            ("--input", input_ is not None), ("--inference", inference),
        ):  # fmt: skip
            if used:
                raise ConfigError(f"{name}: allowed only with a MODEL, not with --code")
        predict_code(code, model, device or [], cores, threads, as_json, without_aes)
        return
    if model is None:
        raise ConfigError("give a MODEL, or --code CLASS for code that does not use torch")
    for name, given in (("--cores", cores), ("--threads", threads > 1), ("--without-aes", without_aes)):
        if given:
            raise ConfigError(f"{name}: allowed only with --code")
    if not device:
        raise ConfigError("give --device NAME, once or more")
    from edgefl.devices import load_device
    from edgefl.devices.prediction import predicted, time_model, traced

    shape, devices = _shape(input_), [load_device(name) for name in dict.fromkeys(device)]
    models = [time_model(each, runtime) for each in devices]

    from edgefl.learning.models import model_to_trace

    module, shape = model_to_trace(model, shape)
    names = [runtime or each.runtime_name or "one rate" for each in devices]
    counted = {
        name: traced(module, shape, inference=inference, runtime=name) for name in dict.fromkeys(names)
    }
    times = [predicted(costs, counted[name], batch, name) for costs, name in zip(models, names, strict=True)]
    for each, one in zip(devices, times, strict=True):
        if not one.seconds:
            raise ConfigError(
                f"{model}: no time can be predicted on {each.id}: the network has no operations that the "
                "profile's single rate covers"
            )
    found = [
        _Found(each.id, name, one, _energy(each, one))
        for each, name, one in zip(devices, names, times, strict=True)
    ]
    found.sort(key=lambda one: one.prediction.seconds)
    question = {"model": model, "input": list(shape), "batch": batch, "inference": inference}
    if as_json:
        import msgspec

        listed = [{"device": d, "runtime": r, **p._asdict(), **_joules(e)} for d, r, p, e in found]
        work = msgspec.to_builtins(counted[names[0]].at(batch))
        say(json.dumps({**question, "work": work, "devices": listed}, indent=2))
        return

    from edgefl.results.tables import show

    what = "inference" if inference else "a training step"
    title = f"{model}, {what} on {batch} of {'×'.join(map(str, shape))}"
    picture = _one(title, found[0]) if len(found) == 1 else _several(title, found)
    show(picture, *_energies(found), *_doubts(found))


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    sizes = text.replace("x", ",").split(",")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--input must be sizes such as 3,224,224 (got {text!r})")
    return tuple(map(int, sizes))


def _one(title: str, found: _Found) -> RenderableType:
    """Return a table of the parts of a step's time on one device."""
    whole, parts = found.prediction.seconds, _parts(found.prediction)
    rows = [(name, _time(part), f"{part / whole:.0%}") for name, part in parts.items()]
    interval = f"90% interval {_interval(found.prediction)}"
    head = f"{title}\n{found.device}, {found.runtime}: {_time(whole)}, {interval}"
    return _with_bars(("part of the step", ">time", ">share"), rows, list(parts.values()), head)


def _several(title: str, found: Sequence[_Found]) -> RenderableType:
    """Return a table of the devices and their predicted times, with the slowest device last."""
    rows = [
        (one.device, one.runtime, _time(one.prediction.seconds), _interval(one.prediction)) for one in found
    ]
    columns = ("device", "runtime", ">time", ">90% interval")
    return _with_bars(columns, rows, [one.prediction.seconds for one in found], title)


def _energy(device: Device, found: Prediction) -> Energy | None:
    """Return the energy of the step, or None if the profile does not give the currents."""
    from edgefl.devices.energy import draw_of

    with suppress(ProfileError):
        if draw := draw_of(device):
            return draw.energy(compute_s=found.seconds, time_factor=found.high_s / found.seconds)
    return None


def _joules(found: Energy | None) -> dict[str, float | None]:
    """Return the energy and its 90% interval, in joules, as fields for JSON."""
    names = ("energy_j", "energy_low_j", "energy_high_j")
    values = (None,) * 3 if found is None else (found.total_j, found.low_j, found.high_j)
    return dict(zip(names, values, strict=True))


def _energies(found: Sequence[_Found]) -> list[str]:
    """Return one line with the energies that are known, or no line if none is known."""
    from edgefl.results.tables import number

    known = [
        f"{one.device} {number(energy.total_j)} J ({number(energy.low_j, 2)} to {number(energy.high_j, 2)})"
        for one in found
        if (energy := one.energy) is not None
    ]
    return [f"energy by the profile's currents, 90% interval: {', '.join(known)}"] if known else []


def _doubts(found: Sequence[_Found]) -> list[str]:
    """Return one line for each device whose interval is wide. The line gives the reasons for the width."""
    return [
        f"{one.device}, {one.runtime}: the interval is wide, because few measurements cover: "
        + "; ".join(PARTS[name] for name in one.prediction.unsure)
        for one in found
        if one.prediction.unsure
    ]


def _with_bars(
    columns: Sequence[str], rows: Sequence[Sequence[str]], values: Sequence[float], title: str
) -> RenderableType:
    """Return a table that fits into the terminal. Its last column has bars proportional to ``values``."""
    from rich.console import Console

    from edgefl.results.tables import table

    texts = zip(*[[name.lstrip(">") for name in columns], *rows], strict=True)
    free = Console().width - sum(max(map(len, column)) + 2 for column in texts)
    longest = max(values) / min(max(free, 4), BAR)
    cells = [(*row, _bar(value / longest)) for row, value in zip(rows, values, strict=True)]
    return table((*columns, ""), cells, title)


def _parts(prediction: Prediction) -> dict[str, float]:
    """Return the parts of the predicted time in seconds, keyed by description; "all else" is the rest."""
    shown = {PARTS[key]: s for key, s in prediction.parts.items() if s >= SHOWN * prediction.seconds}
    rest = prediction.seconds - sum(shown.values())
    return shown if rest <= 1e-9 * prediction.seconds else {**shown, "all else": rest}


def _time(seconds: float) -> str:
    from edgefl.results.tables import short_time

    return short_time(seconds)


def _interval(prediction: Prediction) -> str:
    return f"{_time(prediction.low_s)} – {_time(prediction.high_s)}"


def _bar(columns: float) -> str:
    """Return a bar of that many columns, rounded to eighths of a column; it has at least one eighth.

    >>> _bar(3.5), _bar(0.0)
    ('███▌', '▏')
    """
    whole, eighths = divmod(max(1, round(columns * 8)), 8)
    return "█" * whole + (chr(0x2590 - eighths) if eighths else "")
