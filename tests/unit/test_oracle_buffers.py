"""Tests of DeFedAvg against its paper's Algorithms 1 and 2, and of when clients start their next trip."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Left, Sum
from edgefl.seeds import stream
from edgefl.strategies import Client, resolve
from edgefl.testing import MemoryRun, fleet, run_in_memory

CLIENTS, SAMPLE, ROUNDS = 20, 5, 60


class Round(NamedTuple):
    """One iteration of the server's loop."""

    at_s: float
    """Time at which the new version is in the receive buffers."""
    used: list[tuple[int, int]]
    """For each draw, the client and the version from which it trained."""


@dataclass
class Phone:
    """A client that trains from the model in its receive buffer and fills its send buffer."""

    train_s: float
    pause: bool
    starts_s: float
    received: list[tuple[float, int]]
    version: int = 0
    sends: int | None = None
    """Version from which the update in the send buffer was trained."""

    @property
    def ends_s(self) -> float:
        return self.starts_s + self.train_s

    def until(self, now_s: float) -> None:
        """Complete all training that ends by ``now_s`` (lines 2 to 9)."""
        while self.ends_s <= now_s and not (self.pause and self.sends is not None):
            self.sends, self.starts_s = self.version, self.ends_s
            self.version = self.newest(self.starts_s)

    def newest(self, now_s: float) -> int:
        return max(version for at_s, version in self.received if at_s <= now_s)

    def selected(self, now_s: float) -> tuple[int, float]:
        """Return the base version of the upload and the time of its start (lines 10 to 14)."""
        self.until(now_s)
        begins_s = now_s
        if self.sends is None:
            begins_s = self.ends_s
            self.until(begins_s)
        version, self.sends = self.sends, None
        if self.pause and begins_s == now_s:  # it had paused, and continues
            self.starts_s, self.version = now_s, self.newest(now_s)
        assert version is not None
        return version, begins_s


def algorithm_1(train_s: Any, transfer_s: float, *, pause: bool, seed: int) -> list[Round]:
    """The server, lines 3 to 10: sample, collect, average, broadcast."""
    phones = [Phone(each, pause, transfer_s, [(transfer_s, 0)]) for each in train_s]
    rng, rounds = stream(seed, "strategy"), list[Round]()
    now_s = transfer_s + min(train_s)  # the first update
    for version in range(1, ROUNDS + 1):
        sample = rng.integers(CLIENTS, size=SAMPLE).tolist()
        sent = {client: phones[client].selected(now_s) for client in dict.fromkeys(sample)}
        now_s = max(begins_s + transfer_s for _, begins_s in sent.values())
        rounds.append(Round(now_s + transfer_s, [(client, sent[client][0]) for client in sample]))
        for phone in phones:
            phone.received.append((now_s + transfer_s, version))
    return rounds


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize("transfer_s", [1e-3, 0.03, 0.4])
def test_rounds_updates_and_times_are_those_of_algorithm_1(transfer_s: float, pause: bool) -> None:
    seed = 1
    train_s = np.random.default_rng(seed).uniform(0.2, 1.0, CLIENTS).tolist()
    devices = [Client(i, "a", 10, 1, transfer_s, one_s, transfer_s) for i, one_s in enumerate(train_s)]
    strategy = resolve({"name": "defedavg-niid", "participants": SAMPLE, "pause": pause})
    core = Core(strategy, devices, seed, experiment.Stop(versions=ROUNDS))
    run = run_in_memory(core, train_s)
    expected = algorithm_1(train_s, transfer_s, pause=pause, seed=seed)
    for (order, updates), one in zip(run.sums, expected, strict=True):
        took = {update.client: update.base_version for update in updates}
        assert took == dict(one.used)
        share = [sum(client == i for i, _ in one.used) / SAMPLE for client in took]
        assert order.weights == pytest.approx(share)
    assert sum_times_s(run) == pytest.approx([one.at_s for one in expected], rel=1e-12)


