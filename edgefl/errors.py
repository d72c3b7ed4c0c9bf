"""All exceptions that edgefl defines.

    EdgeflError
    ├── ConfigError      a setting, a file or an argument is invalid; the command exits with code 2
    │   ├── FolderTaken      the folder for a new run is not empty
    │   └── ProfileError     a device or network profile is missing or invalid
    ├── WireError        a process of a run sent an invalid message; it is disconnected, which is recorded
    ├── SlotError        the parameter buffer was used in an invalid way
    ├── RunError         a run failed after it had started; the command exits with code 1
    │   ├── FolderError      the run's folder cannot be written, for example because the disk is full
    │   └── GpuError         a call of CUDA failed, for example because the GPU's memory is full
    ├── TrainingError    the user's training function raised an exception, or took too many steps
    ├── NotMet           a device test exceeds its budget or its baseline
    │   └── OutOfDeviceMemory    the function needs more memory than the device gives an app
    └── Invalid          a device test's measurement is not reliable, so the test cannot pass

Each message is one line that says what is wrong, which value was given, and what is allowed.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
"""Error numbers that mean that this process, or the system, has too many open files."""
LONGEST_NAME, LONGEST_LIST = 60, 120
"""Maximum length of a name, and of a list of names, in a message, in characters."""
NEAR_MATCH = 0.8
"""A name that is at least this similar to the input (see `difflib`) is suggested in preference to names that
contain the input."""
MIN_PART = 3
"""Minimum length of an input for which names that contain it are suggested, in characters."""


class EdgeflError(Exception):
    """Base class of all exceptions that edgefl defines."""


class ConfigError(EdgeflError):
    """An experiment, a file or an argument is invalid."""


class FolderTaken(ConfigError):
    """The folder for a new run is not empty, or another process has just taken it."""


class ProfileError(ConfigError):
    """A device, network or fleet profile is missing or invalid."""


class WireError(EdgeflError):
    """A process of a run sent bytes that are not a valid message."""


class SlotError(EdgeflError):
    """The parameter buffer was used in an invalid way."""


class RunError(EdgeflError):
    """A run failed after it had started."""


class FolderError(RunError):
    """The run's folder cannot be written. The run can later be resumed from its last checkpoint."""


class GpuError(RunError, RuntimeError):
    """A call of CUDA failed."""


class TrainingError(EdgeflError):
    """The user's training function failed on a client. The client's task is lost, but the run continues."""


class NotMet(EdgeflError, AssertionError):
    """A device test exceeds its budget or its baseline."""


class OutOfDeviceMemory(NotMet):
    """The function exceeded the device's memory limit for apps, so its process was killed."""


class Invalid(EdgeflError):
    """A measurement on an emulated device is not reliable."""


def of_system(error: OSError) -> str:
    """Return a one-line description of an operating system error, with the limit or the path that it
    concerns.

    >>> of_system(OSError(28, "No space left on device", "runs/a"))
    "no space left on the device of 'runs/a'"
    """
    if error.errno in TOO_MANY_FILES:
        with suppress(ImportError, OSError):
            import resource

            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"too many open files: the limit is {limit} (ulimit -n)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = "" if error.filename is None else f" of {os.fsdecode(error.filename)!r}"
        return f"no space left on the device{where}"
    return str(error)


def unknown(what: str, got: str, allowed: Iterable[str]) -> str:
    """Return a one-line message for an unknown name. It lists the allowed names and suggests a similar one.

    >>> unknown("profile", "pixel3a", ["pixel-3a", "pi-4"])
    "profile 'pixel3a' not found; did you mean 'pixel-3a'? available: pi-4, pixel-3a"
    """
    names = sorted(allowed)
    return f"{what} {shortened(got)!r} not found;{near(got, names)} available: {listed(names) or 'none'}"


