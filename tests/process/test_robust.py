"""Runs with attackers, and runs with strategies that read individual updates."""

from __future__ import annotations

from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import edgefl
from edgefl.experiment import Attackers
from edgefl.lab.verify import verify
from edgefl.learning.attacks import attacking_clients
from edgefl.results.report import summary_table
from edgefl.results.result import Result
from edgefl.run import supervisor

DIGITS: dict[str, Any] = {
    "data": edgefl.Data(name="digits"),
    "model": edgefl.Model(name="mlp", args={"hidden": [8]}),
    "fleet": edgefl.Fleet(devices={"pi-4": 5, "moto-g4": 3}, network="none"),
    "clock": edgefl.Clock(kind="virtual"),
    "stop": edgefl.Stop(versions=4),
}


def run(
    folder: Path,
    strategy: dict[str, Any],
    attackers: Attackers | None,
    workers: int | None = None,
    versions: int = 12,
) -> dict[str, Any]:
    fleet = edgefl.Fleet(devices={"pi-4": 10}, network="none", attackers=attackers)
    return supervisor.run(
        edgefl.Experiment(
            data=edgefl.Data(name="digits", partition="iid"),
            model=edgefl.Model(name="mlp", args={"hidden": [16]}),
            fleet=fleet,
            clock=edgefl.Clock(kind="virtual", workers=workers),
            training=edgefl.Training(lr=0.1),
            stop=edgefl.Stop(versions=versions),
            strategy={"buffer_size": 10, "restart": "after-step", **strategy},
        ),
        folder,
        quiet=True,
        base=folder.parent,
    ).summary()


def test_the_median_learns_where_the_average_does_not(tmp_path: Path) -> None:
    """Two of ten clients send −20 times their update."""
    attackers = Attackers(share=0.2, scale=20.0)
    average = run(tmp_path / "average", {"name": "fedbuff", "exponent": 0.0}, attackers)
    median = run(tmp_path / "median", {"name": "median"}, attackers)
    assert average["accuracy"] < 0.3
    assert median["accuracy"] > 0.6
    found = average["attackers"]
    assert (found["clients"], found["accuracy_on"]) == (2, "their classes")
    assert found["weight_share"] == found["attacking"]["weight_share"] == pytest.approx(0.2, abs=0.02)
    assert found["honest"]["weight_share"] == pytest.approx(0.8, abs=0.02)
    assert found["attacking"]["weight"] == pytest.approx(1.0, abs=0.1)
    assert found["honest"]["accuracy"] == pytest.approx(average["accuracy"], abs=0.01)
    assert verify(tmp_path / "median").versions == 12


def test_krum_gives_attackers_no_weight(tmp_path: Path) -> None:
    attackers = Attackers(share=0.2, scale=20.0)
    found = run(tmp_path / "krum", {"name": "krum", "selected": 4}, attackers, versions=8)
    assert found["attackers"]["weight_share"] == 0.0
    assert found["attackers"]["honest"]["weight"] == pytest.approx(10 / 8)
    assert set(Result(tmp_path / "krum").weights()["weight"]) == {0.0, 0.25}
    assert verify(tmp_path / "krum").versions == 8


def test_alie_has_the_same_bits_for_any_number_of_workers(tmp_path: Path) -> None:
    rules = Attackers(share=0.2, kind="alie", z=1.0)
    one, three = (run(tmp_path / str(k), {"name": "fedbuff"}, rules, k, versions=5) for k in (1, 3))
    honest = run(tmp_path / "honest", {"name": "fedbuff"}, None, versions=5)
    assert one["model_sha256"] == three["model_sha256"] != honest["model_sha256"]
    assert "attackers" not in honest
    assert verify(tmp_path / "1").versions == 5


