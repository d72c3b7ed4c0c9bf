"""Run random test cases on every back end, instruction set and number of threads; compare all bits.

    python benchmarks/fuzz_kernels.py --cases 1000000 --seconds 3600 --seed 0

A case is one call of one kernel with random sizes, types, addresses (aligned and unaligned) and values, which
include denormals, infinities and NaNs. Its results are compared with those of the reference back end. A case
is counted once, regardless of the number of back ends. At the first difference, the run prints the number of
the case and ends with exit code 1; ``--only N`` repeats case N. ``--start`` is the number of the first case,
so that a long run can be split into several.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

import numpy as np

from edgefl import kernels
from edgefl.kernels.field import PRIME
from edgefl.strategies import ServerOptimizer

TILE, BLOCK = kernels.TILE, kernels.SCALE_BLOCK
EDGES = (0, 1, 7, 8, 9, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 3)
LARGE = 5 * 65536 + 5
"""Number of elements of a large array, which is divided among several threads and written with non-temporal
stores. One case in 500 has about this size; these cases take half of the total time."""
OPTIMIZERS = ("sgd", "momentum", "adam", "yogi", "adagrad")
_LARGEST, _HALVES = (
    (65504, 65520, 3.4028235e38, np.inf, np.nan),
    (6.1035156e-05, 5.9604645e-08, 2.9802322e-08),
)
_POSITIVE = (0.0, 1e-45, 1.1754942e-38, 1.1754944e-38, 0.5, 1.0, 126.5, 127.5, *_HALVES, *_LARGEST)
SPECIAL = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], dtype=np.float32)


def _size(rng: np.random.Generator) -> int:
    choice = rng.random()
    if choice < 0.002:
        return int(LARGE + rng.integers(0, 600))
    if choice < 0.15:
        return int(rng.choice(EDGES))
    return int(rng.integers(0, 40) if choice < 0.7 else rng.integers(0, 1200))


def _placed(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a copy of the array that starts at a random address."""
    view = _blank(array.size, array.dtype, _place(rng))
    view[:] = array
    return view


def _place(rng: np.random.Generator) -> int:
    """Draw by how many bytes (0 to 63) an array's address exceeds a multiple of 64.

    About half of the offsets are 0, because kernels use non-temporal stores only for aligned results.
    """
    return int(rng.integers(0, 64)) * int(rng.random() < 0.5)


def _floats(size: int, rng: np.random.Generator) -> np.ndarray:
    kind = rng.integers(0, 5)
    if kind == 0:
        return rng.standard_normal(size, dtype=np.float32)
    if kind == 4:  # the squares are finite, and some of them are denormal in float32
        powers = np.float32(10) ** rng.integers(-24, 19, size).astype(np.float32)
        return rng.standard_normal(size, dtype=np.float32) * powers
    if kind == 1:
        return rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
    if kind == 2:
        return rng.choice(SPECIAL, size)
    exponents = rng.integers(-45, 38, size).astype(np.float32)
    return (rng.standard_normal(size, dtype=np.float32) * np.float32(10) ** exponents).astype(np.float32)


