"""The seam between the run and an algorithm: what a strategy sees and what it answers."""

from __future__ import annotations

import math
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgefl.errors import ConfigError
from edgefl.experiment import Positive
from edgefl.kernels.steps import ServerOptimizer
from edgefl.validation import faults


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
    norm: float = 0.0
    """‖u‖ of what the client sent, where the strategy `Strategy.measures` it."""
    distance: float = 0.0
    """‖w_n − w_k‖ from the version that it trained from to the current one, measured when it arrived."""


Vector = npt.NDArray[Any]


class Given(NamedTuple):
    """The start of a trip, besides the model that is trained."""

    version: int
    start: Vector
    """w_k, in a run float32 of shape (size,), as are all others."""
    vectors: Mapping[str, Vector] = {}
    """The vectors that were broadcast beside it."""
    send: Mapping[str, Vector] = {}
    """For each of them, zeros: what the client writes there is sent beside its update."""
    kept: Mapping[str, Vector] = {}
    """The client's own vectors, to be changed in place."""


class VectorSum(NamedTuple):
    """A step of a vector v beside the model: v ← base_scale · v + Σ weights[k] · (its block of updates[k]).

    A vector that only the server keeps is summed of the updates of the model. Then model ← model +
    into_model · v, behind the server optimiser.
    """

    weights: Sequence[float]
    """One for each update of the step."""
    base_scale: float = 1.0
    into_model: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LocalTerms:
    """Terms that a client's SGD adds to its gradient g(y): μ (y − w_k), and vectors that it keeps.

    All are of the strategy's own names. Where training is a function, they are for it to heed.
    """

    prox_mu: float = 0.0
    """μ of the proximal term."""
    control: tuple[str, str] | None = None
    """An exchanged vector c and a client's own c_i: the gradient gains c − c_i. After Q steps of rates η_q,
    c_i⁺ = c_i − c + (w_k − y)/Σ η_q is kept, and c_i⁺ − c_i sent (SCAFFOLD's option II)."""
    linear: str | None = None
    """A client's own vector h_i: the gradient loses h_i, and h_i ← h_i − μ (y − w_k) at the end (FedDyn)."""
    lr: Mapping[str, float] | Sequence[float] | None = None
    """Factors of ``training.lr``: by device profile (1 for one that is not named), or one for each client."""

    def lr_factor(self, client: int, profile: str) -> float:
        """The factor of ``training.lr`` for a client on such a device.

        >>> LocalTerms(lr={"moto-g4": 0.5}).lr_factor(3, "moto-g4"), LocalTerms().lr_factor(3, "pi-4")
        (0.5, 1.0)
        """
        if self.lr is None:
            return 1.0
        return self.lr.get(profile, 1.0) if isinstance(self.lr, Mapping) else self.lr[client]

    @property
    def vectors(self) -> bool:
        """True if a trip reads or writes vectors besides the model."""
        return self.control is not None or self.linear is not None


NO_TERMS = LocalTerms()


class Step(NamedTuple):
    """Make the next version: base_scale · w + Σ weights[k] · updates[k], through the server optimiser.

    The updates named here are released (unless ``keep``); all others stay held. An update may be named
    more than once (sampling with replacement): its weights add up.
    """

    updates: Sequence[Update]
    weights: Sequence[float]
    base_scale: float = 1.0
    keep: bool = False
    """Keep the used updates held (a send buffer that may be sampled again)."""
    parts: Mapping[str, VectorSum] = {}
    """By name, steps of vectors. An exchanged one without any is summed with the model's own weights, one
    that only the server keeps stays as it is."""
    release: Sequence[Update] = ()
    """Held updates that are not needed any more once the version is made."""


class Until(NamedTuple):
    """A task that ends at an instant, wherever its training is: the client then sends what it has."""

    at_s: float = math.inf
    """Emulated time of the run. A client whose download takes longer sends the model that it downloaded."""
    gain: float = 1.0
    """The client sends w_k + gain·(y − w_k), or gain·Δ, with y its model at that instant."""
    per_step: bool = False
    """``gain`` is divided by the number of steps made (and is of no account if there were none)."""
    steps: int | None = None
    """The steps of the training, in place of those that ``[training]`` asks for."""


