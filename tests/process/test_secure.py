"""Runs with secure aggregation: the same results, hidden updates, both clocks, kills."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import edgefl
from edgefl import Clock, Experiment, Fleet, Server, Stop
from edgefl.core.events import Arrived, Died, Joined, Left, Summed, Unmasking
from edgefl.devices import load_network
from edgefl.errors import ConfigError, RunError
from edgefl.experiment import Churn, Privacy, Secure
from edgefl.lab.verify import verify
from edgefl.results.record import Record
from edgefl.results.result import Result
from edgefl.run.demands import checked
from edgefl.run.hidden import rules_of
from edgefl.strategies import resolve

from .disturbed import check_every_kill_was_certain, killed
from .runs import PATIENCE_S, Command, experiment, incidents, summary, virtual, wait_for_versions

pytest.importorskip("cryptography", reason="needs edgefl[secure]")

from edgefl.run.hidden_masks import holders_of
from edgefl.secure.coded import Rules

pytestmark = pytest.mark.timeout(300)

SECURE = Secure(clip=1.0, resolution=64, holders=4, recover=3, private=1)
MASKED = Server(secure=SECURE, heartbeat_s=PATIENCE_S)
TRUSTED = Server(secure=Secure(kind="trusted"), heartbeat_s=PATIENCE_S)
PAIRS = Server(secure=Secure(kind="pairwise", resolution=4096), heartbeat_s=PATIENCE_S)
ROUNDS = {"name": "fedavg", "cohort": 4}
UNIFORM = {"name": "fedavg", "cohort": 4, "over_selection": 1.25, "weighting": "uniform"}
TIMED = Fleet(devices={"paper-exponential": 8}, network="none")
"""Trips whose drawn times include everything: masking does not change the order of events."""


WALL = [(MASKED, {"name": "fedbuff", "buffer_size": 3}), (PAIRS, ROUNDS)]
SLOW = pytest.mark.slow
"""For cases whose code all runs in the others of the same test."""


def made(wanted: Experiment, folder: Path) -> dict[str, Any]:
    Command.run(wanted, folder).ends()
    return summary(folder)


def model(folder: Path) -> np.ndarray:
    return np.concatenate([part.reshape(-1) for part in Result(folder).model().values()])


@pytest.mark.parametrize(
    ("strategy", "server"),
    [
        pytest.param({"name": "fedbuff", "buffer_size": 3}, MASKED, id="fedbuff", marks=SLOW),
        pytest.param({"name": "fedstaleweight", "buffer_size": 3}, MASKED, id="fedstaleweight"),
        pytest.param(ROUNDS, MASKED, id="fedavg", marks=SLOW),
        pytest.param(ROUNDS, PAIRS, id="pairwise fedavg", marks=SLOW),
        pytest.param(
            {"name": "fednova", "cohort": 4, "over_selection": 1.5, "redraw": False},
            PAIRS,
            id="pairwise fednova with late members",
            marks=SLOW,
        ),
    ],
)
def test_a_masked_run_is_the_plain_run_within_the_fixed_point_error(
    strategy: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    """Rounded weights and steps change the model by far less than a step of training.

    Late members of a round with pairwise masks are dropouts: their masks are recovered in each sum.
    """
    wanted = virtual(fleet=TIMED, strategy=strategy)
    plain = made(wanted, tmp_path / "plain")
    masked = made(msgspec.structs.replace(wanted, server=server), tmp_path / "masked")
    assert masked["client_trips"] == plain["client_trips"]
    assert masked["dropped_updates"] == 0
    change = np.abs(model(tmp_path / "masked") - model(tmp_path / "plain")).max()
    assert 0 < change < 0.01 * np.abs(model(tmp_path / "plain")).max()


@pytest.mark.parametrize("strategy", ["fedbuff", pytest.param("fedavg", marks=SLOW)])
def test_a_trusted_aggregator_gives_the_plain_run_but_for_rounding(strategy: str, tmp_path: Path) -> None:
    fields = {"cohort": 4} if strategy == "fedavg" else {"buffer_size": 3}
    wanted = virtual(fleet=TIMED, strategy={"name": strategy, **fields})
    plain = made(wanted, tmp_path / "plain")
    trusted = made(msgspec.structs.replace(wanted, server=TRUSTED), tmp_path / "trusted")
    assert trusted["client_trips"] == plain["client_trips"]
    change = np.abs(model(tmp_path / "trusted") - model(tmp_path / "plain")).max()
    assert change < 1e-5 * np.abs(model(tmp_path / "plain")).max()
    assert trusted["secure"]["share_bytes_per_trip"] == 32


@pytest.mark.parametrize("server", [MASKED, pytest.param(TRUSTED, marks=SLOW)], ids=["masks", "trusted"])
def test_a_private_run_is_the_same_with_hidden_updates(server: Server, tmp_path: Path) -> None:
    """FedBuff with DP-FTRL's tree: clients clip as the server would, and the server adds the same noise."""
    rules = Privacy(clip_norm=0.1, noise_multiplier=0.05, noise="seeded")
    wanted = virtual(
        fleet=TIMED, privacy=rules, strategy={"name": "fedbuff", "buffer_size": 3, "momentum": 0.5}
    )
    plain = made(wanted, tmp_path / "plain")
    hidden = made(msgspec.structs.replace(wanted, server=server), tmp_path / "hidden")
    assert hidden["client_trips"] == plain["client_trips"]
    assert hidden["privacy"]["epsilon"] == plain["privacy"]["epsilon"]
    assert verify(tmp_path / "hidden").model_sha256 == hidden["model_sha256"]
    change = np.abs(model(tmp_path / "hidden") - model(tmp_path / "plain")).max()
    assert change < 0.01 * np.abs(model(tmp_path / "plain")).max()


