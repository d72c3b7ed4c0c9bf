"""Other frameworks' own aggregation functions, where they are installed, on ``bench aggregate``'s arrays."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edgefl.bench.aggregate_work import Call, Floats, Work


def frameworks(work: Work) -> Iterator[tuple[str, Call]]:
    """Other frameworks' own functions on the same arrays, where they are installed.

    They average, so no base is added; their figures count the same bytes as everybody's.
    """
    parts = [[row[layer] for layer in work.layers] for row in work.stacked]
    examples = list(range(1, len(parts) + 1))
    expected = np.asarray(examples, np.float32) @ work.stacked / sum(examples)
    for name, make in (("Flower", _flower), ("NVFlare", _nvflare), ("pfl-research", _pfl)):
        try:
            call, exact = make(parts, examples)
        except ImportError:
            continue
        if exact:
            np.testing.assert_allclose(np.concatenate(call()), expected, rtol=1e-3, atol=1e-3, err_msg=name)
        yield name, call


def _flower(parts: Any, examples: list[int]) -> tuple[Callable[[], Any], bool]:
    module = importlib.import_module("flwr.server.strategy.aggregate")
    results = list(zip(parts, examples, strict=True))
    return lambda: module.aggregate(results), True


def _nvflare(parts: Any, examples: list[int]) -> tuple[Callable[[], Any], bool]:
    module = importlib.import_module("nvflare.app_common.aggregators.weighted_aggregation_helper")
    named = [{str(i): layer for i, layer in enumerate(layers)} for layers in parts]

    def call() -> list[Floats]:
        helper = module.WeightedAggregationHelper()
        with contextlib.redirect_stdout(io.StringIO()):  # some releases print each array's range
            for i, (data, weight) in enumerate(zip(named, examples, strict=True)):
                helper.add(data, weight, f"site-{i}", 0)
        return list(helper.get_result().values())

    return call, True


def _pfl(parts: Any, examples: list[int]) -> tuple[Callable[[], Any], bool]:
    """Its clients weigh their own statistics, so that this is the plain sum and one division."""
    statistics = importlib.import_module("pfl.stats").MappedVectorStatistics
    each = [
        statistics({str(i): layer for i, layer in enumerate(layers)}, weight=float(weight))
        for layers, weight in zip(parts, examples, strict=True)
    ]

    def call() -> Any:
        total = each[0]
        for other in each[1:]:
            total = total + other
        total.average()
        return total

    return call, False
