"""A run without the memory that it needs."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from edgefl import config
from tests.process.runs import virtual


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
