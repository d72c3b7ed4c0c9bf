"""The interface between a run and an algorithm: the inputs and outputs of a strategy.

A trip is a client's execution of one task: download of the model, training, upload of the update.
"""

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
    """Metadata of an update that the server holds. `Strategy.combine` can also read the update itself."""

    task: int
    client: int
    base_version: int
    staleness: int
    """Number of versions published between the client's download and the arrival of its update: τ = n − k."""
    examples: int
    steps: int
    loss: float
    """Mean training loss of the trip; NaN if it was not finite or not reported, and always with
    ``[privacy]``."""
    at_s: float
    norm: float = 0.0
    """L2 norm of the uploaded vector; 0 unless `Strategy.measures` is True."""
    distance: float = 0.0
    """‖w_n − w_k‖ on arrival: the L2 distance from the base version w_k to the current version w_n; 0 unless
    `Strategy.measures` is True."""


Vector = npt.NDArray[Any]


class Vectors(dict[str, Vector]):
    """Vectors that a client changes, keyed by their names. Assignment and `update` overwrite the existing
    vector in place.

    >>> own = np.zeros(2)
    >>> vectors = Vectors(c=own)
    >>> vectors["c"] = np.ones(2)
    >>> own.tolist()
    [1.0, 1.0]
    """

    def __setitem__(self, name: str, values: Any) -> None:
        self[name][:] = values

    def update(self, *given: Any, **values: Any) -> None:
        for name, each in dict(*given, **values).items():
            self[name] = each

    def __ior__(self, given: Any) -> Vectors:  # type: ignore[override,misc]
        self.update(given)
        return self

    def __reduce__(self) -> tuple[type[Vectors], tuple[dict[str, Vector]]]:
        """Make `copy` and `pickle` use the constructor, since an assignment requires an existing vector."""
        return type(self), (dict(self),)


class TripInputs(NamedTuple):
    """Inputs of a client's trip other than the module to train. In a run, vectors are float32[size]."""

    version: int
    start: Vector
    """w_k, the downloaded model."""
    vectors: Mapping[str, Vector] = {}
    """Vectors that are broadcast with the model, keyed by their names."""
    send: Vectors = Vectors()
    """For each broadcast vector, a vector of zeros that the client changes in place and uploads with its
    update."""
    kept: Vectors = Vectors()
    """The client's own vectors, which persist from trip to trip; the client changes them in place."""
    statistics: int = 0
    """Number of elements at the end of the model that are running statistics (of batch normalisation) or
    other float buffers of the module."""

    @classmethod
    def of(
        cls,
        version: int,
        start: Vector,
        vectors: Mapping[str, Vector],
        send: Mapping[str, Vector],
        kept: Mapping[str, Vector],
        statistics: int = 0,
    ) -> TripInputs:
        """Create the inputs with ``start`` and ``vectors`` read-only: they may be the server's own arrays."""
        common = {name: _read_only(vector) for name, vector in vectors.items()}
        return cls(version, _read_only(start), common, Vectors(send), Vectors(kept), statistics)


def _read_only(vector: Vector) -> Vector:
    view = vector.view()
    view.flags.writeable = False
    return view


class VectorSum(NamedTuple):
    """The next value of an auxiliary vector v: v ← base_scale · v + Σ_k weights[k] · u_k.

    u_k is the change of v that the k-th update contains, or the k-th model update if only the server keeps v.
    After the step of the server optimiser, model ← model + into_model · v.
    """

    weights: Sequence[float]
    """One weight for each update of the step."""
    base_scale: float = 1.0
    into_model: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LocalTerms:
    """Terms added to a client's SGD gradient: the proximal term μ (y − w_k) and the strategy's vectors.

    The user's own training function must add these terms itself.
    """

    prox_mu: float = 0.0
    """Weight μ of the proximal term."""
    control: tuple[str, str] | None = None
    """Names of a broadcast vector c and a client vector c_i; c − c_i is added to the gradient. After Q steps
    with learning rates η_q the client keeps c_i⁺ = c_i − c + (w_k − y)/Σ η_q and sends c_i⁺ − c_i (option II
    of SCAFFOLD)."""
    linear: str | None = None
    """Name of a client vector h_i that is subtracted from the gradient. At the end of the trip,
    h_i ← h_i − μ (y − w_k), as in FedDyn."""
    lr: Mapping[str, float] | Sequence[float] | None = None
    """Factors for ``training.lr``: keyed by device profile (1 if a profile is missing), or one per client."""

    def lr_factor(self, client: int, profile: str) -> float:
        """Return the factor by which ``training.lr`` is multiplied for a client with this device profile.

        >>> LocalTerms(lr={"moto-g4": 0.5}).lr_factor(3, "moto-g4"), LocalTerms().lr_factor(3, "pi-4")
        (0.5, 1.0)
        """
        if self.lr is None:
            return 1.0
        return self.lr.get(profile, 1.0) if isinstance(self.lr, Mapping) else self.lr[client]

    @property
    def vectors(self) -> bool:
        """True if vectors (``control`` or ``linear``) are part of the gradient."""
        return self.control is not None or self.linear is not None


