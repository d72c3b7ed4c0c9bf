"""Tests of LEAF's data sets with small files in its format, and of one-line errors for invalid files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leaf_files import write, write_leaf
from PIL import Image

from edgefl.errors import ConfigError
from edgefl.experiment import Data, Model
from edgefl.learning.data import load_data
from edgefl.learning.dataset import Images, Tokens
from edgefl.learning.evaluate import evaluate
from edgefl.learning.flat import FlatModel
from edgefl.learning.leaf import FIRST_WORD, LETTERS, PADDING, UNKNOWN, VOCABULARY
from edgefl.learning.models import make_model
from edgefl.learning.partition import partition
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Trainer


def load(folder: Path, **fields: Any) -> Any:
    return load_data(Data(name="leaf", path=str(folder), **fields), seed=0)


def write_splits(folder: Path, train: dict[str, Any], test: dict[str, Any]) -> Path:
    for split, held in (("train", train), ("test", test)):
        (folder / split).mkdir()
        write(folder, split, 0, held)
    return folder


def first_file(folder: Path) -> tuple[Path, Any]:
    path = min((folder / "train").glob("*.json"))
    return path, json.loads(path.read_text())


def tweet(text: str) -> list[str]:
    return ["1", "date", "NO_QUERY", "u", text]


@pytest.mark.parametrize(
    ("kind", "shape", "classes"),
    [
        ("femnist", (1, 28, 28), 62),
        ("numbers", (60,), 5),
        ("sent140", (25,), 2),
        ("shakespeare", (80,), 80),
        ("celeba", (3, 16, 16), 2),
    ],
)
def test_examples_of_each_kind_keep_their_user(tmp_path: Path, kind: str, shape: Any, classes: int) -> None:
    data = load(write_leaf(tmp_path / "leaf", kind), image_size=16)
    assert (data.name, data.input_shape, data.classes) == (f"leaf-{kind}", shape, classes)
    assert len(data.train_x) == len(data.train_y) == sum(4 + user for user in range(6))
    assert len(data.test_x) == len(data.test_y) == 12
    assert data.train_x[:3].shape == (3, *shape)
    # Users in the order of the files: 0, 2, 4, then 1, 3, 5.
    assert np.bincount(data.owners).tolist() == [4, 6, 8, 5, 7, 9]
    assert data.train_x[:1].dtype == (np.int64 if len(shape) == 1 and kind != "numbers" else np.float32)


def test_femnist_images_are_kept_as_bytes_without_loss(tmp_path: Path) -> None:
    data = load(write_leaf(tmp_path, "femnist", users=1, files=1))
    assert isinstance(data.train_x, Images)
    _, content = first_file(tmp_path)
    np.testing.assert_allclose(data.train_x[:].reshape(4, 784), user(content)["x"], atol=1e-7)


def test_images_that_bytes_cannot_represent_stay_floats(tmp_path: Path) -> None:
    held = {"u": {"x": [[0.1234] * 784], "y": [3]}}
    assert load(write_splits(tmp_path, held, held)).train_x[:].ravel()[:2] == pytest.approx([0.1234] * 2)


def test_words_are_numbered_by_their_frequency_in_the_training_part(tmp_path: Path) -> None:
    train = {"u": {"x": [tweet("b a! A b's"), tweet("a b, c")], "y": ["0", 1]}}
    test = {"v": {"x": [tweet("c zebra a " + "b " * 40)], "y": [1]}}
    data = load(write_splits(tmp_path, train, test))
    assert isinstance(data.train_x, Tokens)
    a, b, bang, comma, bs, c = range(FIRST_WORD, FIRST_WORD + 6)  # a: 3, b: 2, then once each, by name
    first, second = [PADDING] * 20 + [b, a, bang, a, bs], [PADDING] * 21 + [a, b, comma, c]
    assert data.train_x[:, :].tolist() == [first, second]
    assert data.test_x[0:1].tolist() == [[c, UNKNOWN, a] + [b] * 22]
    assert data.train_y.tolist() == [0, 1]


def test_the_vocabulary_has_a_maximum_size(tmp_path: Path) -> None:
    words = [tweet(f"w{number} w{number + 1}") for number in range(0, VOCABULARY + 500, 2)]
    held = {"u": {"x": words, "y": [0] * len(words)}}
    assert load(write_splits(tmp_path, held, held)).train_x[:].max() == VOCABULARY + FIRST_WORD - 1


def test_shakespeare_uses_leafs_80_letters(tmp_path: Path) -> None:
    data = load(write_leaf(tmp_path, "shakespeare", users=1, files=1))
    held = user(first_file(tmp_path)[1])
    assert len(set(LETTERS)) == 80
    assert ["".join(LETTERS[number] for number in row) for row in data.train_x[:].tolist()] == held["x"]
    assert [LETTERS[label] for label in data.train_y] == held["y"]


def test_photos_are_cropped_to_the_middle_and_normalised(tmp_path: Path) -> None:
    write_leaf(tmp_path, "celeba", users=1, files=1)
    photo = Image.new("RGB", (40, 60), (0, 0, 0))
    photo.paste((255, 0, 0), (0, 5, 40, 55))  # the red area is slightly larger than the middle square
    for file in (tmp_path / "raw" / "img_align_celeba").iterdir():
        photo.save(file)
    data = load(tmp_path, image_size=8)
    assert data.train_x[0].shape == (3, 8, 8)
    np.testing.assert_array_equal(data.train_x[0], np.array([1, -1, -1])[:, None, None] * np.ones((3, 8, 8)))


def test_users_without_examples_are_ignored(tmp_path: Path) -> None:
    """LEAF's split keeps the entries of users with too few examples, but removes them from the list of users.

    Of the two empty users here, one is in the list and the other is not.
    """
    write_leaf(tmp_path, "numbers", users=2, files=1)
    file, content = first_file(tmp_path)
    content["user_data"] |= {name: {"x": [], "y": []} for name in ("left-over", "empty")}
    content["users"].insert(1, "empty")
    content["num_samples"].insert(1, 0)
    content["hierarchies"] = ["play"] * 3
    file.write_text(json.dumps(content))
    assert np.bincount(load(tmp_path).owners).tolist() == [4, 5]


def test_each_client_holds_the_examples_of_one_user(tmp_path: Path) -> None:
    data = load(write_leaf(tmp_path, "numbers"))
    spec = Data(name="leaf", partition="natural")
    every, some, again = (
        partition(spec, data.train_y, ["pi-4"] * clients, 5, seed=0, owners=data.owners)
        for clients in (6, 3, 3)
    )
    assert sorted(len(rows) for rows in every) == [4, 5, 6, 7, 8, 9]
    assert all(len(set(data.owners[rows].tolist())) == 1 for rows in every)
    assert np.sort(np.concatenate(every)).tolist() == list(range(39))
    assert [rows.tolist() for rows in some] == [rows.tolist() for rows in again]
    assert len({int(data.owners[rows[0]]) for rows in some}) == 3


def test_users_are_drawn_uniformly() -> None:
    owners = np.repeat(np.arange(10), 3)
    spec, labels = Data(partition="natural"), np.zeros(30, np.int64)
    drawn = [
        int(owners[rows[0]])
        for seed in range(400)
        for rows in partition(spec, labels, ["a", "b"], 1, seed, owners)
    ]
    counts = np.bincount(drawn, minlength=10)
    assert ((counts - 80) ** 2 / 80).sum() < 27.9  # χ² with 9 degrees of freedom, 0.1%


def test_max_examples_keeps_each_examples_owner(tmp_path: Path) -> None:
    whole, some = load(write_leaf(tmp_path, "femnist")), load(tmp_path, max_examples=20)
    assert len(some.owners) == len(some.train_y) == len(some.train_x) == 20
    rows = [int(np.flatnonzero((whole.train_x[:] == x).all(axis=(1, 2, 3)))[0]) for x in some.train_x[:]]
    assert whole.owners[rows].tolist() == some.owners.tolist()


@pytest.mark.parametrize(
    ("clients", "owners", "message"),
    [
        (3, None, "data.partition 'natural' needs data with users, such as data.name = 'leaf'"),
        (3, [0, 0, 1, 1], "data.partition 'natural': 3 clients need one user each (the data have 2)"),
    ],
)
def test_a_natural_partition_needs_a_user_for_each_client(clients: int, owners: Any, message: str) -> None:
    given = None if owners is None else np.array(owners)
    with pytest.raises(ConfigError) as caught:
        partition(Data(partition="natural"), np.zeros(4, np.int64), ["a"] * clients, 1, 0, given)
    assert str(caught.value) == message
    if owners is None:  # a drawn test set mixes the examples of all users
        with pytest.raises(ConfigError, match=r"'leaf' and data\.test_split = 'published'$"):
            partition(Data(partition="natural", test_split="drawn"), np.zeros(4, np.int64), ["a"], 1, 0)


@pytest.mark.parametrize(
    ("kind", "args", "lr", "better"),
    [
        ("sent140", {"embedding": 16, "hidden": 12}, 0.5, 0.9),
        ("shakespeare", {"embedding": 32, "hidden": 32}, 2.0, 0.5),
    ],
)
def test_text_models_learn(tmp_path: Path, kind: str, args: Any, lr: float, better: float) -> None:
    data = load(write_leaf(tmp_path, kind, users=20))
    model = Model(name=f"lstm-{kind}", args=args)
    flat = FlatModel(make_model(model, data.input_shape, data.classes, seed=1))
    before = evaluate(flat, data.test_x, data.test_y, data.classes).loss
    rule = LocalRule(steps=100, batch_size=32, lr=lr)
    Trainer(flat).run(data.train_x, data.train_y, rule, np.random.default_rng(0))
    after = evaluate(flat, data.test_x, data.test_y, data.classes)
    assert after.loss < before
    assert after.accuracy > better


def user(content: Any, number: int = 0) -> Any:
    return content["user_data"][f"user-{number}"]


def put(*place: Any, to: Any) -> Callable[[Any], None]:
    """Return a function that sets the value at ``place`` in the first user's data to ``to``."""

    def change(content: Any) -> None:
        held = user(content)
        for step in place[:-1]:
            held = held[step]
        held[place[-1]] = to

    return change


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("numbers", lambda c: c["user_data"].pop("user-2"), "user 'user-2' is listed in users, but not in"),
        ("numbers", lambda c: c["num_samples"].pop(), "3 users and 2 counts"),
        ("numbers", lambda c: c.update(num_samples=[5, 4, 6]), "num_samples is 5, but x"),
        ("numbers", lambda c: user(c)["y"].pop(), "num_samples is 4, but x and y have 4 and 3 entries"),
        ("numbers", lambda c: c.update(users=["user-0"] * 2, num_samples=[4, 4]), "listed twice in train"),
        ("numbers", lambda c: c.pop("user_data"), "not in LEAF's format: Object missing required field"),
        ("numbers", lambda c: user(c).pop("y"), "user 'user-0': must hold lists x and y: Object missing"),
        ("numbers", lambda c: user(c)["x"][1].pop(), "each x must be 60 finite numbers"),
        *(
            ("numbers", put("x", 1, 0, to=odd), "each x must be 60 finite numbers")
            for odd in ("one", "1.5", None, 1e39)
        ),
        ("numbers", put("x", 1, to=7), "each x must be 60 finite numbers"),
        ("numbers", put("y", 1, to=-1), "a label must be a whole number from 0 to 99999"),
        ("numbers", put("y", 1, to=0.5), "(got 0.5)"),
        ("numbers", put("y", 1, to=10**30), "a label must be a whole number"),
        ("numbers", put("y", 1, to=True), "(got True)"),
        ("numbers", put("x", 0, to={}), "x must hold numbers, tweets of five strings"),
        ("femnist", put("y", 3, to=62), "a whole number from 0 to 61 (got 62)"),
        ("sent140", put("y", 0, to="4"), "a whole number from 0 to 1 (got '4')"),
        ("sent140", lambda c: user(c)["x"][1].pop(), "each x must be five strings, the last one the tweet"),
        ("sent140", put("x", 1, 4, to=7), "each x must be five strings"),
        ("shakespeare", put("x", 1, to="short"), "each x must be 80 letters (got 'short')"),
        ("shakespeare", put("x", 1, to="ü" * 80), "a letter of x must be one of LEAF's 80 letters"),
        ("shakespeare", put("y", 1, to="ab"), "a label must be one of LEAF's 80 letters (got 'ab')"),
        ("celeba", put("x", 1, to="../../secret.png"), "must be the name of a picture"),
        ("celeba", put("x", 1, to="999999.jpg"), "999999.jpg cannot be read: "),
    ],
)
def test_invalid_data_give_a_one_line_error(tmp_path: Path, kind: str, change: Any, words: str) -> None:
    file, content = first_file(write_leaf(tmp_path, kind))
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert words in str(caught.value)


