"""``edgefl doctor``: what this machine can do for edgefl, and what it cannot and why: one finding after
the other.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from edgefl.limits.capacity import cpu_quota, memory_limit_bytes

if TYPE_CHECKING:
    from edgefl.limits import probe


def add(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What this machine can do, and what it cannot and why."""

    findings = list(examine())
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
        return

    from edgefl.results.tables import show, table

    show(table(("what", "found", "problem"), findings, title="what this machine can do"))


MIB = 1 << 20
CLIENT_MIB = 13
"""Measured: what one forked client adds in memory, with its socket and one training step done."""
CLIENT_FDS = 8
"""Descriptors that the server's side and the supervisor hold for one client, rounded up."""


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    found: str
    problem: str = ""
    """What does not work without it, in one line; empty if nothing is amiss."""


def examine() -> Iterator[Finding]:
    """Look at one thing after the other; nothing is changed, nothing raises.

    >>> {"python", "memory"} <= {finding.what for finding in examine()}
    True
    """
    for what, look in _LOOKS:
        try:
            found = look()
        except Exception as error:  # a machine that odd is what doctor is for
            yield Finding(what, "?", f"looking failed: {type(error).__name__}: {error}")
            continue
        yield from ([found] if isinstance(found, Finding) else found)


def _python() -> Finding:
    old = "" if sys.version_info >= (3, 11) else "edgefl needs Python 3.11 or newer"
    return Finding("python", f"{platform.python_version()} on {platform.system()} {platform.release()}", old)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    found = f"{usable} usable of {os.cpu_count()}"
    if quota is not None and quota < usable:
        return Finding("cores", f"{found}, quota {quota:.2g}", "a CPU quota stretches emulated time further")
    one = "clients, server and evaluator share one core" if usable == 1 else ""
    return Finding("cores", found, one)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    limit = memory_limit_bytes()
    free = min(memory.available, limit or memory.available)
    found = f"{free // MIB} MiB free of {memory.total // MIB}"
    if limit is not None and limit < memory.total:
        found += f", limited to {limit // MIB}"
    return Finding("memory", f"{found}: about {free // MIB // CLIENT_MIB} clients of {CLIENT_MIB} MiB")


def _torch() -> Iterator[Finding]:
    import torch

    yield Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
        yield Finding("cuda", names)
    elif torch.version.cuda is None:
        yield Finding("cuda", "none: this torch is built for the CPU")
    else:
        yield Finding("cuda", f"none: torch is built for CUDA {torch.version.cuda}, no device answers")


def _memfd() -> Finding:
    if not hasattr(os, "memfd_create"):
        return Finding("memfd", "none", "the parameter buffer falls back to an unlinked file")
    os.close(os.memfd_create("edgefl-doctor"))
    return Finding("memfd", "works")


def _prctl() -> Finding:
    without = "clients are not ended by the kernel when their parent dies; they notice a closed pipe instead"
    if not sys.platform.startswith("linux"):
        return Finding("death signal", "none", without)
    signal = ctypes.c_int()
    works = ctypes.CDLL(None).prctl(2, ctypes.byref(signal), 0, 0, 0) == 0  # PR_GET_PDEATHSIG
    return Finding("death signal", "works" if works else "refused", "" if works else without)


def _throttles() -> Iterator[Finding]:
    from edgefl.limits import probe

    yield Finding("throttle paced", "works: needs no privileges; the default")
    for kind in ("sigstop", "cgroup"):
        yield _probed(f"throttle {kind}", probe.throttle(kind))
    rlimit = hasattr(resource, "RLIMIT_DATA") and sys.platform.startswith("linux")
    without = "" if rlimit else "needs RLIMIT_DATA and /proc, which only Linux has"
    yield Finding("memory rlimit", "works: needs no privileges; the default" if rlimit else "none", without)
    yield _probed("memory cgroup", probe.memory_group())


def _probed(what: str, found: probe.Found) -> Finding:
    return Finding(what, found.what, f"{found.why_not}; not needed" if found.why_not else "")


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = f"raise it for large fleets: ulimit -n {hard}" if soft < 1024 * CLIENT_FDS and hard > soft else ""
    return Finding("open files", f"{_limit(soft)} (at most {_limit(hard)})", few)


def _processes() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    pids = _read_int("/proc/sys/kernel/pid_max")
    few = soft != resource.RLIM_INFINITY and soft < 1024
    problem = f"fewer than 1024 clients under the wall clock: ulimit -u {_limit(hard)}" if few else ""
    return Finding("processes", f"{_limit(soft)}, pid_max {pids or 'unknown'}", problem)


def _address_space() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return Finding("address space", "unlimited")
    return Finding("address space", f"{soft // MIB} MiB", "torch alone maps several GiB: ulimit -v unlimited")


def _shared_memory() -> Finding:
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        return Finding(folder, "none; not needed where there is memfd")
    size = os.statvfs(folder)
    free = size.f_bavail * size.f_frsize // MIB
    return Finding(folder, f"{free} MiB free; not needed where there is memfd")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _kernels() -> Iterator[Finding]:
    from edgefl import kernels

    chosen = kernels.backend()
    for name, state in kernels.backends().items():
        found = ("runs" if name == chosen else "works") if state == "ok" else "none"
        yield Finding(f"kernel {name}", found, "" if state == "ok" else state)
    yield Finding("kernel threads", str(kernels.threads()))


def _calibration() -> Finding:
    from edgefl.limits.calibration import stored_calibration

    stored = stored_calibration()
    if stored is None:
        return Finding("calibration", "none that holds", "made when first needed; or now: edgefl calibrate")
    found = stored.measured
    train, product = found.train_gflops.median, found.gemm_gflops["256"].median
    memory = f"memory {found.triad_gbytes_per_s.median:.1f} GB/s"
    return Finding(
        "calibration", f"one thread: training {train:.1f}, matrix product {product:.1f} GFLOPS, {memory}"
    )


_LOOKS: tuple[tuple[str, Callable[[], Finding | tuple[Finding, ...]]], ...] = (
    ("python", _python),
    ("cores", _cores),
    ("memory", _memory),
    ("torch", lambda: tuple(_torch())),
    ("kernels", lambda: tuple(_kernels())),
    ("calibration", _calibration),
    ("memfd", _memfd),
    ("death signal", _prctl),
    ("throttles", lambda: tuple(_throttles())),
    ("open files", _descriptors),
    ("processes", _processes),
    ("address space", _address_space),
    ("/dev/shm", _shared_memory),
)
