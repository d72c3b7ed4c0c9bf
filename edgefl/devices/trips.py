"""The trips of a fleet's clients: whoever plans one, a client, a worker or the server, plans the same."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.devices.fleet import ClientInfo, device_of, network_of, thermal_of
from edgefl.devices.link import Link
from edgefl.devices.phone import Condition
from edgefl.devices.plan import TripPlan, plan_trip
from edgefl.experiment import Experiment
from edgefl.learning.rule import LocalRule
from edgefl.seeds import stream


class Trips:
    """What each client does on a trip, and what it costs its device."""

    def __init__(
        self,
        experiment: Experiment,
        clients: Sequence[ClientInfo],
        examples: Sequence[int],
        flops_per_example: float,
        down_bytes: int,
        up_bytes: int,
    ) -> None:
        self._experiment, self._clients, self._examples = experiment, clients, examples
        self._rule = LocalRule.of(experiment.training)
        self._flops_per_example = flops_per_example
        self._flops = {held: flops_per_example * self._rule.work(held).examples for held in set(examples)}
        self._down_bytes, self._up_bytes = down_bytes, up_bytes

    def plan(
        self, client: int, trip: int, budget_s: float | None = None, condition: Condition | None = None
    ) -> TripPlan:
        """One trip of a client, in emulated seconds; the same whichever process asks, and how often.

        ``budget_s`` cuts it short: see `TripPlan.within`. ``condition`` is how the phone is when the trip
        starts; None for one that does not change over time.
        """
        experiment, info, held = self._experiment, self._clients[client], self._examples[client]
        rng = stream(experiment.seed, "trip", client, trip)
        network = network_of(info.network)
        if network.replays:
            start_s = 0.0 if condition is None else condition.at_s
            shift = float(stream(experiment.seed, "trace", client).random())
            link = Link(network, rng, start_s, shift)
        else:
            link = Link(network, rng)
        device, thermal = device_of(experiment.seed, client, info.profile), None
        if condition is not None and experiment.fleet.thermal and (model := thermal_of(info.profile)):
            thermal = model, condition.temp_c
        plan = plan_trip(
            device, link, rng, self._down_bytes, self._flops[held], self._up_bytes, thermal, held
        )
        if budget_s is not None:
            plan = plan.within(
                budget_s, (self._flops_per_example * size for size in self._rule.batches(held))
            )
        chance = experiment.fleet.churn.die_per_trip
        if chance > 0.0:
            fate = stream(experiment.seed, "death", client, trip)
            if fate.random() < chance:
                return plan._replace(dies_s=float(fate.random()) * plan.total_s)
        return plan
