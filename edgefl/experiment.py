"""The settings of an experiment, as frozen data classes.

Each class corresponds to a table of the TOML file, and each field to a key with its default and the range of
its values. `edgefl.config` reads and checks files; it also checks rules that involve several keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_CLIENTS = 10_000_000
MAX_PROCESSES = 100_000
"""Maximum number of clients under the wall clock, where each client is a process."""
MIN_FLOAT32, MAX_FLOAT32 = 1.2e-38, 3e38
MAX_CLIP_NORM = 1e12
"""Maximum clipping norm. It keeps noise, which is proportional to the norm, far below float32's maximum."""

Positive = Annotated[float, Meta(gt=0)]
"""A number above 0."""
NonNegative = Annotated[float, Meta(ge=0)]
"""A number of at least 0."""
Decay = Annotated[float, Meta(ge=0, lt=1)]
"""A number of at least 0 and below 1, such as a momentum, a decay or a probability."""
Share = Annotated[float, Meta(gt=0, le=1)]
"""A number above 0 and at most 1."""
Count = Annotated[int, Meta(ge=1, le=10**9)]
"""A whole number from 1 to 10⁹."""
Clients = Annotated[int, Meta(ge=1, le=MAX_CLIENTS)]
DEFAULT_NETWORK = "wifi"
"""Network profile of a fleet for which neither the experiment nor its fleet file sets one."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Base class of the tables of an experiment."""


class Churn(Settings, frozen=True, kw_only=True):
    """Random churn: clients go offline, come back and die at random times."""

    mean_online_s: Positive | None = None
    """Mean of the exponentially distributed time that a client stays online, in emulated seconds. If it is
    not set, clients do not go offline at random."""
    mean_offline_s: Positive | None = None
    """Mean of the exponentially distributed time that a client stays offline, in emulated seconds."""
    die_per_trip: Decay = 0.0
    """Probability that the process of a client is killed during a trip, at a random point of the trip."""


