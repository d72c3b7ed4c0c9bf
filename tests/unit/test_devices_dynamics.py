"""Tests of clients' availability and condition: windows, churn, and the dynamics with the real core."""

from __future__ import annotations

import heapq
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy import stats

from edgefl import config
from edgefl.core import Core
from edgefl.core.deaths import Deaths
from edgefl.core.events import Arrived, Died, Event, Joined, Left, Release, Sum, Summed, Train
from edgefl.devices.dynamics import Dynamics, dynamics_of
from edgefl.devices.fleet import ClientInfo, Trips
from edgefl.devices.presence import AlternatingRenewal, LateJoin, Presence, Windows, read_availability
from edgefl.errors import ConfigError, ProfileError
from edgefl.experiment import Churn, Experiment, Fleet, Stop
from edgefl.learning.operations import BatchWork, StepWork
from edgefl.seeds import stream
from edgefl.strategies.base import Client
from edgefl.strategies.fedbuff import FedBuff

PROFILE = """
id = "hot"
name = "A phone that gets hot and empty fast"
class = "budget"
cpu.rate_gflops.train = 1.0
battery = { capacity_mah = 10, voltage_v = 4, idle_ma = 50, min_soc = 0.2, charge_w = 5 }
[thermal]
ambient_c = 25
r_c_per_w = 10
tau_s = 20
busy_w = 4
trips = [{ temp_c = 45, freq_scale = 0.5 }]
[sources]
cpu = "assumed: a test"
thermal = "assumed: a test"
battery = "assumed: a test"
"""

WORK = BatchWork(fixed=StepWork(), per_example=StepWork(matmul_flop=0.4e9))
BYTES = 400_000


@pytest.fixture
def profile(tmp_path: Path) -> str:
    (tmp_path / "hot.toml").write_text(PROFILE)
    return str(tmp_path / "hot.toml")


def experiment(profile: str, **fleet: object) -> Experiment:
    exact = {"units": "identical", "variation": 0.0, "phase": "aligned"}
    given = {"thermal": True, "battery": True, "network": "lte", **exact, **fleet}
    return Experiment(fleet=Fleet(devices={profile: 4}, **given), seed=3, stop=Stop(versions=40))


def trips(wanted: Experiment, infos: list[ClientInfo]) -> Trips:
    """Return trips of one epoch of ten examples each: 4 GFLOP, which take 4 s at full speed."""
    return Trips(wanted, infos, [10] * len(infos), WORK, BYTES, BYTES)


class World:
    """A small virtual clock: the core, the dynamics (``book``) and an agenda of events."""

    def __init__(self, wanted: Experiment, clients: int = 4) -> None:
        (profile,) = wanted.fleet.devices
        infos = [ClientInfo(client, profile, wanted.fleet.network) for client in range(clients)]
        self.book: Dynamics = dynamics_of(wanted, infos, trips(wanted, infos))
        devices = [Client(client, "hot", 10) for client in range(clients)]
        deaths = Deaths(wanted.fleet.on_death, wanted.fleet.rejoin_s)
        self.core = Core(FedBuff(buffer_size=2), devices, 3, wanted.stop, deaths=deaths)
        self.journal: list[Event] = []
        self.released: list[tuple[int, str]] = []
        self._agenda: list[tuple[float, int, int, int, Event]] = []

    def run(self) -> World:
        self._follow()
        while self._agenda and self.core.stopped is None and len(self.journal) < 5000:
            at_s, _, client, _, event = heapq.heappop(self._agenda)
            if isinstance(event, Arrived):
                if self.core.base_of(client, event.task) is None:
                    continue
            elif self.book.move(client).at_s != at_s:
                continue
            elif self.book.declares_death(client, at_s):
                event = Died(client, at_s, "died", declared=True)
            self._tell(event)
        return self

    def of(self, *kinds: type[Any]) -> list[Any]:
        """The journal's events of these types."""
        return [event for event in self.journal if isinstance(event, kinds)]

    def _enter(self, event: Arrived | Joined | Left) -> None:
        heapq.heappush(
            self._agenda, (event.at_s, isinstance(event, Left), event.client, len(self._agenda), event)
        )

    def _tell(self, event: Event) -> None:
        book = self.book
        self.journal.append(event)
        actions = self.core.handle(event)
        book.observe(event, actions, self.core.now_s)
        for action in actions:
            if isinstance(action, Train):
                plan = book.plan(action.client)
                arrives_s = self.core.now_s + plan.total_s
                if arrives_s <= book.lost_at_s(action.client):
                    self._enter(Arrived(action.client, action.task, action.version, 10, 5, 1.0, arrives_s))
            elif isinstance(action, Release):
                self.released.append((action.task, action.fate))
            elif isinstance(action, Sum):
                self._tell(Summed(action.version, self.core.now_s))
        self._follow()

    def _follow(self) -> None:
        book = self.book
        for client in book.moved():
            move = book.move(client)
            if move.joins and move.at_s < math.inf:
                self._enter(Joined(client, move.at_s))
            elif move.at_s < math.inf:
                finishes = self.core.task_of(client) is not None and book.finishes(client)
                self._enter(Left(client, move.at_s, move.why, finishes=finishes))


