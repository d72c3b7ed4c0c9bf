"""MNIST and FashionMNIST in the IDX format of their publishers, gzipped or not.

A file is a big-endian header (two zero bytes, type 0x08 for uint8, the number of dimensions, each dimension
as a 32-bit number) and then the bytes, row-major (LeCun et al., yann.lecun.com/exdb/mnist).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.learning.dataset import Dataset, Images

CLASSES = 10
MAX_BYTES = 1 << 31
MEAN_STD = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}
SPLITS = ("train", "t10k")


def find_idx(folder: Path) -> list[Path] | None:
    """The four files (training images and labels, test images and labels) if ``folder`` has them all."""
    found = []
    for split in SPLITS:
        for stem in ("images-idx3", "labels-idx1"):
            names = [f"{split}-{stem}-ubyte", f"{split}-{stem.replace('-', '.')}-ubyte"]
            files = [folder / (name + end) for name in names for end in ("", ".gz")]
            file = next((file for file in files if file.is_file()), None)
            if file is None:
                return None
            found.append(file)
    return found


def load_idx(name: str, files: Sequence[Path]) -> Dataset:
    """The data set ``name`` from the four files that `find_idx` gives; raises `ConfigError` for a bad one."""
    mean, std = MEAN_STD[name]
    parts: list[tuple[Images, NDArray[np.int64]]] = []
    for images_file, labels_file in (files[:2], files[2:]):
        pixels, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
        if len(pixels) != len(labels):
            raise ConfigError(
                f"{labels_file}: {len(labels)} labels for the {len(pixels)} images of {images_file.name}"
            )
        if int(labels.max()) >= CLASSES:
            raise ConfigError(f"{labels_file}: labels must be in [0, {CLASSES}) (got {int(labels.max())})")
        parts.append((Images(pixels[:, None], top=255, mean=[mean], std=[std]), labels.astype(np.int64)))
    (train_x, train_y), (test_x, test_y) = parts
    if train_x.shape[1:] != test_x.shape[1:]:
        raise ConfigError(
            f"{files[2]}: images of {_by(test_x.shape[2:])}, but {files[0].name} has {_by(train_x.shape[2:])}"
        )
    return Dataset(
        name=name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        classes=CLASSES,
        input_shape=train_x.shape[1:],
    )


def read_idx(file: Path, dimensions: int) -> NDArray[np.uint8]:
    """The uint8 array of so many dimensions in an IDX file; raises `ConfigError` for another."""
    try:
        with _open(file) as stream:
            return _parse(file, stream, dimensions)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None


def _open(file: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def _parse(file: Path, stream: gzip.GzipFile | IO[bytes], dimensions: int) -> NDArray[np.uint8]:
    head = stream.read(4 + 4 * dimensions)
    magic = bytes([0, 0, 8, dimensions])
    if head[:4] != magic:
        raise ConfigError(f"{file}: an IDX file of bytes starts with {magic.hex()} (got {head[:4].hex()})")
    if len(head) != 4 + 4 * dimensions:
        raise ConfigError(f"{file}: cut short in its header ({len(head)} bytes)")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    size = math.prod(shape)
    if not 0 < size <= MAX_BYTES:
        raise ConfigError(f"{file}: must hold 1 to {MAX_BYTES} bytes (its header says {_by(shape)})")
    body = stream.read(size)
    if len(body) != size:
        raise ConfigError(f"{file}: cut short: {len(body)} bytes where its header says {_by(shape)} = {size}")
    if stream.read(1):
        raise ConfigError(f"{file}: bytes left over after the {_by(shape)} = {size} that its header says")
    return np.frombuffer(body, np.uint8).reshape(shape)


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
