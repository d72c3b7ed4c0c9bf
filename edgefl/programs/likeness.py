"""The code that a program resembles (``--like``), and how fast a device runs it, relative to this host.

A program spends shares w_i of its CPU time on this host in code of several kinds; a device runs kind i at v_i
times this host's speed. It runs the whole program at ``1 / Σ (w_i / v_i)`` times this host's speed, because
the times add up.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edgefl.devices import Device
from edgefl.devices.code import CLASSES, CodeClass, Rate, clusters_of, relative
from edgefl.devices.prediction import example_dtype, time_model, traced
from edgefl.devices.time_model import FEMNIST_STEP, TimeModel
from edgefl.errors import ConfigError, unknown
from edgefl.host import calibration
from edgefl.learning.operations import StepWork

TORCH = "torch"
BATCH = 16
"""Batch size of a training step if ``torch:MODEL`` does not give one; the same as in ``edgefl predict``."""
KNOWN_PROGRAMS: Mapping[CodeClass, re.Pattern[str]] = {
    "interpreter": re.compile(r"(python|pypy|node|nodejs|ruby|perl|php|lua)[0-9.]*t?( .*)?", re.DOTALL),
    "crypto": re.compile(r"(openssl|age|cryptsetup)( .*)?", re.DOTALL),
    "division": re.compile(r"sysbench (.* )?cpu( .*)?"),
}
"""Programs of known classes of code. Each pattern matches the name of a program and its arguments."""
_LAUNCHERS: Mapping[str, tuple[int, frozenset[str]]] = {
    "env": (0, frozenset({"-u", "--unset", "-C", "--chdir"})),
    "nice": (0, frozenset({"-n", "--adjustment"})),
    "timeout": (1, frozenset({"-k", "--kill-after", "-s", "--signal"})),
    "uv": (1, frozenset({"-p", "--python", "--with", "--extra", "--group", "--env-file", "--project"})),
}
"""Programs that start another program. For each, the number of operands before the name of the other program,
and the options whose value is the next word."""
MAX_STARTS = 8
"""Maximum length of a chain of launchers and scripts, each of which starts the next."""
_LONGEST_LINE = 256
_STEP = re.compile(r"(?P<model>.+?)(?:@(?P<batch>[1-9][0-9]{0,5})(?P<shape>(?:x[1-9][0-9]{0,5})*))?")


class TorchStep(NamedTuple):
    """A training step, that is, a step of SGD on a batch."""

    model: str
    """Model, named as in ``edgefl predict``: ``cnn-femnist``, ``timm:NAME`` or ``my_module:make``."""
    batch: int
    input_shape: tuple[int, ...] | None
    """Shape of one example; None for the usual shape of the model."""


class Part(NamedTuple):
    """Code of one kind, and its share of the program's CPU time on this host."""

    code: CodeClass | TorchStep | None
    """Kind of the code; None for torch in general, for which a training step on FEMNIST is used."""
    share: float


def class_of(command: Sequence[str]) -> CodeClass:
    """Return the class of code of a known program, else ``integer``.

    A script is treated as the program in its ``#!`` line, and a launcher such as ``env`` as the program that
    it starts.

    >>> class_of(["/usr/bin/python3.11", "mine.py"]), class_of(["env", "A=1", "node"]), class_of(["7z", "b"])
    ('interpreter', 'interpreter', 'integer')
    """
    words = [*command]
    for _ in range(MAX_STARTS):
        started = " ".join(Path(word).name for word in words)
        for code, known in KNOWN_PROGRAMS.items():
            if known.fullmatch(started):
                return code
        words = _started(words)
    return "integer"


def _started(words: Sequence[str]) -> list[str]:
    """Return the command that a launcher or a script starts; [] for other programs."""
    if not words:
        return []
    name = Path(words[0]).name
    if name not in _LAUNCHERS:
        return _interpreted(words)
    operands, valued = _LAUNCHERS[name]
    rest = [*words[1:]]
    while rest and (operands or rest[0].startswith("-") or (name == "env" and "=" in rest[0])):
        word = rest.pop(0)
        if word in valued:
            rest = rest[1:]
        elif not word.startswith("-"):
            operands -= operands > 0
    # If the name is not in PATH, uv runs a module, a file or a program of the project's Python environment.
    if name == "uv" and rest and ("--script" in words or shutil.which(rest[0]) is None):
        return ["python", *rest]
    return rest


def _interpreted(words: Sequence[str]) -> list[str]:
    """Return the command that runs a script according to its ``#!`` line; [] for other programs."""
    if (found := shutil.which(words[0])) is None:
        return []
    path = Path(found)
    if path.parent.name == "shims":  # a script of pyenv or rbenv that starts an installed version
        path = next(path.parent.parent.glob(f"versions/*/bin/{path.name}"), path)
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_LINE)
    except OSError:
        return []
    interpreter = line.removeprefix(b"#!").decode(errors="replace").split()
    return [*interpreter, *words] if line.startswith(b"#!") else []


def read_likeness(text: str) -> tuple[Part, ...]:
    """Parse ``KIND``, or ``KIND=SHARE,KIND=SHARE,…`` with shares that add up to 1.

    A kind is a class of code, ``torch``, or ``torch:MODEL@BATCHxSHAPE``, whose batch size and shape of an
    example may be left out. Raises `ConfigError` for any other text.

    >>> read_likeness("interpreter=0.25,torch:cnn-femnist@8=0.75")[1]
    Part(code=TorchStep(model='cnn-femnist', batch=8, input_shape=None), share=0.75)
    """
    found = []
    for part in text.split(","):
        kind, equals, share = part.rpartition("=")
        found.append(Part(_kind(kind if equals else part), _share(text, share) if equals else 1.0))
    if abs(math.fsum(part.share for part in found) - 1) > 1e-6:
        raise ConfigError(f"--like {text!r}: the shares must add up to 1, such as interpreter=0.4,torch=0.6")
    return tuple(found)


