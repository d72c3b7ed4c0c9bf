"""A run's folder: new or empty at the start, one process's own while it runs, gone if nothing came of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from edgefl.errors import ConfigError, FolderTaken
from edgefl.files import PARTIAL, flush_folder, make_folder, write_text
from edgefl.privacy.source import KEY_FILE
from edgefl.results.record import FILE_NAME, Record
from edgefl.results.store import Store

CHECKPOINTS = "checkpoints"
EXPERIMENT_FILE = "experiment.toml"
"""The resolved experiment: what makes a folder a run. Whoever runs it holds a lock on the folder."""
SUMMARY_FILE = "summary.json"
"""The findings of a run, a comparison or a reproduction."""
DATA_FILES = "data-*.safetensors"
"""The arrays of a run whose data were given as objects: all that a new run's folder may hold."""
RESULTS = (SUMMARY_FILE, "trace.json", "report.html")
"""The files that are made of a run's record when it ends."""


@contextlib.contextmanager
def new(folder: Path, experiment: str) -> Iterator[int]:
    """Make ``folder``, write the ``experiment`` into it, and hold it; gives the lock's descriptor.

    If what follows fails before there is a checkpoint, nothing is left: the same command works again.
    Raises `ConfigError` if the folder is not empty or cannot be made.
    """
    try:
        made = not folder.exists()
        make_folder(folder)
        if any(not path.match(DATA_FILES) for path in folder.iterdir()):
            what = "holds a run" if (folder / EXPERIMENT_FILE).exists() else "not empty"
            raise FolderTaken(f"{folder}: {what}, expected a new or empty folder")
        file = os.open(folder / EXPERIMENT_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # a file, or another process was faster
        raise FolderTaken(f"{folder}: taken, expected a new or empty folder") from None
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, file)
        try:
            lock = stack.enter_context(held(folder))
            _write(file, folder, experiment)
            yield lock
        except BaseException:
            if not resumable(folder):
                with contextlib.suppress(OSError):
                    clear(folder)
                with contextlib.suppress(OSError):
                    (folder / EXPERIMENT_FILE).unlink()
                    if made:
                        folder.rmdir()
            raise


