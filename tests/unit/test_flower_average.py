"""Tests that Flower's strategies give the same numbers with edgefl's weighted average as with Flower's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgefl import flower
from edgefl.errors import ConfigError
from edgefl.kernels import layers as layers_of_kernels

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'edgefl[flower]'")

from flwr.app import ArrayRecord, Message, MessageType, Metadata, MetricRecord, RecordDict  # noqa: E402
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays  # noqa: E402
from flwr.server import strategy as older  # noqa: E402
from flwr.serverapp import strategy as strategies  # noqa: E402
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords  # noqa: E402

Arrays = list[NDArray[Any]]
EXAMPLES = (10, 1, 300, 77, 42)

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:flwr")


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the vectors that edgefl's kernels sum."""
    sizes: list[int] = []
    ours = layers_of_kernels.sum_into

    def counted(out: Any, *given: Any) -> Any:
        sizes.append(out.size)
        return ours(out, *given)

    monkeypatch.setattr(layers_of_kernels, "sum_into", counted)
    return sizes


def layers(seed: int) -> Arrays:
    """Return layers in every memory order; some are not float32."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((7, 5)).astype(np.float32)
    return [
        weights,
        np.asfortranarray(rng.standard_normal((6, 4)).astype(np.float32)),
        rng.standard_normal((8, 9)).astype(np.float32)[::2, 1::3],
        np.array(rng.standard_normal(), np.float32),
        np.array(seed + 3, np.int64),
        rng.standard_normal(6).astype(np.float16),
        rng.standard_normal((2, 3)),
        np.zeros((0, 4), np.float32),
    ]


def plain(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((30, 20), (20,), (3, 3, 2, 2))]


def reply(arrays: Arrays, examples: int) -> Message:
    content = RecordDict(
        {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": examples, "loss": 0.5})}
    )
    sent = Metadata(1, "", 1, 0, "", "", created_at=0.0, ttl=1.0, message_type=MessageType.TRAIN)
    return Message(content=content, metadata=sent)


def replies(make: Callable[[int], Arrays]) -> list[Message]:
    return [reply(make(seed), examples) for seed, examples in enumerate(EXAMPLES)]


def answers(make: Callable[[int], Arrays]) -> list[tuple[Any, FitRes]]:
    status = Status(Code.OK, "")
    return [
        (None, FitRes(status, ndarrays_to_parameters(make(seed)), examples, {}))
        for seed, examples in enumerate(EXAMPLES)
    ]


def same(ours: Arrays, theirs: Arrays, within: float = 0.0) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(one, other, rtol=within, atol=within)


def test_layers_of_every_type_and_memory_order_have_flowers_average(
    summed: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO, "flwr")
    theirs, metrics = strategies.FedAvg().aggregate_train(1, replies(layers))
    assert summed == []
    ours, measured = flower.fast(strategies.FedAvg()).aggregate_train(1, replies(layers))
    assert list(ours) == list(theirs)
    assert measured == metrics
    same(ours.to_numpy_ndarrays(), theirs.to_numpy_ndarrays())
    assert ours["1"].data == theirs["1"].data
    assert summed == [35, 24, 12, 1, 0]
    assert "Flower averages 3 of 8 layers" in caplog.text


class Renamed(strategies.FedAvgM):  # type: ignore[misc]
    """A user's strategy that inherits from one of Flower's."""

    rounds = 0

    def aggregate_train(self, server_round: int, given: Any) -> Any:
        self.rounds += 1
        return super().aggregate_train(server_round, given)


class Direct(strategies.FedAvg):  # type: ignore[misc]
    """A user's strategy that calls Flower's function and the inherited method."""

    def aggregate_train(self, server_round: int, given: Any) -> Any:
        arrays = aggregate_arrayrecords([each.content for each in given], self.weighted_by_key)
        return arrays, super().aggregate_train(server_round, given)[1]


@pytest.mark.parametrize(
    ("make", "sums"),
    [
        (strategies.FedAvg, 3),
        (lambda: strategies.FedAvgM(server_learning_rate=0.5, server_momentum=0.9), 3),
        (strategies.FedAdagrad, 3),
        (strategies.FedAdam, 3),
        (strategies.FedYogi, 3),
        (lambda: strategies.FedProx(proximal_mu=0.1), 3),
        (lambda: strategies.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2), 3),
        (lambda: Renamed(server_learning_rate=0.5, server_momentum=0.9), 3),
        (Direct, 6),
    ],
)
def test_strategies_give_the_same_models(make: Callable[[], Any], sums: int, summed: list[int]) -> None:
    theirs, ours = make(), flower.fast(make())
    sent = ArrayRecord(plain(99))
    for strategy in (theirs, ours):  # as configure_train does
        is_momentum = isinstance(strategy, strategies.FedAvgM)
        strategy.current_arrays = sent if is_momentum else {key: each.numpy() for key, each in sent.items()}
    for number in (1, 2):
        one, other = (strategy.aggregate_train(number, replies(plain))[0] for strategy in (ours, theirs))
        same(one.to_numpy_ndarrays(), other.to_numpy_ndarrays())
    assert len(summed) == 2 * sums


def test_the_fast_strategy_is_of_the_same_class_and_the_given_one_is_not_changed(summed: list[int]) -> None:
    given = Renamed(fraction_train=0.3)
    ours = flower.fast(given)
    assert isinstance(ours, Renamed)
    assert vars(ours) == vars(given)
    assert type(given) is Renamed
    assert type(ours).__name__ == "FastRenamed"
    assert strategies.FedAvg.aggregate_train.__globals__["aggregate_arrayrecords"] is aggregate_arrayrecords


def test_a_strategy_can_wrap_a_fast_one(summed: list[int]) -> None:
    dp = strategies.DifferentialPrivacyClientSideFixedClipping
    wrapped = dp(flower.fast(strategies.FedAvg()), 0.0, 1.0, num_sampled_clients=5)
    arrays, _ = wrapped.aggregate_train(1, replies(plain))
    theirs, _ = strategies.FedAvg().aggregate_train(1, replies(plain))
    same(arrays.to_numpy_ndarrays(), theirs.to_numpy_ndarrays())
    assert len(summed) == 3


@pytest.mark.parametrize("inplace", [True, False])
def test_older_strategies_have_flowers_average(inplace: bool, summed: list[int]) -> None:
    def without_integers(seed: int) -> Arrays:
        return [each for each in layers(seed) if each.dtype.kind == "f"]

    theirs = older.FedAvg(inplace=inplace).aggregate_fit(1, answers(without_integers), [])[0]
    ours = flower.fast(older.FedAvg(inplace=inplace)).aggregate_fit(1, answers(without_integers), [])[0]
    same(parameters_to_ndarrays(ours), parameters_to_ndarrays(theirs), 1e-6)
    assert summed == [35, 24, 12, 1, 0]


@pytest.mark.parametrize("make", [older.FedAdam, older.FedAvgM, older.FaultTolerantFedAvg])
def test_older_strategies_that_use_the_average_give_the_same_models(make: Any, summed: list[int]) -> None:
    first = ndarrays_to_parameters(plain(99))
    models = []
    for strategy in (make(initial_parameters=first), flower.fast(make(initial_parameters=first))):
        model = strategy.aggregate_fit(1, answers(plain), [])[0]
        models.append(parameters_to_ndarrays(model))
    same(models[1], models[0], 1e-6)
    assert len(summed) == 3


def test_invalid_replies_raise_flowers_errors(summed: list[int]) -> None:
    fast = flower.fast(strategies.FedAvg())
    odd = [*replies(plain)[:-1], reply([each[:2] for each in plain(4)], 5)]
    for strategy in (fast, strategies.FedAvg()):
        with pytest.raises(ValueError, match="could not be broadcast"):
            strategy.aggregate_train(1, odd)
    nothing = [reply(plain(seed), 0) for seed in range(2)]
    for strategy in (fast, strategies.FedAvg()):
        with pytest.raises(ZeroDivisionError):
            strategy.aggregate_train(1, nothing)
    torn = replies(plain)
    array = torn[0].content["arrays"]["1"]
    array.data = array.data[:-4]
    with pytest.raises(ValueError):
        fast.aggregate_train(1, torn)


@pytest.mark.parametrize(
    "strategy", [strategies.FedMedian(), older.FedMedian(), strategies.FedXgbBagging(), 3]
)
def test_a_strategy_without_flowers_average_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="does not use Flower's weighted average"):
        flower.fast(strategy)


def test_without_flower_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr.serverapp.strategy.strategy_utils", None)
    with pytest.raises(ConfigError, match=r"pip install 'edgefl\[flower\]'"):
        flower.fast(strategies.FedAvg())
