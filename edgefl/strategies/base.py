"""The seam between the run and an algorithm: what a strategy sees and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np


class Update(NamedTuple):
    """A finished update that the server holds. Its numbers stay in its slot; a strategy never sees them."""

    task: int
    client: int
    base_version: int
    staleness: int
    """Versions published between download and arrival in the buffer: τ = n − k."""
    examples: int
    steps: int
    loss: float
    at_s: float


class Step(NamedTuple):
    """Make the next version: base_scale · w + Σ weights[k] · updates[k], through the server optimiser.
    The updates named here, and those in ``discard``, are released; all others stay held."""

    updates: Sequence[Update]
    weights: Sequence[float]
    base_scale: float = 1.0
    keep: bool = False
    """Keep the used updates held (a send buffer that may be sampled again)."""


class Device(NamedTuple):
    """What a strategy may know of one client from the start."""

    client: int
    profile: str
    examples: int


class View(Protocol):
    """What a strategy may look at; read only, valid during the call."""

    @property
    def version(self) -> int: ...
    @property
    def now_s(self) -> float: ...
    @property
    def devices(self) -> Sequence[Device]: ...
    @property
    def idle(self) -> Sequence[int]:
        """Connected clients without a task, ascending."""
    @property
    def training(self) -> int:
        """How many clients have a task."""
    @property
    def held(self) -> Sequence[Update]:
        """Arrived updates not yet used or discarded, in arrival order."""
    def trained_from(self, client: int) -> int:
        """The version of the client's last task, −1 before its first."""
    @property
    def rng(self) -> np.random.Generator:
        """The run's seeded stream for strategies."""


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """How the weighted sum becomes a step: w ← w + lr · v with v ← momentum · v + Σ weights·Δ."""

    lr: float = 1.0
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Base of all strategies: hyperparameters are frozen fields, everything that changes is in a state.

    A strategy decides three things: which idle clients start (`assign`), when the model steps and with
    which weights (`step`), and what an arrival changes in its own state (`arrive`).
    """

    upload: ClassVar[Literal["delta", "model"]] = "delta"
    """What a client sends: Δ = y_Q − w_k, or its model y_Q."""

    server_lr: float = 1.0

    @property
    def prox_mu(self) -> float:
        """μ of the proximal term that clients add to their gradient."""
        return 0.0

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(lr=self.server_lr)

    def check(self, clients: int) -> None:
        """Raise `ConfigError` if these hyperparameters cannot work with so many clients."""

    def max_held(self, clients: int) -> int:
        """The most updates that can be held at once: sizes the parameter buffer."""
        return clients

    def begin(self, devices: Sequence[Device]) -> Any:
        """The strategy's own state at the start of a run."""
        return None

    def assign(self, state: Any, view: View) -> Sequence[int]:
        """Idle clients to start now, in this order. Asked after every event."""
        raise NotImplementedError

    def arrive(self, state: Any, update: Update, view: View) -> Sequence[Update]:
        """An update arrived and is held. Returns held updates to discard (this one may be among them)."""
        return ()

    def cancel(self, state: Any, view: View) -> Sequence[int]:
        """Clients whose running task is no longer wanted. Asked after every new version."""
        return ()

    def step(self, state: Any, view: View) -> Step | None:
        """The next step if it is due. Asked after every arrival, tick and new version."""
        raise NotImplementedError

    def stepped(self, state: Any, step: Step, view: View) -> None:
        """The step was made; ``view.version`` is the new version."""

    def wake_s(self, state: Any, view: View) -> float | None:
        """Emulated time at which `step` must be asked again even if nothing arrives."""
        return None


__all__ = ["Device", "ServerOptimizer", "Step", "Strategy", "Update", "View", "field"]
