"""The tail of a record: the method calls of its writer since the last commit, in memory that outlives the
writer.

An SQLite commit takes a fifth of the time that the server spends on a trip; copying a few hundred bytes is
almost free. So the writer copies to the tail each call whose effect must survive the writer's death, and
commits twenty times a second.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgefl.parameters.buffer import Raw

TAIL_BYTES = 2**20
_WORDS = 2
_HEAD_BYTES = 8 * _WORDS
_LENGTH_BYTES = 4


class Tail:
    """Batches of bytes in shared ``memory``, which outlives this process and has at least 16 bytes.

    >>> import numpy as np
    >>> memory = np.zeros(64, np.uint8)
    >>> tail = Tail(memory); tail.clear(seq=7)
    >>> tail.append(b"first"), tail.append(b"second"), tail.append(b"too long for what is left of it" * 2)
    (True, True, False)
    >>> Tail(memory).seq, [bytes(batch) for batch in Tail(memory)]
    (7, [b'first', b'second'])
    """

    def __init__(self, memory: Raw) -> None:
        self._words: memoryview[int] = memory[:_HEAD_BYTES].view("<i8").data
        self._room = memory[_HEAD_BYTES:].data

    @property
    def seq(self) -> int:
        """Number of the last event that had been committed when the tail was cleared."""
        return self._words[1]

    def clear(self, seq: int) -> None:
        """Remove all batches; call this once all events up to number ``seq`` have been committed."""
        self._words[0] = 0
        self._words[1] = seq

    def append(self, batch: bytes) -> bool:
        """Add a batch; if there is no room for it, add nothing and return False."""
        start = self._words[0] + _LENGTH_BYTES
        if (end := start + len(batch)) > len(self._room):
            return False
        self._room[start - _LENGTH_BYTES : start] = len(batch).to_bytes(_LENGTH_BYTES, "little")
        self._room[start:end] = batch
        self._words[0] = end  # this single write makes the whole batch visible to readers
        return True

    def __iter__(self) -> Iterator[memoryview]:
        at = 0
        while at < self._words[0]:
            start = at + _LENGTH_BYTES
            at = start + int.from_bytes(self._room[at:start], "little")
            yield self._room[start:at]
