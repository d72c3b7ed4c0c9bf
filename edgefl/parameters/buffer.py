"""The parameter buffer: one shared mapping that holds published models and the updates on their way in.

    page 0         header: what the mapping holds, the latest version
    ring headers   64 bytes each: the version an entry holds
    slot headers   64 bytes each: whose update lies there, from which version, its checksum, its state
    ring           entries of one model and the server optimiser's state vectors, float32[D] each
    slots          one update each, in the run's `edgefl.parameters.update_format`
    sides          which of a client's two kept blocks is the one to go on from, and since which task
    kept           two blocks a client of what it keeps from trip to trip: its strategy's vectors, and what
                   rounding left where updates are rounded with error feedback
    tail           what the run's record was told since its last commit: `edgefl.results.tail`

D is the model's size, or what `blocks` says where a strategy has vectors exchanged beside the model.

The mapping is anonymous (a memfd where the kernel has one, else an unlinked file), so it has no name that
could outlive its processes. The server writes version n+1 into a ring entry that nobody reads and publishes
it by one store; a client writes only into the slot that came with its task.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import sys
import tempfile
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import psutil

from edgefl.errors import RunError, SlotError
from edgefl.kernels.arguments import SCALE_BLOCK, Floats, Update
from edgefl.parameters.update_format import FORMATS, Raw, UpdateFormat

RING_BYTES = 256 * 2**20
RING_MIN, RING_MAX = 5, 16
MAGIC = 0x6564676566_6C31
LAYOUT = 5
PAGE = 4096

_FIELDS = "magic layout size ring slots vectors format clients kept tail latest_version latest_entry"
_HEADER = np.dtype([(name, "<i8") for name in _FIELDS.split()])
WORDS = 8
"""64-bit words in the header of a ring entry or slot: one line of the processor's cache."""


class TripPhase:
    """The part of a trip that a client is in, once it has fetched the model: said in ``fetched``."""

    DOWN = 1
    COMPUTE = 2
    UP = 3


class SlotState:
    """State of a slot: no writer, the client that it is leased to, or none until it is released."""

    FREE = 0
    LEASED = 1
    WRITTEN = 2


@dataclass(frozen=True)
class Shape:
    """Sizes: D parameters, ring entries, slots, optimiser vectors an entry, the updates' format, and
    the clients that keep something from trip to trip, the numbers that each keeps, and the tail's bytes."""

    size: int
    ring: int
    slots: int
    vectors: int = 0
    format: str = "float32"
    clients: int = 0
    kept: int = 0
    tail: int = 0

    @property
    def possible(self) -> bool:
        counts = self.size >= 1 and self.ring >= 2 and self.slots >= 1 and self.vectors >= 0
        keeps = self.clients >= 0 and self.kept >= 0 and (self.clients == 0) == (self.kept == 0)
        return counts and keeps and self.tail >= 0 and self.format in FORMATS

    @property
    def update_format(self) -> UpdateFormat:
        return FORMATS[self.format]

    @property
    def update_bytes(self) -> int:
        """Bytes of one update."""
        return self.update_format.nbytes(self.size)

    @property
    def stride(self) -> int:
        """Bytes from one vector to the next, a whole number of pages."""
        return _pages(self.size * 4)

    @property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """The bytes at which ring, slots, sides, kept blocks and the tail begin."""
        ring = PAGE + _pages((self.ring + self.slots) * 8 * WORDS)
        slots = ring + self.ring * (1 + self.vectors) * self.stride
        sides = slots + self.slots * _pages(self.update_bytes)
        kept = sides + _pages(8 * self.clients)
        return ring, slots, sides, kept, kept + 2 * self.clients * _pages(4 * self.kept)

    @property
    def total_bytes(self) -> int:
        return self.offsets[4] + _pages(self.tail)


