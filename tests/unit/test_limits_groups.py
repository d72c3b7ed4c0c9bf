"""Tests of finding and reading control groups, and of the memory limit in child processes."""

from __future__ import annotations

import functools
import mmap
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from edgefl.host import capacity, groups, memory
from edgefl.host.capacity import ThrottleMeter
from edgefl.host.groups import GroupCpuTime, NoGroup, Place, find, read_counters, read_words, write
from edgefl.host.memory import GroupMemory, MemoryLimit


class Machine:
    """A simulated /proc and the folders of its control group hierarchies."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._mounts: list[str] = []
        monkeypatch.setattr(groups, "PROC", root / "proc")
        (root / "proc" / "self").mkdir(parents=True)

    def mount(self, name: str, kind: str, options: str, shows: str = "/") -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        place = str(folder).replace(" ", "\\040")
        self._mounts.append(f"30 25 0:27 {shows} {place} rw,relatime shared:9 - {kind} {kind} {options}")
        (self.root / "proc/self/mountinfo").write_text("\n".join(self._mounts))
        return folder

    def process_in(self, *lines: str) -> None:
        (self.root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_in_version_1_each_controller_has_its_own_hierarchy(machine: Machine) -> None:
    cpu = machine.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    memory = machine.mount("memory", "cgroup", "rw,memory")
    (memory / "user").mkdir()
    machine.process_in("2:memory:/user", "1:cpu,cpuacct:/")
    assert find("cpu") == Place(cpu, 1)
    assert find("memory") == Place(memory / "user", 1)


def test_a_mount_whose_path_is_not_utf_8_is_ignored(machine: Machine) -> None:
    cpu = machine.mount("cpu", "cgroup", "rw,cpu")
    machine.process_in("1:cpu:/")
    file = machine.root / "proc/self/mountinfo"
    file.write_bytes(b"29 25 0:26 / /media/M\xfcller rw - vfat /dev/sdb1 rw\n" + file.read_bytes())
    assert find("cpu") == Place(cpu, 1)


def test_in_version_2_the_controller_must_be_enabled(machine: Machine) -> None:
    unified = machine.mount("unified", "cgroup2", "rw,nsdelegate")
    scope = unified / "user.slice" / "run.scope"
    scope.mkdir(parents=True)
    (scope / "cgroup.controllers").write_text("cpu memory pids\n")
    machine.process_in("0::/user.slice/run.scope")
    assert find("cpu") == Place(scope, 2)
    with pytest.raises(NoGroup, match="the io controller is not enabled in"):
        find("io")
    assert find("cpuacct") == Place(scope, 2)  # CPU time needs no controller


def test_the_cpu_time_of_a_group_counts_from_the_objects_creation(tmp_path: Path) -> None:
    v1, v2 = tmp_path / "cpuacct.usage", tmp_path / "cpu.stat"
    v1.write_text("1234567\n")
    v2.write_text("usage_usec 42\nuser_usec 40\n")
    times = [GroupCpuTime(Place(tmp_path, version)) for version in (1, 2)]
    v1.write_text("1234667\n")
    v2.write_text("usage_usec 43\nuser_usec 40\n")
    assert [time.used_ns() for time in times] == [100, 1_000]
    for time in times:
        time.close()
        assert time.used_ns() == 0  # as for a removed group


def test_controllers_of_both_versions_are_found_side_by_side(machine: Machine) -> None:
    unified = machine.mount("unified", "cgroup2", "rw")
    (unified / "cgroup.controllers").write_text("memory\n")
    cpu = machine.mount("cpu", "cgroup", "rw,cpu")
    machine.process_in("1:cpu:/", "0::/")
    assert find("cpu") == Place(cpu, 1)
    assert find("memory") == Place(unified, 2)


def test_a_process_that_edgefl_has_moved_is_in_the_group_in_which_it_was(machine: Machine) -> None:
    """The subgroup has only the controllers that edgefl has enabled so far."""
    unified = machine.mount("unified", "cgroup2", "rw")
    (unified / "cgroup.controllers").write_text("cpu memory\n")
    own = unified / "edgefl-7-99" / "own"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu\n")
    machine.process_in("0::/edgefl-7-99/own")
    assert find("memory") == find("cpu") == Place(unified, 2)


@pytest.mark.parametrize(
    ("name", "path", "found"),
    [
        ("cpu", "/docker/abc/inner", "inner"),
        ("cpu", "/somewhere/else", ""),  # a path of the host, invisible in the container
        ("a b", "/docker/abc", ""),
    ],
)
def test_a_container_sees_only_the_mounted_part(name: str, path: str, found: str, machine: Machine) -> None:
    mount = machine.mount(name, "cgroup", "rw,cpu", shows="/docker/abc")
    (mount / "inner").mkdir()
    machine.process_in(f"1:cpu:{path}")
    assert find("cpu").folder == mount / found


def test_without_a_mounted_hierarchy_no_group_is_found(machine: Machine) -> None:
    message = "no control group hierarchy with the cpu controller is mounted"
    with pytest.raises(NoGroup, match=message):
        find("cpu")
    machine.mount("memory", "cgroup", "rw,memory")
    machine.process_in("1:memory:/")
    with pytest.raises(NoGroup, match=message):
        find("cpu")


def test_the_lowest_limit_of_the_groups_around_a_process_counts(machine: Machine) -> None:
    cpu = machine.mount("cpu", "cgroup", "rw,cpu")
    memory = machine.mount("memory", "cgroup", "rw,memory")
    pids = machine.mount("pids", "cgroup", "rw,pids")
    machine.process_in("1:cpu:/outer/inner", "2:memory:/outer/inner", "3:pids:/outer/inner")
    limits = (("", "-1", 2**63 - 4096), ("outer", "50000", 2**30), ("outer/inner", "150000", 2**31))
    for path, quota, limit in limits:
        for hierarchy_folder in (cpu, memory, pids):
            (hierarchy_folder / path).mkdir(parents=True, exist_ok=True)
            (hierarchy_folder / path / "cgroup.procs").touch()
        (cpu / path / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (cpu / path / "cpu.cfs_period_us").write_text("100000\n")
        (memory / path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (pids / "outer/pids.max").write_text("700\n")
    (pids / "outer/inner/pids.max").write_text("max\n")
    assert capacity.cpu_quota() == 0.5
    assert capacity.memory_limit_bytes() == 2**30
    assert capacity.thread_limit() == 700
    machine.process_in("1:cpu:/", "2:memory:/", "3:pids:/")
    assert capacity.thread_limit() is None
    assert capacity.cpu_quota() is None
    assert capacity.memory_limit_bytes() is None


def test_a_quota_of_an_outer_group_counts_if_the_own_group_lacks_its_controller(machine: Machine) -> None:
    """An example is a quota that systemd sets on a user's slice."""
    unified = machine.mount("unified", "cgroup2", "rw")
    user = unified / "user-7.slice"
    (user / "session.scope").mkdir(parents=True)
    for folder, controllers in ((unified, "cpu pids"), (user, "cpu pids"), (user / "session.scope", "pids")):
        (folder / "cgroup.controllers").write_text(f"{controllers}\n")
        (folder / "cgroup.procs").touch()
    (user / "cpu.max").write_text("150000 100000\n")
    machine.process_in("0::/user-7.slice/session.scope")
    assert capacity.cpu_quota() == 1.5


