"""Tests of the protocol's messages: each is decoded as it was encoded, and other bytes are refused."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from edgefl.errors import WireError
from edgefl.run import messages
from edgefl.run.messages import decode_from_client, decode_from_server, encode
from tests.wire_samples import ALL, DONE, FROM_CLIENT, FROM_SERVER, SCORES, TIMES

each = pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)


@each
def test_a_message_is_decoded_only_on_the_side_that_receives_it(message: Any) -> None:
    there, other = decode_from_client, decode_from_server
    if message in FROM_SERVER:
        there, other = other, there
    assert there(encode(message)) == there(memoryview(encode(message))) == message
    refused(other, encode(message))


def test_the_samples_contain_every_message_of_the_protocol() -> None:
    kinds = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, messages._Message) and kind is not messages._Message
    }
    assert {type(message) for message in ALL} | {
        messages.Spent,
        messages.Cut,
        messages.Task,
        messages.TaskResult,
        messages.TripTimes,
        messages.ClientScores,
    } == kinds
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(tags)) == len(tags)


def reported(**changed: Any) -> bytes:
    """Return a client's report with these fields of its result or of its times changed."""
    timed = {name: changed.pop(name) for name in list(changed) if name in TIMES.__struct_fields__}
    times = msgspec.structs.replace(TIMES, **timed)
    return encode(messages.Trained([msgspec.structs.replace(DONE, **{"times": times, **changed})]))


def refused(decode: Callable[[bytes], Any], header: bytes) -> str:
    with pytest.raises(WireError) as caught:
        decode(header)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_loss_may_be_nan_because_training_may_diverge() -> None:
    trained = decode_from_client(reported(loss=math.nan))
    assert math.isnan(trained.results[0].loss)


def test_a_trip_takes_the_sum_of_its_phases_and_a_result_without_times_is_refused() -> None:
    assert TIMES.trip == messages.Spent(1.0 + 1.5 + 0.5, 1.25 + 1.5 + 0.75)
    assert DONE.measured() == TIMES
    with pytest.raises(WireError, match="the update of task 40 lacks the times of its trip"):
        msgspec.structs.replace(DONE, times=None).measured()


def test_headers_are_shorter_than_200_bytes() -> None:
    assert all(len(encode(message)) < 200 for message in ALL)


@each
def test_truncated_messages_and_trailing_bytes_are_refused(message: Any) -> None:
    whole = encode(message)
    for decode in (decode_from_client, decode_from_server):
        for end in range(len(whole)):
            refused(decode, whole[:end])
        for extra in (b"\x00", b"\xc1", whole):
            refused(decode, whole + extra)


def wrong_lengths(part: Any) -> Iterator[bytes]:
    """Yield encodings of a message, or of a part of one, with one field too many or any number too few."""
    fields = msgspec.msgpack.decode(encode(part))
    assert msgspec.msgpack.encode(fields) == encode(part)
    yield msgspec.msgpack.encode([*fields, 0])
    for count in range(1 + sum(field.required for field in msgspec.structs.fields(part))):
        yield msgspec.msgpack.encode(fields[:count])


@each
def test_a_message_with_a_field_too_few_or_too_many_is_refused(message: Any) -> None:
    decode = decode_from_client if message in FROM_CLIENT else decode_from_server
    for wrong in wrong_lengths(message):
        refused(decode, wrong)


@pytest.mark.parametrize("part", [DONE, TIMES, TIMES.up], ids=lambda part: type(part).__name__)
def test_a_part_of_a_result_with_a_field_too_few_or_too_many_is_refused(part: Any) -> None:
    whole = encode(messages.Trained([DONE]))
    for wrong in wrong_lengths(part):
        refused(decode_from_client, whole.replace(encode(part), wrong))


OTHER: list[Any] = [None, True, "7", b"7", [], [7], {}, {"a": 1}, -1, 2**64 - 1, 1e400, -0.5, math.nan]


def wrong_types(field: Any) -> list[Any]:
    """Return values whose type differs from that of the field; an integer is a valid float."""
    return [
        value
        for value in OTHER
        if type(value) is not type(field) and not (type(field) is float and type(value) is int)
    ]


@pytest.mark.parametrize("message", FROM_CLIENT, ids=lambda message: type(message).__name__)
def test_a_field_of_another_type_is_refused(message: Any) -> None:
    fields = msgspec.msgpack.decode(encode(message))
    for place, field in enumerate(fields):
        for value in wrong_types(field):
            changed = [*fields[:place], value, *fields[place + 1 :]]
            refused(decode_from_client, msgspec.msgpack.encode(changed))


@pytest.mark.parametrize("part", [DONE, TIMES], ids=lambda part: type(part).__name__)
def test_a_field_of_another_type_in_a_result_is_refused(part: Any) -> None:
    for field in msgspec.structs.fields(part):
        for value in wrong_types(getattr(part, field.name)):
            if value is not None or field.name not in ("counted", "times", "process_grew_mib"):
                refused(decode_from_client, reported(**{field.name: value}))


