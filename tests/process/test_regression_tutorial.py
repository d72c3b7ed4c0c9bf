"""docs/regression.md: the team's files run as they are printed there, and do what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import scipy.stats  # noqa: F401

# pytester forgets what a session inside this process imported; compiled modules do not load twice.
from edgefl.regression import device, measurement, table  # noqa: F401

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "regression.md"


def test_the_tutorials_files_do_what_it_says(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, test, slower, bigger = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    steps = steps.replace("batches=4", "batches=16")  # what grows must stand out from what an allocator keeps
    for limit in ("WAITED_MAX", "STEAL_MAX", "REFERENCE_CV_MAX", "NOISY", "PRECISE"):
        monkeypatch.setattr(measurement, limit, float("inf"))  # whatever else this host does meanwhile
    monkeypatch.setattr("edgefl.regression.baseline.LOAD_MAX", float("inf"))
    pytester.syspathinsert()
    pytester.makepyfile(test_training=test)

    def run(code: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(steps=code)
        quick = ("--edgefl-time-scale=0", "--edgefl-repetitions=9", "-p", "edgefl.pytest_plugin")
        return pytester.runpytest_inprocess(*quick, *options)

    saved = run(steps, "--edgefl-save")
    saved.assert_outcomes(passed=1)
    saved.stdout.fnmatch_lines(["saved 1 in *edgefl-baselines/test_training.json"])
    # Its time is judged where a host is free for it, by the benchmark; here it is only within its budget.
    run(f"{steps}\n{slower}").assert_outcomes(passed=1)
    found = run(f"{steps}\n{bigger}", "--edgefl-compare", "--edgefl-tolerance=90")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["train changed since its baseline:*peak memory +*% on moto-g4: * → * MiB*"])