class Sampling(NamedTuple):
    """A uniform draw of the clients of a step, from all."""

    rate: float
    """The chance of each client."""
    poisson: bool
    """Each client is drawn or not by itself; else so many are, without replacement."""


class Arrivals(NamedTuple):
    """Clients come and ask for work by themselves; one that is not started when it comes goes away again."""

    kind: Literal["constant", "poisson"]
    """At equal distances, or with gaps drawn from an exponential distribution."""
    rate_per_s: float
    """Clients an emulated second."""


class Client(NamedTuple):
    """Facts of one client that a strategy may know from the start."""

    client: int
    profile: str
    examples: int
    steps: int = 1
    """Local steps of a trip."""
    down_s: float = 0.0
    """Emulated seconds that its first download takes, as its profile declares them."""
    compute_s: float = 1.0
    """Emulated seconds that the steps of its first trip take in all."""
    up_s: float = 0.0
    """Emulated seconds that its first upload takes, as its profile declares them."""


class View(Protocol):
    """The state of the run as a strategy sees it: live, read only, valid during the call."""

    @property
    def version(self) -> int: ...
    @property
    def now_s(self) -> float: ...
    @property
    def devices(self) -> Sequence[Client]:
        """Every client of the fleet, connected or not; ``devices[i].client == i``."""

    @property
    def idle(self) -> Sequence[int]:
        """Connected clients without a task that may be given one, ascending."""

    @property
    def running(self) -> Collection[int]:
        """Clients with a task, in the order in which they were started; ``in`` is fast."""

    @property
    def training(self) -> int:
        """The number of clients that have a task."""

    @property
    def openings(self) -> int:
        """The most clients that may be started now: as many as have come, where there are `Arrivals`."""

    @property
    def held(self) -> Sequence[Update]:
        """Arrived updates not yet used or discarded, in arrival order."""

    def trained_from(self, client: int) -> int:
        """The version of the client's last task; −1 before its first and after one that gave no update."""

    @property
    def up_to_date(self) -> Collection[int]:
        """Clients whose last task is from the current version: those of whom `trained_from` says so."""

    @property
    def rng(self) -> np.random.Generator:
        """The run's seeded stream for strategies."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Base of all strategies: hyperparameters are frozen fields, everything that changes is in a state.

    It decides which idle clients start (`assign`), when the model steps and with which weights (`step`), and
    what an arrival changes in its own state (`arrive`). `step` may be asked again before its answer is
    carried out, so it leaves the state's books to `arrive`, `lost` and `stepped`.

    Each field is checked against its annotation when the strategy is made: `ConfigError` names it.
    """

    upload: ClassVar[Literal["delta", "model"]] = "delta"
    """Content of an update: Δ = y_Q − w_k, or the model y_Q."""
    measures: ClassVar[bool] = False
    """Arriving updates are measured: `Update.norm` and `Update.distance`. The versions that running tasks
    started from are kept for that, one more model a client at most."""

    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of vectors like the model that are broadcast with it; an update brings a change of each."""
    server_vectors: ClassVar[tuple[str, ...]] = ()
    """Names of vectors like the model that only the server keeps."""
    client_vectors: ClassVar[tuple[str, ...]] = ()
    """Names of vectors like the model that each client keeps from trip to trip. All begin as zeros."""

    server_lr: Positive = 1.0
    """η_g: the step of the server, times what the weighted updates give."""

    def __post_init__(self) -> None:
        _check_vectors(type(self))
        try:
            hints = typing.get_type_hints(type(self), include_extras=True)
        except NameError:  # a class made inside a function whose annotations name that function's locals
            return
        for name in (item.name for item in fields(self)):
            for fault in faults(getattr(self, name), hints[name], f"strategy.{name}"):
                raise fault

    def local_rule(self) -> LocalTerms:
        """The terms of a client's SGD besides the experiment's ``[training]``."""
        return NO_TERMS

    def train(self, model: Any, examples: Any, context: Any) -> None:
        """A client's training, in place of SGD by ``[training]`` where a subclass has it (docs/clients.md).

        ``model`` is the `torch.nn.Module` that holds w_k and is left as y, ``examples`` are
        `edgefl.learning.custom.ClientExamples` and ``context`` is an `edgefl.learning.custom.Context`. It
        runs in the clients' processes, so it can change nothing of the strategy.
        """
        raise NotImplementedError

    def begin_trip(self, model: Vector, given: Given) -> None:
        """Changes, in place, the model that a client's training starts from; w_k if it does nothing.

        This and `end_trip` run in the clients' processes, so they can change nothing of the strategy.
        """

    def end_trip(self, model: Vector, given: Given) -> None:
        """Changes, in place, the trained model that is sent (less w_k), and what goes or stays beside it."""

    def optimizer(self) -> ServerOptimizer:
        """The server optimiser that every step goes through."""
        return ServerOptimizer(lr=self.server_lr)

    @property
    def remark(self) -> str:
        """One line for the user about hyperparameters that work and do not fit each other; empty: none."""
        return ""

    def check(self, clients: int) -> None:
        """Raise `ConfigError` if these hyperparameters cannot work with so many clients."""

    def max_held(self, clients: int) -> int:
        """The most updates held when a step is due."""
        return clients

    def max_training(self, clients: int) -> int:
        """The most clients with a task at once: sizes the parameter buffer and the load on the host."""
        return clients

    def slots(self, clients: int) -> int:
        """Update slots that a run needs: one for each running task and for each held update."""
        return self.max_training(clients) + self.max_held(clients)

    @property
    def lockstep(self) -> bool:
        """True if clients wait for each other, so that their trips start at the same instants."""
        return False

    @property
    def starts_together(self) -> bool:
        """True if the strategy starts all of a round's clients at once, so that they have no phase."""
        return self.lockstep

    @property
    def transfers_apart(self) -> bool:
        """True if clients train while their links work: a trip is its training alone, and the strategy
        itself waits for transfers, as long as `Client.down_s` and `Client.up_s` say."""
        return False

    def max_weight(self, clients: int) -> float | None:
        """The most that one update weighs in a step, for a fleet of so many clients; None: that has no bound.

        ``[privacy]`` needs it: with the clipping norm it bounds what one update changes.
        """
        return None

    def sampling(self, clients: int) -> Sampling | None:
        """The draw of each step's clients, uniform and from all, for that step alone; None: it is another."""
        return None

    def arrivals(self) -> Arrivals | None:
        """The process by which clients come and may be started; None: any idle client, at any time."""
        return None

    def begin(self, devices: Sequence[Client]) -> Any:
        """The strategy's own state at the start of a run."""
        return None

    def assign(self, state: Any, view: View) -> Sequence[int]:
        """Idle clients to start now, in this order. Asked after every event."""
        raise NotImplementedError

    def until(self, state: Any, client: int, view: View) -> Until | None:
        """The end of the task that ``client`` is about to be given; None: as ``[training]`` has it."""
        return None

    def arrive(self, state: Any, update: Update, view: View) -> Sequence[Update]:
        """An update arrived and is held. Returns held updates to discard (this one may be among them)."""
        return ()

    def lost(self, state: Any, client: int, view: View) -> None:
        """A task of the client gave no update: it left, failed, was cancelled, or its update was bad."""

    def cancel(self, state: Any, view: View) -> Sequence[int]:
        """Clients whose running task is no longer wanted. Asked after every new version."""
        return ()

    def step(self, state: Any, view: View) -> Step | None:
        """The next step if it is due. Asked after every event."""
        raise NotImplementedError

    def stepped(self, state: Any, step: Step, view: View) -> None:
        """The step was made; ``view.version`` is the new version."""

    def wake_s(self, state: Any, view: View) -> float | None:
        """Emulated time at which `step` and `assign` must be asked again even if nothing happens."""
        return None


def _check_vectors(kind: type[Strategy]) -> None:
    for field in ("vectors", "server_vectors", "client_vectors"):
        names = getattr(kind, field)
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{kind.__name__}.{field} must be a tuple of names, got {names!r}")
    names = (*kind.vectors, *kind.server_vectors, *kind.client_vectors)
    if len(set(names)) < len(names):
        raise ConfigError(f"{kind.__name__}: names of vectors must be different, got {', '.join(names)}")
