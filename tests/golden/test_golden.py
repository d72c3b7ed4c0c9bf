"""Tests that no result has changed: `python -m tests.golden compare` finds no difference in any fact."""

from __future__ import annotations

import pytest

from tests.golden import __main__ as golden
from tests.golden import runs

QUICK = ("fedbuff", "churn", "int8", "tree", "text-help", "text-keys", "verdict-claims", "verdict-privacy",
         "verdict-programs", "verdict-statistics", "verdict-fidelity", "verdict-links")  # fmt: skip


def check(*names: str) -> None:
    assert list(golden.compare(names)) == []
    if (of := golden.recorded()["machine"]) != golden.machine():
        pytest.skip(f"counts and emulated times are the same; trained numbers are recorded on {of}")


@pytest.mark.process
@pytest.mark.usefixtures("fork_server")
def test_a_few_results_are_the_recorded_ones() -> None:
    check(*QUICK)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1800)
def test_all_results_are_the_recorded_ones() -> None:
    check(*golden.cases())


def test_every_case_is_recorded_once() -> None:
    assert list(golden.recorded()["cases"]) == [
        name for name in golden.cases() if runs.golden_name(name) == name
    ]


def test_a_difference_is_said_and_elsewhere_only_what_is_not_trained() -> None:
    was = golden.recorded()["cases"]["fedbuff"]
    keys = {
        "model_sha256": False,
        "trips.loss": False,
        "weights.trained": False,
        "trips.sent_s": True,
        "versions": True,
    }
    for key, everywhere in keys.items():
        found = {**was, key: "another"}
        assert golden.different("fedbuff", was, found, here=True) == [f"{key}: {was[key]} -> another"]
        assert bool(golden.different("fedbuff", was, found, here=False)) is everywhere
