"""``[server.secure] kind = "pairwise"``: one mask for each pair of clients in a round.

`edgefl.secure.pairwise` implements the protocol.

An upload holds the masked and weighted elements of an update, the update's id, the number and the clients of
the round, the weight, the client's advert (its public keys for the round), and its sealed (encrypted) shares.
`edgefl.run.secure_process` acts for the clients that reveal shares. For clients that dropped out, it derives
the shares that they would have sent before their training.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgefl.core.events import Cohort
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment, Secure
from edgefl.kernels.arguments import Floats
from edgefl.kernels.field import Words
from edgefl.parameters.buffer import ParameterBuffer, Raw
from edgefl.run.hidden import Ask, Helpers, Members, Phones, Scheme, Trip, id_of
from edgefl.run.secure_parties import SumReply, Used
from edgefl.secure import ID_BYTES, SecureError, digest_of
from edgefl.secure.fixed import FixedPoint
from edgefl.secure.keys import KEY_BYTES
from edgefl.secure.pairwise import (
    ADVERT_BYTES,
    SEALED_BYTES,
    Advert,
    PairRules,
    Participant,
    Revealed,
    RoundRules,
    least_threshold,
    unmasked,
)
from edgefl.strategies.base import Strategy
from edgefl.strategies.rounds import Rounds

MAX_MEMBERS = 100
"""Maximum number of clients in a round. If clients drop out of a round, the time for its sum grows with the
square of the number of clients."""
_PREFIX = struct.Struct("<QI")
"""Format of the round's number and the update's weight in an upload."""
_ABSENT = 2**32 - 1
"""Padding value in an upload's list of clients, which has a fixed length."""


def check(experiment: Experiment, secure: Secure, strategy: Strategy, clients: int) -> None:
    if not isinstance(strategy, Rounds) or strategy.own_weight(1, 1) is None:
        raise ConfigError(
            "server.secure.kind: 'pairwise' needs a strategy with rounds whose clients know their weights "
            f"(such as fedavg), got {type(strategy).__name__}; 'masks' works with buffers"
        )
    if not strategy.closed:
        raise ConfigError(
            "strategy.redraw: must be false with server.secure.kind = 'pairwise', got true: a client that "
            "joins a round later has no masks with the others"
        )
    if experiment.privacy is not None and experiment.privacy.central:
        raise ConfigError(
            "[privacy] counts clients that drop out as zero, but server.secure.kind = 'pairwise' leaves them "
            "out of the sum; use 'masks' or privacy.local_noise_multiplier"
        )
    members, size = strategy.members(clients), strategy.size(clients)
    if not 2 <= members <= MAX_MEMBERS:
        raise ConfigError(
            f"server.secure.kind: 'pairwise' needs rounds of 2 to {MAX_MEMBERS} members, got {members}"
        )
    if (least := least_threshold(members)) > size:
        raise ConfigError(
            f"strategy.over_selection: with server.secure.kind = 'pairwise' a sum needs {least} of a round's "
            f"{members} members, but a round ends after {size}"
        )


def rules_of(secure: Secure, strategy: Strategy, size: int, clients: int) -> PairRules:
    assert isinstance(strategy, Rounds)
    fixed = FixedPoint(secure.clip, strategy.max_held(clients) * secure.resolution)
    return PairRules(size, strategy.members(clients), fixed, secure.resolution, secure.least_clients)


# ---- rounds and uploads --------------------------------------------------------------------------


def round_rules(rules: PairRules, cohort: Cohort) -> RoundRules:
    """Return a round's rules. The round's name is a hash of its first task and its clients.

    The protocol numbers clients from 1. Raises `SecureError` if the round has too few clients.
    """
    name = hashlib.sha256(b"%d " % cohort.first_task + np.array(cohort.clients, "<u4").tobytes()).digest()
    return rules.of_round(name, frozenset(client + 1 for client in cohort.clients))


def participant(phones: Phones, rules: RoundRules, number: int, content: bytes = b"") -> Participant:
    """Return the protocol's participant for client ``number`` − 1; the protocol numbers clients from 1.

    ``content`` is the id of the client's update.
    """
    secret = hashlib.blake2b(b"rounds", key=phones.keys(number - 1).private, digest_size=KEY_BYTES).digest()
    return Participant(number, rules, secret, content)


