"""Optional native extension that measures memory bandwidth, built from ``kernels/probe.c`` by setup.py."""

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

def read(buffers: Iterable[NDArray[Any]], threads: int, /) -> int: ...
def triad(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], scalar: float, threads: int, /) -> None: ...
