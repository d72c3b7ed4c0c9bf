"""Secure aggregation in a run: its rules, the phones' keys, and the server's masked sums.

The phones' keys are derived from one secret, which the zygote's processes and the holders' process have and
the server's process does not. An update in its slot is the masked numbers, the mask's id, and a sealed share
of the mask for each holder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.files import flush_folder, read
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import ParameterBuffer, Raw
from edgefl.secure import SECRET_FILE, SecureError
from edgefl.seeds import stream
from edgefl.strategies.base import Strategy

if TYPE_CHECKING:
    from edgefl.secure.coded import Answer, Rules, Sender
    from edgefl.secure.keys import KeyPair

SECRET_BYTES = 32
ID_BYTES = 16


def check_secure(experiment: Experiment, strategy: Strategy, clients: int) -> None:
    """Raise `ConfigError` if ``[server.secure]`` cannot work with the experiment."""
    secure, name = experiment.server.secure, experiment.strategy["name"]
    if secure is None:
        return
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError("[server.secure] needs the package cryptography: pip install 'edgefl[secure]'")
    if strategy.reads == "updates":
        raise ConfigError(f"[server.secure] hides updates, which strategy {name!r} reads")
    if strategy.upload != "delta" or strategy.vectors or strategy.server_vectors or strategy.measures:
        raise ConfigError(
            "[server.secure] needs a strategy that uses only weighted sums of updates, got "
            f"{name!r}: it uploads models, exchanges vectors, or reads updates' norms"
        )
    if experiment.privacy is not None:
        raise ConfigError("[server.secure] excludes [privacy], whose server reads updates' norms")
    if experiment.server.update_format != "float32":
        rounded = experiment.server.update_format
        raise ConfigError(f"server.update_format: must be 'float32' with [server.secure], got {rounded!r}")
    if secure.holders > clients:
        raise ConfigError(f"server.secure.holders: at most {clients}, the clients, got {secure.holders}")
    if not secure.private < secure.recover <= secure.holders:
        got = f"private = {secure.private}, recover = {secure.recover}, holders = {secure.holders}"
        raise ConfigError(f"server.secure: needs private < recover ≤ holders, got {got}")
    if 2 * secure.recover <= secure.holders + secure.private:
        least = (secure.holders + secure.private) // 2 + 1
        raise ConfigError(
            f"server.secure.recover: at least {least} with {secure.holders} holders and private = "
            f"{secure.private}, got {secure.recover}; with fewer, one mask could be used in two sums"
        )
    if secure.least_clients > (held := strategy.max_held(clients)):
        raise ConfigError(
            f"server.secure.least_clients: at most {held}, the updates that {name!r} sums, "
            f"got {secure.least_clients}"
        )


def rules_of(experiment: Experiment, strategy: Strategy, size: int, clients: int) -> Rules | None:
    """Return the rules of the run's secure aggregation, None without."""
    secure = experiment.server.secure
    if secure is None:
        return None
    from edgefl.secure.coded import Rules
    from edgefl.secure.coding import Code
    from edgefl.secure.fixed import FixedPoint

    code = Code(size, secure.holders, secure.recover, secure.private)
    fixed = FixedPoint(secure.clip, strategy.max_held(clients) * secure.resolution)
    return Rules(code, fixed, secure.resolution, secure.least_clients)


# ---- the phones ----------------------------------------------------------------------------------


def phones_secret(experiment: Experiment, folder: Path) -> bytes:
    """Return the secret of the phones' keys, from the run's folder or new; empty without ``[server.secure]``.

    Raises `ConfigError` if a run that has begun has lost it.
    """
    if experiment.server.secure is None:
        return b""
    path = folder / SECRET_FILE
    if not path.exists():
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "wb") as key:
            key.write(secrets.token_bytes(SECRET_BYTES))
            key.flush()
            os.fsync(file)
        flush_folder(folder)
    return read(path, SECRET_BYTES)


class Phones:
    """The keys of the run's phones."""

    def __init__(self, secret: bytes, seed: int, clients: int, rules: Rules) -> None:
        self._secret, self._clients, self._rules = secret, clients, rules
        drawn = stream(seed, "holders").choice(clients, rules.code.holders, replace=False)
        self.holders: list[int] = sorted(map(int, drawn))
        """Clients that hold shares; holder j is the j-th of them."""
        self._keys: dict[int, KeyPair] = {}
        self._senders: dict[int, Sender] = {}

    def keys(self, client: int) -> KeyPair:
        """Return a client's keys."""
        from edgefl.secure.keys import KeyPair

        if client not in self._keys:
            private = hashlib.blake2b(b"client %d" % client, key=self._secret, digest_size=32).digest()
            self._keys[client] = KeyPair(private)
        return self._keys[client]

    def public(self, client: int) -> bytes | None:
        """Return a client's public key, None for an unknown client."""
        return self.keys(client).public if 0 <= client < self._clients else None

    @cached_property
    def _publics(self) -> dict[int, bytes]:
        return {number: self.keys(client).public for number, client in enumerate(self.holders, start=1)}

    def write(self, raw: Raw, update: Floats, client: int, task: int) -> None:
        """Write a client's masked update, with the mask's id and sealed shares, to the bytes of its slot."""
        from edgefl.secure.coded import Sender

        if client not in self._senders:
            self._senders[client] = Sender(client, self.keys(client), self._publics, self._rules)
        size = 4 * self._rules.code.size
        name, sealed = self._senders[client].mask(raw[:size].view(np.uint32), update, task)
        raw[size:] = np.frombuffer(b"".join((name, *sealed)), np.uint8)


# ---- the server ----------------------------------------------------------------------------------


def mask_id(raw: Raw, rules: Rules) -> bytes:
    """Return the mask's id of an update's bytes."""
    start = 4 * rules.code.size
    return raw[start : start + ID_BYTES].tobytes()


def sealed_share(raw: Raw, rules: Rules, holder: int) -> bytes:
    """Return a holder's sealed share in an update's bytes."""
    start = 4 * rules.code.size + ID_BYTES + (holder - 1) * rules.sealed_bytes
    return raw[start : start + rules.sealed_bytes].tobytes()


class Holders(Protocol):
    """The phones that hold shares of masks, as the server reaches them."""

    def answers(self, members: Sequence[tuple[int, int, int]]) -> list[Answer]:
        """Return each holder's answer for the updates in ``members``: (client, slot, weight)."""


class MaskedSums:
    """The server's half of secure aggregation: weighted sums of masked updates in their slots."""

    def __init__(self, rules: Rules, holders: Holders) -> None:
        self.rules, self._holders = rules, holders

    def sum(
        self, buffer: ParameterBuffer, slots: Sequence[int], clients: Sequence[int], weights: Sequence[float]
    ) -> tuple[Floats, float]:
        """Return Σ n_k Δ_k and the unit of the weights, w_k ≈ n_k · unit. `SecureError` if it is refused."""
        from edgefl.secure.coded import check_members, unmasked
        from edgefl.secure.fixed import integer_weights

        try:
            whole, unit = integer_weights(weights, self.rules.resolution)
        except ValueError as error:
            raise SecureError(str(error)) from None
        members = [one for one in zip(clients, slots, whole, strict=True) if one[2]]
        named = [(client, mask_id(buffer.raw(slot), self.rules), n) for client, slot, n in members]
        check_members(self.rules, named)
        updates = [buffer.slot(slot).view(np.uint32) for _, slot, _ in members]
        answers = self._holders.answers(members)
        return unmasked(self.rules, updates, [n for *_, n in members], answers), unit
