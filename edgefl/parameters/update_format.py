"""Formats of updates in slots and messages: float32, or types with fewer bits.

A slot holds the values and, for int8, padding to a multiple of 4 bytes and then one float32 scale per block
of `SCALE_BLOCK` values. Transports and checkpoints treat an update as bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl import kernels
from edgefl.kernels.arguments import SCALE_BLOCK, Floats, Update

Raw = npt.NDArray[np.uint8]

_SCALES_FACTOR = 0x9E3779B97F4A7C15
"""Weight of the scales' checksum. It is odd, so that different scale checksums give different products; its
mixed bits avoid cancellation with the values' checksum."""


class UpdateFormat(NamedTuple):
    """The element type of updates, and whether they have scales; see `FORMATS`.

    >>> FORMATS["int8"].nbytes(1000), FORMATS["bfloat16"].nbytes(1000)
    (1016, 2000)
    """

    name: str
    dtype: npt.DTypeLike
    scaled: bool = False

    def nbytes(self, size: int) -> int:
        """Bytes of an update with ``size`` parameters, including scales."""
        return self._scales_at(size) + (4 * -(-size // SCALE_BLOCK) if self.scaled else 0)

    def values(self, raw: Raw, size: int) -> Update:
        """The update's values as a view of its bytes."""
        return raw[: size * np.dtype(self.dtype).itemsize].view(self.dtype)

    def scales(self, raw: Raw, size: int) -> Floats | None:
        """The scale of each block as a view of the update's bytes; None if the format has none."""
        return raw[self._scales_at(size) : self.nbytes(size)].view(np.float32) if self.scaled else None

    def _scales_at(self, size: int) -> int:
        nbytes = size * np.dtype(self.dtype).itemsize
        return -(-nbytes // 4) * 4 if self.scaled else nbytes


FORMATS = {
    made.name: made
    for made in (
        UpdateFormat("float32", np.float32),
        UpdateFormat("float16", np.float16),
        UpdateFormat("bfloat16", np.uint16),
        UpdateFormat("int8", np.int8, scaled=True),
    )
}


def with_scales(checksum: int, scales: Floats | None) -> int:
    """Combine the checksum of an update's values with its scales."""
    return checksum if scales is None else (checksum + _SCALES_FACTOR * kernels.checksum(scales)) % 2**64
