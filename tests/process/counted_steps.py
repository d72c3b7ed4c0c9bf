"""Functions whose work the process tests count."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

HELD: list[Any] = []
CALLS: list[int] = []
POOLS: list[ThreadPoolExecutor] = []
IMPORTED_NS = time.monotonic_ns()


def prepare(batches: int) -> Any:
    net = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 10))
    data = [(torch.randn(8, 1, 28, 28), torch.randint(10, (8,))) for _ in range(batches)]
    return net, torch.optim.Adam(net.parameters()), data


def normalised(images: torch.Tensor, loops: int) -> torch.Tensor:
    total = 0
    for number in range(loops):
        total += number % 3
    return images + total


def train(
    parts: Any,
    batches: int,
    *,
    loops: int = 10,
    leak_mib: int = 0,
    double: bool = False,
    twice: bool = False,
    sent: int = 0,
    edge_device: Any = None,
) -> None:
    net, optimizer, data = parts
    for images, labels in data:
        inputs = normalised(images, loops)
        if double:
            inputs = inputs.to(torch.float64).to(torch.float32)
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    for _ in range(1 + twice):
        evaluate(net, data)
    HELD.append(torch.zeros(leak_mib << 18))
    edge_device.send(bytes(1000 + sent))


def evaluate(net: nn.Module, data: Any) -> float:
    with torch.no_grad():
        return sum(float((net(images).argmax(1) == labels).float().mean()) for images, labels in data)


def sorts() -> float:
    return float(np.sort(np.arange(1_000_000) % 1013)[7])


def sorts_and_trains() -> None:
    nn.Linear(2, 1)(torch.full((1, 2), sorts())).sum().backward()


def pool() -> ThreadPoolExecutor:
    if not POOLS:
        POOLS.append(ThreadPoolExecutor(1))
    return POOLS[0]


def sorts_in_a_kept_thread() -> float:
    return pool().submit(sorts).result()


def adds(turns: int) -> int:
    total = 0
    for turn in range(turns):
        total += turn
    return total


def adds_in_a_kept_thread(turns: int) -> int:
    return pool().submit(adds, turns).result()


def sorts_later() -> None:
    for _ in range(5):
        pool().submit(sorts)


def sleeps() -> None:
    time.sleep(0.05)


def trains_and_sleeps() -> None:
    nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
    sleeps()


def sends_often(edge_device: Any) -> None:
    for _ in range(200):
        edge_device.send(b"x")


def counts_in_a_thread() -> None:
    thread = threading.Thread(target=normalised, args=(torch.ones(1), 100_000))
    thread.start()
    thread.join()


def keeps_python_objects(mib: int = 0) -> None:
    HELD.append(np.ones(max(1, mib << 17)))


def draws() -> int:
    """Execute a number of instructions that depends on global random numbers, which are seeded."""
    drawn = 0
    for _ in range(random.randrange(1000)):
        if np.random.random() < 0.5 and torch.rand(1) < 2:
            drawn += 1
    return drawn


def depends_on_time() -> None:
    for _ in range((time.monotonic_ns() - IMPORTED_NS) // 500_000):  # two counters are never that close
        pass


def first_call_is_another() -> None:
    CALLS.append(0)
    sum(range(1000 if len(CALLS) == 1 else 10))
    for _ in range(5000 if len(CALLS) == 1 else 10):
        pass


def waits_in_its_first_calls() -> None:
    CALLS.append(0)
    if len(CALLS) <= 6:
        time.sleep(0.01)


async def waits(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return sum(number for number in range(100))


def starts_a_program() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)


def wraps(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper() -> Any:
        return function()

    return wrapper


@wraps
async def wrapped_coroutine() -> None:
    sum(range(1000))


@wraps
def wrapped_generator() -> Iterator[int]:
    yield sum(range(1000))


def returns_lazily(kind: str) -> Iterator[Any]:
    numbers = range(1000)
    made: dict[str, Iterator[Any]] = {
        "generator": (number**2 for number in numbers),
        "map": map(str, numbers),
        "filter": filter(None, numbers),
        "zip": zip(numbers, numbers, strict=True),
    }
    return made[kind]


def returns_the_rest_of_a_generator() -> Iterator[int]:
    numbers = returns_lazily("generator")
    sum(next(numbers) for _ in range(100))
    return numbers


def misses_a_file() -> None:
    raise FileNotFoundError("caf\udce9")


def ends_a_program_and_a_fork() -> None:
    child = subprocess.Popen(["sleep", "300"])
    try:
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=10) == -signal.SIGINT
    finally:
        child.kill()
    if (pid := os.fork()) == 0:
        time.sleep(10)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0) == (pid, signal.SIGTERM)


def leaves_a_fork() -> int:
    if os.fork() == 0:
        time.sleep(3600)
        os._exit(0)
    return sum(number for number in range(100))


def ignores_its_children() -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return sum(number for number in range(100))


def measures_its_memory(keep: int = 100_000) -> int:
    tracemalloc.start()
    size = len(bytes(keep))
    tracemalloc.stop()
    return size


def leaves_a_thread() -> int:
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    return sum(number for number in range(100))


def exits_when_it_is_called_again() -> None:
    CALLS.append(0)
    if len(CALLS) > 1:
        os._exit(3)


def fails_when_it_is_called_again() -> None:
    CALLS.append(0)
    if len(CALLS) > 1:
        raise ValueError("called again")