def _write(file: int, folder: Path, experiment: str) -> None:
    """Write the experiment, all of it, to the disk. `ConfigError` where that cannot be done."""
    left = experiment.encode()
    try:
        while left:  # a disk that gets full takes a part
            left = left[os.write(file, left) :]
        os.fsync(file)
        flush_folder(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None


def require_free(folder: Path, mine: str) -> None:
    """Raise `ConfigError` if results written to ``folder`` would replace others.

    It may hold a summary with the key ``mine``: results of the same kind, made anew.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: a file, expected a folder")
    what = f"another {SUMMARY_FILE}"
    if any((folder / name).exists() for name in (EXPERIMENT_FILE, FILE_NAME)):
        what = "a run"
    elif not (folder / SUMMARY_FILE).exists():
        return
    else:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            document = json.loads((folder / SUMMARY_FILE).read_bytes())
            if isinstance(document, dict) and mine in document:
                return
    raise ConfigError(f"--out {folder}: holds {what}, which would be overwritten; give another folder")


def restore_experiment(folder: Path) -> None:
    """Write the experiment's file anew from the record, where a power cut or a mishap took it.

    Raises `ConfigError` if it is there and another than the run began with.
    """
    try:
        with Record(folder) as record:
            text = record.meta.toml
    except ConfigError:  # there is none yet, or whoever reads it next says what is wrong with it
        return
    path = folder / EXPERIMENT_FILE
    if text and not (path.is_file() and path.stat().st_size):
        write_text(path, text)
    check_experiment(folder, text)


def check_experiment(folder: Path, recorded: str) -> None:
    """Raise `ConfigError` unless the experiment's file is what the record says that the run began with."""
    path = folder / EXPERIMENT_FILE
    if recorded and path.read_bytes() != recorded.encode():
        raise ConfigError(
            f"{path}: not what this run began with; remove it, and edgefl resume writes it from the record"
        )


@contextlib.contextmanager
def held(folder: Path, patience_s: float = 0.0) -> Iterator[int]:
    """Hold the ``folder`` of a run, whoever replaces files in it; gives the lock's descriptor.

    Raises `ConfigError` if another process holds it for longer than ``patience_s``, or there is none.
    """
    with contextlib.ExitStack() as stack:
        for path, how in ((folder, os.O_RDONLY | os.O_DIRECTORY), (folder / EXPERIMENT_FILE, os.O_RDWR)):
            try:
                lock = os.open(path, how)
            except OSError as error:
                raise ConfigError(f"{path}: cannot be opened: {error.strerror}") from None
            stack.callback(os.close, lock)
            if _lock(lock, folder, patience_s):
                break  # NFS locks what can be written alone; other file systems nothing
        yield lock


def resumable(folder: Path) -> bool:
    """Returns True if there is a checkpoint from which the run in ``folder`` may go on."""
    return any((folder / CHECKPOINTS).glob("journal-*.safetensors"))


def way_on(folder: Path) -> str:
    """The end of the message of a run that failed: how to carry on with it, where that can be done."""
    return f"; carry on with: edgefl resume {folder}" if resumable(folder) else ""


def begun(folder: Path) -> bool:
    """Returns True if anything has happened in the run: nothing does before its first checkpoint."""
    if resumable(folder):
        return True
    try:
        with Record(folder) as record:
            return next(record.events(), None) is not None
    except ConfigError:  # none, or one that was killed while it was made and has no tables yet
        file = folder / FILE_NAME
        return file.exists() and file.stat().st_size > 4096  # SQLite's page


def begin(folder: Path, base: Path) -> None:
    """Make the record, with what is needed to carry on or to start again."""
    toml = (folder / EXPERIMENT_FILE).read_text("utf-8")
    with Store(folder) as store:
        store.set_meta(base=str(base), toml=toml)


def missing_results(folder: Path) -> list[str]:
    """The results of a run that is over which nobody has written; none if it is not over."""
    with contextlib.suppress(ConfigError), Record(folder) as record:
        if record.meta.status == "done":
            return [name for name in RESULTS if not (folder / name).is_file()]
    return []


def forget_noise(folder: Path) -> None:
    """Delete the key of a run's secret noise once the run is over, before anyone is told."""
    with Record(folder) as record:
        if record.meta.status == "done":
            (folder / KEY_FILE).unlink(missing_ok=True)


def remove_results(folder: Path) -> None:
    """Remove the results of an interrupted run that goes on: they are not those of its end."""
    for name in RESULTS:
        (folder / name).unlink(missing_ok=True)


def base_of(folder: Path, begun: bool = False) -> Path:
    """The folder in which the run's own modules are looked for; `ConfigError` if the run is over.

    Where one that has not ``begun`` was killed before that was on record, it is this one.
    """
    try:
        with Record(folder) as record:
            meta = record.meta
    except ConfigError:
        if begun:
            raise
        return Path.cwd()
    if meta.status == "done":
        raise ConfigError(f"{folder}: this run is over ({meta.stop_reason}); there is nothing to resume")
    return Path(meta.base or ".")


def clear(folder: Path) -> None:
    """Remove what a run that has not begun wrote into ``folder``, but for its experiment.

    The record goes last: until then it says from where the run can be started again.
    """
    for partial in (folder / CHECKPOINTS).glob(f"*{PARTIAL}"):
        partial.unlink()
    with contextlib.suppress(OSError):  # there is none, or somebody's own file lies in it
        (folder / CHECKPOINTS).rmdir()
    (folder / KEY_FILE).unlink(missing_ok=True)
    for ending in ("-journal", "-wal", "-shm", "-seal", ""):
        (folder / (FILE_NAME + ending)).unlink(missing_ok=True)


def _lock(lock: int, folder: Path, patience_s: float) -> bool:
    """Returns False where the file system has no such lock."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                way_on = "wait for its end or stop it"
                raise ConfigError(f"{folder}: another edgefl process runs it; {way_on}") from None
            time.sleep(0.05)  # a lock that is waited for has no time-out
            continue
        except OSError:
            return False
        return True
