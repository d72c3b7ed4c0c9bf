"""Checkpoints of a run in safetensors files.

A checkpoint contains the model, the state of the server's optimiser, the updates in the buffer, and older
versions that are still in use. It also contains the sequence number of the last journal entry before it:
replaying the journal up to this entry restores the state of the core. A seal, which is a hash of the whole
content, reveals damage.
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

_BY_NUMBER = {
    "held": "held", "kept": "kept", "early": "early", "base": "bases", "statistics": "statistics",
}  # fmt: skip
"""Maps the prefix of a tensor's name to the field of `SavedState` that contains the tensor. The rest of the
name is the number of a task, a client or a version."""

Layout = list[tuple[str, list[int], int]]


@dataclass(frozen=True)
class SavedState:
    """The numerical state of a run after one entry of its journal."""

    version: int
    journal_seq: int
    emulated_s: float
    wall_s: float
    model: Floats
    vectors: list[Floats]
    held: dict[int, Raw]
    """Bytes of the updates in the buffer, keyed by task: updates that have arrived, and updates that have
    been computed but have not yet arrived in emulated time."""
    kept: dict[int, Floats] = field(default_factory=dict)
    """Numbers that each client keeps between trips, keyed by client."""
    early: dict[int, Floats] = field(default_factory=dict)
    """Numbers that a client will keep once its computed update arrives in emulated time, keyed by client."""
    bases: dict[int, Floats] = field(default_factory=dict)
    """Other versions of the model that are in use, keyed by version: base versions of tasks, and versions
    that have yet to be evaluated."""
    statistics: dict[int, Floats] = field(default_factory=dict)
    """For each update in ``held``, the running statistics in its base version, keyed by task. It is empty if
    the model has no running statistics."""
    answers: bytes = b""
    """Results from the workers for tasks whose updates have not yet arrived in emulated time, encoded as
    msgpack."""


def write(folder: Path, checkpoint: SavedState, layout: Layout, *, final: bool = False) -> Path:
    """Write a checkpoint to ``folder``, and return its path. If ``final`` is True, also write the model to
    ``final.safetensors``, with the name and the shape of each parameter tensor from ``layout``."""
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
    # Delete older checkpoints, and partial files left behind by killed processes.
    for old in (*sorted(folder.glob("journal-*.safetensors"))[:-KEEP], *folder.glob(f"*{PARTIAL}")):
        old.unlink()
    return path


def latest(folder: Path, *, journal_seq: int | None = None) -> SavedState:
    """Read the newest intact checkpoint that is not ahead of the journal, whose last entry is
    ``journal_seq``. Raises `ConfigError` if there is no such checkpoint."""
    problems = []
    for path in sorted(folder.glob("journal-*.safetensors"), reverse=True):
        try:
            state = _read(path)
            if journal_seq is not None and state.journal_seq > journal_seq:
                raise ValueError(f"it is later than the journal, which ends at entry {journal_seq}")
            return state
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            problems.append(f"{path.name}: {error}")
    raise ConfigError("; ".join([f"{folder} contains no checkpoint to resume from", *problems]))


def forget_after(folder: Path, journal_seq: int) -> None:
    """Delete the checkpoints that were written after this journal entry, because the entries after it will
    be replaced, and the final model, because the run goes on."""
    for path in folder.glob("journal-*.safetensors"):
        if path > _file(folder, journal_seq):
            path.unlink()
    (folder / "final.safetensors").unlink(missing_ok=True)
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
    """Read the metadata and the tensors of a checkpoint. Raises ValueError if the file has changed since it
    was written."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
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
    """Yield the content of a safetensors file in pieces. The writer of the safetensors library is not used,
    because it copies all tensors twice."""
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
    """Return a hash of the metadata and of each tensor's name, dtype, shape and checksum. The safetensors
    format itself contains no hash."""
    parts = [
        (name, tensor.dtype.str, tensor.shape, kernels.checksum(tensor.reshape(-1)))
        for name, tensor in sorted(tensors.items())
    ]
    return hashlib.sha256(json.dumps([sorted(metadata.items()), parts]).encode()).hexdigest()
