"""What is written about a run as a whole at its start: the facts that are known before it begins."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from dataclasses import asdict

from edgefl import config
from edgefl.devices.fleet import ClientInfo, device_of, network_of
from edgefl.devices.link import mean_mbps
from edgefl.limits.capacity import host
from edgefl.limits.confinement import memory_by
from edgefl.results.record import ClientRow
from edgefl.results.store import Store
from edgefl.run import control
from edgefl.strategies.base import Strategy

SOFTWARE = ("edgefl", "torch", "numpy", "numba", "pyzmq", "msgspec", "safetensors")


def describe(store: Store, plan: control.Serve, strategy: Strategy) -> None:
    """The run's facts that are known before it starts."""
    experiment, prepared = plan.experiment, plan.prepared
    store.set_meta(
        name=experiment.name,
        edgefl=_version("edgefl"),
        created_unix_s=time.time(),
        strategy=str(experiment.strategy["name"]),
        strategy_fields=asdict(strategy),
        clock=experiment.clock.kind,
        seed=experiment.seed,
        clients=len(plan.clients),
        processes=plan.workers,
        transport=experiment.server.transport,
        time_scale=plan.time_scale,
        data=prepared.dataset,
        partition=experiment.data.partition,
        test_examples=prepared.test_examples,
        model=experiment.model.name,
        parameters=prepared.size,
        load=plan.load,
        throttle=experiment.fleet.throttle if experiment.clock.kind == "wall" else "",
        memory_by=memory_by(experiment),
        host_step_s=prepared.host_step_s,
        host=host()._asdict(),
        software={"python": platform.python_version(), **{name: _version(name) for name in SOFTWARE}},
        toml=config.dump(experiment),
    )
    store.clients(
        _client_row(experiment.seed, info, known.examples, labels)
        for info, known, labels in zip(plan.clients, prepared.clients, prepared.labels, strict=True)
    )


def _client_row(seed: int, info: ClientInfo, examples: int, labels: list[int]) -> ClientRow:
    device, network = device_of(seed, info.client, info.profile), network_of(info.network)
    return ClientRow(
        client=info.client,
        profile=device.id,
        network=network.id,
        examples=examples,
        labels=tuple(labels),
        train_gflops=device.train_flop_per_s / 1e9 if device.cpu is not None else None,
        memory_mib=device.app_limit_mib,
        down_mbps=mean_mbps(network.down),
        up_mbps=mean_mbps(network.up),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
