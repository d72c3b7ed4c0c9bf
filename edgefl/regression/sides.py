"""Messages between the test's process and the processes that run a function of the base and of the head.

    stem ── Branch ──► branch of the base ── CallRequest ──► one process that runs the base's function
     └───── Branch ──► branch of the head ── CallRequest ──► one process that runs the head's function

A stem is a process that imports the modules that both sides (base and head) import from elsewhere, such as
torch. It forks a branch process for each side. For each call request, a branch imports the user's module from
the files of its side, answers `Imported`, and forks a process. That process prepares the function and answers
`Ready`. Then it makes a shot (several calls, timed together) for each `ShotRequest`, until it receives an
`EndRequest`.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

import msgspec

from edgefl.host.channel import Channel, Closed, pair
from edgefl.host.children import end_child
from edgefl.host.process import start_process, without_gpus
from edgefl.regression.process import ENDING_S, Failure, FunctionLocation, Surroundings

HOOK = ".__path_hook__"
"""Suffix of an entry that setuptools adds to ``sys.path`` for an editable install with namespace packages.
The entry is not a folder; setuptools' import hook recognises it."""


class SideFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one side: the base's checkout, or the head's working tree."""

    root: str
    """Top folder of this side's files."""
    head: str
    """Top folder of the repository; the base must not import anything from it."""
    folder: str
    """Working directory of the head's processes; the base uses the corresponding folder of its checkout."""
    path: list[str]
    """``sys.path`` of the head's processes; the base uses the corresponding paths of its checkout."""


class Preload(msgspec.Struct, frozen=True, tag="preload"):
    """Import these modules, so that the branches need not import them."""

    modules: list[str]


class Preloaded(msgspec.Struct, frozen=True, tag="preloaded"):
    """The answer to `Preload`: the modules are imported."""


class Branch(msgspec.Struct, frozen=True, tag="branch"):
    """Fork a branch process; the descriptor of its channel is sent with the message."""

    files: SideFiles


class CallRequest(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """Import and prepare a function in a separate process."""

    function: FunctionLocation
    setup: FunctionLocation | None
    args: list[Any]
    kwargs: dict[str, Any]
    device: str
    network: str | None
    layout: int
    """Seed of the process's memory layout: the same on both sides."""
    limit_s: float
    core: int | None = None
    """The core to which the process is limited. It is the same on both sides, because cores differ in speed
    and load."""
    modules: list[str] = []
    """Modules to import after the function's module and before the process is forked."""


class ShotRequest(msgspec.Struct, frozen=True, tag="shot"):
    """Call the function ``calls`` times."""

    calls: int


class EndRequest(msgspec.Struct, frozen=True, tag="end"):
    """End the process of the function; the branch answers `Ended`."""


class Imported(msgspec.Struct, frozen=True, tag="imported"):
    """The first answer to `CallRequest`: the function is imported, and its process starts now."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The second answer to `CallRequest`: the function is prepared. The values are from the first calls."""

    call_s: float
    """Approximate time of a call in seconds: CPU time plus blocked time."""
    peak_mib: float
    sent_mib: float
    modules: list[str] | None
    """Modules outside base and head that the user's code had imported when its first call ended, in order of
    import. None if importing this code changed environment variables: the modules must then be imported after
    this change."""


class Shot(msgspec.Struct, frozen=True, kw_only=True, tag="shot"):
    """The answer to `ShotRequest`: the total times of all calls of the shot, in nanoseconds."""

    cpu_ns: int
    """CPU time of the process and of the children that it has reaped."""
    blocked_ns: int
    """Time during which the process neither computed nor waited for a core. It is set to 0 if the process
    reaped children, because it is unknown whether the children slept or waited for a core."""
    waited_ns: int
    """Time during which the process was runnable but had no core."""

    @property
    def cost_ns(self) -> int:
        return self.cpu_ns + self.blocked_ns


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The process of the function has ended."""


StemRequest = Preload | Branch
BranchRequest = CallRequest | ShotRequest | EndRequest
BranchAnswer = Imported | Ready | Shot | Ended | Failure


class Stem:
    """A process with its own hash seed and memory layout, which forks branches. Call `close` at the end."""

    def __init__(self, hash_seed: int, padding: int) -> None:
        environment = Surroundings.now().environment | {
            "PYTHONHASHSEED": str(hash_seed),
            "EDGEFL_PADDING": "x" * padding,
        }
        self._channel: Channel[Preloaded]
        self.popen: subprocess.Popen[bytes]
        self.popen, self._channel = start_process(
            "edgefl.regression.stem", Preloaded, without_gpus(environment)
        )

    def preload(self, modules: list[str]) -> None:
        """Begin to import modules."""
        self._channel.tell(Preload(modules))

    def wait(self) -> None:
        """Wait until the modules are imported, or the process has ended."""
        with contextlib.suppress(Closed):
            self._channel.receive()

    def branch(self, files: SideFiles) -> Channel[BranchAnswer]:
        """Fork a branch, the process of one side; return the channel to the branch."""
        ours, theirs = pair()
        with theirs:
            self._channel.tell(Branch(files), theirs.fileno())
        return Channel(ours, BranchAnswer)

    def close(self) -> None:
        """End the process and all processes that it has started."""
        self._channel.close()
        end_child(self.popen, ENDING_S)
