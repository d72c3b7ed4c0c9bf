"""The interface between a run and an algorithm: the inputs and outputs of a strategy."""

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
from edgefl.strategies.rows import Rows
from edgefl.validation import faults


class Update(NamedTuple):
    """Metadata of an update that the server holds. `Strategy.combine` can also read its parameters."""

    task: int
    client: int
    base_version: int
    staleness: int
    """Versions published between the client's download and the update's arrival: τ = n − k."""
    examples: int
    steps: int
    loss: float
    at_s: float
    norm: float = 0.0
    """L2 norm of the uploaded vector; 0 unless `Strategy.measures` is set."""
    distance: float = 0.0
    """‖w_n − w_k‖ at arrival: L2 distance from the base version w_k to the current version w_n; 0 unless
    `Strategy.measures` is set."""


Vector = npt.NDArray[Any]


class TripInputs(NamedTuple):
    """Inputs of a client's trip besides the module being trained. In a run all vectors are float32[size]."""

    version: int
    start: Vector
    """w_k, the downloaded model."""
    vectors: Mapping[str, Vector] = {}
    """Vectors broadcast with the model, by name."""
    send: Mapping[str, Vector] = {}
    """A vector of zeros for each broadcast vector; the client changes it in place and uploads it with its
    update."""
    kept: Mapping[str, Vector] = {}
    """The client's own vectors, which persist from trip to trip; the client changes them in place."""


class VectorSum(NamedTuple):
    """The next value of an auxiliary vector v: v ← base_scale · v + Σ_k weights[k] · u_k.

    u_k is the change of v that the k-th update contains, or the k-th model update if only the server keeps v.
    After the server optimiser, model ← model + into_model · v.
    """

    weights: Sequence[float]
    """One weight per update of the step."""
    base_scale: float = 1.0
    into_model: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LocalTerms:
    """Terms added to a client's SGD gradient: the proximal term μ (y − w_k) and the strategy's vectors.

    A user's training function must apply them itself.
    """

    prox_mu: float = 0.0
    """μ of the proximal term."""
    control: tuple[str, str] | None = None
    """Names of a broadcast vector c and a client vector c_i: c − c_i is added to the gradient. After Q steps
    with learning rates η_q the client keeps c_i⁺ = c_i − c + (w_k − y)/Σ η_q and sends c_i⁺ − c_i (SCAFFOLD's
    option II)."""
    linear: str | None = None
    """Name of a client vector h_i that is subtracted from the gradient. At the end of the trip,
    h_i ← h_i − μ (y − w_k) (FedDyn)."""
    lr: Mapping[str, float] | Sequence[float] | None = None
    """Factors on ``training.lr``: by device profile (default 1), or one per client."""

    def lr_factor(self, client: int, profile: str) -> float:
        """Return the factor on ``training.lr`` for a client with this device profile.

        >>> LocalTerms(lr={"moto-g4": 0.5}).lr_factor(3, "moto-g4"), LocalTerms().lr_factor(3, "pi-4")
        (0.5, 1.0)
        """
        if self.lr is None:
            return 1.0
        return self.lr.get(profile, 1.0) if isinstance(self.lr, Mapping) else self.lr[client]

    @property
    def vectors(self) -> bool:
        """True if a trip uses vectors besides the model."""
        return self.control is not None or self.linear is not None


NO_TERMS = LocalTerms()


class Step(NamedTuple):
    """The next version: base_scale · w + Σ_k weights[k] · updates[k], then the server optimiser.

    The step's updates are released unless ``keep`` is set; all others stay held. An update may occur more
    than once (sampling with replacement): its weights add up.
    """

    updates: Sequence[Update]
    weights: Sequence[float]
    base_scale: float = 1.0
    keep: bool = False
    """Continue to hold the used updates, so that later steps can use them again."""
    parts: Mapping[str, VectorSum] = {}
    """Sums for auxiliary vectors, by name. By default a broadcast vector is summed with the model's weights,
    and a vector that only the server keeps does not change."""
    release: Sequence[Update] = ()
    """Held updates to release after this step."""


class Until(NamedTuple):
    """End of a task: a given time, at which the client sends its unfinished model, or a number of steps."""

    at_s: float = math.inf
    """Emulated time of the run, s. A client that is downloading at that time sends the downloaded model."""
    gain: float = 1.0
    """The client sends w_k + gain·(y − w_k), or gain·Δ, where y is its model at the end of the task."""
    per_step: bool = False
    """Divide ``gain`` by the number of steps made; after 0 steps the gain has no effect."""
    steps: int | None = None
    """Number of local steps; None: that of ``[training]``."""


class Sampling(NamedTuple):
    """A uniform draw of a step's clients from the whole fleet."""

    rate: float
    """Probability that a client is drawn."""
    poisson: bool
    """True: clients are drawn independently. False: a fixed number is drawn without replacement."""


class Arrivals(NamedTuple):
    """An arrival process: clients request work by themselves. A request not served at once is lost."""

    kind: Literal["constant", "poisson"]
    """``constant``: equal gaps between arrivals; ``poisson``: exponentially distributed gaps."""
    rate_per_s: float
    """Arrivals per emulated second."""


