"""Load data sets by name, or from the user's own function.

Files are searched for in ``data.path`` if it is set, otherwise in ``$EDGEFL_DATA``. If neither is set, they
are searched for in ``$XDG_CACHE_HOME/edgefl/data`` (by default ``~/.cache/edgefl/data``) and then in Debian's
folder of data sets. In each folder, the data set's own subfolder is searched first. If neither
``data.path`` nor ``$EDGEFL_DATA`` is set, missing files of MNIST, FashionMNIST and CIFAR-10 are downloaded
(`edgefl.learning.download`).
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
from edgefl.files import cache_folder
from edgefl.learning.array_set import PARTS, array_of, load_arrays
from edgefl.learning.dataset import Dataset, Examples, Images, Targets, Tokens
from edgefl.learning.download import SOURCES, NotDownloaded, download
from edgefl.learning.hugging_face import PREFIX, load_from_hub
from edgefl.learning.leaf import find_leaf, load_leaf
from edgefl.learning.published_sets import (
    BATCHES,
    TEST_BATCH,
    find_cifar,
    find_idx,
    load_cifar,
    load_diabetes,
    load_digits,
    load_idx,
    redraw_split,
)
from edgefl.loading import call, load_attribute
from edgefl.seeds import stream

__all__ = ["NAMES", "Dataset", "Images", "load_data"]

NAMES = ("arrays", "digits", "diabetes", "mnist", "fashion-mnist", "cifar-10", "leaf")
DEBIAN = Path("/usr/share/datasets")
"""Folder in which Debian installs its packages of data sets, such as dataset-fashion-mnist."""
SPLIT_HERE = ("digits", "diabetes")
"""Data sets that were published without a test split; their loaders draw one themselves."""
IDX_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte"
FILES: dict[str, tuple[tuple[str, ...], str]] = {
    "mnist": (("mnist", "MNIST/raw"), f"{IDX_FILES} (or .gz)"),
    "fashion-mnist": (("fashion-mnist", "FashionMNIST/raw"), f"{IDX_FILES} (or .gz)"),
    "cifar-10": (
        ("cifar-10-batches-bin", "cifar-10"),
        f"{TEST_BATCH} and any of {BATCHES[0]} to {BATCHES[-1]}, the binary version",
    ),
    "leaf": (("leaf",), "folders train and test with LEAF's JSON files"),
}
"""For each data set that is read from files: the subfolders in which it is searched for, and, for messages, a
description of its files."""


def load_data(spec: Data, seed: int, search_path: Sequence[Path] = ()) -> Dataset:
    """Load the data set named in ``[data]``.

    ``max_examples`` limits the training examples to a random sample of this size. A function
    ``"my_module:load"`` is called as ``load(spec=…, seed=…)`` and returns a `Dataset`, or the four arrays
    (train_x, train_y, test_x, test_y), whose targets are classes, tokens or floats (`Targets`).
    ``search_path`` contains the folder of the experiment file. Raises `ConfigError` if the name is unknown,
    if a file is missing or invalid, if ``path`` is given for data without files, or if a user's function
    fails or returns invalid data.

    >>> data = load_data(Data(name="digits", max_examples=100), seed=0)
    >>> len(data.train_x), len(data.train_y), len(data.test_x), data.classes
    (100, 100, 359, 10)
    """
    if spec.path is not None and (spec.name in SPLIT_HERE or spec.name.startswith(PREFIX)):
        instead = "set data.name to 'arrays', 'leaf', 'mnist' or other data that are read from files"
        raise ConfigError(f"data.path: has no effect with data.name = {spec.name!r}; {instead}")
    if spec.name.startswith(PREFIX):
        dataset = load_from_hub(spec.name)
        if not len(dataset.test_y) and spec.test_split == "published":
            raise ConfigError(f"data.name {spec.name!r} has no test split: set data.test_split = 'drawn'")
    elif ":" in spec.name:
        load = load_attribute(spec.name, "data.name", search_path)
        dataset = _checked(call(load, spec.name, "data.name", spec=spec, seed=seed), spec.name)
    elif spec.name == "arrays":
        dataset = _of_arrays(spec, search_path)
    elif spec.name == "digits":
        dataset = load_digits(spec, seed)
    elif spec.name == "diabetes":
        dataset = load_diabetes(spec, seed)
    elif spec.name == "cifar-10":
        dataset = load_cifar(_find(spec, search_path, find_cifar))
    elif spec.name == "leaf":
        (folder,) = _find(spec, search_path, find_leaf)
        dataset = load_leaf(folder, spec.image_size)
    elif spec.name in NAMES:
        dataset = load_idx(spec.name, _find(spec, search_path, find_idx))
    else:
        raise ConfigError(
            f"data.name: {unknown('data set', spec.name, [*NAMES, 'hf:NAME', 'my_module:load'])}"
        )
    if spec.test_split == "drawn" and spec.name not in SPLIT_HERE:
        dataset = redraw_split(dataset, spec, seed)
    elif spec.validation_fraction and spec.name not in SPLIT_HERE:
        dataset = _validating(dataset, spec.validation_fraction, spec.evaluate_on)
    return dataset if spec.max_examples is None else _limited(dataset, spec.max_examples, seed)


def _of_arrays(spec: Data, search_path: Sequence[Path]) -> Dataset:
    if spec.path is None:
        raise ConfigError("data.path is missing; data.name = 'arrays' needs a safetensors file")
    homes = _homes(spec, search_path)
    file = next((path for path in homes if path.is_file()), homes[0])
    found, metadata = load_arrays(file)
    dataset = _checked(tuple(found[part] for part in PARTS), "arrays")
    classes = metadata.get("classes", "")
    if dataset.classes is not None and classes.isdecimal():  # tokens of inputs may be beyond these classes
        largest = max(int(dataset.train_y.max()), int(dataset.test_y.max()))
        if largest >= int(classes):
            raise ConfigError(f"data.path: {file}: labels must be in [0, {classes}) (got {largest})")
        dataset = replace(dataset, classes=int(classes))
    if (owners := found.get("owners")) is not None:
        _check_owners(owners, len(dataset.train_y), f"data.path: {file}")
        owners = owners.astype(np.int64)
    return replace(dataset, name=metadata.get("name") or file.stem, owners=owners)


def _find(spec: Data, search_path: Sequence[Path], find: Callable[[Path], list[Path] | None]) -> list[Path]:
    subfolders, expected = FILES[spec.name]
    folders = [home / name for home in _homes(spec, search_path) for name in (*subfolders, "")]
    for folder in folders:
        if (files := find(folder)) is not None:
            return files
    why = ""
    if spec.name in SOURCES and (given := _given(spec)):
        why = f" and not downloaded, because {given} is set"
    elif spec.name in SOURCES:
        try:
            download(spec.name, folders[0], lambda: find(folders[0]) is not None)
        except NotDownloaded as reason:
            why = f" and not downloaded: {reason}"
        if (files := find(folders[0])) is not None:
            return files
    looked = ", ".join(map(str, folders))
    raise ConfigError(
        f"data.name {spec.name!r}: files not found{why}; expected {expected}; searched {looked} "
        "(set data.path or EDGEFL_DATA to the folder)"
    )


def _given(spec: Data) -> str:
    """Return the name of the setting that specifies the data folder; "" if files may be downloaded."""
    return "data.path" if spec.path is not None else "EDGEFL_DATA" if os.environ.get("EDGEFL_DATA") else ""


def _homes(spec: Data, search_path: Sequence[Path]) -> list[Path]:
    """Return the folders to search.

    A relative ``data.path`` is resolved against the search path and the current directory.
    """
    if spec.path is not None:
        path = Path(os.path.expanduser(spec.path))  # Path.expanduser raises an error for an unknown user
        return list(dict.fromkeys((folder / path).resolve() for folder in (*search_path, Path.cwd())))
    if home := os.environ.get("EDGEFL_DATA"):
        return [Path(os.path.expanduser(home)), DEBIAN]
    return [cache_folder() / "data", DEBIAN]


def _limited(dataset: Dataset, most: int, seed: int) -> Dataset:
    if most >= len(dataset.train_y):
        return dataset
    return _with_train_rows(dataset, stream(seed, "max-examples").permutation(len(dataset.train_y))[:most])


def _validating(dataset: Dataset, fraction: float, evaluate_on: str) -> Dataset:
    """Hold out a fraction of the training examples for validation.

    They replace the test examples if ``evaluate_on`` is "validation".
    """
    if (count := len(dataset.train_y)) < 2:
        raise ConfigError(f"data.validation_fraction: needs two training examples or more, got {count}")
    order = stream(0, "validation").permutation(count)
    cut = min(max(1, round(fraction * count)), count - 1)
    held, rest = (_with_train_rows(dataset, rows) for rows in (order[:cut], order[cut:]))
    return replace(rest, test_x=held.train_x, test_y=held.train_y) if evaluate_on == "validation" else rest


def _with_train_rows(dataset: Dataset, rows: NDArray[np.int64]) -> Dataset:
    """Return the data set with only these training examples, in their original order."""
    rows, x = np.sort(rows), dataset.train_x
    few: Examples = x.take(rows) if isinstance(x, Images | Tokens) else np.asarray(x[rows])
    owners = None if dataset.owners is None else dataset.owners[rows]
    return replace(dataset, train_x=few, train_y=dataset.train_y[rows], owners=owners)


def _checked(got: Any, name: str) -> Dataset:
    """Convert the user's data to a consistent `Dataset`; raise `ConfigError` if this is impossible."""
    if isinstance(got, tuple | list) and len(got) == 4:
        parts = _parts(name, *got)
        data = Dataset.of(name, parts, _classes(parts))
    elif isinstance(got, Dataset):
        _check_fields(got, name)
        (x, y), (test_x, test_y) = _parts(name, got.train_x, got.train_y, got.test_x, got.test_y)
        data = replace(got, train_x=x, train_y=y, test_x=test_x, test_y=test_y)
    else:
        raise ConfigError(
            f"data.name: {name!r} must return a Dataset or (train_x, train_y, test_x, test_y) "
            f"(got {type(got).__name__})"
        )
    for part, x, y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
        _check_part(data, f"data.name: {name!r}: {part}", x, y)
    if data.owners is not None:
        _check_owners(data.owners, len(data.train_y), f"data.name: {name!r}")
    return data


