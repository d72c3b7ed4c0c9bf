"""Tests of Hugging Face data sets, read from a folder by the `datasets` package, and of invalid names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.experiment import Data
from edgefl.learning.data import load_data
from edgefl.learning.hugging_face import _file_of
from edgefl.loading import own_code

REASON = "needs datasets: pip install 'edgefl[hf]'"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "cache" / "edgefl" / "data" / "hf"


def write(folder: Path, *, sizes: tuple[int, ...] = (8,), splits: tuple[str, ...] = ("train", "test")) -> Any:
    """Write a data set of colour images; return its pixels and classes by split."""
    datasets = pytest.importorskip("datasets", reason=REASON)
    from PIL import Image

    rng, made = np.random.default_rng(0), {}
    for count, split in zip((20, 6), splits, strict=False):
        pixels = [rng.integers(0, 256, (sizes[k % len(sizes)],) * 2 + (3,), np.uint8) for k in range(count)]
        labels = rng.integers(0, 3, count).tolist()
        features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=4)})
        columns = {"img": [Image.fromarray(each) for each in pixels], "label": labels}
        folder.mkdir(exist_ok=True)
        found = datasets.Dataset.from_dict(columns, features=features)
        found.to_parquet(str(folder / f"{split}-00000.parquet"))
        made[split] = pixels, labels
    return made


def test_images_and_classes_are_read_once_and_kept(tmp_path: Path, cache: Path) -> None:
    made = write(tmp_path / "colours")
    data = load_data(Data(name=f"hf:{tmp_path / 'colours'}"), seed=0)
    for part, x, y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
        pixels, labels = made[part]
        np.testing.assert_array_equal(x.raw, np.stack(pixels).transpose(0, 3, 1, 2))  # type: ignore[union-attr]
        assert y.tolist() == labels
    assert (data.classes, data.input_shape) == (4, (3, 8, 8))
    np.testing.assert_allclose(data.train_x[:].mean((0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(data.train_x[:].std((0, 2, 3)), 1, atol=1e-5)
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns
    load_data(Data(name=f"hf:{tmp_path / 'colours'}"), seed=0)
    assert file.stat().st_mtime_ns == before


def test_test_examples_can_be_drawn_if_there_is_no_test_split(tmp_path: Path) -> None:
    write(tmp_path / "one", splits=("train",))
    name = f"hf:{tmp_path / 'one'}"
    with pytest.raises(ConfigError, match=r"has no test split: set data.test_split = 'drawn'$"):
        load_data(Data(name=name), seed=0)
    data = load_data(Data(name=name, test_split="drawn", test_fraction=0.25), seed=0)
    assert len(data.train_y) + len(data.test_y) == 20
    assert 3 <= len(data.test_y) <= 7


def test_data_sets_without_equal_images_and_classes_are_refused(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "sizes", sizes=(8, 9))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.csv").write_text("a,b\n1,x\n")
    for name, words in (
        ("sizes", "images must all have the same size, got 9×9 and 8×8$"),
        ("text", "must have one column of images and one of classes, got a .*, b "),
        ("nowhere/at-all", "."),
    ):
        where = name if name == "nowhere/at-all" else tmp_path / name
        with pytest.raises(ConfigError, match=f"^data.name 'hf:{where}': {words}") as caught:
            load_data(Data(name=f"hf:{where}"), seed=0)
        assert "\n" not in str(caught.value)
    assert not cache.exists() or not list(cache.iterdir())


def test_the_error_names_a_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "datasets.py").write_text("raise ModuleNotFoundError('datasets', name='datasets')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(
        ConfigError, match=r"^data.name 'hf:x': the package datasets is not installed: pip inst"
    ):
        load_data(Data(name="hf:x"), seed=0)


def test_each_data_set_has_a_separate_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("hf:a/b", "hf:a-b", "hf:a:b", "hf:a", f"hf:{'long' * 200}")
    files = [_file_of(name) for name in names]
    for home in ("one", "two"):
        (tmp_path / home / "a").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / home)
        files.append(_file_of("hf:a"))
        assert _file_of(f"hf:{tmp_path / home / 'a'}").name.rpartition("-")[2] == files[-1].name[2:]
    assert len(set(files)) == len(files)
    assert all(len(file.name) < 128 for file in files)
    for name in ("hf:", "hf::config"):
        with pytest.raises(ConfigError, match=f"^data.name '{name}' has no name after 'hf:'"):
            load_data(Data(name=name), seed=0)


def test_the_name_is_not_code_of_the_user() -> None:
    assert own_code({"data": {"name": "hf:cifar10"}}) == []
