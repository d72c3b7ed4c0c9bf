"""The data sets by name, and a user's own.

Files are looked for in ``data.path``, else in ``$EDGEFL_DATA``, else in ``$XDG_CACHE_HOME/edgefl/data``
(``~/.cache/edgefl/data``); there in the data set's own folder, then in the folder itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError, unknown
from edgefl.experiment import Data
from edgefl.learning.dataset import Dataset, Examples, Images, Tokens
from edgefl.learning.image_sets import BATCHES, find_cifar, find_idx, load_cifar, load_digits, load_idx
from edgefl.learning.leaf import find_leaf, load_leaf
from edgefl.loading import call, load_attribute
from edgefl.seeds import stream

__all__ = ["NAMES", "Dataset", "Images", "load_data"]

NAMES = ("digits", "mnist", "fashion-mnist", "cifar-10", "leaf")
FOLDERS = {
    "mnist": ("mnist", "MNIST/raw"),
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw"),
    "cifar-10": ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar-10"),
    "leaf": ("leaf",),
}
IDX_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte"
FILES = {
    "mnist": f"{IDX_FILES} (or .gz)",
    "fashion-mnist": f"{IDX_FILES} (or .gz)",
    "cifar-10": f"test_batch.bin and any of {BATCHES[0]}.bin to {BATCHES[-1]}.bin (or without .bin)",
    "leaf": "folders train and test with LEAF's JSON files",
}


def load_data(spec: Data, seed: int, search_path: Sequence[Path] = ()) -> Dataset:
    """The data set that ``[data]`` names, its training part cut at random to ``max_examples``.

    ``"my_module:load"`` is called as ``load(spec=…, seed=…)`` and returns a `Dataset`, or the four arrays
    (train_x, train_y, test_x, test_y). ``search_path`` holds the experiment file's folder. Raises
    `ConfigError` for an unknown name, a missing or bad file, or a user's function that fails.

    >>> data = load_data(Data(name="digits", max_examples=100), seed=0)
    >>> len(data.train_x), len(data.train_y), len(data.test_x), data.classes
    (100, 100, 359, 10)
    """
    if ":" in spec.name:
        load = load_attribute(spec.name, "data.name", search_path)
        dataset = _checked(call(load, spec.name, "data.name", spec=spec, seed=seed), spec.name)
    elif spec.name == "digits":
        dataset = load_digits(spec.test_fraction, seed)
    elif spec.name == "cifar-10":
        dataset = load_cifar(_find(spec, search_path, find_cifar))
    elif spec.name == "leaf":
        (folder,) = _find(spec, search_path, find_leaf)
        dataset = load_leaf(folder, spec.image_size)
    elif spec.name in NAMES:
        dataset = load_idx(spec.name, _find(spec, search_path, find_idx))
    else:
        raise ConfigError(f"data.name: {unknown('data set', spec.name, [*NAMES, 'my_module:load'])}")
    return dataset if spec.max_examples is None else _limited(dataset, spec.max_examples, seed)


def _find(spec: Data, search_path: Sequence[Path], find: Callable[[Path], list[Path] | None]) -> list[Path]:
    homes = _homes(spec, search_path)
    folders = [folder / name for folder in homes for name in (*FOLDERS[spec.name], "")]
    for folder in folders:
        if (files := find(folder)) is not None:
            return files
    looked = ", ".join(map(str, folders))
    raise ConfigError(
        f"data.name {spec.name!r}: files not found; need {FILES[spec.name]}; looked in {looked} "
        "(set data.path or EDGEFL_DATA to the folder)"
    )


def _homes(spec: Data, search_path: Sequence[Path]) -> list[Path]:
    """Folders that may hold the data; a relative ``data.path`` starts at the experiment's folder or here."""
    if spec.path is not None:
        path = Path(spec.path).expanduser()
        return list(dict.fromkeys((folder / path).resolve() for folder in (*search_path, Path.cwd())))
    if home := os.environ.get("EDGEFL_DATA"):
        return [Path(home).expanduser()]
    return [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgefl" / "data"]


def _limited(dataset: Dataset, most: int, seed: int) -> Dataset:
    if most >= len(dataset.train_y):
        return dataset
    rows = np.sort(stream(seed, "max-examples").permutation(len(dataset.train_y))[:most])
    x = dataset.train_x
    few: Examples = x.take(rows) if isinstance(x, Images | Tokens) else np.asarray(x[rows])
    owners = None if dataset.owners is None else dataset.owners[rows]
    return replace(dataset, train_x=few, train_y=dataset.train_y[rows], owners=owners)


def _checked(got: Any, name: str) -> Dataset:
    """Returns a user's data as a `Dataset` that fits together."""
    if isinstance(got, tuple | list) and len(got) == 4:
        train_x, train_y, test_x, test_y = got
        labels = [_labels(train_y, name, "train_y"), _labels(test_y, name, "test_y")]
        inputs = [_inputs(train_x, name, "train_x"), _inputs(test_x, name, "test_x")]
        classes = 1 + max(int(part.max()) for part in labels)
        got = Dataset.of(name, zip(inputs, labels, strict=True), classes)
    if not isinstance(got, Dataset):
        raise ConfigError(
            f"data.name: {name!r} must return a Dataset or (train_x, train_y, test_x, test_y) "
            f"(got {type(got).__name__})"
        )
    for part, x, y in (("train", got.train_x, got.train_y), ("test", got.test_x, got.test_y)):
        y = _labels(y, name, f"{part}_y")
        if len(x) != len(y):
            raise ConfigError(f"data.name: {name!r}: {part}_x has {len(x)} rows and {part}_y {len(y)}")
        held, shape = x[:1].shape[1:], tuple(got.input_shape)
        if held != shape:
            raise ConfigError(f"data.name: {name!r}: {part}_x holds {held}, input_shape is {shape}")
        if (top := int(y.max())) >= got.classes:
            raise ConfigError(f"data.name: {name!r}: {part}_y must be in [0, {got.classes}) (got {top})")
    return got


def _labels(values: Any, name: str, part: str) -> NDArray[np.int64]:
    labels = np.asarray(values)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) == 0 or labels.min() < 0:
        raise ConfigError(
            f"data.name: {name!r}: {part} must be whole numbers ≥ 0 of shape (n,), n ≥ 1 "
            f"(got {labels.dtype} of shape {labels.shape})"
        )
    return labels.astype(np.int64, copy=False)


def _inputs(values: Any, name: str, part: str) -> NDArray[Any]:
    """Floats as float32; whole numbers as they are, for models that take tokens."""
    inputs = np.asarray(values)
    if inputs.ndim < 2 or inputs.dtype.kind not in "fiu":
        raise ConfigError(
            f"data.name: {name!r}: {part} must be numbers of shape (n, ...) "
            f"(got {inputs.dtype} of shape {inputs.shape})"
        )
    return inputs.astype(np.float32 if inputs.dtype.kind == "f" else np.int64, copy=False)