def _check_fields(data: Any, name: str) -> None:
    """Raise `ConfigError` if ``input_shape`` or ``classes`` of the user's `Dataset` has a wrong type."""
    shape, classes = data.input_shape, data.classes
    if not isinstance(shape, tuple | list):
        raise ConfigError(f"data.name: {name!r}: input_shape must be a tuple, such as (4,) (got {shape!r})")
    if not isinstance(classes, int | np.integer | None):
        raise ConfigError(f"data.name: {name!r}: classes must be a whole number or None (got {classes!r})")


def _parts(name: str, x: Any, y: Any, test_x: Any, test_y: Any) -> tuple[tuple[Any, Targets], ...]:
    what = f"data.name: {name!r}:"
    train = (_inputs(x, f"{what} train_x"), _targets(y, f"{what} train_y"))
    return train, (_inputs(test_x, f"{what} test_x"), _targets(test_y, f"{what} test_y"))


def _classes(parts: Sequence[tuple[Any, Targets]]) -> int | None:
    """Return the number of classes, or None if the targets are floats.

    The number is one more than the largest class, or one more than the largest token in inputs and targets.
    """
    targets = [y for _, y in parts]
    if targets[0].dtype.kind == "f":
        return None
    texts = [_tokens(x) for x, y in parts if y.ndim > 1]
    return 1 + max(int(values.max(initial=0)) for values in (*targets, *texts))