class ParameterBuffer:
    """A view of the shared mapping. Every process of a run has one on the same memory.

    >>> buffer = ParameterBuffer.create(Shape(size=3, ring=2, slots=1))
    >>> buffer.model(0)[:] = [1, 2, 3]
    >>> buffer.publish(version=0, entry=0)
    >>> ParameterBuffer.attach(buffer.fd).model(0).tolist()
    [1.0, 2.0, 3.0]
    >>> buffer.close()
    """

    def __init__(self, fd: int, memory: mmap.mmap, shape: Shape) -> None:
        self.fd = fd
        self.shape = shape
        whole = np.frombuffer(memory, dtype=np.uint8)
        self._whole: Raw | None = whole
        ring, slots, sides, self._kept, tail = shape.offsets
        self.tail = whole[tail : tail + shape.tail]
        ring_end = PAGE + shape.ring * 8 * WORDS
        slots_end = ring_end + shape.slots * 8 * WORDS
        self._header = whole[: _HEADER.itemsize].view(_HEADER)
        self._entries = whole[PAGE:ring_end].view(np.int64).reshape(-1, WORDS)
        self._slots = whole[ring_end:slots_end].view(np.int64).reshape(-1, WORDS)
        # One view a vector, made once: slicing costs more than the header writes of a whole trip.
        vectors = range(shape.ring * (1 + shape.vectors))
        self._vectors = [self._floats(ring + index * shape.stride, shape.size) for index in vectors]
        kind = shape.update_format
        starts = range(slots, sides, _pages(shape.update_bytes))
        self._raws = [whole[start : start + shape.update_bytes] for start in starts]
        self._updates = [kind.values(raw, shape.size) for raw in self._raws]
        self._scales = [kind.scales(raw, shape.size) for raw in self._raws]
        # Memoryviews give and take plain ints, several times faster than numpy.
        self.side: memoryview[int] = whole[sides : sides + 8 * shape.clients].view(np.int64).data
        self.state, self.task, self.client, self.base_version, self.fetched, self.lent = (
            self._slots[:, word].data for word in range(6)
        )
        self.checksum: memoryview[int] = self._slots[:, 7].view(np.uint64).data
        self.entry_version: memoryview[int] = self._entries[:, 0].data
        self._latest_version = self._header["latest_version"].data
        self._latest_entry = self._header["latest_entry"].data

    def _floats(self, start: int, count: int) -> Floats:
        return self.memory[start : start + 4 * count].view(np.float32)

    @classmethod
    def create(cls, shape: Shape, *, sparse: bool = False, most_bytes: int | None = None) -> ParameterBuffer:
        """A new mapping of ``shape``, zeroed. `RunError` where the memory for it cannot be had.

        One that is ``sparse`` takes memory only where something is written. ``most_bytes`` is what this
        process may use, where that is less than the machine has.
        """
        if not shape.possible:
            raise SlotError(f"buffer needs size ≥ 1, ring ≥ 2, slots ≥ 1, the others ≥ 0; got {shape}")
        fd = _anonymous_file()
        try:
            # Allocating now turns a full shared memory into one clear line instead of a SIGBUS later. More
            # than there is would not fail: the system would kill processes to make room.
            if sparse:
                os.ftruncate(fd, shape.total_bytes)
            elif shape.total_bytes > min(psutil.virtual_memory().available, most_bytes or sys.maxsize):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            else:
                os.posix_fallocate(fd, 0, shape.total_bytes)
            memory = mmap.mmap(fd, shape.total_bytes)
        except (OSError, OverflowError) as error:
            os.close(fd)
            rest = f", 2 × {shape.kept} numbers kept for each of {shape.clients} clients: where updates are "
            rest += "rounded, server.error_feedback = false needs fewer"
            raise RunError(
                f"the parameter buffer needs {shape.total_bytes / 2**20:,.3g} MiB of shared memory "
                f"({shape.ring} model versions and {shape.slots} update slots of {shape.size} parameters"
                f"{rest if shape.clients else ''}): "
                f"{getattr(error, 'strerror', 'more than this system can address')}"
            ) from error
        buffer = cls(fd, memory, shape)
        header, kind = buffer._header, list(FORMATS).index(shape.format)
        sizes = (shape.size, shape.ring, shape.slots, shape.vectors, kind, shape.clients, shape.kept)
        header[0] = (0, LAYOUT, *sizes, shape.tail, -1, -1)
        buffer._entries[:, 0] = -1
        header["magic"] = MAGIC
        return buffer

    @classmethod
    def attach(cls, fd: int) -> ParameterBuffer:
        """The mapping behind a descriptor that was handed over."""
        try:
            memory = mmap.mmap(fd, 0)
        except (OSError, ValueError) as error:
            raise SlotError(f"descriptor {fd} holds no parameter buffer: {error}") from error
        header: tuple[int, ...] = (0,)
        if len(memory) >= PAGE:
            header = np.frombuffer(memory, _HEADER, count=1)[0].item()
        if header[:2] != (MAGIC, LAYOUT):
            raise SlotError(f"descriptor {fd} holds no parameter buffer of layout {LAYOUT}")
        size, ring, slots, vectors, kind, clients, kept, tail = header[2:10]
        shape = Shape(size, ring, slots, vectors, dict(enumerate(FORMATS)).get(kind, ""), clients, kept, tail)
        if not shape.possible or len(memory) < shape.total_bytes:
            raise SlotError(f"parameter buffer of {len(memory)} bytes cannot hold its header's {shape}")
        return cls(fd, memory, shape)

    @property
    def memory(self) -> Raw:
        """All of the mapping, while it is open."""
        assert self._whole is not None, "the buffer is closed"
        return self._whole

    def close(self) -> None:
        """Give the descriptor back. The mapping goes when the last view of it goes."""
        if self._whole is not None:
            os.close(self.fd)
            self._whole = None

    def model(self, entry: int) -> Floats:
        """The model in a ring entry, float32[D]."""
        return self._vectors[entry * (1 + self.shape.vectors)]

    def digest(self) -> str:
        """The SHA-256 of the latest version's numbers."""
        return hashlib.sha256(self.model(self.latest[1]).data).hexdigest()

    def vectors(self, entry: int) -> list[Floats]:
        """The server optimiser's state vectors that belong to that model."""
        first = entry * (1 + self.shape.vectors) + 1
        return self._vectors[first : first + self.shape.vectors]

    def publish(self, version: int, entry: int) -> None:
        """Make ``entry`` the latest version. Its numbers must not change until it is retired."""
        self.entry_version[entry] = version
        self._latest_entry[0] = entry
        self._latest_version[0] = version

    def retire(self, entry: int) -> None:
        """Say that an entry is about to be overwritten, so that a late reader notices."""
        self.entry_version[entry] = -1

    @property
    def latest(self) -> tuple[int, int]:
        """The latest version and its ring entry; (−1, −1) before the first."""
        return self._latest_version[0], self._latest_entry[0]

    def read_model(self, entry: int, version: int, out: Floats) -> None:
        """Copy a version out. `SlotError` if the entry does not hold it from start to end of the copy."""
        before = self.entry_version[entry]
        np.copyto(out, self.model(entry))
        if before != version or self.entry_version[entry] != version:
            now = self.entry_version[entry]
            held = f"version {now}" if now == before else f"version {before}, then {now} during the copy"
            raise SlotError(f"ring entry {entry} holds {held}, not {version}")

    def slot(self, slot: int) -> Update:
        """The values of the update in a slot: D numbers of the run's format."""
        return self._updates[slot]

    def scales(self, slot: int) -> Floats | None:
        """The scales of the update in a slot, where its format has them."""
        return self._scales[slot]

    def raw(self, slot: int) -> Raw:
        """The update in a slot as bytes, scales and all."""
        return self._raws[slot]

    def lease(self, slot: int, *, task: int, client: int, base_version: int, lent: bool = False) -> None:
        """Hand a free slot to one task; its ring entry stays until the update is whole if it is ``lent``."""
        if self.state[slot] != SlotState.FREE:
            raise SlotError(f"slot {slot} is not free: it belongs to task {self.task[slot]}")
        self.task[slot] = task
        self.client[slot] = client
        self.base_version[slot] = base_version
        self.checksum[slot] = 0
        self.fetched[slot] = 0
        self.lent[slot] = lent
        self.state[slot] = SlotState.LEASED

    def written(self, slot: int, *, task: int, checksum: int) -> None:
        """The client's last word on its slot: the update is whole."""
        if self.state[slot] != SlotState.LEASED or self.task[slot] != task:
            raise SlotError(f"slot {slot} is not leased to task {task}")
        self.checksum[slot] = checksum
        self.state[slot] = SlotState.WRITTEN

    def free(self, slot: int) -> None:
        """Take a slot back. Only once its client can no longer write to it."""
        self.state[slot] = SlotState.FREE
        self.task[slot] = -1

    def kept(self, client: int, *, new: bool = False) -> Floats:
        """The client's own numbers as its last accepted trip left them, float32[shape.kept].

        ``new`` is where its next trip writes what it leaves, which counts from `accepted` on.
        """
        place = 2 * client + (self.side[client] & 1 ^ new)
        return self._floats(self._kept + place * _pages(4 * self.shape.kept), self.shape.kept)

    def accepted(self, client: int, task: int) -> None:
        """The client's update arrived: its next one starts from what this one left."""
        if self.shape.clients:  # side and task are one word: a kill leaves the one with the other
            self.side[client] = (task + 1) << 1 | (self.side[client] & 1 ^ 1)

    def take_back(self, tasks: Container[int]) -> None:
        """Undo what was `accepted` for these tasks, which have not arrived after all."""
        for client, word in enumerate(self.side):
            if word >> 1 and (word >> 1) - 1 in tasks:
                self.side[client] = word & 1 ^ 1

    def clear(self) -> None:
        """Empty every entry, slot and kept block. Only once nobody else uses them."""
        self._entries[:, 0] = self._latest_version[0] = self._latest_entry[0] = -1
        for slot in range(self.shape.slots):
            self.free(slot)
        self.memory[self.shape.offsets[2] :] = 0


def blocks(size: int, vectors: int = 0) -> list[slice]:
    """The places of a model of ``size`` numbers, and of ``vectors`` like it that travel behind it.

    Each begins with a block of int8's scales.

    >>> blocks(1000, vectors=1)
    [slice(0, 1000, None), slice(1024, 2024, None)]
    """
    step = -(-size // SCALE_BLOCK) * SCALE_BLOCK
    return [slice(place * step, place * step + size) for place in range(1 + vectors)]


def ring_entries(size: int, vectors: int = 0) -> int:
    """Returns the number of versions that a run keeps, with so many optimiser vectors each.

    >>> ring_entries(1_663_370), ring_entries(25_000_000)
    (16, 5)
    """
    return max(RING_MIN, min(RING_MAX, RING_BYTES // (4 * size * (1 + vectors))))


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("edgefl-parameters", os.MFD_CLOEXEC)
    fd, name = tempfile.mkstemp(prefix="edgefl-parameters-")
    os.unlink(name)
    return fd
