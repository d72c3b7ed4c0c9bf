"""The back ends under test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_cases import fast_backends


@pytest.fixture(params=fast_backends(), ids="-".join)
def fast(request: pytest.FixtureRequest) -> Iterator[str]:
    backend, isa = request.param
    if isa:
        from edgefl.kernels import _c

        before = _c.isa()
        _c.set_isa(isa)
        yield backend
        _c.set_isa(before)
    else:
        yield backend
