"""``bench fidelity``, made tiny: what it counts, how it judges, and that slowing the host is never silent."""

from __future__ import annotations

import json
import sys

import pytest

from edgefl.lab import fidelity
from edgefl.lab.fidelity import RunLengths, quota
from edgefl.lab.fidelity_runs import DEVICES
from edgefl.limits.capacity import capacity_cores
from edgefl.limits.groups import find
from tests.process.runs import needs_groups

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it tries Linux's mechanisms")

TINY = RunLengths(fleet=2.0, alone=2.0, shares=0.5, links=5.0, fast_links=1.5, heat=60.0, ranks=1.2)
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


def test_a_slowed_host_gives_the_same_times_or_says_invalid(capsys: pytest.CaptureFixture[str]) -> None:
    result = fidelity.run(slowed=True, length=TINY)
    hosts = [line["quantity"] for line in result["lines"]]
    assert hosts[0] == "competing load"
    assert result["verdict"] in ("PASS", "INVALID")  # never other times without a word
    for line in result["lines"][1:]:
        assert line["figures"]["load"] > 0
    if len(hosts) == 3:
        squeezed = result["lines"][2]
        assert squeezed["figures"]["time_scale"] < result["lines"][1]["figures"]["time_scale"]
        assert "INVALID" in squeezed["why"] or squeezed["verdict"] == "INVALID"
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_quota_holds_this_process_and_is_gone_after_it() -> None:
    needs_groups("cpu")
    before, free = find("cpu"), capacity_cores()
    with quota(0.5 * free):
        assert capacity_cores() == pytest.approx(0.5 * free)
        inside = find("cpu")
        assert inside != before
    assert find("cpu") == before
    assert capacity_cores() == free
    assert not inside.folder.exists()
