"""The parameter buffer: its layout and memory, attaching to it, versions and slots."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
from full_disk import file_size_limit
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import RunError, SlotError
from edgefl.parameters.buffer import PAGE, ParameterBuffer, Shape, SlotState

SHAPE = Shape(size=5, ring=3, slots=4, vectors=2)

shapes = st.builds(
    Shape,
    size=st.integers(1, 5000),
    ring=st.integers(2, 6),
    slots=st.integers(1, 80),
    vectors=st.integers(0, 2),
    statistics=st.integers(0, 1),
)


@pytest.fixture
def buffer() -> Iterator[ParameterBuffer]:
    made = ParameterBuffer.create(SHAPE)
    yield made
    made.close()


def extent(array: np.ndarray) -> tuple[int, int]:
    start = array.__array_interface__["data"][0]
    return start, start + array.nbytes


def data_of(buffer: ParameterBuffer) -> list[np.ndarray]:
    entries = range(buffer.shape.ring)
    vectors = [vector for entry in entries for vector in (buffer.model(entry), *buffer.vectors(entry))]
    return [*vectors, *(buffer.slot(slot) for slot in range(buffer.shape.slots))]


@given(shapes)
def test_parts_do_not_overlap_and_vectors_start_on_pages(shape: Shape) -> None:
    assert shape.stride % PAGE == shape.offsets[0] % PAGE == shape.total_bytes % PAGE == 0
    assert shape.size * 4 <= shape.stride < shape.size * 4 + PAGE
    with closing(ParameterBuffer.create(shape)) as buffer:
        vectors = data_of(buffer)
        statistics = [buffer.statistics(slot) for slot in range(shape.slots) if shape.statistics]
        parts = [buffer._header, buffer._entries, buffer._slots, *vectors, *statistics]
        found = sorted(extent(part) for part in parts)
        assert len(found) == 3 + shape.ring * (1 + shape.vectors) + shape.slots + len(statistics)
        assert ParameterBuffer.attach(os.dup(buffer.fd)).shape == shape
        for (_, end), (start, _) in pairwise(found):
            assert end <= start
        first = extent(buffer._header)[0]
        assert found[0][0] == first
        assert found[-1][1] <= first + shape.total_bytes
        assert os.fstat(buffer.fd).st_size == shape.total_bytes
        for vector in vectors:
            assert extent(vector)[0] % PAGE == 0
            assert (vector.dtype, vector.shape) == (np.float32, (shape.size,))


def test_a_new_buffer_has_zeros_free_slots_and_no_version(buffer: ParameterBuffer) -> None:
    assert buffer.latest == (-1, -1)
    assert buffer.entry_version.tolist() == [-1] * SHAPE.ring
    assert buffer.state.tolist() == [SlotState.FREE] * SHAPE.slots
    assert not any(vector.any() for vector in data_of(buffer))


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"ring": 1}, {"slots": 0}, {"vectors": -1}, {"statistics": 2}]
)
def test_impossible_shapes_are_refused(wrong: dict[str, int]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    says = "a buffer needs size ≥ 1, ring ≥ 2 and slots ≥ 1, and other sizes ≥ 0"
    with pytest.raises(SlotError, match=says):
        ParameterBuffer.create(Shape(**{"size": 1, "ring": 2, "slots": 1, **wrong}))
    assert set(os.listdir("/proc/self/fd")) == before


def _descriptor_of(content: bytes) -> int:
    fd = os.memfd_create("foreign")
    os.write(fd, content)
    return fd


def _truncated() -> int:
    with closing(ParameterBuffer.create(SHAPE)) as whole:
        return _descriptor_of(os.pread(whole.fd, SHAPE.total_bytes, 0)[:-PAGE])


def _with_header(field: str, value: int) -> Callable[[], int]:
    def make() -> int:
        with closing(ParameterBuffer.create(SHAPE)) as made:
            made._header[field] = value
            return os.dup(made.fd)

    return make


REFUSED = {
    "empty": lambda: _descriptor_of(b""),
    "short": lambda: _descriptor_of(b"edgefl"),
    "foreign": lambda: _descriptor_of(os.urandom(2 * PAGE)),
    "zeros": lambda: _descriptor_of(bytes(2 * PAGE)),
    "truncated": _truncated,
    "other layout": _with_header("layout", 1),
    "unfinished": _with_header("magic", 0),
    "too many slots": _with_header("slots", 1 << 40),
    "too large": _with_header("size", 1 << 40),
    "negative size": _with_header("size", -1),
    "negative ring": _with_header("ring", -1000),
    "no slots": _with_header("slots", 0),
    "negative vectors": _with_header("vectors", -3),
    "a device": lambda: os.open(os.devnull, os.O_RDWR),
    "read only": lambda: os.open(__file__, os.O_RDONLY),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_attaching_to_anything_but_a_buffer_is_refused(kind: str) -> None:
    fd = REFUSED[kind]()
    with pytest.raises(SlotError, match=r"descriptor \d+ is not a parameter buffer|parameter buffer of"):
        ParameterBuffer.attach(fd)
    os.close(fd)  # attach has not closed it
    with pytest.raises(SlotError, match="is not a parameter buffer"):
        ParameterBuffer.attach(fd)


def test_parent_and_forked_child_see_each_others_writes(buffer: ParameterBuffer) -> None:
    buffer.model(0)[:] = [5, 4, 3, 2, 1]
    buffer.publish(version=7, entry=0)
    buffer.lease(2, task=11)
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            view = ParameterBuffer.attach(buffer.fd)
            seen = np.empty(view.shape.size, np.float32)
            view.read_model(0, 7, seen)
            view.slot(2)[:] = seen * 2
            view.written(2, task=11, checksum=2**64 - 1)
            view.vectors(2)[1][:] = 9
            view.publish(version=8, entry=1)
        os.kill(os.getpid(), 9)  # its writes stay
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    assert buffer.slot(2).tolist() == [10, 8, 6, 4, 2]
    assert (buffer.state[2], int(buffer.checksum[2])) == (SlotState.WRITTEN, 2**64 - 1)
    assert buffer.vectors(2)[1].tolist() == [9] * 5
    assert buffer.latest == (8, 1)


def test_a_model_is_read_only_with_its_version(buffer: ParameterBuffer) -> None:
    buffer.model(2)[:] = np.arange(5)
    buffer.publish(version=4, entry=2)
    assert buffer.latest == (4, 2)
    out = np.empty(5, np.float32)
    buffer.read_model(2, 4, out)
    assert out.tolist() == [0, 1, 2, 3, 4]
    for entry, version in ((2, 3), (2, 5), (1, 4)):
        with pytest.raises(SlotError, match=f"ring entry {entry} holds version"):
            buffer.read_model(entry, version, out)
    buffer.retire(2)
    with pytest.raises(SlotError, match="ring entry 2 holds version -1, not 4"):
        buffer.read_model(2, 4, out)


@pytest.mark.parametrize("during", ["retired", "replaced"])
def test_an_entry_that_changes_during_the_copy_is_refused(
    buffer: ParameterBuffer, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    buffer.publish(version=4, entry=0)
    copy = np.copyto

    def slow_copy(out: np.ndarray, model: np.ndarray) -> None:
        copy(out, model)
        buffer.retire(0)
        if during == "replaced":
            buffer.publish(version=9, entry=0)

    monkeypatch.setattr(np, "copyto", slow_copy)
    with pytest.raises(SlotError, match=r"ring entry 0 holds version 4, then -?[19] during the copy, not 4"):
        buffer.read_model(0, 4, np.empty(5, np.float32))


def test_a_reader_in_another_process_never_gets_a_torn_model() -> None:
    """The other process overwrites entries while they are read. The reader must notice this each time."""
    with closing(ParameterBuffer.create(Shape(size=20_000, ring=2, slots=1))) as shared:
        shared.publish(version=0, entry=0)
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                for version in count(1):  # until it is killed
                    entry = version % 2
                    shared.retire(entry)
                    shared.model(entry)[:] = np.float32(version)
                    shared.publish(version, entry)
            os._exit(1)
        out = np.empty(20_000, np.float32)
        whole = torn = 0
        try:
            while not (whole and torn > 20):
                assert os.waitpid(pid, os.WNOHANG) == (0, 0)
                version, entry = shared.latest
                try:
                    shared.read_model(entry, version, out)
                except SlotError as error:
                    torn += "during the copy" in str(error)
                else:
                    assert (out == np.float32(version)).all()
                    whole += 1
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_slot_goes_from_free_to_leased_to_written_to_free(buffer: ParameterBuffer) -> None:
    buffer.fetched[1] = 1
    buffer.checksum[1] = 77
    buffer.lease(1, task=8)
    assert int(buffer.task[1]) == 8
    assert [int(x[1]) for x in (buffer.state, buffer.checksum, buffer.fetched)] == [SlotState.LEASED, 0, 0]
    buffer.written(1, task=8, checksum=99)
    assert (int(buffer.state[1]), int(buffer.checksum[1])) == (SlotState.WRITTEN, 99)
    buffer.free(1)
    assert (int(buffer.state[1]), int(buffer.task[1])) == (SlotState.FREE, -1)
    buffer.lease(1, task=9)


def test_only_free_slots_are_leased(buffer: ParameterBuffer) -> None:
    buffer.lease(0, task=8)
    for _ in range(2):
        with pytest.raises(SlotError, match="slot 0 is not free: it belongs to task 8"):
            buffer.lease(0, task=9)
        if buffer.state[0] == SlotState.LEASED:
            buffer.written(0, task=8, checksum=1)
    assert int(buffer.task[0]) == 8


def test_only_the_task_that_leased_a_slot_completes_it_and_only_once(buffer: ParameterBuffer) -> None:
    def refused(task: int) -> None:
        with pytest.raises(SlotError, match=f"slot 2 is not leased to task {task}"):
            buffer.written(2, task=task, checksum=2)

    refused(0)  # never leased: new memory has 0 for its task
    buffer.lease(2, task=8)
    refused(7)
    buffer.written(2, task=8, checksum=1)
    refused(8)
    assert int(buffer.checksum[2]) == 1


@pytest.mark.parametrize("memfd", [True, False])
def test_a_lack_of_memory_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memfd: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if not memfd:
        monkeypatch.setattr("edgefl.parameters.buffer.memory_file", lambda: None)
    before = os.listdir("/proc/self/fd")
    with file_size_limit(1 << 20):
        with pytest.raises(RunError) as caught:
            ParameterBuffer.create(Shape(size=1 << 20, ring=3, slots=2))
        ParameterBuffer.create(Shape(size=1000, ring=3, slots=2)).close()
    assert str(caught.value) == (
        "the parameter buffer needs 20 MiB of shared memory "
        "(3 model versions and 2 update slots of 1048576 parameters): File too large"
    )
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(tmp_path) == []


def test_a_buffer_larger_than_the_address_space_is_refused() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RunError, match="the parameter buffer needs"):
        ParameterBuffer.create(Shape(size=1 << 61, ring=2, slots=1))
    assert os.listdir("/proc/self/fd") == before


def test_without_memfd_the_buffer_is_an_unnamed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.parameters.buffer.memory_file", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = ParameterBuffer.create(SHAPE)
    assert os.listdir(tmp_path) == []
    assert os.fstat(made.fd).st_nlink == 0
    made.slot(0)[:] = 4
    assert ParameterBuffer.attach(os.dup(made.fd)).slot(0).tolist() == [4] * 5
    made.close()


def test_a_python_without_memfd_create_falls_back_to_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is conda's Python, which is built for an old C library."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    made = ParameterBuffer.create(SHAPE)
    assert os.readlink(f"/proc/self/fd/{made.fd}").startswith("/memfd:edgefl-parameters")
    assert not os.get_inheritable(made.fd)
    made.close()


def test_the_memory_is_unnamed_not_inherited_and_counted_once(buffer: ParameterBuffer) -> None:
    assert os.fstat(buffer.fd).st_nlink == 0
    assert not os.get_inheritable(buffer.fd)
    assert os.fstat(buffer.fd).st_blocks * 512 == SHAPE.total_bytes
    other = ParameterBuffer.attach(os.dup(buffer.fd))
    other.slot(0)[:] = 1
    assert os.fstat(buffer.fd).st_blocks * 512 == SHAPE.total_bytes
    other.close()


@pytest.mark.usefixtures("nothing_left")
def test_closing_all_views_frees_the_memory_and_the_descriptor() -> None:
    made = ParameterBuffer.create(SHAPE)
    fd = made.fd
    other = ParameterBuffer.attach(os.dup(fd))
    kept = made.slot(1)
    made.close()
    made.close()  # a second time has no effect, even if the descriptor's number is reused
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    kept[:] = 5
    assert other.slot(1).tolist() == [5] * 5
    other.close()
    del made, other, kept
    gc.collect()


def test_a_buffer_beyond_the_memory_limit_of_this_process_is_refused() -> None:
    """Linux would kill the run at its first write beyond a control group's limit."""
    shape = Shape(size=10_000, ring=2, slots=2)
    with pytest.raises(RunError, match="Cannot allocate memory"):
        ParameterBuffer.create(shape, most_bytes=shape.total_bytes - 1)
    ParameterBuffer.create(shape, most_bytes=shape.total_bytes).close()
