"""Find the control groups of processes (version 1 or 2); create and remove edgefl's own groups."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from edgefl.errors import ConfigError
from edgefl.host.process import read_kernel_file

PROC = Path("/proc")
_NAME = re.compile(r"edgefl-(\d+)-(\d+)")
ACCOUNTING = "cpuacct"
PHONE_GROUP = "phone-"
"""Prefix of the names of phones' groups. If the owner of such a group has crashed, `remove_orphans` kills the
processes in it."""
_OWN = "own"
"""Subgroup into which processes are moved, because a version 2 group that delegates controllers may not hold
any process itself."""
_PATIENCE_S = 2.0  # maximum time to wait until ended processes have left their group


class NoGroup(ConfigError):
    """Control groups cannot be used here; the one-line message gives the reason."""


class Place(NamedTuple):
    """A control group in the hierarchy of one controller: its folder and cgroup version."""

    folder: Path
    version: int


def find(controller: str, pid: int | str = "self") -> Place:
    """Return the group of process ``pid`` in the hierarchy of ``controller``, such as ``cpu`` or ``memory``.

    Version 2 counts CPU time (``cpuacct``) without a controller. Raises `NoGroup` if no group exists, if this
    process cannot see it, or if the controller is not enabled in it.
    """
    place = locate(controller, pid)
    enabled = place.version == 1 or controller == ACCOUNTING
    if not enabled and controller not in read_words(place.folder / "cgroup.controllers"):
        raise NoGroup(f"the {controller} controller is not enabled in {place.folder}")
    return place


def locate(controller: str, pid: int | str = "self") -> Place:
    """Return the group of a process in a controller's hierarchy, as `find` does, even if the controller is
    not enabled in this group. It may be enabled in the groups around it, whose limits then apply.

    A controller belongs to a single hierarchy: the version 1 hierarchy that lists it, or else the version 2
    hierarchy. If edgefl has moved the process into a subgroup (`_OWN`), the result is the group in which it
    was before. Raises `NoGroup` if no group exists or this process cannot see it.
    """
    lines = [line.split(":", 2) for line in _text(PROC / str(pid) / "cgroup").splitlines()]
    # Paths of the process's groups, keyed by version 1 controller, or by "" for version 2.
    own = {name: path for _, controllers, path in lines for name in controllers.split(",")}
    unified: Place | None = None
    for line in _text(PROC / "self" / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), [*right.split(), "", "", ""][:3]
        if kind == "cgroup" and controller in options.split(",") and controller in own:
            return Place(_below(fields, own[controller]), 1)
        if kind == "cgroup2" and "" in own:
            unified = Place(_around_own(_below(fields, own[""])), 2)
    if unified is None:
        raise NoGroup(f"no control group hierarchy with the {controller} controller is mounted")
    return unified


def _below(fields: list[str], path: str) -> Path:
    """Return a group's folder below a mount, which may show only part of the hierarchy.

    ``fields`` are the mount's fields in mountinfo.
    """
    root, mount = fields[3], Path(fields[4].replace("\\040", " "))
    relative = os.path.relpath(path, root)
    # In a container, this may be a path on the host; the visible part starts at the mount itself.
    folder = mount / relative if not relative.startswith("..") else mount
    return folder if folder.is_dir() else mount


def _around_own(folder: Path) -> Path:
    """Return ``folder`` or, if edgefl has moved its processes there, the group from which it moved them."""
    moved = folder.name == _OWN and _NAME.fullmatch(folder.parent.name) is not None
    return folder.parent.parent if moved else folder


def read_words(file: Path) -> list[str]:
    """Return the words of a control file; [] if it cannot be read."""
    return _text(file).split()


def read_counters(file: Path) -> dict[str, int]:
    """Parse the ``name number`` lines of a control file; {} if it cannot be read."""
    lines = [line.partition(" ") for line in _text(file).splitlines()]
    return {name: int(value) for name, _, value in lines if value.strip().isdecimal()}


class GroupCpuTime:
    """CPU time that a group with controller `ACCOUNTING` has used since this object was created.

    The file stays open until `close`, because opening it takes several times as long as reading it.
    """

    def __init__(self, place: Place) -> None:
        """Raises OSError if there is no such group."""
        self._version, name = place.version, "cpuacct.usage" if place.version == 1 else "cpu.stat"
        self._fd, self._before_ns = os.open(place.folder / name, os.O_RDONLY | os.O_CLOEXEC), 0
        self._before_ns = self.used_ns()

    def used_ns(self) -> int:
        """Return the CPU time in ns of all processes, including ended ones; 0 once the group is removed."""
        try:
            text = os.pread(self._fd, 4096, 0)
        except OSError:
            return 0
        total_ns = int(text) if self._version == 1 else int(text.split(None, 2)[1]) * 1000  # usage_usec N
        return total_ns - self._before_ns

    def close(self) -> None:
        os.close(self._fd)


def throttled_ns(place: Place) -> int:
    """Return the time in ns for which a group was stopped by its quota, summed over all cores."""
    name, unit_ns = {1: ("throttled_time", 1), 2: ("throttled_usec", 1000)}[place.version]
    return read_counters(place.folder / "cpu.stat").get(name, 0) * unit_ns


def write(file: Path, text: str) -> None:
    """Write a control file. Raises `NoGroup` with the system's reason if this fails."""
    try:
        # write_text() is not used: it opens the file with O_TRUNC. Write the value in a single call.
        fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise NoGroup(f"{file} cannot be written: {error.strerror}") from None


