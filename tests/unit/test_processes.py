"""What a process of a run asks of the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from edgefl.errors import RunError
from edgefl.run import server_process

_FAULTS = """
import resource
from edgefl.run.process import keep_freed_memory

if {keep}:
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [bytearray(6 * 2**20) for _ in range(4)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(sum(faults() for _ in range(20)))
"""


def faults(*, keep: bool) -> int:
    """Page faults of twenty times 24 MiB that are allocated, written and freed."""
    command = [sys.executable, "-c", _FAULTS.format(keep=keep)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")), reason="not the GNU C library"
)
def test_what_is_freed_is_used_again_without_asking_the_system() -> None:
    assert faults(keep=True) < 100
    assert faults(keep=False) > 1000


def test_too_few_descriptors_for_all_peers_are_a_word_and_not_libzmqs_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server_process._require_descriptors(1)
    monkeypatch.setattr(server_process.resource, "getrlimit", lambda _: (200, 200))
    with pytest.raises(RunError, match=r"are needed for 300 processes, 200 are allowed: .*ulimit -n"):
        server_process._require_descriptors(300)
