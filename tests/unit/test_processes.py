"""Processes of edgefl: their environment, signal handlers and ends."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import site
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from edgefl.host import child, children
from edgefl.host.forked import call_forked
from edgefl.host.process import child_environment, handled, stops_deferred
from edgefl.host.throttle import Target

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
def test_a_child_finds_edgefl_after_all_other_paths(given: str | None, path: str) -> None:
    before = {} if given is None else {"PYTHONPATH": given}
    assert child_environment(before)["PYTHONPATH"] == path


def test_an_installed_edgefl_is_not_added_to_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "getsitepackages", lambda: ["/b", ROOT])
    assert "PYTHONPATH" not in child_environment({})
    assert child_environment({"PYTHONPATH": "/a"})["PYTHONPATH"] == "/a"


def test_a_users_module_has_priority_over_one_beside_edgefl(tmp_path: Path) -> None:
    (tmp_path / "tests.py").write_text("mine = True\n")  # edgefl's checkout has a folder of that name
    given = child_environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    command = [sys.executable, "-c", "import edgefl.errors, tests; assert tests.mine"]
    subprocess.run(command, env=given, cwd="/", check=True)


def test_a_child_shows_warnings_of_the_users_arithmetic_but_not_of_edgefls() -> None:
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
    command = [sys.executable, "-c", body]
    done = subprocess.run(command, env=child_environment(os.environ), capture_output=True)
    assert done.stderr.count(b"RuntimeWarning") == 1
    assert done.stderr.startswith(b"<string>:8: RuntimeWarning")


def test_a_signal_handler_that_python_did_not_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: Python returns None for such a handler and cannot restore it, so runs failed at the end."""
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


def test_a_first_stop_signal_is_noted_and_a_second_one_raises() -> None:
    with stops_deferred() as signals:
        signal.raise_signal(signal.SIGINT)
    assert signals == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt), stops_deferred():
        interrupted_in_native_code()
    with pytest.raises(KeyboardInterrupt), stops_deferred(earlier=1):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(ValueError, match="invalid literal"), stops_deferred():
        int("x")


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_second_sighup_of_a_closed_terminal_is_ignored_also_while_results_are_written(earlier: int) -> None:
    with stops_deferred(earlier) as signals:
        for _ in range(2 - earlier):
            signal.raise_signal(signal.SIGHUP)
    assert len(signals) == 1 - earlier


def interrupted_in_native_code() -> None:
    """Suppress the second signal's KeyboardInterrupt and raise a ValueError instead, as matplotlib may do."""
    signal.raise_signal(signal.SIGINT)
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    raise ValueError("Invalid affine transformation matrix")


def test_children_of_another_user_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """edgefl cannot kill them. An example is a command under ``sudo``."""
    mine, others = Mock(pid=6), Mock(pid=7)
    others.kill.side_effect = psutil.AccessDenied
    all_of_them = {mine, others}
    monkeypatch.setattr(children, "has_children", lambda: bool(all_of_them))
    monkeypatch.setattr(psutil, "Process", lambda: Mock(children=lambda recursive=False: [*all_of_them]))
    monkeypatch.setattr(children.os, "waitpid", lambda pid, _: all_of_them.remove(mine))
    children.end_children()
    assert all_of_them == {others}
    mine.kill.assert_called_once()


def test_only_a_child_that_does_not_end_in_time_is_killed() -> None:
    for seconds, code in ((0, 0), (60, -signal.SIGKILL)):
        late = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
        assert children.end_child(late, grace_s=0.2 if seconds else 30.0).code == code


def test_a_child_is_not_killed_when_the_wait_for_it_is_interrupted() -> None:
    """It may be writing its last checkpoint."""
    interrupted = Mock(spec=children.Child)
    interrupted.wait.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        children.end_child(interrupted, grace_s=30.0)
    interrupted.kill.assert_not_called()


def test_children_are_found_even_if_proc_does_not_list_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LISTED", False)
    with subprocess.Popen(["sleep", "60"]) as process:
        assert process.pid in (children.children_of(os.getpid()) or [])
        process.kill()
    assert children.children_of(process.pid) is None


def test_a_python_without_pidfds_falls_back_to_system_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is conda's Python, which is built for an old version of Linux."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)
    with subprocess.Popen(["sleep", "60"]) as process:
        target = Target(process.pid)
        target.send(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        target.send(0)
    target.close()
    with pytest.raises(ProcessLookupError):
        Target(process.pid)
    assert call_forked("edgefl-test", lambda: b"done")[0] == b"done"


def test_the_watch_for_children_works_again_after_other_code_has_replaced_its_handler() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    watch = children.ChildWatch()
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)  # as an asyncio loop with signal handlers does when it ends
        watch.watch()
        pid = children.fork("edgefl-test", lambda: 0)
        assert select.select([watch], [], [], 60.0)[0] == [watch]
        assert children.collect(pid).code == 0
    finally:
        watch.close()
        signal.signal(signal.SIGCHLD, before)


def test_a_failed_fork_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork fails, for example, in a container that has reached its maximum number of processes."""

    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def be_a_zygote(*_: object) -> None:
        children.fork("edgefl-client-17", lambda: None)

    monkeypatch.setattr(os, "fork", full)
    monkeypatch.setattr(child, "import_module", lambda _: Mock(main=be_a_zygote))
    monkeypatch.delenv("EDGEFL_TRACEBACK", raising=False)
    reported: list[str] = []
    monkeypatch.setattr(child, "_report", lambda _, what: reported.append(what))
    assert child.main(-1, os.getpid(), "edgefl.run.zygote") == 1
    assert len(reported) == 1
    assert reported[0].startswith("edgefl-client-17 cannot be started: Resource temporarily unavailable (")
