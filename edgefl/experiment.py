"""One experiment as the user gives it: plain frozen data.

The TOML's tables are these classes, field for field, with each default and the bounds of each value.
`edgefl.config` reads and checks files, and relates keys to each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_CLIENTS = 10_000_000
MOST_PROCESSES = 100_000
"""Clients under the wall clock, a process each."""
MIN_FLOAT32, MAX_FLOAT32 = 1.2e-38, 3e38
MAX_CLIP_NORM = 1e12
"""Noise in proportion to it stays far from float32's largest number."""

Positive = Annotated[float, Meta(gt=0)]
"""A number above 0."""
NonNegative = Annotated[float, Meta(ge=0)]
"""A number, at least 0."""
Decay = Annotated[float, Meta(ge=0, lt=1)]
"""A number from 0 up to, but not, 1: a momentum, a decay or a chance that is never certain."""
Share = Annotated[float, Meta(gt=0, le=1)]
"""A number above 0, at most 1."""
Count = Annotated[int, Meta(ge=1, le=10**9)]
"""A whole number, at least 1."""
Clients = Annotated[int, Meta(ge=1, le=MAX_CLIENTS)]


class Churn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Clients that come and go at random, and die."""

    mean_online_s: Positive | None = None
    """Mean of the exponential time, emulated seconds, until a client goes; None: it does not by itself."""
    mean_offline_s: Positive | None = None
    """The same for the time until it is back."""
    die_per_trip: Decay = 0.0
    """Probability that the client's process is killed on a trip, at an instant of it drawn uniformly."""


