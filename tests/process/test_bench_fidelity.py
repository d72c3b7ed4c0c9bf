"""``bench fidelity``, made tiny: what it counts, and how it judges."""

from __future__ import annotations

import json
import sys

import pytest

from edgefl.lab import fidelity
from edgefl.lab.fidelity_runs import DEVICES

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it tries Linux's mechanisms")

TINY = {"fleet": 2.0, "alone": 2.0, "links": 5.0, "fast_links": 1.5, "heat": 60.0, "ranks": 1.2}
KINDS = "compute rate, whole trip, isolation, transfer, delay, jitter, loss, thermal curve, ranks"


def test_every_quantity_is_measured_in_real_runs(capsys: pytest.CaptureFixture[str]) -> None:
    result = fidelity.run(length=TINY, mechanisms=("paced",))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert set(KINDS.split(", ")) == {line["quantity"] for line in result["lines"]}
    for line in result["lines"]:
        # A run of seconds may end before its first trip where the machine stands still: then it says so.
        assert line["measured"] > 0 or line["why"] == "nothing was measured"
        assert (line["verdict"] == "PASS") == (not line["why"])
    assert sum(line["measured"] > 0 for line in result["lines"]) > len(result["lines"]) / 2
    rates = result["rates"]["paced"]
    assert len(set(rates["declared"])) == len(DEVICES)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "whole trip, paced" in shown
