"""Run the kernels in an emulator of another processor; compare the results bit for bit with the reference.

    python benchmarks/cross_check.py --cc aarch64-linux-gnu-gcc --run "qemu-aarch64"

This needs the cross compiler and the emulator (on Debian: gcc-aarch64-linux-gnu, qemu-user). The test cases
are sums with norms and checksums, quantisation to all types, and the computation of updates. The inputs
include denormals, infinities, NaNs, and lengths that are not a multiple of a SIMD vector's length. The
payload bits of NaNs are not compared. The exit code is 1 if there is a difference.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

from edgefl import kernels

ROOT = Path(__file__).parents[1]
SIZES = (0, 1, 7, 16, 31, 33, 255, 257, kernels.TILE - 1, kernels.TILE + 9, 3 * kernels.TILE + 77, 300_001)
DTYPES = (np.float32, np.float16, np.uint16, np.int8)


def built(compiler: str, folder: Path) -> Path:
    target = folder / "cross_check"
    sources = [ROOT / "benchmarks/cross_check.c", *(ROOT / "kernels" / f"{n}.c" for n in ("cpu", "pool"))]
    flags = ["-std=gnu11", "-O3", "-static", "-pthread", "-fno-fast-math", "-ffp-contract=off"]
    command = [*shlex.split(compiler), *flags, f"-I{ROOT / 'kernels'}", "-o", str(target)]
    subprocess.run([*command, *map(str, sources), "-lm"], check=True)
    return target


def random_case(number: int, size: int) -> tuple[bytes, list[np.ndarray]]:
    """Return a test case, encoded as input for cross_check.c, and the reference's results."""
    rng = np.random.default_rng(number)
    kind, code, count = number % 3, number // 3 % 4, int(rng.integers(0, 9))
    blocks = -(-size // kernels.SCALE_BLOCK) if code == 3 else 0

    def floats(n: int) -> np.ndarray:
        wild = rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
        return wild if number // 12 % 2 else rng.standard_normal(n, dtype=np.float32)

    def update() -> np.ndarray:
        if code in (0, 3):
            return floats(size) if code == 0 else rng.integers(-128, 128, size, dtype=np.int8)
        return rng.integers(0, 1 << 16, size, dtype=np.uint16).view(DTYPES[code])

    head = np.array([kind, code, size, count], dtype=np.int64).tobytes()
    if kind == 2:
        trained, base, out = floats(size), floats(size), np.empty(size, np.float32)
        kernels.delta(out, trained, base, "reference")
        return head + trained.tobytes() + base.tobytes(), [out, np.ones(1, np.int64)] * 2
    if kind == 1:
        x, left = floats(size), np.empty(size, np.float32)
        out, scales = np.empty(size, DTYPES[code]), np.empty(blocks, np.float32)
        given = scales if code == 3 else None
        norm = kernels.quantize(out, x, scales=given, new_residual=left, backend="reference")
        if code == 2:  # convert bfloat16 to float32, so that `same` recognises NaNs
            out = (out.astype(np.uint32) << 16).view(np.float32)
        return head + x.tobytes(), [out, scales, left, np.array([norm])]
    base, weights = floats(size), rng.standard_normal(count).astype(np.float32)
    updates, scales_of = [update() for _ in range(count)], [floats(blocks) for _ in range(count)]
    out, sums = np.empty(size, np.float32), np.empty(count, np.uint64)
    norms = kernels.weighted_sum(
        out, base, updates, weights, "reference",
        scales=scales_of if code == 3 else None, checksums=sums,
    )  # fmt: skip
    parts = [base, weights, *(array for pair in zip(updates, scales_of, strict=True) for array in pair)]
    return head + b"".join(part.tobytes() for part in parts), [out, norms, sums]


def same(expected: np.ndarray, raw: bytes, bfloat16: bool) -> bool:
    got = np.frombuffer(raw, dtype=np.uint16 if bfloat16 else expected.dtype)
    if bfloat16:
        got = (got.astype(np.uint32) << 16).view(np.float32)
    if expected.dtype.kind != "f":
        return expected.tobytes() == got.tobytes()
    nan, zero = np.isnan(expected), expected.dtype.type(0)
    if not np.array_equal(nan, np.isnan(got)):
        return False
    return np.where(nan, zero, expected).tobytes() == np.where(nan, zero, got).tobytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cc", default="aarch64-linux-gnu-gcc", help="the compiler")
    parser.add_argument("--run", default="qemu-aarch64", help="emulator of its programs")
    parser.add_argument("--rounds", type=int, default=48, help="cases per size")
    options = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # some values overflow on purpose
    cases = [random_case(number, size) for size in SIZES for number in range(options.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*shlex.split(options.run), str(built(options.cc, Path(folder)))]
        done = subprocess.run(command, input=b"".join(c for c, _ in cases), capture_output=True, check=True)
    at = wrong = 0
    for number, (given, results) in enumerate(cases):
        kind, code, size, count = np.frombuffer(given[:32], dtype=np.int64).tolist()
        for i, expected in enumerate(results):
            bfloat16 = kind == 1 and code == 2 and i == 0
            length = size * 2 if bfloat16 else expected.nbytes
            if not same(expected, done.stdout[at : at + length], bfloat16):
                print(f"case {number} (kind {kind}, type {code}, {size} x {count}): result {i} differs")
                wrong += 1
            at += length
    complete = at == len(done.stdout)
    print(f"{len(cases)} cases on {options.run}: {wrong} differences{'' if complete else ', lengths differ'}")
    return 0 if complete and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
