"""The record's seal: no changed bit of the file passes, and nothing that SQLite does breaks it."""

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


def test_no_flipped_bit_passes(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.set_meta(toml="x" * 20_000)
    for name in ("record.sqlite", "record.sqlite-seal"):
        path = tmp_path / name
        whole = path.read_bytes()
        for bit in seeds.stream(0, "flips").choice(8 * len(whole), 400, replace=False).tolist():
            if name == "record.sqlite" and bit // 8 in seal._VOLATILE:
                continue
            spoilt = bytearray(whole)
            spoilt[bit // 8] ^= 1 << bit % 8
            path.write_bytes(spoilt)
            with pytest.raises(ConfigError, match="does not match its seal"):
                seal.check(tmp_path / "record.sqlite")
        path.write_bytes(whole)
    seal.check(tmp_path / "record.sqlite")


@pytest.mark.parametrize("sealed", [True, False])
def test_a_schema_that_is_no_text_any_more_is_one_line(sealed: bool, tmp_path: Path) -> None:
    # SQLite quotes the damaged text in its error, which Python's module then cannot decode.
    with Store(tmp_path) as store:
        store.set_meta(seed=1)
    path = tmp_path / "record.sqlite"
    if not sealed:
        seal.lift(path)
    whole = path.read_bytes()
    first = whole.index(b"CREATE TABLE meta")
    for place in range(first, first + len(b"CREATE TABLE meta (")):
        spoilt = bytearray(whole)
        spoilt[place] ^= 0x80
        path.write_bytes(spoilt)
        for opened in (Record, Store):
            with pytest.raises(ConfigError, match=r"record\.sqlite is damaged or not a record") as raised:
                opened(tmp_path)
            assert "\n" not in str(raised.value)


def test_a_record_that_was_cut_or_grew_does_not_pass(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.set_meta(seed=1)
    path = tmp_path / "record.sqlite"
    whole = path.read_bytes()
    for content in (whole[:-4096], whole[:-1], whole[:100], b"", whole + bytes(4096), whole + b"x"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="does not match its seal"):
            seal.check(path)


def test_a_record_left_by_a_kill_at_any_time_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its log, before and after the log is copied, with a reader that keeps it from being copied."""
    monkeypatch.setattr(store, "LOG_ROWS", 20)
    (tmp_path / "run").mkdir()
    with Store(tmp_path / "run") as writer:
        reader = None
        for step in range(60):
            writer.journal(Joined(client=step, at_s=0.0))
            writer.commit()
            if step == 30:
                reader = Record(tmp_path / "run")
            left = tmp_path / "left"
            shutil.copytree(tmp_path / "run", left, ignore=shutil.ignore_patterns("*-shm"))
            with Record(left) as record:
                assert len(list(record.events())) == step + 1
            with Store(left, create=False) as again:
                assert again.seq == step + 1
            shutil.rmtree(left)
        assert reader is not None
        reader.close()


def test_a_power_cut_in_the_middle_of_a_change_is_taken_back(tmp_path: Path) -> None:
    """SQLite keeps a journal of its own where it has no log: when the record is made, and at its end."""
    with Store(tmp_path) as store:
        store.set_meta(toml="x" * 20_000, seed=1)
    left = tmp_path / "left"
    with closing(sqlite3.connect(tmp_path / "record.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN")
        db.execute("UPDATE meta SET value = value || 'y'")
        shutil.copytree(tmp_path, left)
    assert (left / "record.sqlite").read_bytes() != (tmp_path / "record.sqlite").read_bytes()
    with Record(left) as record:
        assert record.meta.seed == 1


def test_a_seal_that_cannot_be_written_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with Store(tmp_path) as writer:
        writer.journal(Joined(client=0, at_s=0.0))
        with monkeypatch.context() as patch:
            patch.setattr(seal, "put", full)
            with pytest.raises(FolderError, match=r"cannot be written: .*No space left"):
                writer.sync()
    with Record(tmp_path) as record:
        assert len(list(record.events())) == 1


def _broken(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_a_seal_that_cannot_be_lifted_stays_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite copies its log to the file, which is sealed, when the last one closes that may."""
    writer = Store(tmp_path)
    writer.sync()
    writer.journal(Joined(client=0, at_s=0.0))
    writer.commit()
    with monkeypatch.context() as patch:
        patch.setattr(seal, "lift", _broken)
        with pytest.raises(FolderError, match=r"cannot be written: .*Input/output error"):
            writer.close()
    with Record(tmp_path) as record:
        assert len(list(record.events())) == 1
    with Store(tmp_path, create=False) as again:
        assert again.seq == 1


def test_a_record_that_could_not_be_opened_once_can_be_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Store(tmp_path)
    writer.sync()
    writer.journal(Joined(client=0, at_s=0.0))
    writer.commit()
    left = tmp_path / "left"
    shutil.copytree(tmp_path, left, ignore=shutil.ignore_patterns("*-shm"))
    writer.close()
    with monkeypatch.context() as patch:
        patch.setattr(seal, "_sums", _broken)
        with pytest.raises(ConfigError, match="cannot be read: Input/output error"):
            Store(left, create=False)
    with Store(left, create=False) as again:
        assert again.seq == 1


def test_a_large_record_is_sealed_a_piece_at_a_time(tmp_path: Path) -> None:
    record = tmp_path / "record.sqlite"
    with open(record, "wb") as file:
        file.truncate(40 * seal.AT_ONCE + 1000)
    tracemalloc.start()
    seal.put(record)
    seal.check(record)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * seal.AT_ONCE
