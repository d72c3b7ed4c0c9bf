"""Partition of the training examples among clients.

`iid`        examples are split evenly and at random.
`dirichlet`  as in Hsu et al. 2019 and FedBuff, every client holds the same number of examples (± 1), with
             class shares drawn from Dirichlet(α · p), where p contains the share of each class in the data.
             Examples are drawn without replacement; when a class is used up, the client gets more examples
             of its other classes, in proportion to their shares (redrawn if all these shares are 0).
`shards`     every client holds ``classes_per_client`` different classes; every class is held by the same
             number of clients (± 1) and split evenly among them, as in DeFedAvg, with two classes per client.
`by-device`  the clients of a device profile named in ``labels`` hold the labels listed there; each label is
             split evenly, at random, among all clients that hold it. Clients of other profiles hold the
             labels that ``labels`` does not contain, or all labels if it contains every label. This split is
             used in FedStaleWeight's experiment (§6.2).

`natural`    each client holds the examples of one user of the data set; users are drawn at random if there
             are more users than clients. LEAF's data sets have users.

`flwr:Partitioner`  a partitioner of Flower Datasets divides the examples (``flower_partition``); client i
             holds partition i.

`my_module:split`  the user's function is called as ``split(labels=…, profiles=…, rng=…)``. It returns an
             array of row numbers for each client in ``profiles``, drawn with the generator ``rng``. Several
             clients may hold the same rows, so that a fleet may be larger than the data set.

Every client holds at least one example and, except with a user's function, no example is held twice. All
examples are assigned, except those of users that are assigned to no client, and those of labels that no
client may hold. Such labels exist with ``shards`` if ``classes_per_client`` times the number of
clients is less than the number of classes, and with ``by-device`` if ``labels`` contains every profile but
not every label.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.experiment import Data
from edgefl.learning import flower_partition
from edgefl.learning.dataset import Targets
from edgefl.loading import call, load_attribute
from edgefl.seeds import stream
from edgefl.sequences import LazySequence

Rows = NDArray[np.int64]


class Parts(LazySequence[Rows]):
    """The row numbers of all clients in one int64 array: client 0 has the first ``sizes[0]`` rows, and so on.

    >>> parts = Parts(np.array([7, 4, 2]), np.array([2, 1])).ascending()
    >>> parts[0], parts.sizes, parts.owners
    (array([4, 7]), array([2, 1]), array([0, 0, 1]))
    """

    def __init__(self, rows: Rows, sizes: Rows) -> None:
        self.rows, self.sizes = rows, sizes
        self._ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])

    @classmethod
    def of(cls, parts: Sequence[NDArray[Any]]) -> Parts:
        """Create a partition from one array of row numbers per client."""
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        return cls(np.concatenate(parts, dtype=np.int64, casting="unsafe"), sizes)

    @classmethod
    def evenly(cls, rows: Rows, clients: int) -> Parts:
        """Split ``rows`` into consecutive parts of equal size; the first parts may have one row more."""
        each, more = divmod(len(rows), clients)
        sizes = np.full(clients, each)
        sizes[:more] += 1
        return cls(rows, sizes)

    @property
    def owners(self) -> Rows:
        """For each of ``rows``, the client that holds it."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def ascending(self) -> Parts:
        """Return the same partition with the rows of each client in ascending order."""
        first = self.owners * (int(self.rows.max(initial=0)) + 1)
        return Parts(np.sort(first + self.rows) - first, self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def make(self, index: int) -> Rows:
        return self.rows[self._ends[index] : self._ends[index + 1]]


def partition(
    spec: Data,
    targets: Targets,
    profiles: Sequence[str],
    classes: int | None,
    seed: int,
    owners: Rows | None = None,
    search_path: Sequence[Path] = (),
) -> Parts:
    """Assign rows to clients; return a sorted int64 array of row numbers for each client in ``profiles``.

    ``targets`` are the targets of the training examples, and ``owners`` contains the user of each example,
    for ``natural``. Raises `ConfigError` if the requested split is impossible, for example a split by class
    if the targets are not classes.

    >>> held = partition(Data(), np.arange(10) % 2, ["pi-4"] * 3, classes=2, seed=0)
    >>> [len(rows) for rows in held], sorted(np.concatenate(held).tolist()) == list(range(10))
    ([4, 3, 3], True)
    """
    clients, count = len(profiles), len(targets)
    if clients > count and ":" not in spec.partition:
        raise ConfigError(
            f"data: {clients} clients cannot share {count} training examples (each needs at least one)"
        )
    if classes is not None and (targets.min() < 0 or targets.max() >= classes):
        got = f"{targets.min()} to {targets.max()}"
        raise ConfigError(f"data: labels must be in [0, {classes}) (got {got})")
    rng = stream(seed, "partition")
    match spec.partition:
        case "iid":
            return Parts.evenly(rng.permutation(count), clients).ascending()
        case "natural":
            if owners is None:
                drawn = " and data.test_split = 'published'" if spec.test_split == "drawn" else ""
                raise ConfigError(
                    f"data.partition 'natural' needs data with users, such as data.name = 'leaf'{drawn}"
                )
            parts = _natural(owners, clients, rng)
        case flower if flower.startswith(flower_partition.PREFIX):
            rows = flower_partition.flower_rows(flower, spec.partition_args, targets, clients, rng)
            return _checked(flower, rows, targets, profiles)
        case own if ":" in own:
            return _own(own, targets, profiles, rng, search_path)
        case by_classes:
            if classes is None or targets.ndim > 1:
                raise ConfigError(
                    f"data.partition: {by_classes!r} needs one class per example, but these targets are "
                    f"{targets.dtype} of shape {targets.shape[1:]}; use iid or natural"
                )
            parts = _by_classes(spec, targets, profiles, classes, rng)
    return Parts.of(parts).ascending()


def hold_out(parts: Sequence[Rows], fraction: float, seed: int) -> tuple[Parts, Parts]:
    """Split the rows of each client into training and test rows.

    Unless ``fraction`` is 0, a client with two or more rows has at least one row of each kind. The choice
    depends only on the seed and the client's index. Rows stay sorted.

    >>> train, test = hold_out([np.arange(10), np.array([7])], 0.3, seed=0)
    >>> [len(rows) for rows in (*train, *test)], sorted([*train[0], *test[0]]) == list(range(10))
    ([7, 1, 3, 0], True)
    """
    if not fraction:
        whole = parts if isinstance(parts, Parts) else Parts.of(parts).ascending()
        return whole, Parts(whole.rows[:0], np.zeros(len(whole), np.int64))
    train, test = [], []
    for client, rows in enumerate(parts):
        count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
        order = stream(seed, "hold-out", client).permutation(rows) if count else rows
        train.append(order[count:])
        test.append(order[:count])
    return Parts.of(train).ascending(), Parts.of(test).ascending()


def _by_classes(
    spec: Data, labels: Rows, profiles: Sequence[str], classes: int, rng: np.random.Generator
) -> list[Rows]:
    clients = len(profiles)
    if spec.partition == "dirichlet":
        return _dirichlet(spec.alpha, labels, clients, classes, rng)
    if spec.partition == "shards":
        return _shards(spec.classes_per_client, labels, clients, rng)
    holders = _holders(spec.labels, profiles, classes)
    named = {label for profile, held in spec.labels.items() if profile in profiles for label in held}
    for label in sorted(named):
        if (count := int(np.sum(labels == label))) < (wanted := len(holders[label])):
            raise ConfigError(
                f"data.labels: label {label} has {count} training examples for {wanted} clients that hold "
                "it; each needs at least one: use fewer clients, or leave out the label"
            )
    return _split_labels(labels, holders, clients, rng)


def _own(
    name: str,
    targets: Targets,
    profiles: Sequence[str],
    rng: np.random.Generator,
    search_path: Sequence[Path],
) -> Parts:
    """Call the user's own split function and check its result."""
    split = load_attribute(name, "data.partition", search_path)
    arguments = {"labels": targets.copy(), "profiles": list(profiles), "rng": rng}
    try:
        parts = [np.asarray(part) for part in call(split, name, "data.partition", **arguments)]
    except (TypeError, ValueError):
        parts = []
    return _checked(name, parts, targets, profiles)


def _checked(name: str, parts: Sequence[NDArray[Any]], targets: Targets, profiles: Sequence[str]) -> Parts:
    """Check that each client has at least one row; return the rows of each client in ascending order.

    Raises `ConfigError` if the number of parts is not the number of clients, or if the rows of a part are not
    distinct rows of the data.
    """
    if len(parts) != len(profiles):
        raise ConfigError(
            f"data.partition: {name!r} must return one array of rows for each of {len(profiles)} clients "
            f"(got {len(parts)})"
        )
    right = [part.ndim == 1 and part.size > 0 and part.dtype.kind in "iu" for part in parts]
    wrong = {right.index(False)} if not all(right) else set[int]()
    if not wrong:
        found = Parts.of(parts)
        outside = found.owners[(found.rows < 0) | (found.rows >= len(targets))]
        if not len(outside):
            found = found.ascending()
            outside = found.owners[1:][(np.diff(found.rows) == 0) & (np.diff(found.owners) == 0)]
        wrong = set(outside[:1].tolist())
    for client in wrong:
        rows = parts[client]
        raise ConfigError(
            f"data.partition: {name!r}: client {client} needs one or more distinct whole numbers in "
            f"[0, {len(targets)}) (got {rows.dtype} of shape {rows.shape})"
        )
    return found


def _natural(owners: Rows, clients: int, rng: np.random.Generator) -> list[Rows]:
    users = np.unique(owners)
    if clients > len(users):
        raise ConfigError(
            f"data.partition 'natural': {clients} clients need one user each (the data have {len(users)})"
        )
    order = np.argsort(owners, kind="stable")
    starts = np.searchsorted(owners[order], users)
    by_user = np.split(order, starts[1:])
    return [by_user[index] for index in rng.permutation(len(users))[:clients]]


def _dirichlet(
    alpha: float, labels: Rows, clients: int, classes: int, rng: np.random.Generator
) -> list[Rows]:
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
    left = np.array([len(pool) for pool in pools])
    present = np.flatnonzero(left)
    alpha = min(max(alpha, 1e-300), 1e300)  # beyond these limits, ``priors`` would be 0 or infinite
    priors = alpha * left / len(labels)
    quotas = np.full(clients, len(labels) // clients)
    quotas[rng.permutation(clients)[: len(labels) % clients]] += 1
    parts: list[Rows] = [np.empty(0, np.int64)] * clients
    # The last clients get the remaining classes; the random order spreads these clients over the profiles.
    for client in rng.permutation(clients):
        shares = np.zeros(classes)
        shares[present] = rng.dirichlet(priors[present])
        counts = _draw(shares, priors, left, int(quotas[client]), rng)
        parts[client] = np.concatenate(
            [pools[c][left[c] - counts[c] : left[c]] for c in np.flatnonzero(counts)]
        )
        left -= counts
    return parts


def _draw(
    shares: NDArray[np.float64],
    priors: NDArray[np.float64],
    left: Rows,
    quota: int,
    rng: np.random.Generator,
) -> Rows:
    """Draw the number of examples that a client gets from each class, according to ``shares``.

    The client gets ``quota`` examples in total, and at most ``left[c]`` from class c. If the shares of all
    classes that have examples left are 0, they are drawn again from Dirichlet(``priors``) of these classes:
    a subset of Dirichlet-distributed shares, rescaled to the sum 1, has this distribution.
    """
    counts = np.zeros_like(left)
    while (need := quota - int(counts.sum())) > 0:
        free = left - counts
        weights = np.where(free > 0, shares, 0.0)
        if not weights.sum() > 0.0:
            weights[free > 0] = rng.dirichlet(priors[free > 0])
        counts += np.minimum(rng.multinomial(need, weights / weights.sum()), free)
    return counts


def _shards(per_client: int, labels: Rows, clients: int, rng: np.random.Generator) -> list[Rows]:
    present = np.unique(labels)
    if per_client > len(present):
        raise ConfigError(f"data.classes_per_client must be from 1 to {len(present)} (got {per_client})")
    places = np.full(len(present), clients * per_client // len(present))
    places[rng.permutation(len(present))[: clients * per_client % len(present)]] += 1
    holders: dict[int, list[int]] = {int(label): [] for label in present}
    for client in rng.permutation(clients):
        # Each client takes the classes with the most free places, so that later clients have enough classes.
        order = np.lexsort((rng.random(len(present)), -places))[:per_client]
        places[order] -= 1
        for index in order:
            holders[int(present[index])].append(int(client))
    for label, clients_of in holders.items():
        if (count := int(np.sum(labels == label))) < len(clients_of):
            raise ConfigError(
                f"data.classes_per_client: {clients} clients cannot hold {per_client} classes each: class "
                f"{label} has {count} examples for {len(clients_of)} clients; use fewer classes or clients"
            )
    return _split_labels(labels, holders, clients, rng)


def _holders(named: dict[str, list[int]], profiles: Sequence[str], classes: int) -> dict[int, list[int]]:
    """Return the clients that may hold each label."""
    for profile, wanted in named.items():
        if (top := max(wanted)) >= classes:
            raise ConfigError(f"data.labels: {profile!r}: labels must be in [0, {classes}) (got {top})")
    used = {label for wanted in named.values() for label in wanted}
    others = sorted(set(range(classes)) - used) or list(range(classes))
    holders: dict[int, list[int]] = {label: [] for label in range(classes)}
    for client, profile in enumerate(profiles):
        for label in set(named.get(profile, others)):
            holders[label].append(client)
    return holders


def _split_labels(
    labels: Rows, holders: dict[int, list[int]], clients: int, rng: np.random.Generator
) -> list[Rows]:
    """Split the examples of each label evenly among its holders; the remainder is assigned at random."""
    parts: list[list[Rows]] = [[] for _ in range(clients)]
    for label, clients_of in sorted(holders.items()):
        rows = rng.permutation(np.flatnonzero(labels == label))
        if clients_of:
            shares = np.array_split(rows, len(clients_of))
            for client, share in zip(rng.permutation(clients_of), shares, strict=True):
                parts[client].append(share)
    held = [np.concatenate(part) if part else np.empty(0, np.int64) for part in parts]
    for client, rows in enumerate(held):
        if len(rows) == 0:
            raise ConfigError(
                f"data: client {client} would hold no example; its labels have fewer examples than clients"
            )
    return held
