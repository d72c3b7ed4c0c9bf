"""The server's memory and files hold no readable update."""

from __future__ import annotations

import itertools
import re
import signal
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import edgefl
from edgefl import Clock, Evaluation, Experiment, Fleet, Model, Server, Stop, Training
from edgefl.experiment import Attackers, Secure
from edgefl.results.record import Record

from .runs import PATIENCE_S, Command, experiment, wait_for_versions
from .test_secure import MASKED, TRUSTED, UNIFORM

pytest.importorskip("cryptography", reason="needs edgefl[secure]")

pytestmark = pytest.mark.timeout(300)

BUFFER = {"name": "fedbuff", "buffer_size": 4, "exponent": 0.0}
UNWEIGHTED = Server(secure=Secure(kind="pairwise", resolution=1), heartbeat_s=PATIENCE_S)
CODE = """
import numpy as np
import torch
from torch import nn

def pattern(client):
    rng = np.random.default_rng([17, client])
    return np.tile(rng.integers(-100, 101, 8) * 2.0**-8, 8 * 10).astype(np.float32)

def attack(delta, client, trip, rng):
    delta[: 640] = pattern(client)

def make(**sizes):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    nn.init.zeros_(net[1].weight)
    return net
"""


def patterned(folder: Path, server: Server, strategy: dict[str, Any]) -> Experiment:
    """Clients whose updates are repeated patterns. All sums are exact in float32, so the trained model minus
    the initial one is the pattern itself."""
    (folder / "hidden_updates.py").write_text(CODE)
    return experiment(
        fleet=Fleet(
            devices={"pi-zero-2w": 6},
            network="fios",
            attackers=Attackers(share=0.9, kind="hidden_updates:attack"),
        ),
        model=Model(name="hidden_updates:make"),
        training=Training(steps=1, lr=1.2e-38),
        strategy=strategy,
        clock=Clock(kind="wall", time_scale="auto"),
        server=server,
        evaluation=Evaluation(every_versions=1000),
        checkpoint=edgefl.Checkpoint(every_s=0.1),
        stop=Stop(versions=100_000),
    )


def memory_of(process: psutil.Process) -> bytes:
    """Return the readable memory of a stopped process, including shared mappings, without library code
    and without pages of zeros.
    """
    parts = []
    with open(f"/proc/{process.pid}/maps") as maps, open(f"/proc/{process.pid}/mem", "rb", 0) as memory:
        for line in maps:
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) r(\S)\S* \S+ \S+ \S+ *(.*)", line)
            if found is None or found[4].startswith("[v") or (found[3] == "-" and Path(found[4]).is_file()):
                continue
            start, end = int(found[1], 16), int(found[2], 16)
            try:
                memory.seek(start)
                pages = np.frombuffer(memory.read(end - start), np.uint64).reshape(-1, PAGESIZE // 8)
                parts.append(pages[pages.any(axis=1)].tobytes())
            except (OSError, ValueError, OverflowError):
                continue
    return b"\0".join(parts)


def places_of_updates(folder: Path, server: Server, strategy: dict[str, Any], places: set[str]) -> set[str]:
    """Return where a client's update was found: in the server's "memory", in "files" of the run, or both.

    Search until updates were found in all ``places``: a checkpoint may be written while the buffer is empty,
    and the next one may be late, because the server pauses after a slow checkpoint. If ``places`` is empty,
    search twice.
    """
    scope: dict[str, Any] = {}
    exec(CODE, scope)
    updates = [scope["pattern"](client) for client in range(6)]
    needles = [update[:8].tobytes() for update in updates]
    run = folder / "run"
    command = Command.run(patterned(folder, server, strategy), run)
    found = set()
    try:
        wait_for_versions(run, 4, command)
        process = command.child("edgefl-server")
        for looks in itertools.count(1):
            process.send_signal(signal.SIGSTOP)
            memory = memory_of(process)
            assert b"edgefl-server" in memory  # the memory was read
            if any(needle in memory for needle in needles):
                found.add("memory")
            for path in run.rglob("*"):
                if path.is_file() and any(needle in path.read_bytes() for needle in needles):
                    found.add("files")
            process.send_signal(signal.SIGCONT)
            if found >= places if places else looks == 2:
                break
            wait_for_versions(run, 3 + summary_versions(run), command)
        command.interrupt()
    finally:
        command.finish()
    return found


def summary_versions(folder: Path) -> int:
    with Record(folder) as record:
        return len(record.versions["version"])


@pytest.mark.parametrize(
    ("server", "strategy", "places"),
    [
        (Server(heartbeat_s=PATIENCE_S), BUFFER, {"memory"}),
        pytest.param(Server(heartbeat_s=PATIENCE_S), BUFFER, {"memory", "files"}, marks=pytest.mark.slow),
        (MASKED, BUFFER, set()),
        (TRUSTED, BUFFER, set()),
        pytest.param(Server(heartbeat_s=PATIENCE_S), UNIFORM, {"memory"}, marks=pytest.mark.slow),
        pytest.param(UNWEIGHTED, UNIFORM, set(), marks=pytest.mark.slow),
    ],
    ids=["plain", "plain files", "masks", "trusted", "plain rounds", "pairwise"],
)
def test_the_server_holds_no_readable_update(
    server: Server, strategy: dict[str, Any], places: set[str], tmp_path: Path
) -> None:
    """Memory, journal and checkpoints are searched. The same search finds the updates of plain runs. For a
    strategy with rounds, it finds them only in memory, because checkpoints between rounds contain no update.

    With pairwise masks the clients' weight is 1, so that an update without masks would be in the server's
    sums. Mutant: a client does not add the masks.
    """
    found = places_of_updates(tmp_path, server, strategy, places)
    assert found >= places
    assert places or not found
