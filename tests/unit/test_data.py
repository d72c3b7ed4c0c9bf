"""Tests of data sets: digits, IDX files, a user's data, and the one-line errors for invalid data."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from edgefl.errors import ConfigError
from edgefl.experiment import Data
from edgefl.learning import data
from edgefl.learning.data import DEBIAN, Dataset, Images, load_data
from edgefl.learning.published_sets import held_out

STEMS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, *, end: str = "-ubyte", train: int = 20, test: int = 10) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = []
    for count in (train, test):
        arrays += [
            rng.integers(0, 256, (count, 28, 28), dtype=np.uint8),
            rng.integers(0, 10, count, dtype=np.uint8),
        ]
    folder.mkdir(parents=True, exist_ok=True)
    for stem, array in zip(STEMS, arrays, strict=True):
        content = idx(array)
        (folder / (stem + end)).write_bytes(gzip.compress(content) if end.endswith(".gz") else content)
    return arrays


@pytest.fixture
def no_other_data(monkeypatch, tmp_path):
    """Hide this machine's data sets; return the temporary folder."""
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("edgefl.learning.data.DEBIAN", tmp_path / "debian")
    return tmp_path


def mnist(folder):
    return load_data(Data(name="mnist", path=str(folder)), seed=0)


def test_digits_have_1797_examples_and_each_class_is_split_in_the_same_proportion():
    data = load_data(Data(test_fraction=0.2), seed=3)
    assert data.train_x[:].shape[1:] == data.input_shape == (1, 8, 8)
    assert (data.train_x[:].dtype, data.train_y.dtype) == (np.float32, np.int64)
    share = np.bincount(data.test_y) / (np.bincount(data.test_y) + np.bincount(data.train_y))
    assert np.abs(share - 0.2).max() < 0.005
    everything = np.concatenate([data.train_x[:], data.test_x[:]])
    assert len(everything) == len(data.train_y) + len(data.test_y) == 1797
    assert abs(float(everything.mean())) < 1e-3
    assert abs(float(everything.std()) - 1) < 1e-3
    pixels, labels = load_digits(return_X_y=True)
    test = held_out(labels.astype(np.int64), 0.2, seed=3)
    np.testing.assert_array_equal(data.test_x.raw.reshape(-1, 64), pixels[test])
    np.testing.assert_array_equal(data.test_y, labels[test])


