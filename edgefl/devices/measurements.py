"""Reads measured steps from files and counts the work of each.

A CSV has a line for each step. Its columns are ``device``, ``profile``, ``runtime``, ``batch``,
``measured_s`` and ``source``; beside them are either ``network`` (timm's name), ``kind`` (train, finetune,
inference) and ``workload`` (where timm has no such network), or ``layer`` (lstm, softmax output), ``inputs``,
``outputs`` and ``steps``. A JSON is what a measuring kit writes (`edgefl.measure`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from edgefl.devices.fit import Row
from edgefl.devices.kit_result import KitResult
from edgefl.errors import ConfigError
from edgefl.learning.operations import StepWork
from edgefl.validation import convert

IMAGE = (3, 224, 224)
"""Shape of the images that networks of timm were measured on."""
UNREADABLE = (OSError, ValueError, RecursionError, csv.Error)
"""What a file raises that cannot be read, or is not of its kind."""
WRONG = (KeyError, ValueError, IndexError, ConfigError)
"""What a wrong line of a file raises."""
LEAF_FEMNIST = "LEAF FEMNIST CNN"
LEAF_SHAKESPEARE = "Shakespeare 2-layer LSTM-256"


Kind: TypeAlias = tuple[str, str]
"""A profile and one of its runtimes."""


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step and what it was measured on."""

    device: str
    profile: str
    runtime: str
    """First word of the runtime, in lower case: ``torch``, ``mnn``, ``dl4j``."""
    source: str
    row: Row

    @property
    def key(self) -> tuple[str, ...]:
        """The facts that tell it from other steps, whatever its file is called."""
        return self.profile, self.runtime, self.row.network, str(self.row.seconds)


def read(path: Path, only: Kind | None = None) -> tuple[MeasuredStep, ...]:
    """The measured steps of a file; only of that profile and runtime where they are given.

    Raises `ConfigError` for what cannot be read or is not known.
    """
    with _said_of(path, *UNREADABLE):
        return tuple(_kit(path, only) if path.suffix == ".json" else _table(path, only))


def keys(path: Path) -> set[tuple[str, ...]]:
    """The keys of the steps in a CSV, whose work is not counted."""
    with _said_of(path, *UNREADABLE):
        return {(*kind, _name(line), str(float(line["measured_s"]))) for _, line, kind in _lines(path)}


def kinds(path: Path) -> set[Kind]:
    """The profiles and runtimes of the steps in a file; `ConfigError` as of `read`."""
    with _said_of(path, *UNREADABLE):
        if path.suffix == ".json":
            return {("", _said(path).runtime_name)}
        return {kind for _, _, kind in _lines(path)}


def _said(path: Path) -> KitResult:
    return convert(json.loads(path.read_text("utf-8-sig")), KitResult)


def _kit(path: Path, only: Kind | None) -> Iterator[MeasuredStep]:
    said = _said(path)
    for row in said.rows() if only in (None, ("", said.runtime_name)) else ():
        yield MeasuredStep(
            device=said.device, profile="", runtime=said.runtime_name, source=path.name, row=row
        )


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, str], Kind]]:
    """The place of each line, the line, and its profile and runtime."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        for number, line in enumerate(csv.DictReader(file), 2):
            place = f"{path}, line {number}"
            with _said_of(place, *WRONG):
                _check_whole(line)
                runtime = line["runtime"].replace("-", " ").replace(",", " ").split()[0].lower()
                kind = line["profile"], runtime
            yield place, line, kind


def _check_whole(line: Mapping[str | None, Any]) -> None:
    """Raise `ConfigError` where a line has fewer fields than the first, or more, which come under None."""
    missing, more = list(line.values()).count(None), line.get(None, ())
    if missing or more:
        fields = len(line) - bool(more)
        got = fields - missing + len(more)
        raise ConfigError(f"must have {fields} fields, as the first line has, got {got}")


def _table(path: Path, only: Kind | None) -> Iterator[MeasuredStep]:
    counted: dict[tuple[str, ...], StepWork] = {}
    for place, line, kind in _lines(path):
        if only not in (None, kind):
            continue
        with _said_of(place, *WRONG):
            key = tuple(line.get(name) or "" for name in ("workload", "network", "kind", "layer", "inputs",
                                                          "outputs", "batch", "steps"))  # fmt: skip
            if key not in counted:
                counted[key] = _work(line)
            row = Row(network=_name(line), work=counted[key], seconds=float(line["measured_s"]))
            step = MeasuredStep(
                device=line["device"], profile=kind[0], runtime=kind[1], source=line["source"], row=row
            )
        yield step


@contextmanager
def _said_of(place: object, *faults: type[Exception]) -> Iterator[None]:
    """Has such exceptions inside say where: each is a `ConfigError` of one line."""
    try:
        yield
    except faults as error:
        raise ConfigError(f"{place}: {error}") from None


def _name(line: Mapping[str, str]) -> str:
    """The name of what was measured, with all that makes its work another but for the batch."""
    if "layer" in line:
        return " ".join(line[name] for name in ("layer", "inputs", "outputs", "batch", "steps"))
    return line["network"] or line["workload"]


def _work(line: Mapping[str, str]) -> StepWork:
    """The work of a line's step."""
    batch = int(line["batch"])
    if "layer" in line:
        return _layer_work(
            line["layer"], batch, *(int(line[name]) for name in ("inputs", "outputs", "steps"))
        )
    if line["network"]:
        return _timm_work(line["network"], line["kind"], batch)
    return _named_work(line["workload"], batch)


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

    from edgefl.learning.timm_networks import timm_network
    from edgefl.learning.work import step_work

    if kind not in ("train", "finetune", "inference"):
        raise ConfigError(f"kind must be 'train', 'finetune' or 'inference', got {kind!r}")
    with torch.device("meta"):
        module: Any = timm_network(network, IMAGE, 1000)
    heads = module.get_classifier()
    head = nn.ModuleList(heads if isinstance(heads, tuple) else [heads])
    trained = list(head.parameters()) if kind == "finetune" else None
    return step_work(module, IMAGE, batch, inference=kind == "inference", trained=trained)


def _named_work(workload: str, batch: int) -> StepWork:
    """The work of a network that timm does not have."""
    import numpy as np
    import torch

    from edgefl.learning import benchmark_networks, networks
    from edgefl.learning.work import step_work

    words = workload.split()
    with torch.device("meta"):
        if words[:1] == ["MNN"] and words[2] in benchmark_networks.MNN:
            make, shape = benchmark_networks.MNN[words[2]]
            return step_work(make(), shape, batch)
        if workload.startswith(LEAF_FEMNIST):
            return step_work(networks.cnn_femnist((1, 28, 28), 62), (1, 28, 28), batch)
        if workload.startswith(LEAF_SHAKESPEARE):
            return step_work(networks.lstm_shakespeare((80,), 80), (80,), batch, dtype=np.int64)
    raise ConfigError(f"no network is known by the workload {workload!r}")
