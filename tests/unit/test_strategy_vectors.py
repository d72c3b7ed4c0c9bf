"""Tests of vectors that are exchanged in addition to the model: their sums, and errors."""

from __future__ import annotations

import copy
import pickle
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from edgefl import experiment, kernels
from edgefl.core import Core
from edgefl.core.events import Sum
from edgefl.errors import ConfigError, RunError
from edgefl.kernels.steps import ServerOptimizer
from edgefl.learning.rule import LocalRule, check_terms
from edgefl.parameters.buffer import ParameterBuffer, Shape, blocks, with_scales
from edgefl.run.aggregator import Aggregator
from edgefl.strategies import LocalTerms, Step, VectorSum
from edgefl.strategies.base import TripInputs
from edgefl.strategies.fedavg import FedAvg
from edgefl.strategies.scaffold import Scaffold
from edgefl.testing import fleet, run_in_memory

D = 300
FLEET = ("pi-4", "moto-g4")
MODEL, FIRST, SECOND = blocks(D, 2)
SIZE = SECOND.stop
WEIGHTS = (0.5, 0.25)


def make(update_format: str = "float32") -> tuple[Aggregator, list[Any]]:
    """Return an aggregator of a model, two exchanged vectors and a server vector, and two decoded updates."""
    rng = np.random.default_rng(3)
    buffer = ParameterBuffer.create(Shape(SIZE, 2, 2, 2, update_format))
    buffer.model(0)[:] = rng.normal(size=SIZE)
    for vector in buffer.vectors(0):
        vector[MODEL] = rng.normal(size=D)
    buffer.publish(version=0, entry=0)
    momentum = ServerOptimizer(lr=0.5, momentum=0.9)
    made = Aggregator(buffer, momentum, blocks=[MODEL, FIRST, SECOND], exchanged=("a", "b"), own=("h",))
    updates = []
    for task in range(2):
        lease = made.lease(task=task, client=task, version=0)
        made.fetched(lease.slot)
        update = rng.normal(size=SIZE).astype(np.float32)
        scales = buffer.scales(lease.slot)
        kernels.quantize(buffer.slot(lease.slot), update, scales=scales)
        values = buffer.slot(lease.slot)
        seen = with_scales(kernels.checksum(values), scales)
        buffer.written(lease.slot, task=task, checksum=seen)
        decoded = np.empty(SIZE, np.float32)
        kernels.weighted_sum(decoded, None, [values], [1.0], scales=None if scales is None else [scales])
        updates.append(decoded)
    return made, updates


PARTS = {
    "a": VectorSum((2.0, -1.0), base_scale=0.75, into_model=0.1),
    "h": VectorSum((1.0, 3.0), base_scale=0.0, into_model=-0.5),
}


@pytest.mark.parametrize("update_format", ["float32", "bfloat16", "int8"])
def test_each_block_is_summed_with_the_weights_of_the_step(update_format: str) -> None:
    made, updates = make(update_format)
    with closing(made.buffer) as buffer:
        old, velocity = buffer.model(0).copy(), buffer.vectors(0)[0].copy()
        assert made.sum(Sum(1, (0, 1), WEIGHTS, 1.0, PARTS), 1).bad == ()
        new, (velocity1, h1) = buffer.model(1), buffer.vectors(1)

        def summed(weights: Any, block: slice) -> Any:
            return sum(w * update[block] for w, update in zip(weights, updates, strict=True))

        wanted_velocity = 0.9 * velocity[MODEL] + summed(WEIGHTS, MODEL)
        wanted_a = 0.75 * old[FIRST] + summed((2.0, -1.0), FIRST)
        wanted_h = summed((1.0, 3.0), MODEL)
        wanted = old[MODEL] + 0.5 * wanted_velocity + 0.1 * wanted_a - 0.5 * wanted_h
        for got, want in (
            (velocity1[MODEL], wanted_velocity),
            (new[FIRST], wanted_a),
            (new[SECOND], old[SECOND] + summed(WEIGHTS, SECOND)),
            (h1[MODEL], wanted_h),
            (new[MODEL], wanted),
        ):
            np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


def test_a_step_without_parts_keeps_the_servers_vectors() -> None:
    made, _ = make()
    with closing(made.buffer) as buffer:
        h = buffer.vectors(0)[1][MODEL].copy()
        assert made.sum(Sum(1, (0, 1), WEIGHTS), 1).bad == ()
        np.testing.assert_array_equal(buffer.vectors(1)[1][MODEL], h)


@pytest.mark.parametrize("place", [0, FIRST.start, SIZE - 1])
def test_an_update_with_nan_anywhere_is_bad_and_one_with_a_wrong_checksum_is_altered_too(place: int) -> None:
    made, _ = make()
    with closing(made.buffer) as buffer:
        slot = made.leases[1].slot
        buffer.slot(slot)[place] = np.float32("nan")
        result = made.sum(Sum(1, (0, 1), WEIGHTS), 1)
        assert (result.bad, result.altered) == ((1,), (1,))
        buffer.checksum[slot] = kernels.checksum(buffer.slot(slot))
        result = made.sum(Sum(1, (0, 1), WEIGHTS), 1)
        assert (result.bad, result.altered) == ((1,), ())
        assert buffer.latest == (0, 0)


