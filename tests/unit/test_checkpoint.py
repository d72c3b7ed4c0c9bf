"""Checkpoints: all numbers are read back, no file is left half-written, and damaged files are not used."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from full_disk import file_size_limit
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from edgefl import files
from edgefl.errors import ConfigError
from edgefl.parameters import checkpoint
from edgefl.parameters.checkpoint import KEEP, Layout, SavedState, latest, write

LAYOUT: Layout = [("fc.weight", [2, 3], 0), ("fc.bias", [2], 6), ("scale", [], 8)]
MODEL = np.arange(9, dtype=np.float32) - 4.5


def made(seq: int = 12, **changes: object) -> SavedState:
    start = SavedState(
        version=3,
        journal_seq=seq,
        emulated_s=1.1,
        wall_s=0.30000000000000004,
        model=MODEL,
        vectors=[MODEL * 2, MODEL * 3],
        held={5: (MODEL - 1).view(np.uint8), 41: (MODEL / 3).view(np.uint8)},
        kept={2: MODEL / 7},
        early={0: MODEL / 9},
        bases={1: MODEL * 5, 2: MODEL * 6},
        answers=b"\x91\x97 anything",
    )
    return replace(start, **changes)


def assert_same(one: SavedState, other: SavedState) -> None:
    for field in fields(SavedState):
        assert plain(getattr(one, field.name)) == plain(getattr(other, field.name))
    floats = [one.model, *one.vectors, *one.kept.values(), *one.bases.values()]
    assert {array.dtype for array in floats} == {np.dtype(np.float32)}


def plain(value: Any) -> Any:
    """Return the same value with each array replaced by its bytes."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.tobytes() if isinstance(value, np.ndarray) else value


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_all_numbers_are_read_back_also_by_safetensors(tmp_path: Path) -> None:
    """edgefl writes the file without the safetensors library, which must still read every tensor."""
    path = write(tmp_path / "checkpoints", made(), LAYOUT)
    assert path.name == "journal-0000000012.safetensors"
    assert_same(latest(tmp_path / "checkpoints"), made())
    tensors = load_file(path)
    assert list(tensors["base.2"]) == list(MODEL * 6)
    assert tensors["answers"].tobytes() == made().answers
    kept = {"base": (1, 2), "early": (0,), "held": (5, 41), "kept": (2,), "vector": (0, 1)}
    expected = {f"{name}.{number}" for name, numbers in kept.items() for number in numbers}
    assert set(tensors) == {"answers", "model"} | expected


@given(
    times=st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)),
    vectors=st.integers(0, 12),
    tasks=st.sets(st.integers(0, 2**62), max_size=12),
    values=st.lists(st.floats(width=32), min_size=1, max_size=30),
)
def test_any_numbers_are_read_back_bit_for_bit(
    tmp_path_factory: Any, times: Any, vectors: int, tasks: set[int], values: list[float]
) -> None:
    model = np.array(values, dtype=np.float32)
    folder = tmp_path_factory.mktemp("any")
    with np.errstate(all="ignore"):
        held = dict.fromkeys(tasks, (model * 2).view(np.uint8))
        given_one = SavedState(0, 0, *times, model, [model + i for i in range(vectors)], held)
        write(folder, given_one, [])
    assert_same(latest(folder), given_one)


def test_the_newest_checkpoint_is_read_and_the_oldest_are_removed(tmp_path: Path) -> None:
    for seq in (3, 20, 100, 12345, 12345):  # one moment twice is one checkpoint
        path = write(
            tmp_path, made(seq, version=seq, wall_s=len(names(tmp_path)) if seq > 3 else 0.0), LAYOUT
        )
    assert path.name == "journal-0000012345.safetensors"
    assert (latest(tmp_path).version, latest(tmp_path).wall_s) == (12345, KEEP)
    assert names(tmp_path) == [f"journal-{seq:010d}.safetensors" for seq in (3, 20, 100, 12345)[-KEEP:]]


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the header": lambda path: os.truncate(path, 50),
    "cut in the length": lambda path: os.truncate(path, 3),
    "empty": lambda path: os.truncate(path, 0),
    "rubbish": lambda path: path.write_bytes(os.urandom(500)),
    "text": lambda path: path.write_text("not numbers"),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "a huge header": lambda path: path.write_bytes((2**63 - 1).to_bytes(8, "little") + path.read_bytes()[8:]),
    "a broken header": lambda path: _flip(path, 20),
    "a flipped bit in the model": lambda path: _flip(path, path.stat().st_size - 2),
    "foreign": lambda path: save_file({"model": MODEL}, path),
    "of another format": lambda path: save_file({"model": MODEL}, path, {"format": "edgefl-0"}),
    "without a version": lambda path: save_file({"model": MODEL}, path, {"format": checkpoint.FORMAT}),
    "without a model": lambda path: save_file({"x": MODEL}, path, _metadata()),
    "with words for numbers": lambda path: save_file({"model": MODEL}, path, {**_metadata(), "version": "x"}),
    "with an unnumbered vector": lambda path: _save_sealed({"model": MODEL, "vector.x": MODEL}, path),
    "with an unnumbered update": lambda path: _save_sealed({"held.": MODEL, "model": MODEL}, path),
    "without a seal": lambda path: save_file({"model": MODEL}, path, _metadata()),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "gone": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


