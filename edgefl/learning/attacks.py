"""Attackers: clients that send harmful updates, to test strategies that should resist them.

sign-flip    sends −scale·Δ in place of the update Δ (Li et al. 2019, RSA, arXiv:1811.03761)
gaussian     sends normal noise with the expected norm scale·‖Δ‖ in place of Δ (Blanchard et al. 2017)
label-flip   trains with the class C − 1 − y in place of y, for C classes (Fang et al. 2020, arXiv:1911.11815)
alie         computes an honest update on the data of each of several attackers, and sends the updates' mean
             − z · standard deviation for each parameter (Baruch et al. 2019, "A Little Is Enough",
             arXiv:1902.06156)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError, TrainingError, described, unknown
from edgefl.experiment import Attackers
from edgefl.loading import load_attribute
from edgefl.seeds import stream

if TYPE_CHECKING:
    from edgefl.learning.dataset import Dataset

KINDS = ("sign-flip", "gaussian", "label-flip", "alie")
MAX_COLLUDERS = 7
"""Maximum number of other attackers on whose data an ``alie`` attacker trains in a trip."""
Floats = NDArray[np.float32]
AttackFunction = Callable[[Floats, int, int, np.random.Generator], object]
"""``attack(delta, client, trip, rng)`` changes the client's update Δ in place and returns None."""


def attacking_clients(rules: Attackers | None, clients: int, seed: int) -> tuple[int, ...]:
    """Return the clients that attack, in ascending order.

    Their number is ``rules.share`` times the number of all clients, rounded to a whole number. They are drawn
    at random with the seed. Raises `ConfigError` if no client or every client would attack.

    >>> attacking_clients(Attackers(share=0.2), 10, seed=1)
    (3, 6)
    """
    if rules is None:
        return ()
    count = round(rules.share * clients)
    if not 0 < count < clients:
        raise ConfigError(
            f"fleet.attackers.share: {rules.share:g} of {clients} clients is {count} attackers, rounded; "
            f"the number must be at least 1 and fewer than {clients}"
        )
    drawn = stream(seed, "attackers").choice(clients, count, replace=False)
    return tuple(sorted(drawn.tolist()))


def alie_z(clients: int, attackers: int) -> float:
    """Return the factor z of the attack ``alie`` for n clients and m attackers.

    As in algorithm 3 of Baruch et al. 2019, z satisfies Φ(z) = (n − m − s)/(n − m) with
    s = ⌊n/2 + 1⌋ − m, so that the attackers and s honest clients with more extreme updates form a majority.
    Fewer than half of the clients may be attackers.

    >>> round(alie_z(50, 24), 2), alie_z(10, 2)
    (1.43, 0.0)
    """
    needed = clients // 2 + 1 - attackers
    return NormalDist().inv_cdf((clients - attackers - needed) / (clients - attackers))