def test_an_infinite_sum_of_a_vector_is_detected() -> None:
    made, _ = make()
    with closing(made.buffer):
        parts = {"h": VectorSum((1e38, 1e38), into_model=1e30)}
        with np.errstate(over="ignore", invalid="ignore"):
            assert made.sum(Sum(1, (0, 1), WEIGHTS, 1.0, parts), 1).bad != ()


@dataclass(frozen=True, kw_only=True)
class Odd(FedAvg):
    vectors: ClassVar[tuple[str, ...]] = ("c",)
    part: Any = None
    name: str = "c"

    def step(self, state: Any, view: Any) -> Step | None:
        step = super().step(state, view)
        return None if step is None else step._replace(parts={self.name: self.part})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"part": VectorSum([1.0])}, "a weight of c for each of 2 updates, got 1"),
        ({"part": VectorSum([1.0, float("nan")])}, r"finite numbers for c, got VectorSum"),
        ({"part": VectorSum([1.0, 1.0], into_model=float("inf"))}, "finite numbers for c"),
        ({"part": VectorSum([1.0, 1.0]), "name": "d"}, "parts of c, got 'd'"),
        ({"part": 3}, "strategy Odd.step raised TypeError"),
    ],
)
def test_a_step_with_invalid_parts_ends_the_run_with_an_error(fields: Any, message: str) -> None:
    core = Core(Odd(cohort=2, **fields), fleet(2), 0, experiment.Stop(versions=1))
    with pytest.raises(RunError, match=message):
        run_in_memory(core, [1.0, 1.0])


def test_names_of_vectors_must_be_a_tuple_and_unique() -> None:
    class Letter(FedAvg):
        vectors = "c"  # type: ignore[assignment]

    class Twice(FedAvg):
        vectors = ("c",)
        client_vectors = ("c",)

    with pytest.raises(ConfigError, match=r"^Letter.vectors must be a tuple of names, got 'c'$"):
        Letter()
    with pytest.raises(ConfigError, match=r"^Twice: names of vectors must be unique, got c, c$"):
        Twice()


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (LocalTerms(control=("d", "c_i")), r"vector 'd' not found; available: c$"),
        (LocalTerms(control=("c", "d")), r"vector 'd' not found; .*available: c_i$"),
        (LocalTerms(linear="g"), r"vector 'g' not found; available: c_i$"),
        (LocalTerms(lr={"pi4": 0.5}), r"lr: device of the fleet 'pi4' not found; did you mean 'pi-4'\?"),
        (LocalTerms(lr=(1.0,)), r"lr: must be 2 factors, got 1$"),
        (LocalTerms(lr={"pi-4": 0.0}), r"lr: factors must be finite and above 0, got 0.0$"),
    ],
)
def test_local_terms_with_an_unknown_vector_or_wrong_factors_are_refused(
    terms: LocalTerms, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^Scaffold.local_rule: {message}"):
        check_terms(Scaffold(), LocalRule(terms=terms), FLEET)


def test_scaffold_accepts_its_own_terms_and_factors_but_no_momentum() -> None:
    own = Scaffold().local_rule()
    for terms in (own, LocalTerms(lr=np.array([1.0, 0.5]))):
        check_terms(Scaffold(), LocalRule(terms=terms), FLEET)
    with pytest.raises(ConfigError, match=r"^training.momentum: must be 0 with Scaffold, .* got 0.9$"):
        check_terms(Scaffold(), LocalRule(terms=own, momentum=0.9), FLEET)


@dataclass(frozen=True, kw_only=True)
class Writes(FedAvg):
    vectors: ClassVar = ("c",)
    client_vectors: ClassVar = ("own",)
    target: str = ""

    def end_trip(self, model: Any, given: Any) -> None:
        if self.target:
            vector = given.start if self.target == "start" else given.vectors["c"]
            vector += 1.0
        given.kept["own"] = given.kept["own"] + 1.0


@pytest.mark.parametrize("target", ["", "start", "vectors"])
def test_a_client_can_write_to_its_own_vectors_but_not_to_the_servers(target: str) -> None:
    """The downloaded model is in the server's memory, and other clients train from it too."""
    core = Core(Writes(target=target, cohort=2), fleet(2), seed=1, stop=experiment.Stop(versions=3))
    if target:
        with pytest.raises(ValueError, match="read-only"):
            run_in_memory(core, [1.0, 1.0])
    else:
        kept = run_in_memory(core, [1.0, 1.0]).kept
        assert {client: own["own"].tolist() for client, own in kept.items()} == {0: [3.0], 1: [3.0]}


def test_a_clients_vectors_can_be_copied_and_written_by_each_kind_of_assignment() -> None:
    own = np.zeros(2)
    given = TripInputs.of(0, np.zeros(2), {}, {}, {"own": own})
    pickled = pickle.loads(pickle.dumps(given))  # noqa: S301 (its own bytes)
    for made in (copy.copy(given.kept), copy.deepcopy(given).kept, pickled.kept):
        made["own"] = np.ones(2)
        assert made["own"].tolist() == [1.0, 1.0]
    given.kept.update(own=np.full(2, 2.0))
    assert own.tolist() == [2.0, 2.0]
    kept = given.kept
    kept |= {"own": np.full(2, 3.0)}
    assert own.tolist() == [3.0, 3.0]
    with pytest.raises(KeyError, match="other"):
        given.kept.update({"other": own})
