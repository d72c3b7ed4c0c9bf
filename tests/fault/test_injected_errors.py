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

ROOT = Path(__file__).parents[2]
FAULTS = (
    # The main process makes 36 such writes, and the server 59 to 80, since it groups what it records.
    f"write:record.sqlite-wal:{errno.ENOSPC}:40",
    f"write:checkpoints/:{errno.EIO}:8",
    f"open:checkpoints/:{errno.EMFILE}:2",
    f"write:summary:{errno.ENOSPC}:0",
)


FORKED = """
import ctypes
import os
import sys
from edgefl.host.children import exit_with
from tests.process import warm

warm.up()
for number, fault in enumerate(sys.argv[1:]):
    if (pid := os.fork()) == 0:
        os.environ["EDGEFL_SHIM_FAIL"] = fault
        ctypes.CDLL(os.environ["LD_PRELOAD"]).edgefl_shim_begin()
        os.dup2(os.open(f"{number}.err", os.O_CREAT | os.O_WRONLY), 2)
        words = "run", "experiment.toml", "--quiet", "--accept-invalid", "--out", f"runs/{number}"
        exit_with(lambda: warm.command(warm.Wanted(words, dict(os.environ), os.getcwd())))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
"""``edgefl run`` once for each fault, forked from one process that has imported everything under the shim."""


@pytest.mark.timeout(300)
def test_one_line_and_the_same_outcome_when_resumed(tmp_path: Path) -> None:
    wanted = virtual(1, stop=Stop(versions=12), checkpoint=Checkpoint(every_s=1e-6))
    (tmp_path / "experiment.toml").write_text(config.dump(wanted))
    runs = tmp_path / "runs"
    runs.mkdir()
    around = shim.environment(shim.build(tmp_path), runs, tmp_path / "log") | {"PYTHONPATH": str(ROOT)}
    supervisor.run(wanted, runs / "calm", quiet=True)
    command, environment = [sys.executable, "-c", FORKED, *FAULTS], {**os.environ, **around}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, check=True)
    codes = list(map(int, done.stdout.split()))
    for number, (fault, code) in enumerate(zip(FAULTS, codes, strict=True)):
        said = (tmp_path / f"{number}.err").read_text()
        assert code in (1, 2), (fault, said)
        assert said.startswith("edgefl: "), (fault, said)
        assert said.count("\n") == 1, (fault, said)
        supervisor.resume(runs / str(number), quiet=True)
        assert outcome(runs / str(number)) == outcome(runs / "calm"), fault


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
