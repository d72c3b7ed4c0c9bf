"""Requirements of an experiment: whether it can run, and the shape of its parameter buffer."""

from __future__ import annotations

from pathlib import Path

from edgefl import config, kernels
from edgefl.devices.fleet import fleet_of
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.parameters.buffer import Shape, blocks, ring_entries
from edgefl.results.tail import TAIL_BYTES
from edgefl.run.slots import ENTRIES_NOT_LENT
from edgefl.strategies import resolve
from edgefl.strategies.base import Strategy


def checked(experiment: Experiment, base: Path) -> Experiment:
    """Validate and complete an experiment. Raises `ConfigError` if it cannot run with any data."""
    experiment = config.validate(experiment, base)
    clients = fleet_of(experiment)
    strategy = resolve(experiment.strategy, [base])
    strategy.check(len(clients))
    _check_private(experiment, strategy, len(clients))
    kernels.backend(experiment.server.kernel_backend)
    return experiment


def _check_private(experiment: Experiment, strategy: Strategy, clients: int) -> None:
    """Raise `ConfigError` if ``[privacy]`` promises a guarantee that the run cannot keep."""
    rules, name = experiment.privacy, experiment.strategy["name"]
    if rules is None:
        return
    vectors = strategy.upload != "delta" or strategy.vectors or strategy.server_vectors or strategy.measures
    most = None if vectors else strategy.max_weight(clients)
    if most is None:
        raise ConfigError(
            f"[privacy] needs a strategy that bounds an update's weight, got {name!r} as it is set: fedbuff "
            "without normalize, fedavg, fedavgm or their like, with weighting = 'uniform'"
        )
    if rules.min_separation * strategy.max_held(clients) > clients:
        raise ConfigError(
            f"privacy.min_separation must be at most {clients // strategy.max_held(clients)} for {clients} "
            f"clients and {strategy.max_held(clients)} updates a version, got {rules.min_separation}"
        )


def shape_of(
    experiment: Experiment, strategy: Strategy, size: int, clients: int, *, ring: int | None = None
) -> Shape:
    """Return the shape of the parameter buffer of a run with a model of ``size`` parameters."""
    server, whole = experiment.server, blocks(size, len(strategy.vectors))[-1].stop
    rounded = server.update_format != "float32" and strategy.upload == "delta"
    vectors = strategy.optimizer().vectors + len(strategy.server_vectors)
    if ring is None:
        ring = ring_entries(whole, vectors)
        if strategy.measures:  # the versions of all running tasks are kept
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
    )
