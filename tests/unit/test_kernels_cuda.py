"""Tests of the CUDA back end: its build, why it may be unavailable and, on a GPU, its results."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgefl import kernels
from edgefl.errors import ConfigError, RunError
from edgefl.kernels import backend_cuda, cuda_library, selection, steps
from edgefl.kernels.field import PRIME
from edgefl.kernels.quantization import QuantizationArguments
from edgefl.strategies import ServerOptimizer

WHY_NOT = kernels.backends()["cuda"]
needs_device = pytest.mark.skipif(WHY_NOT != "ok", reason=f"CUDA: {WHY_NOT}")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_build_makes_one_library_with_all_functions(tmp_path: Path) -> None:
    """This test is slow; among the fast tests, `test_cuda_shim` compiles the sources."""
    target = tmp_path / "libedgefl_cuda.so"
    cuda_library.build(target, arch="sm_90")
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    library = ctypes.CDLL(str(target))
    assert library.efc_abi() == selection.ABI
    for name in ("devices", "error", "sum_host", "field_sum", "field_code", "register", "unregister"):
        assert getattr(library, f"efc_{name}")


@needs_nvcc
def test_a_failed_build_shows_the_compilers_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the CUDA kernels do not build: .*sm_1"):
        cuda_library.build(tmp_path / "x.so", arch="sm_1")
    assert list(tmp_path.iterdir()) == []


def test_reasons_for_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_library, "DEVICE_NODES", (str(tmp_path / "none"),))
    assert cuda_library.problem() == "no CUDA device (no NVIDIA driver on this machine)"
    monkeypatch.setattr(cuda_library, "DEVICE_NODES", (str(tmp_path),))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("EDGEFL_CUDA_LIBRARY", raising=False)
    assert "nvcc is not on PATH" in str(cuda_library.problem())
    with pytest.raises(ConfigError, match=r"^the CUDA kernels cannot be built: nvcc not found$"):
        cuda_library.build(tmp_path / "x.so")
    mine = tmp_path / "mine.so"
    monkeypatch.setenv("EDGEFL_CUDA_LIBRARY", str(mine))
    assert cuda_library.problem() is None
    assert cuda_library.existing() == mine
    mine.write_bytes(b"no library")
    with pytest.raises(ConfigError, match=r"^the CUDA kernels' library .*mine\.so does not load: "):
        cuda_library.load(selection.ABI)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_stale_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text("int efc_abi(void) { return 1; }\n")
    assert os.system(f"cc -shared -fPIC -o {library} {source}") == 0
    monkeypatch.setenv("EDGEFL_CUDA_LIBRARY", str(library))
    with pytest.raises(ConfigError, match=rf"old\.so has ABI 1, this edgefl needs {selection.ABI}$"):
        cuda_library.load(selection.ABI)
    monkeypatch.setattr(selection, "ABI", 1)
    monkeypatch.setattr(backend_cuda, "_library", None)
    with pytest.raises(ConfigError, match=r"was built from older sources; build it again: .*efc_error"):
        backend_cuda.library()


def test_a_failed_call_is_an_error_of_one_line_in_a_run_and_a_runtime_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutant: the error is only a RuntimeError, which ends a run with a traceback."""
    library = SimpleNamespace(efc_error=lambda: b"cudaMalloc(&memory, bytes): out of memory")
    monkeypatch.setattr(backend_cuda, "_library", library)
    with pytest.raises(RunError, match=r"^CUDA: cudaMalloc.* out of memory$") as caught:
        backend_cuda._raise_if(-1)
    assert isinstance(caught.value, RuntimeError)


def test_structures_match_those_of_the_c_header() -> None:
    assert ctypes.sizeof(backend_cuda.Vector) == 24
    assert ctypes.sizeof(backend_cuda.StepVectors) == 80
    x, q, scale = np.ones(9, np.float32), np.ones(9, np.int8), np.ones(1, np.float32)
    first, second = backend_cuda.vectors([x, q], np.array([0.5, 2.0], np.float32), [None, scale])
    assert (first.data, first.scales, first.weight, first.dtype) == (x.ctypes.data, None, 0.5, 0)
    assert (second.data, second.scales, second.dtype) == (q.ctypes.data, scale.ctypes.data, 3)
    made = backend_cuda.step_vectors(ServerOptimizer(kind="yogi", lr=0.25), x, x, [x, x], [x, x])
    assert (made.kind, made.lr) == (steps.KINDS.index("yogi"), 0.25)
    assert made.old_b == made.out == x.ctypes.data
    one = backend_cuda.step_vectors(ServerOptimizer(momentum=0.5), x, x, [x], [x])
    assert (one.kind, one.keep1, one.old_b, one.new_b) == (0, 0.5, None, None)