CHURN = Churn(mean_online_s=60.0, mean_offline_s=20.0, die_per_trip=0.05)


@pytest.mark.parametrize("on_leave", ["lose", "finish"])
def test_every_task_has_one_fate_and_no_offline_phone_gets_a_task(profile: str, on_leave: str) -> None:
    world = World(experiment(profile, churn=CHURN, on_leave=on_leave)).run()
    assert world.core.stopped == "versions"
    tasks, fates = zip(*world.released, strict=True)
    assert len(tasks) == len(set(tasks))
    assert {"applied", "lost"} <= set(fates)
    leavers = world.of(Left)
    assert {event.reason for event in world.of(Left, Died)} == {"offline", "battery", "died"}
    assert any(event.finishes for event in leavers) == (on_leave == "finish")
    assert not any(event.reason == "died" for event in leavers)


def test_replaying_the_journal_gives_the_same_dynamics(profile: str) -> None:
    wanted = experiment(profile, churn=CHURN)
    world, again = World(wanted).run(), World(wanted)
    for event in world.journal:
        again.book.observe(event, again.core.handle(event), again.core.now_s)
    for client in range(4):
        assert again.book.condition(client) == world.book.condition(client)
        assert again.book.move(client) == world.book.move(client)
        assert again.book.plan(client) == world.book.plan(client)


def test_client_and_server_plan_the_same_trip(profile: str) -> None:
    wanted = experiment(profile)
    world = World(wanted).run()
    made, lost = (
        sum(event.client == 1 for event in world.of(*kinds)) for kinds in ((Arrived,), (Left, Died))
    )
    condition = world.book.condition(1)
    assert condition.temp_c > 30
    mine = trips(wanted, [ClientInfo(client, profile, "lte") for client in range(4)])
    planned = [mine.plan(1, trip, None, condition) for trip in (made, made + lost)]
    assert world.book.plan(1) in planned


def test_a_phone_slows_down_as_it_heats_up(profile: str) -> None:
    world = World(experiment(profile, battery=False, network="none"), clients=1).run()
    arrivals = [event.at_s for event in world.of(Arrived)]
    assert arrivals[0] == pytest.approx(4.0)
    # At 45 °C it dissipates 2 W: the mean of 4 W at full speed (1/3 of the time) and 1 W at half speed.
    assert arrivals[-1] - arrivals[-2] == pytest.approx(4.0 * 1.5)


def test_a_phone_with_a_low_battery_returns_when_it_is_full(profile: str) -> None:
    world = World(experiment(profile, thermal=False, network="none"), clients=1).run()
    first, low, full = world.of(Joined, Left)[:3]
    assert [type(event) for event in (first, low, full)] == [Joined, Left, Joined]
    # 10 mAh at 4 V are 144 J. The charge falls to a fifth at 4.2 W (0.2 W idle + 4 W), and then rises at 5 W.
    assert low.at_s == pytest.approx(0.8 * 144 / 4.2)
    assert full.at_s - low.at_s == pytest.approx(0.8 * 144 / 5)


def test_a_device_that_dies_and_is_dropped_never_returns(profile: str) -> None:
    churn = Churn(die_per_trip=0.5)
    world = World(experiment(profile, churn=churn, on_death="drop", battery=False)).run()
    assert sorted(event.client for event in world.of(Died)) == [0, 1, 2, 3]
    assert all(world.book.move(client).at_s == math.inf for client in range(4))


