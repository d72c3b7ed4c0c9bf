"""Fuzzes the message codec: it raises only `WireError`, and accepts only numbers that the record can hold.

A seeded generator makes the cases of each test. ``EDGEFL_FUZZ_CASES`` sets their number.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from edgefl.errors import WireError
from edgefl.run import messages
from tests.wire_samples import ALL

CASES = int(os.environ.get("EDGEFL_FUZZ_CASES", "30000"))
"""Number of cases for a generator with weight 1. `WAYS` contains the weights."""

SEEDS = [messages.encode(message) for message in ALL]
EDGES: list[Any] = [
    0, 1, -1, 127, 128, 255, 256, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0,
    1e308, 5e-324, math.nan, math.inf, -math.inf, None, True, False, "", "client", "\x00", "ü" * 9, b"",
    b"\xff" * 9, (), ((),), {}, {"a": ()},
]  # fmt: skip


def noise(draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(80))


def truncation(draw: random.Random) -> bytes:
    seed = draw.choice(SEEDS)
    return seed[draw.randrange(len(seed)) :] if draw.random() < 0.3 else seed[: draw.randrange(len(seed))]


def mutation(draw: random.Random) -> bytes:
    data = bytearray(draw.choice(SEEDS))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at] = draw.randrange(256)
            case 2:
                data[at:at] = noise(draw)[:9]
            case 3 if len(data) > 1:
                del data[at : at + draw.randint(1, min(8, len(data) - 1))]
            case _:
                data += data[: at + 1]
    return bytes(data)


def value(draw: random.Random, depth: int = 0) -> Any:
    if depth < 4 and draw.random() < 0.3:
        items = [value(draw, depth + 1) for _ in range(draw.randrange(5))]
        return items if draw.random() < 0.7 else {str(place): item for place, item in enumerate(items)}
    return draw.choice(EDGES) if draw.random() < 0.8 else draw.randbytes(5)


def wrong_fields(draw: random.Random) -> bytes:
    """Return a well-formed message with some fields replaced, dropped or added."""
    fields = msgspec.msgpack.decode(draw.choice(SEEDS))
    for _ in range(draw.randint(1, 3)):
        place, part = draw.randrange(len(fields)), fields
        while isinstance(part[place], list) and draw.random() < 0.7 and part[place]:
            part, place = part[place], draw.randrange(len(part[place]))
        part[place] = value(draw) if part is fields else draw.choice(EDGES)
    if draw.random() < 0.1:
        fields.append(value(draw))
    if draw.random() < 0.1:
        fields.pop()
    return msgspec.msgpack.encode(fields)


def nesting(draw: random.Random) -> bytes:
    opener = draw.choice([b"\x91", b"\x81", b"\xdc\0\1", b"\xdd\0\0\0\1", b"\xde\0\1\1", b"\x92\x04"])
    start = draw.choice([b"", b"\x95\x05", b"\x96\x06\x01\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00"])
    return (start + opener * draw.randint(1, 20_000))[: messages.MAX_HEADER_BYTES + draw.randrange(2)]


def huge_claims(draw: random.Random) -> bytes:
    """Return a message with a length prefix that points far beyond the end of the message."""
    seed = draw.choice(SEEDS)
    kind = draw.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
    claim = kind + draw.choice([2**32 - 1, 2**31, 2**24]).to_bytes(4, "big")
    at = draw.randrange(len(seed) + 1)
    return seed[:at] + claim + noise(draw)


WAYS: dict[Callable[[random.Random], bytes], float] = {
    noise: 0.15,
    truncation: 0.1,
    mutation: 0.25,
    wrong_fields: 0.2,
    nesting: 0.005,
    huge_claims: 0.025,
}


def check(header: bytes) -> bool:
    """Return True if a decoder accepts the bytes. Each accepted message must be valid in all fields."""
    taken = False
    for decode in (messages.decode_from_client, messages.decode_from_server):
        try:
            message = decode(header)
        except WireError as error:
            assert "\n" not in str(error)
            continue
        taken = True
        assert type(message).__module__ == "edgefl.run.messages"
        assert decode(messages.encode(message)) == message or "nan" in repr(message)
        if isinstance(message, messages.Trained):
            for result in message.results:
                bounded(result)
                assert not math.isinf(result.loss)
        if isinstance(message, messages.Assessed):
            assert len(message.correct) == len(message.total)
    return taken


def bounded(result: messages.TaskResult) -> None:
    assert 0 <= result.steps <= messages.MAX_COUNT
    assert 0 <= (result.counted or 0) <= messages.MAX_COUNT
    assert 0 <= result.checksum < 2**64
    measured = [result.cpu_s, result.peak_mib]
    if (times := result.times) is not None:
        spent = map(msgspec.structs.astuple, (times.trip, times.down, times.compute, times.up, times.delay))
        measured += [
            times.work_s,
            times.busy_s,
            times.lateness_s,
            times.process_grew_mib or 0.0,
            *itertools.chain(*spent),
        ]
    assert all(figure >= 0.0 and math.isfinite(figure) for figure in measured)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_codec_raises_nothing_but_wire_errors(way: Callable[[random.Random], bytes]) -> None:
    draw = random.Random(way.__name__)
    cases = max(1, round(CASES * WAYS[way]))
    taken = 0
    for _ in range(cases):
        header = way(draw)
        try:
            taken += check(header)
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__} on {header[:200].hex()}") from error
    assert taken < cases
    assert taken or way not in (mutation, wrong_fields)  # not all were refused at the first byte
