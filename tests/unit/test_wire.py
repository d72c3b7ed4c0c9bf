"""The protocol's messages: each one there and back, and every byte string that is none of them refused."""

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
def test_a_message_is_heard_by_the_side_it_is_for_and_by_no_other(message: Any) -> None:
    there, other = decode_from_client, decode_from_server
    if message in FROM_SERVER:
        there, other = other, there
    assert there(encode(message)) == there(memoryview(encode(message))) == message
    refused(other, encode(message))


def test_every_message_of_the_protocol_is_in_these_tests() -> None:
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
    """The report of a client whose result or times differ from the sample in these fields."""
    timed = {name: changed.pop(name) for name in list(changed) if name in TIMES.__struct_fields__}
    times = msgspec.structs.replace(TIMES, **timed)
    return encode(messages.Trained([msgspec.structs.replace(DONE, **{"times": times, **changed})]))


def test_a_loss_may_be_nan_because_training_may_diverge() -> None:
    trained = decode_from_client(reported(loss=math.nan))
    assert isinstance(trained, messages.Trained)
    assert math.isnan(trained.results[0].loss)


def test_a_trip_lasts_as_long_as_its_phases_and_is_measured_or_refused() -> None:
    assert TIMES.trip == messages.Spent(1.0 + 1.5 + 0.5, 1.25 + 1.5 + 0.75)
    assert DONE.measured() == TIMES
    with pytest.raises(WireError, match="the update of task 40 lacks the times of its trip"):
        msgspec.structs.replace(DONE, times=None).measured()


def test_headers_are_small() -> None:
    assert all(len(encode(message)) < 200 for message in ALL)


def refused(decode: Callable[[bytes], Any], header: bytes) -> str:
    with pytest.raises(WireError) as caught:
        decode(header)
    text = str(caught.value)
    assert "\n" not in text
    return text


@each
def test_every_truncation_and_every_trailing_byte_is_refused(message: Any) -> None:
    whole = encode(message)
    for decode in (decode_from_client, decode_from_server):
        for end in range(len(whole)):
            refused(decode, whole[:end])
        for extra in (b"\x00", b"\xc1", whole):
            refused(decode, whole + extra)


@each
def test_a_field_too_few_or_too_many_is_refused(message: Any) -> None:
    decode = decode_from_client if message in FROM_CLIENT else decode_from_server
    fields = msgspec.msgpack.decode(encode(message))
    assert decode(msgspec.msgpack.encode(fields)) == message
    refused(decode, msgspec.msgpack.encode([*fields, 0]))
    for count in range(1 + sum(field.required for field in msgspec.structs.fields(message))):
        refused(decode, msgspec.msgpack.encode(fields[:count]))


@pytest.mark.parametrize("part", [DONE, TIMES, TIMES.up], ids=lambda part: type(part).__name__)
def test_so_is_one_in_a_part_of_a_result(part: Any) -> None:
    whole, fields = encode(messages.Trained([DONE])), msgspec.msgpack.decode(encode(part))
    required = sum(field.required for field in msgspec.structs.fields(part))
    for wrong in ([*fields, 0], *(fields[:count] for count in range(1 + required))):
        refused(decode_from_client, whole.replace(encode(part), msgspec.msgpack.encode(wrong)))


OTHER: list[Any] = [None, True, "7", b"7", [], [7], {}, {"a": 1}, -1, 2**64 - 1, 1e400, -0.5, math.nan]


@pytest.mark.parametrize("message", FROM_CLIENT, ids=lambda message: type(message).__name__)
def test_a_field_of_another_type_is_refused(message: Any) -> None:
    fields = msgspec.msgpack.decode(encode(message))
    for place, field in enumerate(fields):
        for value in OTHER:
            if isinstance(value, bool) or type(value) is not type(field):
                changed = [*fields[:place], value, *fields[place + 1 :]]
                if not (type(field) is float and type(value) is int):  # a whole number is a number too
                    refused(decode_from_client, msgspec.msgpack.encode(changed))


