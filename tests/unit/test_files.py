"""Tests of reading and writing files: only regular files of limited length, in linear time."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from edgefl import files, toml
from edgefl.devices.imports import read_bytes
from edgefl.devices.link import read_trace
from edgefl.devices.presence import read_availability
from edgefl.errors import ConfigError, EdgeflError
from edgefl.regression import baseline

READERS: list[Callable[[Path], object]] = [
    toml.read,
    read_bytes,
    lambda path: read_trace(str(path)),
    lambda path: read_availability(str(path)),
    baseline.load,
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_refused(tmp_path: Path, read: Callable[[Path], object], kind: str) -> None:
    path = Path("/dev/zero")
    if kind == "pipe":  # without a writer
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(EdgeflError, match="not a regular file"):
        read(path)


def test_writing_to_a_pipe_does_not_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    files.write_text(path, "abc")
    assert os.read(reader, 10) == b"abc"
    os.close(reader)
    assert path.is_fifo()


def test_ctrl_c_during_a_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("old")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.replace(tmp_path / "a.txt", [b"new"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_writing_to_an_open_file_does_not_replace_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        log.write("before ")
        log.flush()
        files.write_text(Path(f"/proc/self/fd/{log.fileno()}"), "after")
        log.write(" and on")
    assert (tmp_path / "log").read_text() == "before after and on"


def test_a_file_above_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert files.read(path, 3) == b"abc"
    with pytest.raises(OSError, match="longer than"):
        files.read(path, 2)


def test_a_key_with_many_parts_takes_little_memory() -> None:
    """Python's `tomllib` needs 1 GiB of memory for this key."""
    text = "a" + ".a" * 16_000 + " = 1"
    tracemalloc.start()
    with pytest.raises(ConfigError, match="nested too deeply"):
        toml.parse(text, "e.toml")
    with pytest.raises(ConfigError, match="is not a key"):
        toml.assignment(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("text", ["a" * 1_000_000, "a " * 500_000, "'" * 1_000_000, "a." * 31 + "b=1"])
def test_the_search_for_keys_with_many_parts_takes_linear_time(text: str) -> None:
    """A search that starts again at every letter takes hours for the first text."""
    assert toml._DEEP_KEY.search(text) is None
