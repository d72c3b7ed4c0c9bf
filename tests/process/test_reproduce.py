"""Reproductions: the settings of every paper, a study in small, and what the command leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest

from edgefl import ConfigError, config
from edgefl.lab import PAPERS, page
from edgefl.lab.study import Arm, Curves, Finding, Study, slug, verdict
from edgefl.results import run_folder

from .runs import Command, experiment

STUDIES = [import_module(f"edgefl.lab.{name}").study for name in PAPERS if name != "theory"]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_arm_is_an_experiment_that_can_be_run(study: Study, quick: bool) -> None:
    checked = [
        config.validate(study.experiment(arm, 1, quick=quick), study.file(quick).parent) for arm in study.arms
    ]
    texts = [config.dump(each) for each in checked]
    assert len(set(texts)) == len(texts)
    assert len({slug(arm) for arm in study.arms}) == len(study.arms)
    assert all(each.clock.kind == "virtual" for each in checked)
    assert (checked[0].data.name == "digits") == quick


def test_defedavg_takes_the_steps_of_its_table() -> None:
    study = next(study for study in STUDIES if study.name == "defedavg")
    steps = {}
    for arm in study.arms:
        each = study.experiment(arm, 1, quick=False)
        steps[arm.label] = (each.strategy["server_lr"], each.training.lr)
    assert steps == {  # Wang 2024, table II, FashionMNIST, n = 10
        "DeFedAvg-nIID": (0.1, 0.05),
        "non-IID FedAvg": (0.1, 0.05),
        "non-IID FedBuff": (0.1, 0.005),
        "non-IID FAVANO": (1.0, 0.05),  # the table has no other step for it
        "DeFedAvg-IID": (0.1, 0.05),
        "IID FedAvg": (1.0, 0.1),
        "IID FAVANO": (1.0, 0.1),
        "IID AsySG": (0.1, 0.01),  # the table has 0.1, with which it diverges here
    }


def test_what_an_arm_changes_in_small_it_changes_only_there(small: Small) -> None:
    arm = Arm("a", (), full=("training.lr=0.5",), quick=("training.lr=0.25",))
    assert [small.experiment(arm, 1, quick=quick).training.lr for quick in (False, True)] == [0.5, 0.25]
    with pytest.raises(ConfigError, match=r"training\.lr is what tells a from the other arms"):
        replace(small, arms=(arm, Arm("b", ()))).changed(["training.lr=1"])


@dataclass(frozen=True)
class Small(Study):
    """A study whose settings are a test's."""

    path: Path = Path()

    def file(self, quick: bool) -> Path:
        return self.path


def judge(curves: Curves) -> Sequence[Finding]:
    ours, other = curves.accuracy("a"), curves.accuracy("b")
    return [Finding("a is not b", "nowhere", "no", f"{ours} {other}", verdict(ours != other))]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    path = tmp_path / "small.toml"
    text = config.dump(experiment())
    path.write_text(
        text.replace('kind = "wall"', 'kind = "virtual"').replace("versions = 12", "versions = 4")
    )
    arms = (Arm("a", ()), Arm("b", ("strategy.buffer_size=2",)))
    return Small("small", "A small study", "none", arms, judge, seeds=(1, 2), path=path)


def test_a_study_is_run_once_and_goes_on_where_it_stopped(small: Small, tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "out"
    curves = small.run(out, quick=True, say=said.append)
    assert len(said) == 4
    findings = small.judge(curves)
    page.write(out, small.title, small.citation, findings, rows=page.rows_of(curves), notes=("a note",))
    document = json.loads((out / "summary.json").read_text())
    assert [one["claim"] for one in document["findings"]] == ["a is not b"]
    assert document["arms"]["a"]["seeds"] == [1, 2]
    html = (out / "report.html").read_text()
    assert "A small study" in html
    assert "a note" in html
    assert "<script" not in html

    stamps = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/summary.json")}
    (out / "runs" / "b-2" / "record.sqlite").unlink()
    with pytest.raises(ConfigError, match="b-2"):
        small.run(out, quick=True, say=said.append)
    for path in sorted((out / "runs" / "b-2").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    again = small.run(out, quick=True, say=said.append)
    assert again.accuracy("b") == curves.accuracy("b")  # the same bits
    changed = {path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp}
    assert {path.parent.name for path in changed} == {"b-2"}


def test_a_run_killed_before_its_record_was_whole_is_made_again(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = replace(small, seeds=(1,), arms=small.arms[:1])
    folder = out / "runs" / "a-1"
    folder.mkdir(parents=True)
    settings = config.dump(config.validate(one.experiment(one.arms[0], 1, quick=True), one.path.parent))
    (folder / "experiment.toml").write_text(settings)
    with run_folder.held(folder), pytest.raises(ConfigError, match="another edgefl process runs it"):
        one.run(out, quick=True, say=lambda _: None)
    assert (folder / "experiment.toml").read_text() == settings
    (folder / "record.sqlite").write_bytes(b"")
    assert len(one.run(out, quick=True, say=lambda _: None).records["a"]) == 1


def test_a_folder_with_other_settings_is_refused(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = replace(small, seeds=(1,), arms=small.arms[:1])
    one.run(out, quick=True, say=lambda _: None)
    other = replace(one, arms=(Arm("a", ("training.lr=0.1",)),))
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        other.run(out, quick=True, say=lambda _: None)


def test_a_change_goes_into_every_run_but_not_into_what_tells_the_arms_apart(small: Small) -> None:
    changed = small.changed(["stop.versions=2", "training.lr=0.25"])
    for arm in changed.arms:
        wanted = changed.experiment(arm, 1, quick=True)
        assert (wanted.stop.versions, wanted.training.lr) == (2, 0.25)
    assert "stop.versions=2, training.lr=0.25" in changed.notes[-1]
    assert small.changed([]) == small
    for change in ("strategy.buffer_size=3", " strategy . buffer_size=3", "strategy={name='fedavg'}"):
        with pytest.raises(ConfigError, match=r"strategy\.buffer_size is what tells b from the other arms"):
            small.changed([change])
    with pytest.raises(ConfigError, match="every arm runs with seeds 1, 2"):
        small.changed(["seed=7"])


def test_a_change_that_would_take_back_what_an_arm_sets_is_refused(small: Small) -> None:
    one_step = replace(small, arms=(*small.arms, Arm("c", ("training.steps=1",))))
    for change in ("training.epochs=2", "training.steps=2", "training={epochs=2}"):
        with pytest.raises(ConfigError, match=r"training\.steps is what tells c from the other arms"):
            one_step.changed([change])
    assert small.changed(["training.epochs=2"]).experiment(small.arms[1], 1, quick=True).training.epochs == 2


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
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    given = [argument.replace("{file}", str(tmp_path / "file")) for argument in arguments]
    if "--out" not in given:
        given += ["--out", str(tmp_path / "out")]
    environment = {"EDGEFL_DATA": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    code, _, err = Command("reproduce", *given, environment=environment).finish()
    assert code == 2, err
    assert says in err
    assert len(err.strip().splitlines()) == 1
