"""Tests that the CUDA sources match the reference when they are built as C++ for the CPU with the shim.

All results must be bit-identical, except that norms may differ by 1e-12 (relative). The shim,
``tests/cuda_shim``, runs the threads of a block one after the other. Only tests/unit/test_kernels_cuda.py,
which needs a GPU, tests that the kernels can be launched and that copies overlap with them.
"""

from __future__ import annotations

import ctypes
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fuzz_kernels
from edgefl import kernels
from edgefl.kernels import backend_cuda, cuda_library, selection
from edgefl.kernels.field import PRIME

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++")
CASES, FEW = 3600, 450
"""Numbers of random cases: for the slow test, and for the fast test and each of `MUTANTS`."""
FLAGS = shlex.split(
    "-x c++ -std=c++17 -O2 -ffp-contract=off -U_FORTIFY_SOURCE -shared -fPIC "
    "-Wall -Werror -Wno-unknown-pragmas -Wno-sign-compare -DEF_CHUNK_BYTES=65536"
)
"""Compiler flags. EF_CHUNK_BYTES is so small that even small sums are computed in several chunks."""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def _build(sources: Path, target: Path) -> None:
    folders = (f"-I{ROOT / 'tests' / 'cuda_shim'}", f"-I{sources}")
    command = [str(COMPILER), *FLAGS, *folders, "-o", str(target), str(sources / "cuda.cu")]
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


CASES_OF = (fuzz_kernels._sum_case, fuzz_kernels._step_case, fuzz_kernels._field_case)


def _first_difference(cases: int) -> str | None:
    """Return the first random case whose result differs from the reference's, as text; None if all agree."""
    for number in range(cases):
        make = CASES_OF[number % len(CASES_OF)]
        with np.errstate(all="ignore"):
            run = make(np.random.default_rng([7, number]))
            expected, found = run("reference"), run("cuda")
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            if not fuzz_kernels._same(a, b, "cuda"):
                return f"case {number}, {make.__name__[1:]}: result {i}"
    return None


@pytest.mark.usefixtures("_shim")
@pytest.mark.parametrize("cases", [FEW, pytest.param(CASES, marks=pytest.mark.slow)])
def test_random_sums_steps_and_masks_have_the_references_bits(cases: int) -> None:
    assert kernels.backends()["cuda"] == "ok"
    assert _first_difference(cases) is None


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


@pytest.mark.usefixtures("_shim")
def test_sums_of_many_updates_use_smaller_chunks() -> None:
    """Regression: for each update, two whole chunks were allocated, which are 8 MiB on a GPU."""
    size, count = 65_536, 300
    rng = np.random.default_rng(0)
    updates = list(rng.integers(-128, 128, (count, size), dtype=np.int8))
    scales = list(rng.random((count, size // kernels.SCALE_BLOCK), dtype=np.float32))
    allocated = ctypes.c_size_t.in_dll(backend_cuda.library(), "shim_allocated")
    made, norms = [], []
    for backend in ("reference", "cuda"):
        allocated.value, out, sums = 0, np.empty(size, np.float32), np.zeros(count, np.uint64)
        weights = [0.3] * count
        norms.append(
            kernels.weighted_sum(out, None, updates, weights, backend, scales=scales, checksums=sums)
        )
        made.append((out.tobytes(), sums.tolist()))
    assert made[0] == made[1]
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-12)
    assert allocated.value < count * size


@pytest.mark.usefixtures("_shim")
@pytest.mark.parametrize("size", [4095, 4097, 16_384, 16_385, 50_003])
def test_masks_of_several_chunks(size: int) -> None:
    """The second sum has 600 vectors, so its chunks are smaller. In the third, elements add up to p."""
    rng = np.random.default_rng(size)
    update, mask = rng.standard_normal(size, np.float32), rng.integers(0, PRIME, size, dtype=np.uint32)
    made, opposite = [], (PRIME - mask.astype(np.int64)).astype(np.uint32) % np.uint32(PRIME)
    for backend in ("reference", "cuda"):
        total, coded, floats = mask.copy(), np.empty(size, np.uint32), np.empty(size, np.float32)
        kernels.field_sum(total, [mask, mask[::-1].copy()], [PRIME - 1, 3], backend)
        limited = kernels.field_encode(coded, update, mask, 1.0, 2.0**20, backend)
        largest = kernels.field_decode(floats, coded, mask, 2.0**-20, backend)
        made.append((total.tobytes(), coded.tobytes(), floats.tobytes(), limited, largest))
        for vectors, weights in (([mask] * 600, range(600)), ([mask, opposite], [1, 1])):
            kernels.field_sum(total, vectors, weights, backend)
            made[-1] += (total.tobytes(),)
    assert made[0] == made[1]


@pytest.mark.usefixtures("_shim")
def test_a_call_after_a_failed_allocation_succeeds() -> None:
    x, out = np.ones(9, np.float32), np.empty(9, np.float32)
    listed = backend_cuda.vectors([x], x[:1], [None])
    arguments = (None, None, ctypes.addressof(listed), 1, 2**60, None, None, None)
    assert backend_cuda.library().efc_sum_host(*arguments) == -1
    kernels.weighted_sum(out, None, [x], [1.0], "cuda")
    assert out.tolist() == x.tolist()


MUTANTS = {
    "a fused product": (
        "total[g].x[j] = __fadd_rn(total[g].x[j], __fmul_rn(u.weight, q.x[j]));",
        "total[g].x[j] = (float)fma((double)u.weight, (double)q.x[j], (double)total[g].x[j]);",
    ),
    "a tail that reads a word too many": ("if (b < (int)(n - i) * SIZE)", "if (b <= (int)(n - i) * SIZE)"),
    "checksums numbered per chunk": ("(uint64_t)(first + i) * SIZE / 4 + 1", "(uint64_t)(i) * SIZE / 4 + 1"),
    "scales of the first chunk": ("u[k].scales + first / EF_SCALE_BLOCK", "u[k].scales"),
    "a second moment that is not stored": ("s.new_b[i] = b;", ""),
    "norms of the first warp only": ("t < tiles * WARPS; t += THREADS", "t < tiles; t += THREADS"),
    "products that overflow": ("total[g][2] += folded(weight * x.z)", "total[g][2] += weight * x.z"),
    "sums that are p": ("x >= EF_PRIME ? x - EF_PRIME : x", "x > EF_PRIME ? x - EF_PRIME : x"),
    "a masked word that is not reduced": ("(t < s || t >= EF_PRIME ? 5u : 0u)", "(t < s ? 5u : 0u)"),
    "NaN that is not limited": ("x < clip ? x : clip", "x > clip ? clip : x"),
    "rounding to zero": ("__float2int_rn(__fmul_rn(v, factor))", "(int)__fmul_rn(v, factor)"),
    "the largest number of the first warp only": (
        "if (threadIdx.x % 32 == 0) atomicMax",
        "if (threadIdx.x == 0) atomicMax",
    ),
    "masks of the first chunk": ("TO(masks, mask + first, m * 4)", "TO(masks, mask, m * 4)"),
    "vectors of the first chunk": ("TO(vector, v[k] + first, m * 4)", "TO(vector, v[k], m * 4)"),
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
        differs = _first_difference(FEW) is not None
        assert differs or any(map(_differs_in_chunks, (17_000, 70_000)))
    finally:
        selection._loaded.pop("cuda", None)


def _differs_in_chunks(size: int) -> bool:
    try:
        test_sums_of_several_chunks(size)
        test_masks_of_several_chunks(size)
    except AssertionError:
        return True
    return False
