"""The parameter buffer's memory: where it cannot be had, that it has no name, and that all of it goes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from edgefl.errors import RunError
from edgefl.parameters.buffer import ParameterBuffer, Shape

SHAPE = Shape(size=5, ring=3, slots=4, vectors=2)


@pytest.fixture
def buffer() -> Iterator[ParameterBuffer]:
    made = ParameterBuffer.create(SHAPE)
    yield made
    made.close()


FULL = """
import os, resource, sys
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.errors import RunError
if len(sys.argv) > 1:
    del os.memfd_create
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
before = sorted(os.listdir("/proc/self/fd"))
try:
    ParameterBuffer.create(Shape(size=1 << 20, ring=3, slots=2))
except RunError as error:
    print(error)
assert sorted(os.listdir("/proc/self/fd")) == before
ParameterBuffer.create(Shape(size=1000, ring=3, slots=2)).close()
"""


@pytest.mark.parametrize("arguments", [[], ["without memfd"]])
def test_memory_that_is_not_there_is_one_clear_line(tmp_path: os.PathLike[str], arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": os.fspath(tmp_path)},
    )
    assert done.stdout == (
        "the parameter buffer needs 20 MiB of shared memory "
        "(3 model versions and 2 update slots of 1048576 parameters): File too large\n"
    )
    assert done.stderr == ""
    assert os.listdir(tmp_path) == []


def test_more_memory_than_there_can_be_is_refused_too() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RunError, match="the parameter buffer needs"):
        ParameterBuffer.create(Shape(size=1 << 61, ring=2, slots=1))
    assert set(os.listdir("/proc/self/fd")) == before


def test_without_memfd_it_is_a_file_without_a_name(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", os.fspath(tmp_path))
    made = ParameterBuffer.create(SHAPE)
    assert os.listdir(tmp_path) == []
    assert os.fstat(made.fd).st_nlink == 0
    made.slot(0)[:] = 4
    assert ParameterBuffer.attach(os.dup(made.fd)).slot(0).tolist() == [4] * 5
    made.close()


def test_the_mapping_has_no_name_and_does_not_pass_through_exec(buffer: ParameterBuffer) -> None:
    assert os.fstat(buffer.fd).st_nlink == 0
    assert not os.get_inheritable(buffer.fd)


@pytest.mark.usefixtures("nothing_left")
def test_nothing_is_left_once_every_view_is_gone() -> None:
    made = ParameterBuffer.create(SHAPE)
    fd = made.fd
    other = ParameterBuffer.attach(os.dup(fd))
    kept = made.slot(1)
    made.close()
    made.close()  # a second time does nothing, even if the number now belongs to another file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    kept[:] = 5
    assert other.slot(1).tolist() == [5] * 5
    other.close()
    del made, other, kept
    gc.collect()


def test_a_mapping_counts_once_however_many_processes_view_it(buffer: ParameterBuffer) -> None:
    assert os.fstat(buffer.fd).st_blocks * 512 == SHAPE.total_bytes
    other = ParameterBuffer.attach(os.dup(buffer.fd))
    other.slot(0)[:] = 1
    assert os.fstat(buffer.fd).st_blocks * 512 == SHAPE.total_bytes
    other.close()
