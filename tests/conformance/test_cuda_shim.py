"""The CUDA sources, built as C++ for the CPU with ``tests/cuda_shim``, against the reference.

The shim runs the threads of a block one after the other. What remains unproven without a GPU is that the
kernels can be launched there and that copies overlap them; tests/unit/test_kernels_cuda.py needs a GPU.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fuzz_kernels
from edgefl import kernels
from edgefl.kernels import backend_cuda, cuda_library, selection

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++")
CASES = 2400
FLAGS = (
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Werror",
)
CHUNK = ("-Wno-unknown-pragmas", "-Wno-sign-compare", "-DEF_CHUNK_BYTES=65536")
"""Further compiler options. The chunks are so small that small sums have several."""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def _build(sources: Path, target: Path) -> None:
    folders = (f"-I{ROOT / 'tests' / 'cuda_shim'}", f"-I{sources}")
    command = [
        str(COMPILER),
        "-x",
        "c++",
        *FLAGS,
        *CHUNK,
        *folders,
        "-o",
        str(target),
        str(sources / "cuda.cu"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("cuda") / "libshim.so"
    _build(ROOT / "kernels", target)
    return target


def _use(library: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_library, "DEVICE_NODES", (str(library),))
    patch.setenv("EDGEFL_CUDA_LIBRARY", str(library))
    patch.setattr(backend_cuda, "_library", None)
    patch.delitem(selection._loaded, "cuda", raising=False)


@pytest.fixture
def _shim(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _use(library, monkeypatch)
    yield
    selection._loaded.pop("cuda", None)


def _first_difference(cases: int) -> str | None:
    """Of random sums and steps: all types, sizes, addresses, denormals, infinities and NaNs."""
    for number in range(cases):
        make = (fuzz_kernels._sum_case, fuzz_kernels._step_case)[number % 2]
        with np.errstate(all="ignore"):
            run = make(np.random.default_rng([7, number]))
            expected, found = run("reference"), run("cuda")
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            if not fuzz_kernels._same(a, b, "cuda"):
                return f"case {number}, {make.__name__[1:]}: result {i}"
    return None


@pytest.mark.usefixtures("_shim")
def test_random_sums_and_steps_have_the_references_bits() -> None:
    assert kernels.backends()["cuda"] == "ok"
    assert _first_difference(CASES) is None


@pytest.mark.usefixtures("_shim")
@pytest.mark.parametrize("size", [16_383, 16_384, 16_385, 65_536, 65_537, 150_001])
def test_sums_of_several_chunks(size: int) -> None:
    rng = np.random.default_rng(size)
    updates = [rng.standard_normal(size).astype(np.float32), rng.integers(-128, 128, size, dtype=np.int8)]
    scales = [None, rng.random(-(-size // kernels.SCALE_BLOCK), dtype=np.float32)]
    made = []
    for backend in ("reference", "cuda"):
        out, sums = np.empty(size, np.float32), np.zeros(2, np.uint64)
        kernels.weighted_sum(out, None, updates, [0.3, 2.0], backend, scales=scales, checksums=sums)
        made.append((out.tobytes(), sums.tolist()))
    assert made[0] == made[1]


MUTANTS = {
    "a fused product": (
        "total[g].x[j] = __fadd_rn(total[g].x[j], __fmul_rn(u.weight, q.x[j]));",
        "total[g].x[j] = (float)fma((double)u.weight, (double)q.x[j], (double)total[g].x[j]);",
    ),
    "a tail that reads a word too many": ("if (b < (int)(n - i) * SIZE)", "if (b <= (int)(n - i) * SIZE)"),
    "checksums numbered per chunk": ("(uint64_t)(first + i) * SIZE / 4 + 1", "(uint64_t)(i) * SIZE / 4 + 1"),
    "scales of the first chunk": ("u[k].scales + first / EF_SCALE_BLOCK", "u[k].scales"),
    "a second moment that is not kept": ("s.new_b[i] = b;", ""),
    "norms of the first warp only": ("t < tiles * WARPS; t += THREADS", "t < tiles; t += THREADS"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, (right, wrong) = tmp_path / "kernels", MUTANTS[name]
    shutil.copytree(ROOT / "kernels", sources)
    changed = 0
    for path in (sources / "cuda.cu", sources / "cuda_kernels.cuh"):
        text = path.read_text()
        changed += text.count(right)
        path.write_text(text.replace(right, wrong))
    assert changed == 1
    _build(sources, tmp_path / "libmutant.so")
    _use(tmp_path / "libmutant.so", monkeypatch)
    try:
        assert _first_difference(300) is not None or any(map(_differs_in_chunks, (17_000, 70_000)))
    finally:
        selection._loaded.pop("cuda", None)


def _differs_in_chunks(size: int) -> bool:
    try:
        test_sums_of_several_chunks(size)
    except AssertionError:
        return True
    return False
