"""Tests of partitions of the training examples among clients, and of random streams by seed and name."""

from __future__ import annotations

import copy
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import ConfigError
from edgefl.experiment import Data
from edgefl.learning.partition import partition
from edgefl.seeds import stream

FAST, SLOW = "pixel-4", "moto-g4"


def balanced(examples: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(examples) % classes)


def assert_shared_out(
    parts: list[np.ndarray], clients: int, examples: int, *, all_of_them: bool = True
) -> None:
    rows = np.concatenate(parts)
    assert len(parts) == clients
    assert all(len(part) >= 1 and part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < examples
    if all_of_them:
        assert len(rows) == examples


@given(
    st.sampled_from(["iid", "dirichlet"]),
    st.integers(1, 40),
    st.integers(0, 160),
    st.integers(1, 6),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**31),
)
def test_each_client_has_equally_many_examples_and_each_example_one_client(
    kind, clients, more, classes, alpha, seed
):
    rng, examples = np.random.default_rng(seed), clients + more
    labels = rng.choice(classes, examples, p=rng.dirichlet(np.full(classes, 0.5)))
    spec = Data(partition=kind, alpha=alpha)
    parts = partition(spec, labels, [FAST] * clients, classes, seed)
    assert_shared_out(parts, clients, examples)
    assert {len(part) for part in parts} <= {examples // clients, -(-examples // clients)}
    again = partition(spec, labels, [FAST] * clients, classes, seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**31))
def test_shards_give_each_client_the_wanted_number_of_classes(clients, classes, per_client, seed):
    labels = balanced(classes * 40, classes)
    spec = Data(partition="shards", classes_per_client=per_client)
    if per_client > classes:
        with pytest.raises(ConfigError, match="classes_per_client must be from 1 to"):
            partition(spec, labels, [FAST] * clients, classes, seed)
        return
    parts = partition(spec, labels, [FAST] * clients, classes, seed)
    assert_shared_out(parts, clients, len(labels), all_of_them=clients * per_client >= classes)
    held = [np.unique(labels[part]) for part in parts]
    assert all(len(one) == per_client for one in held)
    holders = np.bincount(np.concatenate(held), minlength=classes)
    assert holders.max() - holders.min() <= 1


def test_shards_give_each_client_its_classes_with_one_example_per_place():
    labels = balanced(30, 3)
    parts = partition(Data(partition="shards", classes_per_client=2), labels, [FAST] * 15, 3, 0)
    assert all(len(np.unique(labels[part])) == 2 for part in parts)