def test_functions_that_run_on_the_cpu_have_the_references_bits() -> None:
    x = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
    outs = [np.empty(1000, np.float16) for _ in range(2)]
    given = QuantizationArguments(outs[0], x, None, None, None, 1.0)
    assert backend_cuda.sq_norm(x, None, 1) == kernels.sq_norm(x, "reference")
    assert backend_cuda.checksum(x, 1) == kernels.checksum(x, "reference")
    assert backend_cuda.quantize(given, 1) == kernels.quantize(outs[1], x, backend="reference")
    assert outs[0].tobytes() == outs[1].tobytes()


DTYPES: tuple[Any, ...] = (np.float32, np.float16, np.uint16, np.int8)


def _case(size: int, count: int) -> dict[str, Any]:
    rng = np.random.default_rng([size, count])
    updates = [rng.standard_normal(size, dtype=np.float32) for _ in range(count)]
    scales: list[Any] = [None] * count
    for k in range(count):
        dtype = DTYPES[k % 4]
        out = np.empty(size, dtype)
        scales[k] = np.empty(-(-size // 256), np.float32) if dtype is np.int8 else None
        kernels.quantize(out, updates[k], scales=scales[k])
        updates[k] = out
    base = rng.standard_normal(size, dtype=np.float32)
    return {"base": base, "updates": updates, "weights": rng.standard_normal(count), "scales": scales}


@pytest.mark.cuda
@needs_device
@pytest.mark.parametrize("size", [0, 1, 3, 257, 16384, 16385, 3_000_001])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_sums_have_the_references_bits(size: int, count: int) -> None:
    case, made = _case(size, count), []
    for backend in ("reference", "cuda"):
        out, sums = np.empty(size, np.float32), np.zeros(count, np.uint64)
        norms = kernels.weighted_sum(out, backend=backend, checksums=sums, **case)
        made.append((out.tobytes(), sums.tolist(), norms))
    assert made[0][:2] == made[1][:2]
    np.testing.assert_allclose(made[1][2], made[0][2], rtol=1e-12)


@pytest.mark.cuda
@needs_device
@pytest.mark.parametrize("kind", ["sgd", "adam", "yogi", "adagrad"])
def test_steps_have_the_references_bits(kind: Any) -> None:
    optimizer, size = ServerOptimizer(kind=kind, momentum=0.9, lr=0.1), 1_100_003
    case, made = _case(size, 5), []
    old = [np.full(size, 0.25, np.float32) for _ in range(optimizer.vectors)]
    for backend in ("reference", "cuda"):
        out, *new = (np.empty(size, np.float32) for _ in range(1 + len(old)))
        kernels.weighted_step(out, optimizer=optimizer, old_state=old, new_state=new, backend=backend, **case)
        made.append([x.tobytes() for x in (out, *new)])
    assert made[0] == made[1]


@pytest.mark.cuda
@needs_device
@pytest.mark.parametrize("size", [0, 1, 4097, 3_000_001])
def test_masks_have_the_references_bits(size: int) -> None:
    rng, made = np.random.default_rng(size), []
    update, mask = rng.standard_normal(size, np.float32), rng.integers(0, PRIME, size, dtype=np.uint32)
    for backend in ("reference", "cuda"):
        total, coded = np.empty((2, size), np.uint32)
        floats = np.empty(size, np.float32)
        kernels.field_sum(total, [mask] * 9, [PRIME - 1] * 9, backend)
        limited = kernels.field_encode(coded, update, mask, 1.0, 2.0**20, backend)
        largest = kernels.field_decode(floats, coded, mask, 2.0**-20, backend)
        made.append((total.tobytes(), coded.tobytes(), floats.tobytes(), limited, largest))
    assert made[0] == made[1]