def listed(names: Iterable[str]) -> str:
    """Return the sorted names as text of up to `LONGEST_LIST` characters, followed by the number of names
    that do not fit.

    >>> listed(["b", "a"]), listed(["a" * 100, "b" * 100, "c"]).replace("a" * 100, "a…a")
    ('a, b', 'a…a and 2 more')
    """
    names, length = sorted(names), 0
    for count, name in enumerate(names):
        length += len(name) + 2
        if count and length > LONGEST_LIST:
            return f"{', '.join(names[:count])} and {len(names) - count} more"
    return ", ".join(names)


def shortened(name: str, most: int = LONGEST_NAME) -> str:
    """Return a name or another text, shortened to at most ``most`` characters (by default 60).

    >>> shortened("pixel-4"), len(shortened("k" * 4000))
    ('pixel-4', 60)
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def near(got: str, allowed: Iterable[str]) -> str:
    """Return a suggestion of the allowed name that is most similar to ``got``; "" if no name is similar.

    >>> near("versoins", ["trips", "versions"])
    " did you mean 'versions'?"
    """
    found = nearest(got, allowed)
    return f" did you mean {found!r}?" if found else ""


def nearest(got: str, allowed: Iterable[str], least: float = 0.6) -> str | None:
    """Return the allowed name that is most similar to ``got``, ignoring case.

    If no name has a similarity of `NEAR_MATCH`, names that contain ``got`` (of `MIN_PART` characters
    or more) are preferred. Return None if there are none and no similarity is at least ``least``.

    >>> nearest("A76", ["ARM1176", "Cortex-A76"]), nearest("PI4", ["pi-4"]), nearest("x", ["pi-4"])
    ('Cortex-A76', 'pi-4', None)
    """
    names, part = {name.lower(): name for name in allowed}, got.lower()
    containing = [name for name in names if part in name] if len(part) >= MIN_PART else []
    for tried, cutoff in ((names, NEAR_MATCH), (containing, 0.0), (names, least)):
        if found := difflib.get_close_matches(part, tried, n=1, cutoff=cutoff):
            return names[found[0]]
    return None


def message_of(error: BaseException) -> str:
    """Return the message of an exception; "" if the user's own class cannot make one."""
    try:
        return str(error)
    except Exception:
        return ""


def described(error: BaseException) -> str:
    """Return the name of an exception's class, followed by its message if it has one, in one line."""
    return ": ".join(filter(None, (type(error).__name__, " ".join(message_of(error).split()))))


@contextmanager
def exit_as_error() -> Iterator[None]:
    """Turn `SystemExit`, which would end the process, into a `RuntimeError` with the same traceback.

    In a process that the user's code has forked, `SystemExit` still ends that process.

    >>> with exit_as_error():
    ...     raise SystemExit("no data")
    Traceback (most recent call last):
    RuntimeError: SystemExit: no data
    """
    process = os.getpid()
    try:
        yield
    except SystemExit as error:
        if os.getpid() != process:
            raise
        raise RuntimeError(described(error)).with_traceback(error.__traceback__) from error


@contextmanager
def as_config_error(
    what: object, *faults: type[Exception], kind: type[ConfigError] = ConfigError
) -> Iterator[None]:
    """Turn ``faults`` into a `ConfigError` of this ``kind`` whose message starts with ``what``.

    >>> with as_config_error("a.csv, line 2", ValueError):
    ...     int("x")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: a.csv, line 2: invalid literal for int() with base 10: 'x'
    """
    try:
        yield
    except faults as error:
        raise kind(f"{what}: {error}") from None


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Turn errors caused by corrupt data in ``what`` into a one-line `ConfigError`.

    >>> with damaged("runs/a"):
    ...     int("x")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: runs/a: files are damaged, or are from several runs: ValueError: invalid ...
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if os.environ.get("EDGEFL_TRACEBACK"):
            raise
        raise ConfigError(
            f"{what}: files are damaged, or are from several runs: {described(error)[:300]} "
            "(EDGEFL_TRACEBACK=1 shows where)"
        ) from None
