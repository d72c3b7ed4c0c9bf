"""What the user says: one experiment, as plain frozen data.

The TOML's tables are these classes, field for field. ``edgefl.config`` reads and checks files; this
module only says what there is, with each default.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Churn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Phones that come and go at random, and die."""

    mean_online_s: float | None = None
    """Mean of the exponentially distributed time, emulated seconds, for which a phone is online; with
    ``mean_offline_s``. None: it does not go by itself."""
    mean_offline_s: float | None = None
    """The same for the time until it is back."""
    die_per_trip: float = 0.0
    """Probability that the phone's process is killed on a trip, at an instant of it drawn uniformly."""


class Cells(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links that many phones share: client c is in cell c mod ``count``."""

    count: int = 1
    uplink_mbps: float | None = None
    """What all phones of a cell upload at most, 10⁶ bit/s with headers; None: no limit but their own."""
    downlink_mbps: float | None = None
    """The same for downloads."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which phones there are, how they are connected, and what happens when one dies."""

    devices: dict[str, int] | str
    """Profile name to count, or the name (or path) of a fleet file."""
    network: str | dict[str, str] = "wifi"
    """One network profile for all, or device profile name to network profile name."""
    on_death: Literal["replace", "drop"] = "replace"
    """A dead client's device comes back as a new process (``replace``) or never (``drop``)."""
    rejoin_s: float = 0.0
    """Emulated seconds until a replaced device is back."""
    join_spread_s: float = 0.0
    """Devices come online at instants drawn from U(0, this many emulated seconds); 0: all at the start."""
    thermal: bool = False
    """Devices whose profiles give their thermal model in full get hot, and slower, as they train."""
    battery: bool = False
    """Devices with a ``[battery]`` drain it, and leave when it is at ``min_soc`` until it is charged."""
    charge: float = 1.0
    """How full batteries are at the start, from 0 to 1."""
    availability: str | None = None
    """A JSON file of when devices are available (docs/dynamics.md), instead of what their profiles say."""
    churn: Churn = Churn()
    on_leave: Literal["lose", "finish"] = "lose"
    """A phone that goes offline in the middle of a trip loses the task, or finishes it first."""
    cells: Cells | None = None
    """Phones share the links of so many cells; None: each has its network for itself."""
    memory: Literal["auto", "cgroup", "rlimit", "off"] = "auto"
    """What enforces the profile's ``memory.app_limit_mib`` under the wall clock: ``rlimit`` with a watch,
    which needs no privileges and is what ``auto`` takes, a control group, past whose limit the kernel
    kills, or nothing (``off``)."""
    throttle: Literal["paced", "cgroup", "sigstop"] = "paced"
    """What makes training as slow as the device under the wall clock: waiting after each step (``paced``), or
    a limit on the process's CPU time that the training knows nothing of."""


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which examples there are and which client holds which."""

    name: str = "digits"
    path: str | None = None
    partition: Literal["iid", "dirichlet", "shards", "by-device", "natural"] = "iid"
    alpha: float = 0.1
    classes_per_client: int = 2
    labels: dict[str, list[int]] = {}
    """For ``by-device``: device profile name to the labels its clients hold."""
    test_fraction: float = 0.2
    """Share held out for the server's test where the data set has no test split of its own."""
    max_examples: int | None = None
    image_size: int = 84
    """Pixels of a side, for photos that come in other sizes (LEAF's CelebA)."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model is trained."""

    name: str = "mlp"
    args: dict[str, Any] = {}
    """Passed to the model's constructor, such as ``{ hidden = [64, 32] }`` for the MLP."""
    flops_per_example: float | None = None
    """Operations of a training step for one example, in place of those counted: it paces the clients."""


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client does on one trip: Q steps or E epochs of SGD on its own examples."""

    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 32
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_normalization: bool = False
    """A step on a short batch of n < B examples uses lr·n/B (FedBuff, C.6)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the virtual clock's workers compute; they share a GPU."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """``bfloat16``: mixed precision; the weights, their gradients and the updates stay float32."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """How a batch of images lies in memory; ``channels_last`` is faster for some convolutions."""


class Clock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether emulated time passes on the wall or is computed."""

    kind: Literal["wall", "virtual"] = "virtual"
    workers: int | None = None
    """Virtual clock: processes that do the training; default one a core."""
    time_scale: float | Literal["auto"] = "auto"
    """Wall clock: wall seconds per emulated second; ``auto`` is 1, or more if the host is too small."""


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server talks and what it tolerates."""

    transport: Literal["shm", "wire"] = "shm"
    update_format: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    """How clients upload their numbers: 16 bits halve the bytes, int8 (a scale for 256) quarters them."""
    error_feedback: bool = True
    """A client adds what rounding left of its last update to its next (where updates are rounded)."""
    backend: Literal["auto", "c", "numba", "cuda", "reference"] = "auto"
    """What sums the updates: ``auto`` is ``EDGEFL_BACKEND``, else the fastest on the CPU."""
    heartbeat_s: float = 5.0
    """Wall seconds of silence after which a client that should speak is held to be hung."""

    @property
    def kernel_backend(self) -> str | None:
        """The back end as the kernels take it."""
        return None if self.backend == "auto" else self.backend


class Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run ends at the first of these that is reached."""

    versions: int | None = None
    trips: int | None = None
    emulated_s: float | None = None
    wall_s: float | None = None
    accuracy: float | None = None


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often the global model is measured on the server's test examples."""

    every_versions: int = 10
    max_examples: int | None = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often the run can be resumed from."""

    every_s: float = 30.0
    """Wall seconds between checkpoints, or more where they would take above 5% of the time; one is always
    written at the end and on Ctrl-C."""


class Experiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One experiment.

    >>> from edgefl import Experiment
    >>> Experiment(fleet={"devices": {"pixel-3a": 8}}).training.batch_size
    32
    """

    fleet: Fleet
    name: str = "experiment"
    seed: int = 0
    data: Data = Data()
    model: Model = Model()
    training: Training = Training()
    strategy: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "fedbuff"})
    """``name`` (a built-in, or ``"my_module:Mine"``) and that strategy's own fields."""
    clock: Clock = Clock()
    server: Server = Server()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    stop: Stop = Stop()
