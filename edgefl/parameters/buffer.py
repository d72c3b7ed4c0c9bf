"""The parameter buffer: shared memory that contains the published models and the updates.

    page 0         header: the shape of the buffer and the latest version
    ring headers   64 bytes for each ring entry: the version in the entry
    slot headers   64 bytes for each slot: task, checksum and state of the update in it
    ring           entries with published models: one model and the state vectors of the server's optimiser,
                   each D float32 numbers
    slots          one update in each slot, in the `UpdateFormat` of the run; if this format rounds, running
                   statistics follow as float32 numbers
    statistics     for each slot: the running statistics (of batch normalisation) in the task's base version
    sides          for each client: which of its two kept blocks is current, and the task that made it current
    kept           two "kept blocks" for each client, with the numbers that the client keeps between trips:
                   the strategy's vectors and, with error feedback, the rounding errors of its last update
    tail           data written to the run's record since its last commit (`edgefl.results.tail`)

D is the size of the model plus the size of the vectors that a strategy exchanges together with it (`blocks`).

The memory is anonymous (a memfd, or an unlinked file if the system has no memfds), so no file outlives the
processes. The server writes version n+1 into a ring entry that no process is reading, and publishes it with a
single store to memory. A client writes only into the slot of its task.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import sys
import tempfile
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import psutil

from edgefl import kernels
from edgefl.errors import RunError, SlotError
from edgefl.kernels.arguments import SCALE_BLOCK, Floats, Update

RING_BYTES = 256 * 2**20
RING_MIN, RING_MAX = 5, 16
MAGIC = 0x6564676566_6C31
LAYOUT = 9
PAGE = 4096
_FILE, _MFD_CLOEXEC = "edgefl-parameters", 1
TINY = np.float32(1e-20)
"""Weights with a smaller magnitude than this count as 0 in `ParameterBuffer.weights_digest`."""

_SHAPE = "size ring slots vectors format clients kept tail extra statistics exact"
_FIELDS = ("magic", "layout", *_SHAPE.split(), "latest_version", "latest_entry")
_HEADER = np.dtype([(name, "<i8") for name in _FIELDS])
WORDS = 8
"""Number of 64-bit words in the header of a ring entry or of a slot. The header fills one cache line."""


class TripPhase:
    """Phase of a trip. It is stored in the field ``fetched`` of the slot header, which is 0 until the client
    has the model and its emulated download begins."""

    DOWN = 1
    COMPUTE = 2
    UP = 3


class SlotState:
    """State of a slot: it is free, it is leased to a client that may write to it, or it contains a complete
    update."""

    FREE = 0
    LEASED = 1
    WRITTEN = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a buffer. The docstring of this module explains the parts."""

    size: int
    """D: number of parameters."""
    ring: int
    """Number of ring entries."""
    slots: int
    """Number of slots."""
    vectors: int = 0
    """Number of state vectors of the server's optimiser in each ring entry."""
    format: str = "float32"
    """Format of the updates."""
    clients: int = 0
    """Number of clients with blocks for data kept between trips; 0 if clients keep no such data."""
    kept: int = 0
    """Number of float32 numbers in a kept block."""
    tail: int = 0
    """Size in bytes of the tail, which holds data written to the run's record since its last commit."""
    extra: int = 0
    """Number of additional bytes after the numbers of each update, for secure aggregation."""
    statistics: int = 0
    """Number of running statistics, at the end of the model, that are stored with each slot."""
    exact: int = 0
    """Number of running statistics that each update contains as float32 numbers, after its rounded numbers.
    The rounded numbers are 0 at the positions of these statistics."""

    @property
    def possible(self) -> bool:
        counts = self.size >= 1 and self.ring >= 2 and self.slots >= 1 and self.vectors >= 0
        keeps = self.clients >= 0 and self.kept >= 0 and (self.clients == 0) == (self.kept == 0)
        others = self.tail >= 0 and self.extra >= 0
        others = others and 0 <= self.statistics <= self.size and 0 <= self.exact <= self.size
        return counts and keeps and others and self.format in FORMATS

    @property
    def update_format(self) -> UpdateFormat:
        return FORMATS[self.format]

    @property
    def update_bytes(self) -> int:
        """Length of one update in a slot, in bytes."""
        return update_bytes(self.format, self.size, self.exact) + self.extra

    @property
    def stride(self) -> int:
        """Distance in bytes from the start of one vector to the start of the next. It is a multiple of the
        page size."""
        return _pages(self.size * 4)

    @property
    def offsets(self) -> tuple[int, int, int, int, int, int]:
        """Offsets in bytes of the ring, the slots, the statistics, the sides, the kept blocks and the
        tail."""
        ring = PAGE + _pages((self.ring + self.slots) * 8 * WORDS)
        slots = ring + self.ring * (1 + self.vectors) * self.stride
        statistics = slots + self.slots * _pages(self.update_bytes)
        sides = statistics + _pages(4 * self.slots * self.statistics)
        kept = sides + _pages(8 * self.clients)
        return ring, slots, statistics, sides, kept, kept + 2 * self.clients * _pages(4 * self.kept)

    @property
    def total_bytes(self) -> int:
        return self.offsets[5] + _pages(self.tail)


