"""Fixtures of the tests in this folder."""

from __future__ import annotations

import pytest
from shell import Shell


@pytest.fixture
def edgefl(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)