def test_both_groups_are_evaluated_on_own_examples(tmp_path: Path) -> None:
    """The attackers' updates are almost zero. Attackers and honest clients hold different classes."""
    out, rules = tmp_path / "run", Attackers(share=0.5, scale=1e-6)
    attackers = attacking_clients(rules, 10, 0)
    fleet = edgefl.Fleet(devices={"pi-4": 10}, network="none", attackers=rules)
    (tmp_path / "own_split.py").write_text(
        "import numpy as np\n"
        "def split(labels, profiles, rng):\n"
        f"    attackers = {attackers!r}\n"
        "    low, high = np.flatnonzero(labels < 5), np.flatnonzero(labels >= 5)\n"
        "    groups = [attackers, sorted(set(range(10)) - set(attackers))]\n"
        "    rows = [None] * 10\n"
        "    for group, part in zip(groups, (high, low)):\n"
        "        for place, client in enumerate(group):\n"
        "            rows[client] = part[place::len(group)]\n"
        "    return rows\n"
    )
    result = supervisor.run(
        edgefl.Experiment(
            data=edgefl.Data(name="digits", partition="own_split:split", client_test_fraction=0.2),
            model=edgefl.Model(name="mlp", args={"hidden": [16]}),
            fleet=fleet,
            training=edgefl.Training(lr=0.1),
            evaluation=edgefl.Evaluation(clients="global"),
            stop=edgefl.Stop(versions=30),
        ),
        out,
        quiet=True,
        base=tmp_path,
    )
    found = result.summary()["attackers"]
    assert found["accuracy_on"] == "their own held-out examples"
    assert found["honest"]["accuracy"] > 0.7
    assert found["attacking"]["accuracy"] < 0.1
    page = (out / "report.html").read_text()
    assert "5 clients sent harmful updates" in page
    assert "of the last model on their own held-out examples" in page


def test_attacks_that_fail_later_are_reported(tmp_path: Path) -> None:
    (tmp_path / "own_attack.py").write_text(
        "def attack(delta, client, trip, rng):\n"
        "    if trip:\n        raise ValueError('only once')\n    delta *= -1\n"
    )
    found = run(tmp_path / "run", {"name": "fedbuff"}, Attackers(share=0.2, kind="own_attack:attack"), 2, 4)
    why = "'own_attack:attack' raised ValueError: only once"
    assert found["attackers"]["failed_trips"] == found["incidents"]["failed"] > 0
    assert found["attackers"]["first_failure"] == why
    said = f"trips failed because of the attack function; in the first, {why}"
    shown = StringIO()
    Console(file=shown, width=400).print(summary_table(found, tmp_path / "run"))
    assert said in shown.getvalue()
    assert escape(said) in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("strategy", "update_format"),
    [
        ({"name": "median", "buffer_size": 4, "restart": "new-version", "max_staleness": 0}, "int8"),
        ({"name": "rfa", "buffer_size": 5}, "bfloat16"),
    ],
    ids=["median in rounds", "geometric median"],
)
def test_a_run_whose_strategy_reads_updates_is_verified(
    strategy: dict[str, Any], update_format: Any, tmp_path: Path
) -> None:
    server = edgefl.Server(update_format=update_format)
    result = edgefl.run(edgefl.Experiment(**DIGITS, strategy=strategy, server=server), out=tmp_path / "run")
    found = result.staleness()
    applied = found["staleness"][found["fate"] == "applied"].tolist()
    assert len(applied) == len(result.weights()["weight"]) == 4 * strategy["buffer_size"]
    assert max(applied) <= strategy.get("max_staleness", 99)
    assert verify(tmp_path / "run").versions == 4


MINE = """
from dataclasses import dataclass

import numpy as np

from edgefl.strategies import Buffered


@dataclass(frozen=True, kw_only=True)
class Mine(Buffered):
    reads = "updates"

    def combine(self, rows, weights):
        small = rows.norms <= np.median(rows.norms)
        return small / small.sum()
"""


def test_an_own_strategy_may_read_the_norms_of_updates(tmp_path: Path) -> None:
    (tmp_path / "own_strategy.py").write_text(MINE)
    wanted = edgefl.Experiment(**DIGITS, strategy={"name": "own_strategy:Mine", "buffer_size": 5})
    result = supervisor.run(wanted, tmp_path / "run", quiet=True, base=tmp_path)
    assert set(np.round(result.weights()["weight"], 6)) == {0.0, 0.333333}
