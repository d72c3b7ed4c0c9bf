"""``[server.secure] kind = "masks"``: each update has a mask that is used only once. Clients that hold coded
shares of the masks help the server to remove masks from a sum (`edgefl.secure.coded`)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from edgefl.errors import ConfigError
from edgefl.experiment import Experiment, Secure
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import ParameterBuffer, Raw
from edgefl.run.hidden import Ask, Helpers, Members, Phones, Scheme, Trip, id_of
from edgefl.run.secure_parties import SumReply, Used
from edgefl.secure import ID_BYTES, SecureError
from edgefl.secure.coded import Holder, Member, Request, Rules, Sender, check_members, unmasked
from edgefl.secure.coding import Code
from edgefl.secure.fixed import LARGEST_SUM, FixedPoint, integer_weights
from edgefl.seeds import stream
from edgefl.strategies.base import Strategy


def check(experiment: Experiment, secure: Secure, strategy: Strategy, clients: int) -> None:
    if secure.holders > clients:
        raise ConfigError(
            f"server.secure.holders: must be at most {clients}, the number of clients, got {secure.holders}"
        )
    if not secure.private < secure.recover <= secure.holders:
        got = f"private = {secure.private}, recover = {secure.recover}, holders = {secure.holders}"
        raise ConfigError(f"server.secure: needs private < recover ≤ holders, got {got}")
    if 2 * secure.recover <= secure.holders + secure.private:
        least = (secure.holders + secure.private) // 2 + 1
        raise ConfigError(
            f"server.secure.recover: must be at least {least} with {secure.holders} holders and private = "
            f"{secure.private}, got {secure.recover}; with fewer, one mask could be used in two sums"
        )
    held = strategy.max_held(clients)
    if held * secure.resolution > LARGEST_SUM:
        raise ConfigError(
            f"server.secure.resolution: must be at most {LARGEST_SUM // held} for sums of up to {held} "
            f"updates, got {secure.resolution}"
        )


def rules_of(secure: Secure, strategy: Strategy, size: int, clients: int) -> Rules:
    code = Code(size, secure.holders, secure.recover, secure.private)
    fixed = FixedPoint(secure.clip, strategy.max_held(clients) * secure.resolution)
    return Rules(code, fixed, secure.resolution, secure.least_clients)


def holders_of(seed: int, clients: int, rules: Rules) -> list[int]:
    """Draw the clients that hold shares of masks, using the seed.

    Holder j, counted from 1, is the j-th client in the list.
    """
    drawn = stream(seed, "holders").choice(clients, rules.code.holders, replace=False)
    return sorted(map(int, drawn))


class MaskWriter:
    """Writes the masked elements of an update, the mask's id, and for each holder an encrypted share of the
    mask."""

    def __init__(self, phones: Phones, rules: Rules) -> None:
        self._phones, self._rules = phones, rules
        holders = holders_of(phones.seed, phones.clients, rules)
        self._publics = {number: phones.keys(client).public for number, client in enumerate(holders, 1)}
        self._senders: dict[int, Sender] = {}

    def write(self, raw: Raw, update: Floats, trip: Trip) -> int:
        client, size = trip.client, 4 * update.size
        if client not in self._senders:
            keys = self._phones.keys(client)
            self._senders[client] = Sender(client, keys, self._publics, self._rules)
        sender = self._senders[client]
        name, shares = sender.mask(raw[:size].view(np.uint32), update, trip.task)
        raw[size:] = np.frombuffer(b"".join((name, *shares)), np.uint8)
        return sender.clipped


class Holders:
    """Answers the server's requests on behalf of all clients that hold shares of masks."""

    def __init__(self, phones: Phones, rules: Rules, buffer: ParameterBuffer, path: Path | None) -> None:
        self._rules, self._buffer = rules, buffer
        self.used = Used(path, range(1, rules.code.holders + 1))
        self._holders = {
            client: Holder(number, phones.keys(client), phones.public, rules, self.used.of[number])
            for number, client in enumerate(holders_of(phones.seed, phones.clients, rules), start=1)
        }

    def reply(self, members: Members, online: Collection[int]) -> SumReply:
        holders = [holder for client, holder in self._holders.items() if client in online]
        return SumReply([holder.answer(self._request(members, holder.number)) for holder in holders])

    def _request(self, members: Members, holder: int) -> Request:
        """Build the request that this holder would receive from the server."""
        rules, found = self._rules, []
        # Each update contains a sealed (encrypted) share for every holder. This holder's share starts here:
        start = 4 * rules.code.size + ID_BYTES + (holder - 1) * rules.sealed_bytes
        for client, slot, weight in members:
            raw = self._buffer.raw(slot)
            sealed = raw[start : start + rules.sealed_bytes].tobytes()
            found.append(Member(client, id_of(raw, rules.code.size), int(weight), sealed))
        return Request(found)


def helpers_of(rules: Rules, seed: int, clients: int, buffer: ParameterBuffer, members: Members) -> Helpers:
    if (found := len({client for client, *_ in members})) < rules.least_clients:
        raise SecureError(
            f"the sum includes updates from {found} clients; at least {rules.least_clients} are required"
        )
    return Helpers(holders_of(seed, clients, rules), rules.code.recover)


def unmasked_sum(rules: Rules, ask: Ask, buffer: ParameterBuffer, members: Members) -> tuple[Floats, float]:
    try:
        whole, unit = integer_weights([weight for *_, weight in members], rules.resolution)
    except ValueError as error:
        raise SecureError(str(error)) from None
    pairs = zip(members, whole, strict=True)
    counted = [(client, slot, n) for (client, slot, _), n in pairs if n]
    named = [(client, id_of(buffer.raw(slot), rules.code.size), n) for client, slot, n in counted]
    check_members(rules, named)
    updates = [buffer.slot(slot).view(np.uint32) for _, slot, _ in counted]
    answers = ask(counted).answers
    return unmasked(rules, updates, [n for *_, n in counted], answers), unit


SCHEME = Scheme(check, rules_of, MaskWriter, Holders, helpers_of, unmasked_sum)