def test_max_examples_keeps_a_random_part_of_the_training_examples_set_by_the_seed():
    whole, again, other = (load_data(Data(), seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(whole.test_x[:], again.test_x[:])
    assert (whole.test_x[:] != other.test_x[:]).any()
    few, same = (load_data(Data(max_examples=50), seed=0) for _ in range(2))
    assert len(few.train_x) == len(few.train_y) == 50
    assert len(few.test_x) == len(whole.test_x)
    np.testing.assert_array_equal(few.train_x[:], same.train_x[:])
    rows = {row.tobytes(): label for row, label in zip(whole.train_x[:], whole.train_y, strict=True)}
    assert [rows[row.tobytes()] for row in few.train_x[:]] == few.train_y.tolist()
    assert len(load_data(Data(max_examples=10_000), seed=0).train_y) == len(whole.train_y)


def test_images_are_normalised_by_channel():
    raw = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 2), dtype=np.uint8)
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    images = Images(raw, top=255, mean=mean, std=std)
    expected = (raw / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    np.testing.assert_allclose(images[np.array([4, 1, 1])], expected[[4, 1, 1]], atol=2e-6)
    np.testing.assert_array_equal(images[1:3], images[:][1:3])
    np.testing.assert_array_equal(images.take(np.array([2, 0]))[:], images[np.array([2, 0])])
    assert images[:1].dtype == np.float32
    assert len(images) == 5


@pytest.mark.parametrize(
    "raw", [np.zeros((2, 1, 3, 3), np.float32), np.zeros((2, 3), np.uint8), np.zeros((2, 3, 4, 4), np.uint8)]
)
def test_images_of_another_type_or_shape_are_refused(raw):
    with pytest.raises(ValueError, match=r"raw must be uint8 of shape \(n, 1, height, width\)"):
        Images(raw, top=255, mean=[0.0], std=[1.0])


@pytest.mark.parametrize("end", ["-ubyte", "-ubyte.gz", ".idx"])
def test_plain_and_gzipped_idx_files_are_read(tmp_path, end):
    arrays = write_mnist(tmp_path, end="-ubyte.gz" if end == "-ubyte.gz" else "-ubyte")
    if end == ".idx":
        for stem in STEMS:
            (tmp_path / f"{stem}-ubyte").rename(tmp_path / (stem.replace("-idx", ".idx") + "-ubyte"))
    data = mnist(tmp_path)
    found = (data.train_x.raw[:, 0], data.train_y, data.test_x.raw[:, 0], data.test_y)
    for one, written in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(one, written)
    assert (data.classes, data.input_shape, data.name) == (10, (1, 28, 28), "mnist")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (0, lambda c: c[:-1], "train-images.* is truncated: 15679 of the declared 20×28×28 = 15680 bytes"),
        (0, lambda c: c + b"x", "extra bytes after the 20×28×28 = 15680"),
        (0, lambda c: b"\0\0\x0d\x03" + c[4:], r"start with 00000803 \(got 00000d03\)"),
        (1, lambda c: b"\0\0\x08\x03" + c[4:], r"start with 00000801 \(got 00000803\)"),
        (0, lambda c: c[:9], r"has a truncated header \(9 bytes\)"),
        (2, lambda _: b"", r"start with 00000803 \(got \)"),
        (0, lambda c: c[:4] + b"\xff" * 12, "must hold 1 to 2147483648 bytes"),
        (3, lambda c: c[:4] + b"\0\0\0\0", "must hold 1 to"),
        (1, lambda _: idx(np.zeros(19, np.uint8)), "19 labels, but train-images.* has 20 images"),
        (3, lambda c: c[:-1] + b"\x0a", r"t10k-labels.*: labels must be in \[0, 10\) \(got 10\)"),
        (2, lambda _: idx(np.zeros((10, 8, 8), np.uint8)), "but those of train-images.* are 28×28"),
    ],
)
@pytest.mark.parametrize("end", ["-ubyte", "-ubyte.gz"])
def test_an_invalid_idx_file_gives_a_one_line_error(tmp_path, file, change, message, end):
    write_mnist(tmp_path, end=end)
    path = tmp_path / (STEMS[file] + end)
    pack, unpack = (gzip.compress, gzip.decompress) if end.endswith(".gz") else (bytes, bytes)
    path.write_bytes(pack(change(unpack(path.read_bytes()))))
    with pytest.raises(ConfigError, match=message) as caught:
        mnist(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-1], lambda c: b"not gzip", lambda c: c[:40] + b"\xff" * 40 + c[80:]]
)
def test_a_damaged_gzip_file_is_refused(tmp_path, damage):
    write_mnist(tmp_path, end="-ubyte.gz")
    path = tmp_path / (STEMS[0] + "-ubyte.gz")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte.gz: cannot be read|starts with"):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        *(("mnist", folder) for folder in ("mnist", "MNIST/raw", ".")),
        *(("fashion-mnist", folder) for folder in ("fashion-mnist", "FashionMNIST/raw")),
    ],
)
@pytest.mark.parametrize("way", ["path", "environment", "cache", "debian"])
def test_data_are_found_in_the_usual_folders(no_other_data, monkeypatch, name, folder, way):
    root = no_other_data / {"cache": "cache/edgefl/data", "debian": "debian"}.get(way, "somewhere")
    write_mnist(root / folder)
    if way == "environment":
        monkeypatch.setenv("EDGEFL_DATA", str(root))
    spec = Data(name=name, path=str(root) if way == "path" else None)
    assert len(load_data(spec, seed=0).train_y) == 20


