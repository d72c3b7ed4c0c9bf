"""Tests of secure aggregation in runs: equality with plain runs, dropouts, costs, refused experiments."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

import edgefl
from edgefl import Experiment, Fleet, Server, Stop
from edgefl.errors import ConfigError, RunError
from edgefl.experiment import Churn, Privacy, Secure
from edgefl.lab.verify import verify
from edgefl.results.record import Record
from edgefl.results.report import summary_table
from edgefl.results.result import Result
from edgefl.run.demands import checked
from edgefl.run.hidden import rules_of
from edgefl.strategies import resolve

from .runs import PATIENCE_S, Command, alter, experiment, incidents, summary, virtual, wait_for_versions

pytest.importorskip("cryptography", reason="needs edgefl[secure]")

pytestmark = pytest.mark.timeout(300)

SECURE = Secure(clip=1.0, resolution=64, holders=4, recover=3, private=1)
MASKED = Server(secure=SECURE, heartbeat_s=PATIENCE_S)
TRUSTED = Server(secure=Secure(kind="trusted"), heartbeat_s=PATIENCE_S)
PAIRS = Server(secure=Secure(kind="pairwise", resolution=4096), heartbeat_s=PATIENCE_S)
ROUNDS = {"name": "fedavg", "cohort": 4}
UNIFORM = {"name": "fedavg", "cohort": 4, "over_selection": 1.25, "weighting": "uniform"}
TIMED = Fleet(devices={"paper-exponential": 8}, network="none")
"""A fleet whose drawn trip times include all work, so that masking does not change the order of events."""


WALL = [(MASKED, {"name": "fedbuff", "buffer_size": 3}), (PAIRS, ROUNDS)]
SLOW = pytest.mark.slow
"""Mark for slow cases whose code is also covered by other cases of the same test."""


def made(wanted: Experiment, folder: Path) -> dict[str, Any]:
    return edgefl.run(wanted, folder).summary()


def model(folder: Path) -> np.ndarray:
    return np.concatenate([part.reshape(-1) for part in Result(folder).model().values()])


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        pytest.param({"name": "fedbuff", "buffer_size": 3}, (MASKED, TRUSTED), id="fedbuff", marks=SLOW),
        pytest.param({"name": "fedstaleweight", "buffer_size": 3}, (MASKED, TRUSTED), id="fedstaleweight"),
        pytest.param(ROUNDS, (MASKED, TRUSTED, PAIRS), id="fedavg", marks=SLOW),
        pytest.param(
            {"name": "fednova", "cohort": 4, "over_selection": 1.5, "redraw": False},
            (PAIRS,),
            id="fednova with late members",
            marks=SLOW,
        ),
    ],
)
def test_a_run_with_hidden_updates_is_the_plain_run_but_for_rounding(
    strategy: dict[str, Any], servers: tuple[Server, ...], tmp_path: Path
) -> None:
    """Masking rounds weights and updates, which changes the model by far less than a training step does.

    Late members of a round with pairwise masks are dropouts: their masks are recovered in each sum.
    """
    wanted = virtual(fleet=TIMED, strategy=strategy)
    plain = made(wanted, tmp_path / "plain")
    for server in servers:
        assert server.secure is not None
        folder = tmp_path / server.secure.kind
        hidden = made(msgspec.structs.replace(wanted, server=server), folder)
        assert hidden["client_trips"] == plain["client_trips"]
        assert hidden["dropped_updates"] == 0
        assert not {"clipped", "rounded"} & hidden["incidents"].keys()
        change = np.abs(model(folder) - model(tmp_path / "plain")).max()
        largest = np.abs(model(tmp_path / "plain")).max()
        if server is TRUSTED:
            assert change < 1e-5 * largest
            assert hidden["secure"]["share_bytes_per_trip"] == 32
        else:
            assert 0 < change < 0.01 * largest


def test_each_update_that_secure_clip_limits_is_an_incident(tmp_path: Path) -> None:
    server = Server(secure=msgspec.structs.replace(SECURE, clip=1e-6), heartbeat_s=PATIENCE_S)
    strategy = {"name": "fedbuff", "buffer_size": 2}
    wanted = virtual(fleet=TIMED, strategy=strategy, server=server, stop=Stop(versions=4))
    found = made(wanted, tmp_path)
    assert len(incidents(tmp_path, "clipped")) == found["client_trips"] > 0
    shown = io.StringIO()
    Console(file=shown, width=100).print(summary_table(found, tmp_path))
    assert f"limited elements of {found['client_trips']} updates" in shown.getvalue()


def test_a_rounding_that_distorts_the_first_version_is_an_incident(tmp_path: Path) -> None:
    """Regression: it was not noticed. The elements of these updates are of the order of 0.01."""
    server = Server(secure=msgspec.structs.replace(SECURE, clip=1e6), heartbeat_s=PATIENCE_S)
    found = made(virtual(fleet=TIMED, server=server, stop=Stop(versions=3)), tmp_path)
    (noted,) = incidents(tmp_path, "rounded")
    step = f"{found['secure']['step']:.3g}"
    assert noted.detail == f"version 1: updates rounded to multiples of {step} gave a sum of zeros"
    shown = io.StringIO()
    Console(file=shown, width=160).print(summary_table(found, tmp_path))
    assert "choose a smaller server.secure.clip or resolution, or sum fewer updates" in shown.getvalue()


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


def test_failed_trips_and_refused_sums_count_as_zero_in_a_private_run(tmp_path: Path) -> None:
    """One phone is much faster, so some buffers hold only its updates; their sums are refused. One update is
    not finite."""
    secure = Secure(holders=2, recover=2, private=1)
    wanted = virtual(
        fleet=Fleet(devices={"pixel-4": 1, "pi-zero-2w": 1}, network="fios"),
        strategy={"name": "fedbuff", "buffer_size": 2},
        privacy=Privacy(clip_norm=0.1, noise_multiplier=0.1, noise="seeded"),
        server=Server(secure=secure, heartbeat_s=PATIENCE_S),
        stop=Stop(trips=30),
    )
    folder = tmp_path / "run"
    Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": "nan:0:1"}).ends()
    found, refusals = summary(folder), incidents(folder, "refused")
    assert found["versions"] == 15
    assert found["dropped_updates"] == 0
    assert any("updates from 1 clients; at least 2 are required" in row.detail for row in refusals)
    assert any("the update is not finite" in row.detail for row in incidents(folder, "failed"))
    assert verify(folder).versions == 15


def test_pairwise_masks_give_the_same_bits_for_any_workers_and_transport(tmp_path: Path) -> None:
    """A round has late members, whose computation may be cancelled, and a member whose trips fail."""
    found = []
    for workers, transport in ((1, "shm"), (2, "wire")):
        wanted = virtual(
            workers,
            server=msgspec.structs.replace(PAIRS, transport=transport),
            strategy={"name": "fedavg", "cohort": 3, "over_selection": 4 / 3},
            stop=Stop(versions=8),
        )
        environment = {"EDGEFL_FAILPOINTS": "nan:0:1,leave:1:0"}
        Command.run(wanted, tmp_path / transport, environment=environment).ends()
        found.append(summary(tmp_path / transport)["model_sha256"])
    assert found[0] == found[1]


def test_dropouts_are_recovered_up_to_the_threshold_of_pairwise_masks(tmp_path: Path) -> None:
    """A round has three clients, and its sum needs two. Client 0 fails in its first trip, so two remain; then
    clients 1 and 2 fail in the same round, and the sum of one client is refused.

    Mutants: the sum of one client is released; a lost member is replaced; a refused round is not repeated.
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
        "1 clients uploaded; at least 2 are required"
    ]
    with Record(folder) as record:
        assert record.versions["updates"].tolist() == [2, 3, 3, 3, 3]


