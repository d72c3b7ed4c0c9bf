"""Tests that both transports deliver updates bit for bit, and that "wire" refuses parts that do not fit."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import SlotError, WireError
from edgefl.parameters.buffer import ParameterBuffer, Shape, SlotState
from edgefl.run import messages
from edgefl.run.transport import CLIENT_ENDS, PART_BYTES, SERVER_ENDS, ShmClient, ShmServer, WireClient
from edgefl.zeromq.sockets import Frame

KINDS = ("shm", "wire")


class Run:
    """The server's end and the client's end of one transport, with a list in place of the socket."""

    def __init__(self, kind: str, size: int, slots: int = 3) -> None:
        self.buffer = ParameterBuffer.create(Shape(size, 2, slots))
        self.server: ShmServer = SERVER_ENDS[kind](self.buffer)
        self._under_way: list[list[Frame]] = []
        self.view = ParameterBuffer.attach(self.buffer.fd) if kind == "shm" else self.buffer
        self.client: ShmClient = CLIENT_ENDS[kind](self.view, self._give)

    def _give(self, frames: list[Frame]) -> None:
        """Copy the frames, as a socket does."""
        self._under_way.append([bytes(frame) for frame in frames])

    def deliver(self) -> None:
        """Deliver all frames that the client has sent. Until then they wait, as they may in a socket."""
        for header, *rest in self._under_way:
            chunk = messages.decode_from_client(header)
            assert isinstance(chunk, messages.Chunk)
            self.server.accept(chunk, messages.payload(rest))
        self._under_way.clear()

    def lease(self, task: int, slot: int) -> messages.Task:
        self.buffer.lease(slot, task=task)
        return messages.Task(
            client=0, task=task, trip=0, version=0, entry=0, slot=slot, cut=None, condition=None
        )


@contextmanager
def run(kind: str, size: int, slots: int = 3) -> Iterator[Run]:
    made = Run(kind, size, slots)
    try:
        yield made
    finally:
        made.buffer.close()


@pytest.fixture
def wired() -> Iterator[Run]:
    with run("wire", size=10) as made:
        made.buffer.publish(version=0, entry=0)
        yield made


Model = npt.NDArray[np.float32]


def any_bits(draw: st.DrawFn, size: int) -> Model:
    """Any float32 numbers, including NaNs with payloads, infinities, denormals and negative zeros."""
    seed = draw(st.integers(0, 2**32 - 1))
    bits = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    special = [0x7FC00001, 0xFF800000, 0x00000001, 0x80000000]
    places = st.tuples(st.integers(0, size - 1), st.sampled_from(special))
    for place, bit in draw(st.lists(places, max_size=4)):
        bits[place] = bit
    return bits.view(np.float32)


@st.composite
def trips(draw: st.DrawFn) -> tuple[Model, Model, list[tuple[int, int]]]:
    """A model, an update, and the update's parts in any order."""
    size = draw(st.integers(1, 3000))
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=12)) | {0, size})
    return any_bits(draw, size), any_bits(draw, size), draw(st.permutations(list(itertools.pairwise(cuts))))


def bits(array: Model) -> bytes:
    return array.tobytes()


