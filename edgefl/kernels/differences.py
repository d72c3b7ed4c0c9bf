"""An update and its checksum: Δ = y − w."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgefl.kernels import arguments
from edgefl.kernels.arguments import Floats


class Delta(NamedTuple):
    """What `edgefl.kernels.delta` was given, checked."""

    out: Floats
    trained: Floats
    base: Floats

    def subtract(self) -> None:
        """out ← trained − base, in a pass of its own."""
        with np.errstate(all="ignore"):
            np.subtract(self.trained, self.base, out=self.out)


def checked(out: object, trained: object, base: object) -> Delta:
    """The three as flat float32 arrays of one size; ``out`` overlaps neither of the others.

    Raises ValueError or TypeError naming the argument.
    """
    arrays: list[Floats] = []
    for name, value in (("out", out), ("trained", trained), ("base", base)):
        array = arguments.flat(name, value, writable=name == "out")
        if array.dtype != np.float32:
            raise TypeError(f"{name} must be float32 (got {array.dtype})")
        if arrays and array.size != arrays[0].size:
            raise ValueError(f"{name} must have {arrays[0].size} elements, as out has (got {array.size})")
        if arrays and np.may_share_memory(array, arrays[0]):
            raise ValueError(f"out must not overlap {name}")
        arrays.append(array)
    return Delta(*arrays)