def adverts_of(phones: Phones, rules: RoundRules) -> dict[int, Advert]:
    """Return the adverts (the public keys) of all clients of a round."""
    return {number: participant(phones, rules, number).advert() for number in sorted(rules.clients)}


class PairWriter:
    """Writes clients' uploads to their slots."""

    def __init__(self, phones: Phones, rules: PairRules) -> None:
        self._phones, self._rules = phones, rules
        self._last: tuple[Cohort, RoundRules, dict[int, Advert]] | None = None

    def _round(self, cohort: Cohort) -> tuple[RoundRules, dict[int, Advert]]:
        """Return the rules and the adverts of a round; the result for the last round is cached."""
        if self._last is None or self._last[0] != cohort:
            rules = round_rules(self._rules, cohort)
            self._last = cohort, rules, adverts_of(self._phones, rules)
        return self._last[1:]

    def write(self, raw: Raw, update: Floats, trip: Trip) -> int:
        rules, cohort = self._rules, trip.cohort
        assert cohort is not None
        keys, number = self._phones.keys(trip.client), trip.client + 1
        content = hashlib.blake2b(
            b"%d %d " % (trip.client, trip.task), key=keys.private, digest_size=ID_BYTES
        )
        content.update(np.ascontiguousarray(update).data)
        name, weight = content.digest(), max(1, round(trip.weight * rules.resolution))
        one, adverts = self._round(cohort)
        sender = participant(self._phones, one, number, name)
        sealed = sender.shares(adverts.values())
        clients = [*cohort.clients, *[_ABSENT] * (rules.members - len(cohort.clients))]
        advert = sender.advert()
        parts = [
            name,
            _PREFIX.pack(cohort.first_task, weight),
            np.array(clients, "<u4").tobytes(),
            advert.mask_key + advert.seal_key,
            *[sealed.get(peer + 1, bytes(SEALED_BYTES)) for peer in clients],
        ]
        raw[: 4 * rules.size].view(np.uint32)[:] = sender.masked(update, weight)
        raw[4 * rules.size :] = np.frombuffer(b"".join(parts), np.uint8)
        return sender.clipped


class Upload(NamedTuple):
    """An upload, as the server and the secure process read it from its slot."""

    client: int
    name: bytes
    """The update's id."""
    weight: int
    cohort: Cohort
    advert: Advert
    sealed: dict[int, bytes]
    """Sealed shares, keyed by their receiver's number in the protocol."""
    words: Words

    @classmethod
    def read(cls, rules: PairRules, buffer: ParameterBuffer, client: int, slot: int) -> Upload:
        """Read the upload in a slot."""
        raw, size = buffer.raw(slot), rules.size
        name, extra = id_of(raw, size), raw[4 * size + ID_BYTES :]
        first_task, weight = _PREFIX.unpack(extra[: _PREFIX.size].tobytes())
        starts = np.cumsum([_PREFIX.size, 4 * rules.members, ADVERT_BYTES])
        listed, keys, shares = (part.tobytes() for part in np.split(extra, starts)[1:])
        clients = tuple(each for each in np.frombuffer(listed, "<u4").tolist() if each != _ABSENT)
        boxes = (shares[at : at + SEALED_BYTES] for at in range(0, len(shares), SEALED_BYTES))
        advert = Advert(client + 1, keys[:KEY_BYTES], keys[KEY_BYTES:])
        sealed = {peer + 1: box for peer, box in zip(clients, boxes, strict=False) if peer != client}
        words = buffer.slot(slot).view(np.uint32)
        return cls(client, name, weight, Cohort(first_task, clients), advert, sealed, words)


