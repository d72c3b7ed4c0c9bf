"""Secure aggregation in a run: its rules, the phones' keys, and the server's sums of hidden updates.

A hidden update is masked or encrypted, so that the server can read only sums of several updates.

Each kind of ``[server.secure]`` is a `Scheme` in a module of its own: `hidden_masks`, `hidden_trusted` and
`hidden_pairwise`. The phones' keys are derived from one secret. The zygote's processes and
`edgefl.run.secure_process` have this secret; the server's process does not.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from edgefl import kernels
from edgefl.core.events import Cohort
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment, Secure
from edgefl.files import create_secret, read_secret
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import ParameterBuffer, Raw
from edgefl.privacy.mechanism import clip_factors
from edgefl.secure import ID_BYTES, SECRET_FILE, SecureError, SecureRules
from edgefl.strategies.base import Strategy

if TYPE_CHECKING:
    from edgefl.run.secure_parties import AnyRules, SumReply, Used
    from edgefl.secure.keys import KeyPair

SECRET_BYTES = 32
CLIP_MARGIN = 1.0 - 2.0**-20
"""Factor applied to clipping norms, because rounding the clipped elements to float32 can raise the norm."""
COARSE = 0.5
"""A warning is given if the norm of the rounding errors in a sum is at least this fraction of the norm of the
sum. The standard deviation of normally distributed elements is then about half of the step to which they are
rounded."""
Members = Sequence[tuple[int, int, float]]
"""The client, the slot and the weight of each update in a sum."""


class Trip(NamedTuple):
    """Data about a client's trip that a `Writer` needs to hide the trip's update."""

    client: int
    task: int
    cohort: Cohort | None
    """The trip's round and the clients in it, if no client can join the round later; otherwise None."""
    weight: float
    """The client's `Strategy.own_weight` divided by the fleet's largest own weight; 1 if the strategy
    defines no own weights."""


class Writer(Protocol):
    """The part of a secure aggregation scheme that hides updates on the clients."""

    def write(self, raw: Raw, update: Floats, trip: Trip) -> int:
        """Hide a client's update and write it to its slot; return the number of elements that were clipped.

        Raises `SecureError` if the update is not finite.
        """


class SumProcess(Protocol):
    """A process that unmasks or decrypts sums, such as `edgefl.run.secure_process.SecureProcess`."""

    def ask(self, members: Members, online: Sequence[int]) -> SumReply:
        """Request the sum of ``members`` and return the reply. Only clients in ``online`` can help."""


class Parties(Protocol):
    """The parties of a secure aggregation scheme that unmask or decrypt sums."""

    used: Used

    def reply(self, members: Members, online: Collection[int]) -> SumReply:
        """Answer a request for the sum of ``members`` on behalf of the clients that are ``online``."""


Ask = Callable[[Members], Any]
"""Requests the unmasking or decryption of a sum; returns the `SumReply`."""


class Helpers(NamedTuple):
    """Clients that can help to unmask a sum, and how many of these clients are needed."""

    clients: Sequence[int]
    needed: int


class Scheme(NamedTuple):
    """One kind of secure aggregation: its rules, and the parts that run on the clients, in the process that
    unmasks sums, and on the server."""

    check: Callable[[Experiment, Secure, Strategy, int], None]
    """Raises `ConfigError` if the experiment, the settings, the strategy and the number of clients do not fit
    together."""
    rules: Callable[[Secure, Strategy, int, int], AnyRules]
    """Makes the rules from the settings, the strategy, the number of elements of an update, and the number of
    clients."""
    writer: Callable[[Phones, Any], Writer]
    """Creates the `Writer` that hides updates on the clients, from the phones' keys and the rules."""
    parties: Callable[[Phones, Any, ParameterBuffer, Path | None], Parties]
    """Creates the `Parties` that run in `edgefl.run.secure_process`, from the phones' keys, the rules, the
    parameter buffer and the path of the file that lists used masks."""
    helpers: Callable[[Any, int, int, ParameterBuffer, Members], Helpers]
    """Returns the `Helpers` of a sum, from the rules, the seed, the number of clients of the experiment, the
    parameter buffer and the members of the sum."""
    sum: Callable[[Any, Ask, ParameterBuffer, Members], tuple[Floats, float]]
    """Sums updates on the server; returns a vector and a factor, whose product is the weighted sum."""


def scheme_of(kind: str) -> Scheme:
    """Return the scheme for this ``kind`` of ``[server.secure]``.

    The scheme's module needs the package cryptography.
    """
    scheme: Scheme = importlib.import_module(f"edgefl.run.hidden_{kind}").SCHEME
    return scheme


