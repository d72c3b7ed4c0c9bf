"""Tests of downloading published data sets, including from servers that fail, stall or send wrong data."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.experiment import Data
from edgefl.learning import download
from edgefl.learning.data import load_data
from edgefl.learning.download import SOURCES, Source
from edgefl.learning.published_sets import RECORD_BYTES
from tests.unit.test_data import idx

FILES = tuple(SOURCES["mnist"].files)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a user who has no data sets yet; downloads are permitted."""
    for name in ("EDGEFL_DATA", "EDGEFL_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("edgefl.learning.data.DEBIAN", tmp_path / "debian")
    return tmp_path / "cache" / "edgefl" / "data"


@pytest.fixture(autouse=True)
def requests(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve small data sets from a mirror and expect their checksums instead of the real ones. The value is
    the list of the requested paths."""
    rng = np.random.default_rng(0)
    digits = {
        name: gzip.compress(idx(rng.integers(0, 9, (8, 28, 28)[: 3 if "images" in name else 1], np.uint8)))
        for name in FILES
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in ("data_batch_1.bin", "test_batch.bin", "../outside.bin", "batches.meta.txt"):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = 2 * RECORD_BYTES
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    sets = {"mnist": digits, "cifar-10": {"cifar-10-binary.tar.gz": packed.getvalue()}}
    for name, files in sets.items():
        (tmp_path / "served" / name).mkdir(parents=True)
        for file, content in files.items():
            (tmp_path / "served" / name / file).write_bytes(content)
        sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
        monkeypatch.setitem(SOURCES, name, Source("http://127.0.0.1:9", sums, 1))
    requested: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            requested.append(self.path)

    handler = partial(Handler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("EDGEFL_MIRROR", f"http://127.0.0.1:{server.server_port}")
        yield requested
        server.shutdown()
        thread.join()


def failure(name: str = "mnist") -> str:
    with pytest.raises(ConfigError) as caught:
        load_data(Data(name=name), seed=0)
    message = str(caught.value)
    assert "\n" not in message
    assert "(set data.path or EDGEFL_DATA to the folder)" in message
    return message


def test_missing_files_are_downloaded_once(
    cache: Path, requests: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, again = (load_data(Data(name="mnist"), seed=0) for _ in range(2))
    np.testing.assert_array_equal(first.train_x[:], again.train_x[:])
    assert sorted(requests) == sorted(f"/mnist/{file}" for file in FILES)
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(FILES)
    assert capsys.readouterr().err == f"edgefl: downloading mnist (1 MB) into {cache / 'mnist'}\n"


def test_an_archive_is_unpacked_into_its_folder_only(cache: Path) -> None:
    assert len(load_data(Data(name="cifar-10"), seed=0).train_y) == 2
    folder = cache / "cifar-10-batches-bin"
    names = {"data_batch_1.bin", "test_batch.bin", "outside.bin"}
    assert {path.name for path in cache.rglob("*") if path.is_file()} == names
    assert {path.parent for path in cache.rglob("*.bin")} == {folder}


def test_an_archive_that_cannot_be_unpacked_leaves_no_batches(cache: Path) -> None:
    """The third file, after the test batch, cannot be written."""
    obstacle = cache / "cifar-10-batches-bin" / "outside.bin.partial"
    obstacle.mkdir(parents=True)
    assert f"not downloaded: {obstacle.parent} cannot be written: Is a directory" in failure("cifar-10")
    assert [*obstacle.parent.iterdir()] == [obstacle]
    obstacle.rmdir()
    assert len(load_data(Data(name="cifar-10"), seed=0).train_y) == 2


def test_concurrent_loads_share_one_download(requests: list[str]) -> None:
    with ThreadPoolExecutor(4) as pool:  # the lock between processes is effective between threads, too
        found = list(pool.map(lambda _: load_data(Data(name="mnist"), seed=0), range(4)))
    assert {len(data.train_y) for data in found} == {8}
    assert len(requests) == len(FILES)


def test_a_file_with_another_checksum_is_not_kept(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "served" / "mnist" / FILES[1]
    file.write_bytes(file.read_bytes() + b"x")
    assert f"not downloaded: {os.environ['EDGEFL_MIRROR']}/mnist/{FILES[1]}: SHA-256 " in failure()
    assert [path.name for path in (cache / "mnist").iterdir()] == [FILES[0]]


def test_an_error_names_a_file_that_the_server_lacks(tmp_path: Path) -> None:
    (tmp_path / "served" / "mnist" / FILES[0]).unlink()
    assert f"{FILES[0]}: HTTP Error 404" in failure()


def test_an_error_names_an_address_that_refuses_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGEFL_MIRROR")
    assert f"http://127.0.0.1:9/{FILES[0]}: [Errno" in failure()


@pytest.mark.parametrize("mirror", ["nowhere", "http://", "http://[::1", "http://a b/x", "file:///etc"])
def test_an_error_names_an_invalid_address_of_a_mirror(
    mirror: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEFL_MIRROR", mirror)
    assert f"EDGEFL_MIRROR: expected an address such as http://host/folder, got {mirror!r};" in failure()
    assert (capsys.readouterr().err, cache.exists()) == ("", False)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\nabc"])
def test_a_server_that_stops_sending_is_a_timeout(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SILENCE_S", 0.1)
    with answering(lambda peer: peer.sendall(sent)) as address:
        monkeypatch.setenv("EDGEFL_MIRROR", address)
        assert "timed out" in failure()


def test_a_download_below_the_lowest_rate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server never stops sending, so no timeout ends the download."""
    monkeypatch.setattr(download, "SILENCE_S", 5.0)
    monkeypatch.setattr(download, "SLOWEST_BYTES_PER_S", 10**15)
    monkeypatch.setattr(download.time, "monotonic", partial(next, iter(range(0, 10**6, 4))))

    def endless(peer: socket.socket) -> None:
        peer.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        while True:
            peer.sendall(bytes(1000))

    with answering(endless) as address:
        monkeypatch.setenv("EDGEFL_MIRROR", address)
        assert "slower than" in failure()


@pytest.mark.parametrize("variable", ["EDGEFL_OFFLINE", "EDGEFL_DATA"])
def test_nothing_is_downloaded_if_the_environment_forbids_it(
    variable: str, cache: Path, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    why = {"EDGEFL_OFFLINE": ": EDGEFL_OFFLINE is set", "EDGEFL_DATA": ", because EDGEFL_DATA is set"}
    assert f"not downloaded{why[variable]}" in failure()
    with pytest.raises(ConfigError, match=r"files not found and not downloaded, because data\.path is set"):
        load_data(Data(name="mnist", path=str(cache)), seed=0)
    assert requests == []


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Listen on a socket; the value is its address. The first connection is passed to ``answer`` and kept
    open until the end of the context."""
    done = threading.Event()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, suppress(OSError):  # the client closed the connection
            answer(peer)
            done.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join()
