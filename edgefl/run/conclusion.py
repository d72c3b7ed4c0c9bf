"""What is written about a run as a whole at its end: what it took, its summary, report and trace."""

from __future__ import annotations

import contextlib
from pathlib import Path

from edgefl.limits.capacity import Usage
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.results.record import MemoryUse
from edgefl.results.store import Store
from edgefl.run import control


def conclude(folder: Path, memory: MemoryUse, usage: Usage) -> None:
    """Complete the record with what the supervisor saw, and write summary, report and trace."""
    from edgefl.results import report, summary, trace

    with Store(folder) as store:
        store.set_meta(memory=memory, **usage._asdict())
    summary.write_summary(folder)
    trace.write_trace(folder)
    report.write_report(folder)
    _close_fonts()


def _close_fonts() -> None:
    """matplotlib keeps the files of the fonts it used open for good; a run leaves no descriptor behind."""
    from matplotlib import font_manager

    for name in ("_get_font", "get_font"):
        clear = getattr(getattr(font_manager, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def proportional_memory(
    peers: dict[tuple[str, int], int], named: dict[str, int], buffer: ParameterBuffer | None
) -> MemoryUse:
    """Proportional set sizes of the run's processes: a shared page counts once over all who map it.

    ``peers`` maps (role, number) and ``named`` maps ``"zygote"`` and ``"server"`` to process ids.
    """
    clients = {
        number: mib
        for (role, number), pid in peers.items()
        if role != control.EVALUATOR and (mib := _pss_mib(pid)) is not None
    }
    evaluator = peers.get((control.EVALUATOR, 0))
    return MemoryUse(
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
