"""A package's docstring is its map: it names the modules that are there, all of them and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from edgefl import strategies

ROOT = Path(__file__).parents[2] / "edgefl"
PACKAGES = sorted(file.parent for file in ROOT.rglob("__init__.py"))
NAME = r"[a-z_][a-z0-9_]*(?:\.py|/)?"


def modules(package: Path) -> set[str]:
    """Modules and packages directly in it."""
    files = {file.stem for file in package.glob("*.py") if not file.stem.startswith("__")}
    return files | {folder.parent.name for folder in package.glob("*/__init__.py")}


def docstring(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""


def entries(text: str, known: set[str]) -> list[str]:
    """The map's lines, but for continuations: the map is where most lines begin with a module's name."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        own = [line[indent:] for line in lines if line[indent] != " "]
        begun = [line for line in own if set(names(line)) & known]
        if 2 * len(begun) > len(own):
            found += own
    return found


def names(entry: str) -> list[str]:
    """What an entry is of: names before a gap, or divided by commas before what is said of them."""
    listed = re.match(rf"({NAME}(?:,? {NAME})*)  ", entry) or re.match(
        rf"({NAME}(?:, {NAME})*)(?: |$)", entry
    )
    return [name.rstrip("/").removesuffix(".py") for name in re.findall(NAME, listed[1])] if listed else []


@pytest.mark.parametrize("package", PACKAGES, ids=[str(one.relative_to(ROOT.parent)) for one in PACKAGES])
def test_a_packages_map_names_its_modules_and_no_others(package: Path) -> None:
    text, there = docstring(package), modules(package)
    said = set(re.findall(r"\w+", text))
    for stem in re.findall(r"^\s*(\w+)  .*its parts are the files named after it", text, re.MULTILINE):
        said |= {name for name in there if name.startswith(f"{stem}_")}
    if package.name == "strategies":  # one file more is a strategy more, and nothing else to edit
        said |= {name.replace("-", "_") for name in strategies.names()}
    assert there - said == set(), "on no map"
    native = {file.name.partition(".")[0] for file in package.glob("_*.pyi")}
    listed = {name for entry in entries(text, there) for name in names(entry)}
    assert listed - there - native - {"__init__"} == set(), "on the map, but not there"