def test_a_relative_path_is_relative_to_the_experiments_folder(no_other_data, monkeypatch):
    write_mnist(no_other_data / "experiment" / "files", train=7)
    write_mnist(no_other_data / "here" / "files", train=8)
    monkeypatch.chdir(no_other_data / "here")
    spec = Data(name="mnist", path="files")
    assert len(load_data(spec, 0, [no_other_data / "experiment"]).train_y) == 7
    assert len(load_data(spec, 0).train_y) == 8


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar-10"])
def test_an_error_names_the_missing_files_and_the_searched_folders(no_other_data, monkeypatch, name):
    monkeypatch.setenv("EDGEFL_DATA", str(no_other_data / "nothing"))
    with pytest.raises(ConfigError) as caught:
        load_data(Data(name=name), seed=0)
    message = str(caught.value)
    assert "\n" not in message
    file = "test_batch.bin" if name == "cifar-10" else "t10k-labels-idx1-ubyte"
    found = f"data.name {name!r}: files not found and not downloaded, because EDGEFL_DATA is set; expected "
    for said in (found, file, str(no_other_data / "nothing"), "set data.path or EDGEFL_DATA"):
        assert said in message


@pytest.mark.parametrize("name", ["digits", "diabetes", "hf:cifar10"])
def test_a_path_for_data_without_files_is_refused(name):
    """Regression: without ``data.name``, a run ignored ``data.path`` and trained on the digits."""
    with pytest.raises(ConfigError, match=f"^data.path: has no effect with data.name = '{name}'; set "):
        load_data(Data(name=name, path="/files"), seed=0)


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match="data set 'minst' not found; did you mean 'mnist'"):
        load_data(Data(name="minst"), seed=0)


def test_without_a_home_folder_data_need_a_path(no_other_data, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(ConfigError, match=r"^no home folder is known: set HOME or XDG_CACHE_HOME$"):
        load_data(Data(name="mnist"), seed=0)
    write_mnist(no_other_data)
    assert len(load_data(Data(name="mnist", path=str(no_other_data)), seed=0).train_y) == 20


@pytest.mark.parametrize("path", [None, "~no-such-user/mnist"])
def test_the_home_folder_of_an_unknown_user_does_not_exist(no_other_data, monkeypatch, path):
    monkeypatch.setenv("EDGEFL_DATA", "~no-such-user/mnist")
    with pytest.raises(ConfigError, match=r"files not found .* searched .*~no-such-user/mnist"):
        load_data(Data(name="mnist", path=path), seed=0)


USERS_MODULE = """
import numpy as np
from edgefl.learning.data import Dataset, Images

def made(y, classes, owners=None):
    x, y = np.zeros((3, 2), np.float32), np.array(y)
    parts = {{"train_x": x, "train_y": y, "test_x": x, "test_y": y}}
    return Dataset(name="mine", **parts, classes=classes, input_shape=(2,), owners=owners)

def load(spec, seed):
    x = np.ones((3, 2))
    return {}
"""


@pytest.fixture
def users(tmp_path):
    """Return a function that loads a user's data set, whose loader returns the value of an expression."""

    def load(returned, seed=0, **spec):
        sys.modules.pop("my_data", None)
        (tmp_path / "my_data.py").write_text(USERS_MODULE.format(returned))
        return load_data(Data(name="my_data:load", **spec), seed, [tmp_path])

    yield load
    sys.modules.pop("my_data", None)


def test_a_users_arrays_become_a_data_set(users):
    arrays = "(a := np.arange(12.0).reshape(6, 2) + seed), [0, 1, 2] * 2, a[:2], np.array([0, 3], np.int8)"
    data = users(arrays, seed=5, max_examples=4)
    assert (data.classes, data.input_shape) == (4, (2,))
    assert data.train_x[:].dtype == np.float32
    assert data.test_y.dtype == np.int64
    assert len(data.train_x) == 4
    assert data.test_x[0].tolist() == [5.0, 6.0]
    tokens = users("(a := np.ones((3, 7), np.int32)), [0, 1, 0], a, [0, 1, 0]")
    assert tokens.train_x[:].dtype == np.int64


def test_a_users_arrays_become_contiguous(users):
    """``view`` of a batch fails on an array that is not contiguous."""
    for kind in ("float", "np.float32", "int"):
        x = f"(a := np.arange(48).reshape(6, 2, 4).astype({kind}).transpose(0, 2, 1))"
        data = users(f"{x}, [0, 1] * 3, a[:2], [0, 1]")
        assert data.train_x.flags.c_contiguous
        assert data.test_x[:1].flags.c_contiguous
        assert data.test_x[0].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_users_dataset_object_is_used_unchanged(users):
    data = users("made([0, 1, 0], 9, np.array([7, 5, 7]))")
    assert isinstance(data, Dataset)
    assert (data.name, data.classes, data.owners.tolist()) == ("mine", 9, [7, 5, 7])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("3", r"must return a Dataset or \(train_x, train_y, test_x, test_y\) \(got int\)"),
        ("x, [0, 1], x, [0, 1, 1]", "train_x has 3 rows, but train_y has 2"),
        ("x, [0, 1, -1], x, [0, 1, 1]", "train_y must be whole numbers ≥ 0"),
        ("x, [0, 1, 1], x, [0.5, 1, 1]", r"test_y must be .* \(got float32"),
        ("x, [0, 1, 1], x[:, :1], [0, 1, 1]", "test_x has examples of shape .* input_shape is"),
        ("x, [], x, []", "train_y must be whole numbers"),
        ("np.array([['a']]), [0], x, [0]", "train_x must be numbers of shape"),
        ("[[1, 2], [3]], [0, 1], x, [0]", "train_x is not an array of numbers: ValueError: .*inhomogeneous"),
        (
            "__import__('torch').ones(2, 4, requires_grad=True), [0, 1], x, [0]",
            "train_x is not an array of numbers: RuntimeError: Can't call numpy",
        ),
        ("spec['seed']", "'my_data:load' raised TypeError"),
        ("made([0, 1, 2], classes='3')", r"classes must be a whole number or None \(got '3'\)"),
        (
            "Dataset(name='mine', train_x=x, train_y=[0] * 3, test_x=x, test_y=[0] * 3, classes=1, "
            "input_shape=(2))",
            r"input_shape must be a tuple, such as \(4,\) \(got 2\)",
        ),
        ("made([0, 1, 2], classes=2)", r"train_y must be in \[0, 2\) \(got 2\)"),
        ("made([0, 1, 2], 3, np.arange(2))", r"owners must be .* shape \(3,\), .* \(got int64 of shape \(2,"),
        ("made([0, 1, 2], 3, np.arange(4))", r"owners must be .* \(got int64 of shape \(4,\)\)"),
        ("made([0, 1, 2], 3, np.zeros((3, 1), int))", r"owners must be .* \(got int64 of shape \(3, 1\)\)"),
        ("made([0, 1, 2], 3, np.ones(3))", r"owners must be .* \(got float64 of shape \(3,\)\)"),
        ("made([0, 1, 2], 3, [0, 1, 2])", r"owners must be an array of whole numbers .* \(got list\)"),
    ],
)
def test_a_users_invalid_data_give_a_one_line_error(users, returned, message):
    with pytest.raises(ConfigError, match=message) as caught:
        users(returned)
    assert "\n" not in str(caught.value)


