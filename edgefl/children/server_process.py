"""The server's process: takes over its channel and the parameter buffer, and serves one run."""

from __future__ import annotations

import sys

from edgefl import kernels
from edgefl.channel import Channel, Closed
from edgefl.emulation.pacing import set_time_slice
from edgefl.errors import ConfigError, EdgeflError
from edgefl.messages import control
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.processes import allow_open_files, become_child
from edgefl.server.server import Server
from edgefl.virtual.server import VirtualServer


def main(channel_fd: int, parent_pid: int) -> int:
    become_child(parent_pid, "edgefl-server")
    set_time_slice()
    allow_open_files()
    channel: Channel[control.ToServer] = Channel.inherit(channel_fd, control.ToServer)
    try:
        plan = channel.receive()
        assert isinstance(plan, control.Serve)
        buffer = ParameterBuffer.attach(channel.descriptor())
        kind = VirtualServer if plan.experiment.clock.kind == "virtual" else Server
        with kernels.page_locked(buffer.memory, plan.experiment.server.kernel_backend):
            kind(channel, plan, buffer).run()
    except Closed:
        return 1
    except EdgeflError as error:
        channel.send(control.Broken(str(error), config=isinstance(error, ConfigError)))
        return 1
    except OSError as error:
        channel.send(control.Broken(f"the run's folder cannot be written: {error}", config=False))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
