"""Short tests of each throttle and memory limit on an ordinary process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from edgefl.errors import ConfigError
from edgefl.host.groups import find
from edgefl.host.memory import open_memory
from edgefl.host.throttle import open as open_throttle

SHARE = 0.25
PROBE_S = 0.4
WITHIN = 0.25
"""Allowed relative error of the measured CPU share. It is large, because a short probe on a busy machine can
only show that a throttle has an effect."""
LIMIT_MIB = 32
LONGEST_S = 30.0  # lifetime of a busy process


class ProbeResult(NamedTuple):
    """Outcome of one probe."""

    mechanism: str
    what: str
    why_not: str = ""
    """One-line reason why the mechanism cannot be used here; empty if it can."""


def _tried(probe: Callable[[str], ProbeResult]) -> Callable[..., ProbeResult]:
    @functools.wraps(probe)
    def tried(kind: str = "cgroup") -> ProbeResult:
        try:
            return probe(kind)
        except (ConfigError, OSError, subprocess.SubprocessError) as error:
            failed = "" if isinstance(error, ConfigError) else "the probe failed: "
            return ProbeResult(kind, "none", f"{failed}{error}")

    return tried


@_tried
def throttle(kind: str) -> ProbeResult:
    """Test the throttle ``kind`` on a busy process, which it must slow down to a quarter of a core."""
    with loaded() as child, open_throttle(kind, child.pid, SHARE) as held:
        time.sleep(PROBE_S)
    got = held.achieved()
    share = got.cpu_s / got.wall_s if got.wall_s else 0.0
    seen = f"throttled a busy process to {share:.0%} of a core, requested: {SHARE:.0%}"
    version = f" (control groups v{find('cpu').version})" if kind == "cgroup" else ""
    if abs(share / SHARE - 1.0) <= WITHIN:
        return ProbeResult(kind, f"works{version}: {seen}")
    return ProbeResult(kind, f"{seen}{version}", "inaccurate: this machine may be overloaded")


@_tried
def memory_group(kind: str) -> ProbeResult:
    """Test that the kernel kills a process that allocates twice the memory limit of its control group."""
    with loaded(2 * LIMIT_MIB) as child, open_memory(child.pid, LIMIT_MIB) as held:
        assert child.stdin is not None
        child.stdin.close()
        code = child.wait(10.0)
        killed = held.killed
    if not killed:
        return ProbeResult(kind, f"a process over its limit ended with {code}", "the limit is not enforced")
    version = find("memory").version
    return ProbeResult(kind, f"works (control groups v{version}): the kernel killed a process over its limit")


@contextlib.contextmanager
def loaded(take_mib: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that keeps a core busy for `LONGEST_S` seconds.

    If ``take_mib`` is above 0, the process instead waits until its stdin is closed, and then allocates that
    many MiB.
    """
    code = f"{inspect.getsource(_be_load)}\n_be_load({LONGEST_S!r}, {take_mib!r})"
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        os.read(child.stdout.fileno(), 1)
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def _be_load(compute_s: float, take_mib: float) -> None:
    # Runs as a separate program without edgefl, so that it starts within milliseconds.
    import ctypes
    import os
    import sys
    import time

    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:
        return
    print("!", end="", flush=True)
    if take_mib:
        sys.stdin.read(1)
        taken = bytearray(int(take_mib * (1 << 20)))
        taken[::4096] = b"\x01" * len(taken[::4096])
    else:
        until = time.monotonic() + compute_s
        while time.monotonic() < until:
            sum(range(1000))
