"""Pickles read as data: what is let through, that nothing is ever run, and what a bomb costs."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.plain_pickle import PickleError, read_plain_pickle, write_plain_pickle


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (content, "not a whole pickle")
            for content in (
                b"", b"\x80\x02}", b"\x80\x02.", b"\x80\x02e.", b"\x80\x02h\x05.", b"\x80\x02(.",
                b"\x80\x02K\x01K\x02a.", b"\x80\x02}(K\x01u.", b"\x80\x02})cnumpy\nndarray\nb.",
                b"\x80\x02\x8a\x02\xff", b"\x80\x02T\xff\xff\xff\x7fabc.", b"(" * 5000,
            )
        ),
        (b"\x80\x02}(]K\x01u.", "a list as a key"),
        (b"\x80\x02})K\x01s.", "a tuple as a key"),
        (b"\x80\x02cnumpy\ndtype\nU\x01OK\x00K\x01\x87R.", "a numpy dtype 'O'"),
        (b"\x80\x02cnumpy\ndtype\nU\x02f8K\x00K\x01\x87R(K\x03U\x01>NNNtb.", "in byte order '>'"),
        (b"\x80\x02]\x82\x01.", "instruction EXT1"),
        (b"\x80\x02}(U\x01aU\x01bios\nsystem\n.", "instruction INST"),
        (b"\x80\x02cos\nsystem\n.", "it names os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "it names os.system"),
        (b"\x80\x02U\x01aQ.", "instruction BINPERSID"),
        (b"\x80\x05\x97.", "instruction NEXT_BUFFER"),
        (b"\x80\x02cnumpy\nfromfile\n.", "it names numpy.fromfile"),
        (b"\x80\x02cnumpy\nndarray\nK\x05\x85R.", "it calls numpy.ndarray"),
        (
            b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
            "it calls _codecs.encode",
        ),
        (b"\x80\x02K\x01K\x02\x86K\x03\x85R.", "a tuple where a _Name must be"),
    ],
)  # fmt: skip
def test_pickles_that_are_not_plain_data_are_refused(content, message):
    with pytest.raises(PickleError, match=message):
        read_plain_pickle(content)


def test_an_array_must_have_the_bytes_of_its_shape():
    content = pickle.dumps(np.zeros(5, np.uint8), protocol=2)
    assert content.count(b"K\x05\x85") == 1
    for shape in (b"K\x06\x85", b"J\xff\xff\xff\x7f\x85", b"J\xff\xff\xff\xff\x85"):
        with pytest.raises(PickleError, match="an array of shape"):
            read_plain_pickle(content.replace(b"K\x05\x85", shape))


MOST = (1 << 60) - 1

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(-MOST, MOST), inner)
        | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=20,
)


@given(plain, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_values_come_back(value, protocol):
    assert read_plain_pickle(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_numpys_numbers_come_as_pythons(protocol: int) -> None:
    numbers = [np.float64(2.5), np.float32(0.5), np.int64(-7), np.int16(-2), np.uint8(255), np.bool_(True)]
    found = read_plain_pickle(pickle.dumps(numbers, protocol=protocol))
    assert found == [2.5, 0.5, -7, -2, 255, True]
    assert [type(number) for number in found] == [float, float, int, int, int, bool]


class Calls:
    """Pickles as a call of ``what``."""

    def __init__(self, what: object, *arguments: object) -> None:
        self.call = (what, arguments)

    def __reduce__(self) -> object:
        return self.call


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_ever_called(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "owned"
    evil = (
        Calls(os.system, f"touch {target}"),
        Calls(eval, f"open({str(target)!r}, 'w')"),
        {1: {"computation": Calls(os.mkdir, str(target))}},
        [Calls(getattr, "", "upper")],
    )
    for value in evil:
        data = pickle.dumps(value, protocol=protocol)
        with pytest.raises(PickleError, match="not plain data: it names "):
            read_plain_pickle(data)
        assert not target.exists()
    pickle.loads(pickle.dumps(evil[2], protocol=protocol))
    assert target.exists(), "the pickle was harmless: this test shows nothing"


def bomb(levels: int) -> list[object]:
    """2 to the power of ``levels`` lists, written in as many bytes as there are levels."""
    nest: list[object] = []
    for _ in range(levels):
        nest = [nest, nest]
    return nest


def test_a_file_costs_what_its_length_is() -> None:
    data = pickle.dumps(bomb(200), protocol=4)
    assert len(data) < 3000
    found = read_plain_pickle(data)
    for _ in range(200):
        assert found[0] is found[1]
        found = found[0]
    key = b")" + b"2\x86" * 200  # a tuple of itself twice, two hundred deep: hashing it would never end
    with pytest.raises(PickleError, match="instruction DUP"):
        read_plain_pickle(b"\x80\x02}" + key + b"K\x01s.")
    key = b")" + b"".join(b"q%ch%c\x86" % (at, at) for at in range(200))
    with pytest.raises(PickleError, match="a tuple as a key"):
        read_plain_pickle(b"\x80\x02}" + key + b"K\x01s.")


def test_bytes_that_are_named_often_are_not_copied_often() -> None:
    text = b"X" + (100_000).to_bytes(4, "little") + b"x" * 100_000 + b"q\x01X\x06\x00\x00\x00latin1q\x02"
    encoded = b"c_codecs\nencode\nh\x01h\x02\x86R"
    assert read_plain_pickle(b"\x80\x02" + text + encoded + b".") == b"x" * 100_000
    with pytest.raises(PickleError, match="more bytes in arrays than in the file"):
        read_plain_pickle(b"\x80\x02" + text + encoded * 9 + b".")


def test_keys_that_collide_are_refused() -> None:
    same_hash = {2**61 - 1: 1, 2 * (2**61 - 1): 2}
    assert len({hash(key) for key in same_hash}) == 1
    with pytest.raises(PickleError, match="more than 60 bits as a key"):
        read_plain_pickle(pickle.dumps(same_hash))


def test_nests_without_end_are_only_held_and_a_memo_of_any_size_costs_nothing() -> None:
    own: list[object] = []
    own.append(own)
    found = read_plain_pickle(pickle.dumps(own))
    assert found[0] is found
    assert len(read_plain_pickle(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")) == 1
    assert read_plain_pickle(b"\x80\x02K\x05r\xff\xff\xff\xffj\xff\xff\xff\xff.") == 5


def test_what_is_written_any_unpickler_reads() -> None:
    value = {1: {"computation": 162.0, "seen": [1, None, True]}, "x": -(2**70)}
    assert pickle.loads(write_plain_pickle(value)) == read_plain_pickle(write_plain_pickle(value)) == value


@given(st.binary(max_size=60), st.integers(0, 300))
def test_any_bytes_give_a_value_or_a_pickle_error(noise, at):
    content = pickle.dumps({"data": np.zeros((1, 9), np.uint8), "labels": [1, 2.5]}, protocol=2)
    for data in (noise, content[:at] + noise + content[at + len(noise) :]):
        with contextlib.suppress(PickleError):
            read_plain_pickle(data)
