"""What the parties of all schemes share in `edgefl.run.secure_process`: their reply, and what they summed."""

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
    """Process → server: the holders' answers; or adverts and revealed shares of a round; or the sum's bytes;
    or why it was ``refused``."""

    answers: list[Answer] = []
    adverts: list[Advert] = []
    revealed: list[Revealed] = []
    total: bytes = b""
    refused: str = ""


class Used:
    """Ids of summed masks or updates by party, in memory and in a file; None: in memory only."""

    def __init__(self, path: Path | None, parties: Sequence[int]) -> None:
        self.of: dict[int, dict[bytes, bytes]] = {party: {} for party in parties}
        if path is None:
            return
        if path.exists():
            for line in path.read_text().splitlines():
                party, name, digest = line.split(" ")
                self.of[int(party)][bytes.fromhex(name)] = bytes.fromhex(digest)
        self._saved = {party: set(names) for party, names in self.of.items()}
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def save(self) -> None:
        """Write new ids to the file, in one write, before the reply is sent."""
        lines = []
        for party, names in self.of.items():
            new = names.keys() - self._saved[party]
            lines += [f"{party} {name.hex()} {names[name].hex()}\n" for name in sorted(new)]
            self._saved[party] |= new
        os.write(self._file, "".join(lines).encode())
