"""Messages between the server and its clients, and the only place that parses bytes from a socket.

A message is one header frame (msgpack, a tagged array) and, for the kinds that carry numbers, one payload
frame. ARCHITECTURE.md says who sends which.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Literal, TypeVar

import msgspec

from edgefl.devices.condition import Condition
from edgefl.devices.plan import End
from edgefl.errors import WireError

MAX_HEADER_BYTES = 64 * 1024
MAX_COUNT = 10**12
"""Most examples, steps or right answers that a message may declare."""

# Bounds that the decoder itself holds messages to, natively: the record is a database of 64-bit numbers, and
# figures that are not finite would poison it.
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]
Metrics = Annotated[dict[Annotated[str, msgspec.Meta(max_length=32)], float], msgspec.Meta(max_length=16)]
"""Figures of the user's own functions, by name; NaN for one of training that is not finite."""

T = TypeVar("T")


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Fields are positional on the wire: short, and one that is missing and has no default is an error."""


class Ready(_Message, frozen=True, tag=1):
    peer: int
    epoch: int
    role: Literal["client", "worker", "evaluator"]
    password: str


class Beat(_Message, frozen=True, tag=2):
    pass


class Chunk(_Message, frozen=True, tag=3):
    task: int
    slot: int
    offset: int


class Spent(_Message, frozen=True, tag=21):
    """One phase of a trip in emulated seconds: what the profile declares, what the clock read."""

    declared_s: Amount
    achieved_s: Amount


class Done(_Message, frozen=True, tag=4):
    client: int
    task: int
    slot: int
    trained_version: int
    examples: Count
    steps: Count
    loss: float
    checksum: Checksum
    work_s: Amount
    trip: Spent
    """From the receipt of the task to the end of the upload."""
    down: Spent
    compute: Spent
    up: Spent
    lateness_s: Amount
    cpu_s: Amount
    peak_mib: Amount
    """Memory that the training needs at once, as predicted from the trace of its step."""
    process_grew_mib: Amount
    """Growth of the client's process until then; NaN under the virtual clock, which sends no such message."""
    delay: Spent
    """One-way delays of the download and the upload, in all; part of both."""
    metrics: Metrics


class Gone(_Message, frozen=True, tag=5):
    client: int
    task: int
    reason: str
    order: int = 0
    """The order's number, as in `Task`."""


class TaskResult(_Message, frozen=True, tag=23):
    """One computed task of a worker."""

    task: int
    trained_version: int
    steps: Count
    loss: float
    checksum: Checksum
    cpu_s: Amount
    peak_mib: Amount
    metrics: Metrics
    counted: Count | None = None
    """The examples that it is weighed by, where they are not all that its client holds."""
    order: int = 0
    """The order's number, as in `Task`."""


class Trained(_Message, frozen=True, tag=7):
    results: list[TaskResult]


class ClientScores(_Message, frozen=True, tag=31):
    """The clients that a version was measured on, and by client its loss and accuracy on their own examples.

    ``personal``: after the client's training. Empty lists: nobody asks, or targets are no classes.
    """

    clients: list[Count]
    loss: list[float]
    accuracy: list[float]
    personal_loss: list[float]
    personal_accuracy: list[float]


NO_SCORES = ClientScores([], [], [], [], [])


class Assessed(_Message, frozen=True, tag=6):
    version: int
    loss: float
    accuracy: float
    """NaN where nothing measures it."""
    correct: list[Count]
    total: list[Count]
    metrics: Metrics
    """The measures of the user's own function."""
    clients: ClientScores
    problem: str
    """The reason why the user's function measured nothing."""


class Cut(_Message, frozen=True, tag=22):
    """A task that ends wherever its training is: see `edgefl.strategies.base.Until`."""

    end: End
    gain: float
    """By how much the difference to the model that it started from is enlarged."""
    per_step: bool


class Task(_Message, frozen=True, tag=11):
    client: int
    task: int
    trip: int
    version: int
    entry: int
    slot: int
    cut: Cut | None
    condition: Condition | None
    """The device's state when the trip starts, where that changes over time."""
    wait_s: float = 0.0
    """Emulated seconds from the receipt of the task until the trip starts."""
    order: int = 0
    """The number of the order to a worker: it begins none that is older than its last, and what it says of a
    task counts if it says it of the last order for that."""

    @property
    def number(self) -> int:
        """Orders to one peer have rising numbers: what comes twice, or overtaken, is not carried out."""
        return self.task


class Cancel(_Message, frozen=True, tag=12):
    task: int


class Tasks(_Message, frozen=True, tag=15):
    tasks: Annotated[list[Task], msgspec.Meta(min_length=1)]
    """All of one order."""

    @property
    def number(self) -> int:
        return self.tasks[0].order


class Withdraw(_Message, frozen=True, tag=16):
    tasks: list[int]


class Assess(_Message, frozen=True, tag=13):
    version: int
    entry: int

    @property
    def number(self) -> int:
        return self.version


class Bye(_Message, frozen=True, tag=14):
    pass


FromClient = Ready | Beat | Chunk | Done | Gone | Trained | Assessed
FromServer = Task | Cancel | Tasks | Withdraw | Assess | Bye

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def encode(message: FromClient | FromServer) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_from_client(header: bytes | memoryview) -> FromClient:
    """Decodes a message of a client. Raises `WireError` for anything that is not one of its messages.

    >>> decode_from_client(encode(Ready(peer=3, epoch=1, role="client", password="")))
    Ready(peer=3, epoch=1, role='client', password='')
    >>> decode_from_client(b"rubbish")
    Traceback (most recent call last):
        ...
    edgefl.errors.WireError: not a message: ...
    """
    message = _decode(_from_client, header)
    if isinstance(message, Done | Trained):
        for said in (message,) if isinstance(message, Done) else message.results:
            if math.isinf(said.loss) or (said.metrics and any(map(math.isinf, said.metrics.values()))):
                raise WireError("a loss or metric that is infinite, a number or NaN is allowed")
    elif isinstance(message, Assessed):
        pairs = zip(message.correct, message.total, strict=False)
        if len(message.correct) != len(message.total) or not all(right <= total for right, total in pairs):
            raise WireError(f"the assessment of version {message.version} has impossible counts")
        clients, *of_clients = msgspec.structs.astuple(message.clients)
        if any(len(values) not in (0, len(clients)) for values in of_clients):
            raise WireError(f"the assessment of version {message.version} has figures of other clients")
        figures = [message.accuracy, *message.metrics.values(), *chain.from_iterable(of_clients)]
        if any(map(math.isinf, figures)) or message.accuracy < 0 or message.accuracy > 1:
            raise WireError(f"the assessment of version {message.version} has impossible figures")
    return message


def decode_from_server(header: bytes | memoryview) -> FromServer:
    """Decodes a message of the server. Raises `WireError` for anything that is not one of its messages."""
    return _decode(_from_server, header)


def _decode(decoder: msgspec.msgpack.Decoder[T], header: bytes | memoryview) -> T:
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"a header of {len(header)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, RecursionError, OverflowError, ValueError) as error:
        raise WireError(f"not a message: {error}") from error


def payload(frames: Sequence[bytes | memoryview]) -> bytes | memoryview:
    """The payload of a message that must have one, of its ``frames`` behind the header."""
    if len(frames) != 1:
        raise WireError(f"a message with {len(frames)} frames of payload where one is due")
    return frames[0]
