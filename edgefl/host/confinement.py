"""Memory limits and CPU throttles of a run's clients. They supplement the clients' own pacing.

The supervisor checks which mechanisms work here (`enforced`) and creates the control groups. The zygote is
the process that forks the clients. Before it forks a client, it creates the client's `ClientLimits`, which
the client then applies to itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import msgspec

from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.host.groups import ControlGroup, Groups, NoGroup
from edgefl.host.memory import GroupMemory, MemoryLimit

MemoryBy = Literal["cgroup", "rlimit", "off"]


class Enforcement(msgspec.Struct, frozen=True):
    """The mechanisms that limit a run's clients."""

    memory: MemoryBy = "off"
    throttle: Literal["paced", "cgroup", "sigstop"] = "paced"
    groups: dict[str, tuple[str, int]] = {}
    """Path prefix and version of the control groups, keyed by controller (see `Groups.folders`)."""


@contextlib.contextmanager
def enforced(experiment: Experiment) -> Iterator[Enforcement]:
    """Prepare the experiment's limits; undo them on exit. Raises ConfigError if one cannot be enforced."""
    if experiment.clock.kind == "virtual":
        yield Enforcement()
        return
    fleet, memory = experiment.fleet, memory_mechanism(experiment)
    with contextlib.ExitStack() as stack:
        folders: dict[str, tuple[str, int]] = {}
        for controller, key, kind, others in (
            ("cpu", "throttle", fleet.throttle, "'paced' and 'sigstop' need"),
            ("memory", "memory", memory, "'rlimit' needs"),
        ):
            if kind == "cgroup":
                try:
                    folders |= stack.enter_context(Groups([controller])).folders()
                except NoGroup as why:
                    text = f"fleet.{key}: 'cgroup' cannot be used here: {why}; {others} no privileges"
                    raise ConfigError(text) from None
        yield Enforcement(memory, fleet.throttle, folders)


def memory_mechanism(experiment: Experiment) -> MemoryBy:
    """Return the mechanism that enforces the clients' memory limits."""
    fleet = experiment.fleet
    if experiment.clock.kind == "virtual":
        return "off"
    return "rlimit" if fleet.memory == "auto" else fleet.memory


class ClientLimits:
    """The limits of one client's process; created before the process starts."""

    def __init__(
        self, enforcement: Enforcement, name: str, limit_mib: float | None, governor: int | None = None
    ) -> None:
        self.throttle = enforcement.throttle
        self.governor = governor  # pipe for requests to the governor; None if there is no throttle
        self._limit_mib = limit_mib if enforcement.memory != "off" else None
        self._group = ControlGroup(enforcement.groups, name) if enforcement.groups else None
        self._memory: MemoryLimit | GroupMemory | None = None
        if enforcement.memory == "cgroup" and self._limit_mib is not None:
            assert self._group is not None
            self._memory = GroupMemory(self._group.place("memory"), self._limit_mib)

    def enter(self) -> None:
        """Move this process into its control group; the process calls this before anything else."""
        if self._group is not None:
            self._group.enter()

    def limit(self) -> MemoryLimit | GroupMemory | None:
        """Apply the memory limit to this process and return it; called when the process is ready to work."""
        if self._memory is None and self._limit_mib is not None:
            self._memory = MemoryLimit(self._limit_mib)
        return self._memory

    def out_of_memory(self, gave_up: bool) -> str:
        """Return a description of how the process ran out of memory, or "" if it did not.

        ``gave_up`` is True if the process ended because an allocation failed.
        """
        killed = isinstance(self._memory, GroupMemory) and self._memory.kills > 0
        if not (gave_up or killed):
            return ""
        limit = "no limit" if self._limit_mib is None else f"limit {self._limit_mib:g} MiB"
        return f"{limit}, {'killed by the kernel' if killed else 'an allocation failed'}"

    def remove(self) -> None:
        """Remove the control group; called after the process has ended."""
        if self._group is not None:
            self._group.remove()
