"""Tests of the live page's web server: requests, refusals and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

import edgefl
from edgefl import Experiment, Fleet, Stop
from edgefl.errors import ConfigError
from edgefl.run import web_http
from edgefl.run.web import listening
from edgefl.run.web_http import MAX_CONNECTIONS, MAX_HEAD_BYTES, WebReply, WebServer

HOST = "Host: 127.0.0.1:{}\r\n"


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


class Site:
    """A site with a page, a stream and an endless answer."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.more, self.gone = asyncio.Event(), asyncio.Event()

    def answer(self, path: str) -> WebReply | None:
        if path == "/":
            return WebReply("text/plain", b"here")
        parts = {"/events": self._parts, "/flood": self._flood}.get(path)
        return WebReply("text/event-stream", parts()) if parts else None

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await self.more.wait()
        yield b"data: 2\n\n"

    async def _flood(self) -> AsyncGenerator[bytes, None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(web_http, "PATIENCE_S", 0.05)  # its request is in
            try:
                while True:
                    yield b"x" * (1 << 20)
            finally:
                self.gone.set()

    async def ask(self, request: str, host: str = HOST) -> bytes:
        """Return the whole answer to a request; b"" if the server closes the connection without one."""
        async with connected(self.port) as (reader, writer):
            with suppress(OSError):
                writer.write(f"{request}\r\n{host.format(self.port)}\r\n".encode("latin-1"))
                return await reader.read()
        return b""


def served(test: Callable[[Site], Awaitable[None]]) -> Callable[[], None]:
    """Turn an asynchronous function that takes a site into a test, which serves the site meanwhile."""

    async def main() -> None:
        with listening() as listener:
            site = Site(listener.getsockname()[1])
            server = WebServer(site.answer)
            await server.start(listener)
            try:
                await test(site)
            finally:
                await server.close(0.0)

    return lambda: asyncio.run(main())


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@served
async def test_a_page_is_served_with_headers_against_caches_and_other_sites(site: Site) -> None:
    head, _, page = (await site.ask("GET / HTTP/1.1")).partition(b"\r\n\r\n")
    assert (head.split(b"\r\n")[0], page) == (b"HTTP/1.1 200 OK", b"here")
    for header in (b"Content-Length: 4", b"Connection: close", b"Cache-Control: no-store",
                   b"Cross-Origin-Resource-Policy: same-origin"):  # fmt: skip
        assert header in head.split(b"\r\n")
    assert b"access-control" not in head.lower()


PATHS = ("/favicon.ico", "/?x=1", "//", "/../etc/passwd", "/%2e%2e/", "http://127.0.0.1/", "*", "")


@served
async def test_other_methods_paths_and_versions_are_refused(site: Site) -> None:
    for method in ("POST", "PUT", "HEAD", "OPTIONS", "DELETE", "get"):
        assert status(await site.ask(f"{method} / HTTP/1.1")) == 405, method
    for path in PATHS:
        assert status(await site.ask(f"GET {path} HTTP/1.1")) == 404, path
    for request in ("GET /", "GET / HTTP/2", "", "\x16\x03\x01\x02"):
        assert status(await site.ask(request)) == 400, request


@served
async def test_only_requests_with_a_local_host_name_are_answered(site: Site) -> None:
    tunnelled = "hOST:   LocalHost:8000\r\n"
    for host in ("Host: localhost\r\n", tunnelled):
        assert status(await site.ask("GET / HTTP/1.1", host)) == 200, host
    two = "Host: localhost\r\nHost: evil.example\r\n"
    others = [f"Host: {name}\r\n" for name in ("evil.example", "127.0.0.1.evil.example", "[::1]")]
    for host in ("", two, *others):
        assert status(await site.ask("GET / HTTP/1.1", host)) == 421, host


@served
async def test_a_request_above_the_size_limit_is_refused(site: Site) -> None:
    fits = "X: " + "x" * (MAX_HEAD_BYTES - 100) + "\r\n"
    assert status(await site.ask("GET / HTTP/1.1", HOST + fits)) == 200
    answer = await site.ask("GET / HTTP/1.1", HOST + "X: " + "x" * 2 * MAX_HEAD_BYTES + "\r\n")
    assert answer == b"" or status(answer) == 431  # a reset may overtake the answer
    assert status(await site.ask("GET / HTTP/1.1")) == 200


@served
async def test_a_client_that_neither_sends_nor_reads_is_disconnected(site: Site) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web_http, "PATIENCE_S", 0.05)
        async with connected(site.port) as (reader, writer):
            writer.write(b"GET / HT")
            with suppress(ConnectionResetError):  # disconnected before it had written
                assert await reader.read() == b""
    async with connected(site.port) as (reader, writer):
        writer.write(f"GET /flood HTTP/1.1\r\n{HOST.format(site.port)}\r\n".encode())
        await site.gone.wait()  # nothing was read, and the buffers are full


@served
async def test_connections_above_the_limit_are_closed_at_once(site: Site) -> None:
    async with AsyncExitStack() as kept:
        for _ in range(MAX_CONNECTIONS):
            await kept.enter_async_context(connected(site.port))
        for _ in range(200):
            async with connected(site.port) as (reader, _writer):
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
    while True:  # until the server has noticed that connections ended
        if answer := await site.ask("GET / HTTP/1.1"):
            assert status(answer) == 200
            return


@served
async def test_a_stream_continues_during_other_requests(site: Site) -> None:
    async with connected(site.port) as (reader, writer):
        writer.write(f"GET /events HTTP/1.1\r\n{HOST.format(site.port)}\r\n".encode())
        assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readuntil(b"\n\n") == b"data: 1\n\n"
        assert status(await site.ask("GET / HTTP/1.1")) == 200
        site.more.set()
        assert await reader.read() == b"data: 2\n\n"


def test_a_port_that_cannot_be_bound_is_an_error_before_the_run_starts(tmp_path: Path) -> None:
    wanted = Experiment(fleet=Fleet(devices={"pixel-4": 2}), stop=Stop(versions=1))
    with listening() as listener:
        taken = listener.getsockname()[1]
        for port, message in ((taken, f"--web-port {taken}: .*in use"), (70_000, "web: .* got 70000")):
            with pytest.raises(ConfigError, match=message):
                edgefl.run(wanted, tmp_path / "run", web=port)
    assert not (tmp_path / "run").exists()
