"""Reproductions: a study in small, run once, and commands that cannot be carried out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edgefl import ConfigError, Stop, config
from edgefl.cli import main
from edgefl.lab import study
from edgefl.lab.study import Arm, Curves, Finding, Study, verdict, write_report
from edgefl.results import run_folder

from .runs import virtual


def judge(curves: Curves) -> Sequence[Finding]:
    ours, other = curves.accuracy("a"), curves.accuracy("b")
    return [Finding("a is not b", "nowhere", "no", f"{ours} {other}", verdict(ours != other))]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr(study, "_folder", lambda: tmp_path)
    settings = virtual(stop=Stop(versions=4))
    (tmp_path / "small-quick.toml").write_text(config.dump(settings))
    arms = (Arm("a", ()), Arm("b", ("strategy.buffer_size=2",)))
    return Study("small", "A small study", "none", arms, judge, seeds=(1,))


def test_a_study_is_run_once_and_goes_on_where_it_stopped(small: Study, tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "out"
    curves = small.run(out, quick=True, say=said.append)
    assert len(said) == 2
    findings = small.judge(curves)
    write_report(out, small.title, small.citation, findings, curves=curves, notes=("a note",))
    document = json.loads((out / "summary.json").read_text())
    assert [one["claim"] for one in document["findings"]] == ["a is not b"]
    assert document["arms"]["a"]["seeds"] == [1]
    html = (out / "report.html").read_text()
    assert "A small study" in html
    assert "a note" in html
    assert "<script" not in html

    other = replace(small, arms=(Arm("a", ("training.lr=0.1",)),))
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        other.run(out, quick=True, say=said.append)

    stamps = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/summary.json")}
    folder = out / "runs" / "b-1"
    (folder / "record.sqlite").unlink()
    with pytest.raises(ConfigError, match="b-1"):
        small.run(out, quick=True, say=said.append)
    # As if it had been killed before its record was whole: then it is made again.
    settings = (folder / "experiment.toml").read_text()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "experiment.toml").write_text(settings)
    with run_folder.held(folder), pytest.raises(ConfigError, match="another edgefl process runs it"):
        small.run(out, quick=True, say=said.append)
    assert (folder / "experiment.toml").read_text() == settings
    (folder / "record.sqlite").write_bytes(b"")
    again = small.run(out, quick=True, say=said.append)
    assert again.accuracy("b") == curves.accuracy("b")  # the same bits
    changed = {path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp}
    assert {path.parent.name for path in changed} == {"b-1"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fedbuf",), "did you mean 'fedbuff'"),
        (("fedbuff", "--out", "{file}"), "a file, expected a folder"),
        (("fedstaleweight",), "EDGEFL_DATA"),
        (("theory", "--set", "seed=1"), "theory has no settings"),
        (("theory", "--out", "{file}/under"), "cannot be made: Not a directory"),
        (("fedbuff", "--quick", "--set", "stop={trips=9}"), "takes stop.accuracy away"),
        (("fedbuff", "--quick", "--set", "stop.version=1"), "did you mean"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    given = [argument.replace("{file}", str(tmp_path / "file")) for argument in arguments]
    if "--out" not in given:
        given += ["--out", str(tmp_path / "out")]
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = main(["reproduce", *given])
    err = capsys.readouterr().err
    assert code == 2, err
    assert says in err
    assert len(err.strip().splitlines()) == 1
