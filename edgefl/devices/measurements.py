"""Reads measured steps from files and counts the work of each step.

A CSV file has one line per step, with the columns ``device``, ``profile``, ``runtime``, ``batch``,
``measured_s`` and ``source``. A file with steps of networks also has the columns ``network`` (timm's name),
``kind`` (train, finetune or inference) and ``workload`` (used if timm does not have the network). A file with
steps of single layers also has ``layer`` (lstm or softmax output), ``inputs``, ``outputs`` and ``steps``. A
JSON file is a result of the measurement kit (`edgefl.measure`).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from edgefl.devices.csv_lines import csv_lines
from edgefl.devices.fit import Row
from edgefl.devices.kit_result import MAX_S, KitResult, check_seconds
from edgefl.devices.phones import TFLITE
from edgefl.devices.schema import NAME_PATTERN
from edgefl.errors import ConfigError, as_config_error
from edgefl.learning.operations import StepWork
from edgefl.validation import convert, wrong

IMAGE = (3, 224, 224)
"""Shape of the images on which timm's networks were measured."""
MAX_SIZE = 10**9
"""Maximum batch size and layer size."""
MAX_THREADS = 1024
"""Assumed number of threads when the times in a CSV file are checked for being impossibly short, because the
file does not give the number."""
UNREADABLE = (OSError, ValueError, RecursionError, csv.Error)
"""Exceptions raised for a file that cannot be read or is in another format."""
WRONG = (ValueError, IndexError, ConfigError)
"""Exceptions raised for an invalid line of a file."""
LEAF_FEMNIST = "LEAF FEMNIST CNN"
LEAF_SHAKESPEARE = "Shakespeare 2-layer LSTM-256"


Kind: TypeAlias = tuple[str, str]
"""A profile and one of its runtimes."""


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step, and the device and runtime on which it was measured."""

    device: str
    profile: str
    runtime: str
    """First word of the runtime's name, in lower case: ``torch``, ``mnn``, ``dl4j``."""
    source: str
    row: Row

    @property
    def key(self) -> tuple[str, ...]:
        """Key by which the same step is recognised in different files."""
        return self.profile, self.runtime, self.row.network, str(self.row.seconds)


def read(path: Path, only: Kind | None = None) -> tuple[MeasuredStep, ...]:
    """Read the measured steps in a file; if ``only`` is given, only the steps of this profile and runtime.

    Raises `ConfigError` if the file is invalid or if a network in it is unknown.
    """
    with as_config_error(path, *UNREADABLE):
        return tuple(_kit(path, only) if path.suffix == ".json" else _table(path, only))


def keys(path: Path) -> set[tuple[str, ...]]:
    """Return the keys of the steps in a CSV file, without counting their work."""
    with as_config_error(path, *UNREADABLE):
        return {(*kind, _name(line), str(float(line["measured_s"]))) for _, line, kind in _lines(path)}


def kinds(path: Path) -> set[Kind]:
    """Return the profiles and runtimes of the steps in a file. Raises `ConfigError` for an invalid file."""
    with as_config_error(path, *UNREADABLE):
        if path.suffix == ".json":
            return {("", _read_kit(path).runtime_name)}
        return {kind for _, _, kind in _lines(path)}


def _read_kit(path: Path) -> KitResult:
    with as_config_error(path, ConfigError):
        return convert(json.loads(path.read_text("utf-8-sig")), KitResult)


def _kit(path: Path, only: Kind | None) -> Iterator[MeasuredStep]:
    result = _read_kit(path)
    if only not in (None, ("", result.runtime_name)):
        return
    with as_config_error(path, ConfigError):
        _check_runtime(result.runtime_name)
        rows = result.rows()
    for row in rows:
        yield MeasuredStep(
            device=result.device, profile="", runtime=result.runtime_name, source=path.name, row=row
        )


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, str], Kind]]:
    """Yield the location of each line, the line, and its profile and runtime."""
    for place, line in csv_lines(path, ("profile", "runtime")):
        with _in_line(place):
            words = line["runtime"].replace("-", " ").replace(",", " ").split()
            if not words or not re.search(NAME_PATTERN, words[0].lower()):
                allowed = "the name of a library, such as torch, in letters, digits and dots"
                raise wrong("runtime", allowed, line["runtime"])
            kind = line["profile"], words[0].lower()
        yield place, line, kind


def _check_runtime(name: str) -> None:
    """Raise `ConfigError` for TFLite, because `edgefl.devices.phones` counts its work in a different way."""
    if name == TFLITE:
        why = "its inference has a time model of its own (edgefl profiles from)"
        raise ConfigError(f"runtime: must not be {TFLITE!r}: {why}; use another name for other runtimes")


_counted: dict[tuple[str | None, ...], StepWork] = {}
"""Cache of counted work, keyed by the fields that determine it. Counting takes 0.1 s per step, and the same
networks were measured on several devices."""


