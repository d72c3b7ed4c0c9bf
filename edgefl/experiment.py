"""The settings of an experiment, as frozen data classes.

Each class is a table of the TOML file and each field a key, with its default and the range of its values.
`edgefl.config` reads and checks files, including rules that relate several keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_CLIENTS = 10_000_000
MOST_PROCESSES = 100_000
"""Maximum number of clients under the wall clock, where each is a process."""
MIN_FLOAT32, MAX_FLOAT32 = 1.2e-38, 3e38
MAX_CLIP_NORM = 1e12
"""Maximum clipping norm. It keeps noise, which is proportional to the norm, far below float32's maximum."""

Positive = Annotated[float, Meta(gt=0)]
"""A number above 0."""
NonNegative = Annotated[float, Meta(ge=0)]
"""A number, at least 0."""
Decay = Annotated[float, Meta(ge=0, lt=1)]
"""A number in [0, 1): a momentum, a decay, or a probability below 1."""
Share = Annotated[float, Meta(gt=0, le=1)]
"""A number in (0, 1]."""
Count = Annotated[int, Meta(ge=1, le=10**9)]
"""A whole number, at least 1."""
Clients = Annotated[int, Meta(ge=1, le=MAX_CLIENTS)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Base class of the tables of an experiment."""


class Churn(Settings, frozen=True, kw_only=True):
    """Random churn: clients go offline, come back and die."""

    mean_online_s: Positive | None = None
    """Mean of the exponentially distributed time that a client stays online, emulated seconds; None: clients
    do not go offline at random."""
    mean_offline_s: Positive | None = None
    """Mean of the exponentially distributed time that a client stays offline, emulated seconds."""
    die_per_trip: Decay = 0.0
    """Probability that a client's process is killed during a trip, at a uniformly drawn instant."""


class Attackers(Settings, frozen=True, kw_only=True):
    """Clients that send harmful updates, to test strategies (docs/strategies.md)."""

    share: Annotated[float, Meta(gt=0, lt=1)]
    """Share of the clients that attack, rounded to a number of clients; the seed draws which ones."""
    kind: str = "sign-flip"
    """``sign-flip`` sends −scale·Δ in place of the update Δ; ``gaussian`` sends noise with the norm
    scale·‖Δ‖; ``label-flip`` trains with class C − 1 − y in place of y; ``alie`` sends μ − z·σ of the updates
    that it computes on several attackers' data; ``"my_module:attack"`` calls ``attack(delta, client, trip,
    rng)``, which changes Δ in place."""
    scale: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Factor on the size of ``sign-flip`` and ``gaussian``."""
    z: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """``alie``: number of standard deviations; None: by the paper's formula, from the numbers of clients and
    attackers."""


class Fleet(Settings, frozen=True, kw_only=True):
    """The clients' devices, their networks, and what happens when a client leaves or dies."""

    devices: Annotated[
        Annotated[dict[str, Clients], Meta(min_length=1)] | str,
        Meta(description="a table { PROFILE = COUNT } or the name of a fleet file"),
    ]
    """Number of clients by profile name, or the name (or path) of a fleet file."""
    network: str | dict[str, str] = "wifi"
    """One network profile for all clients, or a table from device profile to network profile."""
    runtime: str | None = None
    """The training library that is emulated, ``torch``, ``mnn`` or ``dl4j``, if the device profiles have
    times for it; None: each profile's default, the library that was measured on the device."""
    on_death: Literal["replace", "drop"] = "replace"
    """``replace`` starts a new process for a client that died; ``drop`` removes the client from the run."""
    rejoin_s: NonNegative = 0.0
    """Emulated seconds before a replaced client is online again."""
    units: Literal["individual", "identical"] = "individual"
    """``individual``: each phone has its own speed, with the spread measured between units of one model
    (docs/individuals.md); ``identical``: exactly the profile's speed. Profiles from papers are always
    exact."""
    model_errors: Literal["none", "drawn"] = "none"
    """``drawn``: the compute time of each device profile is off by one factor, the same for all its phones,
    drawn by the seed from the profile's 90% interval for this model's training step (``edgefl sweep
    --fleets`` sets it); ``none``: exactly the profile's time. Profiles from papers are always exact."""
    variation: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Factor on the measured variation between trips of one phone, in compute time and mobile network rate;
    0: no variation."""
    phase: Literal["random", "aligned"] = "random"
    """``random``: each phone starts the run at a random point of its trip; ``aligned``: all phones
    start a trip at the same moment."""
    join_spread_s: NonNegative = 0.0
    """Each device comes online at an instant drawn uniformly from [0, ``join_spread_s``], emulated seconds;
    0: all are online at the start."""
    thermal: bool = False
    """Emulate heat: devices with a complete thermal model in their profile slow down as they get hot."""
    battery: bool = False
    """Emulate batteries: a device whose profile has a ``[battery]`` table goes offline at ``min_soc`` until
    it is charged."""
    charge: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Battery charge at the start of the run, from 0 to 1."""
    availability: str | None = None
    """A JSON file of the times when devices are available (docs/dynamics.md); it replaces the profiles'
    times."""
    churn: Churn = Churn()
    attackers: Attackers | None = None
    on_leave: Literal["lose", "finish"] = "lose"
    """Behaviour of a client that must go offline during a trip: ``lose`` the task, or ``finish`` it first."""
    memory: Literal["auto", "cgroup", "rlimit", "off"] = "auto"
    """Enforcement of the profile's ``memory.app_limit_mib`` under the wall clock: ``rlimit`` together with
    sampling of the process's memory (``auto`` selects this), a control group (``cgroup``: the kernel kills
    the process at the limit), or not at all (``off``)."""
    throttle: Literal["paced", "cgroup", "sigstop"] = "paced"
    """Mechanism that slows training to the device's speed under the wall clock: ``paced`` waits after each
    step; ``cgroup`` and ``sigstop`` limit the process's CPU time."""


class Growth(Settings, frozen=True, kw_only=True):
    """Local data that grow during the run, as in online learning (ASO-Fed, Chen et al. 2020)."""

    start: Share = 0.1
    """Share of a client's examples that it has on its first trip."""
    least_per_trip: Annotated[float, Meta(ge=0, le=1)] = 0.0005
    """Minimum share of its examples that a client gains per trip. The seed draws one share per client."""
    most_per_trip: Annotated[float, Meta(ge=0, le=1)] = 0.001
    """Maximum share of its examples that a client gains per trip."""


class Data(Settings, frozen=True, kw_only=True):
    """The data set and how it is split among clients."""

    name: str = "digits"
    """A built-in data set (docs/models.md), ``"arrays"`` for a file of arrays, ``"hf:NAME"`` for images of
    the Hugging Face hub, or ``"my_module:load"``."""
    path: str | None = None
    """The folder of a data set that edgefl does not include, or the file of ``"arrays"``."""
    partition: Annotated[
        str,
        Meta(
            pattern="^(by-device|dirichlet|iid|natural|shards|[^:]+:[^:]+)$",
            description="one of 'by-device', 'dirichlet', 'iid', 'natural', 'shards', 'flwr:Partitioner' or "
            "'my_module:split'",
        ),
    ] = "iid"
    """Assignment of examples to clients: at random (``iid``), by label (``dirichlet``, ``shards``,
    ``by-device``), by the data set's own users (``natural``), by a partitioner of Flower Datasets
    (``flwr:…``), or by your function (docs/models.md)."""
    partition_args: dict[str, Any] = {}
    """``flwr:…``: the partitioner's arguments, such as ``{ alpha = 0.3 }``."""
    alpha: Positive = 0.1
    """``dirichlet``: concentration parameter; smaller values give each client fewer labels."""
    classes_per_client: Count = 2
    """``shards``: number of labels per client."""
    labels: dict[str, list[int]] = {}
    """``by-device``: table from device profile to the labels of its clients."""
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Share of the examples held out as the server's test set, if the published test split is absent or not
    used."""
    test_split: Literal["published", "drawn"] = "published"
    """``published``: the data set's own test split; ``drawn``: ``test_fraction`` of all examples, drawn per
    class."""
    validation_fraction: Decay = 0.0
    """Share of the examples reserved for validation, the same for every seed: of all examples if the test set
    is drawn (``digits``, ``test_split = "drawn"``), else of the training examples."""
    evaluate_on: Literal["test", "validation"] = "test"
    """Examples on which the global model is measured; use ``validation`` to choose hyperparameters."""
    client_test_fraction: Decay = 0.0
    """Share of each client's examples held out of its training, for ``evaluation.clients``. If it is
    above 0, at least one example is held out of every client that has two or more."""
    max_examples: Count | None = None
    """Number of training examples used, drawn by the seed; None: all."""
    growth: Growth | None = None
    """Clients start with a share of their examples and gain more with each trip; None: they have all
    examples from the start."""
    image_size: Annotated[int, Meta(ge=1, le=4096)] = 84
    """Width and height in pixels to which photos are scaled (LEAF's CelebA)."""


class Model(Settings, frozen=True, kw_only=True):
    """The model that is trained."""

    name: str = "mlp"
    """A built-in model (docs/models.md), ``"my_module:make"``, or ``"timm:NAME"``."""
    args: dict[str, Any] = {}
    """Arguments of the model's constructor, such as ``{ hidden = [64, 32] }`` for the MLP."""
    flops_per_example: Annotated[float, Meta(ge=0, le=1e18)] | None = None
    """Floating-point operations of a training step per example, counted as matrix products; None: edgefl
    counts the operations of the model."""


class Training(Settings, frozen=True, kw_only=True):
    """A client's local training in one trip: steps or epochs of SGD on its own examples."""

    function: str | None = None
    """``"my_module:train"``, your own training function (docs/clients.md); None: SGD with the keys below."""

    steps: Count | None = None
    """SGD steps per trip; give either ``steps`` or ``epochs``."""
    epochs: Count | None = None
    """Passes over the client's examples per trip; 1 unless ``steps`` is given."""
    batch_size: Count = 32
    """Examples per step; the last batch of an epoch may be smaller."""
    loss: str = "cross_entropy"
    """``cross_entropy``; for float targets ``mse``, ``l1``, ``huber``, ``bce``; or ``"my_module:loss"``."""
    lr: Annotated[float, Meta(ge=MIN_FLOAT32, le=MAX_FLOAT32)] = 0.05
    """Step size of the clients' SGD."""
    momentum: Decay = 0.0
    """Momentum of the clients' SGD; its buffer starts at zero in each trip."""
    weight_decay: Annotated[float, Meta(ge=0, le=MAX_FLOAT32)] = 0.0
    """Weight decay of the clients' SGD (L2 coefficient)."""
    lr_normalization: bool = False
    """A step on a short batch of n < B examples uses lr·n/B (FedBuff, C.6)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device on which the virtual clock's workers compute; with ``cuda`` they share one GPU."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """``bfloat16``: mixed precision; weights, gradients and updates stay float32."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """Memory layout of image batches; ``channels_last`` is faster for some convolutions."""


class Clock(Settings, frozen=True, kw_only=True):
    """The clock: emulated time passes in real time, or is computed."""

    kind: Literal["wall", "virtual"] = "virtual"
    """``wall``: one throttled process per phone, in real time; ``virtual``: a discrete-event simulation of
    the same trips, as fast as the host computes."""
    workers: Annotated[int, Meta(ge=1, le=256)] | None = None
    """Virtual clock: number of training processes, by default one per core. Results do not depend on it."""
    time_scale: Positive | Literal["auto"] = "auto"
    """Wall clock: wall seconds per emulated second; ``auto`` is 1, or more if the host is too slow for the
    fleet."""


class Secure(Settings, frozen=True, kw_only=True):
    """Secure aggregation: the server learns weighted sums of updates, but no single one (docs/secure.md)."""

    kind: Literal["masks", "pairwise", "trusted"] = "masks"
    """``masks``: one-time coded masks, which holders remove from sums; ``pairwise``: masks between each pair
    of clients of a round, for strategies with rounds; ``trusted``: a separate process decrypts updates and
    releases sums."""
    clip: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """``masks``, ``pairwise``: limit of the magnitude of each element of an update."""
    resolution: Annotated[int, Meta(ge=1, le=4096)] = 256
    """``masks``, ``pairwise``: weights are rounded to multiples of the largest weight (``masks``: among the
    sum's clients, ``pairwise``: in the fleet) divided by ``resolution``; ``trusted``: clients with a smaller
    weight than this do not count for ``least_clients``."""
    holders: Annotated[int, Meta(ge=2, le=1000)] = 5
    """``masks``: N, the number of clients, drawn by the seed, that hold shares of all masks."""
    recover: Annotated[int, Meta(ge=2, le=1000)] = 4
    """``masks``: U, the number of holders whose shares recover a sum; above (N + T) / 2."""
    private: Annotated[int, Meta(ge=1, le=1000)] = 1
    """``masks``: T, the number of holders that together with the server learn nothing but sums."""
    least_clients: Annotated[int, Meta(ge=2, le=10**6)] = 2
    """Minimum number of clients in a sum; sums of fewer are refused. ``pairwise`` also refuses sums of
    half of a round's clients or fewer."""


class Server(Settings, frozen=True, kw_only=True):
    """The server: transport, aggregation and time-outs."""

    transport: Literal["shm", "wire"] = "shm"
    """Updates are written to shared memory (``shm``) or sent as ZeroMQ frames (``wire``). Results are the
    same."""
    update_format: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    """Number format of uploads: 16-bit formats halve the bytes, ``int8`` (one scale per 256 numbers) quarters
    them."""
    error_feedback: bool = True
    """A client adds the rounding error of its last update to its next one (if ``update_format`` rounds)."""
    backend: Literal["auto", "c", "numba", "cuda", "reference"] = "auto"
    """Kernel back end that sums updates; ``auto``: the one in ``EDGEFL_BACKEND``, else the fastest CPU back
    end."""
    secure: Secure | None = None
    """Hide updates from the server; None: the server reads them."""
    heartbeat_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 5.0
    """Wall seconds without a heartbeat after which a client counts as hung. Clients send three heartbeats in
    this time."""

    @property
    def kernel_backend(self) -> str | None:
        """The back end's name for `edgefl.kernels`; None: automatic."""
        return None if self.backend == "auto" else self.backend


class Privacy(Settings, frozen=True, kw_only=True):
    """Differential privacy: for the published global models, for each client against the server, or for both
    (docs/privacy.md)."""

    clip_norm: Annotated[float, Meta(gt=0, le=MAX_CLIP_NORM)]
    """L: updates are clipped to this L2 norm, Δ·min(1, L/‖Δ‖)."""
    noise_multiplier: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """σ: standard deviation of the server's noise, relative to the largest change that one update can make;
    0: clip without noise."""
    local_noise_multiplier: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Standard deviation, relative to L, of the noise that each client adds to its clipped update before it
    sends it; 0: none. If it is above 0, the client clips and the server does not."""
    mechanism: Literal["tree", "gaussian"] = "tree"
    """``tree``: DP-FTRL's tree aggregation over versions; ``gaussian``: independent noise per version
    (DP-SGD)."""
    restart_every: Count | None = None
    """``tree``: versions after which a new tree begins; None: one tree."""
    honaker: bool = False
    """``tree``: estimate each node from itself and the nodes below it, for less noise but a larger ε."""
    quantile: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """γ: adapt the clipping norm, which starts at ``clip_norm``, to this quantile of the updates' norms;
    None: keep it fixed."""
    quantile_rate: Positive = 0.2
    """η of L ← L·exp(−η(b − γ)), where b is the noisy share of a step's updates that are within L."""
    quantile_noise: Positive | None = None
    """Standard deviation of the noise added to the number of updates within L; None: a twentieth of a step's
    updates."""
    max_participations: Count | None = None
    """Maximum number of updates applied per client; None: no limit. With local noise, it limits the
    trips that a client starts."""
    min_separation: Count = 1
    """Minimum number of versions between two updates of one client."""
    delta: Annotated[float, Meta(gt=0, le=0.01)] = 1e-7
    """δ of the reported (ε, δ). Choose it far below 1/clients: publishing one client's data with probability
    δ satisfies (0, δ)."""
    noise: Literal["secure", "seeded"] = "secure"
    """``secure``: noise from a secret key that is deleted at the end of the run; ``seeded``: reproducible
    noise from the seed, which protects nobody."""

    @property
    def central(self) -> bool:
        """True if the server clips or adds noise; False if only the clients do so."""
        return self.noise_multiplier > 0 or not self.local_noise_multiplier

    def count_deviation(self, count: float) -> float:
        """Standard deviation of the noise added to a count of ``count`` updates (Andrew et al. 2021, section
        3.1)."""
        return self.quantile_noise or count / 20.0


NO_PROGRESS = "no progress"
"""Stop reason of a run whose model did not learn; such a run is not ranked."""


class MetricGoal(Settings, frozen=True, kw_only=True):
    """A target for the loss, or for a measure that ``evaluation.function`` returns."""

    name: str
    """``loss``, or the name of a measure of ``evaluation.function``."""
    at_least: float | None = None
    """The run ends when an evaluation gives this value or more."""
    at_most: float | None = None
    """The run ends when an evaluation gives this value or less."""

    def met(self, value: float) -> bool:
        """Return True if the value meets the target; never for NaN."""
        return value >= self.at_least if self.at_most is None else value <= self.at_most  # type: ignore[operator]


class Stop(Settings, frozen=True, kw_only=True):
    """Conditions that end the run; the first one that is met ends it."""

    versions: Count | None = None
    """Number of versions of the global model."""
    trips: Count | None = None
    """Number of finished client trips."""
    emulated_s: Positive | None = None
    """Emulated seconds since the start of the run."""
    wall_s: Positive | None = None
    """Real seconds on this machine."""
    accuracy: Share | None = None
    """Test accuracy, from 0 to 1."""
    accuracy_over: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Number of consecutive evaluations whose mean must reach ``accuracy``; smooths fluctuations."""
    metric: MetricGoal | None = None
    """Target for the loss or for a measure of your own."""
    patience_evaluations: Count | None = None
    """Number of consecutive evaluations without improvement of ``metric``; without a ``metric``, of the
    accuracy, or of the loss if the task has no accuracy."""
    min_improvement: NonNegative = 0.0
    """Smallest change from the best evaluation so far that counts as an improvement."""

    @property
    def measured(self) -> bool:
        """True if the result of an evaluation can end the run."""
        return (self.accuracy, self.metric, self.patience_evaluations) != (None, None, None)


class Evaluation(Settings, frozen=True, kw_only=True):
    """Schedule and extent of evaluations of the global model, on the server's test set and on clients'
    data."""

    every_versions: Count = 10
    """Versions between evaluations; the last version is always evaluated."""
    every_trips: Count | None = None
    """Client trips between evaluations, instead of versions; the next version after them is evaluated."""
    every_s: Positive | None = None
    """Emulated seconds between evaluations, instead of versions."""
    max_examples: Count | None = None
    """Evaluate on the first ``max_examples`` test examples; None: on all."""
    function: str | None = None
    """``"my_module:evaluate"``: ``evaluate(model, x, y)`` returns further measures, a dict of name to
    float."""
    clients: Literal["none", "global", "personal"] = "none"
    """``global``: also evaluate the global model on each client's held-out examples; ``personal``: also after
    fine-tuning it for one trip on the client's training examples. Evaluation does not delay the run."""
    max_clients: Annotated[int, Meta(ge=1, le=1000)] = 100
    """Maximum number of clients evaluated; if the fleet is larger, this many are drawn once."""


class Checkpoint(Settings, frozen=True, kw_only=True):
    """Checkpoints, from which a run can be resumed."""

    every_s: Positive = 30.0
    """Wall seconds between checkpoints; more if writing them would take over 5% of the time. A checkpoint is
    always written at the end and on Ctrl-C."""


class Experiment(Settings, frozen=True, kw_only=True):
    """One experiment.

    >>> from edgefl import Experiment
    >>> Experiment(fleet={"devices": {"pixel-3a": 8}}).training.batch_size
    32
    """

    fleet: Annotated[Fleet, Meta(description="a [fleet] table with devices = { PROFILE = COUNT }")]
    name: str = "experiment"
    """Name of the run and of its folder."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of all random streams."""
    data: Data = Data()
    model: Model = Model()
    training: Training = Training()
    strategy: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "fedbuff"})
    """``name``, a built-in strategy or ``"my_module:Mine"``, and the strategy's own fields (``edgefl keys
    NAME``)."""
    privacy: Privacy | None = None
    """Clip updates and add noise to their sums; None: neither."""
    clock: Clock = Clock()
    server: Server = Server()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    stop: Stop = Stop()
