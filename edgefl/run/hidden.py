"""Secure aggregation in a run: its rules, the phones' keys, and the server's sums of hidden updates.

The phones' keys are derived from one secret, which the zygote's processes and `edgefl.run.secure_process`
have and the server's process does not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from edgefl import kernels
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.files import flush_folder, read
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import ParameterBuffer, Raw
from edgefl.secure import ID_BYTES, SECRET_FILE, SecureError
from edgefl.seeds import stream
from edgefl.strategies.base import Strategy

if TYPE_CHECKING:
    from edgefl.secure.coded import Rules, Sender
    from edgefl.secure.keys import KeyPair
    from edgefl.secure.trusted import TrustedRules

SECRET_BYTES = 32
CLIP_MARGIN = 1.0 - 2.0**-20
"""Factor on a clipping norm, for the rounding of clipped elements to float32."""


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
    rules = experiment.privacy
    if rules is not None and rules.quantile is not None:
        raise ConfigError("privacy.quantile reads updates' norms, which [server.secure] hides; leave it out")
    if rules is not None and rules.central and rules.local_noise_multiplier:
        raise ConfigError(
            "[server.secure] works with privacy.noise_multiplier or privacy.local_noise_multiplier, not both"
        )
    if experiment.server.update_format != "float32":
        rounded = experiment.server.update_format
        raise ConfigError(f"server.update_format: must be 'float32' with [server.secure], got {rounded!r}")
    if secure.least_clients > (held := strategy.max_held(clients)):
        raise ConfigError(
            f"server.secure.least_clients: at most {held}, the updates that {name!r} sums, "
            f"got {secure.least_clients}"
        )
    if secure.kind == "trusted":
        return
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


def rules_of(
    experiment: Experiment, strategy: Strategy, size: int, clients: int
) -> Rules | TrustedRules | None:
    """Return the rules of the run's secure aggregation, None without."""
    secure = experiment.server.secure
    if secure is None:
        return None
    from edgefl.secure.coded import Rules
    from edgefl.secure.coding import Code
    from edgefl.secure.fixed import FixedPoint
    from edgefl.secure.trusted import TrustedRules

    if secure.kind == "trusted":
        return TrustedRules(size, secure.least_clients, secure.resolution)
    code = Code(size, secure.holders, secure.recover, secure.private)
    fixed = FixedPoint(secure.clip, strategy.max_held(clients) * secure.resolution)
    rules = Rules(code, fixed, secure.resolution, secure.least_clients)
    limit = norm_limit(experiment, rules)
    if limit is not None and limit <= 0:
        raise ConfigError(
            f"privacy.clip_norm: must be above {rounding_norm(rules):.3g}, the norm of the rounding of "
            "masked updates (a smaller server.secure.clip or resolution rounds less)"
        )
    return rules


def rounding_norm(rules: Rules | TrustedRules) -> float:
    """Return the largest L2 norm by which rounding changes an update."""
    return rules.step * math.sqrt(rules.size) / 2


