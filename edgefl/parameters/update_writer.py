"""A client's update: Δ = y − w, or y where the strategy wants that, in the run's format."""

from __future__ import annotations

from typing import Literal

import numpy as np

from edgefl import kernels
from edgefl.kernels.selection import select
from edgefl.parameters.buffer import Floats, ParameterBuffer
from edgefl.parameters.update_format import Raw, with_scales


def amplify(trained: Floats, base: Floats, gain: float, per_step: bool, steps: int) -> None:
    """y ← w + gain·(y − w), the gain divided by the ``steps`` done if ``per_step``; y if none was."""
    if steps:
        np.subtract(trained, base, out=trained)
        np.multiply(trained, np.float32(gain / steps if per_step else gain), out=trained)
        np.add(trained, base, out=trained)


class UpdateWriter:
    """Writes updates of one buffer's format, and says what their checksums are."""

    def __init__(self, buffer: ParameterBuffer, upload: Literal["delta", "model"]) -> None:
        self._buffer, self._shape, self._upload = buffer, buffer.shape, upload
        self._format = buffer.shape.update_format
        self._backend = kernels.backend()
        self._plain, self._delta = self._format.name == "float32", select(self._backend).delta
        self._sum: int | None = None

    def write(self, raw: Raw, client: int, trained: Floats, base: Floats, start: int, stop: int) -> None:
        """Write bytes ``start`` to ``stop``, in order; an update that is rounded is written whole at 0.

        Rounding overwrites ``trained``.
        """
        if self._plain and self._upload == "delta" and stop - start == raw.size:
            self._sum = self._delta(raw.view(np.float32), trained, base)
        elif self._plain:
            self._sum = None
            part = slice(start // 4, stop // 4)
            values = raw[start:stop].view(np.float32)
            if self._upload == "model":
                np.copyto(values, trained[part])
            else:
                np.subtract(trained[part], base[part], out=values)
        elif start == 0:
            self._round(raw, client, trained, base)

    def _round(self, raw: Raw, client: int, trained: Floats, base: Floats) -> None:
        """The update in few bits, and what that leaves for the client's next one."""
        old = new = None
        if self._upload == "delta":
            np.subtract(trained, base, out=trained)
            if self._shape.residuals:
                old, new = self._buffer.residual(client), self._buffer.residual(client, new=True)
        values, scales = self._parts(raw)
        kernels.quantize(values, trained, scales=scales, residual=old, new_residual=new)

    def checksum(self, raw: Raw) -> int:
        """Of the whole update that was written last."""
        if self._sum is not None:
            return self._sum
        values, scales = self._parts(raw)
        return with_scales(kernels.checksum(values, self._backend), scales)

    def _parts(self, raw: Raw) -> tuple[kernels.arguments.Update, Floats | None]:
        return self._format.values(raw, self._shape.size), self._format.scales(raw, self._shape.size)