def _text(file: str | Path) -> str:
    try:
        return os.fsdecode(read_kernel_file(file))  # the path of a mount may contain any bytes
    except OSError:
        return ""


def group_phone(pid: int) -> int | None:
    """Return the number of the phone whose control group contains the process ``pid``.

    Only groups that this process has created are considered. Return None if none of them contains the
    process, or if it has ended.
    """
    groups = rf"/edgefl-{os.getpid()}-\d+/\d+-{PHONE_GROUP}(\d+)"  # groups are named NUMBER-NAME
    found = re.search(groups, _text(f"/proc/{pid}/cgroup"))
    return None if found is None else int(found[1])


class Groups(contextlib.AbstractContextManager["Groups"]):
    """Control groups for ``controllers`` (``cpu``, ``memory``), below this process's own group.

    All groups of a process are in one folder per hierarchy, named after the process's pid and start time. The
    folder of a killed process is removed by the next process that creates groups there. Raises `NoGroup` if
    no group can be created.
    """

    _lock = threading.RLock()
    _own: _OwnFolders | None = None
    _users = 0
    _numbers = itertools.count()

    def __init__(self, controllers: Iterable[str]) -> None:
        self._prefix = f"{next(Groups._numbers)}-"
        with Groups._lock:
            own = Groups._own or _OwnFolders()
            try:
                self._places = {name: own.allocate(name) for name in controllers}
            except NoGroup:
                if Groups._own is None:
                    own.remove()
                raise
            Groups._own = own
            Groups._users += 1
        self._open = True

    def folders(self) -> dict[str, tuple[str, int]]:
        """Return the path prefix and version of new groups, keyed by controller, for `ControlGroup`."""
        return {
            name: (str(place.folder / self._prefix), place.version) for name, place in self._places.items()
        }

    def group(self, name: str) -> ControlGroup:
        """Create a group for one process."""
        return ControlGroup(self.folders(), name)

    def close(self) -> None:
        """Remove the groups; processes still in them move back to this process's group."""
        with Groups._lock:
            if not self._open or Groups._own is None:
                return
            self._open = False
            Groups._users -= 1
            if Groups._users:
                Groups._own.clear(self._prefix)
            else:
                Groups._own.remove()
                Groups._own = None

    def __exit__(self, *_: object) -> None:
        self.close()


class ControlGroup:
    """The control group of one process: a folder for each controller."""

    def __init__(self, folders: dict[str, tuple[str, int]], name: str) -> None:
        self._places = {key: Place(Path(path + name), version) for key, (path, version) in folders.items()}
        for place in self._places.values():
            _make(place.folder, f"{place.folder} cannot be created")

    def place(self, controller: str) -> Place:
        """Return the group's folder and version for one controller."""
        return self._places[controller]

    def enter(self, pid: int = 0) -> None:
        """Move process ``pid`` (0 for this process) into the group."""
        for place in self._places.values():
            write(place.folder / "cgroup.procs", str(pid))

    def remove(self) -> None:
        """Remove the group after its process has ended."""
        for place in self._places.values():
            remove(place.folder)


