"""Start edgefl processes, each with a channel to its parent, and configure the current process.

A child must not outlive its parent. `edgefl.host.children` forks, reaps and kills children.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from edgefl.host.channel import Channel, pair
from edgefl.processes import command_of, finding_edgefl, stopped_by

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POOLS = ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM", "NUMBA")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_SA_NOCLDSTOP = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SYS_PIDFD_SEND_SIGNAL, _SYS_PIDFD_OPEN = 424, 434  # the same numbers on x86-64, ARM and RISC-V

_libc = ctypes.CDLL(None, use_errno=True)


def start_process(
    module: str,
    incoming: Any,
    environment: dict[str, str],
    *arguments: str,
    inherited: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], Channel[Any]]:
    """Run a module as a child with the arguments FD PID; return the child and its channel.

    FD is the child's end of the channel, and PID is this process. The descriptors in ``inherited`` keep their
    numbers in the child, whose thread pools have size one.
    """
    ours, theirs = pair()
    with theirs, _stops_blocked():
        fd = theirs.fileno()
        child = subprocess.Popen(
            command_of(module, str(fd), str(os.getpid()), *arguments),
            pass_fds=[fd, *inherited],
            stdin=subprocess.DEVNULL,
            env=child_environment(environment),
        )
    return child, Channel(ours, incoming)


def inherited_descriptors() -> tuple[int, ...]:
    """Return the descriptors above 2 that this process has inherited, such as the pipe of a shell's ``<(…)``.

    Programs that this process executes inherit them, too. Descriptors that Python opens are not inheritable.
    """
    found, listed = [], list[str]()
    with suppress(OSError):  # /proc is not mounted
        listed = os.listdir("/proc/self/fd")
    for fd in map(int, listed):
        with suppress(OSError):  # the descriptor of the listing itself is closed
            if fd > 2 and os.get_inheritable(fd):
                found.append(fd)
    return tuple(sorted(found))


def without_gpus(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with NVIDIA's GPUs hidden from CUDA.

    The GPUs are hidden because an emulated phone has none, and a process that uses CUDA cannot fork.

    >>> without_gpus({"HOME": "/"})
    {'HOME': '/', 'CUDA_VISIBLE_DEVICES': ''}
    """
    return {**environment, "CUDA_VISIBLE_DEVICES": ""}


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child that forks or computes on one core: all thread pools have size one,
    and the child finds edgefl.

    >>> child_environment({"HOME": "/"})["OMP_NUM_THREADS"]
    '1'
    """
    one = {f"{pool}_NUM_THREADS": "1" for pool in _POOLS}
    return finding_edgefl({**environment, **one, "PYTHONUNBUFFERED": "1"})


def stops() -> list[signal.Signals]:
    """Return the signals that end a command. SIGHUP is left out if it is ignored, as under ``nohup``.

    >>> before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    >>> [number.name for number in stops()]
    ['SIGINT', 'SIGTERM']
    >>> _ = signal.signal(signal.SIGHUP, before)
    """
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOPS if not (kept and number == signal.SIGHUP)]


@contextmanager
def handled(numbers: Iterable[int], handle: Callable[[int], None], seen: int = 0) -> Iterator[None]:
    """Call ``handle`` for these signals, but not for a SIGHUP that follows any of them.

    A closed terminal sends SIGHUP twice. ``seen`` is the number of signals that arrived before this call.

    Outside the main thread, this function does nothing, because Python allows no signal handlers there. A
    handler that was not set by Python, as in a program that embeds Python, is kept, because Python could not
    restore it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, _: object) -> None:
        nonlocal seen
        if number != signal.SIGHUP or not seen:
            seen += 1
            handle(number)

    ours = [number for number in numbers if signal.getsignal(number) is not None]
    before = {number: signal.signal(number, note) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stops_deferred(earlier: int = 0) -> Iterator[list[int]]:
    """Record the first signal that would end the command, and continue; yield the list of recorded signals.

    ``earlier`` is the number of signals that arrived before this call. The second signal in total raises
    KeyboardInterrupt. A SIGHUP that follows another signal is ignored.

    A library may replace an exception that a signal handler raises: matplotlib's compiled code turns it into
    a ValueError.
    """
    seen = list[int]()

    def note(number: int) -> None:
        seen.append(number)
        stopped_by.append(number)
        if earlier + len(seen) > 1:
            raise KeyboardInterrupt

    with handled(stops(), note, earlier):
        try:
            yield seen
        except Exception:
            if seen and earlier + len(seen) > 1:
                raise KeyboardInterrupt from None
            raise


@contextmanager
def _stops_blocked() -> Iterator[None]:
    """Block the stop signals in a new process until `become_child` has set their handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def keep_stops() -> Callable[[], None]:
    """Return a function that restores the current handlers of the stop signals after `become_child`."""
    handlers = {number: signal.getsignal(number) for number in STOPS}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    return restore


def _ignore(*_: object) -> None:
    pass


def become_child(parent_pid: int, name: str) -> None:
    """Configure this process as a child: die with the parent, ignore the stop signals, set a readable name.

    SIGTERM is ignored by a handler, because programs that the user's code starts would inherit SIG_IGN and
    could then not be terminated. NumPy's warnings about edgefl's own arithmetic are hidden, because the
    record lists values that are not finite.
    """
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"edgefl\.")
    for number in STOPS:
        signal.signal(number, _ignore if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before the signal was armed
        os._exit(0)


def kill_forks_with_parent() -> None:
    """Make every fork of this process, and every fork of a fork, die when its parent dies.

    This includes forks made by the user's code. SIGTERM ends the forks, as it ends any process.
    """
    parent, mask = 0, set[int]()

    def prepare() -> None:
        nonlocal parent, mask
        parent, mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def die_with_parent() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the signal was armed
            os._exit(0)

    os.register_at_fork(before=prepare, after_in_parent=unblock, after_in_child=die_with_parent)


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation instead of returning it to the system.

    Otherwise glibc returns the memory of activations after each training step and requests it again, zeroed
    page by page, which takes an eighth of the time of a small CNN's step. With other allocators, this does
    nothing.
    """
    if (mallopt := getattr(_libc, "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that glibc allows
        mallopt(_M_TRIM_THRESHOLD, 2**30)
        mallopt(_M_TOP_PAD, 2**20)


def outlive_parent() -> None:
    """Let this process outlive its parent, which `become_child` prevents by default.

    Instead, the process cleans up when its channel closes.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def die_soon_after_parent() -> None:
    """Make this process, which exits when its channel closes, die at most ten seconds after its parent.

    The handler of the parent-death signal is the C library's ``alarm``, which takes the signal's number, 10,
    as seconds. The process therefore ends even while it runs native code.
    """
    _libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    _libc.signal(signal.SIGUSR1, ctypes.cast(_libc.alarm, ctypes.c_void_p))
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the new parent of descendants whose parent ends, if the system supports it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@functools.cache
def allow_open_files() -> int | None:
    """Raise the limit on open files to the hard limit, because each client needs a socket.

    Return the previous limit; None if it cannot be raised.
    """
    with suppress(OSError, ValueError):
        before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return before
    return None


def ignore_stopped_children() -> None:
    """Let SIGCHLD report children that end, but not children that a throttle stops.

    The handler of SIGCHLD must already be set.
    """

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


def open_pidfd(pid: int) -> int:
    """Return a new pidfd of a process. Raises OSError if there is no such process.

    A Python that was built for an old Linux, such as conda's, lacks `os.pidfd_open`. The kernel may still
    have the system call.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _checked(_libc.syscall(_SYS_PIDFD_OPEN, pid, 0))


def signal_pidfd(fd: int, number: int) -> None:
    """Send a signal to the process of a pidfd. Raises OSError if the process has ended or refuses it."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(fd, number)
    else:  # as in `open_pidfd`
        _checked(_libc.syscall(_SYS_PIDFD_SEND_SIGNAL, fd, number, None, 0))


def _checked(result: int) -> int:
    """Return the result of a C function. Raises OSError if it is below 0."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def read_kernel_file(path: str | Path) -> bytes:
    """Return the content of a file in /proc or in a control group. Raises OSError if it cannot be read.

    A throttle reads several such files per turn. This function takes 0.5 to 0.7 times as long as
    ``open(path).read()``.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = b""
        while part := os.read(fd, 1 << 16):
            content += part
        return content
    finally:
        os.close(fd)


class ThreadSchedule(NamedTuple):
    """Linux's scheduling statistics of a thread. They change only when the thread runs."""

    ran_ns: int
    waited_ns: int
    """Time in which the thread could have run but had no core or quota. A wait is added when it is over."""
    slices: int


def thread_schedule(thread: str) -> ThreadSchedule | None:
    """Return the schedule of the thread ``PID/task/TID``; None if it has ended or Linux reports none.

    If ``thread`` is only ``PID``, return the schedule of the process's main thread.
    """
    with suppress(OSError, TypeError):
        return ThreadSchedule(*map(int, read_kernel_file(f"/proc/{thread}/schedstat").split()))
    return None


def threads_of(pid: int) -> Iterator[tuple[str, ThreadSchedule]]:
    """Yield each thread of a process, as ``PID/task/TID``, and its schedule."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            if found := thread_schedule(f"{pid}/task/{task}"):
                yield f"{pid}/task/{task}", found