def test_a_dead_device_returns_after_rejoin_s(profile: str) -> None:
    world = World(experiment(profile, churn=Churn(die_per_trip=0.2), rejoin_s=7.5, battery=False)).run()
    deaths = world.of(Died)
    assert len(deaths) >= 5
    for death in deaths[:5]:
        later = world.journal[world.journal.index(death) :]
        back = (event.at_s for event in later if isinstance(event, Joined) and event.client == death.client)
        assert next(back) == pytest.approx(death.at_s + 7.5)


def test_a_device_that_dies_while_it_finishes_its_last_task_dies_once_and_returns(profile: str) -> None:
    """Regression: the device never returned, and after a resume it died again, at another time."""
    churn = Churn(mean_online_s=8.0, mean_offline_s=2.0, die_per_trip=0.5)
    world = World(experiment(profile, churn=churn, on_leave="finish", battery=False)).run()
    seen = 0
    for client in range(4):
        moves = [event for event in world.of(Joined, Left, Died) if event.client == client]
        for left, died, back in zip(moves, moves[1:], moves[2:], strict=False):
            if isinstance(left, Left) and isinstance(died, Died):
                seen += 1
                assert isinstance(back, Joined)
        assert world.book.move(client).at_s > moves[-1].at_s
    assert seen >= 3


