"""The checksum: what it must notice, and its fixed value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl import kernels

BACKENDS = [name for name, status in kernels.backends().items() if status == "ok"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_known_value(backend: str) -> None:
    """The sums of the words 1, 2, 3 are 6 and 14; a checksum on disk must stay readable."""
    data = np.array([1, 2, 3], dtype="<u4")
    h = (6 + 0x9E3779B97F4A7C16 * 14 + 0xD1B54A32D192ED03 * 13) % 2**64
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
    assert kernels.checksum(data, backend) == h ^ h >> 31


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_type_by_its_bytes(backend: str) -> None:
    floats = np.arange(1001, dtype=np.float32)
    expected = kernels.checksum(floats, backend)
    for same in (floats.view(np.uint8), floats.view(np.int16), memoryview(floats), floats.tobytes()):
        assert kernels.checksum(same, backend) == expected


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=60),
    place=st.integers(0, 59),
    other=st.integers(0, 59),
    value=st.integers(0, 2**32 - 1),
)
def test_a_changed_word_and_a_swap_are_noticed(words: list[int], place: int, other: int, value: int) -> None:
    place, other = place % len(words), other % len(words)
    before = kernels.checksum(np.array(words, dtype=np.uint32))
    changed, swapped = words.copy(), words.copy()
    changed[place] = value
    swapped[place], swapped[other] = words[other], words[place]
    for altered in (changed, swapped):
        same = kernels.checksum(np.array(altered, dtype=np.uint32)) == before
        assert same == (altered == words)


def test_length_counts() -> None:
    sums = {kernels.checksum(np.zeros(size, dtype=np.uint8)) for size in range(64)}
    assert len(sums) == 64


@pytest.mark.parametrize("backend", BACKENDS)
def test_refused(backend: str) -> None:
    with pytest.raises(TypeError, match=r"^update must be a flat array \(got list\)$"):
        kernels.checksum([1, 2], backend)
    with pytest.raises(ValueError, match=r"^update must be a flat array \(got shape \(2, 2\)\)$"):
        kernels.checksum(np.zeros((2, 2)), backend)
    with pytest.raises(ValueError, match=r"^update must be contiguous \(got stride 16 bytes\)$"):
        kernels.checksum(np.zeros(4)[::2], backend)