@pytest.mark.parametrize(("version", "kind"), [(1, "cgroup"), (2, "cgroup2")])
def test_throttled_time_is_a_share_of_the_time_since_the_start(
    machine: Machine, version: int, kind: str, monkeypatch: Any
) -> None:
    cpu = machine.mount("cpu", kind, "rw,cpu")
    machine.process_in("1:cpu:/" if version == 1 else "0::/")
    for name, text in (("cgroup.procs", ""), ("cgroup.controllers", "cpu"), ("cpu.max", "50000 100000")):
        (cpu / name).write_text(text)
    now_s = iter([100.0, 110.0, 110.0])
    monkeypatch.setattr(capacity.time, "monotonic", lambda: next(now_s))
    name, unit = ("throttled_time", 1e9) if version == 1 else ("throttled_usec", 1e6)
    (cpu / "cpu.stat").write_text(f"nr_throttled 1\n{name} {int(3 * unit)}\n")
    meter = ThrottleMeter()
    (cpu / "cpu.stat").write_text(f"nr_throttled 9\n{name} {int(5 * unit)}\n")
    assert meter.share() == pytest.approx(0.2)
    (cpu / "cpu.stat").unlink()
    assert meter.share() == 0.0


def test_reading_control_files_ignores_errors_but_writing_raises_them(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("nr_periods 12\nnr_throttled 3\nodd\nnegative -1\n")
    assert read_counters(tmp_path / "cpu.stat") == {"nr_periods": 12, "nr_throttled": 3}
    assert read_counters(tmp_path / "none") == {}
    assert read_words(tmp_path / "none") == []
    with pytest.raises(NoGroup, match="none cannot be written: No such file or directory"):
        write(tmp_path / "none", "1")


MIB = 1 << 20


def in_a_child(test: Callable[[], None]) -> Callable[[], None]:
    """Make a test run in a child process, so that its memory limit does not affect this process.

    If the test fails, the traceback of the child is shown.
    """

    def attempt(failures: Any) -> None:
        try:
            test()
        except BaseException:  # pytest.raises fails with an error that is no Exception
            failures.put(traceback.format_exc())
        else:
            failures.put("")

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_DATA and /proc")
    @functools.wraps(test)
    def run() -> None:
        context = multiprocessing.get_context("fork")
        failures = context.SimpleQueue()
        child = context.Process(target=attempt, args=(failures,))
        child.start()
        child.join()
        assert child.exitcode == 0
        if failure := failures.get():
            pytest.fail(failure, pytrace=False)

    return run


def new_memory(mib: int) -> mmap.mmap:
    """Return private memory that is resident. A NumPy array might reuse memory that the process had freed."""
    block = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    np.frombuffer(block, np.uint8)[:] = 1
    return block


@in_a_child
def test_an_allocation_above_the_limit_fails_and_the_process_goes_on() -> None:
    limit = MemoryLimit(64)
    with pytest.raises(MemoryError):
        np.ones(1024 * MIB, np.uint8)
    assert not limit.over()
    assert np.ones(8 * MIB, np.uint8).all()


@in_a_child
def test_memory_below_the_limit_is_allocated_and_measured() -> None:
    limit = MemoryLimit(256)
    kept = new_memory(64)
    peak = limit.peak_mib  # measures the memory
    used = limit.used_mib()
    assert not limit.over()
    assert 60 <= used <= 80
    assert 60 <= peak <= 80
    del kept
    assert limit.used_mib() < used <= limit.peak_mib


@in_a_child
def test_memory_above_the_limit_is_noticed_without_an_rlimit() -> None:
    memory.resource.setrlimit = Mock(side_effect=ValueError)  # in this child
    limit = MemoryLimit(32)
    kept = new_memory(64)
    assert limit.over()
    del kept


@in_a_child
def test_shared_memory_is_not_counted() -> None:
    limit = MemoryLimit(32)
    shared = mmap.mmap(-1, 64 * MIB)
    np.frombuffer(shared, np.uint8)[:] = 1
    assert limit.used_mib() < 16
    assert not limit.over()


@pytest.mark.parametrize("limited", [MemoryLimit, lambda mib: GroupMemory(Place(Path("none"), 1), mib)])
@pytest.mark.parametrize("limit_mib", [0, -1, float("nan"), float("inf")])
def test_the_limit_must_be_a_number_above_0(limited: Callable[[float], object], limit_mib: float) -> None:
    with pytest.raises(ValueError, match="limit_mib must be finite and above 0"):
        limited(limit_mib)