def leaves(part: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a result and of its times."""
    for field in msgspec.structs.fields(part):
        yield field.name, getattr(part, field.name)


@pytest.mark.parametrize(("name", "field"), [*leaves(DONE), *leaves(TIMES)])
def test_a_field_of_another_type_in_a_result_is_refused(name: str, field: Any) -> None:
    optional = ("counted", "times", "process_grew_mib")
    for value in OTHER:
        whole_number = type(field) is float and type(value) is int  # it is a number too
        if type(value) is not type(field) and not whole_number and not (value is None and name in optional):
            refused(decode_from_client, reported(**{name: value}))


def test_a_map_of_the_same_fields_is_no_message() -> None:
    refused(decode_from_client, msgspec.msgpack.encode({"type": 1, "peer": 3, "epoch": 1, "role": "client"}))
    refused(decode_from_client, msgspec.msgpack.encode({0: 1, 1: 3, 2: 1, 3: "client"}))


@pytest.mark.parametrize("tag", [0, 8, 21, 22, 23, -1, 2**64 - 1, "2", 2.0, None])
def test_unknown_kinds_are_refused(tag: Any) -> None:
    refused(decode_from_client, msgspec.msgpack.encode([tag, 3, 1]))
    refused(decode_from_server, msgspec.msgpack.encode([tag, 3, 1]))


NOT_MESSAGES = {
    "nothing": b"",
    "nil": b"\xc0",
    "never used": b"\xc1",
    "number": b"\x05",
    "text": b"\xa5hello",
    "bad utf-8": msgspec.msgpack.encode([5, 3, 40]).replace(b"\x93", b"\x94") + b"\xa2\xff\xfe",
    "extension": b"\xc7\x04\x01abcd",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "nested arrays": b"\x91" * messages.MAX_HEADER_BYTES,
    "nested in a field": b"\x94\x05" + b"\x91" * 60_000,
    "an array of 2³² items": b"\xdd\xff\xff\xff\xff\x02",
    "a field of 2³² items": b"\x95\x06\x01\xcb" + struct.pack(">d", 0.5) + b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("header", NOT_MESSAGES.values(), ids=NOT_MESSAGES)
def test_bytes_that_are_no_message_are_refused(header: bytes) -> None:
    refused(decode_from_client, header)
    refused(decode_from_server, header)


def test_a_header_has_a_largest_size() -> None:
    longest = encode(messages.Gone(0, 0, "x" * (messages.MAX_HEADER_BYTES - 7)))
    assert len(longest) == messages.MAX_HEADER_BYTES + 1
    text = refused(decode_from_client, longest)
    assert text == "a header of 65537 bytes, but at most 65536 are allowed"
    fits = encode(messages.Gone(0, 0, "x" * (messages.MAX_HEADER_BYTES - 8)))
    assert isinstance(decode_from_client(fits), messages.Gone)


FIGURES = [
    "work_s",
    "lateness_s",
    "cpu_s",
    "peak_mib",
    "process_grew_mib",
    "down",
    "compute",
    "up",
    "delay",
]


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9])
def test_times_and_costs_are_finite_and_not_negative(figure: str, value: float) -> None:
    if isinstance(getattr(TIMES, figure, None), messages.Spent):
        wrong: list[Any] = [messages.Spent(value, 1.0), messages.Spent(1.0, value)]
    else:
        wrong = [value]
    for field in wrong:
        text = refused(decode_from_client, reported(**{figure: field}))
        assert text.startswith("not a message: Expected `float` ")


@pytest.mark.parametrize("field", ["counted", "steps"])
@pytest.mark.parametrize("value", [-1, messages.MAX_COUNT + 1, 2**63, 2**64 - 1])
def test_counts_are_what_the_record_can_hold(field: str, value: int) -> None:
    text = refused(decode_from_client, reported(**{field: value}))
    assert text.startswith("not a message: Expected `int` ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", math.inf),
        ("loss", -math.inf),
        ("checksum", -1),
        ("metrics", {"m": math.inf}),
        ("metrics", {"m" * 33: 0.0}),
        ("metrics", dict.fromkeys(map(str, range(17)), 0.0)),
    ],
)
def test_a_loss_is_a_number_or_nan_and_a_checksum_not_negative(field: str, value: float) -> None:
    refused(decode_from_client, reported(**{field: value}))


@pytest.mark.parametrize(
    ("correct", "total"), [([1], []), ([], [1]), ([2], [1]), ([-1], [1]), ([0], [2**63]), ([1, 1], [1, 0])]
)
def test_an_assessment_has_counts_that_can_be(correct: list[int], total: list[int]) -> None:
    refused(decode_from_client, encode(messages.Assessed(7, 0.5, 0.5, correct, total, {}, SCORES, "")))


@pytest.mark.parametrize(
    "fields",
    [
        {"accuracy": 1.5},
        {"accuracy": -0.5},
        {"metrics": {"mae": math.inf}},
        {"metrics": {"m" * 33: 1.0}},
        {"metrics": {f"m{k}": 1.0 for k in range(17)}},
        {"clients": msgspec.structs.replace(SCORES, loss=[0.5])},
        {"clients": msgspec.structs.replace(SCORES, accuracy=[0.5, -math.inf])},
        {"clients": msgspec.structs.replace(SCORES, clients=[-1, 2])},
    ],
)
def test_an_assessment_has_figures_that_can_be(fields: dict[str, Any]) -> None:
    sample = next(message for message in FROM_CLIENT if isinstance(message, messages.Assessed))
    refused(decode_from_client, encode(msgspec.structs.replace(sample, **fields)))
    unknown = msgspec.structs.replace(sample, accuracy=math.nan, metrics={"mae": math.nan})
    assert isinstance(decode_from_client(encode(unknown)), messages.Assessed)


def test_a_payload_is_the_one_frame_after_the_header() -> None:
    assert messages.payload([b"numbers"]) == b"numbers"
    assert messages.payload([memoryview(b"")]) == b""


@pytest.mark.parametrize("frames", [[], [b"one", b"two"], [b""] * 100])
def test_none_or_several_payload_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError, match=rf"must have 1 payload frame \(got {len(frames)}\)"):
        messages.payload(frames)