def _tokens(x: Any) -> NDArray[Any]:
    """Return the tokens of inputs, or an empty array if the inputs are images or floats."""
    raw = x.raw if isinstance(x, Tokens) else x
    return raw if isinstance(raw, np.ndarray) and raw.dtype.kind in "iu" else np.zeros(0, np.int64)


def _check_part(data: Dataset, part: str, x: Examples, y: Targets) -> None:
    """Raise `ConfigError` if a part's inputs and targets do not fit each other or the data set."""
    if len(x) != len(y):
        raise ConfigError(f"{part}_x has {len(x)} rows, but {part.rpartition(' ')[2]}_y has {len(y)}")
    held, shape, classes = x[:1].shape[1:], tuple(data.input_shape), data.classes
    if held != shape:
        raise ConfigError(f"{part}_x has examples of shape {held}, but input_shape is {shape}")
    if (y.dtype.kind == "f") != (classes is None) or y.shape[1:] != data.target_shape:
        kind = "floats" if classes is None else f"whole numbers in [0, {classes})"
        raise ConfigError(
            f"{part}_y must be {kind}, of shape {data.target_shape} per example "
            f"(got {y.dtype} of shape {y.shape})"
        )
    if classes is not None and (top := int(y.max())) >= classes:
        raise ConfigError(f"{part}_y must be in [0, {classes}) (got {top})")


