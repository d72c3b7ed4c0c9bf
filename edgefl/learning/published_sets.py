"""Published data sets: digits and diabetes from scikit-learn, MNIST, FashionMNIST and CIFAR-10.

The digits are 1,797 images of 8×8 pixels. MNIST and FashionMNIST are published in the IDX format, gzipped or
not: a big-endian header (two zero bytes, the type 0x08 for uint8, the number of dimensions, each dimension as
a 32-bit number), followed by the bytes in row-major order (LeCun et al., yann.lecun.com/exdb/mnist).

CIFAR-10 (Krizhevsky 2009, cs.toronto.edu/~kriz/cifar.html) is read in its binary version, which consists of
records of one byte for the label and 3,072 bytes for the image, channel by channel.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError, as_config_error
from edgefl.experiment import Data
from edgefl.learning.dataset import Dataset, Images
from edgefl.seeds import stream

CLASSES = 10
"""Number of classes in each of these data sets except diabetes, whose targets are numbers."""

DIGITS_TOP = 16
DIGITS_MEAN, DIGITS_STD = 0.3053, 0.3762
"""Mean and standard deviation of the pixels in all digits, as fractions of `DIGITS_TOP`."""


def load_digits(spec: Data, seed: int) -> Dataset:
    """Load the digits; a fraction ``spec.test_fraction`` of each class, drawn with ``seed``, is the test set.

    ``spec.validation_fraction`` and ``spec.evaluate_on`` have the same effect as in `load_diabetes`.

    >>> digits = load_digits(Data(), seed=0)
    >>> len(digits.train_x), len(digits.test_x), digits.input_shape, digits.train_x[:2].dtype
    (1438, 359, (1, 8, 8), dtype('float32'))
    """
    table = read_bundled_table("digits", "digits.csv.gz")
    pixels, labels = table[:, :-1].astype(np.uint8), table[:, -1].astype(np.int64)
    images = Images(pixels.reshape(-1, 1, 8, 8), top=DIGITS_TOP, mean=[DIGITS_MEAN], std=[DIGITS_STD])
    return _split("digits", images, labels, CLASSES, spec, seed)


def _split(
    name: str, images: Images, labels: NDArray[np.int64], classes: int | None, spec: Data, seed: int
) -> Dataset:
    """Separate the test and validation examples; the validation examples are the same for every seed."""
    apart = np.zeros(len(labels), np.bool_)
    if spec.validation_fraction:
        apart = held_out(labels, spec.validation_fraction, 0, "validation")
    rest = np.flatnonzero(~apart)
    test = held_out(labels[rest], spec.test_fraction, seed)
    measured = np.flatnonzero(apart) if spec.evaluate_on == "validation" else rest[test]
    if not len(measured):
        key, share = "test", spec.test_fraction
        if spec.validation_fraction:
            key, share = "validation", spec.validation_fraction
        why = "leaves no example to test on (each class keeps one for training)"
        raise ConfigError(f"data.{key}_fraction: {share:g} {why}")
    return Dataset.of(name, ((images.take(rows), labels[rows]) for rows in (rest[~test], measured)), classes)


def held_out(
    labels: NDArray[np.int64], fraction: float, seed: int, purpose: str = "test-split"
) -> NDArray[np.bool_]:
    """Mark a ``fraction`` of each class, rounded to a whole number, as held out.

    If a class has two or more examples, at least one is marked and at least one is not.

    >>> held_out(np.array([0, 0, 0, 1, 1, 1]), 1 / 3, seed=0).sum()
    np.int64(2)
    """
    rng = stream(seed, purpose)
    test = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        test[rng.permutation(members)[:count]] = True
    return test


def redraw_split(dataset: Dataset, spec: Data, seed: int) -> Dataset:
    """Pool all images of a data set, and draw a fraction of each class with ``seed`` as test examples.

    The fraction is ``spec.test_fraction``. Raises `ConfigError` unless the examples are images with classes.
    """
    train, known = dataset.train_x, dataset.test_x
    if not (isinstance(train, Images) and isinstance(known, Images)) or dataset.labels is None:
        raise ConfigError(f"data.test_split: 'drawn' needs images with classes, got {dataset.name}")
    labels = np.concatenate([dataset.train_y, dataset.test_y])
    raw = np.concatenate([train.raw, known.raw])
    images = Images(raw, top=train.top, mean=train.mean, std=train.std)
    return _split(dataset.name, images, labels, dataset.classes, spec, seed)


MAX_BYTES = 1 << 31
MEAN_STD = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}
IDX_SPLITS = ("train", "t10k")


def find_idx(folder: Path) -> list[Path] | None:
    """Return the files of the training images, training labels, test images and test labels, in this order.

    Return None if one of the files is missing in ``folder``.
    """
    found = []
    for split in IDX_SPLITS:
        for stem in ("images-idx3", "labels-idx1"):
            names = [f"{split}-{stem}-ubyte", f"{split}-{stem.replace('-', '.')}-ubyte"]
            files = [folder / (name + end) for name in names for end in ("", ".gz")]
            file = next((file for file in files if file.is_file()), None)
            if file is None:
                return None
            found.append(file)
    return found


def load_idx(name: str, files: Sequence[Path]) -> Dataset:
    """Load the data set ``name`` from the files that `find_idx` returned.

    Raises `ConfigError` if a file is invalid.
    """
    mean, std = MEAN_STD[name]
    parts: list[tuple[Images, NDArray[np.int64]]] = []
    for images_file, labels_file in (files[:2], files[2:]):
        pixels, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
        if len(pixels) != len(labels):
            raise ConfigError(
                f"{labels_file}: {len(labels)} labels, but {images_file.name} has {len(pixels)} images"
            )
        if int(labels.max()) >= CLASSES:
            raise ConfigError(f"{labels_file}: labels must be in [0, {CLASSES}) (got {int(labels.max())})")
        parts.append((Images(pixels[:, None], top=255, mean=[mean], std=[std]), labels.astype(np.int64)))
    train, test = (_by(images.shape[2:]) for images, _ in parts)
    if train != test:
        raise ConfigError(f"{files[2]}: images are {test}, but those of {files[0].name} are {train}")
    return Dataset.of(name, parts, CLASSES)


def read_idx(file: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read a uint8 array with this number of dimensions from an IDX file, or raise `ConfigError`."""
    readable = as_config_error(f"{file}: cannot be read", OSError, EOFError, zlib.error)
    with readable, gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        return _parse_idx(file, stream, dimensions)


