"""Binds a test's function to its arguments and to the result of its setup, and seeds random numbers."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from edgefl.loading import signature

HANDLE = "edge_device"
"""Name of the function's parameter that receives the device."""


def takes_device(function: Callable[..., Any]) -> bool:
    """Return True if the function has a parameter for the device."""
    return HANDLE in signature(function).parameters


def bound(
    function: Callable[..., Any],
    setup: Callable[..., Any] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: object,
) -> Callable[[], Any]:
    """Run the setup, and return the function bound to its arguments; coroutines are awaited.

    >>> bound(lambda made, one: (made, one), lambda one: one * 10, [3], {}, None)()
    (30, 3)
    """
    args, kwargs = list(args), dict(kwargs)
    if setup is not None:
        made = partial(setup, *args, **kwargs)
        args.insert(0, _awaited(made) if inspect.iscoroutinefunction(setup) else made())
    if takes_device(function):
        kwargs[HANDLE] = device
    run = partial(function, *args, **kwargs)
    return partial(_awaited, run) if inspect.iscoroutinefunction(function) else run


def seed() -> None:
    """Seed the random numbers of Python and, if they are imported, those of numpy and torch."""
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)


def _awaited(run: Callable[[], Coroutine[Any, Any, object]]) -> object:
    import asyncio  # under Valgrind, this takes longer than all other imports

    return asyncio.run(run())
