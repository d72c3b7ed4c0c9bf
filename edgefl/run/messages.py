"""Messages between the server and its clients. No other module parses bytes from a socket.

Both clocks use the same messages. A client under the wall clock receives one task in each order and reports
the times that it has measured; a worker under the virtual clock performs the tasks of many clients.

=============  ======================================  ==================================================
server sends   client or worker answers                evaluator answers
=============  ======================================  ==================================================
`Tasks`        `Chunk`… (wire), `Trained` or `Gone`
`Withdraw`     `Gone` (or a `Trained` sent before)
`Assess`                                               `Assessed`
`Bye`          exits                                   exits
=============  ======================================  ==================================================

Every peer sends `Ready` first, and `Beat` while it has nothing else to send. A message is one header frame
(msgpack, a tagged array) and, if it carries a model or a part of an update, one payload frame.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Literal, TypeVar

import msgspec

from edgefl.core.events import Cohort
from edgefl.devices.condition import Condition
from edgefl.devices.plan import End
from edgefl.errors import WireError

MAX_HEADER_BYTES = 64 * 1024
MAX_COUNT = 10**12
"""Maximum number of examples, steps or correct answers in a message."""

# Ranges that the decoder checks, because the record stores only finite 64-bit numbers.
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]
Metrics = Annotated[dict[Annotated[str, msgspec.Meta(max_length=32)], float], msgspec.Meta(max_length=16)]
"""Results of the user's own functions, keyed by name; NaN stands for a training metric that is not finite."""

T = TypeVar("T")


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. Fields are positional on the wire; a missing field without a default is an
    error."""


class Ready(_Message, frozen=True, tag=1):
    """Client, worker or evaluator → server: this process is connected and ready for work."""

    peer: int
    epoch: int
    role: Literal["client", "worker", "evaluator"]
    password: str


class Beat(_Message, frozen=True, tag=2):
    """Client, worker or evaluator → server: heartbeat."""


class Chunk(_Message, frozen=True, tag=3):
    """Client or worker → server: the payload is a part of an update (only with ``transport = "wire"``)."""

    task: int
    slot: int
    offset: int


class Spent(_Message, frozen=True, tag=21):
    """Duration of one phase of a trip in emulated seconds, as planned from the profile and as measured."""

    declared_s: Amount
    achieved_s: Amount


class TripTimes(_Message, frozen=True, tag=4):
    """The times of one trip in emulated seconds.

    Under the wall clock, the client measures them; under the virtual clock, they are the planned times.
    """

    work_s: Amount
    down: Spent
    compute: Spent
    up: Spent
    delay: Spent
    """Sum of the one-way delays of download and upload, which ``down`` and ``up`` include."""
    lateness_s: Amount = 0.0
    process_grew_mib: Amount | None = None
    """Memory growth of the client's process so far, in MiB; None under the virtual clock."""
    busy_s: Amount = 0.0
    """Planned seconds of computing at full power (`TripPlan.busy_s`)."""
    own_pace: bool = False
    """True if the client is a real device, whose speed is not controlled (`Spawn.as_is`)."""

    @property
    def trip(self) -> Spent:
        """The planned and the measured time from the receipt of the task to the end of the upload."""
        down, compute, up = self.down, self.compute, self.up
        declared_s = down.declared_s + compute.declared_s + up.declared_s
        return Spent(declared_s, down.achieved_s + compute.achieved_s + up.achieved_s)


class Gone(_Message, frozen=True, tag=5):
    """Client or worker → server: the task is returned without an update."""

    client: int
    task: int
    reason: str
    order: int = 0
    """Sequence number of the order to which the task belongs; see `Task.order`."""


class TaskResult(_Message, frozen=True, tag=23):
    """Result of one task whose update is complete in its slot."""

    task: int
    trained_version: int
    steps: Count
    loss: float
    checksum: Checksum
    cpu_s: Amount
    peak_mib: Amount
    """Peak memory of training in MiB, predicted from the trace of a step."""
    metrics: Metrics
    counted: Count | None = None
    """Number of examples by which the update is weighted; None stands for all examples of the client."""
    failed: str = ""
    """Reason why the update consists only of local noise, for the record; empty if it does not."""
    order: int = 0
    """Sequence number of the order to which the task belongs; see `Task.order`."""
    times: TripTimes | None = None
    """Times that a client has measured; None from a worker, which computes at full speed."""
    clipped: Count = 0
    """Number of elements of the update that ``server.secure.clip`` limited."""
    allowed: Count | None = None
    """Number of steps that were possible before the trip's end, if training made fewer; otherwise None."""

    def measured(self) -> TripTimes:
        """Return the measured times. Raises `WireError` if they are missing."""
        if self.times is None:
            raise WireError(f"the update of task {self.task} lacks the times of its trip")
        return self.times


class Trained(_Message, frozen=True, tag=7):
    """Client or worker → server: the updates of these tasks are complete in their slots."""

    results: list[TaskResult]


