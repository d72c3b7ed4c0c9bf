"""FedBuff against DeFedAvg-nIID, and what decides it: s(τ), the buffers, or how speeds are spread.

Each of FedBuff with and without s(τ) = (1 + τ)^−½ races each of DeFedAvg-nIID with Algorithm 1's buffers and
with the newest updates, where clients' speeds are uniform on [1, 5], as the paper says, and where their times
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from edgefl.lab.claims import Race
from edgefl.lab.study import QUICK, Arm, Curves, Finding, Study, Tuning

FLEETS = {"speeds": "paper-defedavg-100", "times": "paper-defedavg-slowdowns-100"}
FEDBUFFS = {"FedBuff": 0.0, "FedBuff, s(τ)": 0.5}
NIIDS = {"nIID": "when-selected", "nIID, newest": "newest"}


def _arms() -> Iterator[Arm]:
    for fleet, devices in FLEETS.items():
        where = f'fleet.devices="{devices}"'
        for label, exponent in FEDBUFFS.items():
            own = ("strategy.name=fedbuff", "strategy.buffer_size=10", f"strategy.exponent={exponent}")
            yield Arm(_name(label, fleet), (where, *own))
        for label, takes in NIIDS.items():
            own = ("strategy.name=defedavg-niid", "strategy.participants=10", f"strategy.takes={takes}")
            yield Arm(_name(label, fleet), (where, *own))


def _name(label: str, fleet: str) -> str:
    return f"{label}, uniform {fleet}"


def _races() -> Iterator[Race]:
    pairs = [(mine, other) for other, mine in product(FEDBUFFS, NIIDS)]
    pairs += [("FedBuff, s(τ)", "FedBuff"), ("nIID, newest", "nIID")]
    for fleet, (mine, other) in product(FLEETS, pairs):
        names = _name(mine, fleet), _name(other, fleet)
        size = 198.54 / 103.25 if (mine, other, fleet) == ("nIID", "FedBuff", "speeds") else None
        says = "103.3 s against 198.5 s (1.9×)" if size else "not in a paper"
        yield Race(*names, "DeFedAvg, table I, n = 10" if size else "ours", says, size, "at_s")


def judge(curves: Curves) -> list[Finding]:
    """Emulated time to the target, each against each."""
    return [race.finding(curves) for race in _races()]


study = Study(
    name="deciding",
    title="FedBuff against DeFedAvg-nIID: exponent, buffers, speeds",
    citation="Nguyen et al. 2022; Wang et al. 2024",
    arms=tuple(_arms()),
    judge=judge,
    notes=("The first race is the papers'; the others change one thing at a time.",),
    seeds=(1, 2, 3, 4, 5),
    small_seeds=(1, 2, 3, 4, 5),
    tuning=Tuning(
        {"strategy.server_lr": (0.1, 1.0), "training.lr": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)},
        "at_s",
        {"": 3.0, QUICK: 2.0},
    ),
)
