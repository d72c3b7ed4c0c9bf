"""Sessions of pytest with the plugin, in a folder that has something to run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import scipy.stats  # noqa: F401

# pytester forgets what a session inside this process imported; compiled modules do not load twice.
from edgefl.regression import device, measurement, table  # noqa: F401

PLUGIN = ("-p", "edgefl.pytest_plugin")
"""Said, so that it is there also where edgefl was installed before it had one."""

Run = Callable[..., pytest.RunResult]

STEPS = """
import torch

A = torch.ones(32, 64)

def step(rounds=1, mib=0):
    held = b"x" * (mib << 20)
    for _ in range(rounds):
        torch.mm(A, A.T)
    del held

def hungry():
    return b"x" * (1 << 30)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in a folder with ``steps.py``; whatever load this host is under, figures are believed."""
    for name, value in {
        "WAITED_MAX": 1.0,
        "STEAL_MAX": 1.0,
        "REFERENCE_CV_MAX": float("inf"),
        "NOISY": float("inf"),
        "PRECISE": float("inf"),
    }.items():
        monkeypatch.setattr(measurement, name, value)
    pytester.makepyfile(steps=STEPS)
    pytester.syspathinsert()

    def run(test: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_device=test)
        options = (*PLUGIN, "--edgefl-time-scale=0", "--edgefl-repetitions=9", "--strict-markers", "-Werror")
        return pytester.runpytest_inprocess(*options, *arguments)

    return run
