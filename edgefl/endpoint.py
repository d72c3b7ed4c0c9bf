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
from collections.abc import Sequence

import zmq

_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)


def send_now(socket: zmq.Socket[bytes], frames: Sequence[bytes | memoryview]) -> None:
    """Send a message without waiting; raises `zmq.ZMQError` as ``send_multipart`` does, at its first frame.

    A third of that one's time, most of which goes into the arithmetic of its flags.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE)
    socket.send(frames[-1], _NOBLOCK)


def router_socket(context: zmq.Context[zmq.Socket[bytes]], largest_bytes: int) -> zmq.Socket[bytes]:
    """A ROUTER that says when a peer is gone, takes no message above ``largest_bytes`` and queues few.

    A high-water mark counts messages, whatever their size; each peer has one task at a time.
    """
    socket = context.socket(zmq.ROUTER)
    socket.router_mandatory = True
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 8
    socket.maxmsgsize = largest_bytes
    return socket


def receive_now(socket: zmq.Socket[bytes], headers: int) -> list[bytes | memoryview]:
    """The frames of a message that has arrived; raises `zmq.Again` if none has.

    The first ``headers`` frames are bytes. Those after them, which may be as large as a model, stay where
    ZeroMQ has them and are read only: nobody copies what is copied into its place at once anyway.
    """
    frames: list[bytes | memoryview] = [socket.recv(_NOBLOCK)]
    while socket.getsockopt(_RCVMORE):
        if len(frames) < headers:
            frames.append(socket.recv(_NOBLOCK))
        else:
            frames.append(socket.recv(_NOBLOCK, copy=False).buffer)
    return frames


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
