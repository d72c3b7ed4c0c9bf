"""Measure how much faster Flower's FedAvg is with edgefl's kernels: the average alone, and `aggregate_train`.

    python benchmarks/flower_average.py [--replies 32] [--parameters 1000000] [--turns 15]

This needs edgefl[flower]. The replies are whole messages, as a server receives them. The two averages take
turns with operations whose time is a lower limit for any average: a loop that only reads the bytes of the
replies, with one thread and with all threads, and the creation of the bytes of the result. The remaining code
of `aggregate_train` is Flower's: it checks the replies and averages their metrics.
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from edgefl import kernels
from edgefl.flower import fast


def sizes(parameters: int, layers: int) -> list[int]:
    """Return layer sizes that resemble a network's: a bias of 1% of the size follows each weight matrix."""
    share = [1.0 if i % 2 == 0 else 0.01 for i in range(layers)]
    found = [int(parameters * each / sum(share)) for each in share]
    return [parameters - sum(found[1:]), *found[1:]]


def reply(rng: np.random.Generator, layers: list[int]) -> Message:
    arrays = ArrayRecord([rng.standard_normal(size).astype(np.float32) for size in layers])
    content = RecordDict(
        {"arrays": arrays, "metrics": MetricRecord({"num-examples": int(rng.integers(1, 999))})}
    )
    sent = Metadata(1, "", 1, 0, "", "", created_at=0.0, ttl=1.0, message_type=MessageType.TRAIN)
    return Message(content=content, metadata=sent)


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def compare(layers: list[int], given: argparse.Namespace) -> None:
    rng = np.random.default_rng(1)
    replies = [reply(rng, layers) for _ in range(given.replies)]
    flower, ours = FedAvg(), fast(FedAvg())
    records, key = [each.content for each in replies], flower.weighted_by_key
    averages = [type(each).aggregate_train.__globals__["aggregate_arrayrecords"] for each in (flower, ours)]
    one, other = (average(records, key).to_numpy_ndarrays() for average in averages)
    off = max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
    print(f"{len(layers)} layers, {sum(layers):,} parameters; largest difference {off:.1e}")
    calls = [*(partial(each, records, key) for each in averages), *limits(records)]
    turns = [turn(calls, number) for number in range(given.turns)]
    show("the average", turns)
    show_limits(turns, faults(calls[1]))
    whole = [flower.aggregate_train, ours.aggregate_train]
    show(
        "all of aggregate_train", [[seconds(each, 1, replies) for each in whole] for _ in range(given.turns)]
    )


def turn(calls: list[Callable[[], object]], number: int) -> list[float]:
    """Return the time of each call in seconds.

    Flower's call runs first and leaves its data in the caches. The call that runs second may profit from
    this, so the other calls take turns in running second.
    """
    rest = len(calls) - 1
    order = [0, *(1 + (number + k) % rest for k in range(rest))]
    took = {place: seconds(calls[place]) for place in order}
    return [took[place] for place in range(len(calls))]


def limits(records: list[RecordDict]) -> list[Callable[[], object]]:
    """Return two functions that read the bytes of all replies, with one thread and with all threads, and a
    function that creates the bytes of the result."""
    from edgefl.lab import _probe

    pages = [record["arrays"] for record in records]
    layers = [[np.frombuffer(page[key].data, np.uint8) for page in pages] for key in pages[0]]

    def read(threads: int) -> None:
        for files in layers:
            for start in range(0, len(files), 64):  # `read` accepts at most 64 buffers per call
                _probe.read(files[start : start + 64], threads)

    def result() -> list[bytes]:
        return [b"\x01" * files[0].size for files in layers]

    return [partial(read, 1), partial(read, kernels.threads()), result]


def faults(call: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def show_limits(turns: list[list[float]], page_faults: int) -> None:
    one, all_of, result = (statistics.median(turn[i] for turn in turns) * 1e3 for i in (2, 3, 4))
    share = statistics.median((turn[3] + turn[4]) / turn[1] for turn in turns)
    print(
        f"    lower limit: reading the replies {all_of:.1f} ms ({one:.1f} with one thread), creating the "
        f"result {result:.1f} ms; together {share:.0%} of our time ({page_faults:,} page faults)"
    )


def show(what: str, turns: list[list[float]]) -> None:
    flower, ours = ([turn[i] * 1e3 for turn in turns] for i in (0, 1))
    ratio = statistics.median(turn[0] / turn[1] for turn in turns)
    print(
        f"  {what}: Flower {statistics.median(flower):.1f} ms (fastest {min(flower):.1f}), with our kernels "
        f"{statistics.median(ours):.1f} ms (fastest {min(ours):.1f}), {ratio:.1f} times faster"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare Flower's weighted average with ours.")
    parser.add_argument("--replies", type=int, default=32)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=15)
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    for layers in (1, 160):
        compare(sizes(given.parameters, layers), given)


if __name__ == "__main__":
    main()
