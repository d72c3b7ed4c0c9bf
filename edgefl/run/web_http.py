"""HTTP server for one page on this machine; it answers GET requests for a few paths.

Every user of the machine can connect. The server therefore limits the number of connections, the size of a
request, and the time for sending the request and reading the reply; a connection serves one request. The Host
header must be a loopback name, so that scripts from other sites cannot use DNS rebinding to reach the server.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import NamedTuple

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 8192
PATIENCE_S = 10.0
"""Time limit in seconds for receiving a request, and for each write of the answer."""
NAMES = ("127.0.0.1", "localhost")
"""Host names that the Host header may contain; any port is allowed, because a tunnel may change it."""
HEADERS = (
    "Connection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n"
)


class WebReply(NamedTuple):
    """Reply to a request; the body is either complete or streamed."""

    kind: str
    """Value of the Content-Type header."""
    body: bytes | AsyncGenerator[bytes, None]
    headers: str = ""


Answer = Callable[[str], WebReply | None]
"""Maps a path to a reply, or to None if the path does not exist."""


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, headers: str = "") -> None:
        super().__init__(status)
        self.status, self.headers = status, headers


class WebServer:
    """Serves one listening socket until `close` is called."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._connected, sock=listener, limit=MAX_HEAD_BYTES)

    async def close(self, patience_s: float) -> None:
        """Stop accepting requests; close open connections after ``patience_s``."""
        self._server.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=patience_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                reply = await self._reply(reader)
                head = f"HTTP/1.1 200 OK\r\nContent-Type: {reply.kind}\r\n{reply.headers}"
            except _Refused as refused:
                status = refused.status
                reply = WebReply("text/plain; charset=utf-8", f"{status.phrase}\n".encode())
                head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {reply.kind}\r\n"
                head += refused.headers
            if isinstance(reply.body, bytes):
                head += f"Content-Length: {len(reply.body)}\r\n"
                await _send(writer, f"{head}{HEADERS}\r\n".encode() + reply.body)
            else:
                await _send(writer, f"{head}{HEADERS}\r\n".encode())
                async with aclosing(reply.body) as parts:
                    async for part in parts:
                        await _send(writer, part)
            async with asyncio.timeout(PATIENCE_S):
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError):
            pass  # the reader is gone or too slow
        finally:
            writer.transport.abort()

    async def _reply(self, reader: asyncio.StreamReader) -> WebReply:
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
        request, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = request.partition(" ")
        path, _, version = rest.partition(" ")
        if version not in ("HTTP/1.0", "HTTP/1.1"):
            raise _Refused(HTTPStatus.BAD_REQUEST)
        hosts = [value.strip() for name, _, value in (line.partition(":") for line in lines)
                 if name.lower() == "host"]  # fmt: skip
        if len(hosts) != 1 or hosts[0].lower().partition(":")[0] not in NAMES:
            raise _Refused(HTTPStatus.MISDIRECTED_REQUEST)
        if method != "GET":
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "Allow: GET\r\n")
        reply = self._answer(path)
        if reply is None:
            raise _Refused(HTTPStatus.NOT_FOUND)
        return reply


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    with suppress(ConnectionResetError):
        async with asyncio.timeout(PATIENCE_S):
            await writer.drain()
            return
    raise EOFError
