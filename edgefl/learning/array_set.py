"""With ``data.name = "arrays"``, the data set consists of arrays in the safetensors file ``data.path``.

The file contains ``train_x``, ``train_y``, ``test_x`` and ``test_y`` as in `Dataset`, and also ``owners`` if
each training example belongs to a user. The metadata may contain the ``name`` of the data set, and the number
of ``classes``, which is needed if some classes do not occur in the labels.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edgefl.errors import ConfigError, as_config_error, described
from edgefl.files import write_bytes
from edgefl.learning.dataset import Dataset

PARTS = ("train_x", "train_y", "test_x", "test_y")


def load_arrays(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a file's arrays, keyed by name, and its metadata. Raises `ConfigError` if the file is invalid."""
    what, faults = "cannot be read as safetensors", (SafetensorError, OSError, ValueError, TypeError)
    with as_config_error(f"data.path: {path} {what}", *faults), safe_open(path, framework="numpy") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    if missing := [name for name in PARTS if name not in found]:
        raise ConfigError(f"data.path: {path} lacks {', '.join(missing)}")
    return found, metadata


def array_of(values: Any, what: str) -> NDArray[Any]:
    """Convert values to an array in C order, because models flatten a batch with view().

    Raises a `ConfigError` whose message starts with ``what`` if the conversion is impossible, for example
    because rows have different lengths.
    """
    try:
        return np.asarray(values, order="C")
    except (TypeError, ValueError, RuntimeError) as error:
        why = described(error)[:200]
        raise ConfigError(f"{what} is not an array of numbers: {why}") from None


def save_arrays(data: Any, folder: Path) -> Path:
    """Write a `Dataset`, or four arrays in the order of `PARTS`, to a file in ``folder``; return its path.

    The name of the file contains a hash of its content. Raises `ConfigError` if ``data`` is anything else.
    """
    metadata, owners = {}, None
    if isinstance(data, Dataset):
        arrays = [data.train_x[:], data.train_y, data.test_x[:], data.test_y]
        metadata, owners = {"name": data.name, "classes": str(data.classes or "")}, data.owners
    elif isinstance(data, tuple | list) and len(data) == len(PARTS):
        arrays = list(data)
    else:
        allowed = "a function, a Dataset or (train_x, train_y, test_x, test_y)"
        raise ConfigError(f"data: must be {allowed}, got a {type(data).__name__}")
    parts = {name: array_of(array, f"data: {name}") for name, array in zip(PARTS, arrays, strict=True)}
    if owners is not None:
        parts["owners"] = np.ascontiguousarray(owners)
    for name, array in parts.items():
        if array.dtype.kind not in "fiu" or array.dtype.itemsize > 8:  # safetensors has no long double
            raise ConfigError(f"data: {name} must be an array of numbers, got one of {array.dtype}")
    if isinstance(data, Dataset) and (data.classes is None) != (parts["train_y"].dtype.kind == "f"):
        kind = "floats" if data.classes is None else "whole numbers"
        got = f"got {parts['train_y'].dtype}"
        raise ConfigError(f"data: train_y must be {kind} in a Dataset with classes = {data.classes}, {got}")
    content = save(parts, metadata)
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    return write_bytes(folder / f"data-{digest}.safetensors", content)
