"""Data as the LEAF benchmark writes it (Caldas et al. 2018, arXiv:1812.01097): JSON files, example by user.

    FOLDER/train/*.json, FOLDER/test/*.json
    {"users": [NAME, …], "num_samples": [COUNT, …], "user_data": {NAME: {"x": […], "y": […]}, …}}

What the examples are follows from the first one: `edgefl.learning.leaf_examples`. Every example keeps its
user, so that ``partition = "natural"`` can give each client the data of one. All files are read before a run
starts, user by user; of a data set that does not fit in memory, let LEAF's own script sample a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edgefl.errors import ConfigError
from edgefl.learning.dataset import Dataset
from edgefl.learning.leaf_examples import PHOTO, Kind, Labels, Lines, Numbers, Tweets

SPLITS = ("train", "test")


class _File(msgspec.Struct):
    users: list[str]
    num_samples: list[int]
    user_data: dict[str, msgspec.Raw]


class _User(msgspec.Struct):
    x: list[Any]
    y: list[Any]


class Owned(NamedTuple):
    """The examples of one user in one file."""

    where: str
    """File and user, for errors."""
    x: list[Any]
    y: list[Any]


_file = msgspec.json.Decoder(_File)
_user = msgspec.json.Decoder(_User)


def find_leaf(folder: Path) -> list[Path] | None:
    """``folder`` itself if it holds LEAF's two folders, each with a JSON file at least."""
    if all(any((folder / split).glob("*.json")) for split in SPLITS):
        return [folder]
    return None


def load_leaf(folder: Path, image_size: int) -> Dataset:
    """The data set in a folder that `find_leaf` gives; photos become squares of ``image_size`` pixels.

    Raises `ConfigError`, one line naming the file and the user, for a file that is not as LEAF writes it.
    """
    kind: Kind | None = None
    examples: dict[str, list[Any]] = {split: [] for split in SPLITS}
    labels: dict[str, list[Labels]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        for owned in _owned(folder / split):
            kind = kind or kind_of(owned.x[0], owned.where, folder, image_size)
            examples[split].append(kind.take(owned.x, owned.where))
            labels[split].append(kind.labels(owned.y, owned.where))
        if not labels[split]:
            raise ConfigError(f"{folder / split}: no user has an example")
    assert kind is not None
    train_x, test_x, shape = kind.finish(examples["train"], examples["test"])
    train_y, test_y = (np.concatenate(labels[split]) for split in SPLITS)
    counts = [len(part) for part in labels["train"]]
    return Dataset(
        name=f"leaf-{kind.name}",
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        classes=kind.classes or 1 + int(max(train_y.max(), test_y.max())),
        input_shape=shape,
        owners=np.repeat(np.arange(len(counts)), counts),
    )


def _owned(folder: Path) -> Iterator[Owned]:
    """Each user of a folder that has an example, in the order of the files' names and of their lists."""
    seen: set[str] = set()
    for file in sorted(folder.glob("*.json")):
        found = _read(file)
        for user, count in zip(found.users, found.num_samples, strict=True):
            where = f"{file}: user {user!r}"
            if user in seen:
                raise ConfigError(f"{where}: listed twice in {folder.name}")
            seen.add(user)
            data = _data_of(found, user, where)
            if not len(data.x) == len(data.y) == count:
                got = f"{len(data.x)} and {len(data.y)}"
                raise ConfigError(f"{where}: num_samples says {count}, but x and y hold {got}")
            if count:
                yield Owned(where, data.x, data.y)


def _read(file: Path) -> _File:
    try:
        found = _file.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not a file of LEAF's: {error}") from None
    if len(found.users) != len(found.num_samples):
        got = f"{len(found.users)} users and {len(found.num_samples)} counts"
        raise ConfigError(f"{file}: users and num_samples must be equally long (got {got})")
    return found


def _data_of(found: _File, user: str, where: str) -> _User:
    if user not in found.user_data:
        raise ConfigError(f"{where}: listed in users, but not in user_data")
    try:
        return _user.decode(found.user_data[user])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not LEAF's x and y: {error}") from None


def kind_of(first: Any, where: str, folder: Path, image_size: int) -> Kind:
    """What the data set is, by its first example."""
    if isinstance(first, list) and first and all(type(item) in (int, float) for item in first):
        return Numbers(len(first))
    if isinstance(first, list) and len(first) == 5 and all(isinstance(item, str) for item in first):
        return Tweets()
    if isinstance(first, str) and PHOTO.fullmatch(first):
        from edgefl.learning.leaf_photos import Photos

        return Photos(folder, image_size)
    if isinstance(first, str) and first:
        return Lines(len(first))
    raise ConfigError(
        f"{where}: x must hold numbers, tweets of five strings, names of photos or lines of letters "
        f"(got {repr(first)[:60]})"
    )
