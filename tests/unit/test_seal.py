"""Tests of the record's seal: it detects every changed bit, and no operation of SQLite breaks it."""

from __future__ import annotations

import shutil
import sqlite3
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from edgefl import seeds
from edgefl.core.events import Joined
from edgefl.errors import ConfigError, FolderError
from edgefl.results import seal, store
from edgefl.results.record import Record
from edgefl.results.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sealed record of several pages."""
    with Store(tmp_path) as store:
        store.set_meta(toml="x" * 20_000, seed=1)
    return tmp_path / "record.sqlite"


@pytest.fixture
def writer(tmp_path: Path) -> Store:
    """An open store whose record is sealed, with one event in SQLite's log; the test closes it."""
    writer = Store(tmp_path)
    writer.sync()
    writer.journal(Joined(client=0, at_s=0.0))
    writer.commit()
    return writer


def copy(folder: Path, copied: Path) -> Path:
    """Copy a record as a kill would leave it."""
    return shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("*-shm"))


def broken(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_every_flipped_bit_is_detected(path: Path) -> None:
    for file, count in ((path, 400), (path.with_name("record.sqlite-seal"), 50)):
        whole = file.read_bytes()
        for bit in seeds.stream(0, "flips").choice(8 * len(whole), count, replace=False).tolist():
            if file == path and bit // 8 in seal._VOLATILE:
                continue
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises(ConfigError, match="does not match its seal"):
                seal.check(path)
        file.write_bytes(whole)
    seal.check(path)


def test_a_truncated_or_extended_record_is_detected(path: Path) -> None:
    whole = path.read_bytes()
    for content in (whole[:-4096], whole[:-1], whole[:100], b"", whole + bytes(4096), whole + b"x"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="does not match its seal"):
            seal.check(path)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_schema_with_invalid_utf_8_is_refused_in_one_line(sealed: bool, path: Path) -> None:
    # SQLite quotes the damaged text in its error, which Python's module then cannot decode.
    if not sealed:
        seal.lift(path)
    whole = path.read_bytes()
    first = whole.index(b"CREATE TABLE meta")
    for place in range(first, first + len(b"CREATE TABLE meta (")):
        damaged = bytearray(whole)
        damaged[place] ^= 0x80
        path.write_bytes(damaged)
        for opened in (Record, Store):
            with pytest.raises(ConfigError, match=r"record\.sqlite is damaged or not a record") as raised:
                opened(path.parent)
            assert "\n" not in str(raised.value)


def test_a_record_left_by_a_kill_at_any_time_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is copied with its log, before and after SQLite moves the log into the file, and while a
    reader prevents that."""
    monkeypatch.setattr(store, "LOG_ROWS", 5)
    (tmp_path / "run").mkdir()
    with Store(tmp_path / "run") as writer:
        reader = None
        for step in range(16):
            writer.journal(Joined(client=step, at_s=0.0))
            writer.commit()
            if step == 8:
                reader = Record(tmp_path / "run")
            left = copy(tmp_path / "run", tmp_path / "left")
            with Record(left) as record:
                assert len(list(record.events())) == step + 1
            with Store(left, create=False) as again:
                assert again.seq == step + 1
            shutil.rmtree(left)
        reader.close()


def test_a_change_that_a_power_cut_interrupts_is_rolled_back(path: Path, tmp_path: Path) -> None:
    """SQLite uses a rollback journal when it has no log: when a record is created, and when it is closed."""
    left = tmp_path / "left"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN")
        db.execute("UPDATE meta SET value = value || 'y'")
        shutil.copytree(tmp_path, left)
    assert (left / "record.sqlite").read_bytes() != path.read_bytes()
    journal = left / "record.sqlite-journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b"other" + (5).to_bytes(4) + bytes(4) + seal._MAGIC)
    with pytest.raises(ConfigError, match="names another file, so edgefl did not write it"):
        Record(left)
    with pytest.raises(ConfigError, match="names another file, so edgefl did not write it"):
        Store(left)
    journal.write_bytes(whole)
    with Record(left) as record:
        assert record.meta.seed == 1


def test_a_seal_that_cannot_be_written_is_an_error_in_one_line(
    tmp_path: Path, writer: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(seal, "put", broken)
        with pytest.raises(FolderError, match=r"cannot be written: .*Input/output error"):
            writer.sync()
    writer.close()
    with Record(tmp_path) as record:
        assert len(list(record.events())) == 1


def test_a_record_whose_seal_cannot_be_removed_stays_unchanged(
    tmp_path: Path, writer: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite copies its log to the sealed file when the last connection that may write closes."""
    with monkeypatch.context() as patch:
        patch.setattr(seal, "lift", broken)
        with pytest.raises(FolderError, match=r"cannot be written: .*Input/output error"):
            writer.close()
    with Record(tmp_path) as record:
        assert len(list(record.events())) == 1
    with Store(tmp_path, create=False) as again:
        assert again.seq == 1


def test_a_record_that_could_not_be_read_once_can_be_opened_later(
    tmp_path: Path, writer: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = copy(tmp_path, tmp_path / "left")
    writer.close()
    with monkeypatch.context() as patch:
        patch.setattr(seal, "_sums", broken)
        with pytest.raises(ConfigError, match="cannot be read: Input/output error"):
            Store(left, create=False)
    with Store(left, create=False) as again:
        assert again.seq == 1


def test_a_large_record_is_sealed_in_pieces(tmp_path: Path) -> None:
    record = tmp_path / "record.sqlite"
    with open(record, "wb") as file:
        file.truncate(10 * seal.AT_ONCE + 1000)
    tracemalloc.start()
    seal.put(record)
    seal.check(record)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * seal.AT_ONCE