class _OwnFolders:
    """The folders of this process's control groups: one per hierarchy."""

    def __init__(self) -> None:
        self._name = f"edgefl-{os.getpid()}-{started(os.getpid())}"
        self._outer: dict[str, Place] = {}
        self._delegated: list[tuple[Path, str]] = []

    def allocate(self, controller: str) -> Place:
        if controller not in self._outer:
            place = find(controller)
            remove_orphans(place.folder)
            self._outer[controller] = place
            folder = place.folder / self._name
            _make(folder, f"no group can be created in {place.folder}")
            if place.version == 2 and controller != ACCOUNTING:
                self._delegate(place.folder, folder, controller)
        outer, version = self._outer[controller]
        return Place(outer / self._name, version)

    def _delegate(self, outer: Path, folder: Path, controller: str) -> None:
        """Enable a version 2 controller in ``folder`` and in the groups below it."""
        for group in (outer, folder):
            file = group / "cgroup.subtree_control"
            if controller in read_words(file):
                continue
            try:
                write(file, f"+{controller}")
            except NoGroup:
                if group is folder or not read_words(outer / "cgroup.procs"):
                    raise
                self._move_processes(outer, folder)
                write(file, f"+{controller}")
            self._delegated.append((file, controller))

    def _move_processes(self, outer: Path, folder: Path) -> None:
        """Move the processes of ``outer`` into a subgroup; all must be this process or its descendants."""
        pids = read_words(outer / "cgroup.procs")
        family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        strangers = [pid for pid in pids if int(pid) not in family]
        if strangers:
            others = f"{outer} also holds other processes (such as {strangers[0]})"
            own = "start edgefl in a group of its own: systemd-run --user --scope -p Delegate=yes ..."
            raise NoGroup(f"{others}, so no group below it can have limits; {own}")
        (folder / _OWN).mkdir(exist_ok=True)
        for pid in pids:
            write(folder / _OWN / "cgroup.procs", pid)

    def clear(self, prefix: str) -> None:
        """Remove the groups whose names start with ``prefix``."""
        for outer in self._outer.values():
            for folder in _children(outer.folder / self._name):
                if folder.name.startswith(prefix):
                    _empty(folder, outer.folder / self._name)
                    remove(folder)

    def remove(self) -> None:
        # Disable controllers first, because a group that delegates controllers may not hold any process.
        for file, controller in reversed(self._delegated):
            with contextlib.suppress(NoGroup):
                write(file, f"-{controller}")
        for outer in self._outer.values():
            _empty(outer.folder / self._name, outer.folder)
            remove(outer.folder / self._name)


def remove_orphans(outer: Path) -> None:
    """Remove the groups in ``outer`` whose owner has ended.

    Processes in groups of phones (`PHONE_GROUP`) are killed; all others are moved to ``outer``.
    """
    for folder in _children(outer):
        match = _NAME.fullmatch(folder.name)
        if match and started(int(match[1])) != match[2]:
            for group in _children(folder):
                if group.name.partition("-")[2].startswith(PHONE_GROUP):  # groups are named NUMBER-NAME
                    _kill(group)
            _empty(folder, outer)
            remove(folder)


def _kill(folder: Path) -> None:
    """Kill the processes of a group until none is left, for up to `_PATIENCE_S` seconds."""
    until = time.monotonic() + _PATIENCE_S
    while (pids := read_words(folder / "cgroup.procs")) and time.monotonic() <= until:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.002)


def remove(folder: Path) -> None:
    """Remove a group and the groups below it, except those still in use after `_PATIENCE_S` seconds."""
    for child in _children(folder):
        remove(child)
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() <= until and folder.exists():
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.002)


def started(pid: int) -> str:
    """Return a process's start time in clock ticks; together with its pid it is unique until reboot."""
    # psutil's create_time() is not used, because it changes when the system's date is set.
    return next(iter(process_stat(pid)[19:20]), "")


def process_stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat (proc_pid_stat(5)) from ``state`` on; [] if the process is gone.

    ``pid`` may be ``PID/task/TID`` for a single thread.
    """
    try:
        return read_kernel_file(f"/proc/{pid}/stat").decode("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def _make(folder: Path, refused: str) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise NoGroup(f"{refused}: {error.strerror}") from None


def _empty(folder: Path, outer: Path) -> None:
    """Move the processes of a group and of the groups below it to ``outer``."""
    for group in (*_children(folder), folder):
        for pid in read_words(group / "cgroup.procs"):
            with contextlib.suppress(NoGroup):  # the process has ended, or may not be moved
                write(outer / "cgroup.procs", pid)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []
