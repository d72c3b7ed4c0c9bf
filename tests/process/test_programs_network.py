"""Tests of phones' links with real commands: bytes, delays, and ends of connections."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgefl.errors import ConfigError
from edgefl.programs import PhoneResult, run
from edgefl.programs.relay import CLOSE_AT_ONCE, MIN_WINDOW_BYTES
from edgefl.programs.running import OUT_OF_FILES

from .runs import options, phone, python


class Echo(socketserver.ThreadingTCPServer):
    """A server that receives a whole stream and then sends it back."""

    daemon_threads = True
    request_queue_size = 128

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(self.rfile.read())


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


PORTS = itertools.count(10_000 + os.getpid() * 101 % 20_000)
"""Port numbers below Linux's range of ephemeral ports."""


def free_port() -> int:
    for port in PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError


SEND = """
import os, socket, sys
host, port = os.environ["EDGEFL_CONNECT_%d"].split(":")
with socket.create_connection((host, int(port))) as peer:
    peer.sendall(bytes(range(256)) * %d)
    peer.shutdown(socket.SHUT_WR)
    got = b""
    while data := peer.recv(65536):
        got += data
print(len(got), got == bytes(range(256)) * %d)
"""


def test_streams_arrive_complete_and_not_faster_than_the_link(
    echo: Echo, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    port, blocks = free_port(), 256  # 64 KiB
    sender = python(
        SEND % (port, blocks, blocks), network="3g-slow", connects={port: f"localhost:{echo.port}"}, share=1.0
    )
    result = run([sender, sender], options())
    assert result.exit_code == 0
    lines = sorted(capfdbinary.readouterr().out.splitlines())
    assert lines == [f"[{i} moto-g4] 65536 True".encode() for i in range(2)]
    for one in result.phones:
        wire = 65536 + -(-65536 // 1460) * 40
        assert one.up.bytes == one.down.bytes == 65536
        assert one.connections == 1
        assert one.refused == one.broken == 0
        for way, mbps in ((one.up, 0.33), (one.down, 0.78)):
            assert way.declared_s >= wire * 8 / (mbps * 1e6) + 0.1 - 1e-9
            assert way.achieved_s >= way.declared_s
        # the round trip of a handshake, then the upload and the download
        assert one.wall_s >= 0.2 + one.up.declared_s + one.down.declared_s


def served(serve: Callable[[socket.socket], None], code: str, network: str) -> PhoneResult:
    """Run a phone whose ``code`` connects to ``{port}``; its connection is passed to ``serve``."""
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            peer, _ = server.accept()
            with peer:
                serve(peer)

        thread = threading.Thread(target=accept)
        thread.start()
        connects = {port: f"127.0.0.1:{server.getsockname()[1]}"}
        code = code.replace("{port}", str(port))
        (one,) = run([python(code, network=network, connects=connects)], options()).phones
        thread.join()
    return one


def test_bytes_sent_before_the_end_of_a_command_arrive() -> None:
    code = "import socket; socket.create_connection(('127.0.0.1', {port})).sendall(bytes(100))"
    got: list[bytes] = []
    one = served(lambda peer: got.append(peer.makefile("rb").read()), code, "3g-slow")
    assert got == [bytes(100)]
    assert (one.up.bytes, one.refused, one.broken) == (100, 0, 0)


@pytest.mark.parametrize("ended", [False, True])
def test_bytes_sent_before_a_server_resets_the_connection_arrive(ended: bool) -> None:
    """A server does so when it rejects an upload before it has read all of it. If ``ended``, it ends its
    stream first."""
    code = (
        "import contextlib, socket\n"
        "peer, got, reset = socket.create_connection(('127.0.0.1', {port})), b'', False\n"
        "for use in (lambda: peer.sendall(bytes(1 << 20)), lambda: peer.recv(99)):\n"
        "    try:\n        while data := use(): got += data\n"
        "    except BrokenPipeError: pass\n"
        "    except ConnectionResetError: reset = True\n"
        "raise SystemExit(len(got) + reset)"
    )

    def reject(peer: socket.socket) -> None:
        peer.recv(1)
        peer.sendall(bytes(100))
        if ended:
            peer.shutdown(socket.SHUT_WR)

    one = served(reject, code, "3g")
    assert (one.exit_code, one.down.bytes) == (100 if ended else 101, 100)


def test_a_reset_during_a_download_is_no_end_of_stream() -> None:
    """The phone sends during the download. At an end of stream, it would take the download for complete."""
    code = (
        "import socket; peer = socket.create_connection(('127.0.0.1', {port}))\n"
        "try:\n    peer.sendall(b'x')\n    while peer.recv(1 << 12): peer.sendall(b'x')\n"
        "except ConnectionResetError: raise SystemExit(5)"
    )

    def give_up(peer: socket.socket) -> None:
        peer.recv(1)
        peer.sendall(bytes(2 * MIN_WINDOW_BYTES))
        peer.recv(1)  # the phone sends after it has received some bytes
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, CLOSE_AT_ONCE)

    one = served(give_up, code, "3g")
    assert one.exit_code == 5
    assert one.down.bytes > 0


def test_a_server_that_refuses_ends_the_connection() -> None:
    port, nobody = free_port(), free_port()
    code = (
        f"import os, socket; s = socket.create_connection(('127.0.0.1', {port}))\n"
        "try:\n    got = s.recv(1)\nexcept ConnectionResetError:\n    got = b''\n"
        "raise SystemExit(5 if not got else 0)"
    )
    (one,) = run([python(code, connects={port: f"127.0.0.1:{nobody}"})], options()).phones
    assert (one.exit_code, one.refused) == (5, 1)


def test_a_server_with_several_addresses_is_reached_at_the_first_accepting_one(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, localhost is ::1 and 127.0.0.1, and the server listens only at the latter."""
    nobody = ("127.0.0.1", free_port())
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", at) for at in (nobody, ("127.0.0.1", echo.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    port = free_port()
    (one,) = run([python(SEND % (port, 10, 10), connects={port: "server.example:80"})], options()).phones
    assert (one.exit_code, one.up.bytes, one.refused) == (0, 2560, 0)


def test_a_link_that_breaks_ends_its_connections(echo: Echo, tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    way = 'rate_mbps = 50\nloss_pct = 20\non_loss = "disconnect"\n'
    sources = '[sources]\ndown = "assumed: a test"\nup = "assumed: a test"\n'
    link.write_text(f'id = "link"\nname = "A test\'s"\n[down]\n{way}[up]\n{way}{sources}')
    port = free_port()
    sender = python(SEND % (port, 1024, 1024), network=str(link), connects={port: f"127.0.0.1:{echo.port}"})
    (one,) = run([sender], options(print_lines=False)).phones
    assert one.exit_code == 1
    assert one.broken == one.connections == 1
    assert one.up.bytes < 262144


def test_connections_beyond_the_limit_of_open_files_make_the_run_invalid(echo: Echo) -> None:
    """Half of the command's 50 connections use up the 64 files that the relay may open."""
    port = free_port()
    code = (
        "import socket\n"
        f"all = [socket.create_connection(('127.0.0.1', {port})) for _ in range(50)]\n"
        "for one in all:\n    try:\n        one.shutdown(socket.SHUT_WR)\n    except OSError:\n        pass\n"
        "for one in all:\n    try:\n        one.recv(1)\n    except OSError:\n        pass\n"
    )
    link = ["--connect", f"{port}=127.0.0.1:{echo.port}", "--throttle", "off", "--share", "0.3"]
    command = [sys.executable, "-m", "edgefl", "exec", *link, "-d", "moto-g4", "--", sys.executable, "-ISc"]
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *command, code]
    done = subprocess.run(limited, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, OUT_OF_FILES in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.slow) for one in ("<&-", ">&-", "2>&-"))]
)
def test_closed_standard_descriptors_are_no_error(closed: str, echo: Echo) -> None:
    port = free_port()
    base = [sys.executable, "-m", "edgefl", "exec", "--throttle", "off", "--share", "0.3", "-d", "moto-g4"]
    sends = ["--connect", f"{port}=127.0.0.1:{echo.port}", "--", sys.executable, "-c", SEND % (port, 1, 1)]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    subprocess.run([*shell, *base, "--accept-invalid", *sends], check=True)


def test_a_port_in_use_is_refused_before_any_start(echo: Echo) -> None:
    with pytest.raises(ConfigError, match="Address already in use"):
        run([phone("true", connects={echo.port: "localhost:1"})], options())
