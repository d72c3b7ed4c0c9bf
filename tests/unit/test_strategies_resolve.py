"""Tests of `resolve`: the strategy for an experiment's table, users' modules, and errors in one line."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl import strategies
from edgefl.core.strategy_calls import check_answers
from edgefl.errors import ConfigError
from edgefl.strategies import (
    Arrivals,
    Buffered,
    LocalTerms,
    ServerOptimizer,
    Strategy,
    hyperparameters,
    names,
    resolve,
)
from edgefl.strategies.fedavg import FedAvg
from edgefl.strategies.fedbuff import FedBuff

MINE = """
from dataclasses import dataclass
from edgefl.strategies import Buffered

@dataclass(frozen=True, kw_only=True)
class Mine(Buffered):
    power: float = 1.0

    def weights(self, state, updates, view):
        return [self.power] * len(updates)

not_a_strategy = 3
"""


@pytest.mark.parametrize("name", names())
def test_each_built_in_strategy_is_a_hashable_dataclass_of_its_name(name: str) -> None:
    strategy = resolve({"name": name})
    assert type(strategy).__name__.lower() == name.replace("-", "")
    assert dataclasses.is_dataclass(strategy)
    assert hash(strategy) == hash(resolve({"name": name}))
    assert isinstance(strategy.optimizer(), ServerOptimizer)
    assert (type(strategy).__doc__ or "").strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derives(FedBuff):
    """A strategy whose constructor computes an array, and other fields that cannot be recorded."""

    shares: Any = ()
    model: Any = None
    table: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shares", np.array(self.shares))
        object.__setattr__(self, "model", object())
        object.__setattr__(self, "table", object())


def test_hyperparameters_are_plain_data_even_if_the_constructor_computes_fields() -> None:
    assert hyperparameters(FedBuff(buffer_size=3)) == dataclasses.asdict(FedBuff(buffer_size=3))
    found = hyperparameters(Derives(shares=(1.0, 2.0)))
    assert found["shares"] == [1.0, 2.0]
    assert not {"model", "table"} & found.keys()


def test_modules_that_strategies_share_are_not_strategies() -> None:
    assert not {"base", "buffered", "rounds", "asynchronous", "noise", "polled"} & set(names())
    with pytest.raises(ConfigError, match="strategy 'buffered' not found"):
        resolve({"name": "buffered"})


def test_fields_get_their_values_and_are_checked_in_the_constructor_too() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.buffer_size: must be a whole number .*, got 0"):
        FedBuff(buffer_size=0)
    strategy = resolve({"name": "fedbuff", "buffer_size": 3, "exponent": 2, "normalize": True})
    assert strategy == FedBuff(buffer_size=3, exponent=2, normalize=True)
    numpys: Any = {"buffer_size": np.int64(3), "exponent": np.float32(2), "normalize": np.bool_(True)}
    assert FedBuff(**numpys) == strategy
    assert type(FedBuff(**numpys).buffer_size) is int


COUNT, EXPONENT = "a whole number from 1 to 1000000000", "a finite number of at least 0"
OUT_OF_RANGE = [
    ("fedbuff", "buffer_size", 0, COUNT),
    ("fedbuff", "buffer_size", 2.5, COUNT),
    ("fedbuff", "exponent", "x", EXPONENT),
    ("fedbuff", "exponent", -1.0, EXPONENT),
    ("fedbuff", "exponent", float("nan"), EXPONENT),
    ("fedbuff", "exponent", float("inf"), EXPONENT),
    ("fedbuff", "server_lr", 0.0, "a finite number above 0"),
    ("fedbuff", "momentum", 1.0, "a number of at least 0 and below 1"),
    ("fedbuff", "normalize", 1, "true or false"),
    ("fedbuff", "max_staleness", -1, "a whole number of at least 0"),
    ("fedbuff", "restart", "later", "'after-step' or 'immediate' or 'new-version'"),
    ("fedavg", "over_selection", 0.9, "a finite number of at least 1"),
    ("fedavg", "weighting", 1, "'examples' or 'uniform'"),
    ("fedasync", "alpha", 1.5, "a number above 0 and at most 1"),
    ("fedstaleweight", "window", 0, COUNT),
    ("fedfix", "interval_s", 0.0, "a finite number above 0"),
    ("fedfix", "importance_by", "size", "'examples' or 'uniform'"),
    ("pisces", "staleness_bound", 0, COUNT),
    ("pisces", "staleness_penalty", -0.5, EXPONENT),
    ("pisces", "window", 0, COUNT),
    ("pisces", "credits", 0, COUNT),
    ("pisces", "outlier_distance", 0.0, "a finite number above 0"),
    ("fedat", "tiers", 0, COUNT),
    ("fedat", "lam", -0.1, EXPONENT),
    ("asyncfeded", "lam", 0.0, "a finite number above 0"),
    ("asyncfeded", "epsilon", 0.0, "a finite number above 0"),
    ("asyncfeded", "target", -1.0, EXPONENT),
    ("asyncfeded", "kappa", -1.0, EXPONENT),
    ("asyncfeded", "max_growth", 0.5, "a finite number of at least 1"),
    ("safa", "participants", 0, COUNT),
    ("safa", "lag_tolerance", -1, "a whole number of at least 0"),
    ("safa", "round_limit_s", 0.0, "a finite number above 0"),
    ("aso-fed", "lam", -1.0, EXPONENT),
    ("aso-fed", "beta", 1.0, "a number of at least 0 and below 1"),
    ("quafl", "participants", 0, COUNT),
    ("quafl", "interval_s", -1.0, "a finite number above 0"),
    ("mifa", "gather_s", -1.0, EXPONENT),
    ("pisces", "weighting", "loss", "'examples' or 'uniform'"),
]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "strategy.name must be one of aso-fed, asyncfeded, asysg, ca2fl, "),
        ({"name": 3}, "such as 'my_module:Mine' (got 3)"),
        ({"name": "fedbufff"}, "strategy.name: strategy 'fedbufff' not found; did you mean 'fedbuff'?"),
        ({"name": "../base"}, "strategy '../base' not found"),
        (
            {"name": "fedbuff", "k": 1},
            "strategy.k: field of fedbuff 'k' not found; available: arrival_process, ",
        ),
        ({"name": "fedbuff", "upload": "model"}, "strategy.upload: field of fedbuff 'upload' not found"),
        ({"name": "fedbuff", "buffer_size": True}, f"strategy.buffer_size: must be {COUNT}, got true"),
        *(
            ({"name": name, field: value}, f"strategy.{field}: must be {allowed}, got {value!r}")
            for name, field, value, allowed in OUT_OF_RANGE
        ),
    ],
)
def test_an_error_is_one_line_that_names_the_field(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(table)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("fedbuff", {"buffer_size": 30}, "strategy.buffer_size must be at most {fleet}, got 30"),
        ("fedbuff", {"concurrency": 30}, "strategy.concurrency must be at most {fleet}, got 30"),
        ("fedavg", {"cohort": 30}, "strategy.cohort must be at most {fleet}, got 30"),
        ("safa", {"participants": 30}, "strategy.participants must be at most {fleet}, got 30"),
        ("quafl", {"participants": 30}, "strategy.participants must be at most {fleet}, got 30"),
        ("favano", {"participants": 25}, "strategy.participants must be at most {fleet}, got 25"),
        (
            "fedavg",
            {"cohort": 20, "over_selection": 1.3},
            "over_selection × strategy.cohort must be at most {fleet}, got 1.3 × 20 = 26",
        ),
    ],
)
def test_fields_that_do_not_fit_a_fleet_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"name": name, **fields}).check(24)
    assert message.format(fleet="the fleet's 24 clients") in str(caught.value)


@pytest.mark.parametrize("name", ["krum", "median", "rfa", "trimmed-mean"])
def test_buffers_that_are_too_large_to_compare_are_refused_before_the_run(name: str) -> None:
    resolve({"name": name, "buffer_size": 1024}).check(5000)
    message = "strategy.buffer_size must be at most 1024 for a strategy that compares updates, got 1025"
    with pytest.raises(ConfigError, match=message):
        resolve({"name": name, "buffer_size": 1025}).check(5000)


def test_defaults_of_the_built_in_strategies_fit_every_fleet() -> None:
    for name, clients in itertools.product(names(), (1, 2, 7, 24, 1000)):
        strategy = resolve({"name": name})
        strategy.check(clients)
        check_answers(strategy, clients)
        assert 1 <= strategy.max_held(clients) <= strategy.slots(clients), (name, clients)


def test_fields_at_the_limit_of_the_fleet_are_allowed() -> None:
    resolve({"name": "fedbuff", "buffer_size": 24, "concurrency": 24, "restart": "new-version"}).check(24)
    resolve({"name": "fedbuff", "buffer_size": 24, "concurrency": 1}).check(24)
    resolve({"name": "fedavg", "cohort": 10, "over_selection": 1.3}).check(13)
    assert FedAvg(cohort=10, over_selection=1.3).members(100) == 13


def test_a_strategy_in_a_file_next_to_the_experiment_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_rule.py").write_text(MINE)
    strategy = resolve({"name": "my_rule:Mine", "power": 0.5}, [tmp_path / "elsewhere", tmp_path])
    assert isinstance(strategy, Buffered)
    assert resolve({"name": "my_rule:Mine"}, [tmp_path]) != strategy
    with pytest.raises(ConfigError, match=r"strategy\.power: must be a finite number, got 'x'"):
        resolve({"name": "my_rule:Mine", "power": "x"}, [tmp_path])


def test_two_files_of_one_name_in_different_folders_are_two_modules(tmp_path: Path) -> None:
    made = []
    for folder, default in ((tmp_path / "a", "1.0"), (tmp_path / "b", "2.0")):
        folder.mkdir()
        (folder / "same_name.py").write_text(MINE.replace("1.0", default))
        made.append(resolve({"name": "same_name:Mine"}, [folder]))
    assert [vars(strategy)["power"] for strategy in made] == [1.0, 2.0]
    assert vars(resolve({"name": "same_name:Mine"}, [tmp_path / "a"]))["power"] == 1.0


def test_a_strategys_file_may_import_files_of_its_folder_and_sys_path_stays_unchanged(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_rule.py").write_text(MINE)
    (tmp_path / "rule_with_neighbour.py").write_text("from neighbour_of_rule import Mine")
    before = list(sys.path)
    assert isinstance(resolve({"name": "rule_with_neighbour:Mine"}, [tmp_path]), Strategy)
    assert sys.path == before


def test_a_strategy_may_be_in_a_package_or_in_an_installed_module(tmp_path: Path) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text(MINE)
    assert isinstance(resolve({"name": "my_package:Mine"}, [tmp_path]), Buffered)
    assert resolve({"name": "edgefl.strategies.fedbuff:FedBuff"}, [tmp_path]) == FedBuff()


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("nowhere_at_all:Mine", None, "strategy.name: module 'nowhere_at_all' not found; looked in "),
        ("broken_rule:Mine", "def (", "cannot be imported: SyntaxError: invalid syntax"),
        ("raises_rule:Mine", "1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("exits_rule:Mine", "raise SystemExit", "'exits_rule' cannot be imported: SystemExit"),
        ("misses_rule:Mine", "import nothing_of_the_kind", "needs 'nothing_of_the_kind' (not installed)"),
        ("typo_rule:Mime", MINE, "module 'typo_rule': attribute 'Mime' not found; did you mean 'Mine'?"),
        ("value_rule:not_a_strategy", MINE, "must be a dataclass derived from Strategy, got 3"),
        ("base_rule:Strategy", "from edgefl.strategies import Strategy", "must be a dataclass derived from"),
        (":Mine", None, "strategy.name must look like 'my_module:name' (got ':Mine')"),
        ("../up:Mine", None, "must look like 'my_module:name'"),
        ("__main__:Mine", None, "name the module by its file instead of __main__ (got '__main__:Mine')"),
    ],
)
def test_an_error_in_a_users_module_is_one_line(
    tmp_path: Path, name: str, source: str | None, message: str
) -> None:
    if source is not None:
        (tmp_path / f"{name.partition(':')[0]}.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        resolve({"name": name}, [tmp_path])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


CHECKS_ITSELF = f"""{MINE}
    def __post_init__(self):
        super().__post_init__()
        if self.power > 1:
            raise ValueError("power must be at most 1")
