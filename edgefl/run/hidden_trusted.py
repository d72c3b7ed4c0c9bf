"""``[server.secure] kind = "trusted"``: a separate process, which the clients trust, decrypts and sums the
updates (`edgefl.secure.trusted`)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from edgefl.experiment import Experiment, Secure
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import ParameterBuffer, Raw
from edgefl.run.hidden import Ask, Helpers, Members, Phones, Scheme, Trip, id_of
from edgefl.run.secure_parties import SumReply, Used
from edgefl.secure import ID_BYTES, SecureError
from edgefl.secure.trusted import SealedUpdate, TrustedAggregator, TrustedRules, seal
from edgefl.strategies.base import Strategy

AGGREGATOR = b"aggregator"
"""Name from which the aggregator's keys are derived."""


def check(experiment: Experiment, secure: Secure, strategy: Strategy, clients: int) -> None:
    """Accept all settings and strategies."""


def rules_of(secure: Secure, strategy: Strategy, size: int, clients: int) -> TrustedRules:
    return TrustedRules(size, secure.least_clients, secure.resolution)


class EncryptedWriter:
    """Writes an update's encrypted elements, its id, and the authentication tag of the cipher."""

    def __init__(self, phones: Phones, rules: TrustedRules) -> None:
        self._phones, self._aggregator = phones, phones.derived(AGGREGATOR).public

    def write(self, raw: Raw, update: Floats, trip: Trip) -> int:
        client, size = trip.client, 4 * update.size
        name, sealed = seal(self._phones.keys(client), self._aggregator, client, trip.task, update)
        raw[:size] = np.frombuffer(sealed, np.uint8, size)
        raw[size:] = np.frombuffer(name + sealed[size:], np.uint8)
        return 0


class Aggregator:
    """The trusted aggregator, which decrypts and sums updates."""

    def __init__(
        self, phones: Phones, rules: TrustedRules, buffer: ParameterBuffer, path: Path | None
    ) -> None:
        self._size, self._buffer, self.used = rules.size, buffer, Used(path, [0])
        keys = phones.derived(AGGREGATOR)
        self._aggregator = TrustedAggregator(keys, phones.public, rules, self.used.of[0])

    def reply(self, members: Members, online: Collection[int]) -> SumReply:
        updates, size = [], self._size
        for client, slot, weight in members:
            raw = self._buffer.raw(slot)
            # These are the encrypted elements and their authentication tag; the id lies between them.
            sealed = raw[: 4 * size].tobytes() + raw[4 * size + ID_BYTES :].tobytes()
            updates.append(SealedUpdate(client, id_of(raw, size), weight, sealed))
        try:
            return SumReply(total=self._aggregator.sum(updates).tobytes())
        except SecureError as error:
            return SumReply(refused=str(error))


def helpers_of(
    rules: TrustedRules, seed: int, clients: int, buffer: ParameterBuffer, members: Members
) -> Helpers:
    return Helpers((), 0)


def opened_sum(
    rules: TrustedRules, ask: Ask, buffer: ParameterBuffer, members: Members
) -> tuple[Floats, float]:
    reply = ask([one for one in members if one[2]])
    if reply.refused:
        raise SecureError(reply.refused)
    return np.frombuffer(reply.total, np.float32), 1.0


SCHEME = Scheme(check, rules_of, EncryptedWriter, Aggregator, helpers_of, opened_sum)
