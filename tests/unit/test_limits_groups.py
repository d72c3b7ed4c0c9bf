"""Finding control groups: version 1 and 2, mixed, in containers, and where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.limits import capacity, groups
from edgefl.limits.capacity import ThrottleMeter
from edgefl.limits.groups import NoGroup, Place, figures, find, words, write


class Machine:
    """A made-up /proc and the folders of its hierarchies."""

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


def test_version_1_each_controller_in_its_own_hierarchy(machine: Machine) -> None:
    cpu = machine.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    memory = machine.mount("memory", "cgroup", "rw,memory")
    (memory / "user").mkdir()
    machine.process_in("2:memory:/user", "1:cpu,cpuacct:/")
    assert find("cpu") == Place(cpu, 1)
    assert find("memory") == Place(memory / "user", 1)


def test_version_2_if_it_has_the_controller(machine: Machine) -> None:
    unified = machine.mount("unified", "cgroup2", "rw,nsdelegate")
    scope = unified / "user.slice" / "run.scope"
    scope.mkdir(parents=True)
    (scope / "cgroup.controllers").write_text("cpu memory pids\n")
    machine.process_in("0::/user.slice/run.scope")
    assert find("cpu") == Place(scope, 2)
    with pytest.raises(NoGroup, match="the io controller is not given to"):
        find("io")


def test_a_controller_of_version_1_is_not_looked_for_in_version_2(machine: Machine) -> None:
    unified = machine.mount("unified", "cgroup2", "rw")
    (unified / "cgroup.controllers").write_text("memory\n")
    cpu = machine.mount("cpu", "cgroup", "rw,cpu")
    machine.process_in("1:cpu:/", "0::/")
    assert find("cpu") == Place(cpu, 1)
    assert find("memory") == Place(unified, 2)


@pytest.mark.parametrize(
    ("name", "path", "found"),
    [
        ("cpu", "/docker/abc/inner", "inner"),
        ("cpu", "/somewhere/else", ""),  # a path of the host, which cannot be seen
        ("a b", "/docker/abc", ""),
    ],
)
def test_in_a_container_a_part_of_it_is_shown(name: str, path: str, found: str, machine: Machine) -> None:
    mount = machine.mount(name, "cgroup", "rw,cpu", shows="/docker/abc")
    (mount / "inner").mkdir()
    machine.process_in(f"1:cpu:{path}")
    assert find("cpu").folder == mount / found


def test_no_hierarchy_at_all(machine: Machine) -> None:
    with pytest.raises(NoGroup, match="no control group hierarchy with the cpu controller is mounted"):
        find("cpu")
    machine.mount("memory", "cgroup", "rw,memory")
    machine.process_in("1:memory:/")
    with pytest.raises(NoGroup, match="no control group hierarchy with the cpu controller is mounted"):
        find("cpu")


def test_the_tightest_of_the_groups_around_a_process_counts(machine: Machine) -> None:
    cpu = machine.mount("cpu", "cgroup", "rw,cpu")
    memory = machine.mount("memory", "cgroup", "rw,memory")
    machine.process_in("1:cpu:/outer/inner", "2:memory:/outer/inner")
    limits = (("", "-1", 2**63 - 4096), ("outer", "50000", 2**30), ("outer/inner", "150000", 2**31))
    for path, quota, limit in limits:
        for hierarchy_folder in (cpu, memory):
            (hierarchy_folder / path).mkdir(parents=True, exist_ok=True)
            (hierarchy_folder / path / "cgroup.procs").touch()
        (cpu / path / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (cpu / path / "cpu.cfs_period_us").write_text("100000\n")
        (memory / path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    assert capacity.cpu_quota() == 0.5
    assert capacity.memory_limit_bytes() == 2**30
    machine.process_in("1:cpu:/", "2:memory:/")
    assert capacity.cpu_quota() is None
    assert capacity.memory_limit_bytes() is None


@pytest.mark.parametrize(("version", "kind"), [(1, "cgroup"), (2, "cgroup2")])
def test_time_that_a_quota_took_is_a_share_of_the_wall(
    machine: Machine, version: int, kind: str, monkeypatch: pytest.MonkeyPatch
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


def test_control_files_are_read_leniently_and_written_strictly(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("nr_periods 12\nnr_throttled 3\nodd\nnegative -1\n")
    assert figures(tmp_path / "cpu.stat") == {"nr_periods": 12, "nr_throttled": 3}
    assert figures(tmp_path / "none") == {}
    assert words(tmp_path / "none") == []
    with pytest.raises(NoGroup, match="none cannot be written: No such file or directory"):
        write(tmp_path / "none", "1")