def _parse_idx(file: Path, stream: gzip.GzipFile | IO[bytes], dimensions: int) -> NDArray[np.uint8]:
    head = stream.read(4 + 4 * dimensions)
    magic = bytes([0, 0, 8, dimensions])
    if head[:4] != magic:
        raise ConfigError(f"{file}: must be an IDX file and start with {magic.hex()} (got {head[:4].hex()})")
    if len(head) != 4 + 4 * dimensions:
        raise ConfigError(f"{file} has a truncated header ({len(head)} bytes)")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    size = math.prod(shape)
    if not 0 < size <= MAX_BYTES:
        raise ConfigError(f"{file}: must hold 1 to {MAX_BYTES} bytes (its header declares {_by(shape)})")
    body = stream.read(size)
    if len(body) != size:
        raise ConfigError(f"{file} is truncated: {len(body)} of the declared {_by(shape)} = {size} bytes")
    if stream.read(1):
        raise ConfigError(f"{file} has extra bytes after the {_by(shape)} = {size} declared in its header")
    return np.frombuffer(body, np.uint8).reshape(shape)


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


CIFAR_SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2470, 0.2435, 0.2616)
BATCHES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_BATCH = "test_batch.bin"

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


def find_cifar(folder: Path) -> list[Path] | None:
    """Return the files of the training batches in ``folder``, followed by the file of the test batch.

    Return None if the test batch or all training batches are missing.
    """
    train = [folder / name for name in BATCHES if (folder / name).is_file()]
    test = folder / TEST_BATCH
    return [*train, test] if train and test.is_file() else None


