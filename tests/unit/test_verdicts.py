"""Tests of a study's verdicts: mutants, equal runs, grid borders, and the correction for multiple claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from scipy.stats import ttest_1samp

from edgefl import config
from edgefl.kernels import MovingAverage
from edgefl.lab import PAPERS, fedbuff
from edgefl.lab.claims import corrected, correction, examined, mutants_of, mutated
from edgefl.lab.convergence import Ratio
from edgefl.lab.fedstaleweight import PAPER
from edgefl.lab.mutants import MUTANTS, PRIVATE, STALENESS
from edgefl.lab.studies import load
from edgefl.lab.study import Arm, Curves, Finding, Study, verdict
from edgefl.results.rows import EvaluationRow
from edgefl.results.statistics import difference, higher, p_of_ratio, p_value, ratio
from edgefl.strategies import Update, resolve
from edgefl.strategies.fedstaleweight import Expectation
from edgefl.testing import check_strategy

STUDIES: list[Study] = [load(name) for name in PAPERS if name != "theory"]
ARMS = {
    "fedstaleweight": ("fedstaleweight", PAPER),
    "fedbuff": ("fedbuff", fedbuff.FEDBUFF),
    "defedavg-niid": ("defedavg", "DeFedAvg-nIID"),
    "defedavg-iid": ("defedavg", "DeFedAvg-IID"),
    STALENESS: ("fedbuff", "FedBuff, K = 5"),
    PRIVATE: ("ablations-privacy", "FedBuff, DP-FTRL, ε = 24"),
}


def judge(curves: Curves) -> list[Finding]:
    """Judge two claims: FedBuff's accuracy is above FedAvg's, and above FedProx's."""
    mine = curves.accuracy("FedBuff")
    gains = {other: difference(mine, curves.accuracy(other)) for other in ("FedAvg", "FedProx")}
    return [
        Finding(
            f"above {other}", "", "", "", verdict(higher(gain)), "", ("FedBuff",), (other,), p_value(gain, 3)
        )
        for other, gain in gains.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Recorded(Study):
    """A study whose results are given: ``accuracies`` of three seeds for each arm, or for an arm's mutant."""

    accuracies: Mapping[str, Sequence[float]] = field(default_factory=dict)
    border: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)

    def borders(self, settings: str = "") -> dict[str, tuple[str, ...]]:
        return dict(self.border)

    def run(self, out, settings="", *, arms=None, say, quiet=True) -> Curves:  # type: ignore[no-untyped-def,override]
        arms = self.arms if arms is None else arms
        self.made.extend(arm.label for arm in arms)
        return Curves({arm.label: [_record(each) for each in self._of(arm.label)] for arm in arms}, settings)

    def _of(self, label: str) -> Sequence[float]:
        return self.accuracies.get(label, self.accuracies["FedBuff [else]" if "[" in label else label])


def _record(accuracy: float) -> Mock:
    row = EvaluationRow(version=1, at_s=1.0, wall_s=0.0, trips=1, loss=0.0, accuracy=accuracy)
    return Mock(evaluations=[row], meta=Mock(model_sha256=f"{accuracy}"))


ONE = Recorded(
    name="fedbuff",
    title="",
    citation="",
    arms=(
        Arm("FedBuff", ("strategy.name=fedbuff",)),
        Arm("FedAvg", ("strategy.name=fedavg",)),
        Arm("FedProx", ("strategy.name=fedprox",)),
    ),
    judge=judge,
    accuracies={
        "FedBuff": (0.90, 0.91, 0.92),
        "FedAvg": (0.80, 0.81, 0.83),
        "FedProx": (0.79, 0.81, 0.83),
        "FedBuff [else]": (0.10, 0.11, 0.12),
    },
)


def found(study: Recorded, settings: str = "quick", mutants: bool = False) -> list[Finding]:
    curves = study.run(Path(), settings, say=print)
    study.made.clear()
    return examined(study, curves, Path(), mutants=mutants, say=print)


def test_a_race_is_not_settled_if_a_first_model_has_the_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"early": [0.0, 4.0], "late": [8.0, 9.0]}
    monkeypatch.setattr(Curves, "reached", lambda _self, label, *_: costs[label])
    monkeypatch.setattr(Curves, "ended", lambda *_: [20.0, 20.0])
    curves = Curves({"early": [], "late": []}, "")
    assert curves.race("early", "late", 0.9, "trips") is curves.race("late", "early", 0.9, "trips") is None


def found_with(**accuracies: Sequence[float]) -> list[Finding]:
    return found(replace(ONE, accuracies={**ONE.accuracies, **accuracies}))


