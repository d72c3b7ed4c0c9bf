"""The fixture ``fast``: each back end and instruction set that must match the reference bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_cases import chosen, fast_backends


@pytest.fixture(params=fast_backends(), ids="-".join)
def fast(request: pytest.FixtureRequest) -> Iterator[str]:
    with chosen(*request.param) as backend:
        yield backend
