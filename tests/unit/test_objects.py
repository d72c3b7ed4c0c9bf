"""Tests of Python objects as parts of an experiment: their names, arrays, partitions, digests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

import edgefl
from edgefl import config, loading
from edgefl.config.objects import name_objects, opened, reference, trusting, with_arrays
from edgefl.errors import ConfigError
from edgefl.experiment import Data, Experiment, Fleet, Model, Stop
from edgefl.learning.array_set import save_arrays
from edgefl.learning.data import load_data
from edgefl.learning.dataset import Dataset
from edgefl.learning.partition import partition
from edgefl.strategies import resolve
from edgefl.strategies.fedbuff import FedBuff

PLAIN = Experiment(fleet=Fleet(devices={"pi-4": 4}), stop=Stop(versions=3))
SOURCE = """
from dataclasses import dataclass
from edgefl.strategies.fedbuff import FedBuff

@dataclass(frozen=True)
class Mine(FedBuff):
    decay: float = 0.5

def make(input_shape, classes): ...
def load(spec, seed): ...
def split(labels, profiles, rng): ...
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A user's module in a folder that is not the current one."""
    (tmp_path / "mine_of_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import mine_of_test  # type: ignore[import-not-found]

    yield mine_of_test
    del sys.modules["mine_of_test"]


def test_classes_and_functions_are_named_by_their_module(mine: Any, tmp_path: Path) -> None:
    given = mine.Mine(buffer_size=2, decay=0.25)
    found = name_objects(PLAIN, strategy=given, model=mine.make, data=mine.load, partition=mine.split)
    wanted = found.experiment
    assert wanted.strategy["name"] == "mine_of_test:Mine"
    assert (wanted.model.name, wanted.data.name) == ("mine_of_test:make", "mine_of_test:load")
    assert wanted.data.partition == "mine_of_test:split"
    assert (found.base, found.trusted, found.data) == (tmp_path, (), None)
    assert resolve(wanted.strategy, [found.base]) == given


def test_a_built_in_strategy_has_its_short_name_and_a_class_its_defaults(mine: Any) -> None:
    found = name_objects(PLAIN, strategy=FedBuff(buffer_size=3))
    assert resolve(found.experiment.strategy) == FedBuff(buffer_size=3)
    assert found.experiment.strategy["name"] == "fedbuff"
    assert name_objects(PLAIN, strategy=FedBuff).experiment.strategy == {"name": "fedbuff"}
    both = name_objects(PLAIN, strategies=[FedBuff, mine.Mine])
    assert [table["name"] for table in both.strategies] == ["fedbuff", "mine_of_test:Mine"]


def test_objects_replace_parts_of_tables_that_are_dicts(mine: Any, tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "fleet": {"devices": {"pi-4": 4}},
        "data": {"partition": "shards", "max_examples": 5},
        "model": {"args": {"width": 3}},
        "stop": {"versions": 3},
    }
    found = name_objects(Experiment(**tables), model=mine.make, partition=mine.split, data=arrays())
    with with_arrays(found, tmp_path / "run") as given:
        wanted = config.validate(given)
    assert (wanted.model.name, wanted.model.args) == ("mine_of_test:make", {"width": 3})
    assert (wanted.data.name, wanted.data.partition) == ("arrays", "mine_of_test:split")
    assert wanted.data.max_examples == 5
    assert Path(str(wanted.data.path)).parent == tmp_path / "run"


@dataclass(frozen=True)
class Elsewhere(FedBuff):
    """A strategy that is defined in this module, which is in another folder than `mine`."""


def test_modules_of_a_second_folder_are_trusted_in_a_run(mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_MODULES", "timm")
    found = name_objects(PLAIN, strategy=Elsewhere(), model=mine.make)
    assert {found.base.name, *found.trusted} >= {Path(mine.__file__).parent.name}
    with trusting(("one", "two")):
        assert os.environ["EDGEFL_MODULES"] == "timm,one,two"
    assert os.environ["EDGEFL_MODULES"] == "timm"
    monkeypatch.delenv("EDGEFL_MODULES")
    with trusting(("one",)):
        pass
    assert "EDGEFL_MODULES" not in os.environ


def test_objects_that_cannot_be_imported_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")  # a notebook's
    main.make = lambda: 0  # type: ignore[attr-defined]
    main.make.__module__, main.make.__qualname__ = "__main__", "make"
    monkeypatch.setitem(sys.modules, "__main__", main)
    for value, words in (
        (lambda: 0, "'<lambda>' is defined inside a function or class"),
        (main.make, "'make' is defined at a prompt or in a notebook; .*%%writefile mine.py"),
        (np.float32(1), "must be a function or class defined in a module, got a float32"),
    ):
        with pytest.raises(ConfigError, match=f"^model: .*{words}"):
            reference(value, "model")
    main.__file__ = "/tmp/my_script.py"
    assert reference(main.make, "model").name == "my_script:make"
    monkeypatch.setitem(sys.modules, "__mp_main__", main)  # the script in a multiprocessing worker
    main.make.__module__ = "__mp_main__"
    assert reference(main.make, "model").name == "my_script:make"
    main.__file__ = "/tmp/my-script.py"
    with pytest.raises(ConfigError, match=r"in /tmp/my-script.py, which cannot be imported by name"):
        reference(main.make, "model")
    with pytest.raises(ConfigError, match="strategy: must be a Strategy or a strategy's name, got a dict"):
        name_objects(PLAIN, strategy={"name": "fedbuff"})


def test_names_and_files_replace_objects(mine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = name_objects(PLAIN, strategy="fedasync", model="cnn-fedbuff", data="mnist", partition="shards")
    assert found.experiment.strategy == {"name": "fedasync"}
    data = found.experiment.data
    assert (found.experiment.model.name, data.name, data.partition) == ("cnn-fedbuff", "mnist", "shards")
    assert (found.data, found.trusted, found.base) == (None, (), Path.cwd())
    (tmp_path / "e.toml").write_text(config.dump(PLAIN))
    monkeypatch.chdir(tmp_path.parent)
    for file in (tmp_path / "e.toml", f"{tmp_path.name}/e.toml"):
        assert opened(file) == (config.validate(PLAIN), tmp_path)
    assert opened(PLAIN) == (PLAIN, None)
    at_home = name_objects(PLAIN, tmp_path, strategy=mine.Mine, strategies=["fedbuff"])
    assert (at_home.base, at_home.trusted, at_home.strategies) == (tmp_path, (), ({"name": "fedbuff"},))
    elsewhere = name_objects(PLAIN, Path("/"), strategy=mine.Mine)
    assert (elsewhere.base, elsewhere.trusted) == (tmp_path, ())
    own_model = msgspec.structs.replace(PLAIN, model=Model(name="beside_the_file:make"))
    for given, name in ((own_model, None), (PLAIN, "beside_the_file:make")):
        elsewhere = name_objects(given, Path("/"), strategy=mine.Mine, model=name)
        assert (elsewhere.base, elsewhere.trusted) == (Path("/"), ("mine_of_test",))
    grids: tuple[dict[str, list[Any]], ...] = (
        {"fleet.devices": ["beside.toml"]}, {"fleet.network.pi-4": ["beside.toml"]},
        {"training.loss": ["beside:loss"]}, {"model": [Model(name="beside:make")]},
        {"data.partition": ["iid"]},
    )  # fmt: skip
    bases = [name_objects(PLAIN, Path("/"), strategy=mine.Mine, grid=grid).base for grid in grids]
    assert bases == [Path("/")] * 4 + [tmp_path]
    of_a_package = name_objects(PLAIN, Path("/"), strategy=mine.Mine, model="timm:vit", partition="flwr:Iid")
    assert of_a_package.base == tmp_path


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("missing.toml", r"^missing\.toml"),
        ({"fleet": {}}, "^experiment: must be an Experiment or the path of a TOML file, got a dict$"),
    ],
)
def test_a_wrong_experiment_is_one_line(given: Any, words: str) -> None:
    for call in (edgefl.run, edgefl.sweep):
        with pytest.raises(ConfigError, match=words):
            call(given)


@pytest.mark.parametrize("call", [edgefl.run, edgefl.sweep])
def test_a_misspelt_strategy_is_one_line(call: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="strategy 'fedbuf' not found; did you mean 'fedbuff'"):
        call(PLAIN, tmp_path / "out", strategy="fedbuf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"grid": {"strategy": "fedbuff"}}, "^grid 'strategy': must be a list of values, got 'fedbuff'$"),
        ({"grid": {"training.lr": 0.1}}, r"^grid 'training\.lr': must be a list of values, got 0\.1$"),
        ({"grid": [0.1]}, r"^grid: must map keys to lists of values, got \[0\.1\]$"),
        ({"seeds": 5}, "^seeds: must be a list of values, got 5$"),
    ],
)
def test_a_value_instead_of_a_list_is_one_line(given: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        edgefl.sweep(PLAIN, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_the_repr_of_an_experiment_shows_only_values_that_are_not_defaults() -> None:
    assert repr(PLAIN) == (
        "Experiment(fleet=Fleet(devices={'pi-4': 4}), strategy={'name': 'fedbuff'}, stop=Stop(versions=3))"
    )


def test_an_unguarded_call_in_a_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unguarded.py").write_text(
        "import edgefl\nedgefl.run(edgefl.Experiment(fleet={'devices': {'pi-4': 1}}))\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="put the call under if __name__ == '__main__':"):
        edgefl.run(msgspec.structs.replace(PLAIN, strategy={"name": "unguarded:Mine"}))


def arrays(rows: int = 6) -> tuple[Any, ...]:
    x = np.arange(4.0 * rows).reshape(rows, 4).astype(np.float32)
    return x, np.arange(rows) % 3, x[:2], np.array([0, 1])


def test_arrays_are_saved_in_a_file_named_by_their_content(tmp_path: Path) -> None:
    file = save_arrays(arrays(), tmp_path)
    assert save_arrays(arrays(), tmp_path) == file
    assert save_arrays(arrays(7), tmp_path) != file
    found = load_data(Data(name="arrays", path=str(file)), seed=0)
    np.testing.assert_array_equal(found.train_x, arrays()[0])
    assert (found.classes, found.input_shape, found.owners) == (3, (4,), None)
    x, y, test_x, test_y = arrays()
    owned = Dataset(
        name="phones", train_x=x, train_y=y, test_x=test_x, test_y=test_y, classes=9, input_shape=(4,),
        owners=np.arange(6),
    )  # fmt: skip
    found = load_data(Data(name="arrays", path=str(save_arrays(owned, tmp_path))), seed=0)
    assert (found.name, found.classes) == ("phones", 9)
    assert found.owners.tolist() == [0, 1, 2, 3, 4, 5]


def test_arrays_of_a_run_that_its_folder_refuses_are_removed(tmp_path: Path) -> None:
    """The arrays of the run that is already in the folder are kept."""
    (tmp_path / "experiment.toml").touch()
    save_arrays(arrays(7), tmp_path)
    before = sorted(tmp_path.iterdir())
    for data in (arrays(), arrays(7)):
        with pytest.raises(ConfigError, match="taken"), with_arrays(name_objects(PLAIN, data=data), tmp_path):
            raise ConfigError("taken")
        assert sorted(tmp_path.iterdir()) == before


def test_arrays_of_a_refused_run_are_removed_from_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="taken"), with_arrays(name_objects(PLAIN, data=arrays()), tmp_path):
        raise ConfigError("taken")
    assert [*tmp_path.iterdir()] == [tmp_path / "notes.txt"]


def test_a_dataset_of_arrays_keeps_its_classes_or_is_refused(tmp_path: Path) -> None:
    words, tags = np.arange(12).reshape(3, 4), np.arange(12).reshape(3, 4) % 2
    parts: dict[str, Any] = {"train_x": words, "train_y": tags, "test_x": words, "test_y": tags}
    tagged = Dataset(name="tags", **parts, classes=5, input_shape=(4,))
    found = load_data(Data(name="arrays", path=str(save_arrays(tagged, tmp_path))), seed=0)
    assert (found.classes, found.outputs) == (5, 5)
    for classes, wanted in ((None, "floats"), (5, "whole numbers")):
        y = tags if classes is None else tags * 0.5
        wrong = Dataset(
            name="tags", train_x=words, train_y=y, test_x=words, test_y=y, classes=classes, input_shape=(4,)
        )
        with pytest.raises(ConfigError, match=f"train_y must be {wanted} in a Dataset with classes = "):
            save_arrays(wrong, tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"classes": 2}, r"labels must be in \[0, 2\) \(got 2\)"),
        ({"classes": 3, "owners": np.ones(6)}, r"owners must be an array of whole .* \(got float64 of shape"),
    ],
)
def test_labels_beyond_the_classes_and_owners_that_are_not_whole_numbers_are_refused(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    x, y, test_x, test_y = arrays()
    given = Dataset(
        name="mine", train_x=x, train_y=y, test_x=test_x, test_y=test_y, input_shape=(4,), **fields
    )
    with pytest.raises(ConfigError, match=words):
        load_data(Data(name="arrays", path=str(save_arrays(given, tmp_path))), seed=0)


def test_files_and_objects_without_arrays_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    for path, words in (
        (None, "data.path is missing; data.name = 'arrays' needs"),
        ("gone.safetensors", "gone.safetensors cannot be read"),
        (str(tmp_path / "bad.safetensors"), "cannot be read as safetensors"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_data(Data(name="arrays", path=path), seed=0)
    with pytest.raises(ConfigError, match="data: must be a function, a Dataset or"):
        save_arrays([1, 2], tmp_path)
    with pytest.raises(ConfigError, match="data: train_y must be an array of numbers, got one of <U1"):
        save_arrays((*arrays()[:1], np.array(["a"]), *arrays()[2:]), tmp_path)
    with pytest.raises(ConfigError, match="data: train_y must be an array of numbers, got one of float128"):
        save_arrays((*arrays()[:1], np.ones(3, np.longdouble), *arrays()[2:]), tmp_path)


SPLITS = """
import numpy as np
def halves(labels, profiles, rng):
    return np.array_split(rng.permutation(len(labels)), len(profiles))
def short(labels, profiles, rng): return [[0]]
def twice(labels, profiles, rng): return [[0, 0]] * len(profiles)
def beyond(labels, profiles, rng): return [[len(labels)]] * len(profiles)
def none(labels, profiles, rng): return None
def shared(labels, profiles, rng): return [np.array([k % 3, 3]) for k in range(len(profiles))]
"""


def test_a_users_partition_is_used_or_refused(tmp_path: Path) -> None:
    (tmp_path / "splits.py").write_text(SPLITS)

    def split(name: str, clients: int = 2) -> Any:
        spec = Data(partition=f"splits:{name}")
        return partition(spec, np.arange(10) % 2, ["pi-4"] * clients, 2, seed=1, search_path=[tmp_path])

    held = split("halves")
    assert sorted(np.concatenate(held).tolist()) == list(range(10))
    assert [row.tolist() for row in split("halves")] == [row.tolist() for row in held]
    overlapping = split("shared", 20)  # more clients than examples
    assert (len(overlapping), overlapping[19].tolist()) == (20, [1, 3])
    for name, words in (
        ("short", "one array of rows for each of 2 clients .got 1"),
        ("none", "one array of rows for each of 2 clients .got 0"),
        ("twice", "client 0 needs one or more distinct whole numbers in .0, 10."),
        ("beyond", "client 0 needs one or more distinct whole numbers in .0, 10."),
    ):
        with pytest.raises(ConfigError, match=f"data.partition: 'splits:{name}'.*{words}"):
            split(name)


def test_a_module_that_was_imported_through_a_symlink_is_not_imported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its classes would differ from those that the user's code already has."""
    real = tmp_path / "real"
    real.mkdir()
    (real / "linked_of_test.py").write_text("def make(): ...\n")
    (tmp_path / "link").symlink_to(real)
    monkeypatch.syspath_prepend(tmp_path / "link")
    import linked_of_test  # type: ignore[import-not-found]

    assert loading.load_attribute("linked_of_test:make", "model.name", [real]) is linked_of_test.make
    del sys.modules["linked_of_test"]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="older versions evaluate annotations eagerly")
def test_a_signature_is_read_without_evaluating_its_annotations() -> None:
    text, space = "def train(model: Missing, examples: missing.Rows): ...", dict[str, Any]()
    exec(compile(text, "mine.py", "exec", dont_inherit=True), space)
    assert list(loading.signature(space["train"]).parameters) == ["model", "examples"]


def test_digests_cover_named_modules_their_packages_and_files_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, beside = tmp_path / "installed", tmp_path / "beside"
    for file, text in {
        installed / "pack_of_test/__init__.py": "",
        installed / "pack_of_test/parts/given.py": "import pack_of_test.helper, other_of_test\nmake = 1\n",
        installed / "pack_of_test/helper.py": "",
        installed / "other_of_test.py": "",
        beside / "own_of_test.py": "import near_of_test\nmake = 2\n",
        beside / "near_of_test.py": "",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "link").symlink_to(beside)
    monkeypatch.chdir(tmp_path)
    for name in ("_named", "_searched"):
        monkeypatch.setattr(loading, name, set())
    assert loading.digests() == {}
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("EDGEFL_MODULES", "pack_of_test")
    loading.load_attribute("pack_of_test.parts.given:make", "model.name")
    loading.load_attribute("own_of_test:make", "model.name", [tmp_path / "link"])
    package = {"pack_of_test", "pack_of_test.helper", "pack_of_test.parts.given"}
    wanted = {*package, "own_of_test", "near_of_test"}
    assert loading.digests().keys() == wanted
    (beside / "near_of_test.py").write_text("changed = True\n")
    (installed / "pack_of_test/helper.py").unlink()
    assert loading.digests().keys() == wanted - {"pack_of_test.helper"}
    for name in (*wanted, "pack_of_test.parts", "other_of_test"):
        del sys.modules[name]


def test_digests_leave_out_the_packages_that_are_installed_beside_a_users_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "lab_of_test.py").write_text("import numbers_of_test\nmake = 1\n")
    (installed / "numbers_of_test.py").write_text("")
    for name in ("_named", "_searched"):
        monkeypatch.setattr(loading, name, set())
    monkeypatch.chdir(tmp_path)
    loading.load_attribute("lab_of_test:make", "model.name", [installed])
    assert loading.digests().keys() == {"lab_of_test"}
    for name in ("lab_of_test", "numbers_of_test"):
        del sys.modules[name]
