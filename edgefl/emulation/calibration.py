"""What this host computes and moves a second, measured with one thread and kept for a week.

``python -m edgefl.emulation.calibration`` measures and prints JSON: `calibrate` runs it as a process of
its own, because how many threads a BLAS takes is settled when it is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from edgefl.emulation.capacity import host
from edgefl.errors import RunError

REPETITIONS = 9
ROUNDS = 3
"""A rate that came out noisy is measured again, at most so often; the calmest round counts."""
MAX_CV = 0.10
EXPIRES_S = 7 * 24 * 3600.0
GEMM_SIZES = (64, 256, 1024)
TRIAD_FLOATS = 1 << 24
"""Floats in each of the triad's three arrays: 64 MiB, well past a last-level cache's share of a core."""
_REPETITION_S = 0.02
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """The median of at least nine repetitions and their coefficient of variation."""

    median: float
    cv: float
    samples: tuple[float, ...]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One thread of this host. GFLOPS count a multiply-add as two; GB/s are 10⁹ bytes."""

    fingerprint: str
    """Of CPU model, cores, library, versions and threads: another one is another calibration."""
    cpu: str
    cores: int
    library: str
    at_unix_s: float
    gemm_gflops: dict[str, Rate]
    """fp32 matrix product by size: ``64``, ``256``, ``1024``."""
    triad_gbytes_per_s: Rate
    """a = b + s·c, three float32 arrays of 64 MiB, counting the three passes over memory."""

    @property
    def worst_cv(self) -> float:
        """The largest coefficient of variation of all rates."""
        return max(rate.cv for rate in (*self.gemm_gflops.values(), self.triad_gbytes_per_s))

    def expired(self, now_unix_s: float) -> bool:
        """Whether it is older than a week, or from the future."""
        return not 0 <= now_unix_s - self.at_unix_s <= EXPIRES_S


def calibrate(force: bool = False, *, folder: Path | None = None) -> Calibration:
    """This host's calibration: the stored one if it fits and is fresh, else measured now (seconds).

    Stored in ``folder``, by default ``$XDG_CACHE_HOME/edgefl`` or ``~/.cache/edgefl``, a file a
    fingerprint. RunError if rates vary by more than 10% after three rounds: nothing noisy is stored or
    returned.
    """
    path = (folder or cache_folder()) / f"calibration-{fingerprint()}.json"
    if not force and (stored := _read(path)) is not None and not stored.expired(time.time()):
        return stored
    measured = _measure_apart()
    if measured.worst_cv > MAX_CV:
        rates = {f"gemm {size}": rate for size, rate in measured.gemm_gflops.items()}
        rates["triad"] = measured.triad_gbytes_per_s
        noisy = ", ".join(f"{name} {rate.cv:.0%}" for name, rate in rates.items() if rate.cv > MAX_CV)
        raise RunError(
            f"calibration refused: this host is too noisy now (coefficient of variation: {noisy}; allowed: "
            f"{MAX_CV:.0%}); stop other work and run `edgefl calibrate` again"
        )
    _write(path, measured)
    return measured


def stored_calibration(folder: Path | None = None) -> Calibration | None:
    """The fresh calibration of this host if there is one; measures nothing."""
    stored = _read((folder or cache_folder()) / f"calibration-{fingerprint()}.json")
    return None if stored is None or stored.expired(time.time()) else stored


def cache_folder() -> Path:
    """Where calibrations are kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edgefl"


def fingerprint() -> str:
    """16 hex digits of what a calibration depends on."""
    this = host()
    parts = (this.cpu, str(this.cores), platform.machine(), library(), "threads=1", f"rates={GEMM_SIZES}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def library() -> str:
    """What multiplies matrices here: torch if it is installed, else numpy; with the versions."""
    numpy = f"numpy {version('numpy')}"
    try:
        return f"torch {version('torch')}, {numpy}"
    except PackageNotFoundError:
        return numpy


def _measure_apart() -> Calibration:
    root = str(Path(__file__).resolve().parent.parent.parent)
    search = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONPATH": search}
    done = subprocess.run(
        [sys.executable, "-m", __name__], env=env, capture_output=True, check=False, timeout=300
    )
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()
        raise RunError(
            f"calibration failed with exit code {done.returncode}: {why[-1] if why else 'no message'}"
        )
    return msgspec.json.decode(done.stdout, type=Calibration)


def _read(path: Path) -> Calibration | None:
    """A stored calibration; None if there is none or it is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, calibration: Calibration) -> None:
    """Store it whole or not at all; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.format(msgspec.json.encode(calibration)))
        os.replace(file.name, path)
    except OSError:
        return


def measure(sizes: tuple[int, ...] = GEMM_SIZES, triad_floats: int = TRIAD_FLOATS) -> Calibration:
    """Measure in this process, with whatever threads its libraries take; noisy or not."""
    gemm, triad = _operations()
    this = host()
    return Calibration(
        fingerprint=fingerprint(),
        cpu=this.cpu,
        cores=this.cores,
        library=library(),
        at_unix_s=time.time(),
        gemm_gflops={str(n): _rate(gemm(n), 2.0 * n**3 / 1e9) for n in sizes},
        triad_gbytes_per_s=_rate(triad(triad_floats), 12.0 * triad_floats / 1e9),
    )


Make = Callable[[int], Callable[[], Any]]


def _operations() -> tuple[Make, Make]:
    """Makers of one matrix product of n × n and of one triad over n floats."""
    try:
        import torch
    except ImportError:
        return _numpy_operations()
    torch.set_num_threads(1)

    def gemm(n: int) -> Callable[[], Any]:
        a, b, out = torch.ones(n, n), torch.ones(n, n), torch.empty(n, n)
        return lambda: torch.mm(a, b, out=out)

    def triad(n: int) -> Callable[[], Any]:
        b, c, out = torch.ones(n), torch.ones(n), torch.zeros(n)
        return lambda: torch.add(b, c, alpha=3.0, out=out)

    return gemm, triad


def _numpy_operations() -> tuple[Make, Make]:
    import numpy as np

    def gemm(n: int) -> Callable[[], Any]:
        a, b, out = (np.ones((n, n), np.float32) for _ in range(3))
        return lambda: np.matmul(a, b, out=out)

    def triad(n: int) -> Callable[[], Any]:
        # numpy has no fused triad: in blocks that stay in the cache the second pass costs no memory traffic.
        b, c, out = (np.ones(n, np.float32) for _ in range(3))
        three = np.float32(3)

        def run() -> None:
            for start in range(0, n, 8192):
                part = slice(start, start + 8192)
                np.multiply(c[part], three, out=out[part])
                np.add(out[part], b[part], out=out[part])

        return run

    return gemm, triad


def _rate(run: Callable[[], Any], work: float) -> Rate:
    """Work a second of ``run``, warmed up; of several rounds the one that varies least."""
    run()
    start = time.perf_counter()
    run()
    calls = max(1, int(_REPETITION_S / max(time.perf_counter() - start, 1e-9)))
    best: Rate | None = None
    for _ in range(ROUNDS):
        rates = []
        for _ in range(REPETITIONS):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            rates.append(calls * work / (time.perf_counter() - start))
        cv = statistics.stdev(rates) / statistics.fmean(rates)
        found = Rate(median=statistics.median(rates), cv=cv, samples=tuple(rates))
        if best is None or found.cv < best.cv:
            best = found
        if best.cv <= MAX_CV / 2:
            break
    assert best is not None
    return best


if __name__ == "__main__":
    # Under this name the classes are another module's: encoded by field, they read back the same.
    sys.stdout.buffer.write(msgspec.json.encode(measure()))