def test_a_claim_is_reproduced_if_every_mutant_fails() -> None:
    study = replace(ONE, made=[])
    first, second = found(study)
    assert (first.verdict, first.says) == (second.verdict, second.says) == ("reproduced", "reproduced")
    labels = [mutant.label for mutant in MUTANTS["fedbuff"]]
    assert first.mutants == dict.fromkeys(labels, "not reproduced")
    assert study.made == [f"FedBuff [{label}]" for label in labels]  # once for both claims


def test_a_claim_that_holds_for_a_mutant_too_does_not_distinguish() -> None:
    first, second = found_with(**{"FedBuff [1/K²]": (0.95, 0.96, 0.97)})
    assert first.says == second.says == "holds, does not distinguish: 1/K²"
    assert "fails with no s(τ), 1/s(τ), only the first update" in first.remark


def test_a_mutant_whose_runs_equal_the_arms_is_left_out() -> None:
    first, _ = found_with(**{"FedBuff [no s(τ)]": ONE.accuracies["FedBuff"]})
    assert first.says == "reproduced"
    assert "no s(τ)" not in first.mutants


def test_a_verdict_says_that_mutants_were_not_run() -> None:
    study = replace(ONE, made=[])
    first, _ = found(study, settings="")
    assert first.says == "reproduced (mutants not run)"
    assert study.made == []
    assert found(study, settings="", mutants=True)[0].says == "reproduced"


def test_a_claim_about_an_arm_with_the_same_runs_as_another_arm_is_not_judged() -> None:
    """For example, FedProx with one local step is FedAvg."""
    first, second = found_with(FedProx=ONE.accuracies["FedAvg"])
    assert first.verdict == "reproduced"
    assert second.verdict == "same runs"
    assert "FedProx and FedAvg" in second.note
    assert second.mutants == {}


def test_a_claim_whose_step_sizes_are_at_the_border_of_the_grid_is_not_settled() -> None:
    study = replace(ONE, border={"FedProx": ("training.lr",)}, made=[])
    first, second = found(study)
    assert first.verdict == "reproduced"
    assert second.says == "not settled"
    note = "the best step size is at its grid's border: FedProx (training.lr); otherwise reproduced"
    assert second.note == note
    assert found(replace(ONE, border={"FedBuff": ("training.lr",)}, made=[]))[0].verdict == "not settled"


@pytest.mark.parametrize("family", MUTANTS)
def test_every_mutant_is_valid_and_gives_another_model(family: str) -> None:
    name, label = ARMS[family]
    study = next(one for one in STUDIES if one.name == name)
    arm = study.arm(label)
    arms = [arm, *(mutated(arm, mutant) for mutant in MUTANTS[family])]
    assert 2 <= len(arms) - 1 <= 5
    models = set()
    for one in arms:
        wanted = study.experiment(one, 1, "quick")
        config.validate(wanted, study.file("quick").parent)
        fields = {key: value for key, value in wanted.strategy.items() if key != "concurrency"}
        models.add(check_strategy(resolve(fields), versions=30).models[-1].tobytes())
    assert len(models) == len(arms)


def test_every_strategy_of_a_paper_has_mutants_and_its_baselines_have_none() -> None:
    strategies = set()
    for one in STUDIES:
        (settings, *_) = one.settings()
        for arm in one.arms_of(settings):
            strategies.add(one.experiment(arm, 1, settings).strategy["name"])
    assert strategies - MUTANTS.keys() == {"fedavg", "fedavgm", "fedprox", "fedasync", "favano", "asysg"}


def test_the_weights_of_fedstaleweights_mutants_are_those_worked_out_by_hand() -> None:
    """Two clients have E[τ] = 3 and 1. So α is 4 and 2 in Algorithm 1, which is normalised to ⅔ and ⅓."""
    updates = [Mock(client=client) for client in (0, 1)]
    weights = {}
    for mutant in ("FedStaleWeight", "α²", "α^¼", "only the stalest update", "the published bench's weights"):
        (changes,) = [each.changes for each in MUTANTS["fedstaleweight"] if each.label == mutant] or [()]
        name = changes[0].split('"')[1] if changes else "fedstaleweight"
        state = Expectation(MovingAverage(2), [1.0, 1.0])
        state.average.observe([0, 1], [3.0, 1.0])
        weights[mutant] = list(resolve({"name": name, "buffer_size": 2}).weights(state, updates, Mock()))
    assert weights["FedStaleWeight"] == pytest.approx([4 / 6, 2 / 6])
    assert weights["α²"] == pytest.approx([16 / 20, 4 / 20])
    assert weights["α^¼"] == pytest.approx([2**0.5 / (2**0.5 + 2**0.25), 2**0.25 / (2**0.5 + 2**0.25)])
    assert weights["only the stalest update"] == [1.0, 0.0]
    assert weights["the published bench's weights"] == pytest.approx([3 / 4, 1 / 4])


