"""The processes of base and head: a stem forks a branch for each, which forks a process for each function.

Stems differ in hash seed, size of the environment and random addresses, but the two branches of a stem
share all three. Every process has one thread, so that a fork is safe.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import random
import re
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec

from edgefl.errors import ConfigError
from edgefl.host.channel import Channel, Closed
from edgefl.host.children import end_children, fork
from edgefl.host.forked import call_forked
from edgefl.host.process import adopt_orphans, become_child, keep_freed_memory, outlive_parent
from edgefl.regression import sides
from edgefl.regression.calls import bound, takes_device
from edgefl.regression.memory import Peak, TreeWatch
from edgefl.regression.process import Failure, FunctionLocation, find, result_of
from edgefl.regression.usage import ProcessUsage, children_ns
from edgefl.regression.worker import become_forkable, inherit_stops

if TYPE_CHECKING:
    from edgefl.regression.repetition import DeviceHandle

WARM_S = 0.05
"""Minimum total duration, in seconds, of the warm-up calls (at least two) before the first shot."""
MAX_PADDING = 1 << 16
"""Maximum size in bytes of each of the memory blocks that shift the heap of a function's process."""
BLOCKS = 8
DEVICE_MODULE = "edgefl.regression.repetition"
"""Module of `DeviceHandle`, the device that a function may receive."""


def serve_stem(channel: Channel[sides.StemRequest]) -> None:
    """Answer requests until the channel is closed."""
    branches = list[int]()
    with contextlib.suppress(Closed):
        while True:
            request = channel.receive()
            if isinstance(request, sides.Preload):
                _preload(request.modules)
                channel.send(sides.Preloaded())
                continue
            branches = [pid for pid in branches if not _reaped(pid)]  # each file of tests has its own
            mine = channel.descriptor()
            branches.append(fork("edgefl-branch", partial(_branch, channel, mine, request.files)))
            os.close(mine)


def _reaped(pid: int) -> bool:
    """Reap a child if it has ended; return True if it has."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # a preloaded module handles SIGCHLD
        return True


_SET: dict[str, str | None] = {}
"""Values of the environment variables that preloaded modules have changed; None if a variable was deleted."""


def _preload(modules: Iterable[str]) -> None:
    """Import modules, and undo their changes to environment variables until the function is imported.

    Without preloading, the function's module would be imported before these changes.
    """
    before = dict(os.environ)
    _import(modules)
    after = dict(os.environ)
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    _SET.update({name: after.get(name) for name in changed})
    _assign({name: before.get(name) for name in changed})


def _assign(variables: Mapping[str, str | None]) -> None:
    """Set environment variables, or delete those that are None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _import(modules: Iterable[str]) -> None:
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _branch(stem: Channel[sides.StemRequest], descriptor: int, files: sides.SideFiles) -> None:
    stem.close()
    adopt_orphans()
    outlive_parent()
    channel = Channel[sides.BranchRequest].inherit(descriptor, sides.BranchRequest)
    try:
        SideBranch(channel, files).serve()
    finally:
        end_children()


