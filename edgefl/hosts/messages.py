"""Messages between a node and the supervisor, in addition to the messages between a supervisor and a
zygote."""

from __future__ import annotations

from typing import Annotated

import msgspec

from edgefl.experiment import MAX_PROCESSES
from edgefl.host.channel import Refused
from edgefl.run.control import Adopted, Cleared, Departed, Fingerprint, Spawned, ToZygote

Figure = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
"""A number that a node reports. It is bounded because the node may be untrusted."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Message from a node to the supervisor: the node offers to host peers (clients or workers) of the
    run."""

    host: tuple[str, int, str]
    """The node's CPU, its number of usable cores and its operating system (`edgefl.host.capacity.Host`)."""
    machine: str
    """Boot ID of the node's machine. Nodes with the same ID share the cores of one machine."""
    cores: Figure
    """Number of cores that the node may use, given its CPU affinity and its CPU quota."""
    software: dict[str, str]
    """Versions of the software that affects the bits of the results, keyed by package name."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROCESSES)]
    """Number of workers that the node hosts under the virtual clock."""
    device: str = ""
    """Device profile of the node's only client; empty if the node may host any number of clients."""
    as_is: bool = False
    """If True, the node's only client is not slowed down: the node itself is the device of its profile."""


class Agreed(msgspec.Struct, frozen=True, tag="agreed"):
    """Message from a node to the supervisor: the data and the model are loaded, and a training step takes
    ``host_step_s`` CPU seconds on the node."""

    fingerprint: Fingerprint
    host_step_s: Figure


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Empty message from the supervisor to a node. If it cannot be sent, the node is treated as lost."""


class Over(msgspec.Struct, frozen=True, tag="over"):
    """Message from the supervisor to a node: the run has ended, and the node must end all its processes."""

    outcome: str


class NodeEnded(msgspec.Struct, frozen=True, tag="node-ended"):
    """Message from a node to the supervisor: after the end of the run, all processes of the node have
    ended."""

    usage: dict[str, float | None]
    """Measurements of `edgefl.host.capacity.UsageMeter` on the node during the run, keyed by name."""


ToNode = ToZygote | Alive | Over | Refused
FromNode = Join | Agreed | Adopted | Spawned | Departed | Cleared | Refused | NodeEnded