class Attack:
    """Changes the data and the updates of the clients that attack; by default no client attacks."""

    def __init__(
        self,
        rules: Attackers | None = None,
        clients: int = 0,
        seed: int = 0,
        data: Dataset | None = None,
        base: Sequence[str | Path] = (),
    ) -> None:
        self._rules, self._seed = rules, seed
        self.clients = frozenset(attacking_clients(rules, clients, seed))
        """The clients that attack."""
        self._z = 0.0
        self._function: AttackFunction | None = None
        self._flipped: Any = None
        if rules is None:
            return
        if ":" in rules.kind:
            self._function = load_attribute(rules.kind, "fleet.attackers.kind", base)
            if not callable(self._function):
                got = type(self._function).__name__
                raise ConfigError(f"fleet.attackers.kind: {rules.kind!r} must be a function (got {got})")
        elif rules.kind == "label-flip":
            if data is None or data.labels is None:
                raise ConfigError("fleet.attackers.kind: 'label-flip' needs data with one class per example")
            self._flipped = data.outputs - 1 - data.labels
        elif rules.kind == "alie":
            self._z = _alie_z_of(rules, clients, len(self.clients))
        elif rules.kind not in KINDS:
            have = [*KINDS, "my_module:attack"]
            raise ConfigError(f"fleet.attackers.kind: {unknown('attack', rules.kind, have)}")

    def targets(self, client: int, honest: Any) -> Any:
        """Return the client's training targets: ``honest``, or other classes if the client flips labels."""
        return self._flipped if self._flipped is not None and client in self.clients else honest

    def replaces_update(self, client: int) -> bool:
        """Return True if the client sends something other than the result of its training."""
        return client in self.clients and self._flipped is None

    def colluders(self, client: int, trip: int) -> list[int]:
        """Return up to 7 other attackers on whose data an ``alie`` attacker also trains, drawn for each trip.

        The client trains on the data of each of these attackers separately, always from the version that it
        downloaded. The list is empty for other clients and other attacks.
        """
        if not self._z or client not in self.clients:
            return []
        others = sorted(self.clients - {client})
        count = min(MAX_COLLUDERS, len(others))
        drawn = stream(self._seed, "colluders", client, trip).choice(others, count, replace=False)
        return sorted(drawn.tolist())

    def try_own(self, size: int) -> None:
        """Test the user's attack function on a vector of ``size`` ones before the run starts.

        Raises `ConfigError` if the function fails, since every attack would then fail during the run.
        """
        if self._function is not None:
            try:
                self.change(np.ones(size, np.float32), np.zeros(size, np.float32), min(self.clients), 0)
            except TrainingError as error:
                raise ConfigError(str(error)) from error

    def change(
        self, trained: Floats, base: Floats, client: int, trip: int, others: Sequence[Floats] = ()
    ) -> None:
        """Change a trained model in place if the client attacks; ``base`` is the downloaded model.

        ``others`` are the updates that an ``alie`` attacker computed on the data of its `colluders`; each has
        the shape of the model. Raises `TrainingError` if the user's attack function fails.
        """
        rules = self._rules
        if rules is None or not self.replaces_update(client):
            return
        delta = trained - base
        rng = stream(self._seed, "attack", client, trip)
        if self._function is not None:
            try:
                returned: object = self._function(delta, client, trip, rng)
            except (Exception, SystemExit) as error:
                what = f"{rules.kind!r} raised {described(error)}"
                raise TrainingError(f"fleet.attackers.kind: {what}") from error
            if isinstance(returned, np.ndarray) and returned is not delta:
                must = "must change delta in place, but returned another array"
                raise TrainingError(f"fleet.attackers.kind: {rules.kind!r} {must}")
        elif rules.kind == "sign-flip":
            delta *= np.float32(-rules.scale)
        elif rules.kind == "alie":
            known = np.array([delta, *others], np.float64)
            delta[:] = known.mean(axis=0) - self._z * known.std(axis=0)
        else:
            deviation = rules.scale * float(np.linalg.norm(delta.astype(np.float64))) / np.sqrt(delta.size)
            delta[:] = rng.standard_normal(delta.size, dtype=np.float32) * np.float32(deviation)
        np.add(base, delta, out=trained)


def _alie_z_of(rules: Attackers, clients: int, attackers: int) -> float:
    """Return ``rules.z`` if it is set, otherwise the z that follows from the formula in the paper.

    Raises `ConfigError` if there are fewer than two attackers, or if the formula yields no z above 0.
    """
    key, fleet = "fleet.attackers", f"{attackers} attackers of {clients} clients"
    if attackers < 2:
        raise ConfigError(f"{key}.share: 'alie' needs 2 or more attackers, got {fleet}")
    if rules.z is not None:
        return rules.z
    if 2 * attackers >= clients or (found := alie_z(clients, attackers)) <= 0.0:
        raise ConfigError(f"{key}.z: its formula yields no z above 0 for {fleet}; set z")
    return found
