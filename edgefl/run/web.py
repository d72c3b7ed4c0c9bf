"""The supervisor's part of the live page: starts the process that serves the page, and sends updates to it.

Nothing here waits for the process: if the process falls behind, it misses updates and the run continues.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

from edgefl.errors import ConfigError
from edgefl.host.channel import Channel
from edgefl.host.children import end_child
from edgefl.host.process import start_process
from edgefl.run import control
from edgefl.run.view import RunView
from edgefl.terminal import say

GRACE_S = 15.0
"""Time limit in seconds for the page's process to send the last update to its readers and exit. It is longer
than the readers' own time limit, because the process has a low priority and may be slow on a busy host."""


def listening(port: int = 0) -> socket.socket:
    """Return a socket that listens on the loopback address; port 0 selects any free port.

    Raises `ConfigError` if the port is not available.

    >>> with listening() as page:
    ...     page.getsockname()[0]
    '127.0.0.1'
    """
    allowed = "choose another port, or 0 for any free port"
    if not 0 <= port <= 65535:  # `create_server` would leave its socket open
        raise ConfigError(f"--web-port {port}: a port must be from 0 to 65535; {allowed}")
    try:
        return socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"--web-port {port}: {why}; {allowed}") from None


def page_socket(port: int | None) -> AbstractContextManager[socket.socket | None]:
    """Provide a `listening` socket for the live page of a run, or None if ``port`` is None."""
    return nullcontext() if port is None else listening(port)


def with_page(view: RunView, listener: socket.socket | None, folder: Path) -> RunView:
    """Return a view that shows the run in ``view`` and on the page served at ``listener``.

    If ``listener`` is None, return ``view``.
    """
    return view if listener is None else _PageView(view, listener, folder)


class _PageView(RunView):
    """Forwards every call to another view and to the process that serves the page."""

    def __init__(self, view: RunView, listener: socket.socket, folder: Path) -> None:
        super().__init__(view.experiment)
        self.states = True
        self._view, self._listener, self._folder = view, listener, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel[Any]

    def say(self, text: str, *, at_once: bool = False) -> None:
        self._view.say(text, at_once=at_once)
        self._send(control.Activity(text))

    def restarted(self, text: str) -> None:
        self._view.restarted(text)
        self._send(control.Activity(text, restarted=True))

    def describe(self, about: control.Described) -> None:
        self._view.describe(about)
        self._send(about)

    def update(self, progress: control.Progress) -> None:
        self._view.update(progress)
        self._send(progress)

    def __enter__(self) -> Self:
        with self._listener as listener:
            fd = listener.fileno()
            self._process, self._channel = start_process(
                "edgefl.run.web_process", None, dict(os.environ), str(fd), inherited=[fd]
            )
            # Other users of this machine can reach the port, but cannot guess the path.
            path = f"/{secrets.token_urlsafe(12)}/"
            say(f"edgefl: live at http://127.0.0.1:{listener.getsockname()[1]}{path}", err=True)
        self._send(control.Shown(self.experiment, str(self._folder), path))
        self._send(control.Activity(self._view.note))
        self._view.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._view.no_progress, self._view.judged = self.no_progress, self.judged
        try:
            self._view.__exit__(kind, error, trace)
        finally:
            self._send(control.Ended(self._view.outcome(error), self.judged or control.NO_VERDICT))
            self._channel.close()
            if self._process is not None:
                end_child(self._process, GRACE_S)

    def _send(self, message: control.ToWeb) -> None:
        """Send a message, unless the process is not running or has fallen behind."""
        if self._process is not None and self._channel.has_room:
            self._channel.tell(message)
