"""`bench aggregate`: who takes part, what is counted, what is left out, what the file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgefl import kernels
from edgefl.lab import aggregate
from edgefl.lab.aggregate import arrays_of

NATIVE = kernels.backends()["c"] == "ok"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    path = tmp_path_factory.mktemp("bench") / "aggregate.json"
    return aggregate.run(path, sizes=[(3000, 3), (70_000_000_000, 10)]), path


def test_everybody_takes_nine_turns_and_is_counted_alike(measured: tuple[dict[str, Any], Path]) -> None:
    result, _ = measured
    row = next(row for row in result["rows"] if row["threads"] == kernels.threads())
    names = {"edgefl numba", "BLAS gemv", "torch addmv", "torch _foreach", "numpy by layer"}
    names |= {"edgefl c", aggregate.RAW, "read loop", "STREAM triad"} if NATIVE else set()
    assert names <= row["contenders"].keys()
    assert row["bytes"] == (3 + 2) * 3000 * 4
    for figures in row["contenders"].values():
        assert figures["turns"] == 9
        assert figures["gbytes_per_s"] == pytest.approx(row["bytes"] / figures["seconds"] / 1e9)
        assert figures["updates_per_s"] == pytest.approx(3 / figures["seconds"])


def test_what_memory_does_not_allow_is_named(measured: tuple[dict[str, Any], Path]) -> None:
    result, _ = measured
    assert {tuple(row[:2]) for row in result["skipped"]} == {(70_000_000_000, 10)}
    assert all(row["parameters"] == 3000 for row in result["rows"])


def test_the_file_holds_what_was_returned_beside_two_pictures(measured: tuple[dict[str, Any], Path]) -> None:
    result, path = measured
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in path.with_suffix(".svg").read_text()


def test_the_grid() -> None:
    sizes = [(d, k) for d in aggregate.PARAMETERS for k in aggregate.UPDATES]
    rows = aggregate.rows_of(sizes, quick=False)
    everything = kernels.threads()
    assert {
        (r.parameters, r.updates) for r in rows if (r.dtype, r.threads) == ("float32", everything)
    } == set(sizes)
    assert {r.dtype for r in rows} == {"float32", "float16", "bfloat16", "int8"}
    assert everything == 1 or {r.updates for r in rows if r.threads == 1} == set(aggregate.SINGLE)
    assert len(set(rows)) == len(rows)


def test_scales_are_counted_too() -> None:
    arrays = arrays_of(1000, 4, "int8", 1)
    assert arrays.moved_bytes == 4 * 1000 + 4 * 4 * 4 + 2 * 4 * 1000
    assert all(row.ctypes.data % 8 == 0 for row in arrays.stacked)
    assert arrays.base.ctypes.data % 64 == arrays.out.ctypes.data % 64 == 0


def test_the_turns_of_a_slow_contender_are_fewer_but_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "_SLOW_S", 0.0)
    result = aggregate.run(sizes=[(100, 2)])
    assert {f["turns"] for row in result["rows"] for f in row["contenders"].values()} == {3}
