"""The server's process: takes over its channel and the parameter buffer, and serves one run."""

from __future__ import annotations

import sys
from pathlib import Path

from edgefl import kernels
from edgefl.errors import ConfigError, EdgeflError, FolderError
from edgefl.limits.pacing import set_time_slice
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.results import run_folder
from edgefl.run import control
from edgefl.run.channel import Channel, Closed
from edgefl.run.process import allow_open_files, become_child
from edgefl.run.server import Server
from edgefl.run.virtual import VirtualServer


def main(channel_fd: int, parent_pid: int) -> int:
    become_child(parent_pid, "edgefl-server")
    set_time_slice()
    allow_open_files()
    channel: Channel[control.ToServer] = Channel.inherit(channel_fd, control.ToServer)
    try:
        plan = channel.receive()
        assert isinstance(plan, control.Serve)
        return _serve(channel, plan)
    except Closed:
        return 1


def _serve(channel: Channel[control.ToServer], plan: control.Serve) -> int:
    try:
        buffer = ParameterBuffer.attach(channel.descriptor())
        kind = VirtualServer if plan.experiment.clock.kind == "virtual" else Server
        with kernels.page_locked(buffer.memory, plan.experiment.server.kernel_backend):
            kind(channel, plan, buffer).run()
    except (FolderError, OSError) as error:
        what = error if isinstance(error, FolderError) else f"the run's folder cannot be written: {error}"
        way_on = run_folder.way_on(Path(plan.run_dir))
        channel.send(control.Broken(f"{what}{way_on}", config=False))
        return 1
    except EdgeflError as error:
        channel.send(control.Broken(str(error), config=isinstance(error, ConfigError)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
