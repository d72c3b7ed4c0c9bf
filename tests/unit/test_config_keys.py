"""`edgefl keys`: the keys of an experiment and of each strategy, with their defaults and meanings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from shell import Shell

from edgefl import strategies
from edgefl.config.keys import Setting, keys


@pytest.mark.parametrize("which", ["", *(f"strategy.{name}" for name in strategies.names())])
def test_every_key_has_a_meaning_and_its_allowed_values(which: str) -> None:
    found = keys(which)
    assert [key.name for key in found if not (key.meaning and key.allowed)] == []
    assert len({key.name for key in found}) == len(found)


def test_keys_of_a_table_include_inner_tables_and_a_key_is_found_alone() -> None:
    assert {key.name for key in keys("fleet")} > {key.name for key in keys("fleet.churn")}
    assert keys("stop.versions") == [
        Setting(
            "stop.versions",
            "",
            "a whole number from 1 to 1000000000",
            "Number of versions of the global model after which the run ends.",
        )
    ]


@pytest.mark.parametrize(
    ("which", "near"),
    [
        ("flet", "did you mean 'fleet'?"),
        ("strategy.fedbuf", "did you mean 'fedbuff'?"),
        ("stop.version", "available:"),
    ],
)
def test_an_unknown_key_is_an_error_of_one_line(which: str, near: str, edgefl: Shell) -> None:
    said = edgefl.refuses(2, "keys", which)
    assert "not found" in said
    assert near in said


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_table_fits_the_terminal(columns: int, edgefl: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = edgefl.shows("keys").splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("evaluation.every_versions") for line in lines)


@pytest.mark.parametrize(
    ("words", "place", "offered"), [("edgefl re", 1, "resume"), ("edgefl run --acc", 2, "--accept-invalid")]
)
def test_the_shell_completes_commands_and_options(words: str, place: int, offered: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "edgefl"],
        env={
            **os.environ,
            "_EDGEFL_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(place),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert offered in found.stdout.split()