class Attackers(Settings, frozen=True, kw_only=True):
    """Clients that send harmful updates, to test how strategies react to them (docs/strategies.md)."""

    share: Annotated[float, Meta(gt=0, lt=1)]
    """Share of the clients that attack, rounded to a whole number of clients. These clients are drawn with
    the experiment's seed."""
    kind: str = "sign-flip"
    """Kind of attack: ``sign-flip`` sends −scale·Δ instead of the update Δ; ``gaussian`` sends noise with the
    norm scale·‖Δ‖; ``label-flip`` trains with the class C − 1 − y instead of y, where C is the number of
    classes; ``alie`` sends μ − z·σ, where μ and σ are the mean and the standard deviation of updates that it
    computes on the data of several attackers; ``"my_module:attack"`` calls ``attack(delta, client, trip,
    rng)``, which changes Δ in place."""
    scale: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Factor by which the attacks ``sign-flip`` and ``gaussian`` scale what they send."""
    z: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """Number z of standard deviations in the attack ``alie``. If it is not set, the formula of the attack's
    paper gives z from the numbers of clients and attackers."""


class Fleet(Settings, frozen=True, kw_only=True):
    """The clients' devices, their networks, and what happens when a client leaves or dies."""

    devices: Annotated[
        Annotated[dict[str, Clients], Meta(min_length=1)] | str,
        Meta(description="a table { PROFILE = COUNT } or the name of a fleet file"),
    ]
    """A table with the number of clients for each device profile, or the name or path of a fleet file."""
    network: str | dict[str, str] = DEFAULT_NETWORK
    """One network profile for all clients, or a table with a network profile for each device profile."""
    runtime: str | None = None
    """Training library that is emulated: ``torch``, ``mnn`` or ``dl4j``. The device profiles must contain
    times for it. If it is not set, each profile's default is used: the library that was measured on the
    device."""
    on_death: Literal["replace", "drop"] = "replace"
    """``replace`` starts a new process for a client that died; ``drop`` removes the client from the run."""
    rejoin_s: NonNegative = 0.0
    """Emulated seconds from a client's death until it is online again in a new process."""
    units: Literal["individual", "identical"] = "individual"
    """``individual``: each phone has its own speed; the speeds vary as much as measurements of several phones
    of the same model do (docs/individuals.md). ``identical``: all phones have exactly the speed in the
    profile. Phones with the profile of a paper's device are always identical."""
    model_errors: Literal["none", "drawn"] = "none"
    """``drawn``: the compute times of all phones with the same device profile are multiplied by one random
    factor. It is drawn with the experiment's seed from the profile's 90% interval for a training step of this
    model (``edgefl sweep --fleets`` sets this). ``none``: compute times are exactly as in the profile, as
    they always are for profiles that describe a paper's devices."""
    variation: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Factor that scales the measured variation of compute times and mobile network rates from trip to trip
    of a phone; 1: as measured; 0: no variation."""
    phase: Literal["random", "aligned"] = "random"
    """``random``: each phone waits for a random fraction of the time of its own trip before its first trip;
    ``aligned``: no phone waits, so all phones start their first trips at the same moment."""
    join_spread_s: NonNegative = 0.0
    """Each device comes online at a random time from 0 to ``join_spread_s`` emulated seconds after the start
    of the run; 0: all devices are online at the start."""
    thermal: bool = False
    """Emulate heat: devices whose profile has a complete thermal model slow down as they get hot."""
    battery: bool = False
    """Emulate batteries: if the profile of a device has a ``[battery]`` table, the device goes offline when
    its charge has fallen to ``min_soc``, until it is charged."""
    charge: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """State of charge of all batteries at the start of the run, from 0 (empty) to 1 (full)."""
    availability: str | None = None
    """A JSON file with the times at which devices are available (docs/dynamics.md). These times replace those
    in the profiles."""
    churn: Churn = Churn()
    attackers: Attackers | None = None
    on_leave: Literal["lose", "finish"] = "lose"
    """A client that leaves during a trip loses its task (``lose``) or finishes it first (``finish``)."""
    memory: Literal["auto", "cgroup", "rlimit", "off"] = "auto"
    """Mechanism that enforces the profile's ``memory.app_limit_mib`` under the wall clock: ``rlimit`` sets a
    resource limit and also samples the memory of the process (``auto`` selects this); ``cgroup`` uses a
    control group, in which the kernel kills the process at the limit; ``off`` does not enforce it."""
    throttle: Literal["paced", "cgroup", "sigstop"] = "paced"
    """Mechanism that slows training down to the device's speed under the wall clock: ``paced`` waits after
    each step; ``cgroup`` and ``sigstop`` limit the CPU time of the process."""


class Growth(Settings, frozen=True, kw_only=True):
    """Growth of the clients' local data during the run, as in online learning (ASO-Fed, Chen et al. 2020)."""

    start: Share = 0.1
    """Share of its examples that a client has on its first trip."""
    least_per_trip: Annotated[float, Meta(ge=0, le=1)] = 0.0005
    """Minimum share of its examples that a client gains with each trip. Each client's share is drawn between
    this and ``most_per_trip``, with the experiment's seed."""
    most_per_trip: Annotated[float, Meta(ge=0, le=1)] = 0.001
    """Maximum share of its examples that a client gains with each trip."""


