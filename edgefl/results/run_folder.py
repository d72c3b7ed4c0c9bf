"""Functions that create, lock, check and clear the folder of a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from edgefl.core.events import Died, Evaluated
from edgefl.errors import ConfigError, FolderTaken
from edgefl.files import DATA_FILES, PARTIAL, flush_folder, make_folder, write_text
from edgefl.privacy.source import KEY_FILE
from edgefl.results.record import Record
from edgefl.results.rows import FILE_NAME
from edgefl.results.store import Store
from edgefl.secure import SECRET_FILE, USED_FILE

CHECKPOINTS = "checkpoints"
EXPERIMENT_FILE = "experiment.toml"
"""Name of the file with the resolved experiment, which marks a run's folder."""
SUMMARY_FILE = "summary.json"
"""Name of the file with the summary of a run, a comparison or a reproduction."""
RUNS = "runs"
"""Name of the folder with a sweep's runs, inside the sweep's folder."""
RESULTS = (SUMMARY_FILE, "trace.json", "report.html")
"""Names of the files that are created from the record at the end of a run."""
SECRETS = (KEY_FILE, SECRET_FILE, USED_FILE)
"""Names of the files that secret noise and masks need; they are deleted when the run has ended."""


@contextlib.contextmanager
def new(folder: Path, experiment: str) -> Iterator[int]:
    """Create ``folder`` with the file of the ``experiment``, and lock it; yield the lock's descriptor.

    If the context raises before the first checkpoint, the run's files are removed, so that the command can be
    repeated. Raises `ConfigError` if the folder is not empty or cannot be created.
    """
    try:
        made = not folder.exists()
        make_folder(folder)
        if any(not path.match(DATA_FILES) for path in folder.iterdir()):
            what = "holds a run" if (folder / EXPERIMENT_FILE).exists() else "is not empty"
            raise FolderTaken(f"{folder} {what}; expected a new or empty folder")
        file = os.open(folder / EXPERIMENT_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError as error:  # ``folder`` is a file, or another process has just created it
        if folder.parent.is_dir():
            raise FolderTaken(f"{folder} is a file or is in use; expected a new or empty folder") from None
        why = f"{error.filename} is a link to a folder that does not exist"
        raise ConfigError(f"{folder}: cannot be written: {why}") from None
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
    """Write the experiment, and flush it to disk. Raises `ConfigError` if that fails."""
    try:
        with open(file, "wb", closefd=False) as stream:
            stream.write(experiment.encode())
        os.fsync(file)
        flush_folder(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None


def is_sweep(folder: Path) -> bool:
    """Return True if the folder is not a run's folder but holds runs, as a sweep's folder does."""
    return (folder / RUNS).is_dir() and not (folder / EXPERIMENT_FILE).is_file()


def refuse_sweep(folder: Path) -> None:
    """Raise `ConfigError` if the folder holds a sweep instead of a run."""
    if is_sweep(folder):
        raise ConfigError(f"{folder} is not a run but holds runs; name one of them: {folder / RUNS}/…")


def require_free(folder: Path, mine: str) -> None:
    """Raise `ConfigError` if results written to ``folder`` would replace other results.

    A summary with the key ``mine`` is from the same command and may be replaced.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file; expected a folder")
    what = f"another {SUMMARY_FILE}"
    if any((folder / name).exists() for name in (EXPERIMENT_FILE, FILE_NAME)):
        what = "a run"
    elif not (folder / SUMMARY_FILE).exists():
        return
    else:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            document = json.loads((folder / SUMMARY_FILE).read_bytes())
            if (
                isinstance(document, dict)
                and mine in document
                and (mine == "sweep" or "sweep" not in document)
            ):
                return
    raise ConfigError(f"--out {folder} holds {what}, which would be overwritten; name another folder")


def restore_experiment(folder: Path) -> None:
    """Restore a lost experiment file from the record.

    Raises `ConfigError` if the file exists and differs from the record.
    """
    try:
        with Record(folder) as record:
            text = record.meta.toml
    except ConfigError:  # there is no record yet, or it is damaged, which the next reader will report
        return
    path = folder / EXPERIMENT_FILE
    if text and not (path.is_file() and path.stat().st_size):
        write_text(path, text)
    check_experiment(folder, text)


def check_experiment(folder: Path, recorded: str) -> None:
    """Raise `ConfigError` if the experiment's file is missing or differs from the recorded one."""
    path = folder / EXPERIMENT_FILE
    if recorded and not path.is_file():
        raise ConfigError(f"{path} is missing; edgefl resume restores it from the record")
    if recorded and path.read_bytes() != recorded.encode():
        raise ConfigError(
            f"{path} differs from the experiment that this run began with; remove the file, and edgefl "
            "resume restores it from the record"
        )


@contextlib.contextmanager
def held(folder: Path, patience_s: float = 0.0) -> Iterator[int]:
    """Lock the ``folder`` of a run; yield the lock's file descriptor.

    Raises `ConfigError` if another process holds the lock for longer than ``patience_s``, or if ``folder``
    holds no run.
    """
    with contextlib.ExitStack() as stack:
        for path, how in ((folder, os.O_RDONLY | os.O_DIRECTORY), (folder / EXPERIMENT_FILE, os.O_RDWR)):
            try:
                lock = os.open(path, how)
            except OSError as error:
                raise ConfigError(f"{path}: cannot be opened: {error.strerror}") from None
            stack.callback(os.close, lock)
            # Lock the file if the folder cannot be locked: NFS can lock only files that are open for writing.
            # Some file systems cannot lock at all.
            if _lock(lock, folder, patience_s):
                break
        yield lock


def resumable(folder: Path) -> bool:
    """Return True if the run in ``folder`` has a checkpoint from which it can be resumed."""
    return any((folder / CHECKPOINTS).glob("journal-*.safetensors"))


def resume_hint(folder: Path) -> str:
    """Return the end of a failed run's error message: the command to resume the run, if it is resumable."""
    return f"; carry on with: edgefl resume {folder}" if resumable(folder) else ""


def begun(folder: Path) -> bool:
    """Return True if the run has begun, which means that it has a checkpoint or an event.

    Deaths of clients and evaluations do not count, because they can happen before the run begins: clients may
    die while they start, and the server evaluates version 0 at the first event of any kind.
    """
    if resumable(folder):
        return True
    try:
        with Record(folder) as record:
            return any(not isinstance(event, Died | Evaluated) for _, event in record.events())
    except ConfigError:  # there is no record, or its creation was interrupted
        file = folder / FILE_NAME
        return file.exists() and file.stat().st_size > 4096  # true if the file has more than one page


def begin(folder: Path, base: Path) -> None:
    """Create the record, and store what is needed to resume the run: its experiment and the folder ``base``.

    ``base`` is the folder from which the user's own modules are imported.
    """
    toml = (folder / EXPERIMENT_FILE).read_text("utf-8")
    with Store(folder) as store:
        store.set_meta(base=str(base), toml=toml)


def is_done(folder: Path) -> bool:
    """Return True if the run in ``folder`` has ended and its results are written."""
    with contextlib.suppress(ConfigError), Record(folder) as record:  # no record if the run was killed early
        return record.meta.status == "done" and not _missing(folder)
    return False


def missing_results(folder: Path) -> list[str]:
    """Return the names of the result files that an ended run lacks; empty if the run has not ended."""
    with contextlib.suppress(ConfigError), Record(folder) as record:
        if record.meta.status == "done":
            return _missing(folder)
    return []


def _missing(folder: Path) -> list[str]:
    missing = [name for name in RESULTS if not (folder / name).is_file()]
    # The summary is written first. Without it, `edgefl report` wrote the others during the run.
    return [*RESULTS] if SUMMARY_FILE in missing else missing


def forget_noise(folder: Path) -> None:
    """Delete the keys of a run's secret noise and masks if the run has ended."""
    with Record(folder) as record:
        if record.meta.status == "done":
            for name in SECRETS:
                (folder / name).unlink(missing_ok=True)


def remove_results(folder: Path, names: Collection[str] = RESULTS) -> None:
    """Remove results that were written before the run's end: the run goes on, or new ones are written."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    flush_folder(folder)


def base_of(folder: Path, begun: bool = False) -> Path:
    """Return the folder from which the run imports the user's own modules.

    If the run was killed before it recorded that folder, and has not ``begun``, return the working directory.
    Raises `ConfigError` if the run has ended.
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


def begun_in(folder: Path) -> str:
    """Return the folder of the experiment's file when the run began; "" if it is not on record."""
    with contextlib.suppress(ConfigError), Record(folder) as record:
        return record.meta.base
    return ""


@contextlib.contextmanager
def hinting_moved(folder: Path) -> Iterator[None]:
    """Say in errors about files of a run that was moved how they are found."""
    try:
        yield
    except ConfigError as error:
        base = begun_in(folder)
        if not base or base not in str(error) or os.path.isdir(base):
            raise
        raise ConfigError(
            f"{error}; the run began in {base}, which does not exist now: start this command in the folder "
            "that holds the experiment's files now"
        ) from None


def code_of(folder: Path) -> dict[str, str]:
    """Return the recorded digests of the user's own modules."""
    with Record(folder) as record:
        return record.meta.code


def clear(folder: Path) -> None:
    """Remove the files of a run that has not begun, except its experiment.

    The record is removed last, because it stores the folder of the user's own modules.
    """
    for partial in (folder / CHECKPOINTS).glob(f"*{PARTIAL}"):
        partial.unlink()
    with contextlib.suppress(OSError):  # the folder does not exist, or holds other files
        (folder / CHECKPOINTS).rmdir()
    for name in SECRETS:
        (folder / name).unlink(missing_ok=True)
    for ending in ("-journal", "-wal", "-shm", "-seal", ""):
        (folder / (FILE_NAME + ending)).unlink(missing_ok=True)


def _lock(lock: int, folder: Path, patience_s: float) -> bool:
    """Lock the file descriptor; return False if the file system cannot lock it."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                hint = "wait until that process ends, or stop it"
                raise ConfigError(f"{folder} is in use by another edgefl process; {hint}") from None
            time.sleep(0.05)  # a blocking lock has no time-out
            continue
        except OSError:
            return False
        return True