def completed(experiment: Experiment, strategy: Strategy) -> Experiment:
    """Return the experiment with the defaults that secure aggregation requires.

    With pairwise masks, ``strategy.redraw`` is False if the experiment does not set it.
    """
    secure, table = experiment.server.secure, experiment.strategy
    if secure is None or secure.kind != "pairwise" or not hasattr(strategy, "redraw"):
        return experiment
    return msgspec.structs.replace(experiment, strategy={"redraw": False, **table})


def check_secure(experiment: Experiment, strategy: Strategy, clients: int) -> None:
    """Raise `ConfigError` if ``[server.secure]`` cannot work with the experiment."""
    secure, name = experiment.server.secure, experiment.strategy["name"]
    if secure is None:
        return
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError("[server.secure] needs the package cryptography: pip install 'edgefl[secure]'")
    if strategy.reads == "updates":
        raise ConfigError(f"[server.secure] hides individual updates, but strategy {name!r} reads them")
    if strategy.upload != "delta" or strategy.vectors or strategy.server_vectors or strategy.measures:
        raise ConfigError(
            "[server.secure] needs a strategy that uses only weighted sums of updates, got "
            f"{name!r}: it uploads models, exchanges vectors, or reads updates' norms"
        )
    if strategy.reuses:
        raise ConfigError(
            f"[server.secure] allows each update in only one sum, but strategy {name!r} uses updates again "
            "in later steps (reuses = True)"
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
            f"server.secure.least_clients: must be at most {held}, the number of updates that {name!r} sums, "
            f"got {secure.least_clients}"
        )
    scheme_of(secure.kind).check(experiment, secure, strategy, clients)


def rules_of(experiment: Experiment, strategy: Strategy, size: int, clients: int) -> AnyRules | None:
    """Return the rules of the run's secure aggregation, or None if the run does not use it."""
    secure = experiment.server.secure
    if secure is None:
        return None
    rules = scheme_of(secure.kind).rules(secure, strategy, size, clients)
    limit = norm_limit(experiment, rules)
    if limit is not None and limit <= 0:
        raise ConfigError(
            f"privacy.clip_norm: must be above {rounding_norm(rules):.3g}, the norm of the rounding error of "
            "masked updates (which a smaller server.secure.clip or resolution reduces)"
        )
    return rules


def rounding_norm(rules: SecureRules) -> float:
    """Return the largest L2 norm that the rounding error of an update can have."""
    return rules.step * math.sqrt(rules.size) / 2


def norm_limit(experiment: Experiment, rules: SecureRules) -> float | None:
    """Return the norm to which clients clip updates so that rounded updates are within ``privacy.clip_norm``.

    Return None if there is no ``[privacy]``, or only local noise, which is added to clipped updates anyway.
    """
    if experiment.privacy is None or not experiment.privacy.central:
        return None
    return experiment.privacy.clip_norm * CLIP_MARGIN - rounding_norm(rules)


def rounding_warning(rules: SecureRules, total: Floats, unit: float, members: Members) -> str:
    """Return a warning if the rounding of the updates distorts their sum, which is ``unit`` · ``total``.

    The mean square of the rounding error of an element is step²/12. If most elements are much smaller than a
    step, they are rounded to 0, so that the sum has a smaller norm than such errors. Return "" if the norm
    of the errors is below `COARSE` times the norm of the sum.
    """
    squares = sum(weight**2 for *_, weight in members)
    error, norm = rules.step * math.sqrt(rules.size * squares / 12), unit * math.sqrt(kernels.sq_norm(total))
    if not error or error < COARSE * norm:
        return ""
    share = f"an error of about {error / norm:.0%} of the sum" if norm else "a sum of zeros"
    return f"updates rounded to multiples of {rules.step:.3g} gave {share}"


# ---- the phones ----------------------------------------------------------------------------------


def phones_secret(experiment: Experiment, folder: Path, *, begun: bool = True) -> bytes:
    """Return the secret from which the phones' keys are derived; it is empty without ``[server.secure]``.

    The secret is read from the run's folder; for a new run, it is created and stored there. Raises
    `ConfigError` if the secret of a run that has begun is missing, because nobody could then unmask or
    decrypt the updates that the server holds.
    """
    if experiment.server.secure is None:
        return b""
    path = folder / SECRET_FILE
    if not path.exists():
        if begun:
            raise ConfigError(
                f"{path} is missing: without it, the updates held for the next version cannot be decrypted"
            )
        create_secret(path, SECRET_BYTES)
    return read_secret(path, SECRET_BYTES)