class ClientScores(_Message, frozen=True, tag=31):
    """Loss and accuracy of a version on the held-out examples of ``clients``, one number per client.

    The ``personal`` values are measured after fine-tuning on the client's training examples. A list is empty
    if the experiment does not request it; the lists of accuracies are also empty if targets are not classes.
    """

    clients: list[Count]
    loss: list[float]
    accuracy: list[float]
    personal_loss: list[float]
    personal_accuracy: list[float]


NO_SCORES = ClientScores([], [], [], [], [])


class Assessed(_Message, frozen=True, tag=6):
    """Evaluator → server: results of the evaluation of a version."""

    version: int
    loss: float
    accuracy: float
    """Accuracy from 0 to 1; NaN if it is not measured."""
    correct: list[Count]
    total: list[Count]
    metrics: Metrics
    """Metrics from the user's evaluation function."""
    clients: ClientScores
    problem: str
    """Reason why the evaluation failed in the user's function, model or loss; empty if it did not fail."""


class Cut(_Message, frozen=True, tag=22):
    """End of a task that stops at a given time or after a given number of steps; see
    `edgefl.strategies.base.Until`."""

    end: End
    gain: float
    """Factor by which the update (the difference from the base model) is multiplied."""
    per_step: bool


class Task(_Message, frozen=True, tag=11):
    """One task of an order: train this version and put the update into this slot."""

    client: int
    task: int
    trip: int
    version: int
    entry: int
    slot: int
    cut: Cut | None
    condition: Condition | None
    """State of the device when the trip starts; None if the state does not change over time."""
    wait_s: float = 0.0
    """Emulated seconds from the receipt of the task until the trip starts."""
    cohort: Cohort | None = None
    """The task's round and the clients in it, if no client can join the round later; otherwise None."""
    order: int = 0
    """Sequence number, which increases with each order to a peer. The peer ignores repeated and outdated
    orders, and the server ignores results that do not belong to the task's latest order."""


class Tasks(_Message, frozen=True, tag=15):
    """Server → client or worker: carry out this order; with ``transport = "wire"``, the model is the
    payload."""

    tasks: Annotated[list[Task], msgspec.Meta(min_length=1)]
    """A client receives one task at a time. The tasks of a worker may belong to different clients."""

    @property
    def number(self) -> int:
        return self.tasks[0].order


class Withdraw(_Message, frozen=True, tag=16):
    """Server → client or worker: these tasks are no longer needed. The peer returns each with `Gone`, unless
    its update is already complete."""

    tasks: list[int]


class Assess(_Message, frozen=True, tag=13):
    """Server → evaluator: evaluate this version."""

    version: int
    entry: int

    @property
    def number(self) -> int:
        return self.version


class Bye(_Message, frozen=True, tag=14):
    """Server → client, worker or evaluator: exit."""


FromClient = Ready | Beat | Chunk | Gone | Trained | Assessed
FromServer = Tasks | Withdraw | Assess | Bye

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def encode(message: FromClient | FromServer) -> bytes:
    """Return the header frame of a message."""
    return _encoder.encode(message)


def decode_from_client(header: bytes | memoryview) -> FromClient:
    """Decode a message from a peer to the server. Raises `WireError` if it is not a valid message.

    >>> decode_from_client(encode(Ready(peer=3, epoch=1, role="client", password="")))
    Ready(peer=3, epoch=1, role='client', password='')
    >>> decode_from_client(b"rubbish")
    Traceback (most recent call last):
        ...
    edgefl.errors.WireError: not a message: ...
    """
    message = _decode(_from_client, header)
    if isinstance(message, Trained):
        for result in message.results:
            if math.isinf(result.loss) or (result.metrics and any(map(math.isinf, result.metrics.values()))):
                raise WireError("a loss or metric is infinite; it must be finite or NaN")
    elif isinstance(message, Assessed):
        pairs = zip(message.correct, message.total, strict=False)
        if len(message.correct) != len(message.total) or not all(right <= total for right, total in pairs):
            raise WireError(f"the assessment of version {message.version} has impossible counts")
        clients, *of_clients = msgspec.structs.astuple(message.clients)
        if any(len(values) not in (0, len(clients)) for values in of_clients):
            raise WireError(f"the assessment of version {message.version} has a wrong number of scores")
        figures = [message.accuracy, *message.metrics.values(), *chain.from_iterable(of_clients)]
        if any(map(math.isinf, figures)) or message.accuracy < 0 or message.accuracy > 1:
            raise WireError(f"the assessment of version {message.version} has values out of range")
    return message


def decode_from_server(header: bytes | memoryview) -> FromServer:
    """Decode a message from the server. Raises `WireError` if it is not a valid message."""
    return _decode(_from_server, header)


def _decode(decoder: msgspec.msgpack.Decoder[T], header: bytes | memoryview) -> T:
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"the header has {len(header)} bytes, but at most {MAX_HEADER_BYTES} are allowed")
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, RecursionError, OverflowError, ValueError) as error:
        raise WireError(f"not a message: {error}") from error


def payload(frames: Sequence[bytes | memoryview]) -> bytes | memoryview:
    """Return the payload of a message. ``frames`` are the frames after the header; there must be exactly
    one."""
    if len(frames) != 1:
        raise WireError(f"a message must have 1 payload frame (got {len(frames)})")
    return frames[0]
