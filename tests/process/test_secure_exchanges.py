"""Masked sums wait until enough clients can unmask them and the replies of those clients have arrived."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

import edgefl
from edgefl import Clock, Fleet, Server, Stop
from edgefl.core.events import Arrived, Died, Joined, Left, Summed, Unmasking
from edgefl.devices import load_network
from edgefl.errors import ConfigError
from edgefl.experiment import Churn, Privacy, Secure
from edgefl.lab.verify import verify
from edgefl.results.record import Record
from edgefl.run.hidden import rules_of
from edgefl.run.supervisor import resume
from edgefl.strategies import resolve

from .disturbed import killed
from .runs import PATIENCE_S, experiment, incidents, virtual
from .test_secure import MASKED, ROUNDS, SECURE, SLOW, WALL, made

pytest.importorskip("cryptography", reason="needs edgefl[secure]")

from edgefl.run.hidden_masks import holders_of
from edgefl.secure.coded import Rules

pytestmark = pytest.mark.timeout(300)

AWAY = Fleet(
    devices={"pixel-4": 8},
    network="lte",
    churn=Churn(mean_online_s=0.8, mean_offline_s=0.6, die_per_trip=0.05),
)
"""Phones that leave after a few trips and return."""


@pytest.mark.parametrize(
    ("server", "strategy"), [WALL[0], pytest.param(*WALL[1], marks=SLOW)], ids=["masks", "pairwise"]
)
def test_sums_wait_until_enough_clients_can_unmask_them(
    server: Server, strategy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are bit-identical for any number of workers, for both transports, and if servers are killed.

    Mutants: holders answer while they are offline; a sum that waits is refused, or is forgotten on resume.
    """
    fields = {"fleet": AWAY, "strategy": strategy, "stop": Stop(versions=25)}
    made(virtual(1, server=server, **fields), tmp_path / "calm")
    points = ["event:0:40", "event:1:50", "sum:2:5"]
    wanted = virtual(2, server=msgspec.structs.replace(server, transport="wire"), **fields)
    assert killed(wanted, tmp_path / "killed", points, monkeypatch) == len(points)
    models, times = [], []
    for folder in (tmp_path / "calm", tmp_path / "killed"):
        with Record(folder) as record:
            models.append(record.meta.model_sha256)
            times.append(record.versions["at_s"].tolist())
            events = [event for _, event in record.events()]
        assert not [row for row in incidents(folder, "refused") if "online" in row.detail]
        waited = [a for a, b in pairwise(events) if isinstance(a, Joined) and isinstance(b, Unmasking)]
        assert waited  # an exchange began because a client joined
        ends = {event.version: event.until_s for event in events if isinstance(event, Unmasking)}
        sums = [event for event in events if isinstance(event, Summed) and not event.bad]
        assert all(event.at_s == ends[event.version] for event in sums)  # also if the exchange was repeated
        if server is MASKED:
            assert min(holders_online(events, 8)) >= SECURE.recover
    assert models[0] == models[1]
    assert times[0] == times[1]


def holders_online(events: list[Any], clients: int) -> list[int]:
    """Return the number of share holders that were online at each sum, according to the journal."""
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
def test_a_version_is_made_when_enough_replies_have_arrived(recover: int, tmp_path: Path) -> None:
    """All six clients hold shares: four on a fast link, two on a slow one. Links add no headers or delays.

    Mutants: there is no exchange; all replies take the time of the same link; the version is made at the mean
    or the latest time of all replies.
    """
    fleet = Fleet(
        devices={"pixel-4": 4, "moto-g4": 2},
        network={"pixel-4": "defedavg-400", "moto-g4": "defedavg-in-small"},
        variation=0.0,
    )
    server = Server(secure=Secure(holders=6, recover=recover, private=1), heartbeat_s=PATIENCE_S)
    wanted = virtual(fleet=fleet, server=server, stop=Stop(versions=6))
    found = made(wanted, tmp_path / "run")["secure"]
    mbps = load_network("defedavg-400" if recover == 4 else "defedavg-in-small").down.rate_mbps
    assert mbps is not None
    received, sent = found["holder_bytes_per_update"], found["holder_bytes_per_version"]
    takes_s = (3 * received + sent) * 8 / (mbps * 1e6)
    assert [one.until_s - one.at_s for one in exchanges(tmp_path / "run")] == pytest.approx([takes_s] * 6)
    assert found["exchange_s"]["mean"] == pytest.approx(takes_s, rel=1e-3)
    with Record(tmp_path / "run") as record:
        versions_s, events = record.versions["at_s"].tolist(), [event for _, event in record.events()]
        assert versions_s == [one.until_s for one in exchanges(tmp_path / "run")]
        begins = {event.at_s for event in events if isinstance(event, Arrived)} | {*versions_s}
    assert all(one.at_s in begins for one in exchanges(tmp_path / "run"))
    assert verify(tmp_path / "run").versions == 6