def test_failed_trips_and_refused_sums_are_zero_in_a_private_run(tmp_path: Path) -> None:
    """Two phones, one much faster: sums of one client are refused, and one update is not finite."""
    secure = Secure(holders=2, recover=2, private=1)
    wanted = virtual(
        fleet=Fleet(devices={"pixel-4": 1, "pi-zero-2w": 1}, network="fios"),
        strategy={"name": "fedbuff", "buffer_size": 2},
        privacy=Privacy(clip_norm=0.1, noise_multiplier=0.1, noise="seeded"),
        server=Server(secure=secure, heartbeat_s=PATIENCE_S),
        stop=Stop(trips=60),
    )
    folder = tmp_path / "run"
    Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": "nan:0:1"}).ends()
    found, refusals = summary(folder), incidents(folder, "refused")
    assert found["versions"] == 30
    assert found["dropped_updates"] == 0
    assert any("updates from 1 clients; at least 2 are required" in row.detail for row in refusals)
    assert any("the update is not finite" in row.detail for row in incidents(folder, "failed"))
    assert verify(folder).versions == 30


def test_the_same_bits_for_any_workers_and_transport(tmp_path: Path) -> None:
    check_same_bits(MASKED, {"name": "fedbuff", "buffer_size": 3}, tmp_path)


def test_pairwise_masks_give_the_same_bits_for_any_workers_and_transport(tmp_path: Path) -> None:
    """With late members, whose computation is cancelled or not, and with one whose trips fail."""
    check_same_bits(PAIRS, {"name": "fedavg", "cohort": 3, "over_selection": 4 / 3}, tmp_path)


def check_same_bits(server: Server, strategy: dict[str, Any], folder: Path) -> None:
    found = []
    for workers, transport in ((1, "shm"), (2, "wire")):
        wanted = virtual(
            workers, server=msgspec.structs.replace(server, transport=transport), strategy=strategy
        )
        environment = {"EDGEFL_FAILPOINTS": "nan:0:1,leave:1:0"}
        Command.run(wanted, folder / transport, environment=environment).ends()
        found.append(summary(folder / transport)["model_sha256"])
    assert found[0] == found[1]


def test_dropouts_are_recovered_up_to_the_threshold_of_pairwise_masks(tmp_path: Path) -> None:
    """Three clients a round, of which two are required. Client 0 fails its first trip, so two remain; then
    clients 1 and 2 fail in the same round, and the sum of the one that remains is refused.

    Mutants: the sum of one is released; a lost member is replaced; a refused round is not drawn again.
    """
    wanted = virtual(
        fleet=Fleet(devices={"pixel-4": 3}, network="lte"),
        strategy={"name": "fedavg", "cohort": 3},
        server=PAIRS,
        stop=Stop(versions=5),
    )
    folder = tmp_path / "run"
    Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": "leave:0:0,leave:1:2,leave:2:2"}).ends()
    found, refusals = summary(folder), incidents(folder, "refused")
    assert (found["versions"], found["dropped_updates"]) == (5, 1)
    assert [row.detail.partition(": ")[2] for row in refusals] == [
        "1 clients arrived; at least 2 are required"
    ]
    with Record(folder) as record:
        assert record.versions["updates"].tolist() == [2, 3, 3, 3, 3]