class ParameterBuffer:
    """A view of the parameter buffer. Every process of a run has its own view of the same shared memory.

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
        ring, slots, self._statistics, sides, self._kept, tail = shape.offsets
        self.tail = whole[tail : tail + shape.tail]
        ring_end = PAGE + shape.ring * 8 * WORDS
        slots_end = ring_end + shape.slots * 8 * WORDS
        self._header = whole[: _HEADER.itemsize].view(_HEADER)
        self._entries = whole[PAGE:ring_end].view(np.int64).reshape(-1, WORDS)
        self._slots = whole[ring_end:slots_end].view(np.int64).reshape(-1, WORDS)
        # Each vector has one view, created here, because slicing costs more than all header writes of a trip.
        vectors = range(shape.ring * (1 + shape.vectors))
        self._vectors = [self._floats(ring + index * shape.stride, shape.size) for index in vectors]
        kind = shape.update_format
        starts = range(slots, self._statistics, _pages(shape.update_bytes))
        self._raws = [whole[start : start + shape.update_bytes] for start in starts]
        self._updates = [kind.values(raw, shape.size) for raw in self._raws]
        self._scales = [kind.scales(raw, shape.size) for raw in self._raws]
        self._exact = [exact_part(raw, shape) for raw in self._raws]
        # A memoryview reads and writes plain integers several times faster than a numpy array.
        self.side: memoryview[int] = whole[sides : sides + 8 * shape.clients].view(np.int64).data
        self.state, self.task, self.fetched, self.lent = (self._slots[:, word].data for word in range(4))
        self.checksum: memoryview[int] = self._slots[:, 7].view(np.uint64).data
        self.entry_version: memoryview[int] = self._entries[:, 0].data
        self._latest_version = self._header["latest_version"].data
        self._latest_entry = self._header["latest_entry"].data

    def _floats(self, start: int, count: int) -> Floats:
        return self.memory[start : start + 4 * count].view(np.float32)

    @classmethod
    def create(cls, shape: Shape, *, sparse: bool = False, most_bytes: int | None = None) -> ParameterBuffer:
        """Create a buffer of the given ``shape`` that contains zeros. Raises `RunError` if there is not
        enough memory.

        If ``sparse`` is True, memory pages are allocated only when they are first written. ``most_bytes`` is
        the memory limit of this process, if it has one.
        """
        if not shape.possible:
            raise SlotError(
                f"a buffer needs size ≥ 1, ring ≥ 2 and slots ≥ 1, and other sizes ≥ 0; got {shape}"
            )
        fd = _anonymous_file()
        try:
            # Allocate all memory now, so that a lack of memory causes a clear error, not a later SIGBUS.
            # Check the available memory first: if posix_fallocate exceeds it, the call does not fail, but the
            # OOM killer kills a process.
            if sparse:
                os.ftruncate(fd, shape.total_bytes)
            elif shape.total_bytes > min(psutil.virtual_memory().available, most_bytes or sys.maxsize):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            else:
                os.posix_fallocate(fd, 0, shape.total_bytes)
            memory = mmap.mmap(fd, shape.total_bytes)
        except (OSError, OverflowError) as error:
            os.close(fd)
            rest = f", and 2 × {shape.kept} kept numbers for each of {shape.clients} clients; "
            rest += "server.error_feedback = false needs less memory if updates are rounded"
            raise RunError(
                f"the parameter buffer needs {shape.total_bytes / 2**20:,.3g} MiB of shared memory "
                f"({shape.ring} model versions and {shape.slots} update slots of {shape.size} parameters"
                f"{rest if shape.clients else ''}): "
                f"{getattr(error, 'strerror', 'more than this system can address')}"
            ) from error
        buffer = cls(fd, memory, shape)
        header, kind = buffer._header, list(FORMATS).index(shape.format)
        sizes = (shape.size, shape.ring, shape.slots, shape.vectors, kind, shape.clients, shape.kept)
        header[0] = (0, LAYOUT, *sizes, shape.tail, shape.extra, shape.statistics, shape.exact, -1, -1)
        buffer._entries[:, 0] = -1
        header["magic"] = MAGIC
        return buffer

    @classmethod
    def attach(cls, fd: int) -> ParameterBuffer:
        """Map the buffer behind a file descriptor into memory. Raises `SlotError` if the descriptor does not
        refer to a buffer with this layout."""
        try:
            memory = mmap.mmap(fd, 0)
        except (OSError, ValueError) as error:
            raise SlotError(f"descriptor {fd} is not a parameter buffer: {error}") from error
        header: tuple[int, ...] = (0,)
        if len(memory) >= PAGE:
            header = np.frombuffer(memory, _HEADER, count=1)[0].item()
        if header[:2] != (MAGIC, LAYOUT):
            raise SlotError(f"descriptor {fd} is not a parameter buffer of layout {LAYOUT}")
        size, ring, slots, vectors, kind, *others = header[2:13]
        name = dict(enumerate(FORMATS)).get(kind, "")
        shape = Shape(size, ring, slots, vectors, name, *others)
        if not shape.possible or len(memory) < shape.total_bytes:
            raise SlotError(
                f"parameter buffer of {len(memory)} bytes is too small for the shape in its header, {shape}"
            )
        return cls(fd, memory, shape)

    @property
    def memory(self) -> Raw:
        """The whole shared memory as bytes. The buffer must be open."""
        assert self._whole is not None, "the buffer is closed"
        return self._whole

    def close(self) -> None:
        """Close the file descriptor. The memory is freed when no view of it is left."""
        if self._whole is not None:
            os.close(self.fd)
            self._whole = None

    def model(self, entry: int) -> Floats:
        """Return the model in a ring entry: D float32 numbers."""
        return self._vectors[entry * (1 + self.shape.vectors)]

    def digest(self) -> str:
        """Return the SHA-256 hash of the parameters of the latest version, in hexadecimal digits."""
        return hashlib.sha256(self.model(self.latest[1]).data).hexdigest()

    def weights_digest(self, statistics: int) -> str:
        """Return a SHA-256 hash of the latest version's weights, to see whether training has changed them.

        The last ``statistics`` elements, which are running statistics, are left out. Values below `TINY`
        count as 0, because even a step that is too small to change other weights changes a weight of 0.
        """
        model, found = self.model(self.latest[1]), hashlib.sha256()
        for at in range(0, len(model) - statistics, 1 << 20):
            part = model[at : min(at + (1 << 20), len(model) - statistics)]
            found.update(np.where(np.abs(part) < TINY, np.float32(0.0), part).data)
        return found.hexdigest()

    def vectors(self, entry: int) -> list[Floats]:
        """Return the state vectors of the server's optimiser in a ring entry."""
        first = entry * (1 + self.shape.vectors) + 1
        return self._vectors[first : first + self.shape.vectors]

    def publish(self, version: int, entry: int) -> None:
        """Make the model in a ring entry the latest version. The model must not change until the entry is
        retired."""
        self.entry_version[entry] = version
        self._latest_entry[0] = entry
        self._latest_version[0] = version

    def retire(self, entry: int) -> None:
        """Mark a ring entry that is about to be overwritten, so that a concurrent reader detects the
        change."""
        self.entry_version[entry] = -1

    @property
    def latest(self) -> tuple[int, int]:
        """The latest version and its ring entry; (−1, −1) before the first version is published."""
        return self._latest_version[0], self._latest_entry[0]

    def read_model(self, entry: int, version: int, out: Floats) -> None:
        """Copy a version of the model to ``out``. Raises `SlotError` if the ring entry contains another
        version, or was overwritten during the copy."""
        before = self.entry_version[entry]
        np.copyto(out, self.model(entry))
        if before != version or self.entry_version[entry] != version:
            now = self.entry_version[entry]
            held = f"version {now}" if now == before else f"version {before}, then {now} during the copy"
            raise SlotError(f"ring entry {entry} holds {held}, not {version}")

    def slot(self, slot: int) -> Update:
        """Return the update in a slot: D numbers in the update format of the run."""
        return self._updates[slot]

    def scales(self, slot: int) -> Floats | None:
        """Return the scales of the update in a slot, or None if the update format has no scales."""
        return self._scales[slot]

    def exact(self, slot: int) -> Floats | None:
        """Return the running statistics that the update in a slot contains as float32 numbers, if any."""
        return self._exact[slot]

    def raw(self, slot: int) -> Raw:
        """Return the update in a slot as bytes, including its scales and the extra bytes after them."""
        return self._raws[slot]

    def statistics(self, slot: int) -> Floats:
        """Return the running statistics in the base version of the task to which a slot is leased."""
        count = self.shape.statistics
        return self._floats(self._statistics + 4 * count * slot, count)

    def lease(self, slot: int, *, task: int, lent: bool = False) -> None:
        """Lease a free slot to a task. If ``lent`` is True, the base version stays in the ring until the
        upload ends. Raises `SlotError` if the slot is not free."""
        if self.state[slot] != SlotState.FREE:
            raise SlotError(f"slot {slot} is not free: it belongs to task {self.task[slot]}")
        self.task[slot] = task
        self.checksum[slot] = 0
        self.fetched[slot] = 0
        self.lent[slot] = lent
        self.state[slot] = SlotState.LEASED

    def written(self, slot: int, *, task: int, checksum: int) -> None:
        """Mark the update in a leased slot as complete. Raises `SlotError` if the slot is not leased to the
        task."""
        if self.state[slot] != SlotState.LEASED or self.task[slot] != task:
            raise SlotError(f"slot {slot} is not leased to task {task}")
        self.checksum[slot] = checksum
        self.state[slot] = SlotState.WRITTEN

    def free(self, slot: int) -> None:
        """Free a slot. The client to which it was leased must not be able to write to it any more."""
        self.state[slot] = SlotState.FREE
        self.task[slot] = -1

    def kept(self, client: int, *, new: bool = False) -> Floats:
        """Return the client's current kept block: the float32 numbers that it has kept since its last
        accepted trip.

        If ``new`` is True, return the client's other block. The client's next trip writes to this block, and
        `accepted` makes it current.
        """
        place = 2 * client + (self.side[client] & 1 ^ new)
        return self._floats(self._kept + place * _pages(4 * self.shape.kept), self.shape.kept)

    def accepted(self, client: int, task: int) -> None:
        """Make the kept block to which the client's last trip wrote the current one. Call this when the
        client's update has arrived."""
        if self.shape.clients:  # one word contains side and task, so a kill cannot leave only one of them set
            self.side[client] = (task + 1) << 1 | (self.side[client] & 1 ^ 1)

    def revert_accepted(self, tasks: Container[int]) -> None:
        """Undo `accepted` for these tasks, whose updates, according to the run's record, have not arrived."""
        for client, word in enumerate(self.side):
            if word >> 1 and (word >> 1) - 1 in tasks:
                self.side[client] = word & 1 ^ 1

    def clear(self) -> None:
        """Clear all ring entries, slots and kept blocks. No other process may be using them."""
        self._entries[:, 0] = self._latest_version[0] = self._latest_entry[0] = -1
        for slot in range(self.shape.slots):
            self.free(slot)
        self.memory[self.shape.offsets[3] :] = 0


