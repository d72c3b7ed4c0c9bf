"""Updates in fewer bits: how they lie in a slot, and what becomes of what rounding left."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgefl import kernels
from edgefl.errors import RunError
from edgefl.parameters.buffer import FORMATS, PAGE, ParameterBuffer, Shape, with_scales

SIZE = 1000
NAMES = sorted(FORMATS)


@pytest.fixture
def buffer() -> Iterator[ParameterBuffer]:
    made = ParameterBuffer.create(Shape(SIZE, 2, 3, 1, "int8", clients=2, kept=SIZE))
    yield made
    made.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, SIZE])
def test_values_and_scales_share_the_update_s_bytes_and_no_others(name: str, size: int) -> None:
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
def test_the_slots_of_a_buffer_hold_the_format_whoever_maps_it(name: str) -> None:
    made = ParameterBuffer.create(Shape(SIZE, 2, 3, 1, name))
    there = ParameterBuffer.attach(made.fd)
    assert there.shape == made.shape
    for slot in range(3):
        there.raw(slot)[:] = slot + 1
    for slot in range(3):
        assert made.raw(slot).tolist() == [slot + 1] * FORMATS[name].nbytes(SIZE)
        assert made.slot(slot).dtype == FORMATS[name].dtype
        assert made.raw(slot).ctypes.data % PAGE == made.raw(0).ctypes.data % PAGE
    assert not made.model(0).any()
    assert not made.vectors(1)[0].any()
    made.close()


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


def test_nothing_is_lost_but_delayed(buffer: ParameterBuffer) -> None:
    """What was sent plus what is left is what was to be sent, also with trips that were lost between."""
    rng = np.random.default_rng(5)
    meant, sent = np.zeros(SIZE), np.zeros(SIZE)
    decoded = np.empty(SIZE, np.float32)
    for trip in range(12):
        update = rng.normal(size=SIZE).astype(np.float32)
        scales = buffer.scales(0)
        assert scales is not None
        kernels.quantize(
            buffer.slot(0),
            update,
            scales=scales,
            residual=buffer.kept(1),
            new_residual=buffer.kept(1, new=True),
        )
        if trip % 3 == 1:
            continue  # the client was killed: its next trip finds what the last accepted one left
        buffer.accepted(1, task=0)
        kernels.weighted_sum(decoded, None, [buffer.slot(0)], [1.0], scales=[scales])
        meant += update
        sent += decoded
    np.testing.assert_allclose(sent + buffer.kept(1), meant, atol=1e-5)
    assert np.abs(meant - sent).max() < 0.02  # one rounding, not the sum of eight
    assert not buffer.kept(0).any()


def test_residuals_that_do_not_fit_name_the_setting() -> None:
    with pytest.raises(
        RunError, match=r"2 × 1000000000 kept numbers for each of 100000 clients; server.error_feedback = "
    ):
        ParameterBuffer.create(Shape(10**9, 2, 1, 0, "int8", clients=100_000, kept=10**9))
