"""CIFAR-10 in its publisher's binary and Python formats (Krizhevsky 2009, cs.toronto.edu/~kriz/cifar.html).

Binary: records of one label byte and 3,072 bytes, channel by channel. Python: a pickled dictionary with
``data`` (uint8, n × 3072) and ``labels``, read as data by `edgefl.plain_pickle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.learning.dataset import Dataset, Images
from edgefl.plain_pickle import PickleError, read_plain_pickle

CLASSES = 10
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


def find_cifar(folder: Path) -> list[Path] | None:
    """The training batches that ``folder`` has (at least one) and, last, its test batch."""
    for end in (".bin", ""):
        train = [folder / (name + end) for name in BATCHES if (folder / (name + end)).is_file()]
        test = folder / (TEST + end)
        if train and test.is_file():
            return [*train, test]
    return None


def load_cifar(files: Sequence[Path]) -> Dataset:
    """CIFAR-10 from the files that `find_cifar` gives; raises `ConfigError` for a bad one."""
    *train, test = [_binary(file) if file.suffix == ".bin" else _python(file) for file in files]
    return Dataset(
        name="cifar-10",
        train_x=Images(np.concatenate([pixels for pixels, _ in train]), top=255, mean=MEAN, std=STD),
        train_y=np.concatenate([labels for _, labels in train]),
        test_x=Images(np.ascontiguousarray(test[0]), top=255, mean=MEAN, std=STD),
        test_y=test[1],
        classes=CLASSES,
        input_shape=SHAPE,
    )


def _binary(file: Path) -> Batch:
    try:
        raw = np.fromfile(file, np.uint8)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if raw.size == 0 or raw.size % RECORD_BYTES:
        raise ConfigError(f"{file}: must be whole records of {RECORD_BYTES} bytes (got {raw.size} bytes)")
    records = raw.reshape(-1, RECORD_BYTES)
    return _checked(file, records[:, 1:], records[:, 0])


def _python(file: Path) -> Batch:
    try:
        table = read_plain_pickle(file.read_bytes())
    except (OSError, PickleError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: must be a pickled dictionary (got {type(table).__name__})")
    table = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in table.items()}
    data, labels = table.get("data"), table.get("labels")
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != RECORD_BYTES - 1:
        raise ConfigError(f"{file}: 'data' must be uint8 of shape (n, {RECORD_BYTES - 1})")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(y) is int for y in labels):
        raise ConfigError(f"{file}: 'labels' must be a list of {len(data)} whole numbers")
    if not labels or not all(0 <= label < CLASSES for label in labels):
        raise ConfigError(f"{file}: labels must be in [0, {CLASSES}), at least one")
    return _checked(file, data, np.array(labels))


def _checked(file: Path, pixels: NDArray[np.uint8], labels: NDArray[np.integer]) -> Batch:
    if int(labels.max()) >= CLASSES:
        raise ConfigError(f"{file}: labels must be in [0, {CLASSES}) (got {int(labels.max())})")
    return pixels.reshape(-1, *SHAPE), labels.astype(np.int64)
