"""Checkpoints: the model, the server optimiser's state and the updates waiting in the buffer, in safetensors.

A checkpoint names the last journal entry it contains. Replaying the journal up to there through the core
gives the state that belongs to these numbers, so a checkpoint holds nothing but numbers, with a checksum. It
is written beside its place, flushed to the disk, renamed, and the folder flushed too.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edgefl import kernels
from edgefl.buffer import Floats
from edgefl.errors import ConfigError
from edgefl.update_format import Raw

FORMAT = "edgefl-2"
KEEP = 2

Layout = list[tuple[str, list[int], int]]


@dataclass(frozen=True)
class Checkpoint:
    """The numbers of a run at one instant."""

    version: int
    journal_seq: int
    emulated_s: float
    wall_s: float
    model: Floats
    vectors: list[Floats]
    held: dict[int, Raw]
    """Updates in the buffer, by task, as they lie there."""
    residuals: dict[int, Floats] = field(default_factory=dict)
    """What rounding left of clients' last updates, by client."""


def write(folder: Path, checkpoint: Checkpoint, layout: Layout, *, final: bool = False) -> Path:
    """Write a checkpoint; with ``final`` also ``final.safetensors``, the model alone by tensor name."""
    folder.mkdir(exist_ok=True)
    metadata = {
        "format": FORMAT,
        "version": str(checkpoint.version),
        "journal_seq": str(checkpoint.journal_seq),
        "emulated_s": repr(checkpoint.emulated_s),
        "wall_s": repr(checkpoint.wall_s),
    }
    tensors: dict[str, NDArray[Any]] = {"model": checkpoint.model}
    tensors |= {f"vector.{index}": vector for index, vector in enumerate(checkpoint.vectors)}
    tensors |= {f"held.{task}": update for task, update in checkpoint.held.items()}
    tensors |= {f"residual.{client}": left for client, left in checkpoint.residuals.items()}
    path = folder / f"journal-{checkpoint.journal_seq:010d}.safetensors"
    _replace(path, save(tensors, {**metadata, "checksum": _checksum(tensors)}))
    if final:
        named = {
            name: checkpoint.model[offset : offset + _count(shape)].reshape(shape)
            for name, shape, offset in layout
        }
        _replace(folder / "final.safetensors", save(named, metadata))
    # What a killed writer left half-written goes too.
    for old in (*sorted(folder.glob("journal-*.safetensors"))[:-KEEP], *folder.glob("*.partial")):
        old.unlink()
    return path


def latest(folder: Path, *, journal_seq: int | None = None) -> Checkpoint:
    """The newest checkpoint that reads back whole and lies within the journal's ``journal_seq`` entries.

    `ConfigError` if there is none.
    """
    problems = []
    for path in sorted(folder.glob("journal-*.safetensors"), reverse=True):
        try:
            found = _read(path)
            if journal_seq is not None and found.journal_seq > journal_seq:
                raise ValueError(f"the journal ends at {journal_seq}, before it")
            return found
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            problems.append(f"{path.name}: {error}")
    raise ConfigError(
        f"{folder} holds no checkpoint to resume from" + "".join(f"; {problem}" for problem in problems)
    )


def _read(path: Path) -> Checkpoint:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"format {metadata.get('format')!r}, not {FORMAT!r}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if metadata["checksum"] != _checksum(tensors):
        raise ValueError("its numbers are not those that were written")
    vectors = sorted((name for name in tensors if name.startswith("vector.")), key=_number)
    return Checkpoint(
        version=int(metadata["version"]),
        journal_seq=int(metadata["journal_seq"]),
        emulated_s=float(metadata["emulated_s"]),
        wall_s=float(metadata["wall_s"]),
        model=tensors["model"],
        vectors=[tensors[name] for name in vectors],
        held={_number(name): tensors[name] for name in tensors if name.startswith("held.")},
        residuals={_number(name): tensors[name] for name in tensors if name.startswith("residual.")},
    )


def _checksum(tensors: dict[str, NDArray[Any]]) -> str:
    """Of all numbers: the file format has none of its own."""
    return " ".join(f"{kernels.checksum(tensors[name]):016x}" for name in sorted(tensors))


def _number(name: str) -> int:
    return int(name.partition(".")[2])


def _count(shape: list[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
