"""Network namespaces, which act like separate hosts in a network."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def spaces(count: int) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Make namespaces on one bridge; yield their addresses, and the prefixes of commands to run in them.

    Skips the test if they cannot be made.
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and ip")
    name = f"efl{os.getpid() % 10_000}"
    addresses = [f"10.97.4.{number + 2}" for number in range(count)]

    def ip(*arguments: str, check: bool = True) -> bool:
        done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
        if check and done.returncode:
            pytest.skip(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
        return done.returncode == 0

    try:
        ip("link", "add", name, "type", "bridge")
        ip("link", "set", name, "up")
        for number, address in enumerate(addresses):
            space, outer, inner = f"{name}-{number}", f"{name}o{number}", f"{name}i{number}"
            ip("netns", "add", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            ip("link", "set", outer, "master", name, "up")
            ip("link", "set", inner, "netns", space)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", inner)
            ip("-n", space, "link", "set", inner, "up")
        yield addresses, [["ip", "netns", "exec", f"{name}-{number}"] for number in range(count)]
    finally:
        for number in range(count):
            ip("netns", "del", f"{name}-{number}", check=False)
        ip("link", "del", name, check=False)
