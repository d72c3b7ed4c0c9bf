"""Sphinx settings for `make docs`, and the reference pages that are generated from the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GENERATED = Path(__file__).parent / "reference"

project = "edgefl"
author = copyright = "the edgefl authors"  # the name is Sphinx's
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = "edgefl"
html_show_sphinx = False
html_copy_source = False
smartquotes = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "dollarmath"]
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": False}


def cell(text: str) -> str:
    """Markdown text for a table cell, with links to the pages that it names."""
    text = text.replace("``", "`").replace("|", "\\|")
    return re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", text)


def keys() -> Iterator[str]:
    from edgefl import strategies
    from edgefl.config.keys import Setting, keys

    def table(rows: list[Setting]) -> Iterator[str]:
        yield "\n| key | default | allowed | meaning |\n|---|---|---|---|"
        for row in rows:
            default = f"`{row.default}`" if row.default else "–"
            yield f"| `{row.name}` | {default} | {cell(row.allowed)} | {cell(row.meaning)} |"

    yield "# Keys of an experiment\n\nThe same list as `edgefl keys`; – means that there is no default."
    for name, rows in groupby(keys(), key=lambda row: row.name.partition(".")[0] if "." in row.name else ""):
        yield f"\n## {f'[{name}]' if name else 'At the top'}"
        yield from table(list(rows))
    yield "\n## Strategies\n\n`[strategy] name = …` and these fields; see [Strategies](../strategies.md)."
    for name in strategies.names():
        yield f"\n### {name}"
        yield from table(keys(f"strategy.{name}"))


def commands() -> Iterator[str]:
    import typer

    from edgefl.cli import app

    yield "# Commands\n\nThe same text as `edgefl COMMAND --help`."
    yield from command(typer.main.get_command(app), "edgefl")


def command(found: Any, name: str) -> Iterator[str]:
    """One command, or the commands of a group."""
    if inner := getattr(found, "commands", {}):
        for each in inner.values():
            yield from command(each, f"{name} {each.name}")
        return
    arguments = [one for one in found.params if one.param_type_name == "argument"]
    options = [one for one in found.params if one.param_type_name == "option" and not one.hidden]
    yield f"\n## {name}\n\n{found.help or ''}\n\n```\n{' '.join([name, *map(written, arguments)])}\n```"
    rows = [(written(one), one.help) for one in arguments if one.help]
    rows += [(", ".join([*one.opts, *one.secondary_opts]), one.help) for one in options if one.name != "help"]
    if rows:
        yield "\n| | |\n|---|---|"
        yield from (f"| `{what}` | {cell(meaning or '')} |" for what, meaning in rows)


def written(argument: Any) -> str:
    """An argument as in the usage line."""
    text = str(argument.metavar or argument.name.upper())
    return text if argument.required or text.startswith("[") else f"[{text}]"


def changes() -> Iterator[str]:
    yield (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](../")


for made in (keys, commands, changes):
    GENERATED.joinpath(f"{made.__name__}.md").write_text("\n".join(made()) + "\n", encoding="utf-8")