NO_TERMS = LocalTerms()


class Step(NamedTuple):
    """The next version: base_scale · w + Σ_k weights[k] · updates[k], then the server optimiser.

    The memory of the step's updates is freed unless ``keep`` is True; all other updates stay held. An update
    may occur more than once, for example after sampling with replacement; its weights then add up.
    """

    updates: Sequence[Update]
    weights: Sequence[float]
    base_scale: float = 1.0
    keep: bool = False
    """Whether the server continues to hold the used updates, so that later steps can use them again."""
    parts: Mapping[str, VectorSum] = {}
    """Sums for auxiliary vectors, keyed by the vector's name. By default, changes of a broadcast vector are
    summed with the same weights as the updates of the model, and a vector that only the server keeps does not
    change."""
    release: Sequence[Update] = ()
    """Held updates to release after this step, which frees their memory."""


class Until(NamedTuple):
    """The end of a task: a time at which the client sends its unfinished model, or a number of steps."""

    at_s: float = math.inf
    """Time at which training stops, in emulated seconds. A client that is still downloading at that time
    finishes the download and sends the model untrained."""
    gain: float = 1.0
    """The client sends w_k + gain·(y − w_k), or gain·Δ, where w_k is the downloaded model, y is the client's
    model at the end of the task, and Δ = y − w_k."""
    per_step: bool = False
    """Whether ``gain`` is divided by the number of steps taken; after 0 steps, the gain has no effect."""
    steps: int | None = None
    """Number of local steps; None stands for the number that ``[training]`` sets."""


class Sampling(NamedTuple):
    """Scheme for drawing the clients of a step uniformly from the whole fleet."""

    rate: float
    """Probability that a client is drawn."""
    poisson: bool
    """True if each client is drawn independently; False if a fixed number is drawn without replacement."""


class Arrivals(NamedTuple):
    """An arrival process: clients request work at times that do not depend on the server.

    A request that the server does not serve immediately is lost.
    """

    kind: Literal["constant", "poisson"]
    """Gaps between arrivals: all equal (``constant``), or exponentially distributed (``poisson``)."""
    rate_per_s: float
    """Arrivals per emulated second."""


class Client(NamedTuple):
    """Properties of one client that are known before the run starts."""

    client: int
    profile: str
    examples: int
    steps: int = 1
    """Number of local steps per trip."""
    down_s: float = 0.0
    """Duration of the first download according to the device profile, in emulated seconds."""
    compute_s: float = 1.0
    """Total duration of all steps of the first trip, in emulated seconds."""
    up_s: float = 0.0
    """Duration of the first upload according to the device profile, in emulated seconds."""


