"""How a study's claims are judged, on figures that are known."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from edgefl.lab import fedstaleweight
from edgefl.lab.study import Curves


class Known(Curves):
    """Curves of one seed whose weights are given and all else is alike."""

    def __init__(self, slow: Mapping[str, float]) -> None:
        super().__init__(dict.fromkeys(slow, ()))
        self._slow = slow

    def weights(self, label: str, profile: str) -> list[float]:
        slow = self._slow[label]
        return [slow if profile == fedstaleweight.SLOW else (15.0 - 5.0 * slow) / 10.0]

    def accuracy(self, label: str) -> list[float]:
        return [0.9]

    mean_accuracy = best = accuracy

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
