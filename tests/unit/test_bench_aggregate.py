"""`bench aggregate`: its contenders, counted bytes, omitted sizes, doubtful rows and files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from edgefl import kernels
from edgefl.cli import main
from edgefl.lab import aggregate
from edgefl.lab.aggregate import arrays_of

NATIVE = kernels.backends()["c"] == "ok"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return aggregate.run(sizes=[(3000, 3), (70_000_000_000, 10)])


def test_all_contenders_take_nine_turns_and_are_counted_alike(result: dict[str, Any]) -> None:
    row = next(row for row in result["rows"] if row["threads"] == kernels.threads())
    names = {"edgefl numba", "BLAS gemv", "torch addmv", "torch _foreach", "numpy by layer"}
    names |= {"edgefl c", aggregate.RAW, "read loop", "STREAM triad"} if NATIVE else set()
    assert names <= row["contenders"].keys()
    assert row["bytes"] == (3 + 2) * 3000 * 4
    for figures in row["contenders"].values():
        assert figures["turns"] == 9
        assert figures["gbytes_per_s"] == pytest.approx(row["bytes"] / figures["seconds"] / 1e9)
        assert figures["updates_per_s"] == pytest.approx(3 / figures["seconds"])


def test_sizes_that_do_not_fit_memory_are_named(result: dict[str, Any]) -> None:
    assert {tuple(row[:2]) for row in result["skipped"]} == {(70_000_000_000, 10)}
    assert all(row["parameters"] == 3000 for row in result["rows"])


def test_a_row_is_skipped_if_only_twice_its_bytes_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "available_bytes", lambda: 140_000)
    assert aggregate.run(sizes=[(3000, 3)])["rows"] == []  # the row has 60,000 bytes


def test_the_grid_has_all_sizes_types_and_thread_numbers() -> None:
    sizes = [(d, k) for d in aggregate.PARAMETERS for k in aggregate.UPDATES]
    rows = aggregate.rows_of(sizes, quick=False)
    everything = kernels.threads()
    assert {
        (r.parameters, r.updates) for r in rows if (r.dtype, r.threads) == ("float32", everything)
    } == set(sizes)
    assert {r.dtype for r in rows} == {"float32", "float16", "bfloat16", "int8"}
    assert everything == 1 or {r.updates for r in rows if r.threads == 1} == set(aggregate.SINGLE)
    assert len(set(rows)) == len(rows)


def test_the_bytes_of_scales_are_counted() -> None:
    arrays = arrays_of(1000, 4, "int8", 1)
    assert arrays.moved_bytes == 4 * 1000 + 4 * 4 * 4 + 2 * 4 * 1000
    assert all(row.ctypes.data % 8 == 0 for row in arrays.stacked)
    assert arrays.base.ctypes.data % 64 == arrays.out.ctypes.data % 64 == 0


@pytest.mark.skipif(not NATIVE, reason="the read loop needs the C extension")
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_the_read_loop_reads_all_bytes_that_are_counted(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgefl.lab import _probe

    read: list[int] = []
    monkeypatch.setattr(_probe, "read", lambda group, threads: read.extend(each.nbytes for each in group))
    arrays = arrays_of(1000, 70, dtype, 1)
    dict(aggregate._limits(arrays))["read loop"]()
    assert sum(read) == arrays.moved_bytes


def test_a_slow_contender_takes_three_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "_SLOW_S", 0.0)
    result = aggregate.run(sizes=[(100, 2)])
    assert {f["turns"] for row in result["rows"] for f in row["contenders"].values()} == {3}


def test_a_row_disturbed_by_the_host_is_marked_with_the_reason(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = copy.deepcopy(result)
    for row in result["rows"]:
        usage = {"others": 0.43 if row["threads"] > 1 else 0.02, "steal": 0.0, "throttled": None}
        for figures in row["contenders"].values():
            figures["spread"], figures["gbytes_per_s"] = 0.1, 0.0123
        row["doubts"] = aggregate.doubts(usage, row["contenders"])
    aggregate.show(result)
    shown = " ".join(capsys.readouterr().out.split())
    busy = [row for row in result["rows"] if row["threads"] > 1]
    assert shown.count("3k×3 !") == (2 if NATIVE else 1) * len(busy)
    assert shown.count("cores used by other programs 43.0%, at most 10% is allowed") == len(busy)
    assert ("! does not count" in shown) == bool(busy)
    assert "0.0123" in shown
    assert " 0.0 " not in shown


def test_without_the_c_extension_no_instruction_set_is_shown(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    aggregate.show(result | {"host": result["host"] | {"backend": "numba", "instruction_set": None}})
    assert "None" not in capsys.readouterr().out


def test_a_back_end_that_cannot_be_used_is_left_out_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end such as CUDA may be listed as available and still fail. Here, an unknown one is listed."""
    known = {name: status for name, status in kernels.backends().items() if name != "cuda"}
    monkeypatch.setattr(kernels, "backends", lambda: known | {"tpu": "ok"})
    said: list[str] = []
    aggregate.compiled_backends.cache_clear()
    try:
        result = aggregate.run(sizes=[(100, 2)], say=said.append)
    finally:
        aggregate.compiled_backends.cache_clear()
    assert said[0].startswith("without tpu: kernel back end 'tpu' not found")
    assert all("edgefl tpu" not in row["contenders"] for row in result["rows"])


def test_a_row_with_a_large_spread_is_doubted() -> None:
    figures = {"edgefl numba": {"spread": 0.35}, "numpy by layer": {"spread": 3.0}}
    quiet = {"others": 0.01, "steal": None, "throttled": 0.0}
    assert aggregate.doubts(quiet, figures) == ["spread of edgefl numba 35.0%, at most 30% is allowed"]
    figures["edgefl numba"]["spread"] = 0.2
    assert aggregate.doubts(quiet, figures) == []


def test_the_command_shows_its_progress_and_names_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aggregate, "QUICK", ((100, 2),))
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # fails without LaTeX
    path = tmp_path / "figures.json"
    assert main(["bench", "aggregate", "--quick", "--json", str(path)]) == 0
    err = capsys.readouterr().err
    rows = len(json.loads(path.read_text())["rows"])
    assert [line.partition(":")[0] for line in err.splitlines()[:-1]] == [
        f"{place} of {rows}" for place in range(1, rows + 1)
    ]
    files = [path, path.with_suffix(".png"), path.with_suffix(".svg")]
    assert err.splitlines()[-1] == f"wrote {', '.join(map(str, files))}"
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files[2].read_text()