@given(trips())
def test_both_transports_carry_the_bits_of_any_parts_in_any_order(trip: tuple[Model, Model, Any]) -> None:
    model, update, parts = trip
    for kind in KINDS:
        with run(kind, model.size) as there:
            there.buffer.model(0)[:] = model
            there.buffer.publish(version=0, entry=0)
            for slot in range(3):
                there.buffer.slot(slot)[:] = 7.0  # left over from another update
            task = there.lease(40, slot=1)
            got = there.client.base(task.entry, task.version, there.server.model_frames(task.entry))
            assert bits(got) == bits(model)
            room = there.client.room(task)
            for start, stop in parts:
                room.view(np.float32)[start:stop] = update[start:stop]
                there.client.send(task, 4 * start, 4 * stop)
                if kind == "wire":
                    room[:] = 255  # a client reuses its memory at once
            there.deliver()
            assert bits(there.buffer.slot(1)) == bits(update)
            assert bits(there.buffer.slot(0)) == bits(there.buffer.slot(2)) == bits(np.full_like(model, 7.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_never_reads_another_version_than_was_sent(kind: str) -> None:
    with run(kind, size=4) as there:
        there.buffer.model(0)[:] = [1, 2, 3, 4]
        there.buffer.publish(version=5, entry=0)
        frames = there.server.model_frames(0)
        there.buffer.retire(0)
        there.buffer.model(0)[:] = 9
        there.buffer.publish(version=7, entry=0)
        if kind == "wire":
            assert there.client.base(0, 5, frames).tolist() == [1, 2, 3, 4]
        else:
            with pytest.raises(SlotError, match="ring entry 0 holds version 7, not 5"):
                there.client.base(0, 5, frames)


def test_a_lent_version_is_read_in_place_and_a_changed_one_is_noticed() -> None:
    with run("shm", size=4) as there:
        there.buffer.model(0)[:] = [1, 2, 3, 4]
        there.buffer.publish(version=0, entry=0)
        there.buffer.lease(1, task=40, lent=True)
        assert there.client.keeps(messages.Task(0, 40, 0, 0, 0, 1, None, None))
        assert not there.client.keeps(there.lease(41, slot=2))
        model = there.client.base(0, 0, [])
        assert np.shares_memory(model, there.view.model(0))
        there.buffer.retire(0)
        with pytest.raises(SlotError, match="ring entry 0 holds version -1, not 0"):
            there.client.base(0, 0, [])


def test_shared_memory_sends_no_numbers_through_the_socket() -> None:
    with run("shm", size=4) as there:
        assert isinstance(there.server, ShmServer)
        assert there.server.model_frames(0) == []
        with pytest.raises(WireError, match="a part of an update, but this run uses shared memory"):
            there.server.accept(messages.Chunk(task=0, slot=0, offset=0), b"\0" * 4)


def refused(there: Run, chunk: messages.Chunk, body: Frame, match: str) -> None:
    before = [bits(there.buffer.slot(slot)) for slot in range(3)]
    with pytest.raises(WireError, match=match):
        there.server.accept(chunk, body)
    assert [bits(there.buffer.slot(slot)) for slot in range(3)] == before


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


@pytest.mark.parametrize(
    ("offset", "count"),
    [(-1, 1), (37, 1), (40, 1), (0, 11), (36, 2), (2**63, 1), (2**64 - 1, 1), (-(2**63), 10), (41, 0)],
)
def test_parts_beyond_the_update_are_refused(wired: Run, offset: int, count: int) -> None:
    wired.lease(40, slot=1)
    refused(wired, messages.Chunk(40, 1, offset), floats(*[1.0] * count), "but the update has 40 bytes")


@pytest.mark.parametrize(
    ("task", "slot"),
    [
        *((40, slot) for slot in (-1, -3, 3, 2**40, 2**64 - 1)),  # slots that do not exist
        *((task, 1) for task in (-1, 0, 39, 41, 2**63, 2**64 - 1)),  # a slot of another task
        *((task, 0) for task in (-1, 40)),  # a free slot
    ],
)
def test_slots_that_a_task_does_not_hold_are_refused(wired: Run, task: int, slot: int) -> None:
    wired.lease(40, slot=1)
    refused(wired, messages.Chunk(task, slot, 0), floats(1.0), f"a part of an update for slot {slot}, which ")


def test_parts_of_a_finished_update_and_of_a_slots_former_task_are_refused(wired: Run) -> None:
    task = wired.lease(40, slot=1)
    for offset in (0, 40):  # an empty part changes nothing
        wired.server.accept(messages.Chunk(40, 1, offset), b"")
    assert not wired.buffer.slot(1).any()
    wired.client.room(task).view(np.float32)[:] = np.arange(10)
    wired.client.send(task, 0, 40)
    wired.deliver()
    wired.buffer.written(1, task=40, checksum=1)
    assert wired.buffer.state[1] == SlotState.WRITTEN
    refused(wired, messages.Chunk(40, 1, 0), floats(9.0), "for slot 1, which is already complete")
    wired.buffer.free(1)
    wired.lease(41, slot=1)
    refused(wired, messages.Chunk(40, 1, 0), floats(9.0), "for slot 1, which task 40 does not hold")


@pytest.mark.parametrize(
    "frames", [[], [b""], [bytes(36)], [bytes(41)], [bytes(44)], [bytes(40), b""], [bytes(20), bytes(20)]]
)
def test_models_of_another_size_are_refused(frames: Sequence[bytes]) -> None:
    buffer = ParameterBuffer.create(Shape(10, 2, 1))
    client = WireClient(buffer, lambda _: None)
    with pytest.raises(WireError, match=f"expected a model of 40 bytes, got {sum(map(len, frames))}"):
        client.base(0, 0, frames)
    buffer.close()


def test_a_large_update_is_sent_in_parts_of_cache_size() -> None:
    sizes: list[int] = []
    buffer = ParameterBuffer.create(Shape(2 * PART_BYTES // 4 + 1, 2, 1))
    client = WireClient(buffer, lambda frames: sizes.append(len(frames[1])))
    client.send(messages.Task(0, 40, 0, 0, 0, 1, None, None), 0, 2 * PART_BYTES + 4)
    buffer.close()
    assert sizes == [PART_BYTES, PART_BYTES, 4]


PARTS = st.tuples(
    st.sampled_from([-1, 0, 1, 2, 3, 40, 41, 42, 2**64 - 1]),
    st.integers(-2, 4),
    st.integers(-3, 43),
    st.binary(max_size=60),
)


@given(st.lists(PARTS, max_size=30))
def test_any_sequence_of_parts_changes_only_the_leased_slot(parts: list[tuple[int, int, int, bytes]]) -> None:
    with run("wire", size=10) as there:
        there.lease(40, slot=1)
        there.lease(42, slot=2)
        there.buffer.written(2, task=42, checksum=0)
        expected = bytearray(40)
        for task, slot, offset, body in parts:
            fits = offset >= 0 and offset + len(body) <= 40
            if fits and (task, slot) == (40, 1):
                there.server.accept(messages.Chunk(task, slot, offset), body)
                expected[offset : offset + len(body)] = body
            else:
                with pytest.raises(WireError):
                    there.server.accept(messages.Chunk(task, slot, offset), body)
        assert bits(there.buffer.raw(1)) == bytes(expected)
        assert not there.buffer.slot(0).view(np.uint32).any()
        assert not there.buffer.slot(2).view(np.uint32).any()
