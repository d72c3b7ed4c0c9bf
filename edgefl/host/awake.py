"""A process that keeps this host's cores from going idle while throttled programs are stopped.

A core that was idle computes more slowly for some milliseconds (docs/code.md has measurements). A throttled
program is stopped for most of the time, so each second of its CPU time does less work than in a calibration,
which runs without pauses. For each core, this process has a thread that spins at the lowest priority and
therefore runs only while the core has nothing else to do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from edgefl.errors import ConfigError
from edgefl.host.capacity import cpu_quota
from edgefl.host.channel import Channel, Closed
from edgefl.host.code_operations import NO_EXTENSION
from edgefl.host.process import become_child

HINTS = 1_000_000
"""Number of spin-wait instructions per call of the C function; they take some tens of milliseconds."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The process's only message: its threads have been started."""


def check_awake(throttle: str) -> None:
    """Raise `ConfigError` if this host's cores cannot, or should not, be kept busy with this throttle."""
    if throttle == "cgroup":
        raise ConfigError(
            "awake: cannot be combined with the throttle cgroup, because Linux shares the CPU between "
            "control groups before it compares priorities; use sigstop"
        )
    if (quota := cpu_quota()) is not None:
        raise ConfigError(
            f"awake: cannot be used here, because control groups limit the CPU time to {quota:g} cores, "
            "and keeping cores busy would use up this quota"
        )
    try:
        from edgefl.host import _code  # noqa: F401
    except ImportError:
        raise ConfigError(f"awake: cannot be used here: {NO_EXTENSION}") from None


def one_thread_per_core(folder: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Return one CPU (hardware thread) of each core on which this process may run.

    One busy hardware thread is enough to keep the whole core from going idle.
    """
    allowed, seen = sorted(os.sched_getaffinity(0)), set[str]()
    chosen = list[int]()
    for cpu in allowed:
        siblings = str(cpu)
        with contextlib.suppress(OSError):
            siblings = (folder / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        if siblings not in seen:
            chosen.append(cpu)
        seen.add(siblings)
    return chosen


def yield_to_sessions(setting: Path = Path("/proc/self/autogroup")) -> None:
    """Give this process's session the lowest priority.

    Linux divides CPU time among sessions first, then within a session. From processes without privileges, it
    accepts one such change per 0.1 s on the whole host. This function does nothing if the kernel has no
    priorities for sessions.
    """
    with contextlib.suppress(OSError):
        while True:
            try:
                setting.write_text("19")
            except BlockingIOError:
                time.sleep(0.02)
            else:
                return


def _wait() -> None:
    """Spin until the process ends."""
    from edgefl.host._code import spin

    while True:
        spin(HINTS)


def main() -> None:
    """Entry point of the process, which ends when its channel is closed."""
    become_child(int(sys.argv[2]), "edgefl-awake")
    os.setsid()
    yield_to_sessions()
    channel: Channel[Any] = Channel.inherit(int(sys.argv[1]), Any)
    for cpu in one_thread_per_core():
        thread = threading.Thread(target=_wait, daemon=True)
        thread.start()
        assert thread.native_id is not None
        try:
            os.sched_setscheduler(thread.native_id, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(thread.native_id, {cpu})
        except OSError as error:
            sys.exit(f"edgefl: awake: CPU {cpu} refused a thread of the lowest priority: {error.strerror}")
    channel.tell(Started())
    with contextlib.suppress(Closed):
        channel.receive()
    os._exit(0)


if __name__ == "__main__":
    main()
