"""An update and its checksum in one pass: the bits of two, and nothing that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgefl import kernels

BACKENDS = [name for name, status in kernels.backends().items() if status == "ok"]


def any_bits(size: int, seed: int) -> Any:
    """Any float32 there is: infinities, denormals, zeros of both signs; no NaN, whose bits are left open."""
    bits = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    bits[np.isnan(bits)] = -0.0
    bits[::7] = np.float32(1e-45)
    return bits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [0, 1, 3, 17, 31, 32, 33, 63, 64, 65, 127, 4095, 4096, 100_003])
def test_the_bits_of_a_difference_and_of_its_checksum(backend: str, size: int) -> None:
    trained, base = any_bits(size, 1), any_bits(size, 2)
    with np.errstate(all="ignore"):
        expected = trained - base
    both = np.isnan(expected)  # infinity less infinity
    trained[both] = 1.0
    with np.errstate(all="ignore"):
        expected = trained - base
    out = np.full(size, 7.0, np.float32)
    assert kernels.delta(out, trained, base, backend) == kernels.checksum(expected, "reference")
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1 << 18, (1 << 18) + 4099, 300_001])
def test_large_ones_are_written_around_the_caches_to_the_same_bits(backend: str, size: int) -> None:
    memory = np.zeros(4 * size + 128, np.uint8)
    trained, base = any_bits(size, 3), any_bits(size, 4)
    base[np.isinf(base)] = 0.0  # infinity less infinity
    with np.errstate(all="ignore"):
        expected = trained - base
    for place in (-memory.ctypes.data % 64, -memory.ctypes.data % 64 + 4):
        out = memory[place : place + 4 * size].view(np.float32)
        out[:] = 7.0
        assert kernels.delta(out, trained, base, backend) == kernels.checksum(expected, "reference")
        assert out.tobytes() == expected.tobytes()
        assert not memory[:place].any()
        assert not memory[place + 4 * size :].any()
        out[:] = 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_alignment(backend: str) -> None:
    memory = np.zeros(3 * 5000 * 4 + 64, np.uint8)
    for offset in (0, 1, 2, 3, 5):
        out, trained, base = (
            memory[offset + 20_000 * i : offset + 20_000 * i + 4 * 4500].view(np.float32) for i in range(3)
        )
        trained[:], base[:] = np.arange(4500), 0.5
        assert kernels.delta(out, trained, base, backend) == kernels.checksum(out.copy(), "reference")
        assert out[10] == 9.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["out", "trained", "base"])
def test_what_does_not_fit_is_named(backend: str, name: str) -> None:
    given: dict[str, Any] = {each: np.ones(10, np.float32) for each in ("out", "trained", "base")}
    for wrong, error in (
        (np.ones(10), TypeError),
        (np.ones((2, 5), np.float32), ValueError),
        (np.ones(20, np.float32)[::2], ValueError),
        ([1.0] * 10, TypeError),
    ):
        with pytest.raises(error, match=name):
            kernels.delta(**{**given, name: wrong}, backend=backend)
    if name != "out":
        with pytest.raises(ValueError, match=f"{name} must have 10 elements, as out has"):
            kernels.delta(**{**given, name: np.ones(11, np.float32)}, backend=backend)
        with pytest.raises(ValueError, match=f"out must not overlap {name}"):
            kernels.delta(**{**given, name: given["out"]}, backend=backend)