""".replace("not_a_strategy = 3\n", "")


def test_an_error_in_a_users_constructor_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "checks_itself.py").write_text(CHECKS_ITSELF)
    assert vars(resolve({"name": "checks_itself:Mine"}, [tmp_path]))["power"] == 1.0
    message = "strategy 'checks_itself:Mine' cannot be created: ValueError: power must be at most 1"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        resolve({"name": "checks_itself:Mine", "power": 2.0}, [tmp_path])


def mine(**members: Any) -> type[Strategy]:
    return dataclasses.dataclass(frozen=True, kw_only=True)(type("Mine", (Buffered,), members))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"optimizer": lambda self: "adam"}, "Mine.optimizer must return a ServerOptimizer of kind sgd"),
        ({"optimizer": lambda self: ServerOptimizer(kind="rmsprop")}, "got ServerOptimizer(kind='rmsprop'"),
        ({"optimizer": lambda self: ServerOptimizer(lr=math.nan)}, "with finite numbers, got"),
        ({"local_rule": lambda self: None}, "Mine.local_rule must return LocalTerms with a finite prox_mu"),
        ({"local_rule": lambda self: LocalTerms(prox_mu=math.inf)}, "got LocalTerms(prox_mu=inf"),
        ({"slots": lambda self, clients: None}, "Mine.slots must return an int of at least 1, got"),
        ({"max_training": lambda self, clients: np.int64(2)}, "Mine.max_training must return an int of at"),
        ({"max_held": lambda self, clients: 0}, "Mine.max_held must return an int of at least 1"),
        ({"max_held": lambda self, clients: np.float64(3)}, "of at least 1, got np.float64(3.0)"),
        ({"max_training": lambda self, clients: True}, "of at least 1, got True"),
        ({"arrivals": lambda self: "poisson"}, "Mine.arrivals must return None, or constant or poisson Arri"),
        ({"arrivals": lambda self: Arrivals("constant", 0.0)}, "with a finite rate above 0, got Arrivals("),
        ({"max_weight": lambda self, n: 1 / self.buffer_size}, "strategy Mine.max_weight raised TypeError"),
        ({"max_weight": lambda self, n: 0}, "max_weight must return None or a finite number above 0"),
        ({"sampling": lambda self, n: 0.1}, "Mine.sampling must return None, or Sampling with a rate"),
        ({"sampling": lambda self, n: (1.5, True)}, "and at most 1, and True or False, got (1.5, True)"),
        ({"check": lambda self, clients: 1 // 0}, "strategy Mine.check raised ZeroDivisionError"),
        ({"check": lambda self, clients: sys.exit("no")}, "strategy Mine.check raised SystemExit: no"),
        ({"upload": "gradient"}, "Mine.upload must be 'delta' or 'model', got 'gradient'"),
        ({"reads": "update"}, "Mine.reads must be 'metadata' or 'updates', got 'update'"),
        ({"combine": lambda self, rows, weights: weights}, "Mine defines combine, which needs reads = 'upd"),
    ],
)
def test_invalid_attributes_and_return_values_of_a_strategy_are_refused(
    members: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_answers(mine(**members)(), 4)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chooses(Buffered):
    """A strategy whose attributes depend on its hyperparameters."""

    robust: str = "updates"

    @property
    def reads(self) -> str:  # type: ignore[override]
        return self.robust

    @property
    def upload(self) -> str:  # type: ignore[override]
        return "delta" if self.robust == "updates" else "model"

    @property
    def vectors(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.robust == "updates" else ("c",)

    def combine(self, rows: Any, weights: Any) -> Any:
        return weights


def test_attributes_of_a_strategy_may_be_properties() -> None:
    for robust in ("updates", "metadata"):
        check_answers(Chooses(robust=robust), 4)
    with pytest.raises(ConfigError, match=r"Chooses\.reads must be 'metadata' or 'updates', got 'rows'"):
        Chooses(robust="rows")
    with pytest.raises(ConfigError, match=r"strategy\.robust: "):
        Chooses(robust=3)  # type: ignore[arg-type]


def test_a_new_file_in_the_folder_of_strategies_is_a_new_built_in_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own.py").write_text(MINE.replace("Mine", "MyOwn"))
    monkeypatch.setattr(strategies, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(strategies, "__path__", [str(tmp_path)])
    monkeypatch.setattr(strategies, "my_own", None, raising=False)  # so that the import is undone
    assert names() == ["my-own"]
    assert type(resolve({"name": "my-own", "power": 2.0})).__name__ == "MyOwn"
    del sys.modules["edgefl.strategies.my_own"]


def test_core_and_strategies_import_no_heavy_module() -> None:
    program = """
import sys
import edgefl.core, edgefl.strategies, edgefl.testing
from edgefl.strategies import names, resolve
for name in names():
    resolve({"name": name})
heavy = {"torch", "zmq", "numba", "sklearn", "matplotlib", "psutil"} & set(sys.modules)
assert not heavy, heavy
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