def test_members_that_die_and_leave_are_dropouts(tmp_path: Path) -> None:
    """Under a churn that takes a third of all trips, each sum has more than half of its round's clients."""
    wanted = virtual(
        fleet=Fleet(devices={"pixel-4": 8}, network="lte", churn=Churn(die_per_trip=0.2)),
        strategy={"name": "fedavg", "cohort": 5},
        server=PAIRS,
        stop=Stop(versions=20),
    )
    found = made(wanted, tmp_path / "run")
    with Record(tmp_path / "run") as record:
        sizes = record.versions["updates"].tolist()
    assert min(sizes) >= 3
    assert min(sizes) < 5
    refusals = incidents(tmp_path / "run", "refused")
    assert found["dropped_updates"] == len(refusals)
    assert all(row.detail.endswith("clients arrived; at least 3 are required") for row in refusals)
    assert verify(tmp_path / "run").model_sha256 == found["model_sha256"]


def test_masking_and_shares_are_part_of_a_trip(finished: Path, tmp_path: Path) -> None:
    """Bytes of masks' shares in the upload, seconds of masking in the computing."""
    wanted = virtual()
    plain, masked = finished, tmp_path / "masked"
    secured = msgspec.structs.replace(wanted, server=MASKED)
    made(secured, masked)
    size, clients = int(model(plain).size), 6
    rules = rules_of(secured, resolve(wanted.strategy), size, clients)
    assert rules is not None
    first: list[dict[str, float]] = []
    for folder in (plain, masked):
        with Record(folder) as record:
            trips = record.trips
            row = int(np.flatnonzero(trips["task"] == 0)[0])
            first.append({k: float(trips[k][row]) for k in ("up_bytes", "compute_s", "up_s")})
    assert first[1]["up_bytes"] - first[0]["up_bytes"] == rules.overhead_bytes > 4 * size
    assert first[1]["compute_s"] > first[0]["compute_s"]
    assert first[1]["up_s"] > first[0]["up_s"]
    cost = summary(masked)["secure"]
    assert cost["share_bytes_per_trip"] == rules.overhead_bytes
    assert set(cost["masking_s"]) == {"pixel-4", "moto-g4"}
    assert min(cost["masking_s"].values()) > 0
    assert "secure" not in summary(plain)
    assert "The server learns weighted sums of at least 2 clients" in (masked / "report.html").read_text()


def test_adverts_and_shares_of_pairwise_masks_are_part_of_a_trip(tmp_path: Path) -> None:
    """Mutants: the others' shares are not downloaded, seconds of masks do not grow with the round."""
    found = {}
    for name, cohort in (("plain", 3), ("small", 3), ("large", 6)):
        server = Server(heartbeat_s=PATIENCE_S) if name == "plain" else PAIRS
        made(virtual(server=server, strategy={"name": "fedavg", "cohort": cohort}), tmp_path / name)
        with Record(tmp_path / name) as record:
            trips = record.trips
            row = int(np.flatnonzero((trips["client"] == trips["client"][0]) & (trips["trip"] == 0))[0])
            keys = ("down_bytes", "up_bytes", "down_s", "compute_s", "up_s")
            found[name] = {key: float(trips[key][row]) for key in keys}
    plain, small, large = found["plain"], found["small"], found["large"]
    assert small["down_bytes"] - plain["down_bytes"] == 2 * (64 + 153)
    assert large["down_bytes"] - small["down_bytes"] == 3 * (64 + 153)
    assert "more than half of a round" in (tmp_path / "large" / "report.html").read_text()
    assert large["up_bytes"] - small["up_bytes"] == 3 * (4 + 153)
    assert all(plain[key] < small[key] < large[key] for key in ("down_s", "compute_s", "up_s"))


@pytest.mark.parametrize(
    ("server", "strategy"), [WALL[0], pytest.param(*WALL[1], marks=SLOW)], ids=["masks", "pairwise"]
)
def test_a_run_under_the_wall_clock(server: Server, strategy: dict[str, Any], tmp_path: Path) -> None:
    found = made(experiment(server=server, strategy=strategy), tmp_path / "run")
    assert found["versions"] == 12
    assert found["dropped_updates"] == 0
    assert not (tmp_path / "run" / "phones.key").exists()
    assert verify(tmp_path / "run").versions == 12


