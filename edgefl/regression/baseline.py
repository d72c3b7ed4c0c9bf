"""Baselines: measurements of earlier code that are saved in a JSON file beside the tests and kept in git.

An entry with counted work is keyed by test and function, and is valid on every host. An entry with times is
also keyed by the host, because times on different hosts are not comparable.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from edgefl.errors import ConfigError, as_config_error
from edgefl.files import make_folder, replace
from edgefl.files import read as read_file
from edgefl.host.calibration import fingerprint, library
from edgefl.host.capacity import host
from edgefl.regression import callgrind
from edgefl.regression.counts import CountedEntry, Versions
from edgefl.regression.measurement import MIN_REPETITIONS, Measurement, profile_sha256
from edgefl.regression.process import REFERENCE_VERSION, ShotSizes
from edgefl.validation import convert, from_json

MAX_BYTES = 64 << 20

FOLDER = "edgefl-baselines"
SAMPLES = ("host_cpu_s", "cpu_s", "peak_mib", "sent_mib")
MAX_FIGURE = 1e12
"""Maximum value of a metric in a file, in seconds or MiB."""

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Flop = Annotated[float, msgspec.Meta(ge=0, le=1e24)]
_Length = msgspec.Meta(min_length=1, max_length=2_000_000)
Figures = Annotated[tuple[Annotated[float, msgspec.Meta(ge=0, le=MAX_FIGURE)], ...], _Length]
Divisors = Annotated[tuple[Annotated[float, msgspec.Meta(gt=0, le=MAX_FIGURE)], ...], _Length]


class Samples(NamedTuple):
    """The part of a measurement's metrics that a baseline stores."""

    device: str
    reference: str
    reference_cpu_s: Sequence[float]
    waited: float
    flop: float
    cpu_s: Sequence[float]
    peak_mib: Sequence[float]
    sent_mib: Sequence[float]


class BaselineHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The host on which a baseline was measured."""

    fingerprint: str
    cpu: str
    cores: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    software: str
    arithmetic: dict[str, str] = {}
    """Environment variables that change how numbers are computed, or how many threads compute them."""

    def differences(self, here: BaselineHost) -> list[str]:
        """List the differences between the baseline's host (this object) and the current host, ``here``."""
        pairs = {name: (str(getattr(self, name)), str(getattr(here, name))) for name in ("cpu", "cores")}
        ours, theirs = (_versions(one.software) for one in (self, here))
        pairs |= {name: (ours.get(name, "none"), theirs.get(name, "none")) for name in {**ours, **theirs}}
        variables = sorted({*self.arithmetic, *here.arithmetic})
        pairs |= {
            name: (self.arithmetic.get(name, "not set"), here.arithmetic.get(name, "not set"))
            for name in variables
        }
        found = [f"{name}: {there} there, {now} here" for name, (there, now) in pairs.items() if there != now]
        return found or ["edgefl's host calibration has changed"]


class BaselineReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU times of the reference, a fixed piece of work that shows how fast the host was."""

    against: ShotSizes
    version: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
    flop: Flop
    host_cpu_s: Divisors


class BaselineEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metrics of one function of one test on one device, with one sample for each repetition."""

    test: str
    function: str
    device: str
    network: str | None
    profile_sha256: str
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    mechanism: str
    edgefl: str
    host: BaselineHost
    steal: Share | None
    waited: Share
    reference: BaselineReference
    flop: Flop
    host_cpu_s: Figures
    cpu_s: Figures
    peak_mib: Figures
    sent_mib: Figures

    @property
    def key(self) -> tuple[str, str, str]:
        """Key of the entry, which is unique within a baseline file."""
        return self.test, self.function, self.host.fingerprint

    def outdated(self, profile_sha256: str) -> str | None:
        """Return why this entry cannot be compared with measurements for the profile with this digest.

        Return None if it can be compared.
        """
        if self.profile_sha256 != profile_sha256:
            return f"the profile of {self.device} or its network has changed since the baseline was saved"
        if self.reference.version != REFERENCE_VERSION:
            return (
                f"stale calibration: the baseline was measured against version {self.reference.version} of "
                f"{self.reference.against.reference}, but the current version is {REFERENCE_VERSION}"
            )
        if len(self.cpu_s) < MIN_REPETITIONS:
            return f"the baseline has {len(self.cpu_s)} repetitions, but {MIN_REPETITIONS} are needed"
        return None

    @property
    def samples(self) -> Samples:
        return Samples(
            device=self.device,
            reference=self.reference.against.reference,
            reference_cpu_s=self.reference.host_cpu_s,
            waited=self.waited,
            flop=self.flop,
            cpu_s=self.cpu_s,
            peak_mib=self.peak_mib,
            sent_mib=self.sent_mib,
        )


class BaselineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    edgefl_baselines: Literal[1, 2]
    """Version of the file's format. Version 1 has no ``counted`` entries."""
    counted: tuple[CountedEntry, ...] = ()
    entries: tuple[BaselineEntry, ...]


def samples(measured: Measurement) -> Samples:
    """Return a measurement's metrics, rounded to the precision that baselines store."""
    return Samples(
        device=measured.plan.device.id,
        reference=measured.trial.shots.reference,
        reference_cpu_s=_row(measured.reference_cpu_s),
        waited=_rounded(measured.waited),
        flop=measured.trial.flop,
        cpu_s=_row(measured.cpu_s),
        peak_mib=_row(measured.peak_mib),
        sent_mib=_row(measured.sent_mib),
    )


def entry(test: str, function: str, measured: Measurement) -> BaselineEntry:
    """Return the baseline entry of a measurement."""
    plan, trial = measured.plan, measured.trial
    return BaselineEntry(
        test=test,
        function=function,
        device=plan.device.id,
        network=None if plan.network is None else plan.network.id,
        profile_sha256=profile_sha256(plan.device, plan.network),
        seed=0,
        mechanism="work-paced" if plan.time_scale else "not paced",
        edgefl=next((one.version for one in metadata.distributions(name="edgefl")), "not installed"),
        host=this_host(),
        steal=_rounded(measured.steal) if measured.steal is not None else None,
        waited=_rounded(measured.waited),
        reference=BaselineReference(
            against=trial.shots,
            version=REFERENCE_VERSION,
            flop=trial.reference_flop,
            host_cpu_s=_row(measured.reference_cpu_s),
        ),
        flop=trial.flop,
        **{name: _row(getattr(measured, name)) for name in SAMPLES},
    )


ARITHMETIC = (
    "ATEN_CPU_CAPABILITY", "BLIS_ARCH_TYPE", "DNNL_MAX_CPU_ISA", "GLIBC_TUNABLES", "LD_PRELOAD",
    "MALLOC_ARENA_MAX", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS",
    "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "NUMBA_CPU_FEATURES", "NUMBA_CPU_NAME",
    "NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS", "PYTHONMALLOC", "PYTHONOPTIMIZE",
)  # fmt: skip
"""Environment variables that change the arithmetic or the number of threads of torch, numpy and numba."""


def this_host() -> BaselineHost:
    """Return a description of this host."""
    this = host()
    arithmetic = {name: os.environ[name] for name in ARITHMETIC if os.environ.get(name)}
    settings = f"-{hashlib.sha256(repr(arithmetic).encode()).hexdigest()[:8]}" if arithmetic else ""
    return BaselineHost(
        fingerprint=f"{fingerprint()}-py{platform.python_version()}{settings}",
        arithmetic=arithmetic,
        cpu=this.cpu,
        cores=this.cores,
        software=f"{library()}, Python {platform.python_version()}, {this.system}",
    )


def _versions(software: str) -> dict[str, str]:
    """Return the version of each program that a text such as ``torch 2.13.0, Linux 6.1`` names."""
    parts = (part.partition(" ") for part in software.split(", "))
    return {name: version for name, _, version in parts}