SLOW_LINK = Fleet(devices={"pixel-4": 4, "moto-g4": 2}, network="dial-up")
"""A fleet whose link is so slow that updates arrive during an exchange."""


@pytest.mark.parametrize("most", [0, 20])
def test_the_staleness_of_an_update_counts_the_version_that_is_being_made(most: int, tmp_path: Path) -> None:
    strategy = {"name": "fedbuff", "buffer_size": 3, "max_staleness": most, "restart": "new-version"}
    wanted = virtual(fleet=SLOW_LINK, server=MASKED, strategy=strategy, stop=Stop(versions=6))
    made(wanted, tmp_path / "run")
    assert all(lag == staleness <= most for lag, staleness in lags(tmp_path / "run"))
    assert verify(tmp_path / "run").versions == 6


def lags(folder: Path) -> list[tuple[int, int]]:
    """Return, for each applied update, the number of versions between its base version and the version before
    its sum, and its recorded staleness."""
    with Record(folder) as record:
        trips = {name: record.trips[name].tolist() for name in ("task", "base_version", "staleness")}
        rows = {task: (base, stale) for task, base, stale in zip(*trips.values(), strict=True)}
        return [
            (version - 1 - rows[task][0], rows[task][1])
            for version, tasks, _ in record.sums()
            for task in tasks
        ]


def away(network: str) -> dict[str, Any]:
    """Six phones, half of which are online on average. Four hold shares, and a sum needs all four online."""
    secure = Secure(holders=4, recover=4, private=1)
    churn = Churn(mean_online_s=3.0, mean_offline_s=3.0)
    return {
        "fleet": Fleet(devices={"pixel-4": 6}, network=network, churn=churn),
        "server": Server(secure=secure, heartbeat_s=PATIENCE_S),
    }


def test_the_staleness_of_an_update_counts_the_version_whose_sum_waits_for_clients(tmp_path: Path) -> None:
    """A client has at most one update, so the next version uses all updates that arrive while a sum waits."""
    strategy = {"name": "fedbuff", "buffer_size": 3, "restart": "after-step"}
    made(virtual(**away("lte"), strategy=strategy, stop=Stop(versions=10)), tmp_path / "run")
    assert any(one.until_s == one.at_s for one in exchanges(tmp_path / "run"))
    assert all(lag == staleness for lag, staleness in lags(tmp_path / "run"))
    assert verify(tmp_path / "run").versions == 10


def test_arrivals_while_a_sum_waits_for_clients_are_lost(tmp_path: Path) -> None:
    """They are lost even if the exchange takes no time. Mutant: they all start when the sum is made."""
    process = {"arrival_process": "constant", "arrival_rate_per_s": 5.0}
    strategy = {"name": "fedbuff", "buffer_size": 3, **process}
    found = made(virtual(**away("none"), strategy=strategy, stop=Stop(versions=6)), tmp_path / "run")
    assert any(one.until_s == one.at_s for one in exchanges(tmp_path / "run"))
    assert "exchange_s" not in found["secure"]  # there was no exchange that took time
    with Record(tmp_path / "run") as record:
        sent_s = record.trips["sent_s"].tolist()
    assert len({*sent_s}) == len(sent_s)  # each arrival starts one client