class Cells(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links that many clients share: client c is in cell c mod ``count``."""

    count: Count = 1
    """Cells, client c in cell c mod ``count``."""
    uplink_mbps: Positive | None = None
    """Limit on the uploads of all clients of a cell, 10⁶ bit/s with headers; None: only their own."""
    downlink_mbps: Positive | None = None
    """The same for downloads."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices of the clients, their networks, and the rules for clients that leave or die."""

    devices: Annotated[
        Annotated[dict[str, Clients], Meta(min_length=1)] | str,
        Meta(description="a table { PROFILE = COUNT } or the name of a fleet file"),
    ]
    """Profile name to count, or the name (or path) of a fleet file."""
    network: str | dict[str, str] = "wifi"
    """One network profile for all, or device profile name to network profile name."""
    runtime: str | None = None
    """The library that the devices compute in, ``torch``, ``mnn`` or ``dl4j``, where their profiles have it;
    None: each profile's default, the one that was measured."""
    on_death: Literal["replace", "drop"] = "replace"
    """A dead client's device comes back as a new process (``replace``) or never (``drop``)."""
    rejoin_s: NonNegative = 0.0
    """Emulated seconds until a replaced device is back."""
    units: Literal["individual", "identical"] = "individual"
    """Each phone has a speed of its own, spread as measured units of one model are, or exactly its profile's
    (docs/individuals.md). Profiles of papers are always exact."""
    variation: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Scatter of a phone's trips, of compute times and of rates of mobile networks, times what was measured;
    0: none."""
    phase: Literal["random", "aligned"] = "random"
    """Phones are anywhere in their trips when the run starts, or all at the beginning of one."""
    join_spread_s: NonNegative = 0.0
    """Devices come online at instants drawn from U(0, this many emulated seconds); 0: all at the start, in
    the phase that ``phase`` gives."""
    thermal: bool = False
    """Devices whose profiles give their thermal model in full get hot, and slower, as they train."""
    battery: bool = False
    """Devices with a ``[battery]`` drain it, and leave when it is at ``min_soc`` until it is charged."""
    charge: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Charge of batteries at the start, from 0 to 1."""
    availability: str | None = None
    """A JSON file of when devices are available (docs/dynamics.md), instead of what their profiles say."""
    churn: Churn = Churn()
    on_leave: Literal["lose", "finish"] = "lose"
    """A client that goes offline in the middle of a trip loses the task, or finishes it first."""
    cells: Cells | None = None
    """Clients share the links of cells; None: each has its network for itself."""
    memory: Literal["auto", "cgroup", "rlimit", "off"] = "auto"
    """Enforcement of ``memory.app_limit_mib`` under the wall clock: ``rlimit`` with a watch (``auto``), a
    control group, past whose limit the kernel kills, or nothing (``off``)."""
    throttle: Literal["paced", "cgroup", "sigstop"] = "paced"
    """Slows training to the device's pace under the wall clock: waiting after each step (``paced``), or
    a limit on the process's CPU time that the training knows nothing of."""


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The examples and their split among clients."""

    name: str = "digits"
    """A built-in data set (docs/models.md), ``"arrays"`` for a file of arrays, or ``"my_module:load"``."""
    path: str | None = None
    """The folder that holds the data set, where it does not come with edgefl; the file of ``"arrays"``."""
    partition: Annotated[
        str,
        Meta(
            pattern="^(by-device|dirichlet|iid|natural|shards|[^:]+:[^:]+)$",
            description="one of 'by-device', 'dirichlet', 'iid', 'natural', 'shards', or 'my_module:split'",
        ),
    ] = "iid"
    """The examples of each client: drawn alike, by labels in three ways, by the data's own owners, or by a
    function of yours (docs/models.md)."""
    alpha: Positive = 0.1
    """``dirichlet``: concentration; the smaller, the fewer labels a client has."""
    classes_per_client: Count = 2
    """``shards``: labels that a client holds."""
    labels: dict[str, list[int]] = {}
    """For ``by-device``: device profile name to the labels its clients hold."""
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Share held out for the server's test where the data set has no test split of its own, or not used."""
    test_split: Literal["published", "drawn"] = "published"
    """The data set's own test examples, or ``test_fraction`` of all its examples, drawn class by class."""
    validation_fraction: Decay = 0.0
    """Share of the examples held out of training and test alike, the same for every seed: of all examples
    where the test part is drawn (``digits``, ``test_split = "drawn"``), else of the training examples."""
    evaluate_on: Literal["test", "validation"] = "test"
    """``validation`` measures the model on the validation examples instead of the test examples, for choosing
    hyperparameters."""
    client_test_fraction: Decay = 0.0
    """Share of each client's own examples that it does not train on, for ``evaluation.clients``; where it is
    above 0, at least one of those that hold two."""
    max_examples: Count | None = None
    """Training examples that are used, drawn by the seed; None: all."""
    image_size: Annotated[int, Meta(ge=1, le=4096)] = 84
    """Pixels of a side, for photos that come in other sizes (LEAF's CelebA)."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that is trained."""

    name: str = "mlp"
    """A built-in model (docs/models.md), ``"my_module:make"``, or ``"timm:NAME"``."""
    args: dict[str, Any] = {}
    """Passed to the model's constructor, such as ``{ hidden = [64, 32] }`` for the MLP."""
    flops_per_example: Annotated[float, Meta(ge=0, le=1e18)] | None = None
    """Operations of a training step for one example, all matrix products, in place of the work counted."""


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's training on one trip: Q steps or E epochs of SGD on its own examples."""

    function: str | None = None
    """``"my_module:train"``, the user's own training (docs/clients.md); None: SGD by the keys below."""

    steps: Count | None = None
    """Steps of a trip; give these or ``epochs``."""
    epochs: Count | None = None
    """Passes over the client's examples on a trip; 1 unless ``steps`` are given."""
    batch_size: Count = 32
    """Examples of a step; the last one of an epoch may be smaller."""
    loss: str = "cross_entropy"
    """``cross_entropy``; for float targets ``mse``, ``l1``, ``huber``, ``bce``; or ``"my_module:loss"``."""
    lr: Annotated[float, Meta(ge=MIN_FLOAT32, le=MAX_FLOAT32)] = 0.05
    """Step size of the clients' SGD."""
    momentum: Decay = 0.0
    """Momentum of the clients' SGD, from zero on each trip."""
    weight_decay: Annotated[float, Meta(ge=0, le=MAX_FLOAT32)] = 0.0
    """Times the weights, added to their gradient."""
    lr_normalization: bool = False
    """A step on a short batch of n < B examples uses lr·n/B (FedBuff, C.6)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The place where the virtual clock's workers compute; they share a GPU."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """``bfloat16``: mixed precision; the weights, their gradients and the updates stay float32."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """Layout of a batch of images in memory; ``channels_last`` is faster for some convolutions."""


class Clock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Emulated time, which passes on the wall or is computed."""

    kind: Literal["wall", "virtual"] = "virtual"
    """``wall``: a throttled process for each phone; ``virtual``: the same in emulated time, at full speed."""
    workers: Annotated[int, Meta(ge=1, le=256)] | None = None
    """Virtual clock: processes that train, by default one a core; any number gives the same bits."""
    time_scale: Positive | Literal["auto"] = "auto"
    """Wall clock: wall seconds per emulated second; ``auto`` is 1, or more if the host is too small."""


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's transport, sums and patience."""

    transport: Literal["shm", "wire"] = "shm"
    """Numbers go through shared memory, or as ZeroMQ frames into it: the same bits."""
    update_format: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    """Format of uploaded numbers: 16 bits halve the bytes, int8 (a scale for 256) quarters them."""
    error_feedback: bool = True
    """A client adds what rounding left of its last update to its next (where updates are rounded)."""
    backend: Literal["auto", "c", "numba", "cuda", "reference"] = "auto"
    """Back end that sums the updates: ``auto`` is ``EDGEFL_BACKEND``, else the fastest on the CPU."""
    heartbeat_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 5.0
    """Wall seconds of silence after which a client that should speak is held to be hung.

    It speaks three times as often, so that shorter ones would have it do little else."""

    @property
    def kernel_backend(self) -> str | None:
        """The back end as the kernels take it."""
        return None if self.backend == "auto" else self.backend


class Privacy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """User-level differential privacy of the versions (docs/privacy.md)."""

    clip_norm: Annotated[float, Meta(gt=0, le=MAX_CLIP_NORM)]
    """L: an update counts as Δ·min(1, L/‖Δ‖)."""
    noise_multiplier: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """σ: deviation of the noise, over what one update can change in a step; 0: clipping alone."""
    mechanism: Literal["tree", "gaussian"] = "tree"
    """DP-FTRL's tree over the versions, or noise of its own for each version (DP-SGD)."""
    restart_every: Count | None = None
    """``tree``: versions after which a new tree begins; None: one tree."""
    honaker: bool = False
    """``tree``: nodes are estimated from themselves and all below them: less noise for more ε."""
    quantile: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """γ: the clipping norm moves from ``clip_norm`` to this quantile of updates' norms; None: it stays."""
    quantile_rate: Positive = 0.2
    """η of L ← L·exp(−η(b − γ)), b the noisy share of a step's updates that are within L."""
    quantile_noise: Positive | None = None
    """Deviation of the noise of their count; None: a twentieth of a step's updates."""
    max_participations: Count | None = None
    """Updates of a client that may be applied in the run; None: any number."""
    min_separation: Count = 1
    """Versions from one update of a client to its next, at least."""
    delta: Annotated[float, Meta(gt=0, le=0.01)] = 1e-7
    """δ of the (ε, δ) that is reported, far below 1/clients: to publish the data of one client with
    probability δ satisfies (0, δ)."""
    noise: Literal["secure", "seeded"] = "secure"
    """Noise of a secret key, which the run deletes when it is done, or of the seed: the same each time, and
    so no privacy."""

    def count_deviation(self, count: float) -> float:
        """Deviation of the noise of the count of ``count`` updates (Andrew et al. 2021, section 3.1)."""
        return self.quantile_noise or count / 20.0


NO_PROGRESS = "no progress"
"""The end of a run whose model learned nothing: not a result."""


class MetricGoal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measure by name, ``loss`` or one that ``evaluation.function`` returns, and how far it must get."""

    name: str
    """``loss``, or a measure of ``evaluation.function``."""
    at_least: float | None = None
    """The run ends at an evaluation that finds this much, or more."""
    at_most: float | None = None
    """… or this little, or less."""

    def met(self, value: float) -> bool:
        """Returns True where the value is as asked; never for NaN."""
        return value >= self.at_least if self.at_most is None else value <= self.at_most  # type: ignore[operator]


class Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run ends at the first of these that is reached."""

    versions: Count | None = None
    """Versions of the global model that are made."""
    trips: Count | None = None
    """Client trips that ended."""
    emulated_s: Positive | None = None
    """Emulated seconds."""
    wall_s: Positive | None = None
    """Seconds of this machine."""
    accuracy: Share | None = None
    """An evaluation that finds this accuracy."""
    accuracy_over: Annotated[int, Meta(ge=1, le=1000)] = 1
    """… or so many evaluations in a row whose mean it is: a single one swings."""
    metric: MetricGoal | None = None
    """A measure by name, and what it must come to."""
    patience_evaluations: Count | None = None
    """So many evaluations in a row without an improvement of the measure that ``metric`` names, else of the
    accuracy, else (where there is none) of the loss."""
    min_improvement: NonNegative = 0.0
    """An improvement is more than this beyond the best evaluation so far."""

    @property
    def measured(self) -> bool:
        """An evaluation may end the run."""
        return (self.accuracy, self.metric, self.patience_evaluations) != (None, None, None)


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of the global model on the server's test examples, and on the clients' own."""

    every_versions: Count = 10
    """Versions from one evaluation to the next; the last version is always evaluated."""
    every_trips: Count | None = None
    """Client trips from one evaluation to the next, in place of versions: the first version after so many."""
    every_s: Positive | None = None
    """Emulated seconds from one evaluation to the next, in place of versions."""
    max_examples: Count | None = None
    """Test examples that a version is measured on, the first so many; None: all."""
    function: str | None = None
    """``"my_module:evaluate"``: ``evaluate(model, x, y)`` returns more measures, float by name."""
    clients: Literal["none", "global", "personal"] = "none"
    """Also measure the ``global`` model on each client's held-out examples; ``personal``: and after one more
    trip's training on the client's others. The evaluator does it; under the wall clock the run goes on."""
    max_clients: Annotated[int, Meta(ge=1, le=1000)] = 100
    """Clients measured of a larger fleet, drawn once."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The states of the run that it can be resumed from."""

    every_s: Positive = 30.0
    """Wall seconds between checkpoints, or more where they would take above 5% of the time; one is always
    written at the end and on Ctrl-C."""


class Experiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One experiment.

    >>> from edgefl import Experiment
    >>> Experiment(fleet={"devices": {"pixel-3a": 8}}).training.batch_size
    32
    """

    fleet: Annotated[Fleet, Meta(description="a [fleet] table with devices = { PROFILE = COUNT }")]
    name: str = "experiment"
    """Names the run and its folder."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Every random stream follows from it."""
    data: Data = Data()
    model: Model = Model()
    training: Training = Training()
    strategy: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "fedbuff"})
    """``name`` (a built-in, or ``"my_module:Mine"``) and that strategy's own fields."""
    privacy: Privacy | None = None
    """Updates are clipped, and noise is added to their sums; None: neither."""
    clock: Clock = Clock()
    server: Server = Server()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    stop: Stop = Stop()
