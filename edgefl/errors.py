"""Every error edgefl raises on purpose.

    EdgeflError
    ├── ConfigError      what the user asked for cannot be done; the command line exits with 2
    │   ├── FolderTaken      a new run's folder holds something already
    │   └── ProfileError     a device or network profile is missing or wrong
    ├── WireError        a peer sent bytes that are not a message; the peer is dropped and counted
    ├── SlotError        the parameter buffer was used against its rules
    ├── RunError         a run that started could not go on; the command line exits with 1
    │   └── FolderError      its folder cannot be written: the disk is full, or gone
    ├── TrainingError    a client's own training function raised, or made steps that it does not have
    ├── NotMet           a device test's budget or baseline is not met
    │   └── OutOfDeviceMemory    the function needs more memory than the device gives an app
    └── Invalid          a device test's figures cannot be believed, so they pass nothing

A message says what is wrong, what was got and what is allowed, in one line.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

LONGEST_NAME, LONGEST_LIST = 60, 120
"""Characters of a name and of a list of names in a message, which has 300 at most."""


class EdgeflError(Exception):
    """Base of every error that edgefl raises on purpose."""


class ConfigError(EdgeflError):
    """The experiment, a file or an argument asks for something that cannot be done."""


class FolderTaken(ConfigError):
    """The folder for a new run holds something, or another process was faster."""


class ProfileError(ConfigError):
    """A device, network or fleet profile is missing, or a figure in it is wrong."""


class WireError(EdgeflError):
    """Bytes from a peer are not a message of the protocol."""


class SlotError(EdgeflError):
    """The parameter buffer was used against its rules."""


class RunError(EdgeflError):
    """A run that had started could not go on."""


class FolderError(RunError):
    """A run's folder cannot be written; once it can be, the run goes on from its last checkpoint."""


class TrainingError(EdgeflError):
    """A client's training by the user's own function failed: it costs the task, not the run."""


class NotMet(EdgeflError, AssertionError):
    """A budget or baseline of a device test does not hold."""


class OutOfDeviceMemory(NotMet):
    """The function needs more memory than the device gives an app; its process was ended."""


class Invalid(EdgeflError):
    """A measurement on an emulated device cannot be believed."""


def of_system(error: OSError) -> str:
    """One line for an error of the operating system, with the limit or the place that it is about.

    >>> of_system(OSError(28, "No space left on device", "runs/a"))
    "no space left on the device of 'runs/a'"
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        with suppress(ImportError, OSError):
            import resource

            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"too many open files: the limit is {limit} (ulimit -n)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = "" if error.filename is None else f" of {os.fsdecode(error.filename)!r}"
        return f"no space left on the device{where}"
    return str(error)


def unknown(what: str, got: str, allowed: Iterable[str]) -> str:
    """One line for a name that does not exist, with the nearest that does.

    >>> unknown("profile", "pixel3a", ["pixel-3a", "pi-4"])
    "profile 'pixel3a' not found; did you mean 'pixel-3a'? have: pi-4, pixel-3a"
    """
    names = sorted(allowed)
    return f"{what} {shortened(got)!r} not found;{near(got, names)} have: {listed(names) or 'none'}"


def listed(names: Iterable[str]) -> str:
    """The names that fit into `LONGEST_LIST` characters, sorted, and the number of the others.

    >>> listed(["b", "a"]), listed(["a" * 100, "b" * 100, "c"]).replace("a" * 100, "a…a")
    ('a, b', 'a…a and 2 more')
    """
    names, length = sorted(names), 0
    for count, name in enumerate(names):
        length += len(name) + 2
        if count and length > LONGEST_LIST:
            return f"{', '.join(names[:count])} and {len(names) - count} more"
    return ", ".join(names)


def shortened(name: str) -> str:
    """A name of at most 60 characters.

    >>> shortened("pixel-4"), len(shortened("k" * 4000))
    ('pixel-4', 60)
    """
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def near(got: str, allowed: Iterable[str]) -> str:
    """A question for the allowed name that is nearest to ``got``; empty if none is near.

    >>> near("versoins", ["trips", "versions"])
    " did you mean 'versions'?"
    """
    found = difflib.get_close_matches(got, list(allowed), n=1, cutoff=0.6)
    return f" did you mean {found[0]!r}?" if found else ""


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Say in one line that ``what`` is damaged, whatever Python says of the values that it then holds.

    >>> with damaged("runs/a"):
    ...     int("x")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: runs/a: damaged, or of several runs: ValueError: invalid literal for int() ...
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if os.environ.get("EDGEFL_TRACEBACK"):
            raise
        line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{what}: damaged, or of several runs: {line} (EDGEFL_TRACEBACK=1 shows where)"
        ) from None
