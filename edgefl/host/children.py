"""Fork and reap children of this process, report how they ended, and kill them and their descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import psutil

from edgefl.errors import TOO_MANY_FILES, RunError
from edgefl.host.process import become_child, ignore_stopped_children, read_kernel_file

OUT_OF_MEMORY_EXIT = 77
"""Exit code of a forked child that ran out of memory."""
LISTED = os.path.exists("/proc/thread-self/children")
"""True if /proc lists the children of each thread. Some kernels lack these lists (CONFIG_PROC_CHILDREN)."""


class Exit(NamedTuple):
    """The exit code of a process that has ended, and its CPU time.

    >>> str(Exit(3)), str(Exit(-9)), Exit(-9).signal
    ('exit code 3', 'signal 9', 9)
    """

    code: int
    """Exit code; −n if signal n ended the process."""
    cpu_s: float = 0.0
    """CPU seconds of the process and of the children that it waited for, if known."""

    @property
    def signal(self) -> int:
        """Number of the signal that ended the process; 0 if it exited by itself."""
        return max(0, -self.code)

    def __str__(self) -> str:
        return f"signal {self.signal}" if self.signal else f"exit code {self.code}"


class Child(Protocol):
    """A process that this process has started; `subprocess.Popen` implements this protocol."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def fork(name: str, main: Callable[[], int | None]) -> int:
    """Run ``main`` in a forked child that dies with this process; return the child's pid.

    Raises `RunError` if the system refuses to fork.
    """
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        why = f"{name} cannot be started: {error.strerror}"
        raise RunError(f"{why} ('edgefl doctor' shows what this machine allows)") from None
    if pid != 0:
        return pid

    def child() -> int | None:
        signal.set_wakeup_fd(-1)
        become_child(parent, name)
        return main()

    exit_with(child)


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` in this forked process and exit with its result; never return to the parent's code.

    After an exception, the process prints a traceback and exits with code 1; after a MemoryError, it exits
    with `OUT_OF_MEMORY_EXIT`.
    """
    code = 1
    try:
        code = main() or 0
    except MemoryError:
        code = OUT_OF_MEMORY_EXIT
    except BaseException:
        with suppress(Exception):
            traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class ChildWatch:
    """A descriptor that is readable when a child may have ended. A process may create only one.

    It uses SIGCHLD, which is configured not to report children that a throttle merely stops.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        self.watch()

    def watch(self) -> None:
        """Watch from now on. Call this again after other code has run: it may have taken over SIGCHLD (as
        torch's DataLoader does) or Python's wake-up descriptor (as asyncio does)."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        ignore_stopped_children()

    def fileno(self) -> int:
        return self._read

    def ended(self) -> Iterator[int]:
        """Yield the pid of each ended child, without blocking.

        Call `collect` for each child before advancing the iterator.
        """
        with suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                yield found.si_pid

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)


def collect(pid: int) -> Exit:
    """Wait for the end of a child and reap it. Raises ChildProcessError if ``pid`` is not a child."""
    _, status, used = os.wait4(pid, 0)
    return Exit(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)


@contextmanager
def waiting_for_children() -> Iterator[Callable[[], None]]:
    """Set SIGCHLD's default action, so that a handler of the user's code cannot reap this process's children.

    Yield a function that restores the former action; a forked child can call it.
    """
    before = signal.getsignal(signal.SIGCHLD)

    def restore() -> None:
        if before is not None:  # None for a handler that was not set by Python
            signal.signal(signal.SIGCHLD, before)

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield restore
    finally:
        restore()


def exit_of(child: Child, timeout_s: float) -> Exit | None:
    """Wait for the end of a child; return None if it is still running after ``timeout_s`` seconds."""
    with suppress(subprocess.TimeoutExpired):
        return Exit(child.wait(timeout_s))
    return None


def end_child(child: Child, grace_s: float) -> Exit:
    """Wait for a child whose channel was closed; after ``grace_s`` seconds, kill it and its descendants.

    An exception during the wait, such as KeyboardInterrupt, leaves the child running, so that it can clean
    up.
    """
    try:
        return Exit(child.wait(grace_s))
    except subprocess.TimeoutExpired:
        kill_tree(child)
        return Exit(child.wait())


def has_children() -> bool:
    """Return True if this process has children, including ended children that were not reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children_of(pid: int) -> list[int] | None:
    """Return the children of all threads of a process; None if the process has ended.

    Raises OSError if too many files are open.
    """
    if not LISTED:  # look at the parents of all processes, which takes longer
        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(pid).children()]
        return None
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, read_kernel_file(f"/proc/{pid}/task/{task}/children").split())
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise
        return None
    return found


def kill(pid: int) -> None:
    """Kill a process, unless it has been reaped."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_all(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Kill processes; return those that belong to another user (such as ``sudo``) and cannot be killed."""
    refused: set[psutil.Process] = set()
    for process in processes:
        try:
            process.kill()
        except psutil.AccessDenied:
            refused.add(process)
        except psutil.NoSuchProcess:
            pass
    return refused


def kill_tree(child: Child) -> None:
    """Kill a child of this process and all its descendants."""
    descendants: list[psutil.Process] = []
    with suppress(psutil.Error):
        descendants = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    kill_all(descendants)


def end_children() -> None:
    """Kill and reap all children and their descendants.

    After `adopt_orphans`, this includes orphaned descendants. Processes of another user cannot be killed and
    continue to run.
    """
    refused: set[psutil.Process] = set()
    while has_children() and (own := {*psutil.Process().children()} - refused):
        refused |= kill_all(psutil.Process().children(recursive=True))
        for child in own - refused:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


def kill_marked(mark: str) -> None:
    """Kill this user's processes with ``mark`` (NAME=VALUE) in their environment, until none is left."""
    wanted = mark.encode()
    found = True
    while found:
        found = False
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                marked = wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    found = True
