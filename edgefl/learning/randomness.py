"""torch's random stream, borrowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Let torch's CPU stream start from ``seed`` inside, and give it back as it was.

    >>> with torch_seed(1):
    ...     first = torch.rand(1)
    >>> with torch_seed(1):
    ...     bool(torch.rand(1) == first)
    True
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
