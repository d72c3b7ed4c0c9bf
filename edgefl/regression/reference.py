"""Short, fixed pieces of work that a function's CPU time is measured against.

The CPU time that the same work takes rises when a neighbour shares a cache or the clock falls: up to three
times was seen on a busy virtual machine. A reference that runs in turn with the function, and is like it,
rises with it: the ratio of the two is what can be compared between loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import nn

from edgefl.learning.flops import FlopCount
from edgefl.learning.randomness import torch_seed
from edgefl.limits.host_operations import sgd_step
from edgefl.regression.orders import ReferenceName

VERSION = 1
"""Of what the references compute: figures against another version do not compare."""

INTERPRETED_FLOP = 1.5e6
"""What a unit of interpreted code counts as. No profile knows a device's rate for it; assumed is that what
takes a host as long as a small training step takes a device as long, too."""

LITTLE = 0.1
"""Share of a small training step's FLOP a CPU second below which a function is interpreted code."""


class Reference(NamedTuple):
    """``run(n)`` does n units of work, each of ``flop`` floating-point operations."""

    name: ReferenceName
    flop: float
    operations: int
    """Calls into torch in a unit."""
    run: Callable[[int], None]


def make(name: ReferenceName) -> Reference:
    """The reference of that name, ready to run.

    >>> make("train-small").flop < make("train-large").flop
    True
    """
    if name == "interpreted":
        return Reference(name, INTERPRETED_FLOP, 0, _interpreted)
    with torch_seed(0):
        net, inputs = _NETS[name]()
    run = _training(net, inputs)
    with FlopCount() as count:
        run(1)
    return Reference(name, float(count.total), count.operations, run)


def most_like(flop: float, operations: int, cpu_s: float, small_flop_per_s: float) -> ReferenceName:
    """The reference that is most like a function of so many FLOP, calls into torch and CPU seconds.

    ``small_flop_per_s`` is what ``train-small`` computes in a CPU second here.

    >>> most_like(0.0, 0, 1.0, 4e9)
    'interpreted'
    """
    if not operations or flop < LITTLE * small_flop_per_s * cpu_s:
        return "interpreted"
    per_operation = math.log(max(1.0, flop / operations))

    def distance(name: ReferenceName) -> float:
        reference = make(name)
        return abs(math.log(reference.flop / reference.operations) - per_operation)

    return min(cast("list[ReferenceName]", list(_NETS)), key=distance)


def _small() -> tuple[nn.Module, torch.Tensor]:
    """Dominated by what a call into torch costs."""
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)), torch.randn(32, 64)


def _large() -> tuple[nn.Module, torch.Tensor]:
    """Dominated by convolutions and products."""
    net = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1568, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    return net, torch.randn(8, 1, 28, 28)


_NETS: dict[ReferenceName, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "train-small": _small,
    "train-large": _large,
}


def _training(net: nn.Module, inputs: torch.Tensor) -> Callable[[int], None]:
    """Steps of SGD whose rate is 0, so that each does what the one before did."""
    step = sgd_step(net, inputs, torch.arange(len(inputs)) % 10, 0.0)

    def run(units: int) -> None:
        for _ in range(units):
            step()

    return run


def _interpreted(units: int) -> None:
    for _ in range(units):
        counts: dict[int, int] = {}
        for number in range(4000):
            rest = number % 97
            counts[rest] = counts.get(rest, 0) + (number << 1)
        if sum(counts.values()) != 4000 * 3999:
            raise ArithmeticError("this interpreter cannot add")