class View(Protocol):
    """The state of the run as a strategy sees it: always current, read-only, and valid only during a call."""

    @property
    def version(self) -> int: ...
    @property
    def now_s(self) -> float: ...
    @property
    def devices(self) -> Sequence[Client]:
        """All clients of the fleet, connected or not; ``devices[i].client == i``."""

    @property
    def idle(self) -> Sequence[int]:
        """Connected clients that have no task and may start one, in ascending order."""

    @property
    def running(self) -> Collection[int]:
        """Clients with a task, in the order in which their tasks started; the operator ``in`` takes O(1)."""

    @property
    def training(self) -> int:
        """Number of clients with a task."""

    @property
    def openings(self) -> int:
        """Maximum number of clients that may start now; with `Arrivals`, the number of unserved arrivals."""

    @property
    def held(self) -> Sequence[Update]:
        """Updates that have arrived and are still held by the server, in order of arrival."""

    def trained_from(self, client: int) -> int:
        """Return the base version of the client's last task.

        It is −1 before the client's first task, and after a task that ended without an update.
        """

    @property
    def up_to_date(self) -> Collection[int]:
        """Clients for which `trained_from` returns the current version."""

    @property
    def rng(self) -> np.random.Generator:
        """The run's random generator for strategies, seeded with the experiment's seed."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Base class of strategies: hyperparameters are frozen fields; `begin` returns the mutable state.

    A strategy chooses the idle clients to start (`assign`), and the weights of the next step once that step
    is due (`step`). If an update in the step proves to be invalid, `step` is called again. Therefore, only
    `stepped` may record in the state that the step was applied.

    The constructor checks each field against its annotation and raises a `ConfigError` that names the field.
    It converts numpy scalars to Python values.
    """

    upload: ClassVar[Literal["delta", "model"]] = "delta"
    """Content of an update: the trained model y_Q, or its difference Δ = y_Q − w_k from the base version."""
    measures: ClassVar[bool] = False
    """Whether the server measures `Update.norm` and `Update.distance` of arriving updates. The server
    then keeps the base versions of running tasks: at most one more model per client."""

    reads: ClassVar[Literal["metadata", "updates"]] = "metadata"
    """With ``updates``, `combine` reads the parameters of a step's updates. ``[privacy]`` then requires
    that only the clients add noise, because the server's noise protects sums, not single updates."""
    reuses: ClassVar[bool] = False
    """Whether a step may use updates that an earlier step has used (`Step.keep`). ``[server.secure]`` refuses
    such strategies, because it permits each update in only one sum."""
    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of model-sized vectors that are broadcast with the model; each update contains changes to
    them."""
    server_vectors: ClassVar[tuple[str, ...]] = ()
    """Names of model-sized vectors that only the server keeps."""
    client_vectors: ClassVar[tuple[str, ...]] = ()
    """Names of model-sized vectors that each client keeps from trip to trip. All vectors start as zeros."""

    server_lr: Positive = 1.0
    """η_g: the server's learning rate, by which the weighted sum of updates is multiplied."""

    def __post_init__(self) -> None:
        try:
            hints = typing.get_type_hints(type(self), include_extras=True)
        except NameError:  # a class defined in a function may be annotated with that function's local types
            hints = {}
        for name in (item.name for item in fields(self) if item.name in hints):
            value = getattr(self, name)
            if isinstance(value, np.generic):
                value = value.item()
                object.__setattr__(self, name, value)
            for fault in faults(value, hints[name], f"strategy.{name}"):
                raise fault
        _check_attributes(self)

    def local_rule(self) -> LocalTerms:
        """Return the terms that clients add to the SGD described by the experiment's ``[training]`` table."""
        return NO_TERMS

    def train(self, model: Any, examples: Any, context: Any) -> None:
        """Train a client's model in place. A subclass may override this to replace the SGD of ``[training]``.

        ``model`` is the `torch.nn.Module`, which holds w_k at the start and must hold y at the end.
        ``examples`` is an `edgefl.learning.custom.ClientExamples`, and ``context`` is an
        `edgefl.learning.custom.Context`. The method runs in the clients' processes, so it cannot change the
        strategy's state (docs/clients.md).
        """
        raise NotImplementedError

    def begin_trip(self, model: Vector, given: TripInputs) -> None:
        """Change ``model``, which holds w_k, in place before the client starts to train it.

        This method and `end_trip` run in the clients' processes, so they cannot change the strategy's state.
        """

    def end_trip(self, model: Vector, given: TripInputs) -> None:
        """Change the trained model, and the vectors in ``send`` and ``kept``, in place before the upload."""

    def optimizer(self) -> ServerOptimizer:
        """Return the server optimiser, which is used in every step."""
        return ServerOptimizer(lr=self.server_lr)

    @property
    def remark(self) -> str:
        """A one-line warning about valid hyperparameters that do not fit together; "" if all fit."""
        return ""

    def check(self, clients: int) -> None:
        """Raise `ConfigError` if the hyperparameters do not suit a fleet of ``clients``."""

    def max_held(self, clients: int) -> int:
        """Return the maximum number of updates that are held when a step is due."""
        return clients

    def max_training(self, clients: int) -> int:
        """Return the maximum number of clients that have a task at the same time.

        This number determines the size of the parameter buffer and the load on the host.
        """
        return clients

    def slots(self, clients: int) -> int:
        """Return the number of update slots in the parameter buffer: one per running task and held update."""
        return self.max_training(clients) + self.max_held(clients)

    @property
    def lockstep(self) -> bool:
        """True if clients wait for each other, so that their trips start at the same times."""
        return False

    @property
    def starts_together(self) -> bool:
        """True if all clients of a round start together; the first tasks then start without a random wait."""
        return self.lockstep

    @property
    def closed(self) -> bool:
        """True if each call of `assign` returns a whole round, which no other client can join later.

        Updates can have pairwise masks only in such rounds (docs/secure.md).
        """
        return False

    def own_weight(self, examples: int, steps: int) -> float | None:
        """Return a client's weight in a step, up to a factor that is common to all updates of the step.

        Return None if the numbers of examples and local steps do not determine the weight before the trip.
        Pairwise masks need this weight, because each client must multiply its update by the weight itself.
        """
        return None

    @property
    def transfers_apart(self) -> bool:
        """True if transfers overlap training.

        A trip then consists of training only, and the strategy itself waits for transfers, which take
        `Client.down_s` and `Client.up_s`.
        """
        return False

    @property
    def needs_losses(self) -> str:
        """Name of a field that has no effect unless the server sees the clients' losses; "" if there is none.

        With ``[privacy]`` the server sees no losses.
        """
        return ""

    @property
    def uploads_on_demand(self) -> bool:
        """True if a client uploads its update only when the strategy selects the client; until then, each
        newer update of the client replaces the last one."""
        return False

    def max_weight(self, clients: int) -> float | None:
        """Return the maximum weight of one update in a step, for a fleet of ``clients``; None if unbounded.

        ``[privacy]`` needs this bound: together with the clipping norm, it limits an update's influence.
        """
        return None

    def sampling(self, clients: int) -> Sampling | None:
        """Return the sampling scheme if each step draws its clients anew and uniformly; otherwise None."""
        return None

    def arrivals(self) -> Arrivals | None:
        """Return the arrival process of the clients, or None if any idle client may start at any time."""
        return None

    def begin(self, devices: Sequence[Client]) -> Any:
        """Create the strategy's state for a new run."""
        return None

    def assign(self, state: Any, view: View) -> Sequence[int]:
        """Return the idle clients to start now, in the order in which to start them.

        This method is called after every event.
        """
        raise NotImplementedError

    def until(self, state: Any, client: int, view: View) -> Until | None:
        """Return the condition that ends the task which ``client`` is about to start.

        If this method returns None, the task ends after the number of steps that ``[training]`` sets.
        """
        return None

    def arrive(self, state: Any, update: Update, view: View) -> Sequence[Update]:
        """Record the arrival of ``update``, which is now held. Return the held updates to discard, if any."""
        return ()

    def lost(self, state: Any, client: int, view: View) -> None:
        """Record that a task ended without a valid update.

        The client left or failed, its task was cancelled, or it sent a bad update.
        """

    def cancel(self, state: Any, view: View) -> Sequence[int]:
        """Return the clients whose running tasks are to be cancelled. Called after every new version."""
        return ()

    def step(self, state: Any, view: View) -> Step | None:
        """Return the next step if it is due, otherwise None. Called after every event."""
        raise NotImplementedError

    def combine(self, rows: Rows, weights: Sequence[float]) -> Sequence[float] | Vector:
        """Combine the updates of a step, if `reads` is ``updates``; ``weights`` are the `Step`'s weights.

        Returns one weight per update, to be used instead of ``weights``, or a vector float32[D], to be used
        instead of the weighted sum. The result must depend only on the arguments, since a step may be
        repeated. All updates are finite.
        """
        return weights

    def stepped(self, state: Any, step: Step, view: View) -> None:
        """Record that ``step`` was applied; ``view.version`` is the new version."""

    def wake_s(self, state: Any, view: View) -> float | None:
        """Return the emulated time, in seconds, at which to call `step` and `assign` even without an event.

        Return None if there is no such time.
        """
        return None


