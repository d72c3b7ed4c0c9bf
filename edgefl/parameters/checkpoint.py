"""Checkpoints in safetensors files: the model, the server optimiser's state, updates and versions in use.

A checkpoint contains only numbers and the sequence number of its last journal entry. Replaying the journal up
to that entry restores the core's state. A seal, a hash over the whole content, detects damage.
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
from edgefl.parameters.buffer import Raw

FORMAT = "edgefl-5"
KEEP = 2
_KINDS = {"<f4": "F32", "|u1": "U8"}

_BY_NUMBER = {"held": "held", "kept": "kept", "early": "early", "base": "bases"}
"""Kinds of tensors numbered by task, client or version, and their `SavedState` fields."""

Layout = list[tuple[str, list[int], int]]


@dataclass(frozen=True)
class SavedState:
    """The numerical state of a run at one journal entry."""

    version: int
    journal_seq: int
    emulated_s: float
    wall_s: float
    model: Floats
    vectors: list[Floats]
    held: dict[int, Raw]
    """Bytes of the updates in the buffer, by task: arrived updates, and computed updates not due yet."""
    kept: dict[int, Floats] = field(default_factory=dict)
    """Numbers that clients keep from trip to trip, by client."""
    early: dict[int, Floats] = field(default_factory=dict)
    """Kept numbers after updates that are computed but not due yet, by client."""
    bases: dict[int, Floats] = field(default_factory=dict)
    """Other versions in use, by number: base versions of tasks, or versions to be evaluated."""
    answers: bytes = b""
    """Workers' results for tasks whose arrival is not due yet, msgpack."""


def write(folder: Path, checkpoint: SavedState, layout: Layout, *, final: bool = False) -> Path:
    """Write a checkpoint, and with ``final`` also ``final.safetensors``: the model by tensor name."""
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
    # Also delete partial files of killed writers.
    for old in (*sorted(folder.glob("journal-*.safetensors"))[:-KEEP], *folder.glob(f"*{PARTIAL}")):
        old.unlink()
    return path


def latest(folder: Path, *, journal_seq: int | None = None) -> SavedState:
    """Read the newest intact checkpoint not ahead of the journal. Raises `ConfigError` if there is none."""
    problems = []
    for path in sorted(folder.glob("journal-*.safetensors"), reverse=True):
        try:
            state = _read(path)
            if journal_seq is not None and state.journal_seq > journal_seq:
                raise ValueError(f"the journal ends earlier, at entry {journal_seq}")
            return state
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            problems.append(f"{path.name}: {error}")
    raise ConfigError("; ".join([f"{folder} holds no checkpoint to resume from", *problems]))


def forget_after(folder: Path, journal_seq: int) -> None:
    """Delete checkpoints after this journal entry, from which the journal now continues differently."""
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
    """Read a checkpoint's metadata and tensors. Raises ValueError if the file was changed since `write`."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"format {metadata.get('format')!r}, not {FORMAT!r}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if metadata.pop("seal", "") != _seal(tensors, metadata):
        raise ValueError("damaged: the content does not match its seal")
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
    """Yield the file in pieces: the library's own writer would copy all tensors twice first."""
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
    """Hash of the metadata and of each tensor's name, dtype, shape and checksum; safetensors has no hash."""
    parts = [
        (name, tensor.dtype.str, tensor.shape, kernels.checksum(tensor.reshape(-1)))
        for name, tensor in sorted(tensors.items())
    ]
    return hashlib.sha256(json.dumps([sorted(metadata.items()), parts]).encode()).hexdigest()
