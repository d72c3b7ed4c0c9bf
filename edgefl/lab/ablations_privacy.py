"""FedBuff's figure 4 (Nguyen 2022): accuracy at the same ε after one pass over all clients."""

from __future__ import annotations

from collections.abc import Iterator

from edgefl.lab.study import Arm, Curves, Finding, Study, Tuning, share, verdict
from edgefl.results.statistics import difference, higher, p_value, points

FEDBUFF, FTRL, SGD = "FedBuff, DP-FTRL", "FedAvgM, DP-FTRL", "FedAvgM, DP-SGD"
CLIENTS, COHORT, BUFFER = 12_000, 100, 10
NOISE = {
    FEDBUFF: {6: 3.16, 24: 0.98},
    FTRL: {6: 2.52, 24: 0.78},
    SGD: {6: 0.623, 24: 0.377},
}
"""By arm and ε, the noise multiplier σ that spends it by the end of the run, with δ = 1e-7."""
MARGIN = 0.02
"""So much below another an accuracy is still competitive."""


def judge(curves: Curves) -> list[Finding]:
    """Final accuracies, seed by seed."""
    findings = []
    for mine, other, epsilon, claim, margin in (
        (FEDBUFF, SGD, 24, "ahead", 0.0),
        (FEDBUFF, FTRL, 24, "ahead", 0.0),
        (FEDBUFF, SGD, 6, "competitive", MARGIN),
        (FEDBUFF, FTRL, 6, "ahead", 0.0),
    ):
        ours, theirs = (curves.accuracy(_name(label, epsilon)) for label in (mine, other))
        found = difference(ours, theirs)
        holds = higher(found._replace(mean=found.mean + margin))
        findings.append(
            Finding(
                f"{mine}: final accuracy beside {other} at ε = {epsilon}",
                "figures 4 and 8",
                claim,
                f"{share(ours)} against {share(theirs)}: {points(found)}",
                verdict(holds),
                f"competitive: no more than {MARGIN:.0%} below" if margin else "",
                (_name(mine, epsilon),),
                (_name(other, epsilon),),
                p_value(found._replace(mean=found.mean + margin), len(ours)),
            )
        )
    return findings


def _name(label: str, epsilon: int) -> str:
    return f"{label}, ε = {epsilon}"


def _arms() -> Iterator[Arm]:
    once = "privacy.max_participations=1"
    own = {
        FEDBUFF: (
            f"strategy={{name='fedbuff',buffer_size={BUFFER},concurrency={COHORT},momentum=0.9}}",
            once,
        ),
        FTRL: (f"strategy={{name='fedavgm',cohort={COHORT},weighting='uniform',momentum=0.9}}", once),
        SGD: (
            f"strategy={{name='fedavgm',cohort={COHORT},weighting='uniform',cohorts='poisson',momentum=0.9}}",
            "privacy.mechanism=gaussian",
        ),
    }
    for label, noises in NOISE.items():
        for epsilon, noise in noises.items():
            yield Arm(_name(label, epsilon), (*own[label], f"privacy.noise_multiplier={noise}"))


study = Study(
    name="ablations-privacy",
    title="FedBuff's figure 4: accuracy at the same ε",
    citation="Nguyen et al. 2022, AISTATS, arXiv:2106.06639, figure 4",
    arms=tuple(_arms()),
    judge=judge,
    notes=(
        "MNIST in 12,000 clients of five images and softmax regression; the paper has Sent140's 660,120 "
        "clients, an LSTM, cohorts of 1,000 and ε = 6, 12, 24.",
        "Updates are clipped to 1, about a tenth of a client's gradient: the step is the server's to choose.",
    ),
    tuning=Tuning(
        {"strategy.server_lr": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)}, "trips", {"": float(CLIENTS)}
    ),
)
