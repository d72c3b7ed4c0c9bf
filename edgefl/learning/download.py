"""Download published data sets into the cache folder, and check the SHA-256 of each file.

MNIST and FashionMNIST are downloaded from the addresses that torchvision uses, and CIFAR-10 from the site of
its publisher. ``EDGEFL_OFFLINE=1`` forbids downloads. ``EDGEFL_MIRROR=http://host/folder`` replaces the
addresses with ``http://host/folder/NAME/FILE``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from edgefl.files import PARTIAL
from edgefl.learning.published_sets import TEST_BATCH
from edgefl.terminal import say

SILENCE_S = 15.0
"""Number of seconds without data from the server after which a download fails."""
SLOWEST_BYTES_PER_S = 50_000
"""Minimum mean speed of a download; `SILENCE_S` seconds of delay are allowed in addition."""
PIECE = 1 << 16


class NotDownloaded(Exception):
    """Files could not be downloaded; the message states the reason."""


class Source(NamedTuple):
    """A published data set: its address on a server, and its files."""

    address: str
    files: dict[str, str]
    """SHA-256 of each file, keyed by the file's name."""
    megabytes: float
    """Total size of the files, in megabytes."""


SOURCES = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
        12,
    ),
    "fashion-mnist": Source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
        31,
    ),
    "cifar-10": Source(
        "https://www.cs.toronto.edu/~kriz",
        {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9dddda3db29a59bca1dd"},
        170,
    ),
}


def offline() -> bool:
    """Return True if ``EDGEFL_OFFLINE`` forbids downloads."""
    return os.environ.get("EDGEFL_OFFLINE", "0") not in ("", "0")


def download(name: str, folder: Path, complete: Callable[[], bool]) -> None:
    """Download the files of the data set ``name`` into ``folder``, unless another process has done so.

    ``complete`` returns True if all files exist. A file gets its final name only after its checksum has
    been verified. Raises `NotDownloaded` if the download fails.
    """
    if offline():
        raise NotDownloaded("EDGEFL_OFFLINE is set")
    source, mirror = SOURCES[name], os.environ.get("EDGEFL_MIRROR")
    address = f"{_checked(mirror)}/{name}" if mirror else source.address
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if complete():
                return
            say(f"edgefl: downloading {name} ({source.megabytes:g} MB) into {folder}", err=True)
            for file, sha256 in source.files.items():
                _fetch(f"{address}/{file}", folder / file, sha256)
                if file.endswith(".tar.gz"):
                    try:
                        _unpack(folder / file, folder)
                    finally:
                        (folder / file).unlink()
    except OSError as error:
        raise NotDownloaded(f"{folder} cannot be written: {error.strerror or error}") from None


def _checked(mirror: str) -> str:
    """Return the value of EDGEFL_MIRROR without a trailing slash.

    Raises `NotDownloaded` if the value is not an address.
    """
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(mirror)
        whole = parts.hostname and not re.search(r"[\s\x00-\x1f\x7f]", mirror)
        if whole and parts.scheme in ("http", "https"):
            return mirror.rstrip("/")
    raise NotDownloaded(f"EDGEFL_MIRROR: expected an address such as http://host/folder, got {mirror!r}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder, so that only one process at a time downloads into it."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _fetch(address: str, file: Path, sha256: str) -> None:
    """Download one file and verify its checksum."""
    partial = file.with_name(file.name + PARTIAL)
    digest, received, began = hashlib.sha256(), 0, time.monotonic()
    try:
        with urllib.request.urlopen(address, timeout=SILENCE_S) as answer, partial.open("wb") as out:
            while piece := answer.read1(PIECE):
                out.write(piece)
                digest.update(piece)
                received += len(piece)
                if time.monotonic() - began > SILENCE_S + received / SLOWEST_BYTES_PER_S:
                    raise TimeoutError(f"slower than {SLOWEST_BYTES_PER_S // 1000} kB/s")
        if digest.hexdigest() != sha256:
            got = f"SHA-256 {digest.hexdigest()[:16]}… of {received:,} bytes"
            raise NotDownloaded(f"{address}: {got}, expected {sha256[:16]}…")
        partial.replace(file)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        reason = str(error).removeprefix("<urlopen error ").removesuffix(">")
        raise NotDownloaded(f"{address}: {reason}") from None
    finally:
        partial.unlink(missing_ok=True)


def _unpack(archive: Path, folder: Path) -> None:
    """Write the ``.bin`` files of the archive into ``folder``, ignoring the archive's subfolders.

    The files get their final names after all of them have been written. The test batch is renamed last,
    because a data set without a test batch is considered incomplete and is downloaded again.
    """
    partials: dict[Path, Path] = {}
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                content = packed.extractfile(member) if member.name.endswith(".bin") else None
                if content is not None:
                    file = folder / Path(member.name).name
                    partial = file.with_name(file.name + PARTIAL)
                    with content, partial.open("wb") as out:
                        partials[file] = partial
                        shutil.copyfileobj(content, out)
        for file in sorted(partials, key=lambda file: file.name == TEST_BATCH):
            partials[file].replace(file)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
