"""``edgefl doctor``: check this machine for the features that edgefl uses, and say why any are missing."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from edgefl.cli.paths import AsJson
from edgefl.errors import described
from edgefl.terminal import say

MIB = 1 << 20
CLIENT_MIB = 13
"""Measured memory of one forked client and its socket after one training step, in MiB."""
CLIENT_THREADS = 3
"""Number of threads per client: its own and two of ZeroMQ. Threads count towards the limit on processes."""
CLIENT_FDS = 8
"""Number of file descriptors that the server and the supervisor need per client, rounded up."""


class Check(NamedTuple):
    """The result of one check: the feature (``what``), its state (``found``) and the problem, if any."""

    what: str
    found: str
    problem: str = ""


def doctor(as_json: AsJson = False) -> None:
    """Check this machine for the features that edgefl uses."""
    checks = list(examine())
    if as_json:
        say(json.dumps([check._asdict() for check in checks], indent=2))
        return

    from edgefl.results.tables import show, table

    show(table(("what", "found", "problem"), checks, title="what this machine can do"))


def examine() -> Iterator[Check]:
    """Run all checks; none of them changes the machine. An exception in a check is reported as its result.

    >>> {"python", "memory"} <= {check.what for check in examine()}
    True
    """
    for look in _LOOKS:
        try:
            yield from look()
        except Exception as error:  # report any failure as a result
            what = look.__name__.strip("_").replace("_", " ")
            yield Check(what, "?", f"check failed: {described(error)}")


def _python() -> Iterator[Check]:
    old = "" if sys.version_info >= (3, 11) else "edgefl needs Python 3.11 or newer"
    yield Check("python", f"{platform.python_version()} on {platform.system()} {platform.release()}", old)


def _cores() -> Iterator[Check]:
    from edgefl.host.capacity import cpu_quota
    from edgefl.processes import usable_cores

    usable = usable_cores()
    found, quota = f"{usable} usable of {os.cpu_count()}", cpu_quota()
    problem = "clients, server and evaluator share one core" if usable == 1 else ""
    if quota is not None and quota < usable:
        found, problem = f"{found}, quota {quota:.3g}", "a CPU quota makes the emulation slower"
    yield Check("cores", found, problem)


def _memory() -> Iterator[Check]:
    import psutil

    from edgefl.host.capacity import available_bytes, memory_limit_bytes

    total, limit, free = psutil.virtual_memory().total, memory_limit_bytes(), available_bytes()
    found = f"{free // MIB} MiB free of {total // MIB}"
    if limit is not None and limit < total:
        found += f", limited to {limit // MIB}"
    yield Check("memory", f"{found}: about {free // MIB // CLIENT_MIB} clients of {CLIENT_MIB} MiB")


def _torch() -> Iterator[Check]:
    import torch

    yield Check("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    found = "none: this torch is built for the CPU"
    if torch.cuda.is_available():
        found = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    elif torch.version.cuda is not None:
        found = f"none: torch is built for CUDA {torch.version.cuda}, but no device was found"
    yield Check("cuda", found)


def _kernels() -> Iterator[Check]:
    from edgefl import kernels

    chosen = kernels.backend()
    for name, state in kernels.backends().items():
        found = ("runs" if name == chosen else "works") if state == "ok" else "none"
        problem = "" if state == "ok" else state
        if name == "numba" and not problem:
            from edgefl.kernels.backend_numba import cached_in

            if not cached_in():  # this compiles the kernels, unless an earlier process did
                problem = "numba has no writable cache folder, so each process compiles for about 10 s"
        yield Check(f"kernel {name}", found, problem)
    yield Check("kernel threads", str(kernels.threads()))


def _calibration() -> Iterator[Check]:
    from edgefl.host.calibration import stored_calibration

    if (stored := stored_calibration()) is None:
        yield Check("calibration", "none valid", "measured when first needed, or now by edgefl calibrate")
        return
    rates = stored.measured
    train, product = rates.train_gflops.median, rates.gemm_gflops["256"].median
    found = f"one thread: training {train:.1f}, matrix product {product:.1f} GFLOPS"
    yield Check("calibration", f"{found}, memory {rates.triad_gbytes_per_s.median:.1f} GB/s")


def _processes() -> Iterator[Check]:
    from edgefl.parameters.buffer import memory_file

    if (memory := memory_file()) is not None:
        os.close(memory)
        yield Check("memfd", "works")
    else:
        yield Check("memfd", "none", "the parameter buffer falls back to an unlinked file")
    signal, linux = ctypes.c_int(), sys.platform.startswith("linux")
    works = linux and ctypes.CDLL(None).prctl(2, ctypes.byref(signal), 0, 0, 0) == 0  # PR_GET_PDEATHSIG
    without = "clients are not ended by the kernel when their parent dies; they notice a closed pipe instead"
    yield Check("death signal", "works" if works else "none", "" if works else without)


def _throttles() -> Iterator[Check]:
    from edgefl.host import probe

    yield Check("throttle paced", "works: needs no privileges; the default")
    probed = {f"throttle {kind}": probe.throttle(kind) for kind in ("sigstop", "cgroup")}
    for what, found in (probed | {"memory cgroup": probe.memory_group()}).items():
        yield Check(what, found.what, f"{found.why_not}; not needed" if found.why_not else "")
    rlimit = hasattr(resource, "RLIMIT_DATA") and sys.platform.startswith("linux")
    without = "" if rlimit else "needs RLIMIT_DATA and /proc, which only Linux has"
    yield Check("memory rlimit", "works: needs no privileges; the default" if rlimit else "none", without)


def _limits() -> Iterator[Check]:
    from edgefl.host.capacity import thread_limit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = f"raise it for large fleets: ulimit -n {hard}" if soft < 1024 * CLIENT_FDS and hard > soft else ""
    yield Check("open files", f"{_limit(soft)} (at most {_limit(hard)})", few)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = "unknown"
    with suppress(OSError):
        most = Path("/proc/sys/kernel/pid_max").read_text().strip()
    group, found = thread_limit(), f"{_limit(soft)}, pid_max {most}"
    problem = ""
    if group is not None and group < 1024 * CLIENT_THREADS:
        found += f", limited to {group}"
        most = f"at most {group // CLIENT_THREADS} clients under the wall clock"
        problem = f"{most}: raise the container's limit"
    elif soft != resource.RLIM_INFINITY and soft < 1024 * CLIENT_THREADS:
        problem = f"too few for 1024 clients under the wall clock; raise it: ulimit -u {_limit(hard)}"
    yield Check("processes", found, problem)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    small = "" if soft == resource.RLIM_INFINITY else "torch needs several GiB; raise it: ulimit -v unlimited"
    yield Check("address space", f"{soft // MIB} MiB" if small else "unlimited", small)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


_LOOKS: tuple[Callable[[], Iterator[Check]], ...] = (
    _python,
    _cores,
    _memory,
    _torch,
    _kernels,
    _calibration,
    _processes,
    _throttles,
    _limits,
)