def test_times_of_a_private_run_do_not_depend_on_bad_updates(
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
    """No client trains during the exchange, but the run continues. Mutant: the server does not wait."""
    server = Server(secure=SECURE, heartbeat_s=0.2)
    clock = Clock(kind="wall", time_scale=0.3)
    fields = {"fleet": SLOW_LINK, "server": server, "strategy": ROUNDS, "clock": clock}
    made(experiment(**fields, stop=Stop(versions=2)), tmp_path / "first")
    last = exchanges(tmp_path / "first")[-1]
    ends = Stop(emulated_s=last.at_s + 0.7 * (last.until_s - last.at_s))
    assert made(experiment(**fields, stop=ends), tmp_path / "second")["stop_reason"] == "emulated_s"


def test_a_sum_is_refused_if_the_run_ends_during_its_exchange(tmp_path: Path) -> None:
    wanted = virtual(server=MASKED, stop=Stop(versions=5))
    made(wanted, tmp_path / "first")
    last = exchanges(tmp_path / "first")[-1]
    end_s = (last.at_s + last.until_s) / 2
    made(msgspec.structs.replace(wanted, stop=Stop(emulated_s=end_s)), tmp_path / "second")
    with Record(tmp_path / "second") as record:
        assert (record.meta.stop_reason, len(record.versions["at_s"])) == ("emulated_s", 4)
    (*_, refused) = incidents(tmp_path / "second", "refused")
    assert refused.at_s == end_s
    assert "the run ended during the exchange that would have unmasked the sum" in refused.detail


def test_a_sum_that_waits_when_the_run_ends_is_refused(tmp_path: Path) -> None:
    """A sum needs all four holders online; half of all phones are online on average. The second run ends in
    the middle of the first run's longest time without a version.

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


@pytest.mark.parametrize(
    ("kind", "pause_s"), [("virtual", None), ("virtual", 0.6), pytest.param("wall", None, marks=SLOW)]
)
def test_a_run_whose_sums_can_never_be_unmasked_ends_with_its_results(
    kind: Literal["virtual", "wall"], pause_s: float | None, tmp_path: Path
) -> None:
    """All phones hold shares and all are needed, so the sum after the first death waits for ever.

    Regression: no client was training and none would start, which was an error.
    """
    secure = Secure(holders=6, recover=6, private=1)
    churn = Churn(mean_online_s=pause_s, mean_offline_s=pause_s, die_per_trip=0.1)
    wanted = virtual(
        fleet=Fleet(devices={"pixel-4": 6}, network="lte", churn=churn, on_death="drop"),
        server=Server(secure=secure, heartbeat_s=PATIENCE_S),
        clock=Clock(kind=kind, workers=2),
        stop=Stop(versions=1000),
    )
    found = made(wanted, tmp_path / "run")
    assert found["status"] == "done"
    assert found["stop_reason"].startswith("too few clients are left: ")
    assert 0 < found["versions"] < 1000
    refused = incidents(tmp_path / "run", "refused")
    assert len(refused) == 3
    assert all("clients that can unmask the sum are online; 6 are needed" in row.detail for row in refused)
    assert verify(tmp_path / "run").versions == found["versions"]
    with pytest.raises(ConfigError, match="nothing to resume"):
        resume(tmp_path / "run")


def test_a_sum_of_one_client_is_refused(tmp_path: Path) -> None:
    """One phone is much faster, so some buffers hold two updates of one client."""
    secure = Secure(holders=2, recover=2, private=1)
    fleet = Fleet(devices={"pixel-4": 1, "pi-zero-2w": 1}, network="fios")
    strategy = {"name": "fedbuff", "buffer_size": 2}
    wanted = virtual(
        fleet=fleet, strategy=strategy, stop=Stop(trips=30), server=Server(secure=secure, heartbeat_s=60.0)
    )
    found = made(wanted, tmp_path / "run")
    refusals = incidents(tmp_path / "run", "refused")
    assert found["dropped_updates"] == len(refusals) > 0
    assert all(
        "the sum includes updates from 1 clients; at least 2 are required" in row.detail for row in refusals
    )
    assert found["versions"] == len(exchanges(tmp_path / "run")) > 0  # none for a sum that is refused
