"""Tests that a failed system call ends a run with a one-line error, and that the run can be resumed."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from edgefl import config
from edgefl.run import supervisor
from tests.fault.conftest import Recorded, small_run
from tests.process.runs import virtual
from tests.process.test_virtual_resume import outcome


@pytest.mark.timeout(300)
def test_a_failed_system_call_is_one_line_and_the_resumed_run_has_the_same_outcome(
    recorded: Recorded, tmp_path: Path
) -> None:
    supervisor.run(small_run(12), tmp_path / "undisturbed", quiet=True)
    expected = outcome(tmp_path / "undisturbed")
    for fault, folder, code, err in recorded.faulty:
        assert code in (1, 2), (fault, err)
        assert err.startswith("edgefl: "), (fault, err)
        assert err.count("\n") == 1, (fault, err)
        supervisor.resume(folder, quiet=True)
        assert outcome(folder) == expected, fault


def test_a_run_without_memory_ends_with_one_line(tmp_path: Path) -> None:
    """The zygote (the process from which others are forked) cannot load torch in 300 MiB of address space."""
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
