"""Read files with a size limit, and write files atomically.

After a write, a file is either complete or unchanged, even if the process is killed or the power fails. The
new content is written to a temporary file in the same folder, which is flushed to disk and then renamed.
Finally the folder itself is flushed, so that the new name also survives a power failure. Devices and pipes,
such as ``/dev/null`` and ``/dev/stdout``, are not replaced but written to.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from edgefl import failpoints
from edgefl.errors import ConfigError, RunError

PARTIAL = ".partial"
"""Suffix of the names of temporary files."""
DATA_FILES = "data-*.safetensors"
"""Pattern for files with arrays that were passed to a run as objects; the names contain a digest of the
arrays. A new run can be started in a folder that is empty except for such files."""


def read(path: str | Path, most_bytes: int) -> bytes:
    """Return the content of a regular file. Raises OSError if the file is longer than ``most_bytes`` or is
    not a regular file.

    >>> read("/dev/zero", 10)
    Traceback (most recent call last):
    OSError: [Errno 22] not a regular file: '/dev/zero'
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # do not block on a named pipe
    with open(number, "rb") as file:
        status = os.fstat(number)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > most_bytes or len(found := file.read(most_bytes + 1)) > most_bytes:
            raise OSError(errno.EFBIG, f"longer than {most_bytes / 2**20:g} MiB", str(path))
    return found


def replace(path: Path, pieces: Iterable[bytes | memoryview]) -> Path:
    """Replace the file at ``path`` with a file that contains ``pieces``.

    If OSError is raised, the file has either all of its old content or all of the new. A device, a pipe or an
    open file of a process (``/dev/stdout``) is written to instead.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = replace(Path(folder) / "a.txt", [b"one ", b"two"])
    ...     path.read_text(), os.listdir(folder)
    ('one two', ['a.txt'])
    """
    if not is_replaceable(path):
        sys.stdout.flush()
        descriptor = _descriptor(path)
        with open(path if descriptor is None else os.dup(descriptor), "ab", buffering=0) as file:
            _write(file, pieces)
        return path
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with open(partial, "wb", buffering=0) as file:
            _write(file, pieces)
            os.fsync(file.fileno())
        failpoints.pass_by("unnamed")
        os.replace(partial, path)
    except BaseException:  # also Ctrl-C
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    failpoints.pass_by("renamed")
    flush_folder(path.parent)
    return path


def is_replaceable(path: Path) -> bool:
    """Return False for a device, a pipe or a socket, and for a descriptor's path, such as ``/dev/stdout``."""
    if not path.exists() or path.is_dir():
        return True
    folder = os.path.realpath(path.parent)
    return path.is_file() and folder != "/dev" and not folder.startswith("/proc/")


def _descriptor(path: Path) -> int | None:
    """Return the descriptor of this process that a path such as ``/dev/stdout`` or ``/dev/fd/3`` names.

    Such a path must not be opened again: the new descriptor would start at offset 0, so that its writes and
    those of the existing descriptor would overwrite each other.
    """
    link = Path(os.readlink(path)) if path.is_symlink() and path.parent == Path("/dev") else path
    own = os.path.realpath(link.parent) == os.path.realpath("/proc/self/fd")
    return int(link.name) if own and link.name.isdecimal() else None


def _write(file: FileIO, pieces: Iterable[bytes | memoryview]) -> None:
    for piece in pieces:
        left = memoryview(piece)
        while left:
            left = left[file.write(left) :]
        failpoints.pass_by("torn")


def write_text(path: Path, text: str) -> Path:
    """Write ``text`` to the file at ``path`` in UTF-8, with `write_bytes`."""
    return write_bytes(path, text.encode())


def json_text(document: object) -> str:
    """Return a document as JSON text. Raises ValueError if it contains NaN or an infinite number."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def encodable(text: str) -> str:
    """Return text that can be written in UTF-8: bytes that Python could not decode are escaped.

    >>> encodable("caf\\udce9")
    'caf\\\\udce9'
    """
    return text.encode(errors="backslashreplace").decode()


def write_json(path: Path, document: object) -> Path:
    """Write a document to the file at ``path`` as JSON in UTF-8. Bytes of a command line that are not valid
    UTF-8 are escaped, for example as ``\\udcff``."""
    return write_bytes(path, json_text(document).encode(errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> Path:
    """Replace the file at ``path`` with one that has this content, and create its folder if needed. Raises
    `RunError` if the file cannot be written."""
    try:
        make_folder(path.parent)
        return replace(path, [content])
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def create_secret(path: Path, size: int) -> None:
    """Create a file with ``size`` random bytes that only its owner can read, and flush it to disk.

    Raises FileExistsError if the file already exists.
    """
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(number, "wb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(number)
    flush_folder(path.parent)


def read_secret(path: Path, size: int) -> bytes:
    """Return the content of a file made by `create_secret`.

    Raises FileNotFoundError if there is no file, and `ConfigError` if it has another length or cannot be
    read, for example because it is another user's.
    """
    try:
        found = read(path, 1 << 20)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(found) != size:
        raise ConfigError(f"{path}: is damaged: it has {len(found)} bytes, not {size}")
    return found


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its missing parent folders, and flush their names to disk."""
    missing = [folder, *folder.parents]
    missing = missing[: next(place for place, each in enumerate(missing) if each.exists())]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush_folder(each.parent)


def cache_folder() -> Path:
    """Return the folder in which edgefl caches files for this user. Raises `ConfigError` if the user has no
    home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "edgefl"
    except RuntimeError:  # HOME is not set and the system does not know the user
        raise ConfigError("no home folder is known: set HOME or XDG_CACHE_HOME") from None


def flush_folder(folder: Path) -> None:
    """Flush the directory entries of ``folder`` to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
