"""Keys of servers and nodes: making them, reading them, and a one-line error for each invalid file."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from shell import Shell

from edgefl.errors import ConfigError
from edgefl.zeromq import keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.make(tmp_path / "keys", ["one", "two"])
    return tmp_path / "keys"


def test_a_nodes_key_matches_its_servers_and_only_its_owner_can_read_it(folder: Path) -> None:
    secret, joiners = keys.read_server(folder)
    for name in ("one", "two"):
        key = keys.read(folder / f"{name}.key")
        assert (key.name, key.server) == (name, keys.public(secret))
        assert joiners[name] == keys.public(key.secret)
    assert len(joiners) == 2
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")}
    assert modes == {"one.key": 0o600, "server.key": 0o600, "two.key": 0o600}


def test_keygen_adds_keys_for_the_same_server(folder: Path, edgefl: Shell) -> None:
    before = keys.read_server(folder)
    made = edgefl.shows("keygen", str(folder), "three").split()
    assert made == [str(folder / "three.key"), str(folder / "three.pub")]
    secret, joiners = keys.read_server(folder)
    assert (secret, set(joiners)) == (before[0], {"one", "two", "three"})
    assert "one.key: this key already exists" in edgefl.refuses(2, "keygen", str(folder), "four", "one")
    assert not (folder / "four.key").exists()


@pytest.mark.parametrize("name", ["server", "", "../x", "a b", "x" * 33, "-x"])
def test_an_invalid_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^name must be 1 to 32 letters"):
        keys.make(tmp_path / "keys", ["fine", name])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["file", "a"], "file: cannot be written: File exists"),
        (["file/inside", "a"], "file/inside: cannot be written: Not a directory"),
        (["new", "a", "a"], "name 'a' is given twice"),
        (["", "a"], "DIR '': must be the name of a folder"),
    ],
)
def test_keys_that_cannot_be_written_are_refused_and_none_is_made(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert edgefl.refuses(2, "keygen", *arguments) == line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_if_one_key_cannot_be_written_none_is_left(folder: Path) -> None:
    before = sorted(folder.iterdir())
    (folder / "three.key").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"keys: cannot be written: File exists$"):
        keys.make(folder, ["four", "three"])
    (folder / "three.key").unlink()
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (Path.unlink, r"no such key; create it with: edgefl keygen \S+keys one"),
        (
            lambda key: key.chmod(0o640),
            r"other users can read it \(mode 640\); change this with: chmod 600 \S+one.key",
        ),
        (
            lambda key: shutil.copy(key.with_name("one.pub"), key),
            "this is a public key; expected the secret key, one.key",
        ),
        (
            lambda key: shutil.copy(key.with_name("server.key"), key),
            r"this is a server's key; to create one for a node, run: edgefl keygen \S+keys NAME",
        ),
        (
            lambda key: key.write_text(key.read_text().replace('secret = "', 'secret = "x')),
            "this is not an edgefl key; expected a name, and 64 hexadecimal digits as secret",
        ),
        (lambda key: key.write_bytes(b"\xff"), "line 1: not UTF-8: byte 0xff"),
        (lambda key: (key.unlink(), key.mkdir()), "this is a folder; expected a TOML file"),
        (lambda key: key.write_text(key.read_text().replace("name", "what")), "this is not an edgefl key"),
        (lambda key: key.write_text("name = 1\nsecret = []\n"), "this is not an edgefl key"),
    ],
)
def test_an_invalid_key_is_one_line(folder: Path, damage: Callable[[Path], object], line: str) -> None:
    damage(folder / "one.key")
    with pytest.raises(ConfigError, match=rf"one\.key: {line}") as raised:
        keys.read(folder / "one.key")
    assert "\n" not in str(raised.value)


def test_an_invalid_server_folder_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none/server.key: no such key; create it with: edgefl keygen \S+none$"
    ):
        keys.read_server(tmp_path / "none")
    shutil.copy(folder / "one.pub", folder / "other.pub")
    with pytest.raises(
        ConfigError, match=r"other.pub: this is the key of 'one'; expected the key of 'other'"
    ):
        keys.read_server(folder)
    (folder / "other.pub").write_text((folder / "one.pub").read_text().replace('"one"', '"other"'))
    with pytest.raises(ConfigError, match=r"other.pub: this is also the key of 'one'"):
        keys.read_server(folder)
