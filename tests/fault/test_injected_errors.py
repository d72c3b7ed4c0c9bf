"""A system call that fails costs a run at most the time to resume it, and one line names the failure."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from edgefl import Checkpoint, Stop, config
from edgefl.run import supervisor
from tests.fault import shim
from tests.process.runs import virtual
from tests.process.test_virtual_resume import outcome

FAULTS = (
    f"write:record.sqlite:{errno.ENOSPC}:90",
    f"write:checkpoints/:{errno.EIO}:8",
    f"open:checkpoints/:{errno.EMFILE}:2",
    f"write:summary:{errno.ENOSPC}:0",
)


@pytest.mark.timeout(300)
def test_one_line_and_the_same_outcome_when_resumed(tmp_path: Path) -> None:
    wanted = virtual(1, stop=Stop(versions=12), checkpoint=Checkpoint(every_s=1e-6))
    (tmp_path / "experiment.toml").write_text(config.dump(wanted))
    runs = tmp_path / "runs"
    runs.mkdir()
    library = shim.build(tmp_path)
    supervisor.run(wanted, runs / "calm", quiet=True)
    for number, fault in enumerate(FAULTS):
        folder = runs / str(number)
        around = shim.environment(library, runs, tmp_path / "log") | {"EDGEFL_SHIM_FAIL": fault}
        words = ["run", str(tmp_path / "experiment.toml"), "--quiet", "--out", str(folder)]
        command = [sys.executable, "-m", "edgefl", *words, "--accept-invalid"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **around}
        )
        assert done.returncode in (1, 2), (fault, done.stderr)
        assert done.stderr.startswith("edgefl: "), (fault, done.stderr)
        assert done.stderr.count("\n") == 1, (fault, done.stderr)
        supervisor.resume(folder, quiet=True)
        assert outcome(folder) == outcome(runs / "calm"), fault


def test_without_memory_it_ends_with_one_line(tmp_path: Path) -> None:
    """The zygote cannot load torch in 300 MiB of addresses."""
    (tmp_path / "experiment.toml").write_text(config.dump(virtual(1)))
    words = ["run", str(tmp_path / "experiment.toml"), "--quiet", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "edgefl", *words],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20)),
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("edgefl: ")
    assert not (tmp_path / "run").exists()