class Phones:
    """The keys of the run's phones, and of the trusted aggregator."""

    def __init__(self, secret: bytes, seed: int, clients: int) -> None:
        self._secret, self.seed, self.clients = secret, seed, clients
        self._keys: dict[int, KeyPair] = {}

    def keys(self, client: int) -> KeyPair:
        """Return a client's keys."""
        if client not in self._keys:
            self._keys[client] = self.derived(b"client %d" % client)
        return self._keys[client]

    def derived(self, name: bytes) -> KeyPair:
        """Return the keys that are derived from the secret for the party with this name."""
        from edgefl.secure.keys import KeyPair

        return KeyPair(hashlib.blake2b(name, key=self._secret, digest_size=32).digest())

    def public(self, client: int) -> bytes | None:
        """Return a client's public key, or None if there is no such client."""
        return self.keys(client).public if 0 <= client < self.clients else None


class HiddenUpdates:
    """The part of secure aggregation that runs on the clients.

    It clips updates to ``norm_limit``, unless ``norm_limit`` is None, and hides them.
    """

    def __init__(self, phones: Phones, kind: str, rules: SecureRules, norm_limit: float | None) -> None:
        self._writer, self._norm_limit = scheme_of(kind).writer(phones, rules), norm_limit

    def write(self, raw: Raw, update: Floats, trip: Trip) -> int:
        """Clip an update, hide it, and write it to its slot, followed by the bytes that the scheme adds.

        Return the number of elements that ``server.secure.clip`` limited.
        """
        limit = self._norm_limit
        if limit is not None and limit < math.sqrt(square := kernels.sq_norm(update)) < math.inf:
            np.multiply(update, np.float32(clip_factors([square], limit)[0]), out=update)
        return self._writer.write(raw, update, trip)


# ---- the server ----------------------------------------------------------------------------------


def id_of(raw: Raw, size: int) -> bytes:
    """Return the id that is stored in the bytes of an update with ``size`` elements."""
    return raw[4 * size : 4 * size + ID_BYTES].tobytes()


class HiddenSums:
    """The part of secure aggregation that runs on the server: weighted sums of hidden updates in slots."""

    def __init__(self, kind: str, rules: SecureRules, process: SumProcess, seed: int, clients: int) -> None:
        self.rules, self._process, self._scheme = rules, process, scheme_of(kind)
        self._seed, self._clients = seed, clients
        self.by_round = kind == "pairwise"
        """True if a client hides its update in a way that depends on the other clients of its round."""
        self.online: Callable[[int], bool] = lambda client: True
        """Returns True for a client that is connected, so that it can help to unmask a sum."""
        self.cut_short = False
        """True if the run ends before the exchange for the next sum has ended; this sum is then refused."""
        self.reply_s: Callable[[int, int, float, int, int], float] = lambda *_: 0.0
        """Returns the emulated seconds that a client's part of an exchange takes; see `Trips.reply_s`."""

    def lacks_helpers(self, buffer: ParameterBuffer, members: Members) -> bool:
        """Return True if too few clients are online to unmask a sum; False for a sum that will be refused."""
        try:
            helpers, online = self._helpers(buffer, members)
        except SecureError:
            return False
        return len(online) < helpers.needed

    def exchange_s(self, buffer: ParameterBuffer, members: Members, version: int, at_s: float) -> float:
        """Return the emulated seconds until enough helpers have received and answered their requests."""
        try:
            helpers, online = self._helpers(buffer, members)
        except SecureError:
            return 0.0
        received, sent = self.rules.held_bytes
        replies = sorted(
            self.reply_s(client, version, at_s, received * len(members), sent) for client in online
        )
        return replies[helpers.needed - 1] if 0 < helpers.needed <= len(replies) else 0.0

    def _helpers(self, buffer: ParameterBuffer, members: Members) -> tuple[Helpers, list[int]]:
        """Return the helpers of a sum, and a list of the helpers that are online."""
        helpers = self._scheme.helpers(self.rules, self._seed, self._clients, buffer, members)
        return helpers, [client for client in helpers.clients if self.online(client)]

    def sum(self, buffer: ParameterBuffer, members: Members) -> tuple[Floats, float]:
        """Return a vector and a factor, whose product is Σ w_k Δ_k over all ``members`` k.

        Raises `SecureError` if the sum is refused.
        """
        helpers, online = self._helpers(buffer, members)
        if len(online) < helpers.needed:
            known = f"{len(online)} of {len(helpers.clients)} clients that can unmask the sum are online"
            raise SecureError(f"{known}; {helpers.needed} are needed")
        if self.cut_short:
            raise SecureError("the run ended during the exchange that would have unmasked the sum")
        return self._scheme.sum(self.rules, lambda asked: self._process.ask(asked, online), buffer, members)