def versions() -> Versions:
    """Return the versions of the software on which counts depend."""
    optimized = " -O" if os.environ.get("PYTHONOPTIMIZE") else ""
    python = ".".join(platform.python_version_tuple()[:2]) + optimized
    return Versions(python, metadata.version("torch").partition("+")[0], callgrind.environment())


def path_of(test_file: Path) -> Path:
    """Return the path of a test module's baselines: ``edgefl-baselines/MODULE.json`` beside it."""
    return test_file.parent / FOLDER / f"{test_file.stem}.json"


def load(path: Path) -> dict[tuple[str, str, str], BaselineEntry]:
    """Return the times that a file contains, keyed by `BaselineEntry.key`; empty if there is no file.

    Raises ConfigError if the file is invalid.
    """
    return {one.key: one for one in _load(path).entries}


def load_counted(path: Path) -> dict[tuple[str, str], CountedEntry]:
    """Return a file's entries with counted work, keyed by `CountedEntry.key`.

    The result is empty if the file does not exist. Raises ConfigError if the file is invalid.
    """
    return {one.key: one for one in _load(path).counted}


def _load(path: Path) -> BaselineFile:
    try:
        text = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        return BaselineFile(edgefl_baselines=2, entries=())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return parse(text, path)


def parse(text: bytes, path: Path) -> BaselineFile:
    """Parse the text of a baseline file. Raises ConfigError if the text is invalid."""
    plain = from_json(text, f"{path}: not a baseline file")
    with as_config_error(path, ConfigError):
        file = convert(plain, BaselineFile)
    _require_single("counted", file.counted, path)
    _require_single("entries", file.entries, path)
    for place, one in enumerate(file.entries):
        rows = {name: getattr(one, name) for name in SAMPLES}
        rows["reference.host_cpu_s"] = one.reference.host_cpu_s
        for name, row in rows.items():
            if len(row) != (many := len(one.cpu_s)):
                got = f"got {len(row)} figures; allowed: {many}, as many as cpu_s has"
                raise ConfigError(f"{path}: entries[{place}].{name}: {got}")
    return file


def _require_single(name: str, entries: Sequence[CountedEntry | BaselineEntry], path: Path) -> None:
    """Raise ConfigError if two entries have the same key, which can happen after a git merge."""
    places: dict[tuple[str, ...], int] = {}
    for place, one in enumerate(entries):
        if (first := places.setdefault(one.key, place)) != place:
            raise ConfigError(
                f"{path}: {name}[{place}] and {name}[{first}] are both for {one.function} in {one.test}; "
                "keep one of them"
            )


def save(path: Path, entries: Iterable[BaselineEntry], counted: Iterable[CountedEntry] = ()) -> None:
    """Write the entries to the file atomically; they replace entries with the same key.

    An entry with counted work keeps the counts for other versions of Python from the entry that it replaces.
    """
    timed = load(path) | {one.key: one for one in entries}
    counts = load_counted(path)
    counts |= {one.key: one.merged(counts.get(one.key)) for one in counted}
    plain = {
        "edgefl_baselines": 2,
        "counted": [msgspec.to_builtins(counts[key]) for key in sorted(counts)],
        "entries": [msgspec.to_builtins(timed[key]) for key in sorted(timed)],
    }
    text = _text(plain) + "\n"
    make_folder(path.parent)
    replace(path, [text.encode()])


def _text(value: Any, indent: str = "") -> str:
    """Format a value as JSON, with each list of numbers on one line so that diffs are readable."""
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        lines = [f"{inner}{json.dumps(name)}: {_text(item, inner)}" for name, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return "[\n" + ",\n".join(inner + _text(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value)


def _row(samples: Sequence[float]) -> Figures:
    return tuple(_rounded(sample) for sample in samples)


def _rounded(figure: float) -> float:
    return float(f"{figure:.5g}")