def importance(by: Literal["examples", "uniform"], given: Sequence[Client | Update]) -> list[float]:
    """Return the share of each client or update in the total number of examples of all that are given.

    Each share is 1/n if ``by`` is ``uniform``, or if there are no examples. The shares of all clients are the
    weights p_i in the objective Σ p_i·f_i.

    >>> importance("examples", [Client(0, "pi-4", 30), Client(1, "pi-4", 90)])
    [0.25, 0.75]
    """
    total = sum(one.examples for one in given) if by == "examples" else 0
    if total == 0:
        return [1.0 / len(given) for _ in range(len(given))]
    return [one.examples / total for one in given]


def check_fits(field: str, number: int | None, clients: int) -> None:
    """Raise `ConfigError` if ``number``, the value of a strategy's field, exceeds the number of clients."""
    if number is not None and number > clients:
        raise ConfigError(f"strategy.{field} must be at most the fleet's {clients} clients, got {number}")


def _check_attributes(strategy: Strategy) -> None:
    """Raise `ConfigError` if attributes of the strategy are invalid or contradict its methods."""
    kind = type(strategy)
    for field, allowed in (("upload", ("delta", "model")), ("reads", ("metadata", "updates"))):
        if (value := getattr(strategy, field)) not in allowed:
            either = " or ".join(map(repr, allowed))
            raise ConfigError(f"{kind.__name__}.{field} must be {either}, got {value!r}")
    # ``reads`` may be a property that is "metadata" for some hyperparameters; `combine` is then not called.
    if kind.combine is not Strategy.combine and strategy.reads == kind.reads != "updates":
        raise ConfigError(
            f"{kind.__name__} defines combine, which needs reads = 'updates', got reads = {strategy.reads!r}"
        )
    for field in ("vectors", "server_vectors", "client_vectors"):
        names = getattr(strategy, field)
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{kind.__name__}.{field} must be a tuple of names, got {names!r}")
    names = (*strategy.vectors, *strategy.server_vectors, *strategy.client_vectors)
    if len(set(names)) < len(names):
        raise ConfigError(f"{kind.__name__}: names of vectors must be unique, got {', '.join(names)}")
