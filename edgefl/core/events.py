"""The core's input (events) and output (actions): plain data, no behaviour.

Events are journaled as they are, so a run can be replayed through the core. All times are emulated
seconds since the start of the run.
"""

from __future__ import annotations

import msgspec

from edgefl.strategies.base import Until, VectorSum


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """A client is connected and idle."""

    client: int
    at_s: float


class Left(msgspec.Struct, frozen=True, tag="left"):
    """A client is gone: its process ended, it went offline, it was dropped, or the run was interrupted.

    A private run emits it only for causes that are independent of client data: a departure that the
    experiment declares, or the interruption of the run.
    """

    client: int
    at_s: float
    reason: str
    finishes: bool = False
    """It finishes the task that it has before it goes."""


class Arrived(msgspec.Struct, frozen=True, tag="arrived", omit_defaults=True, repr_omit_defaults=True):
    """A finished update lies in its slot."""

    client: int
    task: int
    base_version: int
    examples: int
    steps: int
    loss: float
    at_s: float
    norm: float | None = None
    """`Update.norm`, of a strategy that measures it; infinite for one that is not finite."""
    distance: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A task ended without an update: it was cancelled, its training raised, or its process ended.

    In a private run a failure may depend on the client's data, so the trip takes part with an update of zero,
    at the instant at which its update would have arrived.
    """

    client: int
    task: int
    at_s: float
    reason: str


class Summed(msgspec.Struct, frozen=True, tag="summed", omit_defaults=True, repr_omit_defaults=True):
    """The server has carried out a ``Sum``. ``bad`` are tasks whose update is not finite or was altered;
    with any of them the version was not published."""

    version: int
    at_s: float
    bad: tuple[int, ...] = ()
    clip_norm: float | None = None
    """The norm that the next version's updates are clipped to, where it follows a quantile."""
    salt: str = ""
    """The name of what was summed, where noise of a secret key was added: see `edgefl.privacy.TreeNoise`."""
    zero: tuple[int, ...] = ()
    """Tasks of a private step whose update is not finite or was altered: it was summed as zero."""


class Ticked(msgspec.Struct, frozen=True, tag="ticked"):
    """A time asked for by ``Wake`` has come."""

    at_s: float


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    """``version`` was measured on the test examples; a measure that it does not have is NaN, or not there."""

    version: int
    at_s: float
    accuracy: float
    metrics: dict[str, float] = {}
    """The loss, and what the user's own function measures."""


class Halted(msgspec.Struct, frozen=True, tag="halted"):
    """The server ends the run for a reason of its own, such as ``wall_s``."""

    at_s: float
    reason: str


Event = Joined | Left | Arrived | Failed | Summed | Ticked | Evaluated | Halted


class Train(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """Start ``client`` on ``task``: download ``version``, train, upload. Leases a slot."""

    client: int
    task: int
    version: int
    trip: int
    """The number of tasks that this client was given before: names the random stream of its batches."""
    until: Until | None = None
    """The training ends at an instant, wherever it is."""


class Revoke(msgspec.Struct, frozen=True):
    """Tell ``client`` to give ``task`` up; it answers with ``Failed`` or, if it had finished, ``Arrived``."""

    client: int
    task: int


class Sum(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """Make ``version`` = base_scale · model + Σ weights[k] · update[tasks[k]], through the server optimiser.
    Answered by ``Summed``."""

    version: int
    tasks: tuple[int, ...]
    weights: tuple[float, ...]
    base_scale: float = 1.0
    parts: dict[str, VectorSum] = {}
    """Steps of vectors beside the model, with a weight for each of ``tasks``."""
    clip_norm: float | None = None
    """The norm that the updates are clipped to, in a private run."""


class Release(msgspec.Struct, frozen=True):
    """The task's update is not needed any more: free its slot. ``fate`` is ``applied``, ``discarded``
    (a valid update that the strategy does not use), ``dropped`` (bad) or ``lost`` (its client is gone)."""

    task: int
    fate: str
    reason: str = ""


class Evaluate(msgspec.Struct, frozen=True):
    """Measure ``version`` on the test examples."""

    version: int


class Wake(msgspec.Struct, frozen=True):
    """Send ``Ticked`` at ``at_s``."""

    at_s: float


class Finish(msgspec.Struct, frozen=True):
    """The run is over."""

    reason: str


Action = Train | Revoke | Sum | Release | Evaluate | Wake | Finish

event_encoder = msgspec.msgpack.Encoder()
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