class Stale(Curves):
    """Curves that consist only of the staleness, which is a function of the buffer size."""

    settings = "quick"

    def __init__(self, of: Callable[[int], float]) -> None:
        self.of = of

    def staleness(self, label: str) -> list[float]:
        return [self.of(int(label.rpartition(" ")[2]))] * 3


@pytest.mark.parametrize(("more", "says"), [(0, "reproduced"), (1, "not reproduced")])
def test_the_claim_that_a_double_buffer_halves_staleness_fails_with_one_more_update_in_the_buffer(
    more: int, says: str
) -> None:
    """Mean staleness is inversely proportional to the buffer size. With buffers of K + 1 instead of K,
    doubling K gives ratios of 11/6 and 21/11 instead of 2."""
    (one,) = fedbuff.claims(Stale(lambda size: 100.0 / (size + more)))
    assert one.verdict == says


def test_staleness_of_zero_does_not_settle_the_claim() -> None:
    (one,) = fedbuff.claims(Stale(lambda size: 0.0))
    assert (one.verdict, one.ours) == ("out of reach", "not settled")


def test_the_mutants_of_claims_with_privacy_keep_the_bound_on_weights() -> None:
    class Ahead(Curves):
        settings = "quick"

        def __init__(self) -> None:
            pass

        def accuracy(self, label: str, last: int = 0) -> list[float]:
            return [0.9 if label.startswith("FedBuff") else 0.8] * 3

    study = load("ablations-privacy")
    stale = [Update(task, task, 0, 4, 1, 1, 0.0, 0.0) for task in range(10)]
    findings = study.judge(Ahead())
    assert len(findings) == 6
    for one in findings:
        assert one.verdict == "reproduced"
        mutants = mutants_of(one, study, "quick")
        assert mutants
        for mutant in mutants:
            arm = mutated(study.arm(one.mine[0]), mutant)
            strategy = resolve(study.experiment(arm, 1, "quick").strategy)
            weights = strategy.weights(None, stale, Mock())  # type: ignore[attr-defined]
            assert max(weights) <= strategy.max_weight(600) * (1 + 1e-9)  # type: ignore[operator]


def test_p_values_equal_scipys_and_agree_with_the_interval_of_the_verdict() -> None:
    mine, other = [0.91, 0.93, 0.92, 0.95], [0.9, 0.89, 0.93, 0.9]
    gain = difference(mine, other)
    values = [a - b for a, b in zip(mine, other, strict=True)]
    assert p_value(gain, 4) == pytest.approx(ttest_1samp(values, 0.0, alternative="greater").pvalue)
    ends = [1e3] * 3
    lead = ratio([200.0, 230.0, 170.0], [100.0, 110.0, 100.0], ends, ends)
    assert (p_of_ratio(lead, 3) < 0.025) == (lead.low > 1.0)
    assert p_value(difference([0.9], [0.1]), 1) == 1.0
    assert p_of_ratio(ratio([100.0] * 3, [float("nan")] * 3, ends, ends), 3) == 1.0


def test_the_correction_gives_the_result_of_benjamini_and_hochbergs_example() -> None:
    """Of the 15 p-values in section 4 of their paper (1995), the first four survive at 5%."""
    ps = (0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719,
          0.6528, 0.7590, 1.0)  # fmt: skip
    findings = corrected([Finding(str(p), "", "", "", "reproduced", p=p) for p in reversed(ps)])
    assert [one.claim for one in findings if one.survives] == [str(p) for p in reversed(ps[:4])]
    assert "over 15 claims with a p-value: 4 of 15 that hold survive; not: " in correction(findings)
    assert findings[-5].remark == "p = 0.02, does not survive the correction"
    assert correction([Finding("", "", "", "", "reproduced")]) == ""


def test_a_ratio_agrees_if_the_equivalence_test_is_significant() -> None:
    near, far = Ratio("x", [1.0, 1.01, 1.02], 0.1), Ratio("x", [1.09, 1.12, 1.0], 0.1)
    assert near.agrees
    assert near.p < 0.025
    assert not far.agrees
    assert far.p > 0.025
    assert Ratio("x", [1.0, 1.0], 0.1).p is None
