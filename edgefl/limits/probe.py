"""Which mechanisms work here: each is tried on a real process for a moment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edgefl.errors import ConfigError
from edgefl.limits import load
from edgefl.limits.groups import find
from edgefl.limits.memory import open_memory
from edgefl.limits.throttle import open as open_throttle

SHARE = 0.25
PROBE_S = 0.4
WITHIN = 0.25
"""A probe of less than half a second on a machine that does other things says no more than that it acts."""
LIMIT_MIB = 32


class Found(NamedTuple):
    """What became of one probe."""

    mechanism: str
    what: str
    """What it was seen to do."""
    why_not: str = ""
    """Why it cannot be used here, in one line; empty if it can."""


def throttle(kind: str) -> Found:
    """Hold a busy process to a quarter of a core for a moment."""
    try:
        with loaded("compute", load.LONGEST_S) as child, open_throttle(kind, child.pid, SHARE) as held:
            time.sleep(PROBE_S)
        got = held.achieved()
    except ConfigError as error:
        return Found(kind, "none", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Found(kind, "none", f"the probe failed: {error}")
    share = got.cpu_s / got.wall_s
    seen = f"held a busy process to {share:.0%} of a core, {SHARE:.0%} asked for"
    version = f" (control groups v{find('cpu').version})" if kind == "cgroup" else ""
    if abs(share / SHARE - 1.0) > WITHIN:
        return Found(kind, f"{seen}{version}", "it acts, but not as asked: this machine may be overloaded")
    return Found(kind, f"works{version}: {seen}")


def memory_group() -> Found:
    """Let a process take twice the memory that its group allows."""
    try:
        with loaded("take", 2 * LIMIT_MIB) as child, open_memory(child.pid, LIMIT_MIB) as held:
            assert child.stdin is not None
            child.stdin.close()
            code = child.wait(10.0)
            killed = held.killed
    except ConfigError as error:
        return Found("cgroup", "none", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Found("cgroup", "none", f"the probe failed: {error}")
    if not killed:
        return Found("cgroup", f"a process over its limit ended with {code}", "the limit does not act")
    return Found(
        "cgroup", f"works (control groups v{find('memory').version}): the kernel killed a process over it"
    )


@contextlib.contextmanager
def loaded(what: str, amount: float) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started to compute, or waits to be told to take memory; gone at the end."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(load.__file__)), what, str(amount)],
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