def blocks(size: int, vectors: int = 0) -> list[slice]:
    """Return the slices of an array that contains a model of ``size`` numbers and, after it, ``vectors``
    further vectors of the same size.

    Each slice starts at a multiple of `SCALE_BLOCK`, so that no scale of the int8 format applies to two
    slices.

    >>> blocks(1000, vectors=1)
    [slice(0, 1000, None), slice(1024, 2024, None)]
    """
    step = -(-size // SCALE_BLOCK) * SCALE_BLOCK
    return [slice(place * step, place * step + size) for place in range(1 + vectors)]


def ring_entries(size: int, vectors: int = 0) -> int:
    """Return the number of ring entries for models of ``size`` parameters with ``vectors`` state vectors of
    the optimiser.

    >>> ring_entries(1_663_370), ring_entries(25_000_000)
    (16, 5)
    """
    return max(RING_MIN, min(RING_MAX, RING_BYTES // (4 * size * (1 + vectors))))


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def memory_file() -> int | None:
    """Create an anonymous file in memory (a memfd); return its descriptor, or None if there are no memfds.

    A Python that was built for an old C library, such as conda's, lacks `os.memfd_create`. The C library of
    this system may still have this function.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_FILE, _MFD_CLOEXEC)
    create = getattr(ctypes.CDLL(None), "memfd_create", None)
    fd = -1 if create is None else int(create(_FILE.encode(), _MFD_CLOEXEC))
    return fd if fd >= 0 else None


def _anonymous_file() -> int:
    if (memory := memory_file()) is not None:
        return memory
    fd, name = tempfile.mkstemp(prefix=f"{_FILE}-")
    os.unlink(name)
    return fd


# ---- formats of updates: the values and, for int8, padding to 4 bytes and a float32 scale for each block ---

Raw = npt.NDArray[np.uint8]
"""An update as an array of bytes, which is how transports and checkpoints treat it."""
_SCALES_FACTOR = 0x9E3779B97F4A7C15
"""Factor by which the checksum of the scales is multiplied before it is added to the checksum of the values.
It is odd, so different checksums of the scales give different products. Its irregular bits make it unlikely
that a change of the scales is cancelled by a change of the values."""


class UpdateFormat(NamedTuple):
    """A number format of updates: the type of their elements, and whether they have scales (see `FORMATS`).

    >>> FORMATS["int8"].nbytes(1000), FORMATS["bfloat16"].nbytes(1000)
    (1016, 2000)
    """

    name: str
    dtype: npt.DTypeLike
    scaled: bool = False

    def nbytes(self, size: int) -> int:
        """Return the length in bytes of an update with ``size`` parameters, including its scales."""
        return self._scales_at(size) + (4 * -(-size // SCALE_BLOCK) if self.scaled else 0)

    def exact(self, statistics: int) -> int:
        """Return the number of running statistics that are appended to an update as float32.

        It is 0 unless the format rounds, because a float32 update contains them exactly.
        """
        return 0 if self.dtype is np.float32 else statistics

    def values(self, raw: Raw, size: int) -> Update:
        """Return the values of an update as a view of its bytes."""
        return raw[: size * np.dtype(self.dtype).itemsize].view(self.dtype)

    def scales(self, raw: Raw, size: int) -> Floats | None:
        """Return the scale of each block as a view of the update's bytes, or None if the format has no
        scales."""
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


def update_bytes(name: str, size: int, exact: int = 0) -> int:
    """Return the length in bytes of an update with ``size`` parameters in the format ``name``, followed by
    ``exact`` float32 numbers.

    >>> update_bytes("int8", 1000), update_bytes("int8", 1000, exact=2), update_bytes("float16", 3, exact=2)
    (1016, 1024, 16)
    """
    nbytes = FORMATS[name].nbytes(size)
    return -(-nbytes // 4) * 4 + 4 * exact if exact else nbytes


def exact_part(raw: Raw, shape: Shape) -> Floats | None:
    """Return the float32 numbers of an update as a view of its bytes, or None if it has none."""
    end = shape.update_bytes - shape.extra
    return raw[end - 4 * shape.exact : end].view(np.float32) if shape.exact else None


def with_scales(checksum: int, *parts: Floats | None) -> int:
    """Combine the checksum of an update's values with checksums of its scales and of its float32 numbers, if
    it has these parts."""
    for part in parts:
        if part is not None:
            checksum = (checksum + _SCALES_FACTOR * kernels.checksum(part)) % 2**64
    return checksum
