"""Tests of runs on a machine with a GPU, where torch starts threads, and of training on the GPU.

``tests/fake_gpu`` simulates a device. The tests marked ``cuda`` need a real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edgefl.kernels import cuda_library
from tests.process.runs import Command, summary

FAKE = Path(__file__).parents[1] / "fake_gpu"
ROOT = Path(__file__).parents[2]
RUN = """
[fleet]
devices = { pixel-4 = 2, moto-g4 = 1 }
[training]
steps = 2
[strategy]
name = "fedbuff"
buffer_size = 2
[stop]
versions = 3
"""
FORK = """
import os, torch
def step():
    torch.nn.Linear(4, 4)(torch.zeros(1, 4)).sum().backward()
step()
if not (pid := os.fork()):
    try:
        step()
        os._exit(0)
    except RuntimeError as error:
        assert "fork" in str(error)
        os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
SEEN_AND_HIDDEN = f"""
import os, torch
for devices in ("0", ""):
    if not (pid := os.fork()):
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
        exec({FORK!r})
        os._exit(0)
    os.waitpid(pid, 0)
"""
needs_fake = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a device from Python",
)
needs_gpu = pytest.mark.skipif(
    torch.version.cuda is None or not cuda_library.driver_present(), reason="no GPU that torch can use"
)


def _python(*arguments: str | Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FAKE), str(ROOT)]), **variables}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _model(folder: Path, *options: str, **variables: str) -> str:
    """Run the experiment; return the digest of its final model."""
    (folder / "run.toml").write_text(RUN)
    out = folder / f"run-{len(list(folder.iterdir()))}"
    _python("-m", "edgefl", "run", folder / "run.toml", *options, "--out", out, **variables)
    found = summary(out)
    assert found["trips"]["lost"] == 0
    return str(found["model_sha256"])


@needs_fake
def test_the_fake_device_breaks_forks_and_can_be_hidden() -> None:
    assert _python("-c", SEEN_AND_HIDDEN).split() == ["7", "0"]


@needs_fake
@pytest.mark.parametrize("clock", ["virtual", pytest.param("wall", marks=pytest.mark.slow)])
def test_phones_train_without_the_gpu(clock: str, tmp_path: Path) -> None:
    options = ["--set", f"clock.kind={clock}", "--accept-invalid"]
    model = _model(tmp_path, *options)
    if clock == "virtual":
        Command("run", str(tmp_path / "run.toml"), *options, "--out", str(tmp_path / "without")).ends()
        assert summary(tmp_path / "without")["model_sha256"] == model


@pytest.mark.slow
@needs_fake
def test_runs_of_a_sweep_train(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    out = tmp_path / "sweep"
    _python("-m", "edgefl", "sweep", tmp_path / "run.toml", "--seeds", "1,2", "--out", out)
    assert [summary(run)["trips"]["lost"] for run in (out / "runs").iterdir()] == [0, 0]


@pytest.mark.slow
@needs_fake
def test_device_tests_and_programs_train(tmp_path: Path) -> None:
    (tmp_path / "test_step.py").write_text(
        "import pytest, torch\n"
        "def step():\n    torch.nn.Linear(4, 4)(torch.zeros(1, 4)).sum().backward()\n"
        "@pytest.mark.edge_device('pi-5')\n"
        "def test_step(edge_device):\n    assert edge_device.run(step).device\n"
    )
    said = _python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "test_step.py",
        "--edgefl-time-scale=0", "--edgefl-repetitions=9",
    )  # fmt: skip
    assert "1 passed" in said
    command = [sys.executable, "-c", FORK]
    assert "0" in _python("-m", "edgefl", "exec", "--device", "pi-5", "--accept-invalid", "--", *command)


@pytest.mark.cuda
@needs_gpu
def test_workers_compute_on_the_gpu(tmp_path: Path) -> None:
    """Two runs on the GPU make bit-identical models."""
    options = ["--set", "clock.kind=virtual", "--set", "clock.workers=2", "--set", "training.device=cuda"]
    one, other = (_model(tmp_path, *options, PYTHONPATH=str(ROOT)) for _ in range(2))
    assert one == other


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_the_server_sums_on_the_gpu(clock: str, tmp_path: Path) -> None:
    options = ["--set", f"clock.kind={clock}", "--set", "server.backend=cuda", "--accept-invalid"]
    _model(tmp_path, *options, PYTHONPATH=str(ROOT))
