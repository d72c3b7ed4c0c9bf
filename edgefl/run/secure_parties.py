"""Code that all secure aggregation schemes in `edgefl.run.secure_process` share.

`SumReply` is the parties' reply to the server; `Used` lists the masks or updates that each party has summed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgefl.secure.coded import Answer, Rules
from edgefl.secure.pairwise import Advert, PairRules, Revealed
from edgefl.secure.trusted import TrustedRules

AnyRules = Rules | TrustedRules | PairRules


class SumReply(msgspec.Struct, frozen=True, tag="reply"):
    """Reply to the server: the answers of the holders of masks; or the adverts (public keys) and the revealed
    shares of a round; or the bytes of the sum; or the reason why the sum was ``refused``."""

    answers: list[Answer] = []
    adverts: list[Advert] = []
    revealed: list[Revealed] = []
    total: bytes = b""
    refused: str = ""


class Used:
    """Ids of the masks or updates that each party has summed, in memory and, unless ``path`` is None, in a
    file.

    If a crash cut off the last line of the file, this line is dropped, because its reply was never sent.
    """

    def __init__(self, path: Path | None, parties: Sequence[int]) -> None:
        self.of: dict[int, dict[bytes, bytes]] = {party: {} for party in parties}
        if path is None:
            return
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        whole, newline, _ = path.read_bytes().rpartition(b"\n")
        os.ftruncate(self._file, len(whole + newline))
        for line in whole.decode().splitlines():
            party, name, digest = line.split(" ")
            self.of[int(party)][bytes.fromhex(name)] = bytes.fromhex(digest)
        self._saved = {party: set(names) for party, names in self.of.items()}

    def save(self) -> None:
        """Write new ids to the file, and wait until they are on the disk; only then may the reply be sent."""
        new = {party: names.keys() - self._saved[party] for party, names in self.of.items()}
        lines = [
            f"{party} {name.hex()} {self.of[party][name].hex()}\n"
            for party, names in new.items()
            for name in sorted(names)
        ]
        left = memoryview("".join(lines).encode())
        while left:
            left = left[os.write(self._file, left) :]
        os.fsync(self._file)
        for party, names in new.items():
            self._saved[party] |= names