def load_cifar(files: Sequence[Path]) -> Dataset:
    """Load CIFAR-10 from the files that `find_cifar` returned. Raises `ConfigError` if a file is invalid."""
    *train, test = map(_read_batch, files)
    parts = []
    for batches in (train, [test]):
        pixels, labels = map(np.concatenate, zip(*batches, strict=True))
        parts.append((Images(pixels, top=255, mean=CIFAR_MEAN, std=CIFAR_STD), labels))
    return Dataset.of("cifar-10", parts, CLASSES)


def _read_batch(file: Path) -> Batch:
    with as_config_error(f"{file}: cannot be read", OSError):
        raw = np.fromfile(file, np.uint8)
    if raw.size == 0 or raw.size % RECORD_BYTES:
        raise ConfigError(f"{file}: must be whole records of {RECORD_BYTES} bytes (got {raw.size} bytes)")
    records = raw.reshape(-1, RECORD_BYTES)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= CLASSES:
        raise ConfigError(f"{file}: labels must be in [0, {CLASSES}) (got {labels.max()})")
    return records[:, 1:].reshape(-1, *CIFAR_SHAPE), labels


def load_diabetes(spec: Data, seed: int) -> Dataset:
    """Load the diabetes data; a fraction ``spec.test_fraction``, drawn with ``seed``, is used for testing.

    Before that, a fraction ``spec.validation_fraction`` is drawn, independently of ``seed``. It is not used
    for training; if ``spec.evaluate_on`` is "validation", it replaces the test examples.

    Each example is one of 442 patients, described by ten numbers (age, sex, body mass index, blood pressure
    and six measurements of blood serum); the target is the progression of the disease after a year (Efron et
    al. 2004, "Least Angle Regression"). Every column, including the target, is scaled to a mean of 0 and a
    standard deviation of 1 over the training part.

    >>> data = load_diabetes(Data(), seed=0)
    >>> data.train_x.shape, data.train_y.shape, len(data.test_y), data.classes
    ((354, 10), (354, 1), 88, None)
    """
    files = ("diabetes_data_raw.csv.gz", "diabetes_target.csv.gz")
    table = read_bundled_table("diabetes", *files, scaled=False)
    held, order = 0, np.arange(len(table))
    if spec.validation_fraction:
        held = min(max(1, round(spec.validation_fraction * len(table))), len(table) - 2)
        order = stream(0, "validation").permutation(len(table))
    rest = np.sort(order[held:])
    rest = rest[stream(seed, "test-split").permutation(len(rest))]
    tests = min(max(1, round(spec.test_fraction * len(rest))), len(rest) - 1)
    measured = order[:held] if held and spec.evaluate_on == "validation" else rest[:tests]
    known = table[rest[tests:]]
    spread = np.where(known.std(0) > 0, known.std(0), 1.0)  # a few patients may all be of one sex
    scaled = ((table - known.mean(0)) / spread).astype(np.float32)
    parts = ((scaled[rows, :-1], scaled[rows, -1:]) for rows in (rest[tests:], measured))
    return Dataset.of("diabetes", parts, classes=None)


def read_bundled_table(name: str, *files: str, **options: Any) -> NDArray[np.float64]:
    """Read the files of a table that is bundled with scikit-learn; the last column contains the targets.

    If the files are not found, scikit-learn's own function is called with ``options``.
    """
    # Importing scikit-learn takes a second, and adds tens of megabytes and OpenMP to every forked client.
    spec = importlib.util.find_spec("sklearn")
    if spec is None:
        raise ConfigError(f"data.name {name!r} needs scikit-learn, which is not installed")
    for folder in spec.submodule_search_locations or []:
        paths = [Path(folder) / "datasets" / "data" / file for file in files]
        if all(path.is_file() for path in paths):
            return np.column_stack([_read(path) for path in paths])
    from sklearn import datasets

    return np.column_stack(getattr(datasets, f"load_{name}")(return_X_y=True, **options))


@functools.cache
def _read(path: Path) -> NDArray[np.float64]:
    with gzip.open(path, "rt", encoding="ascii") as lines:
        return np.loadtxt((line.replace(",", " ") for line in lines), dtype=np.float64)