class SideBranch:
    """A process that imports the functions of one side, and forks a process for each call request."""

    def __init__(self, channel: Channel[sides.BranchRequest], files: sides.SideFiles) -> None:
        self._channel, self._files = channel, files
        self._modules = set(sys.modules)
        sys.path[:] = [place for folder in files.path for place in moved(folder, files)]
        sys.path_importer_cache.clear()
        _move_python_path(files)
        folder = moved(files.folder, files)[0]
        os.chdir(folder if os.path.isdir(folder) else files.root)
        _move_editable_installs(files)
        self._early = False
        """True if the import of a function changed environment variables."""
        self._watch = TreeWatch()
        self._found: dict[str, str] = {}
        """Files of the modules that were checked, with symbolic links resolved, keyed by module."""
        self._forkable = 0
        """Value of ``len(sys.modules)`` when `become_forkable` last prepared this process for forks; 0 before
        the first call."""

    def serve(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                request = self._channel.receive()
                assert isinstance(request, sides.CallRequest)
                self._channel.send(self._answered(request))

    def _answered(self, request: sides.CallRequest) -> sides.BranchAnswer:
        """Fork a process that answers the requests about a function; return how the process ended."""
        environment = dict(os.environ)
        try:
            function = self._find(request.function)
            setup = None if request.setup is None else self._find(request.setup)
            self._early |= dict(os.environ) != environment
            _assign(_SET)
            _import([*request.modules, *([DEVICE_MODULE] if takes_device(function) else ())])
            if len(sys.modules) != self._forkable:
                become_forkable(request.function.file)
                self._forkable = len(sys.modules)
        except ConfigError as error:
            return Failure("refused", str(error))
        except _Absent as error:
            return Failure("absent", str(error))
        if (why := self.foreign()) is not None:
            return Failure("foreign", why)
        self._channel.send(sides.Imported())
        self._watch.reset()

        def call() -> bytes:
            inherit_stops()
            failure = result_of(partial(self._take_turns, request, function, setup))
            return b"" if failure is None else msgspec.msgpack.encode(failure)

        data, end = call_forked(
            "edgefl-device", call, caller=self._channel.fileno(), look=self._watch.look, end_all=True
        )
        if data:
            return msgspec.msgpack.decode(data, type=Failure)
        return sides.Ended() if not end.code else Failure("signal", str(end))

    def _take_turns(
        self, request: sides.CallRequest, function: Callable[..., Any], setup: Callable[..., Any] | None
    ) -> None:
        """Run the function in the process that was forked for it.

        Send `Ready` after the first calls, and then answer each request with a `Shot`.
        """
        if request.core is not None:
            os.sched_setaffinity(0, {request.core})
        rng = random.Random(request.layout)
        held = [bytes(rng.randrange(1, MAX_PADDING)) for _ in range(BLOCKS)]
        handle: DeviceHandle | None = None
        if takes_device(function):
            from edgefl.regression.repetition import DeviceHandle

            handle = DeviceHandle.named(request.device, request.network)
        run = bound(function, setup, request.args, request.kwargs, handle)
        peak = Peak(self._watch)
        run()
        peak_mib, sent_bytes = peak.mib(), handle.sent_bytes if handle is not None else 0
        if (why := self.foreign()) is not None:
            self._channel.send(Failure("foreign", why))
            return
        keep_freed_memory()
        gc.collect()
        call_s, sent_mib = _warm(run), sent_bytes / (1 << 20)
        modules = None if self._early else self.imported()
        self._channel.send(sides.Ready(call_s=call_s, peak_mib=peak_mib, sent_mib=sent_mib, modules=modules))
        while isinstance(turn := self._channel.receive(), sides.ShotRequest):
            self._channel.send(shot(run, turn.calls))
        del held

    def _find(self, where: FunctionLocation) -> Callable[..., Any]:
        here = msgspec.structs.replace(where, file=moved(where.file, self._files)[0])
        if not Path(here.file).exists():
            raise _Absent(f"{self._relative(here.file)} does not exist")
        try:
            return find(here)
        except ConfigError as error:
            missing = error.__cause__
            if isinstance(missing, AttributeError) and missing.name in here.qualname.split("."):
                raise _Absent(f"{self._relative(here.file)} has no {here.qualname}") from None
            raise

    def _relative(self, file: str) -> str:
        return os.path.relpath(file, self._files.root)

    def foreign(self) -> str | None:
        """Return a message that names a module imported from outside this side's files; None if there is no
        such module."""
        root, head = self._files.root, self._files.head
        new = self._new_files()
        copies = _copies_of(head) if new else set()
        for name, file in new.items():
            if root != head and _within(file, head) and not _within(file, root):
                return f"the base would import {name} from the head's file {file}"
            top = name.partition(".")[0]
            if file.startswith(PACKAGES) and (top in copies or _has(head, top)):
                return f"{top} is imported from its installed copy {file}, so base and head are the same code"
        return None

    def imported(self) -> list[str]:
        """Return the modules outside base and head that the user's code imported, in order of import."""
        self._new_files()
        roots = (self._files.root, self._files.head)
        new = {name: file for name, file in self._found.items() if name not in self._modules}
        return [name for name, file in new.items() if not any(_within(file, one) for one in roots)]

    def _new_files(self) -> dict[str, str]:
        """Return the files of the modules imported since the last call, with symbolic links resolved."""
        new = {}
        for name in [name for name in sys.modules if name not in self._found]:
            file = getattr(sys.modules[name], "__file__", None)
            if isinstance(file, str):
                new[name] = os.path.realpath(file)
        self._found |= new
        return new


class _Absent(Exception):
    """The function does not exist in the files of this side (base or head)."""


def _within(file: str, root: str) -> bool:
    """Return True if a file belongs to a side: it is in the side's folder, but not an installed module."""
    return file.startswith(root + os.sep) and not file.startswith(INSTALLED)


def _folders(*names: str) -> tuple[str, ...]:
    return tuple(os.path.realpath(folder) + os.sep for folder in map(sysconfig.get_path, names))


PACKAGES = (
    *_folders("purelib", "platlib"),
    *(os.path.realpath(one) + os.sep for one in (*site.getsitepackages(), site.getusersitepackages())),
)
"""Folders of installed packages, which may be inside the repository."""
INSTALLED = (*PACKAGES, *_folders("stdlib", "platstdlib"))


def _has(root: str, package: str) -> bool:
    """Return True if a repository contains the source of a package, in its top folder or in ``src``."""
    folders = (Path(root), Path(root, "src"))
    return any(
        (one / package / "__init__.py").exists() or (one / f"{package}.py").exists() for one in folders
    )


def _copies_of(repository: str) -> set[str]:
    """Return the packages that were installed from a repository, but not in editable mode (PEP 610)."""
    found: set[str] = set()
    for file in (
        one for folder in map(Path, INSTALLED) for one in folder.glob("*.dist-info/direct_url.json")
    ):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            origin = json.loads(file.read_text())
            folder = os.path.realpath(unquote(urlsplit(origin["url"]).path))
            ours = folder == repository or folder.startswith(repository + os.sep)
            if ours and not origin.get("dir_info", {}).get("editable"):
                names = (file.parent / "RECORD").read_text().splitlines()
                found |= {re.split("[/.,]", name, maxsplit=1)[0] for name in names}  # a folder or a module
    return found


def _move_python_path(files: sides.SideFiles) -> None:
    """Point ``PYTHONPATH`` to the folders of this side, for Python programs that the function starts."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any(given):
        places = [moved(folder, files) if os.path.isabs(folder) else [folder] for folder in given]
        os.environ["PYTHONPATH"] = os.pathsep.join(itertools.chain.from_iterable(places))


def _move_editable_installs(files: sides.SideFiles) -> None:
    """Redirect the import hooks of editable installs from the head's folders to those of this side."""
    for finder in sys.meta_path:
        kind = finder if isinstance(finder, type) else type(finder)
        module = sys.modules.get(kind.__module__)
        mapping, namespaces = getattr(module, "MAPPING", None), getattr(module, "NAMESPACES", None)
        if isinstance(mapping, dict):
            for name, folder in mapping.items():
                mapping[name] = moved(folder, files)[0]
        if isinstance(namespaces, dict):
            for name, folders in namespaces.items():
                namespaces[name] = [moved(folder, files)[0] for folder in folders]


def moved(path: str, files: sides.SideFiles) -> list[str]:
    """Return the paths on this side (base or head) that correspond to a path of the head.

    There are one or two; if two, the first is searched first.
    """
    real = os.path.realpath(path)
    if files.root == files.head or path.endswith(sides.HOOK):
        return [path]
    if real == os.path.dirname(files.head):  # the repository's top folder is itself a package
        return [os.path.dirname(files.root), path]
    if real == files.head or _within(real, files.head):
        return [os.path.join(files.root, os.path.relpath(real, files.head))]
    return [path]


def _warm(run: Callable[[], Any]) -> float:
    """Call the function for `WARM_S` seconds; return the shortest time of a call, in seconds."""
    until_s, least_ns, calls = time.monotonic() + WARM_S, 1 << 62, 0
    while calls < 2 or time.monotonic() < until_s:
        least_ns, calls = min(least_ns, shot(run, 1).cost_ns), calls + 1
    return max(least_ns, 1) / 1e9


def shot(run: Callable[[], Any], calls: int) -> sides.Shot:
    """Call the function ``calls`` times; return its CPU time, blocked time and time waiting for a core."""
    children, before = children_ns(), ProcessUsage.now()
    for _ in range(calls):
        run()
    used = ProcessUsage.now().since(before)
    # After a child has ended, it is unknown whether the child slept or waited for a core.
    waits = used.gave_up and children_ns() == children
    blocked_ns = max(0, used.wall_ns - used.cpu_ns - used.runnable_ns) if waits else 0
    return sides.Shot(cpu_ns=used.cpu_ns, blocked_ns=blocked_ns, waited_ns=used.runnable_ns)


if __name__ == "__main__":
    become_child(int(sys.argv[2]), "edgefl-stem")
    adopt_orphans()
    outlive_parent()
    try:
        serve_stem(Channel.inherit(int(sys.argv[1]), sides.StemRequest))
    finally:
        end_children()
