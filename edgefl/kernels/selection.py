"""Selects the back end (an argument, else EDGEFL_BACKEND, else the fastest) and the number of threads."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any, Protocol, cast

from edgefl.errors import ConfigError, unknown
from edgefl.kernels import cuda_library
from edgefl.kernels.arguments import Averages, Doubles, Ids, SumArguments
from edgefl.processes import usable_cores

NAMES = ("c", "numba", "cuda", "reference")
_BY_SPEED = ("c", "numba", "reference")

ABI = 8
"""Required ABI version of the native extension; equal to EF_ABI in kernels/edgefl_kernels.h."""


class Backend(Protocol):
    """The functions of a back end. All of them except ``observe`` check their arguments."""

    __name__: str

    def weighted_sum(self, given: SumArguments, threads: int) -> Doubles: ...
    def weighted_step(self, given: Any, threads: int) -> Doubles: ...
    def quantize(self, given: Any, threads: int) -> float: ...
    def trimmed_mean(self, given: Any, threads: int) -> None: ...
    def products(self, given: Any, threads: int) -> Doubles: ...
    def field_sum(self, given: Any, threads: int) -> None: ...
    def field_encode(self, given: Any, threads: int) -> int: ...
    def field_decode(self, given: Any, threads: int) -> int: ...
    def sq_norm(self, update: object, scale: object | None, threads: int) -> float: ...
    def checksum(self, update: object, threads: int) -> int: ...
    def delta(self, out: object, trained: object, base: object) -> int: ...
    def observe(self, averages: Averages, ids: Ids, values: Doubles, means: Doubles) -> None: ...


_loaded: dict[str | None, Backend] = {}


def backends() -> dict[str, str]:
    """Map the name of each back end to ``"ok"``, or to the reason why it is not available.

    >>> backends()["reference"]
    'ok'
    """
    return {name: _problem(name) or "ok" for name in NAMES}


def backend(name: str | None = None) -> str:
    """Return the name of the back end selected by ``name`` (None: the default).

    Raises ConfigError if the back end is unknown or not available.

    >>> backend("reference")
    'reference'
    """
    return select(name).__name__.rpartition("_")[2]


def select(name: str | None) -> Backend:
    """Return the module of the back end with this name (None: the default).

    Raises ConfigError if the back end is unknown or not available.
    """
    if name is None:
        name = os.environ.get("EDGEFL_BACKEND") or None
    found = _loaded.get(name)
    if found is not None:
        return found
    if name is None:
        _loaded[None] = fastest()
        return _loaded[None]
    if name not in NAMES:
        raise ConfigError(unknown("kernel back end", name, NAMES))
    if (problem := _problem(name)) is not None:
        raise ConfigError(f"kernel back end {name!r} is not available: {problem}")
    try:
        _loaded[name] = cast(Backend, importlib.import_module(f"edgefl.kernels.backend_{name}"))
    except ImportError as error:
        raise ConfigError(f"kernel back end {name!r} is not available: {error}") from error
    return _loaded[name]


def fastest() -> Backend:
    """Return the fastest available CPU back end, regardless of EDGEFL_BACKEND."""
    return select(next(each for each in _BY_SPEED if _problem(each, refuse_stale=True) is None))


def _problem(name: str, *, refuse_stale: bool = False) -> str | None:
    """Return the reason why a back end is not available; None if it is available.

    With ``refuse_stale``, raise `ConfigError` if the C extension is outdated.
    """
    if name == "c":
        try:
            extension = importlib.import_module("edgefl.kernels._c")
        except ImportError as error:
            if importlib.util.find_spec("edgefl.kernels._c") is None:
                folder = os.path.dirname(__file__)
                return f"not built in {folder}: perhaps no C compiler; EDGEFL_REQUIRE_C=1 shows the error"
            return f"does not load: {error}"
        built = getattr(extension, "ABI", None)
        if built == ABI:
            return None
        stale = f"stale: its ABI is {built}, this edgefl needs {ABI}; build it again (`make`, or pip install)"
        if refuse_stale:
            raise ConfigError(f"kernel back end 'c' is {stale}")
        return stale
    if name == "numba":
        return None if importlib.util.find_spec("numba") else "numba is not installed"
    return cuda_library.problem() if name == "cuda" else None


# ---- threads ---------------------------------------------------------------------------------------

_MAX_THREADS = 16
"""Default limit on the number of threads: a few cores of a large host saturate its memory bandwidth."""

_threads = 0


def threads() -> int:
    """Return the maximum number of threads per call. The default is one per usable core, but at most 16."""
    global _threads
    if _threads == 0:
        _threads = min(usable_cores(), _MAX_THREADS)
    return _threads


def set_threads(n: int | None) -> None:
    """Set the maximum number of threads per call (None: the default), and end the idle threads.

    Results do not depend on this number. The next call that needs threads starts new ones.

    >>> set_threads(1); threads()
    1
    >>> set_threads(None)
    """
    global _threads
    if n is not None and (isinstance(n, bool) or not isinstance(n, int)):
        raise TypeError(f"threads must be an integer or None (got {n!r})")
    if n is not None and n < 1:
        raise ValueError(f"threads must be at least 1 (got {n})")
    for name in ("c", "numba"):
        if (module := sys.modules.get(f"edgefl.kernels.backend_{name}")) is not None:
            module.close_pool()
    _threads = n or 0