@given(
    st.lists(st.sampled_from([FAST, SLOW, "pi-4"]), min_size=3, max_size=20),
    st.sets(st.integers(0, 4), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_by_device_gives_exactly_the_labels(profiles, wanted, seed):
    profiles = [FAST, *profiles]
    labels = balanced(500, 5)
    spec = Data(partition="by-device", labels={FAST: sorted(wanted)})
    parts = partition(spec, labels, profiles, 5, seed)
    assert_shared_out(parts, len(profiles), 500, all_of_them=set(profiles) != {FAST})
    for profile, part in zip(profiles, parts, strict=True):
        expected = wanted if profile == FAST else set(range(5)) - wanted
        assert set(labels[part].tolist()) == expected
    for counts in np.transpose([np.bincount(labels[part], minlength=5) for part in parts]):
        held = counts[counts > 0]
        assert not len(held) or np.ptp(held) <= 1


HIGH, LOW = [4, 5, 6, 7, 8, 9], [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("labels", "profiles", "examples", "classes", "held", "sizes"),
    [
        # As in FedStaleWeight's experiments.
        (
            {FAST: HIGH, SLOW: LOW},
            [FAST] * 10 + [SLOW] * 5,
            6000,
            10,
            [HIGH] * 10 + [LOW] * 5,
            [360] * 10 + [480] * 5,
        ),
        # Every label is held by at least one listed profile. An unlisted profile gets examples of all labels.
        ({FAST: [0], SLOW: [1]}, [FAST, SLOW, "pi-4"], 200, 2, [[0], [1], [0, 1]], [50, 50, 100]),
        # No profile holds label 2: its examples are left out.
        ({FAST: [0, 1]}, [FAST, FAST], 200, 3, [[0, 1]] * 2, [66, 68]),
    ],
    ids=["FedStaleWeight", "all labels", "not all labels"],
)
def test_profiles_hold_the_examples_of_their_labels(labels, profiles, examples, classes, held, sizes):
    spec, given = Data(partition="by-device", labels=labels), balanced(examples, classes)
    parts = partition(spec, given, profiles, classes, seed=0)
    assert_shared_out(parts, len(profiles), examples, all_of_them=sum(sizes) == examples)
    assert [np.unique(given[part]).tolist() for part in parts] == held
    assert [len(part) for part in parts] == sizes


def test_dirichlet_is_skewed_by_a_small_alpha_and_even_with_a_large_one():
    labels = balanced(10_000, 10)

    def largest_share(alpha: float) -> float:
        parts = partition(Data(partition="dirichlet", alpha=alpha), labels, [FAST] * 100, 10, seed=1)
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    assert largest_share(0.1) > 0.5
    assert largest_share(1000.0) < 0.25


@pytest.mark.parametrize(("alpha", "like"), [(5e-324, 1e-300), (1e-310, 1e-300), (1e308, 1e300)])
def test_an_extreme_alpha_gives_the_shares_of_a_small_or_large_one(alpha, like):
    labels = np.repeat(np.arange(10), 100)
    one, other = (
        partition(Data(partition="dirichlet", alpha=value), labels, [FAST] * 20, 10, seed=1)
        for value in (alpha, like)
    )
    assert all(map(np.array_equal, one, other))


@pytest.mark.parametrize("alpha", [1e-5, 1e-300])
def test_with_a_tiny_alpha_each_client_gets_one_class_also_after_others_are_used_up(alpha):
    labels = balanced(10_000, 10)
    parts = partition(Data(partition="dirichlet", alpha=alpha), labels, [FAST] * 100, 10, seed=1)
    assert [len(np.unique(labels[part])) for part in parts] == [1] * 100


def test_dirichlet_shares_follow_the_data():
    # A class with 1% of the examples must not become a tenth of the clients' examples, whatever α is.
    labels = np.repeat(np.arange(2), (9900, 100))
    parts = partition(Data(partition="dirichlet", alpha=100.0), labels, [FAST] * 10, 2, seed=0)
    assert max(float((labels[part] == 1).mean()) for part in parts) < 0.05


def test_clients_that_are_served_last_are_not_the_last_of_the_fleet():
    # With a tiny α the clients served last get the examples that are left.
    labels = balanced(2000, 10)
    late = []
    for seed in range(20):
        parts = partition(Data(partition="dirichlet", alpha=0.05), labels, [FAST] * 20, 10, seed)
        kinds = np.array([len(np.unique(labels[part])) for part in parts])
        late.append(kinds[10:].mean() - kinds[:10].mean())
    assert abs(np.mean(late)) < 0.5


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards"])
def test_another_seed_gives_another_partition(kind):
    labels = balanced(200, 10)
    one, other = (partition(Data(partition=kind), labels, [FAST] * 5, 10, seed) for seed in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("spec", "profiles", "message"),
    [
        (Data(), [FAST] * 31, "31 clients cannot share 30 training examples"),
        (Data(partition="shards", classes_per_client=4), [FAST], r"from 1 to 3 \(got 4\)"),
        (
            Data(partition="shards", classes_per_client=2),
            [FAST] * 16,  # 32 places for 30 examples
            r"16 clients cannot hold 2 classes each: class \d has 10 examples for 11 clients",
        ),
        (Data(partition="by-device", labels={FAST: [3]}), [FAST], r"labels must be in \[0, 3\) \(got 3\)"),
        (
            Data(partition="by-device", labels={FAST: [0]}),
            [FAST] * 11 + [SLOW],
            "label 0 has 10 training examples for 11 clients that hold",
        ),
        (  # every client would hold an example of label 1, but one of them none of label 0
            Data(partition="by-device", labels={FAST: [0, 1], SLOW: [0]}),
            [FAST] * 10 + [SLOW],
            "label 0 has 10 training examples for 11 clients that hold",
        ),
        (
            Data(partition="by-device", labels={FAST: [0, 1]}),
            [FAST] + [SLOW] * 11,
            "would hold no example; its labels have fewer examples than clients",
        ),
    ],
)
def test_an_impossible_partition_is_one_line(spec, profiles, message):
    with pytest.raises(ConfigError, match=message) as caught:
        partition(spec, balanced(30, 3), profiles, 3, seed=0)
    assert "\n" not in str(caught.value)


def test_labels_beyond_the_classes_are_refused():
    with pytest.raises(ConfigError, match=r"labels must be in \[0, 2\) \(got 0 to 2\)"):
        partition(Data(), np.array([0, 1, 2]), [FAST], 2, seed=0)


def test_a_users_partition_cannot_change_the_labels(monkeypatch) -> None:
    module = ModuleType("splitting")

    def split(labels, profiles, rng):
        labels.sort()
        return np.array_split(np.arange(len(labels)), len(profiles))

    vars(module)["split"] = split
    monkeypatch.setitem(sys.modules, "splitting", module)
    monkeypatch.setenv("EDGEFL_MODULES", "splitting")
    labels = np.array([2, 0, 1, 0])
    partition(Data(partition="splitting:split"), labels, ["a", "b"], 3, seed=1)
    assert labels.tolist() == [2, 0, 1, 0]


def test_similar_names_are_different_streams() -> None:
    names = [(1, "a", 2, 3), (1, "a", 23), (12, "a", 3), (1, "a", 3, 2), (1, "a"), (1, "b"), (-1, "a")]
    drawn = [stream(seed, purpose, *ids).integers(2**63) for seed, purpose, *ids in names]
    assert len(set(drawn)) == len(names)


def test_neighbouring_streams_are_uncorrelated() -> None:
    """The numbers of a client's trips are consecutive, so their streams are neighbours."""
    count = 2000
    draws = np.array([stream(7, "trip", 0, trip).random(4) for trip in range(count)])
    bound = 4.5 / np.sqrt(count)  # a correlation of independent draws is beyond it once in 10⁵ times
    assert abs(np.corrcoef(draws, rowvar=False) - np.eye(4)).max() < bound
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < bound
    assert abs(draws.mean() - 0.5) < 4.5 * np.sqrt(1 / 12 / draws.size)


def test_a_stream_has_the_same_bits_on_every_machine_and_for_numpys_integers() -> None:
    """If these bits changed, the results of every run would change."""
    for seed, ids in ((1, [3, 12]), (int(np.int64(1)), np.array([3, 12]))):
        assert stream(seed, "trip", *ids).integers(2**63) == 5973142416120778127


def test_a_stream_can_be_copied() -> None:
    first = stream(1, "strategy")
    first.random()
    assert copy.deepcopy(first).random() == first.random()