class Data(Settings, frozen=True, kw_only=True):
    """The data set, and how it is split among the clients."""

    name: str = "digits"
    """A built-in data set (docs/models.md), ``"arrays"`` for a file of arrays, ``"hf:NAME"`` for an image
    data set from the Hugging Face Hub, or ``"my_module:load"`` for your own function that loads the data."""
    path: str | None = None
    """Folder of a data set that edgefl does not include, or the file of arrays if the name is
    ``"arrays"``."""
    partition: Annotated[
        str,
        Meta(
            pattern=r"\A(by-device|dirichlet|iid|natural|shards|[^:\s]+:[^:\s]+)\Z",
            description="one of 'by-device', 'dirichlet', 'iid', 'natural', 'shards', 'flwr:Partitioner' or "
            "'my_module:split'",
        ),
    ] = "iid"
    """Assignment of examples to clients: at random (``iid``), by label (``dirichlet``, ``shards``,
    ``by-device``), by the users in the data set (``natural``), by a partitioner of Flower Datasets
    (``flwr:…``), or by your own function (docs/models.md)."""
    partition_args: dict[str, Any] = {}
    """Arguments of the partitioner of Flower Datasets, such as ``{ alpha = 0.3 }``; used with ``flwr:…``."""
    alpha: Positive = 0.1
    """Concentration parameter of ``dirichlet``. Smaller values give each client fewer labels."""
    classes_per_client: Count = 2
    """Number of different labels that each client holds with ``partition = "shards"``."""
    labels: dict[str, list[int]] = {}
    """With ``partition = "by-device"``, the labels that the clients of each device profile hold."""
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Share of the examples that is held out as the server's test set, if the data set has no published test
    split or if this split is not used."""
    test_split: Literal["published", "drawn"] = "published"
    """Test set of the server: ``published`` is the test split that is part of the data set; ``drawn`` is a
    random ``test_fraction`` of the examples of each class."""
    validation_fraction: Decay = 0.0
    """Share of the examples that is reserved for validation. The same examples are reserved for every seed.
    It is a share of all examples if the test set is drawn (``digits``, ``diabetes``,
    ``test_split = "drawn"``), and otherwise a share of the training examples."""
    evaluate_on: Literal["test", "validation"] = "test"
    """Set of examples on which the global model is evaluated. Use ``validation`` to choose
    hyperparameters."""
    client_test_fraction: Decay = 0.0
    """Share of each client's examples that is not used for training but held out for ``evaluation.clients``.
    If it is above 0, at least one example is held out from every client that has two or more."""
    max_examples: Count | None = None
    """Number of training examples to use, drawn with the experiment's seed; by default all are used."""
    growth: Growth | None = None
    """Clients start with a share of their examples and gain more with each trip. If this table is not given,
    they have all their examples from the start."""
    image_size: Annotated[int, Meta(ge=1, le=4096)] = 84
    """Width and height in pixels to which photos are scaled. This applies to LEAF's CelebA only."""


class Model(Settings, frozen=True, kw_only=True):
    """The model that is trained."""

    name: str = "mlp"
    """A built-in model (docs/models.md), ``"timm:NAME"`` for a model of the package timm, or
    ``"my_module:make"`` for your own function that creates the model."""
    args: dict[str, Any] = {}
    """Arguments for the constructor of the model, such as ``{ hidden = [64, 32] }`` for the MLP."""
    flops_per_example: Annotated[float, Meta(ge=0, le=1e18)] | None = None
    """Number of floating-point operations in a training step for each example. They are treated as matrix
    products. If it is not set, edgefl counts the operations of the model."""


