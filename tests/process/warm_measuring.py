"""Measuring processes of device tests, forked from a process that has imported torch (see `warm`).

As in other measuring processes, addresses and hashes are not random.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from importlib import import_module

from edgefl.host.channel import Channel, Closed
from edgefl.host.process import become_child
from edgefl.regression import repetition, worker  # before `become_child`: worker keeps the stop handlers
from tests.process import warm


def main(channel_fd: int, parent_pid: int) -> None:
    become_child(parent_pid, "edgefl-warm")
    import_module("edgefl.regression.counted")
    # A third of the usual CPU time per repetition: these tests need no precise times.
    repetition.TIMED_S, repetition.REST_S, repetition.MAX_PAIRS = 0.04, 0.02, 20
    gc.collect()
    gc.freeze()
    with contextlib.suppress(Closed):
        warm.serve(Channel.inherit(channel_fd, warm.Wanted | warm.More))


if __name__ == "__main__":
    worker.restart_without_randomness(__spec__.name)
    main(int(sys.argv[1]), int(sys.argv[2]))