def sum_times_s(run: MemoryRun) -> list[float]:
    return [event.at_s for event, done in run.history if any(isinstance(each, Sum) for each in done)]


def algorithm_2(train_s: list[float], down_s: float, up_s: list[float], size: int) -> list[Round]:
    """DeFedAvg-IID: clients train and upload without pause, and every ``size`` arrivals make a version."""
    starts = [(down_s, client) for client in range(len(train_s))]
    arrived: list[tuple[float, int, int]] = []

    def versions(now_s: float) -> list[Round]:
        known = sorted(arrived)
        cut = [known[at : at + size] for at in range(0, len(known) - size + 1, size)]
        made = [Round(used[-1][0] + down_s, [one[1:] for one in used]) for used in cut]
        return [each for each in made if each.at_s <= now_s]

    while len(found := versions(starts[0][0])) < ROUNDS:
        now_s, client = heapq.heappop(starts)
        there_s = now_s + train_s[client] + up_s[client]
        arrived.append((there_s, client, len(found)))
        heapq.heappush(starts, (there_s, client))
    return found[:ROUNDS]


@pytest.mark.parametrize("down_s", [0.0, 0.03, 0.4])
def test_defedavg_iid_overlaps_downloads_and_training(down_s: float) -> None:
    rng = np.random.default_rng(3)
    train_s, up_s = rng.uniform(0.2, 1.0, CLIENTS).tolist(), rng.uniform(0.01, 0.3, CLIENTS).tolist()
    facts = zip(train_s, up_s, strict=True)
    devices = [Client(i, "a", 10, 1, down_s, one_s, through_s) for i, (one_s, through_s) in enumerate(facts)]
    strategy = resolve({"name": "defedavg-iid", "buffer_size": SAMPLE, "overlap": True})
    run = run_in_memory(Core(strategy, devices, 0, experiment.Stop(versions=ROUNDS)), train_s)
    expected = algorithm_2(train_s, down_s, up_s, SAMPLE)
    used = [[(update.client, update.base_version) for update in updates] for _, updates in run.sums]
    assert used == [one.used for one in expected]
    assert sum_times_s(run) == pytest.approx([one.at_s for one in expected], rel=1e-12)
    assert strategy.transfers_apart