def test_members_that_die_and_leave_are_dropouts(tmp_path: Path) -> None:
    """A fifth of all trips is lost, and each sum has more than half of the clients of its round."""
    wanted = virtual(
        fleet=Fleet(devices={"pixel-4": 8}, network="lte", churn=Churn(die_per_trip=0.2)),
        strategy={"name": "fedavg", "cohort": 5},
        server=PAIRS,
        stop=Stop(versions=10),
    )
    found = made(wanted, tmp_path / "run")
    with Record(tmp_path / "run") as record:
        sizes = record.versions["updates"].tolist()
    assert min(sizes) >= 3
    assert min(sizes) < 5
    refusals = incidents(tmp_path / "run", "refused")
    assert found["dropped_updates"] == len(refusals)
    assert all(row.detail.endswith("clients uploaded; at least 3 are required") for row in refusals)
    assert verify(tmp_path / "run").model_sha256 == found["model_sha256"]


def test_masking_and_shares_are_part_of_a_trip(finished: Path, tmp_path: Path) -> None:
    """An upload includes the shares of masks, and the computation includes masking."""
    wanted = virtual(stop=Stop(versions=3))
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
    """Mutants: shares of other clients are not downloaded; larger rounds take no more time for masking."""
    found = {}
    for name, cohort in (("plain", 3), ("small", 3), ("large", 6)):
        server = Server(heartbeat_s=PATIENCE_S) if name == "plain" else PAIRS
        wanted = virtual(server=server, strategy={"name": "fedavg", "cohort": cohort}, stop=Stop(versions=1))
        made(wanted, tmp_path / name)
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
    ("server", "strategy", "churn"),
    [
        (*WALL[0], Churn(mean_online_s=20.0, mean_offline_s=5.0)),
        pytest.param(*WALL[1], Churn(), marks=SLOW),
    ],
    ids=["masks, phones come and go", "pairwise"],
)
def test_a_run_under_the_wall_clock(
    server: Server, strategy: dict[str, Any], churn: Churn, tmp_path: Path
) -> None:
    fleet = msgspec.structs.replace(experiment().fleet, churn=churn)
    found = made(experiment(server=server, strategy=strategy, fleet=fleet), tmp_path / "run")
    assert found["versions"] == 12
    assert found["dropped_updates"] == 0
    assert incidents(tmp_path / "run", "refused") == []
    assert not (tmp_path / "run" / "phones.key").exists()
    assert verify(tmp_path / "run").versions == 12


