"""Tests of the documentation: table of contents, links, and a build without warnings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent != DOCS / "reference")
MADE = {"keys", "commands", "changes"}


def anchor(heading: str) -> str:
    """Return the anchor that GitHub and Sphinx generate for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_page_is_in_the_table_of_contents() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = "\n".join(re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL))
    listed = {line.rpartition("<")[2].rstrip(">") for line in trees.splitlines() if line and line[0] != ":"}
    there = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES} - {"index"}
    assert listed == there | {"reference/python"} | {f"reference/{name}" for name in MADE}


def test_every_link_has_a_target() -> None:
    pages = [*PAGES, ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    texts = [(page, page.read_text(encoding="utf-8")) for page in pages]
    links = [(page, target) for page, text in texts for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    for page, target in links:
        if re.match(r"https?:", target):
            continue
        name, _, place = target.partition("#")
        file = page if not name else (page.parent / name).resolve()
        if file.parent == DOCS / "reference" and file.stem in MADE:
            continue
        assert file.exists(), f"{page.name}: {target}"
        if place:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert place in map(anchor, headings), f"{page.name}: {target}"


@pytest.mark.usefixtures("nothing_left")
def test_the_pages_are_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install 'edgefl[docs]'")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    keys = (tmp_path / "reference" / "keys.html").read_text(encoding="utf-8")
    assert "fleet.devices" in keys
    assert not re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css)"', keys)  # scripts and styles are local
