"""The process that plays the holders of masks: the phones that help the server to unmask sums.

The server starts it and starts it again if it dies. It reads the sealed shares of a sum in the parameter
buffer, opens them with the holders' keys, checks the request as each holder would, and returns the answers.
What the holders have answered for is in a file, so that no mask is used in two sums after a restart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgefl.errors import RunError
from edgefl.experiment import Experiment
from edgefl.host.channel import Channel, Closed
from edgefl.host.children import end_child, exit_of
from edgefl.host.process import become_child, start_process
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.run.masked import Phones, mask_id, phones_secret, sealed_share
from edgefl.secure import USED_FILE
from edgefl.secure.coded import Answer, Holder, Member, Request, Rules

MOST_STARTS = 5
"""Starts of the process for one sum, after which the run ends."""
GRACE_S = 5.0


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Server → holders: the run's rules; the parameter buffer's descriptor is attached."""

    experiment: Experiment
    folder: str
    clients: int
    rules: Rules


class Unmask(msgspec.Struct, frozen=True, tag="unmask"):
    """Server → holders: a sum's clients, slots and weights."""

    members: list[tuple[int, int, int]]


class Unmasked(msgspec.Struct, frozen=True, tag="unmasked"):
    """Holders → server."""

    answers: list[Answer]


class HolderProcess:
    """The server's connection to the holders' process, which is started at the first sum."""

    def __init__(
        self, experiment: Experiment, folder: Path, clients: int, rules: Rules, buffer: ParameterBuffer
    ) -> None:
        self._begin, self._buffer = Begin(experiment, str(folder), clients, rules), buffer
        self._child: Any = None
        self._channel: Channel[Unmasked]

    def answers(self, members: Sequence[tuple[int, int, int]]) -> list[Answer]:
        """Return the holders' answers. `RunError` if their process ends again and again."""
        for _ in range(MOST_STARTS):
            try:
                if self._child is None:
                    self._start()
                self._channel.send(Unmask(list(members)))
                return self._channel.receive().answers
            except Closed:
                end = exit_of(self._child, GRACE_S)
                self.close()
        raise RunError(f"the holders' process ended early {MOST_STARTS} times ({end})")

    def _start(self) -> None:
        self._child, self._channel = start_process("edgefl.run.holders", Unmasked, dict(os.environ))
        self._channel.send(self._begin, self._buffer.fd)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._channel.close()
            end_child(self._child, GRACE_S)
            self._child = None


class _Used:
    """The holders' used masks, in memory and in a file."""

    def __init__(self, path: Path, holders: Sequence[int]) -> None:
        self.of: dict[int, dict[bytes, bytes]] = {holder: {} for holder in holders}
        if path.exists():
            for line in path.read_text().splitlines():
                holder, mask, digest = line.split(" ")
                self.of[int(holder)][bytes.fromhex(mask)] = bytes.fromhex(digest)
        self._saved = {holder: set(masks) for holder, masks in self.of.items()}
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def save(self) -> None:
        """Write new masks to the file, in one write, before the answers are sent."""
        lines = []
        for holder, masks in self.of.items():
            new = masks.keys() - self._saved[holder]
            lines += [f"{holder} {mask.hex()} {masks[mask].hex()}\n" for mask in sorted(new)]
            self._saved[holder] |= new
        os.write(self._file, "".join(lines).encode())


def main(channel_fd: int, parent_pid: int) -> int:
    become_child(parent_pid, "edgefl-holders")
    channel: Channel[Begin | Unmask] = Channel.inherit(channel_fd, Begin | Unmask)
    try:
        begin = channel.receive()
        assert isinstance(begin, Begin)
        buffer, rules, folder = ParameterBuffer.attach(channel.descriptor()), begin.rules, Path(begin.folder)
        secret = phones_secret(begin.experiment, folder)
        phones = Phones(secret, begin.experiment.seed, begin.clients, rules)
        used = _Used(folder / USED_FILE, range(1, rules.code.holders + 1))
        holders = [
            Holder(number, phones.keys(client), phones.public, rules, used.of[number])
            for number, client in enumerate(phones.holders, start=1)
        ]
        while True:
            message = channel.receive()
            assert isinstance(message, Unmask)
            answers = [holder.answer(_request(message, buffer, rules, holder.number)) for holder in holders]
            used.save()
            channel.send(Unmasked(answers))
    except Closed:
        return 0


def _request(message: Unmask, buffer: ParameterBuffer, rules: Rules, holder: int) -> Request:
    """Build the request that this holder would receive."""
    return Request(
        [
            Member(client, mask_id(raw, rules), weight, sealed_share(raw, rules, holder))
            for client, slot, weight in message.members
            for raw in [buffer.raw(slot)]
        ]
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