class Client(NamedTuple):
    """Properties of one client, known before the run starts."""

    client: int
    profile: str
    examples: int
    steps: int = 1
    """Local steps per trip."""
    down_s: float = 0.0
    """Duration of the first download according to the profile, emulated seconds."""
    compute_s: float = 1.0
    """Total duration of the first trip's steps, emulated seconds."""
    up_s: float = 0.0
    """Duration of the first upload according to the profile, emulated seconds."""


class View(Protocol):
    """The run's state as a strategy sees it: live and read-only, and valid only during the call."""

    @property
    def version(self) -> int: ...
    @property
    def now_s(self) -> float: ...
    @property
    def devices(self) -> Sequence[Client]:
        """Every client of the fleet, connected or not; ``devices[i].client == i``."""

    @property
    def idle(self) -> Sequence[int]:
        """Connected clients without a task that are eligible for one, ascending."""

    @property
    def running(self) -> Collection[int]:
        """Clients with a task, in order of their starts; ``in`` is O(1)."""

    @property
    def training(self) -> int:
        """Number of clients with a task."""

    @property
    def openings(self) -> int:
        """Maximum number of clients to start now; with `Arrivals`, the number of arrivals not yet served."""

    @property
    def held(self) -> Sequence[Update]:
        """Arrived updates not yet used or discarded, in arrival order."""

    def trained_from(self, client: int) -> int:
        """Base version of the client's last task; −1 before its first task and after a task without an
        update."""

    @property
    def up_to_date(self) -> Collection[int]:
        """Clients whose `trained_from` is the current version."""

    @property
    def rng(self) -> np.random.Generator:
        """The run's random stream for strategies, seeded by the experiment's seed."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Base class of strategies: hyperparameters are frozen fields; `begin` returns the mutable state.

    A strategy chooses the idle clients to start (`assign`) and the weights of the next step once it is due
    (`step`). If an update of the step proves to be invalid, `step` is called again, so only `stepped` may
    record in the state that the step was applied.

    The constructor checks each field against its annotation and raises a `ConfigError` that names the field.
    """

    upload: ClassVar[Literal["delta", "model"]] = "delta"
    """Content of an update: Δ = y_Q − w_k, or the model y_Q."""
    measures: ClassVar[bool] = False
    """Measure `Update.norm` and `Update.distance` of arriving updates. The server then stores the base
    versions of running tasks: at most one more model per client."""

    reads: ClassVar[Literal["metadata", "updates"]] = "metadata"
    """``updates``: `combine` reads the parameters of a step's updates. ``[privacy]`` is then refused unless
    only clients add noise, because the server's noise protects sums, not single updates."""
    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of model-sized vectors that are broadcast with the model; each update contains their changes."""
    server_vectors: ClassVar[tuple[str, ...]] = ()
    """Names of model-sized vectors that only the server keeps."""
    client_vectors: ClassVar[tuple[str, ...]] = ()
    """Names of model-sized vectors that each client keeps from trip to trip. All vectors start as zeros."""

    server_lr: Positive = 1.0
    """η_g: the server's learning rate, a factor on the weighted sum of updates."""

    def __post_init__(self) -> None:
        _check_vectors(type(self))
        try:
            hints = typing.get_type_hints(type(self), include_extras=True)
        except NameError:  # a class defined in a function may have annotations with that function's types
            return
        for name in (item.name for item in fields(self)):
            for fault in faults(getattr(self, name), hints[name], f"strategy.{name}"):
                raise fault

    def local_rule(self) -> LocalTerms:
        """Return the terms of a client's SGD in addition to the experiment's ``[training]``."""
        return NO_TERMS

    def train(self, model: Any, examples: Any, context: Any) -> None:
        """Train a client's model in place. A subclass may override this to replace ``[training]``'s SGD.

        ``model`` is the `torch.nn.Module`; it holds w_k at the start and must hold y at the end. ``examples``
        is an `edgefl.learning.custom.ClientExamples`, ``context`` an `edgefl.learning.custom.Context`. The
        method runs in the clients' processes, so it cannot change the strategy's state (docs/clients.md).
        """
        raise NotImplementedError

    def begin_trip(self, model: Vector, given: TripInputs) -> None:
        """Change ``model``, which holds w_k, in place before the client's training starts from it.

        This and `end_trip` run in the clients' processes, so they cannot change the strategy's state.
        """

    def end_trip(self, model: Vector, given: TripInputs) -> None:
        """Change the trained model in place before its upload, and the vectors in ``send`` and ``kept``."""

    def optimizer(self) -> ServerOptimizer:
        """Return the server optimiser, used in every step."""
        return ServerOptimizer(lr=self.server_lr)

    @property
    def remark(self) -> str:
        """A one-line warning about valid but ill-matched hyperparameters; "" if there is none."""
        return ""

    def check(self, clients: int) -> None:
        """Raise `ConfigError` if the hyperparameters do not suit a fleet of ``clients``."""

    def max_held(self, clients: int) -> int:
        """Return the maximum number of held updates when a step is due."""
        return clients

    def max_training(self, clients: int) -> int:
        """Return the maximum number of clients with a task at once.

        This number determines the size of the parameter buffer and the load of the host.
        """
        return clients

    def slots(self, clients: int) -> int:
        """Return the number of update slots for a run: one per running task and one per held update."""
        return self.max_training(clients) + self.max_held(clients)

    @property
    def lockstep(self) -> bool:
        """True if clients wait for each other, so that their trips start at the same times."""
        return False

    @property
    def starts_together(self) -> bool:
        """True if all clients of a round start at once: then they have no random phase at the run's start."""
        return self.lockstep

    @property
    def closed(self) -> bool:
        """True if the clients that one call of `assign` returns form a round that no other client can join.
        Only then can updates have pairwise masks (docs/secure.md)."""
        return False

    def own_weight(self, examples: int, steps: int) -> float | None:
        """Return a client's weight in a step, up to a factor that all updates of the step share.

        Return None if the numbers of examples and local steps do not determine the weight before the trip.
        Pairwise masks need this weight, because with them each client weights its own update.
        """
        return None

    @property
    def transfers_apart(self) -> bool:
        """True if transfers overlap training. A trip is then training only, and the strategy itself waits
        `Client.down_s` and `Client.up_s` for transfers."""
        return False

    def max_weight(self, clients: int) -> float | None:
        """Return the maximum weight of one update in a step, for a fleet of ``clients``; None if unbounded.

        ``[privacy]`` needs this bound: with the clipping norm it limits the influence of one update.
        """
        return None

    def sampling(self, clients: int) -> Sampling | None:
        """Return the `Sampling` of clients if each step draws them anew and uniformly; else None."""
        return None

    def arrivals(self) -> Arrivals | None:
        """Return the arrival process of the clients; None: any idle client may start at any time."""
        return None

    def begin(self, devices: Sequence[Client]) -> Any:
        """Create the strategy's state for a new run."""
        return None

    def assign(self, state: Any, view: View) -> Sequence[int]:
        """Return the idle clients to start now, in order. Called after every event."""
        raise NotImplementedError

    def until(self, state: Any, client: int, view: View) -> Until | None:
        """Return the end of the task that ``client`` will start; None: after the steps of ``[training]``."""
        return None

    def arrive(self, state: Any, update: Update, view: View) -> Sequence[Update]:
        """Record the arrival of ``update``, which is now held. Returns held updates to discard, if any."""
        return ()

    def lost(self, state: Any, client: int, view: View) -> None:
        """Record that a task gave no update: the client left, failed, was cancelled or sent a bad update."""

    def cancel(self, state: Any, view: View) -> Sequence[int]:
        """Return the clients whose running task should be cancelled. Called after every new version."""
        return ()

    def step(self, state: Any, view: View) -> Step | None:
        """Return the next step if it is due, else None. Called after every event."""
        raise NotImplementedError

    def combine(self, rows: Rows, weights: Sequence[float]) -> Sequence[float] | Vector:
        """Combine a step's updates, if `reads` is ``updates``; ``weights`` are those of the `Step`.

        Returns one weight per update, to be used instead of ``weights``, or a vector float32[D], to be used
        instead of the weighted sum. The result must depend only on the arguments, since a step may be
        repeated. All updates are finite.
        """
        return weights

    def stepped(self, state: Any, step: Step, view: View) -> None:
        """Record that ``step`` was applied; ``view.version`` is the new version."""

    def wake_s(self, state: Any, view: View) -> float | None:
        """Return the emulated time at which to call `step` and `assign` even if no event happens."""
        return None


