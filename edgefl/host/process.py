"""The start of a child process, and its first steps: it must not outlive its parent."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import psutil

from edgefl.host.channel import Channel, pair
from edgefl.processes import child_environment

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_SA_NOCLDSTOP = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Child(Protocol):
    """A process that was started here; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def end_child(child: Child, grace_s: float) -> int:
    """Wait for a process to leave, which a closed channel tells it, or kill it; returns its exit code."""
    try:
        return child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def start_process(
    module: str,
    incoming: Any,
    environment: dict[str, str],
    *arguments: str,
    inherited: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], Channel[Any]]:
    """Start ``python -m module FD PID`` with one core; returns it and the channel whose other end is FD.

    Descriptors to be ``inherited`` keep their numbers in it.
    """
    ours, theirs = pair()
    with theirs, _stops_blocked():
        fd = theirs.fileno()
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(fd), str(os.getpid()), *arguments],
            pass_fds=[fd, *inherited],
            stdin=subprocess.DEVNULL,
            env=child_environment(environment),
        )
    return child, Channel(ours, incoming)


def stops() -> list[signal.Signals]:
    """The signals that end a command: a closed terminal's only without ``nohup``.

    >>> before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    >>> [number.name for number in stops()]
    ['SIGINT', 'SIGTERM']
    >>> _ = signal.signal(signal.SIGHUP, before)
    """
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOPS if not (kept and number == signal.SIGHUP)]


@contextmanager
def _stops_blocked() -> Iterator[None]:
    """Have a process that is started here hear of Ctrl-C only once it has said what to do then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_to_supervisor(*_: object) -> None:
    pass


def become_child(parent_pid: int, name: str) -> None:
    """Die with the parent, leave Ctrl-C, SIGTERM and SIGHUP to the supervisor, and carry a readable name.

    SIGTERM has a handler: what a user's code starts would inherit that it is ignored, and could not be ended.
    numpy's warnings about edgefl's own arithmetic are not shown: the record has updates that are not finite.
    """
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"edgefl\.")
    for number in STOPS:
        signal.signal(number, _leave_to_supervisor if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the signal was armed
        os._exit(0)


def take_forks_along() -> None:
    """Have what is forked in this process, by a user's code too, die with it; likewise what that forks.

    It can be ended by SIGTERM, as what is started by any other program.
    """
    libc, parent, mask = _libc, 0, set[int]()
    if libc is None:
        return

    def note_parent() -> None:
        nonlocal parent, mask
        parent, mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def hear_again() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def die_with_it() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        hear_again()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the signal was armed
            os._exit(0)

    os.register_at_fork(before=note_parent, after_in_parent=hear_again, after_in_child=die_with_it)


def keep_freed_memory() -> None:
    """Let this process keep what it frees, for its next allocation, instead of giving it back to the system.

    glibc would give a step's activations back and fetch them again, zeroed page by page, at each step: an
    eighth of the time of a small CNN's. Other allocators are left as they are.
    """
    if (mallopt := getattr(_libc, "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that glibc allows
        mallopt(_M_TRIM_THRESHOLD, 2**30)
        mallopt(_M_TOP_PAD, 2**20)


def outlive_parent() -> None:
    """Do not die with the parent any more: the caller watches its channel, and tidies up when that ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def die_soon_after_parent() -> None:
    """Die some seconds after the parent at the latest, and not with it: the caller watches its channel.

    The system calls the C library's ``alarm`` as the signal's handler, with the signal's number for seconds:
    ten. So whatever this process is at, and in whatever language, it ends.
    """
    if (libc := _libc) is not None:
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal(signal.SIGUSR1, ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)


def adopt_orphans() -> None:
    """Make processes that this process's children leave behind its own children, where the system can."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def has_children() -> bool:
    """Return whether this process has any, running or ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_children() -> None:
    """Kill every child, and theirs, which fall to this process by `adopt_orphans`; leave another user's."""
    refused: set[psutil.Process] = set()  # as what ``sudo`` starts
    while has_children() and (own := {*psutil.Process().children()} - refused):
        for child in psutil.Process().children(recursive=True):
            try:
                child.kill()
            except psutil.AccessDenied:
                refused.add(child)
            except psutil.NoSuchProcess:
                pass
        for child in own - refused:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


@functools.cache
def allow_open_files() -> int | None:
    """Let this process open as many files as the system allows it: each client is a socket.

    Returns the limit that it had; None where that stays.
    """
    with suppress(ImportError, OSError, ValueError):
        import resource

        before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return before
    return None


def hear_no_stops_of_children() -> None:
    """Let SIGCHLD tell of children that end, not of those that a throttle stops. Set its handler before."""
    if _libc is None:
        return

    class Action(ctypes.Structure):
        _fields_ = (
            ("handler", ctypes.c_void_p),
            ("mask", ctypes.c_ulong * (128 // ctypes.sizeof(ctypes.c_ulong))),
            ("flags", ctypes.c_int),
            ("restorer", ctypes.c_void_p),
        )

    action = Action()
    if _libc.sigaction(signal.SIGCHLD, None, ctypes.byref(action)) == 0:
        action.flags |= _SA_NOCLDSTOP
        _libc.sigaction(signal.SIGCHLD, ctypes.byref(action), None)
