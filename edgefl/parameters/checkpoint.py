"""Checkpoints: the model, the server optimiser's state, updates and versions still in use, in safetensors.

A checkpoint names the last journal entry it contains. Replaying the journal up to there through the core
gives the state that belongs to these numbers, so a checkpoint holds nothing but numbers, under a seal: a hash
over all that the file says.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from edgefl import failpoints, kernels
from edgefl.errors import ConfigError
from edgefl.files import PARTIAL, flush_folder, make_folder, replace
from edgefl.kernels.arguments import Floats
from edgefl.parameters.update_format import Raw

FORMAT = "edgefl-5"
KEEP = 2
_KINDS = {"<f4": "F32", "|u1": "U8"}

_BY_NUMBER = {"held": "held", "kept": "kept", "early": "early", "base": "bases"}
"""Kinds of tensors of which there is one a task, client or version, and the fields that hold them."""

Layout = list[tuple[str, list[int], int]]


@dataclass(frozen=True)
class SavedState:
    """The numbers of a run at one instant."""

    version: int
    journal_seq: int
    emulated_s: float
    wall_s: float
    model: Floats
    vectors: list[Floats]
    held: dict[int, Raw]
    """Updates in the buffer, by task, as they lie there: arrived ones, and those that arrive later."""
    kept: dict[int, Floats] = field(default_factory=dict)
    """Numbers that clients keep from trip to trip, by client."""
    early: dict[int, Floats] = field(default_factory=dict)
    """The same as updates that arrive later will leave them."""
    bases: dict[int, Floats] = field(default_factory=dict)
    """Other versions that are still to be read: tasks start from them, or they are to be measured."""
    answers: bytes = b""
    """Answers of workers for tasks whose arrival is not due yet, msgpack."""


def write(folder: Path, checkpoint: SavedState, layout: Layout, *, final: bool = False) -> Path:
    """Write a checkpoint; with ``final`` also ``final.safetensors``, the model alone by tensor name."""
    make_folder(folder)
    metadata = {
        "format": FORMAT,
        "version": str(checkpoint.version),
        "journal_seq": str(checkpoint.journal_seq),
        "emulated_s": repr(checkpoint.emulated_s),
        "wall_s": repr(checkpoint.wall_s),
    }
    path = _file(folder, checkpoint.journal_seq)
    tensors = _tensors(checkpoint)
    replace(path, _safetensors(tensors, metadata))
    failpoints.pass_by("named")
    if final:
        named = {
            name: checkpoint.model[offset : offset + math.prod(shape)].reshape(shape)
            for name, shape, offset in layout
        }
        replace(folder / "final.safetensors", _safetensors(named, metadata))
    # What a killed writer left half-written goes too.
    for old in (*sorted(folder.glob("journal-*.safetensors"))[:-KEEP], *folder.glob(f"*{PARTIAL}")):
        old.unlink()
    return path


def latest(folder: Path, *, journal_seq: int | None = None) -> SavedState:
    """The newest checkpoint that reads back whole and is not ahead of the journal; else `ConfigError`."""
    problems = []
    for path in sorted(folder.glob("journal-*.safetensors"), reverse=True):
        try:
            found = _read(path)
            if journal_seq is not None and found.journal_seq > journal_seq:
                raise ValueError(f"the journal ends at {journal_seq}, before it")
            return found
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            problems.append(f"{path.name}: {error}")
    raise ConfigError("; ".join([f"{folder} holds no checkpoint to resume from", *problems]))


def forget_after(folder: Path, journal_seq: int) -> None:
    """Remove the checkpoints beyond this entry of the journal, which now goes on otherwise from there."""
    for path in folder.glob("journal-*.safetensors"):
        if path > _file(folder, journal_seq):
            path.unlink()
    flush_folder(folder)


def _file(folder: Path, journal_seq: int) -> Path:
    return folder / f"journal-{journal_seq:010d}.safetensors"


def _read(path: Path) -> SavedState:
    metadata, tensors = read_sealed(path)

    def numbered(kind: str) -> dict[int, NDArray[Any]]:
        names = [name for name in tensors if name.startswith(f"{kind}.")]
        return {int(name.partition(".")[2]): tensors[name] for name in names}

    return SavedState(
        version=int(metadata["version"]),
        journal_seq=int(metadata["journal_seq"]),
        emulated_s=float(metadata["emulated_s"]),
        wall_s=float(metadata["wall_s"]),
        model=tensors["model"],
        vectors=[vector for _, vector in sorted(numbered("vector").items())],
        answers=tensors["answers"].tobytes() if "answers" in tensors else b"",
        **{name: numbered(kind) for kind, name in _BY_NUMBER.items()},
    )


def read_sealed(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors of a file that `write` wrote; ValueError if it is not as it was written."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"format {metadata.get('format')!r}, not {FORMAT!r}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if metadata.pop("seal", "") != _seal(tensors, metadata):
        raise ValueError("it does not hold what was written")
    return metadata, tensors


def _tensors(checkpoint: SavedState) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {"model": checkpoint.model}
    tensors |= {f"vector.{index}": vector for index, vector in enumerate(checkpoint.vectors)}
    for kind, name in _BY_NUMBER.items():
        tensors |= {f"{kind}.{number}": values for number, values in getattr(checkpoint, name).items()}
    if checkpoint.answers:
        tensors["answers"] = np.frombuffer(checkpoint.answers, dtype=np.uint8)
    return tensors


def _safetensors(tensors: dict[str, NDArray[Any]], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The file piece by piece: the library's own writer copies all numbers twice before the first one."""
    header: dict[str, Any] = {"__metadata__": {**metadata, "seal": _seal(tensors, metadata)}}
    start = 0
    for name, tensor in tensors.items():
        kind, stop = _KINDS[tensor.dtype.str], start + tensor.nbytes
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def _seal(tensors: dict[str, NDArray[Any]], metadata: dict[str, str]) -> str:
    """A hash over the metadata and every tensor's name, type, shape and checksum: the format has none."""
    parts = [
        (name, tensor.dtype.str, tensor.shape, kernels.checksum(tensor.reshape(-1)))
        for name, tensor in sorted(tensors.items())
    ]
    return hashlib.sha256(json.dumps([sorted(metadata.items()), parts]).encode()).hexdigest()
