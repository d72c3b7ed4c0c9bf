"""The environment of edgefl's own processes: one core, and edgefl found without hiding anything."""

from __future__ import annotations

import errno
import os
import signal
import site
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from edgefl.host import child, children
from edgefl.host.process import child_environment, handled

ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (None, ROOT),
        ("", ROOT),
        ("/a", f"/a:{ROOT}"),
        (f"{ROOT}:/a", f"{ROOT}:/a"),
        (f"/a:{ROOT}/", f"/a:{ROOT}/"),
    ],
)
def test_edgefl_is_found_and_comes_last(given: str | None, path: str) -> None:
    before = {} if given is None else {"PYTHONPATH": given}
    assert child_environment(before)["PYTHONPATH"] == path


def test_an_installed_edgefl_needs_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "getsitepackages", lambda: ["/b", ROOT])
    assert "PYTHONPATH" not in child_environment({})
    assert child_environment({"PYTHONPATH": "/a"})["PYTHONPATH"] == "/a"


def test_a_module_of_the_user_is_not_hidden_by_what_lies_beside_edgefl(tmp_path: Path) -> None:
    (tmp_path / "tests.py").write_text("mine = True\n")  # as edgefl's checkout has a folder of that name
    given = child_environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    command = [sys.executable, "-c", "import edgefl.errors, tests; assert tests.mine"]
    subprocess.run(command, env=given, cwd="/", check=True)


def test_a_child_shows_no_warning_of_edgefls_own_arithmetic_and_those_of_the_user() -> None:
    body = (
        "import os\n"
        "import numpy as np\n"
        "from edgefl.host.process import become_child\n"
        "from edgefl.run.update import amplify\n"
        "become_child(os.getppid(), 'edgefl-test')\n"
        "large = np.full(1, 3e38, np.float32)\n"
        "amplify(large, -large, 1.0, False, 1)\n"
        "np.full(1, 3e38, np.float32) * np.float32(2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", body], env=child_environment(os.environ), capture_output=True
    )
    assert done.stderr.count(b"RuntimeWarning") == 1
    assert done.stderr.startswith(b"<string>:8: RuntimeWarning")


def test_a_signal_handler_that_python_did_not_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python returns None for such a handler and cannot set it again, so that the end of the run failed."""
    real, numbers = signal.getsignal, (signal.SIGTERM, signal.SIGUSR1)
    before = [real(number) for number in numbers]
    monkeypatch.setattr(
        signal, "getsignal", lambda number: None if number == signal.SIGTERM else real(number)
    )
    got = list[int]()
    with handled(numbers, got.append):
        assert real(signal.SIGTERM) == before[0]
        os.kill(os.getpid(), signal.SIGUSR1)
    assert got == [signal.SIGUSR1]
    assert [real(number) for number in numbers] == before


def test_children_of_another_user_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what ``sudo`` starts: they cannot be killed."""
    mine, others = Mock(pid=6), Mock(pid=7)
    others.kill.side_effect = psutil.AccessDenied
    all_of_them = {mine, others}
    monkeypatch.setattr(children, "has_children", lambda: bool(all_of_them))
    monkeypatch.setattr(psutil, "Process", lambda: Mock(children=lambda recursive=False: [*all_of_them]))
    monkeypatch.setattr(children.os, "waitpid", lambda pid, _: all_of_them.remove(mine))
    children.end_children()
    assert all_of_them == {others}
    mine.kill.assert_called_once()


def test_a_child_that_ends_in_time_is_left_to_it_and_a_late_one_is_killed() -> None:
    for seconds, code in ((0, 0), (60, -signal.SIGKILL)):
        late = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
        assert children.end_child(late, grace_s=0.2 if seconds else 30.0).code == code


def test_an_interrupted_wait_for_a_child_leaves_it_to_its_own_end() -> None:
    """It may be writing its last checkpoint."""
    interrupted = Mock(spec=children.Child)
    interrupted.wait.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        children.end_child(interrupted, grace_s=30.0)
    interrupted.kill.assert_not_called()


def test_a_process_that_the_machine_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose limit of processes is reached."""

    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def be_a_zygote(*_: object) -> None:
        children.fork("edgefl-client-17", lambda: None)

    monkeypatch.setattr(os, "fork", full)
    monkeypatch.setattr(child, "import_module", lambda _: Mock(main=be_a_zygote))
    monkeypatch.delenv("EDGEFL_TRACEBACK", raising=False)
    said: list[str] = []
    monkeypatch.setattr(child, "_report", lambda _, what: said.append(what))
    assert child.main(-1, os.getpid(), "edgefl.run.zygote") == 1
    assert [each.partition(" (")[0] for each in said] == [
        "edgefl-client-17 cannot be started: Resource temporarily unavailable"
    ]
