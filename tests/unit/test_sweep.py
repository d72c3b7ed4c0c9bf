"""Tests of a sweep before its first run: its runs, their names, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from shell import Shell

import edgefl
from edgefl import config
from edgefl.cli.sweep import axis, seeds_of
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment, Fleet, Stop
from edgefl.hosts.nodes import on_nodes
from edgefl.results.sweep import Sweep
from edgefl.run import sweep
from edgefl.run.sweep import plan

PLAIN = Experiment(
    fleet=Fleet(devices={"pi-4": 4}), stop=Stop(versions=3), strategy={"name": "fedbuff", "buffer_size": 2}
)


def planned(grid: dict[str, list[str]], seeds: tuple[int, ...] = (1, 2), wanted: Experiment = PLAIN) -> Any:
    return plan(wanted, Path("out"), seeds, grid, Path.cwd())


def test_a_sweep_has_a_named_run_for_each_combination_of_values_with_each_seed() -> None:
    found = planned({"strategy.server_lr": ["0.1", "1"], "training.lr": ["0.5"]})
    assert [(one.label, one.seed) for one in found] == [
        ("server_lr=0.1, lr=0.5", 1), ("server_lr=0.1, lr=0.5", 2),
        ("server_lr=1, lr=0.5", 1), ("server_lr=1, lr=0.5", 2),
    ]  # fmt: skip
    assert str(found[0].folder) == "out/runs/server_lr=0.1-lr=0.5-seed-1"
    assert found[3].experiment == config.change(PLAIN, ["strategy.server_lr=1", "training.lr=0.5", "seed=2"])


def test_all_runs_of_a_sweep_have_the_phones_that_the_experiments_own_seed_draws() -> None:
    def fleets(seed: int) -> list[Any]:
        drawn = Experiment(fleet=Fleet(devices="phones-2020"), stop=Stop(versions=1), seed=seed)
        return [one.experiment.fleet.devices for one in planned({}, wanted=drawn)]

    assert fleets(5)[0] == fleets(5)[1] != fleets(6)[0] == fleets(6)[1]


def test_a_fleet_file_of_a_grid_has_its_own_networks_as_in_a_run(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("fleet.devices = { pi-4 = 4 }\nstop.versions = 3")
    alone = config.load(tmp_path / "e.toml", ["fleet.devices=mixed-24"]).fleet
    assert isinstance(alone.network, dict)
    wanted = config.load(tmp_path / "e.toml")
    assert planned({"fleet.devices": ["mixed-24"]}, wanted=wanted)[0].experiment.fleet == alone
    for grid in (
        {"fleet.devices": ["mixed-24"], "fleet.network": ["wifi"]},
        {"fleet": ["{devices='mixed-24', network='wifi'}"]},
    ):
        assert planned(grid, wanted=wanted)[0].experiment.fleet.network == "wifi"


def test_a_fleet_file_of_a_grid_replaces_the_networks_of_the_experiments_own_fleet_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "e.toml").write_text("fleet.devices = 'mixed-24'\nstop.versions = 3")
    grid = {"fleet.devices": ["mixed-24", "paper-fedstaleweight"]}
    for wanted in (
        config.load(tmp_path / "e.toml", grid=grid),
        Experiment(fleet=Fleet(devices="mixed-24"), stop=Stop(versions=3)),
        Experiment(fleet={"devices": "mixed-24"}, stop=Stop(versions=3)),
    ):
        networks = [one.experiment.fleet.network for one in planned(grid, (1,), wanted)]
        assert isinstance(networks[0], dict)
        assert networks[1] == "none"


def test_labels_are_short_and_folders_have_unique_names(capsys: pytest.CaptureFixture[str]) -> None:
    def labels(grid: dict[str, list[str]]) -> list[str]:
        return [one.label for one in planned(grid, (1,))]

    assert labels({"strategy.name": ["fedbuff", "'fedasync'"]}) == ["fedbuff", "fedasync"]
    assert "fedasync': dropped strategy.buffer_size" in capsys.readouterr().err
    assert labels({}) == ["fedbuff"]
    assert labels({"training.lr": ["0.1"], "strategy.server_lr": ["1"]}) == ["lr=0.1, server_lr=1"]
    names = planned({"training.lr": ["1e-1", "1e+1"]}, (1,))
    assert [one.folder.name for one in names] == ["lr=1e-1-seed-1", "lr=1e-1-2-seed-1"]


def test_fleets_are_drawn_also_if_the_grid_replaces_their_table() -> None:
    def drawn(grid: dict[str, list[str]], wanted: Experiment = PLAIN) -> list[str]:
        found = plan(wanted, Path("out"), [1], grid, Path.cwd(), fleets=True)
        return [one.experiment.fleet.model_errors for one in found]

    assert drawn({}) == ["drawn"]
    assert drawn({"fleet": ["{devices={pi-4=4}}", "{devices={pixel-4=4}}"]}) == ["drawn", "drawn"]
    with pytest.raises(ConfigError, match=r"--fleets and --grid fleet\.model_errors: give only one"):
        drawn({"fleet.model_errors": ["none", "drawn"]})
    with pytest.raises(ConfigError, match="kind=wall: --fleets needs the virtual clock"):
        drawn({"clock.kind": ["virtual", "wall"]})


@pytest.mark.parametrize(
    ("grid", "seeds", "words"),
    [
        ({"seed": ["1"]}, (1,), "--grid seed: set seeds with --seeds"),
        ({"data.name": ["digits"]}, (1,), "--grid data.name: runs on different examples cannot be compared"),
        ({"data": ["{name='digits'}", "{name='digits', test_fraction=0.5}"]}, (1,),
         "5}: data.test_fraction is 0.5, but 0.2 in the first run; runs on different examples cannot be"),
        ({"evaluation": ["{max_examples=50}", "{max_examples=60}"]}, (1,),
         "evaluation.max_examples is 60, but 50 in the first run; runs on different examples cannot"),
        ({"data.image_size": ["32", "84"]}, (1,), "--grid data.image_size: runs on different examples"),
        ({"training.lr": ["1", "1"]}, (1,), "--grid training.lr: expected different values, got 1, 1"),
        ({"training.lr": ["0.1", "0.10"]}, (1,), "training.lr: expected different values, got 0.1, 0.10"),
        (
            {"training": ["{lr=0.1}", "{lr=0.2}"], "training.lr": ["1"]},
            (1,),
            "--grid: training={lr=0.2}, lr=1 and training={lr=0.1}, lr=1 have the same settings: a later key",
        ),
        (
            {"strategy.server_lr": ["0.5", "1.0"], "strategy": ["{name='fedbuff'}"]},
            (1,),
            "--grid: server_lr=1.0, fedbuff and server_lr=0.5, fedbuff have the same settings: a later key",
        ),
        ({"strategy.name": ["fedbuff", "'fedbuff'"]}, (1,), "strategy.name: expected different values"),
        ({"model.args.hidden": ["[8]", "[8 ]"]}, (1,), "--grid model.args.hidden: expected different values"),
        ({"name": ["a", "b"]}, (1,), "--grid name: it changes nothing in a run"),
        ({}, (1, 1), "--seeds: expected different seeds, got 1, 1"),
        ({}, (), "--seeds: expected different seeds, got none"),
        ({"training.lr": ["0.1", "fast"]}, (1,), "--grid training.lr=fast: training.lr: must be a number"),
        ({"training.rate": ["1"]}, (1,), "--grid training.rate=1: unknown key 'training.rate'"),
        ({"strategy.buffer_size": ["2", "9"]}, (1,), "buffer_size=9: .*buffer_size"),
        ({"training.lr": [str(n) for n in range(1, 200)]}, tuple(range(100)), "a sweep of 19,900 runs is"),
    ],
)  # fmt: skip
def test_an_invalid_grid_or_invalid_seeds_are_refused(
    grid: dict[str, list[str]], seeds: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(grid, seeds)


def test_a_grid_and_seeds_are_parsed_and_an_error_names_the_format(edgefl: Shell) -> None:
    assert axis("fleet.devices={pi-4=2},{pi-4=3,pixel-4=1}")[1] == ["{pi-4=2}", "{pi-4=3,pixel-4=1}"]
    assert axis("name='a,b',c")[1] == ["'a,b'", "c"]
    for text in ("training.lr", "=1", "training.lr=1,", ""):
        with pytest.raises(ConfigError, match="expected KEY=VALUE,VALUE"):
            axis(text)
    for text in ("x", "1..", "3..1", "-1", "1..1000000000", ""):
        with pytest.raises(ConfigError, match="--seeds"):
            seeds_of(text)
    assert edgefl.refuses(2, "sweep", "missing.toml") == "missing.toml: no such file"
    assert edgefl.refuses(2, "sweep", "missing.toml", "--seeds", "").startswith("--seeds : expected numbers")


def test_runs_with_equal_local_training_try_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def one(model, examples, context): ...\ntwo = one\n")
    asked: list[Experiment] = []
    channel = SimpleNamespace(
        tell=lambda prepare: asked.append(prepare.experiment), receive=lambda: None, close=lambda: None
    )
    server: Any = SimpleNamespace(start=lambda *_: (None, channel))
    monkeypatch.setattr(sweep, "end_child", lambda *_: None)

    def tried(**grid: list[str]) -> list[tuple[Any, ...]]:
        asked.clear()
        keys = {key.replace("__", "."): values for key, values in grid.items()}
        runs = plan(PLAIN, tmp_path / "s", [1, 2], {"training.function": ['"mine:one"'], **keys}, tmp_path)
        sweep._try_training(runs, tmp_path, lambda: server)
        return [(each.training.function, each.training.lr, each.strategy["name"]) for each in asked]

    assert tried(strategy__server_lr=["0.5", "1.0"]) == [("mine:one", 0.05, "fedbuff")]
    assert tried(training__lr=["0.1", "0.2"], strategy__server_lr=["0.5", "1.0"]) == [
        ("mine:one", 0.1, "fedbuff"),
        ("mine:one", 0.2, "fedbuff"),
    ]
    assert tried(strategy__server_lr=["0.5"]) == []
    killed: list[Any] = []
    channel.receive = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(sweep, "kill_tree", killed.append)
    with pytest.raises(KeyboardInterrupt):
        tried(training__lr=["0.1", "0.2"])
    assert killed == [None]


def test_a_folder_without_a_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"versions": 3}')
    with pytest.raises(ConfigError, match="holds no sweep"):
        Sweep(tmp_path)


def test_a_setting_that_nodes_cannot_run_is_refused_before_the_first_run(tmp_path: Path) -> None:
    how: dict[str, Any] = {"grid": {"strategy.name": ["fedavg", "scaffold"]}, "seeds": (1,)}
    with pytest.raises(ConfigError, match=r"^scaffold: nodes cannot keep a client's vectors between trips"):
        sweep.sweep(PLAIN, tmp_path / "out", **how, adapted=lambda one: on_nodes(one, tmp_path))
    assert not list(tmp_path.glob("out/runs/*"))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"jobs": 0}, "jobs: must be a whole number from 1 to 256, got 0"),
        ({"jobs": "2"}, "jobs: must be a whole number from 1 to 256, got '2'"),
        ({"jobs": True}, "jobs: must be a whole number from 1 to 256, got True"),
        ({"jobs": np.int64(257)}, "jobs: must be a whole number from 1 to 256, got np.int64(257)"),
        ({"fleets": 1}, "fleets: must be a whole number from 2 to 10000, got 1"),
        ({"fleets": 10**12}, "fleets: must be a whole number from 2 to 10000, got 1000000000000"),
        ({"target": "0.9"}, "target: expected an accuracy above 0 and at most 1, such as 0.9; got '0.9'"),
        ({"seeds": ["1", "2"]}, "seeds: must be a whole number from 0, got '1'"),
        ({"seeds": [1.0]}, "seeds: must be a whole number from 0, got 1.0"),
        ({"grid": {3: [1, 2]}}, "grid: must be keyed by strings, such as 'training.lr', got 3"),
        (
            {"seeds": (1, 2, 3), "fleets": 2},
            "seeds and fleets: give only one of them; each fleet has its own seed",
        ),
        (
            {"strategy": "fedasync", "grid": {"strategy": ["fedbuff", "fedavg"]}},
            "strategy: has no effect, because the grid replaces it (grid 'strategy')",
        ),
        (
            {"strategy": "fedasync", "grid": {"strategy.name": ["fedbuff", "fedavg"]}},
            "strategy: has no effect, because the grid replaces it (grid 'strategy.name')",
        ),
        (
            {"model": "mlp", "grid": {"model.name": ["mlp", "cnn-fedbuff"]}},
            "model: has no effect, because the grid replaces it (grid 'model.name')",
        ),
    ],
)
def test_the_python_function_has_the_limits_of_the_command(
    tmp_path: Path, how: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        edgefl.sweep(PLAIN, tmp_path / "out", **how)
    assert str(error.value) == says
    assert not (tmp_path / "out").exists()


def test_the_python_function_accepts_numpys_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(sweep, "sweep", lambda *_, **options: given.update(options))
    edgefl.sweep(PLAIN, tmp_path / "out", jobs=np.int64(3), fleets=np.uint8(2))  # type: ignore[arg-type]
    assert (given["jobs"], given["seeds"], given["fleets"]) == (3, [1, 2], True)
    assert type(given["jobs"]) is int
    edgefl.sweep(PLAIN, tmp_path / "out", seeds=np.arange(4, 6))
    assert given["seeds"] == [4, 5]
    assert {type(seed) for seed in given["seeds"]} == {int}
    edgefl.sweep(PLAIN, tmp_path / "out")
    assert given["seeds"] == [1, 2, 3]
    tables = [{"name": "fedbuff", "buffer_size": size} for size in np.arange(3, 5)]
    edgefl.sweep(PLAIN, tmp_path / "out", grid={"strategy": tables})
    assert given["grid"]["strategy"] == [f'{{ name = "fedbuff", buffer_size = {size} }}' for size in (3, 4)]


def test_a_setting_that_the_grid_replaces_is_refused(tmp_path: Path, edgefl: Shell) -> None:
    file, out = tmp_path / "one.toml", tmp_path / "out"
    file.write_text(config.dump(PLAIN))
    for given, grid in (
        ("--set strategy.buffer_size=3", "strategy.buffer_size=1,2"),
        ("--set strategy.buffer_size=3", "strategy={name='fedbuff'},{name='fedavg'}"),
        ("--set training.steps=3", "training.epochs=1,2"),
        ("--clock wall", "clock.kind=virtual,wall"),
    ):
        key = grid.partition("=")[0]
        refused = edgefl.refuses(2, "sweep", str(file), *given.split(), "--grid", grid, "--out", str(out))
        assert refused == f"{given}: has no effect, because --grid {key} replaces it"
    assert not out.exists()
