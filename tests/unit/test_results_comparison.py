"""Comparisons: which runs can be compared, the joint ε of private runs, and which files are overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.errors import ConfigError
from edgefl.experiment import Privacy
from edgefl.privacy.accounting import PrivacyAccount, composed
from edgefl.results.compare import compare
from edgefl.results.phase import Phase
from edgefl.results.store import Store
from tests.reports import Page, client, printed, read_json, trip, write_run


def test_a_comparison_of_private_runs_has_their_joint_epsilon(tmp_path: Path) -> None:
    rules = Privacy(clip_norm=1.0, noise_multiplier=8.0)
    runs = [write_run(tmp_path / name, clients=4, privacy=rules) for name in ("a", "b", "c")]
    account = PrivacyAccount(rules, 4)
    for first in range(0, 60, 5):
        account.version([task % 4 for task in range(first, first + 5)])
    spent = f"together have spent ε = {composed([account] * 3, rules.delta):.3g} at δ = 1e-07"
    bound = f"The 3 runs with the server's noise {spent}"
    runs.append(write_run(tmp_path / "d", clients=4, strategy="plain"))  # it has no ε
    assert bound in " ".join(printed(compare(runs, tmp_path / "out")).split())
    assert bound in read_json(tmp_path / "out" / "summary.json")["comparison"]["privacy"]
    assert bound in Page(tmp_path / "out" / "report.html").text
    compare(runs[:1], tmp_path / "one")
    assert read_json(tmp_path / "one" / "summary.json")["comparison"]["privacy"] == ""


def test_the_largest_staleness_of_a_row_is_that_of_all_its_seeds(tmp_path: Path) -> None:
    runs = [tmp_path / str(seed) for seed in (1, 2)]
    for seed, run in enumerate(runs, 1):
        run.mkdir()
        with Store(run) as store:
            store.clients([client(0, "fast", 0.1)])
            store.trip(trip(0, arrived_s=1.0, staleness=(0, 21)[seed - 1]))
            store.applied(1, [0], [1.0])
            store.set_meta(strategy="fedbuff", clock="virtual", status="done", seed=seed)
    assert "10.5/21" in printed(compare(runs))


def test_a_comparison_names_runs_that_ended_early_and_runs_with_phones_in_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {"a": "too few clients are left: 1 of 4", "b": "participations", "c": "trips"}
    monkeypatch.chdir(tmp_path)
    runs = [write_run(Path(name), strategy=name, stop_reason=why) for name, why in reasons.items()]
    early = "2 of 3 runs ended early, with too few clients: a, b."
    compare(runs, "out")
    assert early in printed(compare(runs), width=400)
    assert early in Page(Path("out/report.html")).text
    assert "in phase" not in printed(compare(runs))
    monkeypatch.setattr(Phase, "warning", "Phones act in phase.")
    found = printed(compare(runs[2:]), width=400)
    assert "In 1 of 1 run (by chance 1%) phones act in phase, so that comparisons may not hold" in found


def test_a_comparison_warns_of_invalid_runs_on_the_page_and_on_the_terminal(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", strategy="a", error=0.5), write_run(tmp_path / "b", strategy="b")]
    warning = "INVALID: a. Do not use their figures as results"
    assert warning in printed(compare(runs, tmp_path / "out"))
    assert warning in " ".join(Page(tmp_path / "out" / "report.html").text.replace(" :", ":").split())
    assert "Do not use" not in printed(compare(runs[1:]))


def test_a_row_is_invalid_if_one_of_its_runs_is(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed, error=error) for seed, error in ((1, 0.0), (2, 0.5))]
    assert "INVALID: fedbuff ×2. " in printed(compare(runs, tmp_path / "out"))
    (row,) = read_json(tmp_path / "out" / "summary.json")["comparison"]["rows"]
    assert (row["seeds"], row["valid"]) == ([1, 2], False)


@pytest.mark.parametrize("mark", ["experiment.toml", "record.sqlite"])
def test_a_run_is_not_overwritten_by_a_comparison(tmp_path: Path, mark: str) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    (out / mark).touch()
    (out / "summary.json").write_text("the run's own")
    with pytest.raises(ConfigError, match=f"^--out {out} holds a run, which would be overwritten"):
        compare([run], out)
    assert sorted(file.name for file in out.iterdir()) == sorted([mark, "summary.json"])
    assert (out / "summary.json").read_text() == "the run's own"
    with pytest.raises(ConfigError, match=f"^--out {out / mark} is a file; expected a folder$"):
        compare([run], out / mark)


def test_a_comparison_overwrites_only_files_of_comparisons(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    summary = tmp_path / "summary.json"
    for text in ('{"findings": []}', "[]", "broken {"):
        summary.write_text(text)
        with pytest.raises(ConfigError, match=r"holds another summary\.json, which would be overwritten"):
            compare(runs, tmp_path)
        assert summary.read_text() == text
    summary.unlink()
    for run in runs:
        compare([run], tmp_path)
        assert [Path(one["folder"]).name for one in read_json(summary)["runs"]] == [run.name]


def test_runs_that_cannot_be_compared_are_refused_with_the_reason(tmp_path: Path) -> None:
    good, other = write_run(tmp_path / "good"), write_run(tmp_path / "other", data="mnist")
    classes = write_run(tmp_path / "classes", classes=12)
    with pytest.raises(ConfigError, match="name at least one"):
        compare([])
    with pytest.raises(ConfigError, match="is named twice"):
        compare([good, other / ".." / "good"])
    with pytest.raises(ConfigError, match="is not a run's folder"):
        compare([good, tmp_path])
    with pytest.raises(
        ConfigError, match=r"different data cannot be compared: .* has data = mnist, .* has digits"
    ):
        compare([good, other])
    with pytest.raises(ConfigError, match=r"has classes = 12, .* has 10"):
        compare([good, classes])
    (other / "record.sqlite").write_text("nonsense " * 500)
    with pytest.raises(ConfigError, match="damaged or not a record"):
        compare([good, other])


@pytest.mark.parametrize(
    ("one", "other"),
    [("evaluate_on = 'test'", "evaluate_on = 'validation'"),
     ("test_split = 'drawn'", "test_split = 'published'"),
     ("test_fraction = 0.2", "test_fraction = 0.3"),
     ("validation_fraction = 0.0", "validation_fraction = 0.2"), ("image_size = 84", "image_size = 32")],
)  # fmt: skip
def test_runs_with_different_test_examples_cannot_be_compared(tmp_path: Path, one: str, other: str) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    for run, key in zip(runs, (one, other), strict=True):
        (run / "experiment.toml").write_text(f"[data]\n{key}\n")
    name, _, value = (part.strip("' ") for part in other.partition("="))
    with pytest.raises(ConfigError, match=rf"runs on different data .* has data\.{name} = {value}, .* has "):
        compare(runs)