def test_a_truncated_file_and_other_content_are_refused(tmp_path: Path) -> None:
    file, _ = first_file(write_leaf(tmp_path, "femnist"))
    whole = file.read_bytes()
    deep = whole.replace(b'"x": [', b'"x": [' + b"[" * 100_000 + b"]" * 100_000 + b",", 1)
    odd = whole.replace(b'"users"', b'"\xff"', 1)
    for content in (whole[: len(whole) // 2], b"", b"\xff\xfe", b"[1, 2]", odd, deep):
        file.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load(tmp_path)
        assert str(caught.value).startswith(f"{file} is not in LEAF's format: ")
        assert "\n" not in str(caught.value)


def no_photos(folder: Path) -> None:
    for file in (folder / "raw" / "img_align_celeba").iterdir():
        file.write_bytes(b"\x89PNG\r\n\x1a\nrubbish")


def no_examples(folder: Path) -> None:
    for file in (0, 1):
        write(folder, "test", file, {f"u{file}": {"x": [], "y": []}})


def no(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).rename(folder / "gone")


NEEDED = "data.name 'leaf': files not found; expected folders train and test with LEAF's JSON"


@pytest.mark.parametrize(
    ("kind", "spoil", "words"),
    [
        ("celeba", no_photos, r"000\d\d\d.png cannot be read: cannot identify image file"),
        ("celeba", no("raw"), "CelebA's pictures not found; searched raw/img_align_celeba"),
        ("numbers", no_examples, "test: no user has an example"),
        ("numbers", no("train"), NEEDED),
        ("numbers", no("test"), NEEDED),
    ],
)
def test_an_incomplete_folder_is_refused(tmp_path: Path, kind: str, spoil: Any, words: str) -> None:
    spoil(write_leaf(tmp_path, kind))
    with pytest.raises(ConfigError, match=words):
        load(tmp_path)


def test_the_folder_is_found_in_edgefl_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_leaf(tmp_path / "leaf", "numbers")
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    assert load_data(Data(name="leaf"), seed=0).name == "leaf-numbers"
