"""Judging the head against the base: error rates under noise, and the schedule of pairs."""

from __future__ import annotations

import itertools
import math
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from edgefl.host.channel import Channel
from edgefl.regression import against, paired, sides
from edgefl.regression.against import Comparison, due, verdict_of
from edgefl.regression.paired import ProcessPair, decide, estimate

TOLERANCE = 0.05


def pair(layout: int, log_ratio: float, **figures: float) -> ProcessPair:
    given = {
        "base_s": 0.1, "head_s": 0.1 * math.exp(log_ratio), "base_mib": 10.0, "head_mib": 10.0,
        "base_sent_mib": 0.0, "head_sent_mib": 0.0,
    }  # fmt: skip
    return ProcessPair(layout=layout, log_ratio=log_ratio, **{**given, **figures})


def outcome(
    rng: np.random.Generator, growth: float, layout_sd: float, pair_sd: float, draw: Callable[..., float]
) -> str:
    """Judge pairs as `AgainstBase` does, with noise of these standard deviations per layout and per pair."""
    pairs: list[ProcessPair] = []
    of_layout = rng.normal(0, layout_sd, 10)
    for layouts, turns in against.SCHEDULE:
        for layout, _ in due(pairs, layouts, turns):
            pairs.append(pair(layout, math.log1p(growth) + of_layout[layout] + pair_sd * draw()))
        if (found := decide(estimate(pairs), TOLERANCE)) != "unknown":
            return found
    return "unknown"


def outcomes(growth: float, layout_sd: float, pair_sd: float, heavy: bool, runs: int = 600) -> Counter[str]:
    rng = np.random.default_rng(0)
    draw = (lambda: rng.standard_t(3) / math.sqrt(3)) if heavy else rng.standard_normal
    return Counter(outcome(rng, growth, layout_sd, pair_sd, draw) for _ in range(runs))


@pytest.mark.parametrize(
    ("layout_sd", "pair_sd"), [(0.0, 0.005), (0.005, 0.01), (0.01, 0.01), (0.005, 0.02), (0.015, 0.01)]
)
@pytest.mark.parametrize("heavy", [False, True])
def test_one_alarm_of_300_is_false_and_95_of_100_regressions_are_found(
    layout_sd: float, pair_sd: float, heavy: bool
) -> None:
    same = outcomes(0.0, layout_sd, pair_sd, heavy)
    assert same["grew"] <= 600 / 300
    assert same["same"] >= 0.95 * 600
    assert outcomes(TOLERANCE, layout_sd, pair_sd, heavy)["grew"] >= 0.95 * 600


class Side:
    """A process of base or head, whose shots use 1 ms of CPU time and wait ``waited_s`` for a core."""

    waiting = True

    def __init__(self, waited_s: float) -> None:
        self.shots, self._answers, self._waited_ns = 0, [], round(waited_s * 1e9)

    def tell(self, request: object) -> None:
        if isinstance(request, sides.ShotRequest):
            self.shots += 1
            self._answers.append(sides.Shot(cpu_ns=1_000_000, blocked_ns=0, waited_ns=self._waited_ns))
        elif isinstance(request, sides.EndRequest):
            self._answers.append(sides.Ended())
        else:
            ready = sides.Ready(call_s=0.001, peak_mib=10.0, sent_mib=0.0, modules=[])
            self._answers += [sides.Imported(), ready]

    def receive(self) -> object:
        return self._answers.pop(0)


