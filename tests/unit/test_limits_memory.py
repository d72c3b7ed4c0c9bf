"""The memory limit in processes of its own: past it an allocation fails, below it does not."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.limits import memory
from edgefl.limits.groups import Place
from edgefl.limits.memory import GroupMemory, MemoryLimit

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_DATA and /proc")
MIB = 1 << 20


def answer(body: Callable[[], Any], pipe: Connection) -> None:
    pipe.send(body())
    pipe.close()


def in_child(body: Callable[[], Any]) -> Any:
    """What ``body`` returns in a new process; the test's own process stays unlimited."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(body, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        child.join(30)
        ours.close()
        assert child.exitcode == 0


def past_the_limit() -> tuple[str, bool, bool]:
    limit = MemoryLimit(64)
    try:
        np.ones(128 * MIB, np.uint8)
        outcome = "allocated"
    except MemoryError:
        outcome = "MemoryError"
    return outcome, limit.over(), bool(np.ones(8 * MIB, np.uint8).all())


def below_the_limit() -> tuple[float, bool, float]:
    limit = MemoryLimit(256)
    kept = np.ones(64 * MIB, np.uint8)
    peak = limit.peak_mib  # it looks by itself
    used, over = limit.used_mib(), limit.over()
    del kept
    assert limit.used_mib() < used <= limit.peak_mib
    return used, over, peak


def watched_only() -> tuple[tuple[str, ...], bool]:
    limit = MemoryLimit(32)
    limit.lift()
    kept = np.ones(64 * MIB, np.uint8)
    over = limit.over()
    del kept
    return limit.mechanisms, over


def shared_memory_is_not_counted() -> tuple[float, bool]:
    import mmap

    limit = MemoryLimit(32)
    shared = mmap.mmap(-1, 64 * MIB)
    np.frombuffer(shared, np.uint8)[:] = 1
    return limit.used_mib(), limit.over()


@linux
def test_an_allocation_past_the_limit_fails_and_the_process_goes_on() -> None:
    assert in_child(past_the_limit) == ("MemoryError", False, True)


@linux
def test_memory_below_the_limit_is_given_and_seen() -> None:
    used, over, peak = in_child(below_the_limit)
    assert 60 <= used <= 80
    assert 60 <= peak <= 80
    assert not over


@linux
def test_the_watch_sees_what_the_rlimit_does_not_stop() -> None:
    assert in_child(watched_only) == (("watch",), True)


@linux
def test_the_servers_shared_buffer_is_not_the_clients_memory() -> None:
    used, over = in_child(shared_memory_is_not_counted)
    assert used < 16
    assert not over


def test_a_system_without_the_mechanisms_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def memory_info(self) -> object:
            return object()

    monkeypatch.setattr(memory.psutil, "Process", Process)
    limit = MemoryLimit(1)
    assert limit.mechanisms == ()
    assert limit.used_mib() == 0.0
    assert not limit.over()
    limit.lift()


@pytest.mark.parametrize("limited", [MemoryLimit, lambda mib: GroupMemory(Place(Path("none"), 1), mib)])
@pytest.mark.parametrize("limit_mib", [0, -1, float("nan"), float("inf")])
def test_the_limit_must_be_a_number_above_0(limited: Callable[[float], object], limit_mib: float) -> None:
    with pytest.raises(ValueError, match="limit_mib must be finite and above 0"):
        limited(limit_mib)