def _table(path: Path, only: Kind | None) -> Iterator[MeasuredStep]:
    for place, line, kind in _lines(path):
        if only not in (None, kind):
            continue
        with _in_line(place):
            _check_runtime(kind[1])
            key = tuple(line.get(name) for name in ("workload", "network", "kind", "layer", "inputs",
                                                    "outputs", "batch", "steps"))  # fmt: skip
            if key not in _counted:
                _counted[key] = _work(line)
            seconds = _seconds(line)
            check_seconds("measured_s", seconds, _counted[key], MAX_THREADS)
            row = Row(network=_name(line), work=_counted[key], seconds=seconds)
            step = MeasuredStep(
                device=line["device"], profile=kind[0], runtime=kind[1], source=line["source"], row=row
            )
        yield step


@contextmanager
def _in_line(place: str) -> Iterator[None]:
    """Turn errors in a line of a table into a `ConfigError` that starts with ``place``."""
    with as_config_error(place, *WRONG):
        try:
            yield
        except KeyError as error:
            raise ConfigError(f"the column {error} is missing") from None


def _name(line: Mapping[str, str]) -> str:
    """Return the name of the step's network, or the name and sizes of its single layer."""
    if "layer" in line:
        return " ".join(line[name] for name in ("layer", "inputs", "outputs", "batch", "steps"))
    return line["network"] or line["workload"]


def _work(line: Mapping[str, str]) -> StepWork:
    batch = _size(line, "batch")
    if "layer" in line:
        return _layer_work(
            line["layer"], batch, *(_size(line, name) for name in ("inputs", "outputs", "steps"))
        )
    if line["network"]:
        return _timm_work(line["network"], line["kind"], batch)
    return _named_work(line["workload"], line["kind"], batch)


def _size(line: Mapping[str, str], name: str) -> int:
    allowed = f"a whole number from 1 to {MAX_SIZE}"
    try:
        size = int(line[name])
    except ValueError:
        raise wrong(name, allowed, line[name]) from None
    if not 1 <= size <= MAX_SIZE:
        raise wrong(name, allowed, size)
    return size


def _seconds(line: Mapping[str, str]) -> float:
    allowed = f"a number of seconds above 0 and at most {MAX_S:g}"
    try:
        seconds = float(line["measured_s"])
    except ValueError:
        raise wrong("measured_s", allowed, line["measured_s"]) from None
    if not 0 < seconds <= MAX_S:
        raise wrong("measured_s", allowed, seconds)
    return seconds


def _layer_work(layer: str, batch: int, inputs: int, outputs: int, steps: int) -> StepWork:
    import torch
    from torch import nn

    from edgefl.learning.work import step_work

    def last(made: Any) -> torch.Tensor:
        outputs: torch.Tensor = made[0].flatten(0, 1)
        return nn.functional.cross_entropy(
            outputs, torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)
        )

    with torch.device("meta"):
        if layer == "lstm":
            return step_work(nn.LSTM(inputs, outputs, batch_first=True), (steps, inputs), batch, loss=last)
        if layer == "softmax output":
            return step_work(nn.Linear(inputs, outputs), (inputs,), batch * steps)
    raise ConfigError(f"layer must be 'lstm' or 'softmax output', got {layer!r}")


def _timm_work(network: str, kind: str, batch: int) -> StepWork:
    import torch
    from torch import nn

    from edgefl.learning.models import timm_network
    from edgefl.learning.work import step_work

    if kind not in ("train", "finetune", "inference"):
        raise ConfigError(f"kind must be 'train', 'finetune' or 'inference', got {kind!r}")
    with torch.device("meta"):
        module: Any = timm_network(network, IMAGE, 1000)
    heads = module.get_classifier()
    head = nn.ModuleList(heads if isinstance(heads, tuple) else [heads])
    trained = list(head.parameters()) if kind == "finetune" else None
    return step_work(module, IMAGE, batch, inference=kind == "inference", trained=trained)


def _named_work(workload: str, kind: str, batch: int) -> StepWork:
    """Count the work of a network that timm does not have."""
    import numpy as np
    import torch

    from edgefl.learning import benchmark_networks, networks
    from edgefl.learning.work import step_work

    if kind not in ("train", "inference"):
        raise ConfigError(f"kind of a workload must be 'train' or 'inference', got {kind!r}")
    words, only_forward = workload.split(), kind == "inference"
    with torch.device("meta"):
        if words[:1] == ["MNN"] and len(words) > 2 and words[2] in benchmark_networks.MNN:
            make, shape = benchmark_networks.MNN[words[2]]
            return step_work(make(), shape, batch, inference=only_forward)
        if workload.startswith(LEAF_FEMNIST):
            made, shape = networks.cnn_femnist((1, 28, 28), 62), (1, 28, 28)
            return step_work(made, shape, batch, inference=only_forward)
        if workload.startswith(LEAF_SHAKESPEARE):
            made = networks.lstm_shakespeare((80,), 80)
            return step_work(made, (80,), batch, dtype=np.int64, inference=only_forward)
    raise ConfigError(f"unknown workload {workload!r}")