NOT_MESSAGES = {
    "nothing": b"",
    "nil": b"\xc0",
    "a byte that msgpack never uses": b"\xc1",
    "number": b"\x05",
    "text": b"\xa5hello",
    "invalid utf-8": msgspec.msgpack.encode([5, 3, 40]).replace(b"\x93", b"\x94") + b"\xa2\xff\xfe",
    "extension": b"\xc7\x04\x01abcd",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "nested arrays": b"\x91" * messages.MAX_HEADER_BYTES,
    "nested arrays in a field": b"\x94\x05" + b"\x91" * 60_000,
    "an array of 2³² items": b"\xdd\xff\xff\xff\xff\x02",
    "a field of 2³² items": b"\x95\x06\x01\xcb" + struct.pack(">d", 0.5) + b"\xdd\xff\xff\xff\xff",
    "a map": msgspec.msgpack.encode({"type": 1, "peer": 3, "epoch": 1, "role": "client"}),
    "a map of numbers": msgspec.msgpack.encode({0: 1, 1: 3, 2: 1, 3: "client"}),
    **{
        f"tag {tag!r}": msgspec.msgpack.encode([tag, 3, 1])
        for tag in (0, 8, 21, 22, 23, -1, 2**64 - 1, "2", 2.0, None)
    },
}


@pytest.mark.parametrize("header", NOT_MESSAGES.values(), ids=NOT_MESSAGES)
def test_bytes_that_are_not_a_message_are_refused(header: bytes) -> None:
    refused(decode_from_client, header)
    refused(decode_from_server, header)


def test_a_header_has_a_maximum_size() -> None:
    longest = encode(messages.Gone(0, 0, "x" * (messages.MAX_HEADER_BYTES - 7)))
    assert len(longest) == messages.MAX_HEADER_BYTES + 1
    text = refused(decode_from_client, longest)
    assert text == "the header has 65537 bytes, but at most 65536 are allowed"
    fits = encode(messages.Gone(0, 0, "x" * (messages.MAX_HEADER_BYTES - 8)))
    assert isinstance(decode_from_client(fits), messages.Gone)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9])
def test_times_and_costs_are_finite_and_not_negative(value: float) -> None:
    wrong = [
        (name, value) for name in ("work_s", "lateness_s", "cpu_s", "peak_mib", "process_grew_mib", "busy_s")
    ]
    for phase in ("down", "compute", "up", "delay"):
        wrong += [(phase, messages.Spent(value, 1.0)), (phase, messages.Spent(1.0, value))]
    for name, field in wrong:
        text = refused(decode_from_client, reported(**{name: field}))
        assert text.startswith("not a message: Expected `float` "), name


@pytest.mark.parametrize("field", ["counted", "steps"])
@pytest.mark.parametrize("value", [-1, messages.MAX_COUNT + 1, 2**63, 2**64 - 1])
def test_counts_are_within_the_range_of_the_record(field: str, value: int) -> None:
    text = refused(decode_from_client, reported(**{field: value}))
    assert text.startswith("not a message: Expected `int` ")


LONG_NAME, MANY = {"m" * 33: 0.0}, {f"m{k}": 1.0 for k in range(17)}


@pytest.mark.parametrize(
    "fields",
    [
        {"loss": math.inf},
        {"loss": -math.inf},
        {"checksum": -1},
        *({"metrics": metrics} for metrics in ({"m": math.inf}, LONG_NAME, MANY)),
    ],
)
def test_a_result_with_invalid_figures_is_refused(fields: dict[str, Any]) -> None:
    refused(decode_from_client, reported(**fields))


def test_an_assessment_with_invalid_figures_is_refused() -> None:
    sample = next(message for message in FROM_CLIENT if isinstance(message, messages.Assessed))
    replaced = msgspec.structs.replace
    counts = [([1], []), ([], [1]), ([2], [1]), ([-1], [1]), ([0], [2**63]), ([1, 1], [1, 0])]
    for fields in (
        *({"correct": correct, "total": total} for correct, total in counts),
        {"accuracy": 1.5},
        {"accuracy": -0.5},
        *({"metrics": metrics} for metrics in ({"mae": math.inf}, LONG_NAME, MANY)),
        {"clients": replaced(SCORES, loss=[0.5])},
        {"clients": replaced(SCORES, accuracy=[0.5, -math.inf])},
        {"clients": replaced(SCORES, clients=[-1, 2])},
    ):
        refused(decode_from_client, encode(replaced(sample, **fields)))
    unknown = replaced(sample, accuracy=math.nan, metrics={"mae": math.nan})
    assert isinstance(decode_from_client(encode(unknown)), messages.Assessed)


def test_the_payload_is_the_only_frame_after_the_header() -> None:
    assert messages.payload([b"numbers"]) == b"numbers"
    assert messages.payload([memoryview(b"")]) == b""
    for frames in ([], [b"one", b"two"], [b""] * 100):
        with pytest.raises(WireError, match=rf"must have 1 payload frame \(got {len(frames)}\)"):
            messages.payload(frames)
