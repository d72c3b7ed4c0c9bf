"""Tests of update formats with fewer bits per number: the layout in a slot, and error feedback."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgefl
from edgefl import config, kernels
from edgefl.core.events import Sum
from edgefl.devices.fleet import fleet_of
from edgefl.errors import RunError
from edgefl.experiment import Privacy
from edgefl.kernels.arguments import Floats
from edgefl.learning.train import TrainResult
from edgefl.parameters.buffer import FORMATS, PAGE, ParameterBuffer, Shape, with_scales
from edgefl.privacy.source import Seeded
from edgefl.run.aggregator import Aggregator
from edgefl.run.demands import shape_of
from edgefl.run.slots import Lease
from edgefl.run.update import UpdateMaker
from edgefl.run.workload import Workload
from edgefl.strategies import resolve

SIZE = 1000
NAMES = sorted(FORMATS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, SIZE])
def test_values_and_scales_fill_the_bytes_of_an_update_and_do_not_overlap(name: str, size: int) -> None:
    made = FORMATS[name]
    raw = np.zeros(made.nbytes(size), np.uint8)
    values, scales = made.values(raw, size), made.scales(raw, size)
    assert values.size == size
    assert (scales is not None) == made.scaled
    values.view(np.uint8)[:] = 1
    if scales is not None:
        assert scales.size == -(-size // 256)
        assert not scales.any()
        scales[:] = 2.0
        assert values.tolist() == [1] * size
    used = values.nbytes + (0 if scales is None else scales.nbytes)
    assert 0 <= raw.size - used < 4


@pytest.mark.parametrize("name", NAMES)
def test_slots_have_the_update_format_in_each_process_that_maps_the_buffer(name: str) -> None:
    with closing(ParameterBuffer.create(Shape(SIZE, 2, 3, 1, name))) as buffer:
        mapped = ParameterBuffer.attach(buffer.fd)
        assert mapped.shape == buffer.shape
        for slot in range(3):
            mapped.raw(slot)[:] = slot + 1
        for slot in range(3):
            assert buffer.raw(slot).tolist() == [slot + 1] * FORMATS[name].nbytes(SIZE)
            assert buffer.slot(slot).dtype == FORMATS[name].dtype
            assert buffer.raw(slot).ctypes.data % PAGE == buffer.raw(0).ctypes.data % PAGE
        assert not buffer.model(0).any()
        assert not buffer.vectors(1)[0].any()


def test_a_changed_scale_changes_the_checksum() -> None:
    rng = np.random.default_rng(3)
    scales = rng.random(50).astype(np.float32)
    found = {with_scales(17, scales)}
    for index in range(50):
        changed = scales.copy()
        changed[index] = np.nextafter(changed[index], np.float32(2))
        found.add(with_scales(17, changed))
    assert len(found) == 51
    assert with_scales(17, None) == 17
    assert all(0 <= value < 2**64 for value in found)


def test_error_feedback_sends_the_sum_of_all_updates_despite_lost_trips() -> None:
    rng = np.random.default_rng(5)
    total, sent = np.zeros(SIZE), np.zeros(SIZE)
    decoded = np.empty(SIZE, np.float32)
    with closing(ParameterBuffer.create(Shape(SIZE, 2, 3, 1, "int8", clients=2, kept=SIZE))) as buffer:
        scales = buffer.scales(0)
        assert scales is not None
        for trip in range(12):
            update = rng.normal(size=SIZE).astype(np.float32)
            residuals = {"residual": buffer.kept(1), "new_residual": buffer.kept(1, new=True)}
            kernels.quantize(buffer.slot(0), update, scales=scales, **residuals)
            if trip % 3 == 1:
                continue  # the client was killed; its next trip starts from the last accepted residual
            buffer.accepted(1, task=0)
            kernels.weighted_sum(decoded, None, [buffer.slot(0)], [1.0], scales=[scales])
            total += update
            sent += decoded
        np.testing.assert_allclose(sent + buffer.kept(1), total, atol=1e-5)
        assert np.abs(total - sent).max() < 0.02  # the error of one rounding, not of eight
        assert not buffer.kept(0).any()


def test_an_error_about_residuals_that_do_not_fit_names_the_setting() -> None:
    why = r"2 × 1000000000 kept numbers for each of 100000 clients; server.error_feedback = "
    with pytest.raises(RunError, match=why):
        ParameterBuffer.create(Shape(10**9, 2, 1, 0, "int8", clients=100_000, kept=10**9))


BATCH_NORM = """
from torch import nn