def _check_owners(owners: Any, examples: int, what: str) -> None:
    """Raise `ConfigError` unless ``owners`` contains one whole number for each training example.

    The message starts with ``what``.
    """
    if isinstance(owners, np.ndarray) and owners.dtype.kind in "iu" and owners.shape == (examples,):
        return
    got = (
        f"{owners.dtype} of shape {owners.shape}" if isinstance(owners, np.ndarray) else type(owners).__name__
    )
    raise ConfigError(
        f"{what}: owners must be an array of whole numbers of shape ({examples},), "
        f"one per training example (got {got})"
    )


def _targets(values: Any, what: str) -> Targets:
    """Convert whole numbers to int64, and floats to float32 with at least two dimensions."""
    targets = array_of(values, what)
    whole = targets.dtype.kind in "iu"
    if targets.ndim == 0 or targets.size == 0 or not (whole or targets.dtype.kind == "f"):
        raise ConfigError(
            f"{what} must be whole numbers ≥ 0 of shape (n,) or (n, length), or floats of shape (n, ...), "
            f"n ≥ 1 (got {targets.dtype} of shape {targets.shape})"
        )
    if not whole:
        return _finite(targets.reshape(len(targets), -1) if targets.ndim == 1 else targets, what)
    if targets.min() < 0:
        raise ConfigError(f"{what} must be whole numbers ≥ 0 (got {targets.min()})")
    return targets.astype(np.int64, copy=False)


def _inputs(values: Any, what: str) -> Any:
    """Convert floats to float32 and whole numbers (tokens) to int64; return `Examples` unchanged."""
    if isinstance(values, Images | Tokens):
        return values
    inputs = array_of(values, what)
    if inputs.ndim < 2 or inputs.dtype.kind not in "fiu":
        got = f"{inputs.dtype} of shape {inputs.shape}"
        raise ConfigError(f"{what} must be numbers of shape (n, ...) (got {got})")
    return _finite(inputs, what) if inputs.dtype.kind == "f" else inputs.astype(np.int64, copy=False)


def _finite(values: NDArray[Any], what: str) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        floats: NDArray[np.float32] = values.astype(np.float32, copy=False)
        finite = np.isfinite(floats.sum(dtype=np.float64))  # unlike isfinite(floats), this allocates no array
    if not finite:
        raise ConfigError(f"{what} must be finite float32 numbers (got NaN or infinity)")
    return floats