class Training(Settings, frozen=True, kw_only=True):
    """A client's local training in one trip: steps or epochs of SGD on its own examples."""

    function: str | None = None
    """Your own training function, such as ``"my_module:train"`` (docs/clients.md). If it is not set, clients
    train by SGD with the keys below."""

    steps: Count | None = None
    """Number of SGD steps in a trip. Give either ``steps`` or ``epochs``."""
    epochs: Count | None = None
    """Number of passes over the client's examples in a trip. The default is 1 if ``steps`` is not given."""
    batch_size: Count = 32
    """Number of examples in an SGD step. The last batch of an epoch may be smaller."""
    loss: str = "cross_entropy"
    """Loss function: ``cross_entropy`` for classes; ``mse``, ``l1``, ``huber`` or ``bce`` for float targets;
    or your own function, such as ``"my_module:loss"``."""
    lr: Annotated[float, Meta(ge=MIN_FLOAT32, le=MAX_FLOAT32)] = 0.05
    """Step size (learning rate) of the clients' SGD."""
    momentum: Decay = 0.0
    """Momentum of the clients' SGD. The momentum buffer starts at zero in each trip."""
    weight_decay: Annotated[float, Meta(ge=0, le=MAX_FLOAT32)] = 0.0
    """Weight decay of the clients' SGD: the coefficient of the L2 penalty."""
    lr_normalization: bool = False
    """If true, a step on a batch of only n examples, where n is below the batch size B, uses the step size
    lr·n/B (appendix C.6 of the FedBuff paper)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device on which the workers of the virtual clock train. With ``cuda``, they share one GPU."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of training: ``bfloat16`` is mixed precision, in which weights, gradients and updates
    stay float32."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """Memory layout of batches of images. ``channels_last`` makes some convolutions faster."""


class Clock(Settings, frozen=True, kw_only=True):
    """The clock: emulated time either passes in real time or is computed."""

    kind: Literal["wall", "virtual"] = "virtual"
    """``wall``: each phone is a throttled process that runs in real time; ``virtual``: a discrete-event
    simulation computes the same trips as fast as the host allows."""
    workers: Annotated[int, Meta(ge=1, le=256)] | None = None
    """Number of processes that train under the virtual clock. By default there is one for each core, or fewer
    if a CPU quota allows fewer cores. Results do not depend on it."""
    time_scale: Positive | Literal["auto"] = "auto"
    """Number of wall seconds that an emulated second takes under the wall clock. ``auto`` is 1, or more if
    the host is too slow for the fleet when the run begins; a resumed run keeps it."""


class Secure(Settings, frozen=True, kw_only=True):
    """Secure aggregation: the server learns weighted sums of updates, but no single update
    (docs/secure.md)."""

    kind: Literal["masks", "pairwise", "trusted"] = "masks"
    """``masks``: each update has a one-time mask, and some clients, the holders, store shares of all masks so
    that masks can be removed from sums; ``pairwise``: each pair of clients in a round shares a mask, for
    strategies with rounds; ``trusted``: a separate process decrypts updates and releases only sums."""
    clip: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Maximum magnitude of each element of an update with ``masks`` and ``pairwise``; larger elements are
    clipped."""
    resolution: Annotated[int, Meta(ge=1, le=4096)] = 256
    """With ``masks`` and ``pairwise``, weights are rounded to multiples of a unit: the largest weight divided
    by ``resolution``. With ``masks``, this is the largest weight in the sum; with ``pairwise``, it is the
    largest weight in the fleet. With ``trusted``, weights are not rounded, but clients whose weight is below
    the unit (from the largest weight in the sum) do not count towards ``least_clients``."""
    holders: Annotated[int, Meta(ge=2, le=1000)] = 5
    """With ``masks``, N, the number of holders: the clients that store shares of all masks. They are drawn
    with the experiment's seed."""
    recover: Annotated[int, Meta(ge=2, le=1000)] = 4
    """With ``masks``, U, the number of holders whose shares are needed to recover a sum. It must be above
    (N + T) / 2."""
    private: Annotated[int, Meta(ge=1, le=1000)] = 1
    """With ``masks``, T, the number of holders that may collude with the server and still learn nothing but
    sums."""
    least_clients: Annotated[int, Meta(ge=2, le=10**6)] = 2
    """Minimum number of clients in a sum; smaller sums are refused. ``pairwise`` also refuses a sum that
    includes at most half of a round's clients."""


class Server(Settings, frozen=True, kw_only=True):
    """The server: transport, aggregation and timeouts."""

    transport: Literal["shm", "wire"] = "shm"
    """Transport of updates: clients write them to shared memory (``shm``) or send them as ZeroMQ frames
    (``wire``). The results are the same."""
    update_format: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    """Number format of uploads. The 16-bit formats halve the number of bytes; ``int8``, which has one scale
    for every 256 numbers, reduces it to a quarter."""
    error_feedback: bool = True
    """If true, and if ``update_format`` rounds, a client adds the rounding error of its last update to its
    next update."""
    backend: Literal["auto", "c", "numba", "cuda", "reference"] = "auto"
    """Back end of the kernels that sum updates. ``auto`` is the back end in the environment variable
    ``EDGEFL_BACKEND``, or the fastest CPU back end if the variable is not set."""
    secure: Secure | None = None
    """Hide individual updates from the server. If this table is not given, the server can read them."""
    heartbeat_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 5.0
    """Wall seconds without a heartbeat after which a client is regarded as hung. Clients send three
    heartbeats in this time."""

    @property
    def kernel_backend(self) -> str | None:
        """The name of the back end for `edgefl.kernels`, or None if the kernels choose it."""
        return None if self.backend == "auto" else self.backend