def make(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.Linear(20, classes))
"""
STATISTICS = 40  # 20 means and 20 variances


class Run:
    """Makes updates from given changes to the model and sums them, as a run does."""

    def __init__(self, experiment: edgefl.Experiment, base: Path) -> None:
        self.workload = Workload(experiment, fleet_of(experiment), base)
        self.size, strategy = self.workload.flat.size, resolve(experiment.strategy)
        assert self.workload.flat.buffers == STATISTICS
        shape = shape_of(experiment, strategy, self.size, 4, statistics=STATISTICS)
        self.buffer = ParameterBuffer.create(shape)
        self.first = self.workload.flat.array.copy()
        self.buffer.model(0)[: self.size] = self.first
        self.buffer.publish(version=0, entry=0)
        self.aggregator = Aggregator.of(experiment, strategy, self.buffer, self.size, Seeded(1), STATISTICS)
        self.aggregator.begin()
        self.maker = UpdateMaker(self.workload, self.buffer)

    def deliver(self, task: int, change: Floats) -> Lease:
        base = self.buffer.model(0)

        def train(*_: Any) -> TrainResult:
            self.workload.flat.array += change
            return TrainResult(5, 100, 0.5)

        np.copyto(self.workload.flat.whole, base)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.workload, "train", train)
            self.maker.train(task, 0, 0, base, None)
        lease = self.aggregator.lease(task=task, client=task, version=0)
        raw = self.buffer.raw(lease.slot)
        self.maker.write(raw, task, task, base)
        self.buffer.written(lease.slot, task=task, checksum=self.maker.checksum(raw))
        return lease


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    made: list[Run] = []
    (tmp_path / "batch_norm.py").write_text(BATCH_NORM)

    def one(update_format: str, strategy: dict[str, Any], **changes: Any) -> Run:
        given: dict[str, Any] = {
            "fleet": {"devices": {"pixel-4": 4}},
            "model": {"name": "batch_norm:make"},
            "server": {"update_format": update_format},
            "stop": {"versions": 1},
            "strategy": strategy,
            **changes,
        }
        made.append(Run(config.validate(edgefl.Experiment(**given), tmp_path), tmp_path))
        return made[-1]

    yield one
    for run in made:
        run.buffer.close()


def test_a_link_may_break_within_a_number(runs: Any) -> None:
    """Regression: numpy raised a ValueError, so the task failed too early."""
    run = runs("float32", {"name": "fedavg"})
    raw = np.zeros(run.buffer.shape.update_bytes, np.uint8)
    run.workload.flat.array += 1.0
    run.maker.write(raw, 0, 0, run.buffer.model(0), 0, 1390)
    sent = raw.view(np.float32)
    assert sent[:347] == pytest.approx(1.0, abs=1e-5)
    assert not sent[347:].any()


ROUNDED = [name for name in NAMES if name != "float32"]


@pytest.mark.parametrize(
    "name", ["fedavg", "fedasync", "scaffold", "asyncfeded", "median", "krum", "private"]
)
@pytest.mark.parametrize("update_format", ROUNDED)
def test_running_statistics_are_not_rounded(runs: Any, update_format: str, name: str) -> None:
    """Mutant: the statistics are rounded in blocks together with other numbers, so that small variances are
    lost or become negative."""
    private = name == "private"
    changes = {"privacy": Privacy(clip_norm=1e6, noise_multiplier=1e-14, noise="seeded")} if private else {}
    run = runs(update_format, {"name": "fedbuff" if private else name}, **changes)
    drawn = np.random.default_rng(3).normal(size=(2, run.size)).astype(np.float32)
    drawn[:, -20:] = -0.9999  # variances are 1 at the start
    drawn[:, -40:-20] *= 500.0
    leases = [run.deliver(task, change) for task, change in enumerate(drawn)]
    base_scale, clip_norm = (0.0 if name == "fedasync" else 1.0), (1e6 if private else None)
    result = run.aggregator.sum(Sum(1, (0, 1), (0.25, 0.75), base_scale, {}, clip_norm), 1)
    assert (result.bad, result.altered, result.zero) == ((), (), ())
    share = {"median": [0.5, 0.5], "krum": [1.0, 0.0]}.get(name, [0.25, 0.75])
    expected = run.first.astype(float) + np.asarray(share) @ drawn
    made = run.buffer.model(1)[: run.size]
    assert np.allclose(made[-40:], expected[-40:], rtol=1e-6, atol=1e-7)
    assert np.allclose(made[:-40], expected[:-40], atol=0.05)
    sent = [change + (run.first if name == "fedasync" else 0.0) for change in drawn]
    for norm, lease, update in zip(result.norms, leases, sent, strict=True):
        assert math.sqrt(norm) == pytest.approx(np.linalg.norm(update), rel=0.01)
        if name == "asyncfeded":
            assert run.aggregator.measure(lease)[0] == pytest.approx(np.linalg.norm(update), rel=0.01)


@pytest.mark.parametrize("update_format", ROUNDED)
def test_statistics_that_are_not_finite_or_altered_are_found(runs: Any, update_format: str) -> None:
    run = runs(update_format, {"name": "fedavg"})
    for task, value in enumerate((1.0, np.nan, 1.0)):
        change = np.zeros(run.size, np.float32)
        change[-1] = value
        lease = run.deliver(task, change)
    run.buffer.raw(lease.slot)[-1] ^= 1
    result = run.aggregator.sum(Sum(1, (0, 1, 2), (1.0, 1.0, 1.0)), 1)
    assert result.bad == result.altered == (2,)
    assert run.aggregator.sum(Sum(1, (0, 1), (1.0, 1.0)), 1).bad == (1,)
    assert not run.aggregator.sum(Sum(1, (0,), (1.0,)), 1).bad