@pytest.mark.parametrize(("waited_s", "least", "most"), [(0.0, 8, 30), (1.0, 299, 303)])
def test_a_pair_ends_at_the_limit_to_which_waits_for_a_core_do_not_count(
    waited_s: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: calls that wait for a child process use little CPU time, so they were repeated for minutes.

    The clock advances by 1 s per block. Without the limit, a pair has 300 shots per side: 0.6 s of CPU time.
    """
    looks = itertools.count()
    monkeypatch.setattr(against, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    base, head = Side(waited_s), Side(waited_s)
    running = against._RunningPair((base, head), SimpleNamespace(limit_s=60.0))
    made = running.measure(0, 10.0, reverse=False)
    assert made.log_ratio == 0.0
    assert made.base_s == made.head_s == pytest.approx(0.0002)  # a shot makes five calls
    assert least <= base.shots == head.shots <= most


def test_an_answer_may_arrive_on_any_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """select() accepts none above 1023, and a session may have more open files."""
    monkeypatch.setattr("select.select", Mock(side_effect=ValueError))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel[sides.BranchAnswer](ours, sides.BranchAnswer)
        assert not against._arrives(channel, 0.001)
        theirs.send(b"1")
        assert against._arrives(channel, None)


def test_noise_that_hides_the_tolerance_is_not_judged() -> None:
    found = outcomes(0.0, 0.05, 0.05, heavy=False)
    assert found["unknown"] > 200
    assert found["grew"] <= 600 / 100


def test_pairs_of_one_layout_are_not_independent() -> None:
    """Each memory layout shifts the time. Many pairs with few layouts do not reduce that uncertainty."""
    shifted = [
        pair(layout, shift) for layout, shift in enumerate((0.09, 0.0, 0.08, -0.01, 0.07)) for _ in range(40)
    ]
    assert decide(estimate(shifted), TOLERANCE) == "unknown"
    assert estimate([pair(0, 0.5)] * 50).least == -math.inf


def test_every_due_pair_is_made_once() -> None:
    pairs: list[ProcessPair] = []
    for layouts, turns in against.SCHEDULE:
        for layout, turn in due(pairs, layouts, turns):
            assert sum(one.layout == layout for one in pairs) == turn
            pairs.append(pair(layout, 0.0))
    assert Counter(one.layout for one in pairs) == dict.fromkeys(range(10), 4)


def test_turns_in_which_the_core_was_taken_away_do_not_change_the_ratio() -> None:
    steady = [(1.0, 1.05)] * 12
    assert paired.block_ratio([*steady, (1.0, 9.0), (7.0, 1.0), (1.0, 5.0)]) == pytest.approx(math.log(1.05))


def found(pairs: Sequence[ProcessPair]) -> Comparison:
    return Comparison("main (0123abcde)", pairs)


def layouts(log_ratio: float, **figures: float) -> list[ProcessPair]:
    return [pair(layout, log_ratio + 0.001 * (layout - 2), **figures) for layout in range(5)]


def test_the_verdict_names_what_grew_by_how_much_and_why_it_is_sure() -> None:
    slower = verdict_of(found(layouts(math.log(1.31))), TOLERANCE)
    assert (slower.outcome, slower.grew) == ("FAIL", ("cpu_s",))
    assert slower.why.startswith("time +31.0% (+30.")
    assert "5 pairs of processes" in slower.why
    assert "main (0123abcde), where a call takes 100 ms; measured alternately" in slower.why
    assert verdict_of(found(layouts(0.0)), TOLERANCE).outcome == "PASS"
    assert verdict_of(found(layouts(-0.5)), TOLERANCE).outcome == "PASS"


def test_sent_bytes_and_memory_lead_the_line_where_they_grew() -> None:
    more = layouts(0.2, base_sent_mib=0.0, head_sent_mib=5.0, head_mib=40.0)
    judged = verdict_of(found(more), TOLERANCE)
    assert judged.grew == ("sent_mib", "peak_mib", "cpu_s")
    why = "5 MiB more sent per call: 0 → 5 MiB; peak memory +30 MiB: 10 → 40 MiB; time"
    assert judged.why.startswith(why)


@pytest.mark.parametrize(
    ("figures", "grew"),
    [
        ({"base_sent_mib": 10.0, "head_sent_mib": 10.09}, ()),
        ({"base_sent_mib": 10.0, "head_sent_mib": 10.11}, ("sent_mib",)),
        ({"head_mib": 13.9}, ()),
        ({"head_mib": 14.1}, ("peak_mib",)),
        ({"base_mib": 1000.0, "head_mib": 1049.0}, ()),
        ({"base_mib": 1000.0, "head_mib": 1051.0}, ("peak_mib",)),
    ],
)
def test_sent_bytes_may_grow_by_1_percent_and_memory_by_4_mib_or_the_tolerance(
    figures: dict[str, float], grew: tuple[str, ...]
) -> None:
    assert verdict_of(found(layouts(0.0, **figures)), TOLERANCE).grew == grew


def test_memory_that_grew_in_some_pairs_only_is_noise() -> None:
    some = [*layouts(0.0, head_mib=40.0)[:4], *layouts(0.0)[4:]]
    assert verdict_of(found(some), TOLERANCE).outcome == "PASS"


def test_uncertain_growth_is_not_judged() -> None:
    noisy = [pair(layout, shift) for layout, shift in enumerate((0.2, -0.2, 0.1, -0.1, 0.15))]
    judged = verdict_of(found(noisy), TOLERANCE)
    assert judged.outcome == "INVALID"
    assert "too uncertain to exclude growth of 5.0%" in judged.why
    slower = [pair(layout, 0.0276 + shift) for layout, shift in enumerate((0.016, -0.016, 0.0, 0.0, 0.0))]
    assert "time +2.8% (-0.5% to +4.8%)" in verdict_of(found(slower), TOLERANCE).why
    assert "too uncertain to say whether it grew" in verdict_of(found(slower), TOLERANCE).why
    shorter = "with a function that does less"
    assert shorter in judged.why
    short = found([one._replace(base_s=0.01, head_s=0.01) for one in noisy])
    assert shorter not in verdict_of(short, TOLERANCE).why
    assert verdict_of(Comparison("main", unjudged="no files"), TOLERANCE).why == "no files"
    assert verdict_of(Comparison("main", missing="steps.py has no f"), TOLERANCE).outcome == "PASS"
