"""A run's folder: files that are written whole, missing or damaged results, and the exclusive lock."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from full_disk import file_size_limit

from edgefl.core.events import Died, Evaluated, Joined
from edgefl.errors import ConfigError, FolderTaken, RunError
from edgefl.files import write_text
from edgefl.parameters import checkpoint
from edgefl.parameters.checkpoint import SavedState
from edgefl.results import run_folder
from edgefl.results.result import Result
from edgefl.results.store import Store


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        write_text(tmp_path / "file" / "below", "text")
    path = write_text(tmp_path / "new" / "a.txt", "héllo")
    assert path.read_text(encoding="utf-8") == "héllo"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_missing_or_damaged_results_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        Result(tmp_path / "nowhere")
    result = Result(tmp_path)
    with pytest.raises(ConfigError, match=r"no summary\.json: the run did not end"):
        result.summary()
    for text, says in (("{", "cannot be read"), ("[]", "does not hold a summary")):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(ConfigError, match=re.escape(says)):
            result.summary()
    with pytest.raises(ConfigError, match="the run did not end"):
        result.model()
    path = tmp_path / "checkpoints" / "final.safetensors"
    state = SavedState(0, 0, 0.0, 0.0, np.arange(6, dtype=np.float32), [], {})
    checkpoint.write(path.parent, state, [("w", [2, 3], 0)], final=True)
    assert result.model()["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    path.write_bytes(b"garbage!" * 4)
    with pytest.raises(ConfigError, match=r"final\.safetensors cannot be read"):
        result.model()
    with pytest.raises(ConfigError, match=r"experiment\.toml is missing; edgefl resume restores it"):
        run_folder.check_experiment(tmp_path, "seed = 1")


def test_results_that_were_written_while_the_run_was_running_are_written_again(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.set_meta(status="done")
    for name in ("trace.json", "report.html"):
        (tmp_path / name).touch()
    assert run_folder.missing_results(tmp_path) == [*run_folder.RESULTS]
    (tmp_path / "summary.json").touch()
    assert run_folder.missing_results(tmp_path) == []
    run_folder.remove_results(tmp_path, ["report.html"])
    assert run_folder.missing_results(tmp_path) == ["report.html"]


def test_an_experiment_that_cannot_be_written_whole_leaves_no_folder(tmp_path: Path) -> None:
    with (
        file_size_limit(100),
        pytest.raises(ConfigError, match="run: cannot be written: File too large"),
        run_folder.new(tmp_path / "run", "x" * 1000),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_run_in_which_clients_only_died_while_they_started_has_not_begun(tmp_path: Path) -> None:
    write_text(tmp_path / run_folder.EXPERIMENT_FILE, "seed = 1\n")
    run_folder.begin(tmp_path, Path("/modules"))
    with Store(tmp_path) as store:
        store.journal(Died(client=0, at_s=0.0, reason="signal 9"))
        store.journal(Evaluated(version=0, at_s=0.0, accuracy=0.1))
    assert not run_folder.begun(tmp_path)
    with Store(tmp_path) as store:
        store.journal(Joined(client=1, at_s=0.0))
    assert run_folder.begun(tmp_path)


def test_a_running_runs_folder_stays_locked_if_its_files_are_replaced(tmp_path: Path) -> None:
    with run_folder.new(tmp_path / "run", "seed = 1\n"):
        path = tmp_path / "run" / run_folder.EXPERIMENT_FILE
        write_text(path, path.read_text())  # replaces the file, as an editor or rsync does
        with (
            pytest.raises(ConfigError, match="run is in use by another edgefl process"),
            run_folder.held(tmp_path / "run"),
        ):
            pass
    with run_folder.held(tmp_path / "run"):  # the lock was released
        pass


def test_if_folders_cannot_be_locked_the_experiment_file_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS locks only files that are open for writing."""
    lock = fcntl.flock

    def of_files(fd: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", of_files)
    with (
        run_folder.new(tmp_path / "run", "seed = 1\n"),
        pytest.raises(ConfigError, match="run is in use by another edgefl process"),
        run_folder.held(tmp_path / "run"),
    ):
        pass


def test_a_link_to_a_missing_folder_on_the_way_is_no_taken_folder(tmp_path: Path) -> None:
    """After `FolderTaken`, ``edgefl run`` tries other names in the same folder, so it would never end."""
    (tmp_path / "runs").symlink_to("nowhere")
    with (
        pytest.raises(ConfigError, match="runs is a link to a folder that does not exist") as caught,
        run_folder.new(tmp_path / "runs" / "run", "seed = 1\n"),
    ):
        pass
    assert not isinstance(caught.value, FolderTaken)


def test_of_several_runs_that_start_in_one_folder_one_gets_it(tmp_path: Path) -> None:
    together, done = threading.Barrier(8), threading.Event()
    taken: list[str] = []

    def begin(number: int) -> bool:
        together.wait()
        try:
            with run_folder.new(tmp_path / "run", f"seed = {number}\n"):
                done.wait()
        except FolderTaken as error:
            taken.append(str(error))
            if len(taken) == 7:
                done.set()
            return False
        return (tmp_path / "run" / run_folder.EXPERIMENT_FILE).read_text() == f"seed = {number}\n"

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(begin, range(8))) == 1
    assert all("expected a new or empty folder" in line for line in taken)