def norm_limit(experiment: Experiment, rules: Rules | TrustedRules) -> float | None:
    """Return the norm to which clients clip updates so that, rounded, they are within ``privacy.clip_norm``.

    None without ``[privacy]``, and with local noise alone, to which the clipping belongs.
    """
    if experiment.privacy is None or not experiment.privacy.central:
        return None
    return experiment.privacy.clip_norm * CLIP_MARGIN - rounding_norm(rules)


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
    """The keys of the run's phones, and of the trusted aggregator."""

    def __init__(self, secret: bytes, seed: int, clients: int, rules: Rules | TrustedRules) -> None:
        self._secret, self._clients, self._rules, self._seed = secret, clients, rules, seed
        self._keys: dict[int, KeyPair] = {}
        self._senders: dict[int, Sender] = {}

    @cached_property
    def holders(self) -> list[int]:
        """Clients that hold shares, drawn by the seed; holder j is the j-th of them."""
        from edgefl.secure.coded import Rules

        assert isinstance(self._rules, Rules)
        drawn = stream(self._seed, "holders").choice(self._clients, self._rules.code.holders, replace=False)
        return sorted(map(int, drawn))

    def keys(self, client: int) -> KeyPair:
        """Return a client's keys."""
        if client not in self._keys:
            self._keys[client] = self._derived(b"client %d" % client)
        return self._keys[client]

    @cached_property
    def aggregator(self) -> KeyPair:
        """The trusted aggregator's keys."""
        return self._derived(b"aggregator")

    def _derived(self, name: bytes) -> KeyPair:
        from edgefl.secure.keys import KeyPair

        return KeyPair(hashlib.blake2b(name, key=self._secret, digest_size=32).digest())

    def public(self, client: int) -> bytes | None:
        """Return a client's public key, None for an unknown client."""
        return self.keys(client).public if 0 <= client < self._clients else None

    @cached_property
    def _publics(self) -> dict[int, bytes]:
        return {number: self.keys(client).public for number, client in enumerate(self.holders, start=1)}

    def write(
        self, raw: Raw, update: Floats, client: int, task: int, norm_limit: float | None = None
    ) -> None:
        """Clip a client's update to ``norm_limit``, if given, and write it, hidden, to the bytes of its slot.

        With masks: the masked numbers, the mask's id, and the holders' sealed shares. For a trusted
        aggregator: the encrypted numbers, the update's id, and the cipher's tag.
        """
        from edgefl.secure.coded import Rules, Sender
        from edgefl.secure.trusted import seal

        size, rules = 4 * update.size, self._rules
        if norm_limit is not None and norm_limit < (norm := math.sqrt(kernels.sq_norm(update))) < math.inf:
            np.multiply(update, np.float32(norm_limit / norm), out=update)
        if not isinstance(rules, Rules):
            name, sealed = seal(self.keys(client), self.aggregator.public, client, task, update)
            raw[:size] = np.frombuffer(sealed, np.uint8, size)
            raw[size:] = np.frombuffer(name + sealed[size:], np.uint8)
            return
        if client not in self._senders:
            self._senders[client] = Sender(client, self.keys(client), self._publics, rules)
        name, shares = self._senders[client].mask(raw[:size].view(np.uint32), update, task)
        raw[size:] = np.frombuffer(b"".join((name, *shares)), np.uint8)


# ---- the server ----------------------------------------------------------------------------------


def id_of(raw: Raw, size: int) -> bytes:
    """Return the id in the bytes of an update with ``size`` numbers."""
    return raw[4 * size : 4 * size + ID_BYTES].tobytes()


def sealed_share(raw: Raw, rules: Rules, holder: int) -> bytes:
    """Return a holder's sealed share in an update's bytes."""
    start = 4 * rules.code.size + ID_BYTES + (holder - 1) * rules.sealed_bytes
    return raw[start : start + rules.sealed_bytes].tobytes()


def sealed_update(raw: Raw, size: int) -> bytes:
    """Return the encrypted update in an update's bytes, with its tag."""
    return raw[: 4 * size].tobytes() + raw[4 * size + ID_BYTES :].tobytes()


class SumProcess(Protocol):
    """The process that unmasks or opens sums: `edgefl.run.secure_process.SecureProcess`."""

    def ask(self, members: Sequence[tuple[int, int, float]]) -> Any:
        """Return the `SumReply` to a sum of (client, slot, weight)."""


class HiddenSums:
    """The server's half of secure aggregation: weighted sums of hidden updates in their slots."""

    def __init__(self, rules: Rules | TrustedRules, process: SumProcess) -> None:
        self.rules, self._process = rules, process

    def sum(self, buffer: ParameterBuffer, members: Sequence[tuple[int, int, float]]) -> tuple[Floats, float]:
        """Return a vector and its factor, whose product is Σ w_k Δ_k over (client, slot, weight).

        Raises `SecureError` if the sum is refused.
        """
        from edgefl.secure.coded import Rules, check_members, unmasked
        from edgefl.secure.fixed import integer_weights

        rules = self.rules
        if not isinstance(rules, Rules):
            reply = self._process.ask([one for one in members if one[2]])
            if reply.refused:
                raise SecureError(reply.refused)
            return np.frombuffer(reply.total, np.float32), 1.0
        try:
            whole, unit = integer_weights([weight for *_, weight in members], rules.resolution)
        except ValueError as error:
            raise SecureError(str(error)) from None
        pairs = zip(members, whole, strict=True)
        counted = [(client, slot, n) for (client, slot, _), n in pairs if n]
        named = [(client, id_of(buffer.raw(slot), rules.code.size), n) for client, slot, n in counted]
        check_members(rules, named)
        updates = [buffer.slot(slot).view(np.uint32) for _, slot, _ in counted]
        answers = self._process.ask(counted).answers
        return unmasked(rules, updates, [n for *_, n in counted], answers), unit