class Privacy(Settings, frozen=True, kw_only=True):
    """Differential privacy: for the published global models, for each client against the server, or for both
    (docs/privacy.md)."""

    clip_norm: Annotated[float, Meta(gt=0, le=MAX_CLIP_NORM)]
    """L, the L2 norm to which updates are clipped: Δ·min(1, L/‖Δ‖)."""
    noise_multiplier: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """σ, the standard deviation of the server's noise divided by the largest change that one update can
    cause; 0: updates are clipped, but no noise is added."""
    local_noise_multiplier: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Standard deviation, divided by L, of the noise that each client adds to its clipped update before it
    sends the update; 0: no such noise. If it is above 0, updates are clipped by the clients and not by the
    server."""
    mechanism: Literal["tree", "gaussian"] = "tree"
    """``tree``: the noise in the versions is generated by tree aggregation, as in DP-FTRL; ``gaussian``: each
    version has independent noise, as in DP-SGD."""
    restart_every: Count | None = None
    """With ``tree``, the number of versions after which a new tree is started. If it is not set, there is
    only one tree."""
    honaker: bool = False
    """If true, ``tree`` estimates each node from the node itself and the nodes below it. This gives less
    noise but a larger ε."""
    quantile: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """γ, the quantile of the norms of updates to which the clipping norm is adapted, starting at
    ``clip_norm``. If it is not set, the clipping norm is constant."""
    quantile_rate: Positive = 0.2
    """η in L ← L·exp(−η(b − γ)), which adapts the clipping norm. Here b is the share of a step's updates
    whose norm is at most L, plus noise."""
    quantile_noise: Positive | None = None
    """Standard deviation of the noise that is added to the number of updates with a norm of at most L. If it
    is not set, it is a twentieth of the number of updates in a step."""
    max_participations: Count | None = None
    """Maximum number of updates of each client that are applied. If it is not set, there is no limit. With
    local noise, it limits the number of trips that a client starts."""
    min_separation: Count = 1
    """Minimum distance, in versions, between two applied updates of the same client. With 1, they may be in
    consecutive versions."""
    delta: Annotated[float, Meta(gt=0, le=0.01)] = 1e-7
    """δ of the reported (ε, δ). Choose it far below 1 divided by the number of clients, because even
    publishing the data of one client with probability δ satisfies (0, δ)-differential privacy."""
    noise: Literal["secure", "seeded"] = "secure"
    """``secure``: noise is generated from a secret key that is deleted at the end of the run; ``seeded``:
    noise is generated from the experiment's seed, which is reproducible but protects nobody."""

    @property
    def central(self) -> bool:
        """True if the server clips or adds noise; False if only the clients do so."""
        return self.noise_multiplier > 0 or not self.local_noise_multiplier

    def count_deviation(self, count: float) -> float:
        """Return the standard deviation of the noise that is added to the number of updates within the
        clipping norm, for a step with ``count`` updates (Andrew et al. 2021, section 3.1)."""
        return self.quantile_noise or count / 20.0


NO_PROGRESS = "no progress"
"""Stop reason of a run whose model did not learn. Such a run is not ranked among other runs."""
TOO_FEW_CLIENTS = "too few clients are left"
"""Stop reason of a run that ended because too many clients are gone for good."""


class MetricGoal(Settings, frozen=True, kw_only=True):
    """A target for the loss, or for a metric that ``evaluation.function`` returns."""

    name: str
    """Name of the metric: ``loss``, or a metric that ``evaluation.function`` returns."""
    at_least: float | None = None
    """The run ends when the metric has this value or more in an evaluation."""
    at_most: float | None = None
    """The run ends when the metric has this value or less in an evaluation."""

    def met(self, value: float) -> bool:
        """Return True if a value of the metric meets the target. NaN never does."""
        return value >= self.at_least if self.at_most is None else value <= self.at_most  # type: ignore[operator]