def test_a_fleet_without_changing_conditions_has_no_dynamics(profile: str) -> None:
    wanted, infos = experiment(profile, thermal=False, battery=False), [ClientInfo(0, profile, "lte")]
    assert dynamics_of(wanted, infos, trips(wanted, infos)) is None


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        ({"thermal": True}, "thermal: no device of the fleet gives all of"),
        ({"battery": True}, "battery: no device of the fleet has a [battery]"),
        (
            {"devices": {"paper-fast-u1-2": 2}, "model_errors": "drawn"},
            "model_errors: 'drawn' (also set by --fleets) has no",
        ),
        ({"charge": 1.5}, "charge: must be a number from 0 to 1, got 1.5"),
        ({"availability": "nowhere.json"}, "availability: availability file"),
        ({"churn": {"mean_online_s": 3.0}}, "churn.mean_offline_s: missing"),
        ({"churn": {"mean_online_s": 0, "mean_offline_s": 1}}, "churn.mean_online_s: must be"),
        ({"churn": {"mean_online_s": math.inf, "mean_offline_s": 1}}, "churn.mean_online_s: must be"),
        ({"churn": {"die_per_trip": 1}}, "churn.die_per_trip: must be"),
        ({"on_leave": "stay"}, "on_leave: must be 'finish' or 'lose', got 'stay'"),
    ],
)
def test_invalid_keys_give_a_one_line_error(fleet: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.validate(Experiment(fleet={"devices": {"board-qrb2210": 2}, **fleet}, stop=Stop(versions=1)))
    assert "\n" not in str(error.value)
    assert f"fleet.{said}" in str(error.value)


def churn(client: int = 0, on_s: float = 60.0, off_s: float = 20.0) -> AlternatingRenewal:
    return AlternatingRenewal(on_s, off_s, stream(7, "churn", client))


def test_adjacent_windows_are_joined() -> None:
    night = Windows([(0.0, 6.0), (22.0, 24.0)], period_s=24.0)
    assert night.on(0.0)
    assert [night.changes_s(at_s) for at_s in (0.0, 6.0, 22.0)] == [6, 22, 30]
    assert Windows([(1.0, 2.0), (2.0, 3.0)], period_s=4.0).changes_s(1.0) == 3.0
    always = Windows([(0.0, 5.0)], period_s=5.0)
    assert (always.on(1e6 + 4.999), always.changes_s(1.0)) == (True, math.inf)


def test_windows_are_correct_at_and_around_every_change() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        period_s = float(rng.uniform(1, 100))
        edges = np.sort(rng.uniform(0, period_s, 2 * rng.integers(1, 5)))
        edges[0] *= rng.random() < 0.7
        intervals = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        shift_s, at_s = float(rng.uniform(0, period_s)), float(rng.uniform(0, 1e6))
        windows = Windows(intervals, period_s, shift_s)
        for _ in range(20):
            change_s = windows.changes_s(at_s)
            middle_s = (at_s + change_s) / 2
            phase_s = (middle_s + shift_s) % period_s
            assert change_s > at_s
            assert windows.on(change_s) != windows.on(at_s) == windows.on(middle_s)
            assert windows.on(middle_s) == any(start <= phase_s < end for start, end in intervals)
            at_s = change_s


def test_online_and_offline_times_have_the_declared_exponential_distributions() -> None:
    client, at_s = churn(), 0.0
    changes = [at_s := client.changes_s(at_s) for _ in range(4001)]
    first_on = client.on(changes[0])
    lengths = np.diff(changes)
    on, off = lengths[0 if first_on else 1 :: 2], lengths[1 if first_on else 0 :: 2]
    assert stats.kstest(on, stats.expon(0, 60.0).cdf).pvalue > 0.01
    assert stats.kstest(off, stats.expon(0, 20.0).cdf).pvalue > 0.01


def test_the_online_share_of_a_fleet_is_the_same_at_all_times() -> None:
    fleet = [churn(client) for client in range(2000)]
    for at_s in (0.0, 13.0, 500.0):
        share = sum(client.on(at_s) for client in fleet) / len(fleet)
        assert abs(share - 0.75) < 2.576 * math.sqrt(0.75 * 0.25 / len(fleet))


def test_churn_does_not_depend_on_the_order_of_queries() -> None:
    instants = np.linspace(0.0, 5000.0, 300)
    forward, backward = churn(), churn()
    onward = [(forward.on(at), forward.changes_s(at)) for at in instants]
    assert onward == [(backward.on(at), backward.changes_s(at)) for at in instants[::-1]][::-1]
    assert churn(1).changes_s(0.0) != churn(0).changes_s(0.0)


def test_a_client_is_online_when_all_its_sources_are() -> None:
    sources = [LateJoin(50.0), Windows([(0.0, 30.0), (40.0, 60.0)], 70.0, 3.0), churn(3)]
    client, at_s = Presence(sources), 0.0
    for _ in range(50):
        next_online_s = client.next_online_s(at_s)
        next_offline_s = client.next_offline_s(next_online_s)
        assert at_s <= next_online_s < next_offline_s
        for between in np.linspace(at_s, next_online_s, 7)[:-1]:
            assert next_online_s == at_s or not all(source.on(between) for source in sources)
        for between in np.linspace(next_online_s, next_offline_s, 7)[:-1]:
            assert all(source.on(between) for source in sources)
        assert not client.online(next_offline_s)
        at_s = next_offline_s


def test_windows_that_never_overlap_give_infinity() -> None:
    apart = Presence([Windows([(0.0, 1.0)], 4.0), Windows([(2.0, 3.0)], 4.0)])
    assert apart.next_online_s(0.0) == math.inf
    assert Presence([]).next_offline_s(0.0) == math.inf
    assert Presence([churn()]).next_online_s(math.inf) == math.inf


def written(folder: Path, content: Any) -> str:
    path = folder / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    return str(path)


def test_an_availability_file_is_read(tmp_path: Path) -> None:
    (entry,) = read_availability(written(tmp_path, [{"intervals_s": [[0, 5], [7, 9]], "period_s": 10}]))
    assert (entry.intervals_s, entry.period_s) == (((0.0, 5.0), (7.0, 9.0)), 10.0)
    with pytest.raises(ProfileError, match="No such file"):
        read_availability("/nowhere/a.json")


def interval(start: int, end: int, period: int = 9, **more: Any) -> dict[str, Any]:
    return {"intervals_s": [[start, end]], "period_s": period, **more}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "at least one"),
        (b"nonsense", "malformed"),
        ([{"intervals_s": [[0, 5]]}], "period_s"),
        ([interval(0, 5, 0)], "> 0.0"),
        ([interval(0, 5, 4)], "entry 0: period_s: must be at least"),
        ([interval(0, 5), interval(5, 5)], "entry 1"),
        ([{"intervals_s": [[0, 5], [4, 6]], "period_s": 9}], "a start of at least 5"),
        ([interval(0, 5, zone=3)], "zone"),
    ],
)
def test_an_invalid_availability_file_gives_a_one_line_error(content: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ProfileError) as error:
        read_availability(written(tmp_path, content))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
