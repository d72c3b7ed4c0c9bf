from __future__ import annotations

import pickle
import struct
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


def python2_pickle(table: np.ndarray) -> bytes:
    """A batch byte for byte as Python 2's cPickle wrote it: protocol 2, byte strings, numpy.core."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    pixels = np.ascontiguousarray(table[:, 1:]).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03(K\x01"
        + (b"J" + struct.pack("<i", len(table)) + b"M\x00\x0c\x86")
        + b"cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05(K\x03U\x01|NNN"
        + b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + (b"\x89T" + struct.pack("<I", len(pixels)) + pixels + b"tb")
    )
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in table[:, 0].tolist()) + b"e"
    names = b"](" + text(b"a_s_000001.png") * len(table) + b"e"
    return (
        (b"\x80\x02}q\x00(" + text(b"batch_label") + text(b"training batch 1 of 5"))
        + (text(b"labels") + labels + text(b"data") + array + text(b"filenames") + names)
        + b"u."
    )


def python3_pickle(table: np.ndarray, protocol: int = 2) -> bytes:
    data = np.ascontiguousarray(table[:, 1:])
    return pickle.dumps({b"data": data, b"labels": table[:, 0].tolist()}, protocol=protocol)


def write(
    folder: Path, kind: str, batches: tuple[int, ...] = (1, 2, 3, 4, 5)
) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    encode = {"binary": np.ndarray.tobytes, "python2": python2_pickle, "python3": python3_pickle}[kind]
    tables = {f"data_batch_{number}": records(4, number) for number in batches} | {
        "test_batch": records(3, 99)
    }
    for name, table in tables.items():
        (folder / (name + ".bin" * (kind == "binary"))).write_bytes(encode(table))
    *train, test = tables.values()
    return np.concatenate(train), test


def cifar(folder: Path):
    return load_data(Data(name="cifar-10", path=str(folder)), seed=0)


@pytest.mark.parametrize("kind", ["binary", "python2", "python3"])
@pytest.mark.parametrize("batches", [(1, 2, 3, 4, 5), (1, 2), (4,)])
def test_every_format_gives_the_same_images(tmp_path, kind, batches):
    train, test = write(tmp_path, kind, batches)
    data = cifar(tmp_path)
    for images, labels, table in ((data.train_x, data.train_y, train), (data.test_x, data.test_y, test)):
        np.testing.assert_array_equal(images.raw.reshape(-1, 3072), table[:, 1:])
        np.testing.assert_array_equal(labels, table[:, 0])
    assert (data.classes, data.input_shape, data.name) == (10, (3, 32, 32), "cifar-10")
    assert data.train_x[:2].dtype == np.float32
    assert data.train_y.dtype == np.int64


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("cifar-10-batches-bin", "binary"), ("cifar-10-batches-py", "python3"), (".", "python2")],
)
def test_the_usual_folders_are_found(tmp_path, monkeypatch, folder, kind):
    write(tmp_path / folder, kind)
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
def test_bad_binary_files_are_one_line(tmp_path, content, message):
    write(tmp_path, "binary")
    (tmp_path / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(ConfigError, match="data_batch_3.bin: " + message):
        cifar(tmp_path)


@pytest.mark.parametrize("missing", [["test_batch"], [f"data_batch_{n}" for n in range(1, 6)]])
def test_a_set_without_its_test_or_any_training_batch_is_missing(tmp_path, missing):
    write(tmp_path, "python3")
    for name in missing:
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="'cifar-10': files not found; need test_batch"):
        cifar(tmp_path)


GOOD = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "must be a pickled dictionary .got list."),
        ({"labels": [1, 2]}, "'data' must be uint8 of shape"),
        ({"data": GOOD[:, :9], "labels": [1, 2]}, "'data' must be uint8 of shape"),
        ({"data": GOOD.astype(np.float32), "labels": [1, 2]}, "arrays must be uint8 .got 'f4'."),
        *(({"data": GOOD, "labels": odd}, "'labels' must be a list of 2") for odd in ([1], [1, "2"])),
        *(({"data": GOOD, "labels": [1, odd]}, "labels must be in .0, 10.") for odd in (10, -1, 1 << 90)),
        ({"data": GOOD[:0], "labels": []}, "labels must be in .0, 10., at least one"),
    ],
)
def test_bad_python_files_are_one_line(tmp_path, value, message):
    write(tmp_path, "python3")
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps(value, protocol=2))
    with pytest.raises(ConfigError, match="data_batch_2: .*" + message) as caught:
        cifar(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("data_dir")
def test_real_cifar():
    data = load_data(Data(name="cifar-10", max_examples=1000), seed=0)
    assert (len(data.train_x), len(data.test_x), data.input_shape) == (1000, 10_000, (3, 32, 32))
    assert abs(float(data.train_x[:].mean())) < 0.1


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (self.path, "executed"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_executes_nothing(tmp_path, protocol):
    target = tmp_path / "target"
    content = pickle.dumps({"data": Evil(target), "labels": [1]}, protocol=protocol)
    write(tmp_path, "python3")
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(ConfigError, match="test_batch: cannot be read: not plain data: "):
        cifar(tmp_path)
    assert not target.exists()
    pickle.loads(content)
    assert target.exists(), "the pickle was harmless: this test shows nothing"
