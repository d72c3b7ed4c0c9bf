"""Images with classes from the Hugging Face Hub: ``data.name = "hf:NAME"`` or ``"hf:NAME:CONFIG"``.

A separate process downloads the data set with the package ``datasets`` and converts it to a file of arrays in
the cache folder, because the threads of that package would not survive the fork of clients. Later runs read
the file and need neither the network nor the package. ``datasets`` must be version 4 or newer, because older
versions run code from the data set.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from edgefl.errors import ConfigError
from edgefl.files import cache_folder, write_bytes
from edgefl.learning.array_set import load_arrays
from edgefl.learning.dataset import Dataset, Images
from edgefl.learning.download import offline
from edgefl.learning.own_process import end, run_module
from edgefl.terminal import say

PREFIX = "hf:"
LABELS = ("label", "labels", "fine_label")
"""Possible names of the column that contains the classes."""
TESTS = ("test", "validation", "valid")
"""Possible names of the split on which the model is evaluated."""


def load_from_hub(name: str) -> Dataset:
    """Load the data set ``name``, which starts with `PREFIX`; pixels are standardised per channel.

    If the data set has no test split, the test part is empty. Raises `ConfigError` if the data set cannot be
    downloaded, or does not consist of images with classes.
    """
    file = _file_of(name)
    if not file.is_file():
        say(f"edgefl: fetching {name} into {file}", err=True)
        quiet = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        network = {"HF_HUB_OFFLINE": "1"} if offline() else {}
        run_module(__name__, name, str(file), about=f"data.name {name!r}", environment=quiet | network)
    found, metadata = load_arrays(file)
    means, stds = _moments(found["train_x"])
    parts = (
        (Images(found[f"{part}_x"], top=255, mean=means, std=stds), found[f"{part}_y"].astype(np.int64))
        for part in ("train", "test")
    )
    return Dataset.of(name, parts, int(metadata["classes"]))


def _file_of(name: str) -> Path:
    """Return the path of a data set's cache file, which differs for each name and each local folder."""
    path, colon, configuration = name.removeprefix(PREFIX).partition(":")
    if not path:
        raise ConfigError(f"data.name {name!r} has no name after {PREFIX!r}; expected e.g. 'hf:cifar10'")
    identity = f"{os.path.realpath(path) if os.path.isdir(path) else path}{colon}{configuration}"
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", name.removeprefix(PREFIX))[-80:]
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cache_folder() / "data" / "hf" / f"{words}-{digest}.safetensors"


def _moments(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Return each channel's mean and standard deviation; a standard deviation of 0 is replaced by 1."""
    values, means, stds = np.arange(256) / 255, [], []
    for channel in range(images.shape[1]):
        rows = (images[start : start + 1000, channel].ravel() for start in range(0, len(images), 1000))
        counts = sum(np.bincount(pixels, minlength=256) for pixels in rows)
        means.append(float(np.average(values, weights=counts)))
        stds.append(float(np.sqrt(np.average((values - means[-1]) ** 2, weights=counts))) or 1.0)
    return means, stds


def convert(splits: Mapping[str, Any]) -> bytes:
    """Return the content of the cache file.

    Raises `ConfigError` if the splits contain no images with classes.
    """
    if "train" not in splits:
        raise ConfigError(f"must have a 'train' split, got {', '.join(splits)}")
    features = splits["train"].features
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    classes = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    chosen = classes if len(classes) == 1 else [name for name in LABELS if name in classes][:1]
    if len(images) != 1 or not chosen:
        columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise ConfigError(f"must have one column of images and one of classes, got {columns}")
    test = next((name for name in TESTS if name in splits), None)
    arrays: dict[str, NDArray[Any]] = {}
    for part, split in (("train", splits["train"]), ("test", splits[test] if test else None)):
        pictures = [] if split is None else split[images[0]]
        labels = [] if split is None else split[chosen[0]]
        if any(label is None or label < 0 for label in labels):
            raise ConfigError(f"split {part!r} has examples without a class")
        arrays[f"{part}_x"] = _pixels(pictures, arrays.get("train_x"))
        arrays[f"{part}_y"] = np.array(labels, np.int64)
    return save(arrays, {"classes": str(features[chosen[0]].num_classes)})


def _pixels(pictures: Sequence[Any], like: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Return images as uint8 of shape (n, channels, height, width).

    All pictures must have the size of the images in ``like``, or of the first picture if ``like`` is None.
    Raises `ConfigError` if a picture has another size.
    """
    if like is None:
        first = pictures[0]
        shape = (1 if first.mode in ("1", "L") else 3, first.height, first.width)
    else:
        shape = like.shape[1:]
    mode = "L" if shape[0] == 1 else "RGB"
    found = np.empty((len(pictures), *shape), np.uint8)
    for row, picture in enumerate(pictures):
        if (picture.height, picture.width) != shape[1:]:
            got = f"{picture.height}×{picture.width} and {shape[1]}×{shape[2]}"
            raise ConfigError(f"images must all have the same size, got {got}")
        pixels = np.asarray(picture.convert(mode), np.uint8)
        found[row] = pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
    return found


def fetch(name: str, file: Path) -> None:
    """Download the data set ``name`` and write it to ``file``.

    Raises `ConfigError`, and any errors that the package itself raises.
    """
    try:
        import datasets
    except ModuleNotFoundError:
        raise ConfigError("the package datasets is not installed: pip install 'edgefl[hf]'") from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ConfigError(f"needs the package datasets 4 or newer, got {datasets.__version__}")
    path, _, configuration = name.removeprefix(PREFIX).partition(":")
    write_bytes(file, convert(datasets.load_dataset(path, configuration or None)))


if __name__ == "__main__":
    sys.exit(end(lambda: fetch(sys.argv[1], Path(sys.argv[2]))))