def test_debians_fashion_mnist_is_found_without_a_path(monkeypatch):
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    if not (DEBIAN / "fashion-mnist").is_dir():
        pytest.skip("the papers' data: Debian's package dataset-fashion-mnist is not installed")
    data = load_data(Data(name="fashion-mnist"), seed=0)
    assert np.bincount(data.train_y).tolist() == [6000] * 10
    assert np.bincount(data.test_y).tolist() == [1000] * 10
    mean = data.train_x.raw.mean() / 255
    square = np.square(data.train_x.raw, dtype=np.uint16).mean() / 255**2
    assert (round(mean, 3), round((square - mean**2) ** 0.5, 3)) == (0.286, 0.353)  # the published values


def test_a_drawn_test_split_takes_a_fifth_of_each_class_of_all_images(tmp_path):
    write_mnist(tmp_path, train=400, test=100)
    known, drawn, other = (
        load_data(Data(name="mnist", path=str(tmp_path), test_split=how), seed)
        for how, seed in (("published", 3), ("drawn", 3), ("drawn", 4))
    )
    assert (len(known.test_y), len(drawn.train_y) + len(drawn.test_y)) == (100, 500)
    everything = np.concatenate([known.train_y, known.test_y])
    shares = np.bincount(drawn.test_y, minlength=10) / np.bincount(everything, minlength=10)
    assert np.allclose(shares, 0.2, atol=0.02)
    assert set.union(*parts(drawn)) == set.union(*parts(known))
    assert other.test_x.raw.tobytes() != drawn.test_x.raw.tobytes()


