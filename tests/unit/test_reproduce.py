"""Reproductions: every paper's settings, changes of them, and claims judged on figures that are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

import pytest

from edgefl import ConfigError, config
from edgefl.lab import PAPERS, fedstaleweight
from edgefl.lab.study import Arm, Curves, Study, slug

STUDIES = [import_module(f"edgefl.lab.{name}").study for name in PAPERS if name != "theory"]
TWO = Study(
    "fedbuff", "", "", (Arm("a", ()), Arm("b", ("strategy.buffer_size=2",))), lambda curves: [], seeds=(1, 2)
)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_arm_is_an_experiment_that_can_be_run(study: Study, quick: bool) -> None:
    checked = [
        config.validate(study.experiment(arm, 1, quick=quick), study.file(quick).parent) for arm in study.arms
    ]
    texts = [config.dump(each) for each in checked]
    assert len(set(texts)) == len(texts)
    assert len({slug(arm) for arm in study.arms}) == len(study.arms)
    assert all(each.clock.kind == "virtual" for each in checked)
    assert (checked[0].data.name == "digits") == quick


def test_defedavg_takes_the_steps_of_its_table() -> None:
    study = next(study for study in STUDIES if study.name == "defedavg")
    steps = {}
    for arm in study.arms:
        each = study.experiment(arm, 1, quick=False)
        steps[arm.label] = (each.strategy["server_lr"], each.training.lr)
    assert steps == {  # Wang 2024, table II, FashionMNIST, n = 10
        "DeFedAvg-nIID": (0.1, 0.05),
        "non-IID FedAvg": (0.1, 0.05),
        "non-IID FedBuff": (0.1, 0.005),
        "non-IID FAVANO": (1.0, 0.05),  # the table has no other step for it
        "DeFedAvg-IID": (0.1, 0.05),
        "IID FedAvg": (1.0, 0.1),
        "IID FAVANO": (1.0, 0.1),
        "IID AsySG": (0.1, 0.01),  # the table has 0.1, with which it diverges here
    }


def test_what_an_arm_changes_in_small_it_changes_only_there() -> None:
    arm = Arm("a", (), full=("training.lr=0.5",), quick=("training.lr=0.25",))
    assert [TWO.experiment(arm, 1, quick=quick).training.lr for quick in (False, True)] == [0.5, 0.25]
    with pytest.raises(ConfigError, match=r"training\.lr is what tells a from the other arms"):
        replace(TWO, arms=(arm, Arm("b", ()))).changed(["training.lr=1"])


def test_a_change_goes_into_every_run_but_not_into_what_tells_the_arms_apart() -> None:
    changed = TWO.changed(["stop.versions=2", "training.lr=0.25"])
    for arm in changed.arms:
        wanted = changed.experiment(arm, 1, quick=True)
        assert (wanted.stop.versions, wanted.training.lr) == (2, 0.25)
    assert "stop.versions=2, training.lr=0.25" in changed.notes[-1]
    assert TWO.changed([]) == TWO
    for change in ("strategy.buffer_size=3", " strategy . buffer_size=3", "strategy={name='fedavg'}"):
        with pytest.raises(ConfigError, match=r"strategy\.buffer_size is what tells b from the other arms"):
            TWO.changed([change])
    with pytest.raises(ConfigError, match="every arm runs with seeds 1, 2"):
        TWO.changed(["seed=7"])


def test_a_change_that_would_take_back_what_an_arm_sets_is_refused() -> None:
    one_step = replace(TWO, arms=(*TWO.arms, Arm("c", ("training.steps=1",))))
    for change in ("training.epochs=2", "training.steps=2", "training={epochs=2}"):
        with pytest.raises(ConfigError, match=r"training\.steps is what tells c from the other arms"):
            one_step.changed([change])
    assert TWO.changed(["training.epochs=2"]).experiment(TWO.arms[1], 1, quick=True).training.epochs == 2


class Known(Curves):
    """Curves of one seed whose weights are given and all else is alike."""

    def __init__(self, slow: Mapping[str, float]) -> None:
        super().__init__(dict.fromkeys(slow, ()))
        self._slow = slow

    def weights(self, label: str, profile: str) -> list[float]:
        slow = self._slow[label]
        return [slow if profile == fedstaleweight.SLOW else (15.0 - 5.0 * slow) / 10.0]

    def accuracy(self, label: str, last: int = 0) -> list[float]:
        return [0.9]

    best = accuracy

    def reached(self, label: str, target: float, over: str) -> list[float]:
        return [100.0]


@pytest.mark.parametrize(
    ("slow", "says"), [(0.6, "reproduced"), (1.4, "reproduced"), (2.5, "not reproduced")]
)
def test_fairer_is_nearer_to_1_and_not_more_for_the_slow(slow: float, says: str) -> None:
    arms = dict.fromkeys((fedstaleweight.RUNNING, fedstaleweight.AVERAGE, fedstaleweight.FEDBUFF), 0.2)
    judged = fedstaleweight.judge(Known({fedstaleweight.PAPER: slow, **arms}))
    (found,) = [one for one in judged if one.claim.startswith("fairer")]
    assert found.verdict == says