def importance(by: Literal["examples", "uniform"], devices: Sequence[Client]) -> list[float]:
    """Return p_i of the objective Σ p_i·f_i: each client's share of the fleet's examples, or 1/n.

    >>> importance("examples", [Client(0, "pi-4", 30), Client(1, "pi-4", 90)])
    [0.25, 0.75]
    """
    total = sum(device.examples for device in devices)
    if by == "uniform" or total == 0:
        return [1.0 / len(devices)] * len(devices)
    return [device.examples / total for device in devices]


def check_fits(field: str, number: int | None, clients: int) -> None:
    """Raise `ConfigError` if ``number``, the value of ``strategy.FIELD``, exceeds the fleet's ``clients``."""
    if number is not None and number > clients:
        raise ConfigError(f"strategy.{field} must be at most the fleet's {clients} clients, got {number}")


def _check_vectors(kind: type[Strategy]) -> None:
    for field in ("vectors", "server_vectors", "client_vectors"):
        names = getattr(kind, field)
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{kind.__name__}.{field} must be a tuple of names, got {names!r}")
    names = (*kind.vectors, *kind.server_vectors, *kind.client_vectors)
    if len(set(names)) < len(names):
        raise ConfigError(f"{kind.__name__}: names of vectors must be unique, got {', '.join(names)}")
