"""Where the server's socket is bound: reachable by this user on this host, and nothing left on disk.

On Linux the address is in the abstract namespace, which has no file, and the kernel's word on each peer's
user (``SO_PEERCRED``) keeps others out: what a 0700 folder does, without a folder that a killed run leaves
behind. Elsewhere it is a socket in a fresh 0700 folder, removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile

import zmq


class Endpoint:
    """Binds a ROUTER to an ``ipc://`` address of its own."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._folder: str | None = None
        if sys.platform == "linux" and _only_this_user(socket):
            self.address = f"ipc://@edgefl-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="edgefl-")  # made with mode 0700
            self.address = f"ipc://{self._folder}/server"
        socket.bind(self.address)

    def close(self) -> None:
        """Remove what was made on disk, if anything was."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _only_this_user(socket: zmq.Socket[bytes]) -> bool:
    """Have the kernel refuse peers of other users; False where libzmq was built without it."""
    with contextlib.suppress(zmq.ZMQError, AttributeError):
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        return True
    return False