class Stop(Settings, frozen=True, kw_only=True):
    """Conditions that end the run. The first condition that is met ends it."""

    versions: Count | None = None
    """Number of versions of the global model after which the run ends."""
    trips: Count | None = None
    """Number of finished client trips after which the run ends."""
    emulated_s: Positive | None = None
    """Number of emulated seconds after which the run ends."""
    wall_s: Positive | None = None
    """Number of real seconds on this machine after which the run ends."""
    accuracy: Share | None = None
    """Test accuracy at which the run ends, from 0 to 1."""
    accuracy_over: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Number of consecutive evaluations whose mean accuracy must reach ``accuracy``. A value above 1 smooths
    fluctuations."""
    metric: MetricGoal | None = None
    """Target for the loss or for a metric of your own, at which the run ends."""
    patience_evaluations: Count | None = None
    """Number of consecutive evaluations without an improvement after which the run ends. The improvement is
    that of ``metric`` or, if ``metric`` is not given, of the accuracy (of the loss if the task has no
    accuracy)."""
    min_improvement: NonNegative = 0.0
    """An evaluation is an improvement only if it is better than the best one so far by more than this."""

    @property
    def measured(self) -> bool:
        """True if the result of an evaluation can end the run."""
        return (self.accuracy, self.metric, self.patience_evaluations) != (None, None, None)


class Evaluation(Settings, frozen=True, kw_only=True):
    """Settings for the evaluation of the global model on the server's test set and on the data of clients."""

    every_versions: Count = 10
    """Number of versions from one evaluation to the next. The last version is always evaluated."""
    every_trips: Count | None = None
    """Number of client trips from one evaluation to the next, if the interval is not given in versions. The
    first version after these trips is evaluated."""
    every_s: Positive | None = None
    """Emulated seconds from one evaluation to the next, if the interval is not given in versions or trips."""
    max_examples: Count | None = None
    """Use only the first ``max_examples`` test examples in an evaluation; by default all are used."""
    function: str | None = None
    """Your own evaluation function, such as ``"my_module:evaluate"``. ``evaluate(model, x, y)`` returns
    further metrics as a dict from name to float."""
    clients: Literal["none", "global", "personal"] = "none"
    """``global``: also evaluate the global model on each client's held-out examples; ``personal``: evaluate
    it there a second time after fine-tuning it for one trip on the client's training examples. Under the
    virtual clock, the run waits for these evaluations if an evaluation can end it."""
    max_clients: Annotated[int, Meta(ge=1, le=1000)] = 100
    """Maximum number of clients on whose examples the model is evaluated. If the fleet is larger, this number
    of clients is drawn once for the whole run."""


class Checkpoint(Settings, frozen=True, kw_only=True):
    """Checkpoints, from which a run can be resumed."""

    every_s: Positive = 30.0
    """Wall seconds from one checkpoint to the next. The interval is extended if checkpoints would otherwise
    take more than 5% of the time. A checkpoint is also written at the end of the run and on Ctrl-C."""


class Experiment(Settings, frozen=True, kw_only=True):
    """All settings of an experiment.

    >>> from edgefl import Experiment
    >>> Experiment(fleet={"devices": {"pixel-3a": 8}}).training.batch_size
    32
    """

    fleet: Annotated[Fleet, Meta(description="a [fleet] table with devices = { PROFILE = COUNT }")]
    name: str = "experiment"
    """Name of the run and of its folder."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of all random numbers in the run."""
    data: Data = Data()
    model: Model = Model()
    training: Training = Training()
    strategy: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "fedbuff"})
    """A table with the ``name`` of a built-in strategy, or of your own such as ``"my_module:Mine"``, and with
    the strategy's own keys (``edgefl keys NAME`` lists them)."""
    privacy: Privacy | None = None
    """Clip updates and add noise to their sums. If this table is not given, neither is done."""
    clock: Clock = Clock()
    server: Server = Server()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    stop: Stop = Stop()
