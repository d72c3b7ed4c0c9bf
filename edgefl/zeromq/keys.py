"""Key files for machines that join a run. The keys are Curve25519 keys for ZeroMQ's CURVE mechanism.

A server's key folder contains ``server.key``, and ``NAME.pub`` for each machine that may join. A joining
machine needs only ``NAME.key``, which contains its own secret key and the server's public key. The files are
TOML files; each key is 32 bytes long and is written in hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from edgefl import toml
from edgefl.errors import ConfigError
from edgefl.files import make_folder

SERVER = "server"
OPEN = bytes(range(32))
"""Secret key of a server that accepts every machine. This key is publicly known, so connections to such a
server are not confidential."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_HEX = re.compile(r"[0-9a-f]{64}")


class Key(NamedTuple):
    """Content of a joining machine's key file: its name, its secret key and the public key of the server."""

    name: str
    secret: bytes
    server: bytes


def public(secret: bytes) -> bytes:
    """Return the public key that belongs to a secret key. Any 32 bytes are a valid secret key.

    >>> public(bytes(32)).hex()[:16]
    '2fe57da347cd6243'
    """
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def make(folder: Path, names: list[str]) -> list[Path]:
    """Create a key for each name in ``folder``, and the server's key if it is missing; return the new files.

    Raises `ConfigError` if a name is invalid or already has a key, or if the folder cannot be written. In
    these cases, no new files remain.
    """
    for name in names:
        if not _NAME.fullmatch(name) or name == SERVER:
            raise ConfigError(f"name must be 1 to 32 letters, digits, - or _, not {SERVER!r} (got {name!r})")
        if names.count(name) > 1:
            raise ConfigError(f"name {name!r} is given twice")
        if any(os.path.exists(folder / f"{name}.{kind}") for kind in ("key", "pub")):
            raise ConfigError(f"{folder / name}.key: this key already exists")
    made: list[Path] = []
    try:
        make_folder(folder)
        if not (folder / f"{SERVER}.key").exists():
            made += _write(folder, SERVER, "")
        server = public(read_server(folder)[0]).hex()
        for name in names:
            made += _write(folder, name, f'server = "{server}"\n')
    except OSError as error:
        for path in made:
            path.unlink(missing_ok=True)
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    return made


def _write(folder: Path, name: str, more: str) -> Iterator[Path]:
    """Write the two files of a new key pair, and yield the path of each. Only the user who runs this process
    can read the secret key."""
    secret = os.urandom(32)
    texts = {
        "key": f'# Keep this secret.\nname = "{name}"\nsecret = "{secret.hex()}"\n{more}',
        "pub": f'name = "{name}"\npublic = "{public(secret).hex()}"\n',
    }
    for kind, text in texts.items():
        path = folder / f"{name}.{kind}"
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if kind == "key" else 0o644)
        yield path
        with open(number, "w") as file:
            file.write(text)


def read_server(folder: Path) -> tuple[bytes, dict[str, bytes]]:
    """Read the secret key of a server, and the public keys of the machines that may join, keyed by name.

    Raises `ConfigError` if a file is missing or invalid, if other users can read the secret key, if the name
    in a file does not match the file name, or if two machines have the same key.
    """
    secret = _secret(folder / f"{SERVER}.key", _read(folder / f"{SERVER}.key", "secret"))
    joiners: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.pub")):
        if path.stem == SERVER:
            continue
        key = _read(path, "public")
        if key["name"] != path.stem:
            raise ConfigError(
                f"{path}: this is the key of {key['name']!r}; expected the key of {path.stem!r}"
            )
        of = bytes.fromhex(key["public"])
        if same := [name for name, other in joiners.items() if other == of]:
            raise ConfigError(f"{path}: this is also the key of {same[0]!r}")
        joiners[path.stem] = of
    return secret, joiners


def read(path: Path) -> Key:
    """Read the key file of a joining machine. Raises `ConfigError` if the file is missing or invalid, if
    other users can read it, or if it contains the key of a server."""
    key = _read(path, "secret")
    secret = _secret(path, key)
    if "server" not in key:
        raise ConfigError(
            f"{path}: this is a server's key; to create one for a node, run: edgefl keygen {path.parent} NAME"
        )
    return Key(key["name"], secret, bytes.fromhex(key["server"]))


def _read(path: Path, field: str) -> dict[str, str]:
    """Return the fields of a key file. Raises `ConfigError` if the given field is missing."""
    with contextlib.suppress(PermissionError):  # reading the file, below, reports this error
        if not path.exists():
            folder, name = path.parent, "" if path.stem == SERVER else f" {path.stem}"
            raise ConfigError(f"{path}: no such key; create it with: edgefl keygen {folder}{name}")
    found = toml.read(path)
    if field == "secret" and "public" in found:
        raise ConfigError(f"{path}: this is a public key; expected the secret key, {path.stem}.key")
    fit = (isinstance(text, str) and (name == "name" or _HEX.fullmatch(text)) for name, text in found.items())
    if not ({field, "name"} <= found.keys() and all(fit)):
        raise ConfigError(
            f"{path}: this is not an edgefl key; expected a name, and 64 hexadecimal digits as {field}"
        )
    return found


def _secret(path: Path, key: dict[str, str]) -> bytes:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path}: other users can read it (mode {mode:03o}); change this with: chmod 600 {path}"
        )
    return bytes.fromhex(key["secret"])
