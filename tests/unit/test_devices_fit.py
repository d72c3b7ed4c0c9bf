"""Tests of fitting time models: recovering the model that made the rows, despite outliers or few rows."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from shell import Shell
from tables import arrows

from edgefl.devices import measurements
from edgefl.devices.fit import SPREAD, TYPICAL, HeldOutPrediction, Row, fit, holding, predicted, summary
from edgefl.devices.time_model import TERMS, TimeModel, joined
from edgefl.errors import ConfigError
from edgefl.learning.operations import StepWork

TRUE = TYPICAL.slowed(0.4)
"""A device that is 2.5 times as fast as the typical one."""
CONVOLUTIONS = StepWork(conv_flop=1e12)


def works(count: int, seed: int = 0) -> list[StepWork]:
    """Return training steps of networks that mix the operations in random proportions."""
    rng = np.random.default_rng(seed)
    amounts = {name: 0.2 / cost for name, cost in TYPICAL.costs().items()}
    return [StepWork(**{n: a * float(rng.lognormal(0, 2)) for n, a in amounts.items()}) for _ in range(count)]


def rows(model: TimeModel, count: int, seed: int = 0, noise: float = 0.0) -> list[Row]:
    rng = np.random.default_rng(seed + 1)
    return [
        Row(network=f"net-{at}", work=work, seconds=model.seconds(work) * math.exp(rng.normal(0, noise)))
        for at, work in enumerate(works(count, seed))
    ]


def errors(model: TimeModel, true: TimeModel) -> np.ndarray:
    return np.array([abs(model.seconds(work) / true.seconds(work) - 1) for work in works(200, seed=9)])


def test_the_fit_finds_the_model_that_made_the_rows() -> None:
    true = msgspec.structs.replace(TRUE, matmul_gflops=300.0, depthwise_gflops=0.1, call_us=200.0)
    found = fit(rows(true, 60))
    assert errors(found.model, true).max() < 0.05
    assert found.model.matmul_gflops == pytest.approx(300.0, rel=0.05)
    assert found.model.error_factor < 1.05


def test_an_outlier_of_a_factor_of_ten_has_little_effect() -> None:
    given = rows(TRUE, 40, noise=0.05)
    given[7] = msgspec.structs.replace(given[7], seconds=given[7].seconds * 10)
    assert np.median(errors(fit(given).model, TRUE)) < 0.1


def test_three_rows_and_a_similar_device_give_the_speed() -> None:
    found = fit(rows(TRUE, 3, noise=0.02), TYPICAL, spread=1.3)
    assert errors(found.model, TRUE).max() < 0.1
    assert found.model.error_factor >= TYPICAL.error_factor  # three networks justify no narrower interval


def without_recurrent(model: TimeModel, factor: float = 1.0) -> list[Row]:
    """Rows of networks without recurrent layers."""
    works = [msgspec.structs.replace(row.work, recurrent_flop=0.0) for row in rows(model, 20)]
    return [Row(network=f"net-{at}", work=w, seconds=model.seconds(w) * factor) for at, w in enumerate(works)]


def test_intervals_are_wide_only_for_operations_without_rows() -> None:
    model = fit(without_recurrent(TRUE, 1.01)).model
    known, unknown = StepWork(conv_flop=1e12), StepWork(recurrent_flop=1e12)
    assert model.error_factor_of(known) < 2
    assert model.error_factor_of(unknown) > 6
    assert model.predict(unknown).unsure == ("recurrent_flop",)


def test_the_interval_for_another_unit_of_a_model_is_wider_by_the_factor_between_units() -> None:
    given = rows(TRUE, 12, noise=0.1)
    own, others = fit(given).model, fit(given, apart=1.2).model
    assert others.error_factor == pytest.approx(joined(own.error_factor, 1.2), rel=1e-3)
    assert others.cost_errors == own.cost_errors


def test_the_rate_of_an_operation_without_rows_follows_that_of_similar_operations() -> None:
    fast = {f: 8 * getattr(TYPICAL, f) for f in TYPICAL.__struct_fields__ if f.endswith("_gflops")}
    true = msgspec.structs.replace(TYPICAL, **fast)
    found = fit(without_recurrent(true)).model
    assert found.recurrent_gflops == pytest.approx(true.recurrent_gflops, rel=0.3)


def test_the_interval_holds_ninety_percent_of_unseen_networks() -> None:
    model = fit(rows(TRUE, 60, noise=0.15)).model
    unseen = rows(TRUE, 400, seed=5, noise=0.15)
    low_high = [model.predict(row.work) for row in unseen]
    held = np.mean([p.low_s <= row.seconds <= p.high_s for row, p in zip(unseen, low_high, strict=True)])
    assert 0.85 <= held <= 0.97


def test_intervals_are_wide_only_for_operations_whose_cost_varies_between_networks() -> None:
    def measured(count: int, seed: int) -> list[Row]:
        draw, made = np.random.default_rng(seed + 2), []
        for row in rows(TRUE, count, seed, noise=0.03):
            slower = TRUE.costs()["conv_flop"] * row.work.conv_flop * (math.exp(draw.normal(0, 0.4)) - 1)
            made.append(msgspec.structs.replace(row, seconds=row.seconds + slower))
        return made

    model = fit(measured(150, 0)).model
    assert (
        model.error_factor_of(StepWork(matmul_flop=1e12)) < 1.25 < 1.5 < model.error_factor_of(CONVOLUTIONS)
    )
    unseen = [predicted(model, row) for row in measured(600, 5)]
    convolutions = [model.parts(p.row.work)["conv_flop"] > p.predicted_s / 3 for p in unseen]
    assert np.mean([p.held for p, most in zip(unseen, convolutions, strict=True) if most]) >= 0.75
    assert np.mean([p.held for p, most in zip(unseen, convolutions, strict=True) if not most]) <= 0.97


def test_few_rows_leave_the_variations_of_costs_to_the_prior() -> None:
    """Mutant: the fit sets the variations to 0, which makes the intervals of predicted steps too narrow."""
    prior = msgspec.structs.replace(TRUE, error_factor=1.05, cost_variations=(0.5,) * (len(TERMS) + 1))
    found = fit(rows(TRUE, 5, noise=0.02), prior, spread=1.3)
    assert found.model.cost_variations == pytest.approx(prior.cost_variations, abs=1e-3)


def test_rows_of_one_network_are_held_out_together() -> None:
    found = fit([msgspec.structs.replace(row, network="one") for row in rows(TRUE, 6)])
    assert (found.unseen, found.model.error_factor) == ((), TYPICAL.error_factor)


def test_a_summary_has_the_errors_of_predictions() -> None:
    row = Row(network="n", work=StepWork(), seconds=1.0)
    found = [HeldOutPrediction(row=row, predicted_s=s) for s in (0.5, 0.9, 1.0, 1.1, 1.2)]
    told = summary(found)
    assert (told.rows, told.worst_factor, told.held) == (5, 2.0, 1.0)
    assert told.median == pytest.approx(0.1)
    assert holding(found, 0.5) == pytest.approx(1 / 0.9)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_row_without_a_positive_time_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="n: seconds must be above 0"):
        fit([Row(network="n", work=StepWork(calls=1), seconds=seconds)])


def test_no_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="no rows to fit"):
        fit([], spread=SPREAD)


FIRST = "device,profile,runtime,layer,inputs,outputs,steps,batch,measured_s,source"
STEP = "Pixel 4,pixel-4,torch,lstm,8,8,4,1,0.5,mine"
COUNT = "must be a whole number from 1 to 1000000000, got"
LIBRARY = "must be the name of a library, such as torch, in letters, digits and dots, got"
WRONG = f"""
{STEP} -> pixel -> line 3: must have 10 fields, like the first line, got 1
mine -> mine,more -> line 3: must have 10 fields, like the first line, got 11
Pixel -> LONG -> steps.csv: cannot be read: field larger than field limit (131072)
lstm,8 -> lstm,-5 -> line 3: inputs: {COUNT} -5
4,1 -> 4,{10**30} -> line 3: batch: {COUNT} {10**30}
4,1 -> 4,16x -> line 3: batch: {COUNT} '16x'
8,8 -> 8, -> line 3: outputs: {COUNT} ''
0.5 -> 0.5 s -> line 3: measured_s: must be a number of seconds above 0 and at most 1e+06, got '0.5 s'
lstm -> gru -> line 3: layer must be 'lstm' or 'softmax output', got 'gru'
torch -> -> line 3: runtime: {LIBRARY} ''
torch -> TF_Lite 2 -> line 3: runtime: {LIBRARY} 'TF_Lite 2'
"""


def written(folder: Path, *lines: str, encoding: str = "utf-8") -> Path:
    path = folder / "steps.csv"
    path.write_text("\n".join(lines) + "\n", encoding)
    return path


def refusal(edgefl: Shell, path: Path) -> str:
    """Fit a profile to this file; return the error message."""
    return edgefl.refuses(2, "profiles", "fit", str(path), "--out", str(path.with_name("mine.toml")))


@pytest.mark.parametrize(("old", "new", "said"), arrows(WRONG))
def test_an_error_names_an_invalid_line(tmp_path: Path, edgefl: Shell, old: str, new: str, said: str) -> None:
    line = STEP.replace(old, new).replace("LONG", "a" * 200_000)
    assert refusal(edgefl, written(tmp_path, FIRST, STEP, line)).endswith(said)


@pytest.mark.parametrize("column", ["measured_s", "steps", "source", "batch"])
def test_an_error_names_a_missing_column(tmp_path: Path, edgefl: Shell, column: str) -> None:
    said = refusal(edgefl, written(tmp_path, FIRST.replace(column, "other"), STEP))
    assert said.endswith(f"steps.csv, line 2: the column '{column}' is missing")


def test_an_error_names_an_unknown_workload(tmp_path: Path) -> None:
    """Mutant: for a row of MNN with this workload and no network, the error is "list index out of range"."""
    head = "device,profile,runtime,network,workload,kind,batch,measured_s,source"
    path = written(tmp_path, head, "Pixel 4,pixel-4,mnn,,MNN,train,1,0.5,mine")
    with pytest.raises(ConfigError, match=r"steps\.csv, line 2: unknown workload 'MNN'"):
        measurements.read(path)


def test_times_that_no_model_fits_are_refused(tmp_path: Path, edgefl: Shell) -> None:
    """Mutant: the fit returns a profile that edgefl refuses, because its ``error_factor`` is above 100."""
    path = written(tmp_path, FIRST, STEP.replace("1,0.5", "1,1e6"), STEP.replace("1,0.5", "2,1e-3"))
    said = "no time model fits these steps within a factor of 100; check their measured_s"
    assert refusal(edgefl, path) == said


@pytest.mark.parametrize("time", ["-1", "0", "nan", "inf", "1e9", "1e300", "1e-12", "1e-300"])
def test_an_error_names_the_line_of_an_impossible_time(tmp_path: Path, time: str) -> None:
    with pytest.raises(ConfigError, match=r"steps\.csv, line 3: measured_s: must be .* got "):
        measurements.read(written(tmp_path, FIRST, STEP, STEP.replace("0.5", time)))


def test_too_deeply_nested_json_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "kit.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"^\S*kit\.json: maximum recursion depth"):
        measurements.kinds(tmp_path / "kit.json")


def test_a_byte_order_mark_is_not_part_of_the_first_column(tmp_path: Path) -> None:
    path = written(tmp_path, FIRST, STEP.replace("Pixel", "Pïxel"), encoding="utf-8-sig")
    (step,) = measurements.read(path)
    assert (step.device, step.row.seconds) == ("Pïxel 4", 0.5)