def _metadata() -> dict[str, str]:
    return {"format": checkpoint.FORMAT, "version": "3", "journal_seq": "9", "emulated_s": "1", "wall_s": "1"}


def _save_sealed(tensors: dict[str, Any], path: Path) -> None:
    files.replace(path, checkpoint._safetensors(tensors, _metadata()))


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_previous_checkpoint_replaces_a_damaged_one(tmp_path: Path, damage: str) -> None:
    older = write(tmp_path, made(7), LAYOUT)
    newest = write(tmp_path, made(8, version=4), LAYOUT)
    assert latest(tmp_path).version == 4
    DAMAGES[damage](newest)
    assert_same(latest(tmp_path), made(7))
    DAMAGES[damage](older)
    with pytest.raises(ConfigError) as caught:
        latest(tmp_path)
    text = str(caught.value)
    assert text.startswith(
        f"{tmp_path} contains no checkpoint to resume from; journal-0000000008.safetensors: "
    )
    assert "; journal-0000000007.safetensors: " in text
    assert "\n" not in text


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, made(), LAYOUT)
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(ConfigError):
            latest(tmp_path)


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "checkpoints"
    if there:
        folder.mkdir()
        (folder / "final.safetensors").write_bytes(b"")
        (folder / "journal-0000000003.partial").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        latest(folder)
    assert str(caught.value) == f"{folder} contains no checkpoint to resume from"


def test_the_final_file_has_the_model_by_tensor_name(tmp_path: Path) -> None:
    write(tmp_path, made(), LAYOUT, final=True)
    named = load_file(tmp_path / "final.safetensors")
    expected = {"fc.weight": MODEL[:6].reshape(2, 3), "fc.bias": MODEL[6:8], "scale": MODEL[8].reshape(())}
    assert {name: array.tolist() for name, array in named.items()} == {
        name: array.tolist() for name, array in expected.items()
    }
    assert_same(latest(tmp_path), made())


def test_a_run_that_continues_from_a_checkpoint_has_no_later_one_and_no_final_model(tmp_path: Path) -> None:
    for seq in (7, 12):
        write(tmp_path, made(seq), LAYOUT, final=True)
    checkpoint.forget_after(tmp_path, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["journal-0000000007.safetensors"]


@pytest.mark.parametrize("limit", [0, 1000, 100_000])
def test_a_full_disk_leaves_only_the_older_checkpoint(tmp_path: Path, limit: int) -> None:
    write(tmp_path, made(7), LAYOUT, final=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    larger = SavedState(2, 20, 1.0, 1.0, np.ones(1 << 15, np.float32), [], {})
    with file_size_limit(limit), pytest.raises(OSError, match="File too large"):
        write(tmp_path, larger, [("w", [1 << 15], 0)], final=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert_same(latest(tmp_path), made(7))


def test_a_failed_rename_leaves_only_the_older_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path, made(7), LAYOUT)
    monkeypatch.setattr(os, "replace", Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        write(tmp_path, made(8), LAYOUT)
    assert names(tmp_path) == ["journal-0000000007.safetensors"]


def test_file_and_folder_are_synchronised_before_a_file_is_removed(tmp_path: Path, monkeypatch: Any) -> None:
    for seq in (1, 2):
        write(tmp_path, made(seq), LAYOUT)
    order: list[str] = []

    def noting(owner: Any, name: str, words: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def noted(*arguments: Any, **more: Any) -> Any:
            order.append(words(*arguments))
            return real(*arguments, **more)

        monkeypatch.setattr(owner, name, noted)

    noting(os, "fsync", lambda fd: "sync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
    noting(os, "replace", lambda old, new: f"rename to {new.name}")
    noting(Path, "unlink", lambda path: f"remove {path.name}")
    write(tmp_path, made(3), LAYOUT)
    assert order == [
        f"sync .journal-0000000003.safetensors.{os.getpid()}.partial",
        "rename to journal-0000000003.safetensors",
        f"sync {tmp_path.name}",
        "remove journal-0000000001.safetensors",
    ]
