"""The core's input (events) and output (actions) as plain data.

Times are in emulated seconds since the start of the run. The journal stores every event, so a run can be
replayed through the core.
"""

from __future__ import annotations

import msgspec

from edgefl.strategies.base import Until, VectorSum


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """A client is connected and idle."""

    client: int
    at_s: float


class Left(msgspec.Struct, frozen=True, tag="left"):
    """A client disconnected: it went offline, or the run was interrupted.

    With differential privacy, the causes of this event must not depend on client data: they are departures
    that the experiment declares, and interruptions of the run.
    """

    client: int
    at_s: float
    reason: str
    finishes: bool = False
    """True if the client finishes its current task before it disconnects."""


class Died(msgspec.Struct, frozen=True, tag="died"):
    """A client's process exited or was killed, or the client's training killed worker processes.

    The core returns `Rejoin` or `Drop`; `edgefl.core.deaths.consequence` decides whether the client's task is
    lost.
    """

    client: int
    at_s: float
    reason: str
    declared: bool = False
    """True for a death drawn at random because the experiment sets ``churn.die_per_trip``."""
    task: int | None = None
    """Under the virtual clock, the task whose training killed worker processes; None for other deaths."""


class Arrived(msgspec.Struct, frozen=True, tag="arrived", omit_defaults=True, repr_omit_defaults=True):
    """A client's update is complete in its slot of the parameter buffer."""

    client: int
    task: int
    base_version: int
    examples: int
    steps: int
    loss: float
    at_s: float
    norm: float | None = None
    """L2 norm of the update; inf if the update is not finite, None if the strategy does not measure it."""
    distance: float = 0.0
    """L2 distance from the base version to the current version; see `edgefl.strategies.Update`."""
    failed: str = ""
    """With local noise, the reason why the update consists of noise only; empty for a normal update."""
    allowed: int | None = None
    """Number of steps that were possible before the trip's end, if training made fewer; otherwise None."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A task ended without an update: it was cancelled, its training raised an error, or its process died.

    With differential privacy, the trip counts as a zero update that arrives when the client's update would
    have arrived, because a failure may depend on the client's data.
    """

    client: int
    task: int
    at_s: float
    reason: str


class Summed(msgspec.Struct, frozen=True, tag="summed", omit_defaults=True, repr_omit_defaults=True):
    """The server has carried out a ``Sum``.

    ``bad`` lists the tasks whose updates are not finite or were altered. The new version was published only
    if this list is empty.
    """

    version: int
    at_s: float
    bad: tuple[int, ...] = ()
    clip_norm: float | None = None
    """Clipping norm for the next version, if this norm adapts to a quantile of the updates' norms."""
    salt: str = ""
    """Digest of the summed updates, if noise was drawn with a secret key (`edgefl.privacy.TreeNoise`)."""
    zero: tuple[int, ...] = ()
    """With differential privacy, tasks whose updates were not finite or were altered; they count as zeros."""


class Unmasking(msgspec.Struct, frozen=True, tag="unmasking"):
    """The clients and the server exchange messages until ``until_s`` to compute the sum for ``version``.

    If ``until_s`` equals ``at_s``, too few clients are online, and the sum waits for them.
    """

    version: int
    at_s: float
    until_s: float


class Ticked(msgspec.Struct, frozen=True, tag="ticked"):
    """The time of a ``Wake`` has been reached."""

    at_s: float


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    """A version was evaluated on the test examples. A metric without a value is NaN or absent."""

    version: int
    at_s: float
    accuracy: float
    metrics: dict[str, float] = {}
    """The loss, and the metrics that the user's evaluation function returned."""


class Halted(msgspec.Struct, frozen=True, tag="halted"):
    """The server ends the run, for example because the time limit ``stop.wall_s`` has passed."""

    at_s: float
    reason: str


Event = Joined | Left | Died | Arrived | Failed | Summed | Unmasking | Ticked | Evaluated | Halted


class Cohort(msgspec.Struct, frozen=True, array_like=True):
    """The clients of a closed round, that is, a round that no other client can join."""

    first_task: int
    """ID of the first client's task; it also identifies the round."""
    clients: tuple[int, ...]


class Train(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """Reserve a slot for a client's update, and let the client download ``version``, train and upload."""

    client: int
    task: int
    version: int
    trip: int
    """Number of this client's earlier tasks; it selects the random stream from which batches are drawn."""
    until: Until | None = None
    """End of training; None if it ends after the number of steps that ``[training]`` sets."""
    cohort: Cohort | None = None
    """The clients of this round, if the strategy's rounds are closed (`Strategy.closed`); else None."""


class Revoke(msgspec.Struct, frozen=True):
    """Cancel a client's task. ``Failed`` then follows, or ``Arrived`` if the client has just finished."""

    client: int
    task: int


class Rejoin(msgspec.Struct, frozen=True):
    """Restart a client that died; it may join the run again at or after the time ``at_s``."""

    client: int
    at_s: float


class Drop(msgspec.Struct, frozen=True):
    """Drop a client that died, so that it never joins again.

    ``reason`` is empty if the fleet drops every client that dies.
    """

    client: int
    reason: str


class Sum(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """Compute a version: base_scale · model + Σ_k weights[k] · update[tasks[k]], then the server optimiser.

    The event ``Summed`` follows.
    """

    version: int
    tasks: tuple[int, ...]
    weights: tuple[float, ...]
    base_scale: float = 1.0
    parts: dict[str, VectorSum] = {}
    """Sums for auxiliary vectors, keyed by the vector's name; each sum has one weight per task."""
    clip_norm: float | None = None
    """Clipping norm of the updates, for differential privacy; None without it."""
    from_s: float | None = None
    """Time at which the exchange of messages for this sum ends (`Unmasking`); None if none has begun."""


class Release(msgspec.Struct, frozen=True):
    """Free the slot of a task whose update is no longer needed.

    ``fate`` is ``applied``, ``discarded`` (the update was valid, but the strategy did not use it),
    ``dropped`` (the update was bad) or ``lost`` (there was no update).
    """

    task: int
    fate: str
    reason: str = ""


class Evaluate(msgspec.Struct, frozen=True):
    """Evaluate ``version`` on the test examples."""

    version: int


class Wake(msgspec.Struct, frozen=True):
    """Send the event ``Ticked`` to the core at the time ``at_s``."""

    at_s: float


class Finish(msgspec.Struct, frozen=True):
    """The run is over."""

    reason: str


Action = Train | Revoke | Rejoin | Drop | Sum | Release | Evaluate | Wake | Finish

event_encoder = msgspec.msgpack.Encoder()
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