def parts(dataset):
    """The training and the evaluated examples as sets of (image, label)."""
    both = ((dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y))
    return [
        {(x.tobytes(), int(y)) for x, y in zip(images.raw, labels, strict=True)} for images, labels in both
    ]


def loaded(folder, seed, split, evaluate_on):
    spec = Data(
        name="mnist", path=str(folder), test_split=split, validation_fraction=0.2, evaluate_on=evaluate_on
    )
    return parts(load_data(spec, seed))


@pytest.mark.parametrize("split", ["published", "drawn"])
def test_all_seeds_hold_out_the_same_validation_examples(tmp_path, split):
    """Otherwise a learning rate that is tuned with seed 101 has seen the test examples of seed 1."""
    write_mnist(tmp_path, train=400, test=100)
    trained, held = loaded(tmp_path, 101, split, "validation")
    assert len(held) == (100 if split == "drawn" else 80)
    assert loaded(tmp_path, 102, split, "validation")[1] == held
    for seed in (1, 2, 101):
        train, test = loaded(tmp_path, seed, split, "test")
        assert not held & (train | test)
        assert len(train) + len(test) + len(held) == 500
    assert loaded(tmp_path, 101, split, "test")[0] == trained


def test_validation_examples_of_digits_are_drawn_before_the_test_examples():
    held = parts(load_data(Data(validation_fraction=0.1, evaluate_on="validation"), 101))[1]
    for seed in (1, 2):
        train, test = parts(load_data(Data(validation_fraction=0.1), seed))
        assert not held & (train | test)
    assert parts(load_data(Data(), 1)) != [train, test]


def test_all_seeds_hold_out_the_same_patients_for_validation():
    def load(seed, on="validation", fraction=0.1):
        return load_data(Data(name="diabetes", validation_fraction=fraction, evaluate_on=on), seed)

    first, second = load(1), load(2)
    assert len(first.test_y) == 44
    # Different seeds scale and shift each column differently.
    for one, other in zip(first.test_x.T, second.test_x.T, strict=True):
        assert np.corrcoef(one, other)[0, 1] == pytest.approx(1.0)
    tested = load(1, "test")
    assert np.array_equal(tested.train_x, first.train_x)
    others = {row.tobytes() for row in (*tested.train_x, *tested.test_x)}
    assert len(others) == 442 - 44
    assert not others & {row.tobytes() for row in first.test_x}
    assert np.isfinite(load(1, "test", 0.9999).test_x).all()


def test_a_validation_split_that_leaves_no_test_example_is_refused():
    with pytest.raises(ConfigError, match=r"validation_fraction: 0\.9999 leaves no example to test on"):
        load_data(Data(validation_fraction=0.9999), 0)
    assert len(load_data(Data(validation_fraction=0.9999, evaluate_on="validation"), 0).test_y) > 1700


def test_the_validation_split_keeps_the_owners_of_training_examples():
    one = Dataset(
        name="", train_x=np.arange(10.0, dtype=np.float32).reshape(-1, 1), train_y=np.arange(10) % 2,
        test_x=np.zeros((1, 1), np.float32), test_y=np.zeros(1, np.int64), classes=2, input_shape=(1,),
        owners=np.arange(10),
    )  # fmt: skip
    kept = data._validating(one, 0.3, "validation")
    assert kept.owners.tolist() == kept.train_x[:, 0].tolist()
    assert sorted([*kept.owners, *kept.test_x[:, 0]]) == list(range(10))
    with pytest.raises(ConfigError, match="validation_fraction: needs two training examples or more, got 1"):
        data._validating(data._with_train_rows(one, np.array([4])), 0.3, "validation")


def test_a_drawn_test_split_needs_images(users):
    with pytest.raises(ConfigError, match=r"data\.test_split: 'drawn' needs images with classes"):
        users("x, [0, 1, 0], x, [0, 1, 0]", test_split="drawn")
    x = "Images(np.zeros((3, 1, 2, 2), np.uint8), top=255, mean=[0], std=[1])"
    for y in ("[0.5, 1, 0]", "[[0, 1], [1, 2], [2, 0]]"):
        with pytest.raises(ConfigError, match=r"data\.test_split: 'drawn' needs images with classes"):
            users(f"{x}, {y}, {x}, {y}", test_split="drawn")
