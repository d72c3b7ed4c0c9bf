"""Reads the layers of networks that were measured on phones, and counts the work of an inference in TFLite.

A CSV file has one line per layer, with the columns ``network``, ``layer``, ``kind`` (conv, depthwise, relu,
add or pool), ``in_side``, ``out_side``, ``in_channels``, ``out_channels``, ``kernel``, ``stride`` and
``padding``.

The classes of work are those of `StepWork`. Some layers take TFLite longer than their number of operations
suggests; `Weights` adds operations to such layers. If the input channels of a 1 × 1 convolution do not fill
vector registers, the added operations are of the class for thin convolutions (few input channels).
Activations are part of the layer before them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from edgefl.devices.csv_lines import csv_lines
from edgefl.errors import ConfigError, as_config_error
from edgefl.learning.operations import StepWork
from edgefl.validation import convert

Size = Annotated[int, msgspec.Meta(ge=0)]
Side = Size | Annotated[float, msgspec.Meta(ge=0)]
FLOAT_BYTES: Final = 4
THIN: Final = 4
"""Channels per vector register. A convolution with at most this many input channels is thin."""
FEW: Final = 16
SHALLOW: Final = 48
"""A 1 × 1 convolution with at most this many input channels is slow, and one with at most `FEW` is slower."""
NARROW: Final = 32
"""A 1 × 1 convolution with at most this many output channels is slow."""
LARGE: Final = 56
"""A 1 × 1 convolution whose output side is at least this many pixels long is slow."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of a network; the sides of its input and output images are in pixels.

    The side of an image or kernel that is not square is that of a square with the same area. It need not be a
    whole number.
    """

    kind: Literal["conv", "depthwise", "relu", "add", "pool"]
    in_side: Side
    out_side: Side
    in_channels: Size
    out_channels: Size
    kernel: Side
    stride: Size

    @property
    def outputs(self) -> int:
        """Number of output values."""
        return round(self.out_side**2) * self.out_channels

    @property
    def inputs(self) -> int:
        """Number of input values."""
        return round(self.in_side**2) * self.in_channels


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Additional operations for layers that are slower than their number of operations suggests.

    Each field is the number of additional operations per operation of the layers described below the field
    (for ``outputs``: per output value). `INTO` states the class of work to which they are added.
    """

    odd: float = 0.0
    """Additional operations for 1 × 1 convolutions whose input channel count is not divisible by four."""
    outputs: float = 0.0
    """Additional operations for each output value of 1 × 1 convolutions."""
    large: float = 0.0
    """Additional operations for 1 × 1 convolutions whose output side is at least `LARGE` pixels long."""
    few: float = 0.0
    """Additional operations for 1 × 1 convolutions with up to `FEW` input channels."""
    shallow: float = 0.0
    """Additional operations for 1 × 1 convolutions with up to `SHALLOW` input channels."""
    narrow: float = 0.0
    """Additional operations for 1 × 1 convolutions with up to `NARROW` output channels."""
    strided: float = 0.0
    """Additional operations for depthwise convolutions with a stride of two or more."""


INTO: Final[Mapping[str, str]] = {
    "odd": "thin_flop",
    **dict.fromkeys(("outputs", "large", "few", "shallow", "narrow"), "pointwise_flop"),
    "strided": "depthwise_flop",
}
"""Maps each field of `Weights` to the field of `StepWork` to which it adds operations."""


def read_networks(path: Path) -> dict[str, tuple[Layer, ...]]:
    """Read the layers of each network in a CSV file. Raises `ConfigError` if the file is invalid."""
    networks: dict[str, list[Layer]] = {}
    for place, line in csv_lines(path, ("network", *Layer.__struct_fields__)):
        networks.setdefault(line["network"], []).append(_layer(line, place))
    return {name: tuple(layers) for name, layers in networks.items()}


def _layer(line: Mapping[str, str], place: str) -> Layer:
    sizes = {name: line[name] for name in Layer.__struct_fields__ if name != "kind"}
    with as_config_error(place, ConfigError, ValueError, TypeError):
        return convert({"kind": line["kind"], **{name: int(size) for name, size in sizes.items()}}, Layer)


def counts(layers: Iterable[Layer]) -> Counter[str]:
    """Count the work for each field of `StepWork`, and the operations that each field of `Weights` scales."""
    found: Counter[str] = Counter()
    for layer in layers:
        if layer.kind in ("conv", "depthwise"):
            found.update(_convolution(layer))
        elif layer.kind != "relu":
            found.update(_elementwise(layer))
    return found


def weighted(found: Mapping[str, float], weights: Weights) -> StepWork:
    """Return the work counted by `counts`, including the additional operations of ``weights``.

    >>> layer = Layer(
    ...     kind="conv", in_side=7, out_side=7, in_channels=64, out_channels=64, kernel=1, stride=1
    ... )
    >>> weighted(counts([layer]), Weights()).pointwise_flop
    401408.0
    >>> weighted(counts([layer]), Weights(outputs=2.0)).pointwise_flop - 401408.0
    6272.0
    """
    amounts = {name: float(found.get(name, 0.0)) for name in StepWork.__struct_fields__}
    for name, into in INTO.items():
        amounts[into] += getattr(weights, name) * found.get(name, 0.0)
    return StepWork(**amounts)


def _convolution(layer: Layer) -> dict[str, float]:
    taps = round(layer.kernel**2)
    if layer.kind == "depthwise":
        flop, values = 2.0 * layer.outputs * taps, layer.out_channels * taps
        own = {"depthwise_flop": flop, "depthwise_planes": float(layer.out_channels)}
        own |= {"strided": flop} if layer.stride > 1 else {}
    else:
        values = layer.in_channels * layer.out_channels * taps
        flop = 2.0 * round(layer.out_side**2) * values
        own = _dense(layer, flop)
    return own | {"calls": 1.0, "conv_bytes": float(FLOAT_BYTES * (layer.inputs + layer.outputs + values))}


def _dense(layer: Layer, flop: float) -> dict[str, float]:
    if layer.in_channels <= THIN:
        return {"thin_flop": flop}
    if layer.kernel > 1:
        return {"conv_flop": flop}
    slow = {
        "odd": layer.in_channels % THIN > 0,
        "large": layer.out_side >= LARGE,
        "few": layer.in_channels <= FEW,
        "shallow": layer.in_channels <= SHALLOW,
        "narrow": layer.out_channels <= NARROW,
    }
    more = {name: flop for name, holds in slow.items() if holds}
    return {"pointwise_flop": flop, "outputs": float(layer.outputs), **more}


def _elementwise(layer: Layer) -> dict[str, float]:
    if layer.kind == "add":
        return {"elementwise_bytes": 3.0 * FLOAT_BYTES * layer.outputs, "calls": 1.0}
    return {"pool_bytes": float(FLOAT_BYTES * (layer.inputs + layer.outputs)), "calls": 1.0}


def networks_named(networks: Mapping[str, object], wanted: Sequence[str], place: object) -> None:
    """Raise `ConfigError` for the first network in ``wanted`` that ``networks`` does not contain."""
    for name in wanted:
        if name not in networks:
            others = f"only those of {len(networks)} others"
            raise ConfigError(f"{place}: contains no layers of network {name!r}, {others}")