def uploads_of(
    rules: PairRules, buffer: ParameterBuffer, members: Members
) -> tuple[RoundRules, dict[int, Upload]]:
    """Return the rules of the round to be summed, and the uploads of the clients in ``members``.

    The uploads are keyed by the client's number in the protocol. Raises `SecureError` if the uploads belong
    to different rounds, or are too few.
    """
    found = [Upload.read(rules, buffer, client, slot) for client, slot, _ in members]
    if not found:
        raise SecureError("no client's update arrived")
    cohort = found[0].cohort
    if any(one.cohort != cohort for one in found):
        raise SecureError("the updates are not all from the same round")
    uploads = {one.client + 1: one for one in found}
    one = round_rules(rules, cohort)
    if len(uploads) < len(found) or not uploads.keys() <= one.clients:
        raise SecureError("the updates are not from the clients of this round")
    for upload in found:
        if not 1 <= upload.weight <= rules.resolution:
            allowed = f"1 to {rules.resolution} is allowed"
            raise SecureError(f"the weight of client {upload.client} is {upload.weight}; {allowed}")
    if len(uploads) < one.threshold:
        raise SecureError(f"{len(uploads)} clients uploaded; at least {one.threshold} are required")
    return one, uploads


# ---- the clients that reveal shares, and the server ----------------------------------------------


class Participants:
    """Reveals shares on behalf of the clients of all rounds, but only for one sum in each round."""

    def __init__(self, phones: Phones, rules: PairRules, buffer: ParameterBuffer, path: Path | None) -> None:
        self._phones, self._rules, self._buffer = phones, rules, buffer
        self.used = Used(path, [0])

    def reply(self, members: Members, online: Collection[int]) -> SumReply:
        try:
            rules, uploads = uploads_of(self._rules, self._buffer, members)
            digest = digest_of(b"%d %d " % (one.client, one.weight) + one.name for one in uploads.values())
            if self.used.of[0].get(rules.name, digest) != digest:
                raise SecureError("the clients of this round have revealed their shares for another sum")
            adverts, revealed = self._revealed(rules, uploads, online)
        except SecureError as error:
            return SumReply(refused=str(error))
        self.used.of[0][rules.name] = digest
        return SumReply(adverts=adverts, revealed=revealed)

    def _revealed(
        self, rules: RoundRules, uploads: dict[int, Upload], online: Collection[int]
    ) -> tuple[list[Advert], list[Revealed]]:
        adverts = adverts_of(self._phones, rules)
        clients = {
            number: participant(self._phones, rules, number, upload.name)
            for number, upload in uploads.items()
            if upload.client in online
        }
        for client in clients.values():
            client.meet(adverts.values())
        sealed = {number: (upload.sealed, upload.name) for number, upload in uploads.items()}
        for missing in rules.clients - uploads.keys():
            sealed[missing] = participant(self._phones, rules, missing).shares(adverts.values()), b""
        for sender, (boxes, content) in sealed.items():
            for number, client in clients.items():
                if number != sender:
                    client.receive(sender, boxes[number], content)
        arrived = frozenset(uploads)
        return list(adverts.values()), [client.reveal(arrived) for client in clients.values()]


def helpers_of(
    rules: PairRules, seed: int, clients: int, buffer: ParameterBuffer, members: Members
) -> Helpers:
    one, _ = uploads_of(rules, buffer, members)
    return Helpers([client for client, *_ in members], one.threshold)


def unmasked_sum(
    rules: PairRules, ask: Ask, buffer: ParameterBuffer, members: Members
) -> tuple[Floats, float]:
    one, uploads = uploads_of(rules, buffer, members)
    whole = [upload.weight for upload in uploads.values()]
    check_weights([weight for *_, weight in members], whole)
    reply = ask(members)
    if reply.refused:
        raise SecureError(reply.refused)
    adverts = {advert.client: advert for advert in reply.adverts}
    adverts.update((number, upload.advert) for number, upload in uploads.items())
    masked = {number: upload.words for number, upload in uploads.items()}
    weights = dict(zip(uploads, whole, strict=True))
    total = unmasked(one, adverts, masked, weights, reply.revealed)
    return total, sum(weight for *_, weight in members) / sum(whole)


def check_weights(weights: Sequence[float], whole: Sequence[int]) -> None:
    """Raise `SecureError` unless the strategy's weights are proportional to the weights in the uploads.

    Differences due to rounding are allowed.
    """
    total, units = sum(weights), sum(whole)
    for weight, own in zip(weights, whole, strict=True):
        share = weight / total
        if abs(share * units - own) > 1 + share * len(whole):
            raise SecureError(
                f"a client weighted its update with {own} of {units}; the strategy used {share:.3g}"
            )


SCHEME = Scheme(check, rules_of, PairWriter, Participants, helpers_of, unmasked_sum)
