"""Tests of CIFAR-10's binary files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.experiment import Data
from edgefl.learning.data import load_data

RECORD = 3073


def records(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 256, (count, RECORD), dtype=np.uint8)
    table[:, 0] %= 10
    return table


def write(folder: Path, batches: tuple[int, ...] = (1, 2, 3, 4, 5)) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    tables = {f"data_batch_{number}": records(4, number) for number in batches} | {
        "test_batch": records(3, 99)
    }
    for name, table in tables.items():
        (folder / f"{name}.bin").write_bytes(table.tobytes())
    *train, test = tables.values()
    return np.concatenate(train), test


def cifar(folder: Path):
    return load_data(Data(name="cifar-10", path=str(folder)), seed=0)


@pytest.mark.parametrize("batches", [(1, 2, 3, 4, 5), (1, 2), (4,)])
def test_images_and_labels_have_the_bytes_of_the_files(tmp_path, batches):
    train, test = write(tmp_path, batches)
    data = cifar(tmp_path)
    for images, labels, table in ((data.train_x, data.train_y, train), (data.test_x, data.test_y, test)):
        np.testing.assert_array_equal(images.raw.reshape(-1, 3072), table[:, 1:])
        np.testing.assert_array_equal(labels, table[:, 0])
    assert (data.classes, data.input_shape, data.name) == (10, (3, 32, 32), "cifar-10")
    assert data.train_x[:2].dtype == np.float32
    assert data.train_y.dtype == np.int64


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "."])
def test_data_are_found_in_the_usual_folders(tmp_path, monkeypatch, folder):
    write(tmp_path / folder)
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    assert len(load_data(Data(name="cifar-10"), seed=0).train_y) == 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"must be whole records of 3073 bytes \(got 0 bytes\)"),
        (bytes(RECORD - 1), r"must be whole records of 3073 bytes \(got 3072 bytes\)"),
        (bytes(RECORD) + b"\x0a" + bytes(RECORD - 1), r"labels must be in \[0, 10\) \(got 10\)"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, content, message):
    write(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(ConfigError, match="data_batch_3.bin: " + message):
        cifar(tmp_path)


@pytest.mark.parametrize("missing", [["test_batch.bin"], [f"data_batch_{n}.bin" for n in range(1, 6)]])
def test_files_are_missing_without_the_test_batch_or_without_any_training_batch(tmp_path, missing):
    write(tmp_path)
    for name in missing:
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=r"'cifar-10': files not found .*; expected test_batch"):
        cifar(tmp_path)


@pytest.mark.usefixtures("data_dir")
def test_real_cifar():
    data = load_data(Data(name="cifar-10", max_examples=1000), seed=0)
    assert (len(data.train_x), len(data.test_x), data.input_shape) == (1000, 10_000, (3, 32, 32))
    assert abs(float(data.train_x[:].mean())) < 0.1