def test_checksums_of_hidden_updates_are_compared_while_their_keys_exist(tmp_path: Path) -> None:
    """An interrupted run keeps its keys. Without them, new masks change the checksums, but not the sums."""
    folder = tmp_path / "run"
    command = Command.run(virtual(server=MASKED, stop=Stop(versions=100_000)), folder)
    wait_for_versions(folder, 5, command)
    command.interrupt()
    command.finish()
    without = tmp_path / "without keys"
    shutil.copytree(folder, without)
    (without / "phones.key").unlink()
    assert verify(folder) == verify(without)
    alter(folder, "UPDATE trips SET checksum_sent = 7 WHERE task = 3")
    with pytest.raises(RunError, match=r"the update of task 3 .* the record says 0000000000000007"):
        verify(folder)


PRIVATE = {
    "privacy": Privacy(clip_norm=0.1, noise_multiplier=0.5, noise="seeded"),
    "strategy": {"name": "fedbuff", "buffer_size": 3, "momentum": 0.5},
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"strategy": {"name": "median"}}, "hides individual updates, but strategy 'median' reads them"),
        ({"strategy": {"name": "scaffold"}}, "needs a strategy that uses only weighted sums"),
        ({"strategy": {"name": "fedasync"}}, "needs a strategy|least_clients: must be at most 1"),
        ({"strategy": {"name": "ca2fl"}}, "'ca2fl' uses updates again in later steps"),
        ({"strategy": {"name": "mifa"}}, "'mifa' uses updates again in later steps"),
        ({"server": Server(secure=SECURE, update_format="int8")}, "update_format: must be 'float32'"),
        ({"server": Server(secure=Secure(holders=9, recover=8))}, "at most 6, the number of clients, got 9"),
        ({"server": Server(secure=Secure(holders=5, recover=3))}, "recover: must be at least 4 with 5"),
        ({"server": Server(secure=Secure(holders=3, recover=3, private=3))}, "private < recover ≤ holders"),
        ({"server": Server(secure=Secure(least_clients=4))}, "least_clients: must be at most 3, the"),
        (
            {
                "fleet": Fleet(devices={"paper-exponential": 300_000}),
                "strategy": {"name": "fedfix"},
                "server": Server(secure=Secure(resolution=4096)),
            },
            "server.secure.resolution: must be at most 3579 for sums of up to 300000 updates, got 4096",
        ),
        ({"privacy": Privacy(clip_norm=1.0, quantile=0.5)}, "privacy.quantile reads updates' norms"),
        ({"server": PAIRS}, "needs a strategy with rounds whose clients know their weights .* got FedBuff"),
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
def test_experiments_that_cannot_be_masked_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        checked(virtual(**{"server": MASKED, **changes}), Path.cwd())


def test_a_run_on_nodes_is_refused() -> None:
    from edgefl.hosts.nodes import on_nodes

    with pytest.raises(ConfigError, match="needs all clients on this host"):
        on_nodes(virtual(server=MASKED), Path(os.devnull))
