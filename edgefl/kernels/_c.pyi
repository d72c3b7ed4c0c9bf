"""The optional native extension, built from ``kernels/`` by setup.py.

A function returns None if it cannot use an argument. The caller then checks and converts the arguments by
`edgefl.kernels.arguments`, which raises the error.
"""

from collections.abc import Sequence
from typing import Any, Literal

from numpy.typing import NDArray

ABI: int
SOURCES: str
TILE: int
SCALE_BLOCK: int

def weighted_sum(
    out: object,
    base: object | None,
    updates: object,
    weights: object,
    scales: object | None,
    norms: NDArray[Any],
    checksums: object | None,
    threads: int,
    /,
    *step: object,
) -> Literal[True] | None:
    """``step`` holds the kind, constants, old and new state of an optimiser's step to apply after the sum."""

def quantize(
    out: object,
    update: object,
    scales: object | None,
    residual: object | None,
    left: object | None,
    weight: float,
    threads: int,
    /,
) -> float | None: ...
def trimmed_mean(
    out: object, updates: object, scales: object, network: object, trim: int, threads: int, /
) -> Literal[True] | None: ...
def products(out: object, updates: object, scales: object, threads: int, /) -> Literal[True] | None: ...
def field_sum(out: object, vectors: object, weights: object, threads: int, /) -> Literal[True] | None: ...
def field_encode(
    out: object, update: object, mask: object, clip: float | None, factor: float, threads: int, /
) -> int | None: ...
def field_decode(out: object, words: object, mask: object, factor: float, threads: int, /) -> int | None: ...
def sq_norm(update: object, scale: object | None, threads: int, /) -> float | None: ...
def checksum(buffer: object, threads: int, /) -> int | None: ...
def delta(out: object, trained: object, base: object, /) -> int | None: ...
def observe(
    mode: int,
    width: int,
    decay: float,
    count: NDArray[Any],
    state: NDArray[Any],
    ids: object,
    values: object,
    means: NDArray[Any],
    /,
) -> Literal[True] | None: ...
def isas() -> Sequence[str]: ...
def isa() -> str: ...
def set_isa(name: str, /) -> None: ...
def pool_size() -> int: ...
def close_pool() -> None: ...
