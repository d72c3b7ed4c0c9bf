"""Measure how fast one thread of this host computes and moves data; results are cached for a week."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from edgefl.errors import ConfigError, RunError
from edgefl.files import cache_folder, make_folder, replace
from edgefl.host.capacity import host
from edgefl.host.process import child_environment
from edgefl.processes import command_of

MAX_CV = 0.10
"""A calibration is rejected if the coefficient of variation of a rate's repetitions is above this."""
EXPIRES_S = 7 * 24 * 3600.0
RECENT_S = 3600.0
"""Maximum age of the rate of a class of code, in seconds. It is short because the speed of Python code on a
virtual machine differed by a factor of 1.4 between two days, when different guests shared its host."""
PATIENCE_S = 300
VERSION = 6  # version of the measuring method; calibrations of other versions are not used


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Work per CPU second: the median of at least nine repetitions, and their coefficient of variation."""

    median: float
    cv: float
    samples: tuple[float, ...]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one thread, per second of CPU time.

    A multiply-add counts as two floating-point operations, and a GB is 10⁹ bytes.
    """

    gemm_gflops: dict[str, Rate]
    """Rates of the float32 product of square matrices, keyed by their size: ``64``, ``256``, ``1024``."""
    conv_gflops: dict[str, Rate]
    """Rates of the float32 convolution of one image, keyed by the size of the kernel: ``3x3`` with 64 → 64
    channels at 56 × 56 pixels, and ``1x1`` with 128 → 128 channels at 28 × 28 pixels."""
    depthwise_gflops: Rate
    train_gflops: Rate
    """Rate of an SGD step of FLASH's FEMNIST CNN on a batch of 10 images."""
    triad_gbytes_per_s: Rate
    """Memory bandwidth of a = b + s·c on float32 arrays of ``triad_mib`` MiB each (2 reads, 1 write)."""
    triad_mib: float
    cache_mib: float
    blas: str
    code: dict[str, Rate] = {}
    """Rates of code other than torch, keyed by class, in the units of `edgefl.devices.code.UNITS`. The
    classes ``integer``, ``memory``, ``crypto``, ``division`` and ``float`` are missing without the C
    extension."""

    def rates(self) -> Iterator[tuple[str, Rate, str]]:
        """Yield the name, rate and unit of each torch measurement."""
        for size, rate in self.gemm_gflops.items():
            yield f"gemm {size}", rate, "GFLOPS"
        for kernel, rate in self.conv_gflops.items():
            yield f"conv {kernel}", rate, "GFLOPS"
        yield "depthwise 3x3", self.depthwise_gflops, "GFLOPS"
        yield "training step", self.train_gflops, "GFLOPS"
        yield "triad", self.triad_gbytes_per_s, "GB/s"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The measured rates of one thread of this host, and how and when they were measured."""

    fingerprint: str
    """Hash of the CPU model, the number of cores, the library versions and the number of threads. A stored
    calibration is used only if its hash matches."""
    cpu: str
    cores: int
    library: str
    at_unix_s: float
    measured: Measured
    code_at_unix_s: dict[str, float] = {}
    """Unix times at which rates in ``code`` were remeasured after ``at_unix_s``, keyed by class."""

    def expired(self, now_unix_s: float) -> bool:
        """Return True if the calibration is older than a week, or if its time is in the future."""
        return not 0 <= now_unix_s - self.at_unix_s <= EXPIRES_S


def calibrate(force: bool = False, *, folder: Path | None = None) -> Calibration:
    """Return this host's stored calibration if it is valid; otherwise measure a new one, which takes seconds.

    Calibrations are stored in ``folder``, by default ``~/.cache/edgefl``. Raises `RunError` if a rate's
    coefficient of variation is above 10%.
    """
    if not force and (stored := stored_calibration(folder)) is not None:
        return stored
    this = host()
    measured = Calibration(
        fingerprint=fingerprint(),
        cpu=this.cpu,
        cores=this.cores,
        library=library(),
        at_unix_s=time.time(),
        measured=msgspec.json.decode(_measure_apart(), type=Measured),
    )
    noisy = [f"{name} {rate.cv:.0%}" for name, rate, _ in measured.measured.rates() if rate.cv > MAX_CV]
    if noisy:
        noise = f"(coefficient of variation: {', '.join(noisy)}; allowed: {MAX_CV:.0%})"
        again = "stop other work and run `edgefl calibrate` again"
        raise RunError(f"calibration refused: this host is too noisy now {noise}; {again}")
    _store(measured, folder)
    return measured


def calibrate_code(code_class: str, *, folder: Path | None = None) -> Calibration:
    """Return this host's calibration; first remeasure the class of code if its rate is over an hour old.

    The other rates may be up to a week old, as in `calibrate`. A missing rate is measured if the C extension
    has been installed since the calibration.
    """
    found, now_unix_s = calibrate(folder=folder), time.time()
    if code_class in found.measured.code:
        measured_unix_s = found.code_at_unix_s.get(code_class, found.at_unix_s)
        if 0 <= now_unix_s - measured_unix_s <= RECENT_S:
            return found
    elif find_spec("edgefl.host._code") is None:
        return found
    rate = msgspec.json.decode(_measure_apart("code", code_class), type=Rate)
    code = {**found.measured.code, code_class: rate}
    found = msgspec.structs.replace(
        found,
        measured=msgspec.structs.replace(found.measured, code=code),
        code_at_unix_s={**found.code_at_unix_s, code_class: now_unix_s},
    )
    _store(found, folder)
    return found


def _store(measured: Calibration, folder: Path | None) -> None:
    with contextlib.suppress(OSError, ConfigError):  # the cache is optional
        path = _path(folder)
        make_folder(path.parent)
        replace(path, [msgspec.json.format(msgspec.json.encode(measured))])


def stored_calibration(folder: Path | None = None) -> Calibration | None:
    """Return this host's stored calibration; None if there is no valid one."""
    try:
        stored = msgspec.json.decode(_path(folder).read_bytes(), type=Calibration)
    except (OSError, ConfigError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return None if stored.expired(time.time()) else stored


def _path(folder: Path | None) -> Path:
    return (folder or cache_folder()) / f"calibration-{fingerprint()}.json"


def fingerprint() -> str:
    """Return a hash, in 16 hex digits, of everything on which a calibration depends."""
    this = host()
    parts = (this.cpu, str(this.cores), platform.machine(), library(), "threads=1", f"version={VERSION}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def library() -> str:
    """Return the names and versions of torch and NumPy, on which the rates depend."""
    return f"torch {version('torch')}, numpy {version('numpy')}"


def measure_step(model: str, batch: int, dtype: str, input_shape: Sequence[int]) -> Rate:
    """Measure how many training steps of a model one thread performs per CPU second, in a separate process.

    ``model`` is a name that `edgefl.learning.models.make_model` accepts; ``dtype`` and ``input_shape`` are
    those of one example. Raises `RunError` if a step fails.
    """
    words = (model, str(batch), dtype, *map(str, input_shape))
    return msgspec.json.decode(_measure_apart(*words), type=Rate)


def _measure_apart(*words: str) -> bytes:
    """Run `edgefl.host.host_operations` as a program with these arguments; return its output."""
    env, command = child_environment(os.environ), command_of("edgefl.host.host_operations", *words)
    try:
        done = subprocess.run(command, env=env, capture_output=True, check=False, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        again = "stop other work and try again"
        raise RunError(f"calibration failed: it took more than {PATIENCE_S} s; {again}") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise RunError(f"calibration failed with exit code {done.returncode}: {why[-1]}")
    return done.stdout
