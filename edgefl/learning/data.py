"""The data sets by name, and a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgefl.errors import ConfigError, unknown
from edgefl.experiment import Data
from edgefl.learning.dataset import Dataset, Images
from edgefl.learning.digits import load_digits

__all__ = ["Dataset", "Images", "load_data"]

NAMES = ("digits",)


def load_data(spec: Data, seed: int, search_path: Sequence[Path] = ()) -> Dataset:
    """The data set that the experiment's ``[data]`` names."""
    if spec.name == "digits":
        return load_digits(spec.test_fraction, seed)
    raise ConfigError(f"data.name: {unknown('data set', spec.name, NAMES)}")