def test_checksums_of_hidden_updates_are_compared_while_their_keys_exist(tmp_path: Path) -> None:
    """An interrupted run has its keys; without them other masks give other checksums and the same sums."""
    folder = tmp_path / "run"
    command = Command.run(virtual(server=MASKED, stop=Stop(versions=100_000)), folder)
    wait_for_versions(folder, 5, command)
    command.interrupt()
    command.finish()
    without = tmp_path / "without keys"
    shutil.copytree(folder, without)
    (without / "phones.key").unlink()
    assert verify(folder) == verify(without)
    (folder / "record.sqlite-seal").unlink()
    with closing(sqlite3.connect(folder / "record.sqlite")) as db, db:
        assert db.execute("UPDATE trips SET checksum_sent = 7 WHERE task = 3").rowcount == 1
    with pytest.raises(RunError, match=r"the update of task 3 .* the record says 0000000000000007"):
        verify(folder)


PRIVATE = {
    "privacy": Privacy(clip_norm=0.1, noise_multiplier=0.5, noise="seeded"),
    "strategy": {"name": "fedbuff", "buffer_size": 3, "momentum": 0.5},
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"server": MASKED}, id="masks", marks=SLOW),
        pytest.param({"server": TRUSTED}, id="trusted"),
        pytest.param({"server": MASKED, **PRIVATE}, id="private masks"),
        pytest.param(
            {"server": PAIRS, "strategy": {**ROUNDS, "over_selection": 1.5}}, id="pairwise", marks=SLOW
        ),
    ],
)
def test_servers_killed_around_sums_give_the_same_bits(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated request has the same answer, and no recomputed update is refused."""
    wanted = virtual(stop=Stop(versions=20), **changes)
    calm = made(wanted, tmp_path / "calm")
    points = ["sum:0:2", "summed:1:3", "published:2:2", "event:3:20"]
    folder = tmp_path / "killed"
    assert killed(wanted, folder, points, monkeypatch) == len(points)
    check_every_kill_was_certain(folder, points)
    assert incidents(folder, "refused") == []
    assert summary(folder)["model_sha256"] == calm["model_sha256"]


@pytest.mark.parametrize(
    ("server", "place"), [pytest.param(MASKED, "asked", marks=SLOW), (MASKED, "saved"), (TRUSTED, "saved")]
)
def test_killed_holders_are_started_again(server: Server, place: str, tmp_path: Path) -> None:
    """A holder that had saved its answer without sending it gives it again: no sum is refused."""
    command = Command.run(
        experiment(server=server), tmp_path, environment={"EDGEFL_FAILPOINTS": f"{place}:0:3"}
    )
    assert f"killed at failpoint {place}" in command.ends()
    assert (summary(tmp_path)["versions"], summary(tmp_path)["dropped_updates"]) == (12, 0)
    assert verify(tmp_path).versions == 12


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="masks", marks=SLOW),
        pytest.param(PRIVATE, id="private masks"),
        pytest.param({"server": PAIRS, "strategy": ROUNDS}, id="pairwise", marks=SLOW),
    ],
)
def test_a_server_killed_under_the_wall_clock_loses_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    """Between a sum and its publication. The next server must make the same sum: it is the only one allowed.

    Mutant: the update that completed the buffer is not on record before the sum.
    """
    wanted = experiment(**{"server": MASKED, **changes})
    Command.run(wanted, tmp_path, environment={"EDGEFL_FAILPOINTS": "summed:0:4"}).ends()
    found = summary(tmp_path)
    assert (found["versions"], found["dropped_updates"]) == (12, 0)
    assert len(incidents(tmp_path, "restart")) == 1
    assert incidents(tmp_path, "refused") == []


@pytest.mark.parametrize(
    ("server", "strategy"), [WALL[0], pytest.param(*WALL[1], marks=SLOW)], ids=["masks", "pairwise"]
)
def test_a_killed_run_is_resumed_under_the_wall_clock(
    server: Server, strategy: dict[str, Any], tmp_path: Path
) -> None:
    """Only updates whose sum was released after the checkpoint may be refused, and rounds that lost half of
    their members, because the kill ended their trips."""
    folder = tmp_path / "run"
    often, end = edgefl.Checkpoint(every_s=0.1), Stop(versions=30)
    wanted = experiment(server=server, strategy=strategy, checkpoint=often, stop=end)
    command = Command.run(wanted, folder)
    wait_for_versions(folder, 5, command)
    command.kill_group()
    command.finish()
    Command("resume", str(folder), "--accept-invalid").ends()
    assert summary(folder)["versions"] == 30
    refusals = incidents(folder, "refused")
    assert summary(folder)["dropped_updates"] == len(refusals)
    reasons = ("another sum", "clients arrived; at least 3 are required")
    assert all(row.detail.endswith(reasons) for row in refusals)


AWAY = Fleet(
    devices={"pixel-4": 8},
    network="lte",
    churn=Churn(mean_online_s=0.8, mean_offline_s=0.6, die_per_trip=0.05),
)
"""Phones that come and go within some trips."""


@pytest.mark.parametrize(
    ("server", "strategy"), [WALL[0], pytest.param(*WALL[1], marks=SLOW)], ids=["masks", "pairwise"]
)
def test_sums_wait_until_enough_clients_can_unmask_them(
    server: Server, strategy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if servers are killed meanwhile, and for any number of workers.

    Mutants: holders answer while they are offline; a sum that waits is refused, or is forgotten on resume.
    """
    fields = {"fleet": AWAY, "server": server, "strategy": strategy, "stop": Stop(versions=40)}
    made(virtual(1, **fields), tmp_path / "calm")
    points = ["event:0:60", "event:1:90", "sum:2:5"]
    assert killed(virtual(2, **fields), tmp_path / "killed", points, monkeypatch) == len(points)
    models, times = [], []
    for folder in (tmp_path / "calm", tmp_path / "killed"):
        with Record(folder) as record:
            models.append(record.meta.model_sha256)
            times.append(record.versions["at_s"].tolist())
            events = [event for _, event in record.events()]
        assert not [row for row in incidents(folder, "refused") if "online" in row.detail]
        waited = [a for a, b in pairwise(events) if isinstance(a, Joined) and isinstance(b, Unmasking)]
        assert waited  # clients exchanged shares because a client joined
        ends = {event.version: event.until_s for event in events if isinstance(event, Unmasking)}
        sums = [event for event in events if isinstance(event, Summed) and not event.bad]
        assert all(event.at_s == ends[event.version] for event in sums)  # also after an exchange anew
        if server is MASKED:
            assert min(holders_online(events, 8)) >= SECURE.recover
    assert models[0] == models[1]
    assert times[0] == times[1]


def holders_online(events: list[Any], clients: int) -> list[int]:
    """How many holders were online at each sum, by the journal."""
    rules = rules_of(virtual(server=MASKED), resolve({"name": "fedbuff"}), 10, clients)
    assert isinstance(rules, Rules)
    holders, online, found = set(holders_of(virtual().seed, clients, rules)), set(), []
    for event in events:
        match event:
            case Joined(client=client):
                online.add(client)
            case Left(client=client, finishes=False) | Died(client=client):
                online.discard(client)
            case Summed():
                found.append(len(online & holders))
    return found


def exchanges(folder: Path) -> list[Unmasking]:
    with Record(folder) as record:
        return [event for _, event in record.events() if isinstance(event, Unmasking)]


@pytest.mark.parametrize("recover", [4, 5])
def test_a_version_is_made_when_the_last_reply_that_it_needs_is_there(recover: int, tmp_path: Path) -> None:
    """All six clients hold shares: four on a fast link, two on a slow one, both without headers or delays.

    Mutants: no exchange; replies of one link; the mean or the last of all replies.
    """
    fleet = Fleet(
        devices={"pixel-4": 4, "moto-g4": 2},
        network={"pixel-4": "defedavg-400", "moto-g4": "defedavg-in-small"},
        variation=0.0,
    )
    server = Server(secure=Secure(holders=6, recover=recover, private=1), heartbeat_s=PATIENCE_S)
    wanted = virtual(fleet=fleet, server=server, strategy={"name": "fedbuff", "buffer_size": 3})
    found = made(wanted, tmp_path / "run")["secure"]
    mbps = load_network("defedavg-400" if recover == 4 else "defedavg-in-small").down.rate_mbps
    assert mbps is not None
    received, sent = found["holder_bytes_per_update"], found["holder_bytes_per_version"]
    takes_s = (3 * received + sent) * 8 / (mbps * 1e6)
    assert [one.until_s - one.at_s for one in exchanges(tmp_path / "run")] == pytest.approx([takes_s] * 12)
    assert found["exchange_s"]["mean"] == pytest.approx(takes_s, rel=1e-3)
    with Record(tmp_path / "run") as record:
        versions_s, events = record.versions["at_s"].tolist(), [event for _, event in record.events()]
        assert versions_s == [one.until_s for one in exchanges(tmp_path / "run")]
        begins = {event.at_s for event in events if isinstance(event, Arrived)} | {*versions_s}
    assert all(one.at_s in begins for one in exchanges(tmp_path / "run"))
    assert verify(tmp_path / "run").versions == 12


SLOW_LINK = Fleet(devices={"pixel-4": 4, "moto-g4": 2}, network="dial-up")
"""Exchanges last so long that updates arrive meanwhile."""


@pytest.mark.parametrize("most", [0, 20])
def test_the_staleness_of_an_update_counts_the_version_that_is_being_made(most: int, tmp_path: Path) -> None:
    strategy = {"name": "fedbuff", "buffer_size": 3, "max_staleness": most, "restart": "new-version"}
    made(virtual(fleet=SLOW_LINK, server=MASKED, strategy=strategy), tmp_path / "run")
    with Record(tmp_path / "run") as record:
        trips = {name: record.trips[name].tolist() for name in ("task", "base_version", "staleness")}
        rows = {task: (base, stale) for task, base, stale in zip(*trips.values(), strict=True)}
        lags = [
            (version - 1 - rows[task][0], rows[task][1])
            for version, tasks, _ in record.sums()
            for task in tasks
        ]
    assert all(lag == staleness <= most for lag, staleness in lags)
    assert verify(tmp_path / "run").versions == 12


def test_in_a_private_run_times_do_not_depend_on_which_updates_are_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy = Privacy(clip_norm=0.1, noise_multiplier=0.05, noise="seeded")
    wanted = virtual(fleet=SLOW_LINK, server=MASKED, privacy=privacy, stop=Stop(versions=6))
    times = []
    for name, fault in (("calm", ""), ("bad", "nan:0:1")):
        monkeypatch.setenv("EDGEFL_FAILPOINTS", fault)
        edgefl.run(wanted, tmp_path / name)
        with Record(tmp_path / name) as record:
            times.append([event.at_s for _, event in record.events() if isinstance(event, Summed)])
    assert times[0] == times[1]


def test_a_run_under_the_wall_clock_may_end_during_an_exchange(tmp_path: Path) -> None:
    """Nobody trains then, but the run goes on. Mutant: a server that does not wait for the exchange."""
    server = Server(secure=SECURE, heartbeat_s=0.2)
    clock = Clock(kind="wall", time_scale=0.3)
    fields = {"fleet": SLOW_LINK, "server": server, "strategy": ROUNDS, "clock": clock}
    made(experiment(**fields, stop=Stop(versions=2)), tmp_path / "first")
    last = exchanges(tmp_path / "first")[-1]
    ends = Stop(emulated_s=last.at_s + 0.7 * (last.until_s - last.at_s))
    assert made(experiment(**fields, stop=ends), tmp_path / "second")["stop_reason"] == "emulated_s"


def test_a_sum_is_refused_if_the_run_ends_during_its_exchange(tmp_path: Path) -> None:
    wanted = virtual(server=MASKED, stop=Stop(versions=12))
    made(wanted, tmp_path / "first")
    last = exchanges(tmp_path / "first")[-1]
    end_s = (last.at_s + last.until_s) / 2
    made(msgspec.structs.replace(wanted, stop=Stop(emulated_s=end_s)), tmp_path / "second")
    with Record(tmp_path / "second") as record:
        assert (record.meta.stop_reason, len(record.versions["at_s"])) == ("emulated_s", 11)
    (*_, refused) = incidents(tmp_path / "second", "refused")
    assert refused.at_s == end_s
    assert "the run ended during the exchange that would have unmasked the sum" in refused.detail


def test_a_sum_that_waits_at_the_end_is_refused(tmp_path: Path) -> None:
    """All four holders are needed, and half of them are online at a time. The second run ends in the middle
    of the first one's longest time without a version.

    Mutant: the run does not end, because the sum waits.
    """
    secure = Secure(holders=4, recover=4, private=1)
    wanted = virtual(
        fleet=Fleet(
            devices={"pixel-4": 8}, network="lte", churn=Churn(mean_online_s=3.0, mean_offline_s=3.0)
        ),
        server=Server(secure=secure, heartbeat_s=PATIENCE_S),
        stop=Stop(emulated_s=20.0),
    )
    made(wanted, tmp_path / "first")
    with Record(tmp_path / "first") as record:
        times = record.versions["at_s"].tolist()
    _, end_s = max((late - early, (early + late) / 2) for early, late in pairwise(times))
    made(msgspec.structs.replace(wanted, stop=Stop(emulated_s=end_s)), tmp_path / "second")
    with Record(tmp_path / "second") as record:
        assert record.meta.stop_reason == "emulated_s"
        assert record.versions["at_s"].tolist() == [at_s for at_s in times if at_s < end_s]
    last = incidents(tmp_path / "second", "refused")[-1]
    assert last.at_s == end_s
    assert "of 4 clients that can unmask the sum are online; 4 are needed" in last.detail


def test_phones_that_come_and_go_under_the_wall_clock(tmp_path: Path) -> None:
    fleet = msgspec.structs.replace(experiment().fleet, churn=Churn(mean_online_s=20.0, mean_offline_s=5.0))
    found = made(experiment(server=MASKED, fleet=fleet), tmp_path / "run")
    assert found["versions"] == 12
    assert incidents(tmp_path / "run", "refused") == []


def test_a_sum_of_one_client_is_refused(tmp_path: Path) -> None:
    """Two phones, one of them much faster: some buffers hold two updates of one client."""
    secure = Secure(holders=2, recover=2, private=1)
    fleet = Fleet(devices={"pixel-4": 1, "pi-zero-2w": 1}, network="fios")
    strategy = {"name": "fedbuff", "buffer_size": 2}
    wanted = virtual(
        fleet=fleet, strategy=strategy, stop=Stop(trips=60), server=Server(secure=secure, heartbeat_s=60.0)
    )
    found = made(wanted, tmp_path / "run")
    refusals = incidents(tmp_path / "run", "refused")
    assert found["dropped_updates"] == len(refusals) > 0
    assert all(
        "the sum includes updates from 1 clients; at least 2 are required" in row.detail for row in refusals
    )
    assert found["versions"] == len(exchanges(tmp_path / "run")) > 0  # none for a sum that is refused


# ---- refused at the door -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"strategy": {"name": "median"}}, "hides updates, which strategy 'median' reads"),
        ({"strategy": {"name": "scaffold"}}, "needs a strategy that uses only weighted sums"),
        ({"strategy": {"name": "fedasync"}}, "needs a strategy|least_clients: must be at most 1"),
        ({"server": Server(secure=SECURE, update_format="int8")}, "update_format: must be 'float32'"),
        ({"server": Server(secure=Secure(holders=9, recover=8))}, "at most 6, the number of clients, got 9"),
        ({"server": Server(secure=Secure(holders=5, recover=3))}, "recover: must be at least 4 with 5"),
        ({"server": Server(secure=Secure(holders=3, recover=3, private=3))}, "private < recover ≤ holders"),
        ({"server": Server(secure=Secure(least_clients=4))}, "least_clients: must be at most 3, the"),
        ({"privacy": Privacy(clip_norm=1.0, quantile=0.5)}, "privacy.quantile reads updates' norms"),
        ({"server": PAIRS}, "needs a strategy of rounds whose clients know their weights .* got FedBuff"),
        ({"server": PAIRS, "strategy": {**ROUNDS, "redraw": True}}, "strategy.redraw: must be false"),
        (
            {"server": PAIRS, "strategy": {**ROUNDS, "replacement": True}},
            "allows neither strategy.replacement",
        ),
        ({"server": PAIRS, "strategy": {"name": "fedavg", "cohort": 3, "over_selection": 2}}, "sum needs 4"),
        ({"server": PAIRS, "strategy": {"name": "fedavg", "cohort": 1}}, "least_clients: must be at most 1"),
        ({**PRIVATE, "server": PAIRS, "strategy": UNIFORM}, "clients that drop out as zero"),
    ],
)
def test_experiments_that_cannot_be_masked(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        checked(virtual(**{"server": MASKED, **changes}), Path.cwd())


def test_a_run_on_nodes_is_refused() -> None:
    from edgefl.hosts.nodes import on_nodes

    with pytest.raises(ConfigError, match="needs all clients on this host"):
        on_nodes(virtual(server=MASKED), Path(os.devnull))
