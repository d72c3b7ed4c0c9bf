"""The digits that scikit-learn carries: 1,797 images of 8×8, so an experiment needs no download."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.learning.dataset import Dataset, Images
from edgefl.seeds import stream

TOP = 16
MEAN, STD = 0.3053, 0.3762
"""Of the whole set, as a share of the highest value."""


def load_digits(test_fraction: float, seed: int) -> Dataset:
    """The digits, with ``test_fraction`` of each class, drawn by ``seed``, held out for the test.

    >>> digits = load_digits(0.2, seed=0)
    >>> len(digits.train_x), len(digits.test_x), digits.input_shape, digits.train_x[:2].dtype
    (1438, 359, (1, 8, 8), dtype('float32'))
    """
    pixels, labels = _read()
    test = held_out(labels, test_fraction, seed)
    images = Images(pixels.reshape(-1, 1, 8, 8), top=TOP, mean=[MEAN], std=[STD])
    return Dataset(
        name="digits",
        train_x=images.take(np.flatnonzero(~test)),
        train_y=labels[~test],
        test_x=images.take(np.flatnonzero(test)),
        test_y=labels[test],
        classes=10,
        input_shape=(1, 8, 8),
    )


def held_out(labels: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which examples are the test: ``fraction`` of each class to the nearest, at least one of each.

    >>> held_out(np.array([0, 0, 0, 1, 1, 1]), 1 / 3, seed=0).sum()
    np.int64(2)
    """
    if not 0.0 < fraction < 1.0:
        raise ConfigError(f"data.test_fraction must be between 0 and 1 (got {fraction})")
    rng = stream(seed, "test-split")
    test = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        test[rng.permutation(members)[:count]] = True
    return test


def _read() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    # Importing scikit-learn would take a second, tens of megabytes and OpenMP into every forked client.
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            with gzip.open(file, "rt", encoding="ascii") as lines:
                table = np.loadtxt(lines, delimiter=",", dtype=np.float64)
            return table[:, :-1].astype(np.uint8), table[:, -1].astype(np.int64)
    if spec is None:
        raise ConfigError("data.name 'digits' needs scikit-learn, which carries it (got no scikit-learn)")
    from sklearn.datasets import load_digits as ask

    pixels, labels = ask(return_X_y=True)
    return np.asarray(pixels, np.uint8), np.asarray(labels, np.int64)
