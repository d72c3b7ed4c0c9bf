"""Tests of trip plans and of delays that are drawn at random."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from trip_parts import device, network, paced, plan, rng

from edgefl.config.checks import ProfileFault, check_profiles
from edgefl.devices import load_device, load_network
from edgefl.devices.fleet import ClientInfo, Trips, device_of, fleet_of, mixed_runtimes
from edgefl.devices.link import Link, move
from edgefl.devices.plan import End, TripPlan, plan_trip
from edgefl.devices.schema import Delay
from edgefl.experiment import Churn, Experiment, Fleet, Training
from edgefl.learning.operations import BatchWork, StepWork
from edgefl.seeds import stream
from edgefl.validation import faults


def test_a_delay_replaces_the_trip_or_is_added_to_its_training_or_precedes_it() -> None:
    drawn = Delay(dist="uniform", low_s=8.0, high_s=12.0)
    whole_trip = plan(device(delay_model=drawn), load_network("edge"), rng(4))
    assert whole_trip.total_s == whole_trip.compute_s == pytest.approx(drawn.draw(rng(4)))
    assert whole_trip.compute_rate_per_s == pytest.approx(2.0 / whole_trip.compute_s)
    assert whole_trip.compute_lead_s == 0.0
    added = device(delay_model=Delay(dist="list", mode="add", values_s=(4.0,)))
    longer = plan(added, network(rate_mbps=8.0), rng())
    assert (longer.compute_s, longer.down_s) == (pytest.approx(6.0), 1.0)
    lead = plan(load_device("paper-slow-u8-12"), load_network("none"), rng(), work_s=0.0)
    assert lead.compute_rate_per_s == math.inf
    assert 8 <= lead.compute_lead_s == lead.total_s <= 12


def test_a_paced_client_takes_the_times_of_the_plan() -> None:
    pacer, now = paced(3.0)
    trip = plan(load_device("moto-g4"), load_network("3g"), rng(8), work_s=1.0)
    down = move(pacer, trip.down, lambda start, stop: None)
    training = trip.compute(pacer)
    for _ in range(5):
        training.done(trip.work_s / 5)
    computed = training.end()
    up = move(pacer, trip.up, lambda start, stop: None)
    assert down.achieved_s == pytest.approx(trip.down_s)
    assert computed.achieved_s == pytest.approx(trip.compute_s) == pytest.approx(1.0)
    assert up.achieved_s == pytest.approx(trip.up_s)
    assert now[0] == pytest.approx(trip.total_s * 3e9)


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),  # 1/U(0.2, 1) has the mean ln(5)/0.8 and the mean square 5
    [
        ("paper-defedavg", math.log(5) / 0.8, math.sqrt(5 - (math.log(5) / 0.8) ** 2)),
        ("paper-defedavg-slowdowns", 3.0, 4 / math.sqrt(12)),
    ],
)
def test_slowdowns_of_defedavg_have_the_papers_distribution(name: str, mean: float, deviation: float) -> None:
    kind = load_device(name)
    rates = [kind.individual(stream(0, "device", c)).train_flop_per_s for c in range(400)]
    slowdown = 10e9 / np.array(rates)
    assert 1 <= slowdown.min() < 1.1
    assert 4.7 < slowdown.max() <= 5
    assert abs(slowdown.mean() - mean) < 4 * deviation / 20
    assert kind.individual(stream(0, "device", 3)).train_flop_per_s == rates[3]
    generator = rng(1)  # a device without a slowdown uses no random numbers
    assert load_device("pi-4").individual(generator) == load_device("pi-4")
    assert generator.random() == rng(1).random()


@pytest.mark.parametrize("work_s", [-1.0, math.nan, math.inf])
def test_work_must_be_finite_and_not_negative(work_s: float) -> None:
    with pytest.raises(ValueError, match="work_s must be"):
        plan(device(), network(), rng(), work_s=work_s)


def whole() -> TripPlan:
    """Plan a trip with 1 s of download, 4 steps of 1 s and 0.5 s of upload."""
    found = plan(device(), network(rate_mbps=8.0), rng(), work_s=4.0)
    assert (found.down_s, found.compute_s, found.up_s) == (1.0, 4.0, 0.5)
    return found


@pytest.mark.parametrize(
    ("budget_s", "steps", "tail_s", "total_s"),
    [
        (0.0, 0, 0.0, 1.5),  # the download is not stopped
        (1.0, 0, 0.0, 1.5),
        (1.5, 0, 0.5, 2.0),
        (2.0, 1, 0.0, 2.5),  # a step that ends with the budget counts
        (3.75, 2, 0.75, 4.25),
        (5.0, 4, 0.0, 5.5),
        (9.0, 4, 4.0, 9.5),  # waits after the last step
    ],
)
def test_a_trip_cut_short_by_a_budget(budget_s: float, steps: int, tail_s: float, total_s: float) -> None:
    found = whole().within(budget_s, [1.0] * 4)
    assert (found.steps, found.work_s) == (steps, steps)
    assert found.tail_s == pytest.approx(tail_s, abs=1e-12)
    assert found.total_s == pytest.approx(total_s, abs=1e-12)
    assert found.busy_s == pytest.approx(4.0 if steps == 4 else found.compute_s, abs=1e-12)


def test_a_trip_cut_short_by_a_budget_keeps_its_delay() -> None:
    slow = plan(load_device("paper-slow-u8-12"), load_network("none"), rng(), work_s=0.0)
    assert slow.within(5.0, []).total_s == 5.0
    assert slow.within(20.0, [0.0, 0.0])[4:7] == (slow.up, 2, pytest.approx(20.0 - slow.total_s))


@pytest.mark.parametrize(
    ("profile", "way", "die"),
    [
        ("pixel-4", "", 0.0),
        ("pixel-4", 'jitter_ms = 9\njitter_dist = "normal"', 0.0),
        ("pixel-4", "loss_pct = 30", 0.0),
        ("pixel-4", "", 0.5),
        ("paper-exponential", "", 0.0),
    ],
)
def test_only_plans_of_equal_trips_are_kept(tmp_path: Path, profile: str, way: str, die: float) -> None:
    own = tmp_path / "lossy.toml"
    own.write_text(
        'id = "lossy"\nname = "lossy"\nup.rate_mbps = 1\nsources = { down = "a test", up = "a test" }\n'
        f"[down]\nrate_mbps = 1\ndelay_ms = 50\n{way}\n"
    )
    fleet = Fleet(devices={profile: 2}, churn=Churn(die_per_trip=die), units="identical", variation=0.0)
    wanted = Experiment(fleet=fleet)
    infos = [ClientInfo(client, profile, str(own)) for client in range(2)]
    made = [Trips(wanted, infos, [9, 9], WORK, 100_000, 10) for _ in range(40)]
    plans = [made[0].plan(client, trip) for trip in range(40) for client in range(2)]
    alike = not (way or die or profile == "paper-exponential")
    assert (len(set(map(id, plans))) == 2, len(set(plans)) == 1) == (alike, alike)
    assert plans[::2] == [trips.plan(0, trip) for trip, trips in enumerate(made)]  # new, not kept


WORK = BatchWork(
    fixed=StepWork(calls=40.0, parameters=1e6), per_example=StepWork(conv_flop=1e8, copy_bytes=1e6)
)


def trips(profile: str, examples: int = 7, work: BatchWork = WORK, client: int = 0) -> Trips:
    """Make trips of two epochs with a batch size of 3. Transfers take no time."""
    fleet = Fleet(devices={profile: 1}, units="identical", variation=0.0)
    wanted = Experiment(fleet=fleet, training=Training(epochs=2, batch_size=3))
    infos = [ClientInfo(at, profile, "none") for at in range(client + 1)]
    return Trips(wanted, infos, [examples] * (client + 1), work, 10, 10)


@pytest.mark.parametrize("profile", ["pi-4", "pixel-4", "nexus-6", "tier-p50"])
def test_a_trips_work_is_the_sum_of_its_steps_and_a_short_batch_takes_less_time(profile: str) -> None:
    model, found = load_device(profile).time_model(), trips(profile)
    whole_s, short_s = (model.seconds(WORK.at(size)) for size in (3, 1))
    assert found.plan(0, 0).work_s == pytest.approx(4 * whole_s + 2 * short_s, rel=1e-12)
    assert (found.full_step_s(0), found.step_s(0, 1)) == pytest.approx((whole_s, short_s), rel=1e-12)
    assert trips(profile, examples=2).full_step_s(0) == pytest.approx(model.seconds(WORK.at(2)), rel=1e-12)
    cut = found.plan(0, 0, End(3.5 * whole_s + short_s))  # whole, whole, short, whole, half a step
    assert (cut.steps, cut.work_s) == (4, pytest.approx(3 * whole_s + short_s, rel=1e-12))
    assert cut.compute_s == pytest.approx(3.5 * whole_s + short_s, rel=1e-12)
    longer = found.plan(0, 0, End(steps=8))
    assert (longer.steps, longer.work_s) == (8, pytest.approx(6 * whole_s + 2 * short_s, rel=1e-12))
    assert found.plan(0, 0, End(3.5 * whole_s + short_s, steps=8)) == cut
    assert found.plan(0, 0, End(9.0 * whole_s, steps=2)).work_s == pytest.approx(2 * whole_s, rel=1e-12)


def test_devices_use_the_fleets_runtime_if_they_have_it() -> None:
    fleet = Fleet(devices={"pixel-4": 1, "nexus-6": 1})
    models = {
        runtime: [
            device_of(Experiment(fleet=msgspec.structs.replace(fleet, runtime=runtime)), 0, name).time_model()
            for name in fleet.devices
        ]
        for runtime in (None, "torch")
    }
    phone, old = (load_device(name) for name in fleet.devices)
    assert models[None] == [phone.time_model("mnn"), old.time_model("dl4j")]
    assert models["torch"] == [phone.time_model("torch"), old.time_model("dl4j")]
    with pytest.raises(ProfileFault, match=r"fleet\.runtime: .*'tocrh' not found; did you mean 'torch'"):
        check_profiles(msgspec.structs.replace(fleet, runtime="tocrh"))


def test_a_slowdown_applies_to_every_step() -> None:
    fleet = Experiment(fleet=Fleet(devices={"paper-defedavg": 400}))
    for client in range(3):
        factor = 10e9 / device_of(fleet, client, "paper-defedavg").train_flop_per_s
        usual_s = load_device("paper-defedavg").time_model().seconds(WORK.at(3))
        found = trips("paper-defedavg", client=client)
        assert found.full_step_s(client) == pytest.approx(factor * usual_s, rel=1e-12)
        assert found.plan(client, 0).compute_s == pytest.approx(found.plan(client, 0).work_s, rel=1e-12)


def test_a_trip_with_a_drawn_delay_does_not_depend_on_its_work() -> None:
    less = BatchWork(fixed=StepWork(), per_example=StepWork(conv_flop=1.0))
    one, other = (trips("paper-uniform", work=work).plan(0, 0) for work in (WORK, less))
    assert one == other
    drawn_s = load_device("paper-uniform").delay_model.draw(stream(0, "trip", 0, 0))
    assert one.total_s == one.compute_s == pytest.approx(drawn_s)


def test_a_delay_per_example_grows_with_the_number_of_examples() -> None:
    """FedBuff, appendix C.2: a client with n_i examples takes T_i ~ Exp(1/(λ·n_i))."""
    delay = Delay(dist="exponential", per="example", mean_s=0.5)
    assert delay.draw(rng(3), examples=40) == 40 * delay.draw(rng(3))
    generator = rng()
    drawn = np.array([delay.draw(generator, 40) for _ in range(8000)])
    assert drawn.mean() == pytest.approx(0.5 * 40, rel=0.05)
    assert drawn.std() == pytest.approx(0.5 * 40, rel=0.05)
    assert Delay(dist="exponential", mean_s=0.5).draw(rng(3), 40) == delay.draw(rng(3))
    generator = rng(3)
    found = plan_trip(
        device(delay_model=delay), Link(load_network("none"), generator), generator, 9, 1.0, 9, None, 40
    )
    assert found.total_s == pytest.approx(delay.draw(rng(3), 40))


MEANS = [
    (Delay(dist="uniform", low_s=1.0, high_s=2.0), 1.5),
    (Delay(dist="half-normal", scale_s=math.sqrt(math.pi / 2)), 1.0),
    (Delay(dist="exponential", mean_s=3.0), 3.0),
    (Delay(dist="log-normal", median_s=2.0, sigma=0.5), 2.0 * math.exp(0.5**2 / 2)),
    (Delay(dist="pareto", min_s=1.0, alpha=4.0), 4.0 / 3.0),
    (Delay(dist="list", values_s=(1.0, 2.0, 6.0)), 3.0),
]


@pytest.mark.parametrize(("delay", "mean"), MEANS, ids=lambda value: getattr(value, "dist", ""))
def test_delays_have_their_mean_and_are_never_negative(delay: Delay, mean: float) -> None:
    generator = rng(11)
    drawn = np.array([delay.draw(generator) for _ in range(8000)])
    assert drawn.min() >= 0
    assert abs(drawn.mean() - mean) < 4.5 * drawn.std() / math.sqrt(8000)


def test_the_delay_of_fedbuffs_clients_has_mean_one() -> None:
    delay = load_device("paper-half-normal").delay_model
    assert delay.scale_s * math.sqrt(2 / math.pi) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "delay",
    [
        Delay(dist="log-normal", median_s=1e9, sigma=10.0),
        Delay(dist="pareto", min_s=1e9, alpha=0.1),
        Delay(dist="exponential", mean_s=1e9),
    ],
    ids=lambda d: d.dist,
)
def test_the_largest_permitted_delays_are_finite(delay: Delay) -> None:
    extreme = Mock(**{"standard_normal.return_value": 40.0, "random.return_value": math.nextafter(1.0, 0.0)})
    extreme.exponential = lambda mean: 800.0 * mean
    assert list(faults(msgspec.to_builtins(delay), Delay)) == []
    assert math.isfinite(delay.draw(extreme, examples=10**9))


def test_a_warning_names_the_runtimes_of_a_mixed_fleet() -> None:
    names = ["pixel-4", "pixel-3", "nexus-6", "pixel-3"]
    clients = [ClientInfo(client, name, "wifi") for client, name in enumerate(names)]
    fleet = Fleet(devices={"pixel-4": 1, "pixel-3": 2, "nexus-6": 1})
    said = mixed_runtimes(Experiment(fleet=fleet), clients)
    assert said.startswith("devices use mnn (pixel-4), torch (pixel-3), dl4j (nexus-6); fleet.runtime")
    in_torch = Experiment(fleet=msgspec.structs.replace(fleet, runtime="torch"))
    assert (
        mixed_runtimes(in_torch, clients[:2]) == mixed_runtimes(Experiment(fleet=fleet), clients[1:2]) == ""
    )


def test_the_upload_of_a_reply_starts_in_the_trace_where_its_download_ends() -> None:
    """On a device with random delays (``delay_model``), a reply takes no time."""
    fleet = Fleet(
        devices={"pixel-4": 1, "paper-exponential": 1}, network="lte-verizon-varying", variation=0.0
    )
    wanted = Experiment(fleet=fleet)
    trips = Trips(wanted, fleet_of(wanted), [9, 9], WORK, 10, 10)
    assert trips.reply_s(1, 3, 0.0, 2_000_000, 300_000) == 0.0
    network, shift = load_network("lte-verizon-varying"), float(stream(wanted.seed, "trace", 0).random())
    for at_s in (0.0, 100.0, 200.0):
        rng = stream(wanted.seed, "reply", 0, 3)
        down_s = Link(network, rng, at_s, shift).down(2_000_000).declared_s
        up_s = Link(network, rng, at_s + down_s, shift).up(300_000).declared_s
        assert trips.reply_s(0, 3, at_s, 2_000_000, 300_000) == down_s + up_s


def test_the_typical_time_of_a_trip_depends_on_the_profile_and_not_on_seed_or_unit() -> None:
    """The time includes links, delays and slowdowns, but neither deaths nor differences between units."""
    seen = []
    for seed in (0, 1):
        fleet = Fleet(
            devices={"pi-5": 1, "pi-zero-2w": 2, "paper-defedavg": 1, "paper-exponential": 1},
            network="lte", churn=Churn(die_per_trip=0.5),
        )  # fmt: skip
        wanted = Experiment(fleet=fleet, seed=seed)
        seen.append(Trips(wanted, fleet_of(wanted), [60] * 5, WORK, 10_000, 10_000).typical_s())
    assert seen[0] == seen[1]
    exact = Fleet(devices={"pi-5": 1, "pi-4": 1}, network="fios", units="identical", variation=0.0)
    wanted = Experiment(fleet=exact)
    trips = Trips(wanted, fleet_of(wanted), [60, 60], WORK, 10_000, 10_000)
    assert trips.typical_s() == {"pi-5": trips.plan(0, 0).total_s, "pi-4": trips.plan(1, 0).total_s}
