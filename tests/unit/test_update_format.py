"""Tests of updates in fewer bits: their layout in a slot, and error feedback."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from edgefl import kernels
from edgefl.errors import RunError
from edgefl.parameters.buffer import FORMATS, PAGE, ParameterBuffer, Shape, with_scales

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
