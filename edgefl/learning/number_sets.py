"""A regression data set: scikit-learn's diabetes (442 patients, without a download).

Ten measurements per patient (age, sex, body mass index, blood pressure, six of blood serum); the target is
the progression of the disease after one year (Efron et al. 2004, "Least Angle Regression").
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.learning.dataset import Dataset
from edgefl.seeds import stream


def load_diabetes(test_fraction: float, seed: int) -> Dataset:
    """Load the patients; ``test_fraction`` of them, drawn by ``seed``, are test examples.

    Every column, including the target, is scaled to mean 0 and deviation 1 over the training part.

    >>> data = load_diabetes(0.2, seed=0)
    >>> data.train_x.shape, data.train_y.shape, len(data.test_y), data.classes
    ((354, 10), (354, 1), 88, None)
    """
    files = ("diabetes_data_raw.csv.gz", "diabetes_target.csv.gz")
    table = read_bundled_table("diabetes", *files, scaled=False)
    table = table[stream(seed, "test-split").permutation(len(table))]
    tests = min(max(1, round(test_fraction * len(table))), len(table) - 1)
    known = table[tests:]
    scaled = ((table - known.mean(0)) / known.std(0)).astype(np.float32)
    parts = ((scaled[rows, :-1], scaled[rows, -1:]) for rows in (slice(tests, None), slice(tests)))
    return Dataset.of("diabetes", parts, classes=None)


def read_bundled_table(name: str, *files: str, **options: Any) -> NDArray[np.float64]:
    """Read a table bundled with scikit-learn from its files; the targets are the last column.

    If the files are not found, scikit-learn's own function is called with ``options``.
    """
    # Importing scikit-learn would take a second, tens of megabytes and OpenMP into every forked client.
    spec = importlib.util.find_spec("sklearn")
    if spec is None:
        raise ConfigError(f"data.name {name!r} needs scikit-learn, which is not installed")
    for folder in spec.submodule_search_locations or []:
        paths = [Path(folder) / "datasets" / "data" / file for file in files]
        if all(path.is_file() for path in paths):
            return np.column_stack([_read(path) for path in paths])
    from sklearn import datasets

    return np.column_stack(getattr(datasets, f"load_{name}")(return_X_y=True, **options))


def _read(path: Path) -> NDArray[np.float64]:
    with gzip.open(path, "rt", encoding="ascii") as lines:
        return np.loadtxt((line.replace(",", " ") for line in lines), dtype=np.float64)