def _share(text: str, share: str) -> float:
    try:
        value = float(share)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise ConfigError(f"--like {text!r}: a share must be above 0 and at most 1, got {share!r}")
    return value


def _kind(kind: str) -> CodeClass | TorchStep | None:
    if kind in CLASSES:
        return kind
    if kind == TORCH:
        return None
    library, colon, step = kind.partition(":")
    found = _STEP.fullmatch(step)
    if library != TORCH or not colon or found is None:
        raise ConfigError(unknown("code class", kind, [*CLASSES, TORCH, "torch:MODEL", "auto"]))
    sizes = tuple(int(size) for size in (found["shape"] or "").split("x")[1:])
    return TorchStep(found["model"], int(found["batch"] or BATCH), sizes or None)


def is_shared(share_or_like: float | tuple[float, ...] | str) -> bool:
    """Return True if a single CPU share applies to all threads of a program with this share or likeness."""
    if isinstance(share_or_like, str):
        return any(part.code not in CLASSES for part in read_likeness(share_or_like))
    return not isinstance(share_or_like, tuple)


class HostSpeeds:
    """Speeds of one thread of this host. Each is measured when it is first needed, which takes seconds."""

    def __init__(self) -> None:
        self._steps: dict[tuple[TorchStep, str], calibration.Rate] = {}
        self._calibrated: dict[CodeClass | None, calibration.Calibration] = {}

    def calibrated(self, code: CodeClass | None = None) -> calibration.Calibration:
        """Return this host's calibration; the rate of class ``code`` is at most an hour old."""
        if code not in self._calibrated:
            found = calibration.calibrate() if code is None else calibration.calibrate_code(code)
            self._calibrated[code] = found
        return self._calibrated[code]

    def steps_per_s(self, step: TorchStep, dtype: str) -> calibration.Rate:
        """Return how many training steps like ``step`` one thread performs per CPU second.

        ``dtype`` is the data type of the inputs, whose shape is in ``step``.
        """
        if (step, dtype) not in self._steps:
            found = calibration.measure_step(step.model, step.batch, dtype, step.input_shape or ())
            self._steps[step, dtype] = found
        return self._steps[step, dtype]


def core_shares(device: Device, like: str, host: HostSpeeds | None = None) -> tuple[Rate, ...]:
    """Return how fast each core of the device runs code like ``like``, relative to a thread of this host.

    If ``like`` contains torch, the result is a single speed of the whole device, which all threads share; the
    other code is then assumed to run on the fastest core. Raises `ConfigError` if ``like`` is invalid, the
    profile lists no cores or has no time model, or this host's rate for one of the classes of code is
    unknown.

    >>> from edgefl.devices import load_device
    >>> big = core_shares(load_device("pixel-4"), "integer")[0]  # doctest: +SKIP
    """
    host, parts = host or HostSpeeds(), read_likeness(like)
    if is_shared(like):
        return (mixed([(part.share, _whole(device, part.code, host)) for part in parts]),)
    cores = list[Rate]()
    for cluster in clusters_of(device):
        speeds = [
            (part.share, relative([cluster], part.code, 1, host.calibrated(part.code)))
            for part in parts
            if isinstance(part.code, str)  # true for all parts: if one is torch, `is_shared` is true
        ]
        cores += [mixed(speeds)] * cluster.cores
    return tuple(cores)


def _whole(device: Device, code: CodeClass | TorchStep | None, host: HostSpeeds) -> Rate:
    """Return how fast the device runs code of one kind, relative to a thread of this host."""
    if isinstance(code, str):
        return relative(clusters_of(device), code, 1, host.calibrated(code))
    model = time_model(device)
    if code is None:
        from edgefl.host.host_operations import FEMNIST_FLOP

        gflops = host.calibrated().measured.train_gflops
        return _against(model, FEMNIST_STEP, FEMNIST_FLOP / 1e9 / gflops.median, gflops.cv)
    from edgefl.learning.models import model_to_trace

    module, shape = model_to_trace(code.model, code.input_shape)
    work = traced(module, shape, runtime=device.runtime_name).at(code.batch)
    dtype = example_dtype(module, shape).__name__
    steps = host.steps_per_s(code._replace(input_shape=shape), dtype)
    return _against(model, work, 1 / steps.median, steps.cv)


def _against(model: TimeModel, work: StepWork, host_s: float, cv: float) -> Rate:
    """Return how fast a device performs a step that takes ``host_s`` seconds here, relative to this host.

    ``cv`` is the coefficient of variation of ``host_s``.
    """
    spread = math.hypot(math.log(model.error_factor_of(work)), 1.645 * cv)
    return Rate.within(host_s / model.seconds(work), math.exp(spread))


def mixed(parts: Sequence[tuple[float, Rate]]) -> Rate:
    """Return how fast a device runs code that consists of several parts, relative to this host.

    ``parts`` holds each part's share of the CPU time on this host, and how fast the device runs the part. The
    errors of these speeds are assumed to be independent.

    >>> mixed([(0.5, Rate.within(1.0, 1.2)), (0.5, Rate.within(0.25, 1.2))]).value
    0.4
    """
    times = [(share / rate.value, math.log(rate.spread)) for share, rate in parts]
    whole = math.fsum(time for time, _ in times)
    return Rate.within(1 / whole, math.exp(math.hypot(*(time * log for time, log in times)) / whole))
