"""What is written about a run as a whole: at its start by the server, at its end by the supervisor."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import time
from dataclasses import asdict
from pathlib import Path

from edgefl import config, control
from edgefl.buffer import ParameterBuffer
from edgefl.confinement import memory_by
from edgefl.emulation.capacity import host
from edgefl.emulation.link import mean_mbps
from edgefl.emulation.usage import Usage
from edgefl.errors import ConfigError
from edgefl.record import Record
from edgefl.rows import ClientRow, Memory
from edgefl.store import Store
from edgefl.strategies.base import Strategy
from edgefl.workload_devices import device_of, network_of

SOFTWARE = ("edgefl", "torch", "numpy", "numba", "pyzmq", "msgspec", "safetensors")


def begin(folder: Path, base: Path) -> None:
    """Make the record, with what is needed to carry on or to start again."""
    with Store(folder) as store:
        store.set_meta(base=str(base))


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
        _client_row(experiment.seed, info, examples, labels)
        for info, examples, labels in zip(plan.clients, prepared.examples, prepared.labels, strict=True)
    )


def _client_row(seed: int, info: control.ClientInfo, examples: int, labels: list[int]) -> ClientRow:
    device, network = device_of(seed, info.client, info.profile), network_of(info.network)
    return ClientRow(
        info.client,
        device.id,
        network.id,
        examples,
        tuple(labels),
        device.train_flop_per_s / 1e9 if device.cpu is not None else None,
        device.app_limit_mib,
        mean_mbps(network.down),
        mean_mbps(network.up),
    )


def conclude(folder: Path, memory: Memory, usage: Usage) -> None:
    """Complete the record with what the supervisor saw, and write summary, report and trace."""
    from edgefl.report import html, summary, trace

    with Store(folder) as store:
        store.set_meta(memory=memory, **usage._asdict())
    summary.write_summary(folder)
    trace.write_trace(folder)
    html.write_report(folder)
    _close_fonts()


def _close_fonts() -> None:
    """matplotlib keeps the files of the fonts it used open for good; a run leaves no descriptor behind."""
    from matplotlib import font_manager

    for name in ("_get_font", "get_font"):
        clear = getattr(getattr(font_manager, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def base_of(folder: Path) -> Path:
    """The folder in which the run's own modules are looked for; this one where that is not on record."""
    try:
        with Record(folder) as record:
            return Path(record.meta.base or ".")
    except ConfigError:  # killed before its record was whole
        return Path.cwd()


def require_resumable(folder: Path) -> Path:
    """The folder in which the run's own modules are looked for. `ConfigError` if the run is over."""
    with Record(folder) as record:
        meta = record.meta
    if meta.status == "done":
        raise ConfigError(f"{folder}: this run is over ({meta.stop_reason}); there is nothing to resume")
    return Path(meta.base or ".")


def proportional_memory(
    peers: dict[tuple[str, int], int], named: dict[str, int], buffer: ParameterBuffer | None
) -> Memory:
    """Proportional set sizes of the run's processes: a shared page counts once over all who map it.

    ``peers`` maps (role, number) and ``named`` maps ``"zygote"`` and ``"server"`` to process ids.
    """
    clients = {
        number: mib
        for (role, number), pid in peers.items()
        if role != control.EVALUATOR and (mib := _pss_mib(pid)) is not None
    }
    evaluator = peers.get((control.EVALUATOR, 0))
    return Memory(
        server_mib=_pss_mib(named.get("server")),
        supervisor_mib=_pss_mib("self"),
        zygote_mib=_pss_mib(named.get("zygote")),
        evaluator_mib=_pss_mib(evaluator),
        shared_mib=buffer.shape.total_bytes / 2**20 if buffer is not None else None,
        clients_mib=clients,
    )


def _pss_mib(pid: int | str | None) -> float | None:
    if pid is None:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
