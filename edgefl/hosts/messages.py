"""Messages between node and supervisor, in addition to those between the supervisor and its zygote."""

from __future__ import annotations

from typing import Annotated

import msgspec

from edgefl.experiment import MOST_PROCESSES
from edgefl.host.channel import Refused
from edgefl.run.control import Adopted, Cleared, Departed, Fingerprint, Spawned, ToZygote

Figure = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
"""A number reported by a node. It is bounded because the node may be untrusted."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Node → supervisor: offer to host peers of the run."""

    host: tuple[str, int, str]
    """CPU, usable cores and system, as `edgefl.host.capacity.Host`."""
    machine: str
    """Id of the running system: nodes on the same system share its cores."""
    cores: Figure
    """Usable cores, by affinity and quota."""
    software: dict[str, str]
    """Versions, by name, of the software that affects the bits of the results."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=MOST_PROCESSES)]
    """Number of workers hosted under the virtual clock."""
    device: str = ""
    """Profile of the node's single client, if it emulates one client only."""
    as_is: bool = False
    """Do not limit that client, because the node itself is a device of that profile."""


class Agreed(msgspec.Struct, frozen=True, tag="agreed"):
    """Node → supervisor: data and model are loaded; a training step takes ``host_step_s`` CPU seconds."""

    fingerprint: Fingerprint
    host_step_s: Figure


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Supervisor → node: no content; sending it detects a dead node."""


class Over(msgspec.Struct, frozen=True, tag="over"):
    """Supervisor → node: the run has ended; end all processes."""

    outcome: str


class NodeEnded(msgspec.Struct, frozen=True, tag="node-ended"):
    """Node → supervisor: all processes of the node have ended after the run."""

    usage: dict[str, float | None]
    """Measurements of `edgefl.host.capacity.UsageMeter`."""


ToNode = ToZygote | Alive | Over | Refused
FromNode = Join | Agreed | Adopted | Spawned | Departed | Cleared | Refused | NodeEnded
