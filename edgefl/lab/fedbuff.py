"""FedBuff's comparison (Nguyen 2022, section 5) and its claims."""

from __future__ import annotations

from statistics import fmean

from edgefl.lab.ablations_fedbuff import ASYNC_STEPS, FEW, STEPS, lead_grows
from edgefl.lab.claims import Race
from edgefl.lab.mutants import STALENESS
from edgefl.lab.study import Arm, Curves, Finding, Study, Tuning, verdict

FEDBUFF, ASYNC, AVGM = "FedBuff, K = 10", "FedAsync", "FedAvgM"
FULL = "1000"
"""The settings of the paper's size."""
TABLE_1 = {
    FEDBUFF: (31.9, 124.7, 67.5),
    ASYNC: (37.1, 308.9, 73.3),
    AVGM: (104.0, 216.0, 122.7),
    "FedAvg": (231.0, 600.0, 386.7),
    "FedProx": (228.0, 600.0, 292.7),
}
"""The paper's table 1: thousands of client trips to 90% on CelebA, 69% on Sent140 (600: not in so many) and
60% on CIFAR-10. The table also prints their ratios to FedBuff's, and contradicts itself on CelebA: 231 over
31.9 is 7.2 where it prints 8.5×, 228 over 31.9 is 7.1 where it prints 8.4×. Here they follow from trips."""
HALVES = 0.1
"""Largest distance from 2 of a ratio of mean staleness; a buffer of K + 1 would give 1.83 and 1.91."""
BUFFERS = {5: "FedBuff, K = 5", 10: FEDBUFF, 20: "FedBuff, K = 20"}


def ratios(label: str) -> tuple[float, ...]:
    """The trips of a baseline over FedBuff's, on CelebA, Sent140 and CIFAR-10.

    >>> [round(each, 1) for each in ratios("FedAvg")]
    [7.2, 4.8, 5.7]
    """
    return tuple(other / mine for other, mine in zip(TABLE_1[label], TABLE_1[FEDBUFF], strict=True))


def judge(curves: Curves) -> list[Finding]:
    """Trips to target against each baseline, staleness over K, and at the paper's size figure 3's ends."""
    findings = []
    for label in list(TABLE_1)[1:]:
        celeba, sent140, cifar = ratios(label)
        over = ">" if TABLE_1[label][1] == 600.0 else ""
        says = f"{celeba:.1f}×, {over}{sent140:.1f}×, {cifar:.1f}× (judged by the last, CIFAR-10)"
        findings.append(Race(FEDBUFF, label, "table 1", says, cifar).finding(curves))
    if curves.settings == FULL:
        ends = [Race(f"{FEDBUFF}{many}", f"{AVGM}{many}", "", "") for many in ("", f", {FEW}")]
        findings.append(lead_grows(curves, *ends))
    means = {size: fmean(curves.staleness(label)) for size, label in BUFFERS.items()}
    halves = [means[5] / means[10], means[10] / means[20]]
    findings.append(
        Finding(
            "staleness halves when K doubles",
            "appendix A",
            "2.0×, 2.0×",
            ", ".join(f"{ratio:.2f}×" for ratio in halves),
            verdict(all(abs(ratio - 2.0) <= HALVES for ratio in halves)),
            ", ".join(f"K = {size}: {mean:.1f}" for size, mean in means.items()),
            tuple(BUFFERS.values()),
            family=STALENESS,
        )
    )
    return findings


# A client has about ten examples, so one local epoch is one step: only the product of the client's and the
# server's step matters, except for FedAsync, whose α also decides how much of a stale model is mixed in.
_STEP = {"training.lr": (0.03, 0.1, 0.3, 1.0)}
_ALL = {FULL: ("strategy.concurrency=1000",)}
_ASYNC = ("strategy.concurrency=100",)
_ROUND, _ALL_ROUND = ("strategy.cohort=100",), {FULL: ("strategy.cohort=1000",)}


# Appendix D: a client that is in the buffer is not sampled again before the next step.
_BUFFERED = ("strategy.name=fedbuff", "strategy.restart=after-step")
_BUFFERED_STEP = {FULL: {"training.lr": (0.01, 0.03, 0.1, 0.3)}}
_MOMENTUM = ("strategy.name=fedavgm", "strategy.momentum=0.9")


def _fedbuff(size: int, label: str) -> Arm:
    changes = (*_BUFFERED, f"strategy.buffer_size={size}", *_ASYNC)
    return Arm(label, changes, _ALL, grid_at=_BUFFERED_STEP, steps_of="" if label == FEDBUFF else FEDBUFF)


study = Study(
    name="fedbuff",
    title="FedBuff against synchronous and purely asynchronous algorithms",
    citation="Nguyen et al. 2022, AISTATS, arXiv:2106.06639, table 1 and appendix A",
    arms=(
        *(_fedbuff(size, label) for size, label in BUFFERS.items()),
        Arm(
            ASYNC,
            ("strategy.name=fedasync", "strategy.alpha=0.1", *_ASYNC),
            _ALL,
            ASYNC_STEPS,
            grid_at={FULL: {"strategy.alpha": (0.01, 0.03, 0.1), "training.lr": (0.1, 0.3, 1.0)}},
        ),
        Arm(
            AVGM,
            (*_MOMENTUM, *_ROUND),
            _ALL_ROUND,
            grid_at={FULL: _STEP},
        ),
        Arm(
            "FedAvg",
            ("strategy.name=fedavg", "strategy.server_lr=2", *_ROUND),
            _ALL_ROUND,
            grid_at={FULL: _STEP},
        ),
        Arm(
            "FedProx",
            ("strategy.name=fedprox", "strategy.mu=0.01", "strategy.server_lr=2", *_ROUND),
            _ALL_ROUND,
            steps_of="FedAvg",  # and its runs: with one local step the proximal term is zero
        ),
        # Figure 3's other end.
        Arm(
            f"{FEDBUFF}, {FEW}",
            (*_BUFFERED, "strategy.buffer_size=10", "strategy.concurrency=10"),
            grid_at=_BUFFERED_STEP,
            only=(FULL,),
        ),
        Arm(
            f"{AVGM}, {FEW}",
            (*_MOMENTUM, "strategy.cohort=10"),
            grid_at={FULL: {"training.lr": (0.003, 0.01, 0.03, 0.1)}},
            only=(FULL,),
        ),
    ),
    judge=judge,
    small_seeds=tuple(range(1, 11)),
    notes=(
        "The paper tunes each algorithm's steps by hundreds of Bayesian trials, here by a small grid.",
        "The JPEG-coded copy of CIFAR-10 that is at hand differs slightly from the original.",
        "Table 1 contradicts itself on CelebA (231 ÷ 31.9 = 7.2, printed 8.5): ratios here are of its trips.",
    ),
    notes_at={
        "": ("100 clients train at once where the paper has 1,000, so staleness is a tenth of the paper's.",)
    },
    tuning=Tuning(STEPS, "trips", {"": 3000, FULL: 30_000, "quick": 600}, seeds_at={FULL: (101,)}),
)
