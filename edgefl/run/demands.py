"""Checks that an experiment can run, and computes the memory and time scale that the run needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgefl import config, kernels
from edgefl.core.strategy_calls import check_answers
from edgefl.devices.fleet import any_exact, first_tasks, fleet_of
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.host.capacity import TRIP_OVERHEAD_S, Burst, Demand, TimeScale, choose_time_scale
from edgefl.parameters.buffer import FORMATS, Shape, blocks, ring_entries
from edgefl.results.record import Record
from edgefl.results.tail import TAIL_BYTES
from edgefl.run import control
from edgefl.run.hidden import check_secure, completed, rules_of
from edgefl.run.hosting import Share
from edgefl.run.slots import ENTRIES_NOT_LENT
from edgefl.strategies import resolve
from edgefl.strategies.base import Strategy


def checked(experiment: Experiment, base: Path) -> Experiment:
    """Validate and complete an experiment. Raises `ConfigError` for errors that do not depend on the data."""
    experiment = config.validate(experiment, base)
    clients = fleet_of(experiment)
    experiment = completed(experiment, resolve(experiment.strategy, [base]))
    strategy = resolve(experiment.strategy, [base])
    check_answers(strategy, len(clients))
    check_secure(experiment, strategy, len(clients))
    _check_private(experiment, strategy, len(clients))
    kernels.backend(experiment.server.kernel_backend)
    return experiment


def _check_private(experiment: Experiment, strategy: Strategy, clients: int) -> None:
    """Raise `ConfigError` if the strategy or the fleet invalidates the guarantee of ``[privacy]``."""
    rules, name = experiment.privacy, experiment.strategy["name"]
    if rules is None:
        return
    if rules.local_noise_multiplier and strategy.vectors:
        raise ConfigError(
            f"privacy.local_noise_multiplier: clients add noise only to their update, but strategy {name!r} "
            f"also exchanges {', '.join(strategy.vectors)}; choose another strategy"
        )
    if rules.central and strategy.reads == "updates":
        raise ConfigError(
            f"[privacy] makes the server add noise only to sums, but strategy {name!r} reads individual "
            "updates (reads = 'updates'); choose another strategy, or use only privacy.local_noise_multiplier"
        )
    if field := strategy.needs_losses:
        raise ConfigError(
            f"strategy.{field}: has no effect with [privacy], under which the server sees no losses"
        )
    vectors = strategy.upload != "delta" or strategy.vectors or strategy.server_vectors or strategy.measures
    most = None if vectors else strategy.max_weight(clients)
    if most is None and rules.central:
        raise ConfigError(
            f"[privacy] needs a strategy that bounds an update's weight, got {name!r}, which does not bound "
            "it with these settings; fedbuff without normalize does, and so do fedavg and fedavgm with "
            "weighting = 'uniform' and redraw = true"
        )
    held = strategy.max_held(clients)
    if rules.min_separation > 1 and rules.min_separation * held > clients:
        raise ConfigError(
            f"privacy.min_separation must be at most {max(1, clients // held)} for {clients} "
            f"clients and {held} updates per version, got {rules.min_separation}"
        )


def shape_of(
    experiment: Experiment,
    strategy: Strategy,
    size: int,
    clients: int,
    *,
    statistics: int = 0,
    ring: int | None = None,
) -> Shape:
    """Return the shape of the parameter buffer for a model of ``size`` parameters, of which the last
    ``statistics`` are running statistics."""
    server, whole = experiment.server, blocks(size, len(strategy.vectors))[-1].stop
    rounded = server.update_format != "float32" and strategy.upload == "delta"
    vectors = strategy.optimizer().vectors + len(strategy.server_vectors)
    if ring is None:
        ring = ring_entries(whole, vectors)
        if strategy.measures:  # keep the base versions of all running tasks
            ring = max(ring, strategy.max_training(clients) + ENTRIES_NOT_LENT)
    kept = size * len(strategy.client_vectors) + (whole if rounded and server.error_feedback else 0)
    return Shape(
        size=whole,
        ring=ring,
        slots=strategy.slots(clients),
        vectors=vectors,
        format=server.update_format,
        clients=clients if kept else 0,
        kept=kept,
        tail=TAIL_BYTES if experiment.clock.kind == "wall" else 0,
        statistics=statistics if strategy.upload == "delta" else 0,
        exact=FORMATS[server.update_format].exact(statistics),
        extra=0 if (rules := rules_of(experiment, strategy, size, clients)) is None else rules.overhead_bytes,
    )


def wall_scale(
    experiment: Experiment, strategy: Strategy, prepared: control.Prepared, shares: Sequence[Share]
) -> TimeScale:
    """Return the time scale under the wall clock: the largest that any host needs for its clients.

    A node that joined with ``--as-is`` is its client's device, so it needs no scale, however busy it is.
    """
    scales = [(_scale(experiment, strategy, prepared, share), share.host) for share in shares if share.peers]
    scale, host = max(scales, key=lambda one: (one[0].value, one[0].load))
    if scale.value != 1.0 and any(share.as_is for share in shares):
        raise ConfigError(
            f"clock.time_scale: must be 1 if a node joins with --as-is, got {scale.value:g} ({scale.why})"
        )
    return scale._replace(why=f"{scale.why} (node {host})") if host else scale


def at_recorded_scale(experiment: Experiment, folder: Path) -> Experiment:
    """Return the experiment of the run in ``folder`` with the time scale that was chosen when the run began.

    A run has one time scale, so that its results are right for all of its parts.
    """
    if experiment.clock.kind == "virtual" or experiment.clock.time_scale != "auto":
        return experiment
    with Record(folder) as record:
        clock = msgspec.structs.replace(experiment.clock, time_scale=record.meta.time_scale)
    return msgspec.structs.replace(experiment, clock=clock)


def _scale(experiment: Experiment, strategy: Strategy, prepared: control.Prepared, share: Share) -> TimeScale:
    clients = fleet_of(experiment)
    waits = first_tasks(experiment, strategy, len(clients)) and not any_exact(clients)
    spread = experiment.fleet.join_spread_s or waits
    demands = []
    paced = () if share.as_is else share.peers
    for trip in (prepared.first_trips[client] for client in paced):
        cpu_s = trip.steps * share.step_s
        burst = Burst(cpu_s, trip.down_s, trip.compute_s)
        demands.append(Demand(cpu_s + TRIP_OVERHEAD_S, trip.total_s, burst))
    return choose_time_scale(
        demands,
        cores=share.cores,
        scale=experiment.clock.time_scale,
        active=strategy.max_training(len(clients)),
        together="always" if strategy.lockstep else "never" if spread else "at first",
    )
