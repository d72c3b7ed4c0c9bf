"""DeFedAvg's ablations (Wang 2024): more participants (table I, figure 6) and more local steps (figure 7)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from edgefl.lab.claims import Race
from edgefl.lab.defedavg import FEDAVG, FEDBUFF, GRID, IID, IID_DATA, NIID
from edgefl.lab.study import QUICK, Arm, Curves, Finding, Study, Tuning

TABLE_1 = {
    NIID: (103.25, 144.49, 196.98, 236.30),
    "non-IID FedAvg": (437.57, 447.81, 211.67, 443.56),
    "non-IID FedBuff": (198.54, 218.26, 604.93, 422.88),
    IID: (26.39, 49.26, 94.49, 99.72),
    "IID FedAvg": (51.89, 179.1, 184.9, 179.83),
}
"""Table I, FashionMNIST: emulated seconds to the target with n = 10, 20, 40, 80."""
PARTICIPANTS = (10, 20, 40, 80)
STEPS = (20, 50, 100)


def _of(label: str, participants: int = 10, steps: int = 50) -> str:
    changed = [f", n = {participants}"] * (participants != 10) + [f", K = {steps}"] * (steps != 50)
    return label + "".join(changed)


def _races() -> Iterator[Race]:
    for at, count in enumerate(PARTICIPANTS[1:], 1):
        for label, mine in (("non-IID FedAvg", NIID), ("non-IID FedBuff", NIID), ("IID FedAvg", IID)):
            theirs, ours = TABLE_1[label][at], TABLE_1[mine][at]
            says = f"{ours:.1f} s against {theirs:.1f} s ({theirs / ours:.1f}×)"
            names = _of(mine, count), _of(label, count)
            yield Race(*names, f"table I, n = {count}", says, theirs / ours, "at_s")
    for label in (NIID, IID):
        for few, many in pairwise(PARTICIPANTS):
            names = _of(label, many), _of(label, few)
            yield Race(*names, "figure 6", "fewer rounds; half as many by theorems 1 and 2", 2.0, "version")
        for few, many in pairwise(STEPS):
            names = _of(label, steps=many), _of(label, steps=few)
            yield Race(*names, "figure 7", "fewer rounds", None, "version")


def judge(curves: Curves) -> list[Finding]:
    """Emulated time beside the baselines with each n; rounds with more participants, and more local steps."""
    return [race.finding(curves) for race in _races()]


_KEYS = {
    NIID: ("strategy.participants", ("strategy.name=defedavg-niid",)),
    "non-IID FedAvg": ("strategy.cohort", FEDAVG),
    "non-IID FedBuff": ("strategy.buffer_size", FEDBUFF),
    IID: ("strategy.buffer_size", ("strategy.name=defedavg-iid", *IID_DATA)),
    "IID FedAvg": ("strategy.cohort", (*FEDAVG, *IID_DATA)),
}
"""The key that is n, and what else tells an arm."""


def _arms() -> Iterator[Arm]:
    for label, (key, own) in _KEYS.items():
        for count in PARTICIPANTS:
            name = _of(label, count)
            yield Arm(name, (*own, f"{key}={count}"), steps_of="" if name == label else label)
    for label in (NIID, IID):
        key, own = _KEYS[label]
        for steps in (20, 100):
            yield Arm(_of(label, steps=steps), (*own, f"{key}=10", f"training.steps={steps}"))


study = Study(
    name="ablations-defedavg",
    title="DeFedAvg with more participants and local steps, 100 clients",
    citation="Wang et al. 2024, DeFedAvg, table I, figures 6 and 7",
    arms=tuple(_arms()),
    judge=judge,
    notes=(
        "One target for all: the paper's is 90% with all classes at each client and 80% with two.",
        "Arms with n = 20, 40 and 80 take the steps that are best for n = 10.",
        "FAVANO and AsySG, table I's other baselines, race with n = 10 alone (edgefl reproduce defedavg).",
    ),
    tuning=Tuning(
        GRID,
        "at_s",
        {"": 3.0, QUICK: 3.0},
        seeds_at={QUICK: (101,)},
    ),
)
