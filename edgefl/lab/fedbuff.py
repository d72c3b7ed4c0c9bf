"""FedBuff's comparison (Nguyen 2022, section 5) and its claims."""

from __future__ import annotations

from statistics import fmean

from edgefl.lab.study import Arm, Curves, Finding, Study, times, verdict

FEDBUFF, ASYNC = "FedBuff, K = 10", "FedAsync"
SYNCHRONOUS = {"FedAvgM": "3.3×, 1.7×, 1.8×", "FedAvg": "8.5×, >4.8×, 5.7×", "FedProx": "8.4×, >4.8×, 4.3×"}
"""The paper's Table 1: client trips to target over FedBuff's, on CelebA, Sent140 and CIFAR-10."""
BUFFERS = {5: "FedBuff, K = 5", 10: FEDBUFF, 20: "FedBuff, K = 20"}


def judge(curves: Curves) -> list[Finding]:
    """Trips to target against each baseline, and staleness over K."""
    target = curves.target(FEDBUFF)
    mine = curves.reached(FEDBUFF, target, "trips")
    findings = []
    for label, paper in {ASYNC: "1.2×, 2.5×, 1.1×", **SYNCHRONOUS}.items():
        claim = f"fewer client trips than {label} to {target:.0%}"
        ours = times(curves.reached(label, target, "trips"), mine)
        findings.append(Finding(claim, "table 1", paper, ours, *curves.race(FEDBUFF, label, target, "trips")))
    means = {size: fmean(curves.staleness(label)) for size, label in BUFFERS.items()}
    halves = [means[5] / means[10], means[10] / means[20]]
    findings.append(
        Finding(
            "staleness halves when K doubles",
            "appendix A",
            "2.0×, 2.0×",
            ", ".join(f"{ratio:.2f}×" for ratio in halves),
            verdict(all(1.8 <= ratio <= 2.2 for ratio in halves)),
            ", ".join(f"K = {size}: {mean:.1f}" for size, mean in means.items()),
        )
    )
    return findings


_ROUND = ("strategy.cohort=100", "evaluation.every_versions=1")
_ASYNC = ("strategy.concurrency=100",)

study = Study(
    name="fedbuff",
    title="FedBuff against synchronous and purely asynchronous algorithms, 100 clients at once",
    citation="Nguyen et al. 2022, AISTATS, arXiv:2106.06639, table 1 and appendix A",
    arms=(
        *(
            Arm(label, ("strategy.name=fedbuff", f"strategy.buffer_size={size}", *_ASYNC))
            for size, label in BUFFERS.items()
        ),
        Arm(ASYNC, ("strategy.name=fedasync", "strategy.alpha=0.1", *_ASYNC, "evaluation.every_versions=20")),
        Arm("FedAvgM", ("strategy.name=fedavgm", "strategy.momentum=0.9", *_ROUND)),
        Arm("FedAvg", ("strategy.name=fedavg", "strategy.server_lr=2", *_ROUND)),
        Arm("FedProx", ("strategy.name=fedprox", "strategy.mu=0.01", "strategy.server_lr=2", *_ROUND)),
    ),
    judge=judge,
    notes=(
        "100 clients train at once where the paper has 1,000, so staleness is a tenth of the paper's.",
        "The paper tunes each algorithm's steps by hundreds of trials, here by a small grid.",
    ),
)