@pytest.mark.parametrize(
    ("fields", "trips"),
    [
        ({"concurrency": 2}, 2 * 100),
        ({"arrival_process": "constant", "arrival_rate_per_s": 0.5}, 100 // 2),
        ({"concurrency": 2, "restart": "after-step"}, 2 * 100),
    ],
)
def test_a_client_that_still_uploads_takes_no_place_of_a_client_that_is_free(
    fields: dict[str, Any], trips: int
) -> None:
    """Mutant: clients are drawn from all idle clients, and those that are still uploading are then left out,
    so that too few clients train."""
    devices = [Client(i, "a", 10, 1, 0.0, 1.0, 9.0) for i in range(40)]  # 9 s of upload after each second
    strategy = resolve({"name": "defedavg-iid", "buffer_size": 2, "overlap": True, **fields})
    core = Core(strategy, devices, 0, experiment.Stop(emulated_s=100.0))
    run_in_memory(core, [1.0] * 40)
    assert trips - 2 <= core.trips <= trips


def test_a_client_that_is_offline_is_not_drawn_and_uploads_nothing() -> None:
    """Mutant: a client is drawn because its send buffer is full, and uploads after it has left."""
    devices = [Client(i, "a", 10, 1, 0.1, 1.0, 5.0) for i in range(6)]
    core = Core(
        resolve({"name": "defedavg-niid", "participants": 3}), devices, 0, experiment.Stop(versions=30)
    )
    run = run_in_memory(core, [1.0] * 6, events=[Left(0, 20.0, "left")])
    used_at_s = [
        at_s
        for at_s, (_, updates) in zip(sum_times_s(run), run.sums, strict=True)
        if 0 in (update.client for update in updates)
    ]
    # The client leaves at 20 s. The last version with its update comes from an upload that had begun before:
    # the upload takes 5 s, and the broadcast of the version takes 0.1 s.
    assert used_at_s
    assert max(used_at_s) < 20.0 + 5.0 + 0.1


def test_versions_are_an_upload_apart_and_updates_are_staler_than_with_the_newest() -> None:
    """In the paper's fleet, a trip is 50 steps of 17 MFLOP at 2·U[1, 5] GFLOPS, and each transfer is 2.33 MB
    at 400 Mbit/s."""
    transfer_s = 0.0466
    train_s = (50 * 17e6 / (2e9 * np.random.default_rng(0).uniform(1.0, 5.0, 100))).tolist()
    devices = [Client(i, "a", 10, 50, transfer_s, one_s, transfer_s) for i, one_s in enumerate(train_s)]
    spacing, staleness = {}, {}
    for takes in ("when-selected", "newest"):
        strategy = resolve({"name": "defedavg-niid", "takes": takes})
        core = Core(strategy, devices, 0, experiment.Stop(versions=40))
        trip_s = train_s if takes == "when-selected" else [one_s + 2 * transfer_s for one_s in train_s]
        run = run_in_memory(core, trip_s)
        spacing[takes] = np.diff(sum_times_s(run))
        used = [order.version - 1 - update.base_version for order, updates in run.sums for update in updates]
        staleness[takes] = float(np.mean(used))
    assert spacing["when-selected"].min() >= transfer_s * (1 - 1e-9)
    assert spacing["newest"].min() == 0.0  # at the same time
    assert spacing["when-selected"].mean() < spacing["newest"].mean()
    assert staleness["when-selected"] > 1.5 * staleness["newest"]


@pytest.mark.parametrize("name", ["fedbuff", "fedstaleweight"])
def test_after_step_no_client_is_in_a_step_twice(name: str) -> None:
    """See appendix D of FedBuff and appendix A of FedStaleWeight.

    With ``immediate``, the fast clients contribute to a server step twice while the others train for 4 s.
    This also happens with ``new-version``, because a client that trained from the previous version may start
    again at once.
    """
    used: dict[str, list[list[int]]] = {}
    for restart in ("immediate", "new-version", "after-step"):
        strategy = resolve({"name": name, "buffer_size": 3, "restart": restart})
        core = Core(strategy, fleet(5), 0, experiment.Stop(versions=40))
        run = run_in_memory(core, [1.0, 1.7, 4.1, 4.2, 4.3])
        used[restart] = [[update.client for update in updates] for _, updates in run.sums]
    repeated = {how: sum(len(set(each)) < 3 for each in rounds) for how, rounds in used.items()}
    assert repeated["immediate"] > 0
    assert repeated["new-version"] > 0
    assert repeated["after-step"] == 0
    assert resolve({"name": "fedstaleweight"}).restart == "after-step"  # type: ignore[attr-defined]


def test_the_baselines_of_the_defedavg_study_are_the_papers() -> None:
    """Section 1.2.3 uses FedBuff without the staleness weight s(τ), and FedAvg with cohorts that are drawn
    with replacement (eqs. 2 and 3)."""
    from edgefl.lab.studies import load

    study = load("defedavg")
    tables = {arm.label: study.experiment(arm, 1, "quick").strategy for arm in study.arms}
    assert tables["non-IID FedBuff"]["exponent"] == 0
    assert "exponent" not in tables["non-IID FedBuff, s(τ)"]
    for label in ("non-IID FedAvg", "IID FedAvg"):
        assert (tables[label]["replacement"], tables[label]["weighting"]) == (True, "uniform")
    assert resolve(tables["DeFedAvg-nIID"]).takes == "when-selected"  # type: ignore[attr-defined]