def _update(size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
    kind = rng.integers(0, 4)
    if kind == 0:
        return _placed(_floats(size, rng), rng), None
    if kind == 3:
        scales = _placed(_floats(-(-size // BLOCK), rng), rng)
        return _placed(rng.integers(-128, 128, size, dtype=np.int8), rng), scales
    halves = rng.integers(0, 1 << 16, size, dtype=np.uint16)
    if rng.random() < 0.5:
        halves = (_floats(size, rng).view(np.uint32) >> 16).astype(np.uint16)
    return _placed(halves.view(np.float16) if kind == 1 else halves, rng), None


def _blank(size: int, dtype: Any, place: int) -> np.ndarray:
    raw = np.full(size * np.dtype(dtype).itemsize + 128, 0xA5, dtype=np.uint8)
    start = -raw.ctypes.data % 64 + place
    return raw[start : start + size * np.dtype(dtype).itemsize].view(dtype)


def _sum_case(rng: np.random.Generator) -> Any:
    size, count = _size(rng), int(rng.integers(0, 14))
    pairs = [_update(size, rng) for _ in range(count)]
    weights = _floats(count, rng).astype(np.float64)
    base = _placed(_floats(size, rng), rng) if rng.random() < 0.8 else None
    place, in_place, sums = _place(rng), rng.random() < 0.2, rng.random() < 0.5

    def run(backend: str) -> list[np.ndarray]:
        out = _blank(size, np.float32, place)
        model = base
        if base is not None and in_place:
            out[:] = base
            model = out
        checks = np.zeros(count, np.uint64) if sums else None
        norms = kernels.weighted_sum(
            out,
            model,
            [u for u, _ in pairs],
            weights,
            backend,
            scales=[s for _, s in pairs],
            checksums=checks,
        )
        return [out, norms] if checks is None else [out, norms, checks]

    return run


def _step_case(rng: np.random.Generator) -> Any:
    size, count = _size(rng), int(rng.integers(0, 9))
    pairs = [_update(size, rng) for _ in range(count)]
    weights = _floats(count, rng).astype(np.float64)
    name = OPTIMIZERS[rng.integers(0, len(OPTIMIZERS))]
    if name in ("sgd", "momentum"):
        optimizer = ServerOptimizer(lr=rng.choice([1.0, 0.3]), momentum=0.9 * (name == "momentum"))
    else:
        optimizer = ServerOptimizer(
            kind=name, lr=rng.choice([1.0, 0.01]), beta1=rng.random(), beta2=rng.random()
        )
    base = _placed(_floats(size, rng), rng)
    old = [_placed(_floats(size, rng), rng) for _ in range(optimizer.vectors)]
    if len(old) == 2 and rng.random() < 0.7:
        old[1] = np.abs(old[1])
    base_scale, place = rng.choice([1.0, 0.9]), _place(rng)

    def run(backend: str) -> list[np.ndarray]:
        out, *new = (_blank(size, np.float32, place) for _ in range(1 + len(old)))
        norms = kernels.weighted_step(
            out, base, [u for u, _ in pairs], weights, optimizer, old, new, backend,
            base_scale=base_scale, scales=[s for _, s in pairs],
        )  # fmt: skip
        return [out, *new, norms]

    return run


def _quantize_case(rng: np.random.Generator) -> Any:
    size = _size(rng)
    update, residual = (_placed(_floats(size, rng), rng) for _ in range(2))
    dtype = [np.float32, np.float16, np.uint16, np.int8][rng.integers(0, 4)]
    old = residual if rng.random() < 0.5 else None
    weight, place, keep = float(rng.choice([1.0, 0.3, -2.0])), _place(rng), rng.random() < 0.7

    def run(backend: str) -> list[np.ndarray]:
        out = _blank(size, dtype, place)
        scales = _blank(-(-size // BLOCK), np.float32, place) if dtype is np.int8 else None
        left = _blank(size, np.float32, place) if keep else None
        norm = kernels.quantize(
            out, update, scales=scales, residual=old, new_residual=left, weight=weight, backend=backend
        )
        values = (out.astype(np.uint32) << 16).view(np.float32) if dtype is np.uint16 else out
        return [values, np.array([norm]), *(x for x in (scales, left) if x is not None)]

    return run


def _checksum_case(rng: np.random.Generator) -> Any:
    data = _placed(rng.integers(0, 256, _size(rng) * int(rng.integers(1, 5)), dtype=np.uint8), rng)
    update, scales = _update(_size(rng), rng)

    def run(backend: str) -> list[np.ndarray]:
        norm = kernels.sq_norm(update, backend, scale=scales)
        return [np.array([kernels.checksum(data, backend)], np.uint64), np.array([norm])]

    return run


def _delta_case(rng: np.random.Generator) -> Any:
    size = _size(rng) * int(rng.integers(1, 5))
    trained, base = (_placed(_floats(size, rng), rng) for _ in range(2))
    place = _place(rng)

    def run(backend: str) -> list[np.ndarray]:
        out = _blank(size, np.float32, place)
        seen = kernels.delta(out, trained, base, backend)
        return [out, np.array([seen == kernels.checksum(out, "reference")])]

    return run


def _field_case(rng: np.random.Generator) -> Any:
    size, count = _size(rng), int(rng.integers(0, 14))
    vectors = [_words(size, rng) for _ in range(count)]
    weights = rng.integers(0, rng.choice([2, 256, PRIME]), count).tolist()
    update, mask, place = _placed(_floats(size, rng), rng), _words(size, rng), _place(rng)
    factor = float(rng.choice([1.0, 0.3, 2.0**20, 2.0**-40]))
    clip, in_place = min(float(rng.choice([1e-6, 0.5, 1e6])), 2.0**30 / factor), rng.random() < 0.2

    def run(backend: str) -> list[np.ndarray]:
        total, coded, floats = (_blank(size, kind, place) for kind in (np.uint32, np.uint32, np.float32))
        kernels.field_sum(total, vectors, weights, backend)
        if in_place:
            coded[:] = mask
        limited = kernels.field_encode(coded, update, coded if in_place else mask, clip, factor, backend)
        largest = kernels.field_decode(floats, total, mask, factor, backend)
        return [total, coded, floats, np.array([limited, largest])]

    return run


def _words(size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw numbers below p = 2^32 − 5. Some arrays consist only of numbers near 0, p/2 and p."""
    edges = np.array([0, 1, PRIME // 2, PRIME // 2 + 1, PRIME - 1], np.uint32)
    made = rng.choice(edges, size) if rng.random() < 0.2 else rng.integers(0, PRIME, size, dtype=np.uint32)
    return _placed(made, rng)


def _same(a: np.ndarray, b: np.ndarray, backend: str) -> bool:
    """Return True if the bits are equal. All NaNs are regarded as equal. Norms computed with CUDA may differ
    by 1e-12 (relative), because CUDA adds the squares in another order."""
    if a.dtype.kind == "f":
        nan = np.isnan(a)
        if not np.array_equal(nan, np.isnan(b)):
            return False
        a, b = np.where(nan, a.dtype.type(0), a), np.where(nan, b.dtype.type(0), b)
    if a.dtype == np.float64 and backend == "cuda":
        return bool(np.allclose(a, b, rtol=1e-12, atol=0.0))
    return a.tobytes() == b.tobytes()


def _ways(names: list[str]) -> list[tuple[str, str | None]]:
    ways: list[tuple[str, str | None]] = []
    if "c" in names and kernels.backends()["c"] == "ok":
        from edgefl.kernels import _c

        ways += [("c", isa) for isa in _c.isas()]
    if "numba" in names and kernels.backends()["numba"] == "ok":
        ways.append(("numba", None))
    if "cuda" in names and kernels.backends()["cuda"] == "ok":
        ways.append(("cuda", None))
    return ways


def _differs(seed: int, number: int, ways: list[tuple[str, str | None]]) -> str | None:
    rng = np.random.default_rng([seed, number])
    makers = [_sum_case, _sum_case, _step_case, _quantize_case, _checksum_case, _delta_case, _field_case]
    make = makers[rng.integers(0, len(makers))]
    run = make(rng)
    kernels.set_threads(1 + number % 3) if number % 64 == 0 else None
    expected = run("reference")
    for backend, isa in ways:
        if isa is not None:
            from edgefl.kernels import _c

            _c.set_isa(isa)
        for i, (a, b) in enumerate(zip(expected, run(backend), strict=True)):
            if not _same(a, b, backend):
                return (
                    f"{make.__name__[1:]}: result {i} of {backend} {isa or ''} ({kernels.threads()} threads)"
                )
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--backends", nargs="+", default=["c", "numba"])
    options = parser.parse_args()
    ways, started, number = _ways(options.backends), time.monotonic(), options.start
    if not ways:
        print(f"nothing to compare: none of {', '.join(options.backends)} is available here")
        return 1
    warnings.simplefilter("ignore", RuntimeWarning)  # some values overflow on purpose
    if options.only is not None:
        number, options.cases = options.only, 1
    first = number
    kernels.set_threads(1 + first // 64 * 64 % 3)  # as many as this case has in a run from case 0
    while number < first + options.cases and time.monotonic() - started < options.seconds:
        if found := _differs(options.seed, number, ways):
            print(f"case {number} of seed {options.seed}: {found}")
            return 1
        number += 1
    names = ", ".join(f"{b} {isa}" if isa else b for b, isa in ways)
    seconds = time.monotonic() - started
    print(
        f"{number - first} cases ({first} to {number - 1}, seed {options.seed}) of {names}: "
        f"no difference, {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
