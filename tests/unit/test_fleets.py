"""Tests of plausible fleets: random errors of profiles, and shares of fleets in which a setting is ahead."""

from __future__ import annotations

import math
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from shell import Shell
from test_devices_individuals import WORK, trips
from test_devices_time_model import PROFILE
from test_targets import two

from edgefl.devices import load_device
from edgefl.devices.fleet import Trips, fleet_of
from edgefl.experiment import Experiment, Fleet, Training
from edgefl.results.compare import compare
from edgefl.results.fleets import Ahead, ahead, row
from tests.reports import Page, read_json


def test_phones_of_one_profile_share_an_error_and_profiles_differ() -> None:
    as_is, drawn, other = (
        trips(seed, units="identical", model_errors=how)
        for seed, how in ((1, "none"), (1, "drawn"), (2, "drawn"))
    )
    (factor,) = {drawn.full_step_s(client) / as_is.full_step_s(client) for client in range(20)}
    assert factor != 1.0
    assert drawn.plan(3, 0).work_s / as_is.plan(3, 0).work_s == pytest.approx(factor)
    assert other.full_step_s(0) != drawn.full_step_s(0)
    moto, moto_drawn = (trips(1, "moto-g4", units="identical", model_errors=how) for how in ("none", "drawn"))
    assert moto_drawn.full_step_s(0) / moto.full_step_s(0) != pytest.approx(factor)


def test_nine_of_ten_drawn_errors_are_within_the_interval_of_the_profile() -> None:
    found = load_device("pi-4").time_model().predict(WORK.at(4))
    drawn = [trips(seed, model_errors="drawn", units="identical").full_step_s(0) for seed in range(400)]
    held = np.mean([found.low_s <= each <= found.high_s for each in drawn])
    assert 0.86 <= held <= 0.94


def planted(folder: Path, name: str, slower: float, error_factor: float) -> Path:
    """Write a profile whose compute times are ``slower`` times those of `PROFILE`."""
    file = folder / f"{name}.toml"
    text = re.sub(r"(?<=_gflops = )[\d.]+", lambda rate: str(float(rate[0]) / slower), PROFILE)
    text = text.replace("error_factor = 1.3", f"error_factor = {error_factor}")
    file.write_text(text.replace('id = "mine"', f'id = "{name}"'))
    return file


def works_s(profile: Path, fleets: int) -> list[float]:
    found = []
    for seed in range(1, fleets + 1):
        fleet = Fleet(devices={str(profile): 1}, units="identical", model_errors="drawn")
        wanted = Experiment(fleet=fleet, training=Training(steps=10), seed=seed)
        found.append(Trips(wanted, fleet_of(wanted), [40], WORK, 1, 1).plan(0, 0).work_s)
    return found


def test_a_drawn_error_does_not_depend_on_the_folder_of_the_profile(tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        found.append(works_s(planted(folder, "mine", 1.0, 1.3), 5))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("slower", "least", "most"),
    [(1.0, 0.38, 0.62), (1.3, 0.95, 1.0), (1 / 1.3, 0.0, 0.05)],
)
def test_a_slower_device_is_rarely_ahead(slower: float, least: float, most: float, tmp_path: Path) -> None:
    """The second device takes ``slower`` times as long; the error factor of both is 1.1."""
    one, other = (
        works_s(planted(tmp_path, name, factor, 1.1), 400) for name, factor in (("a", 1.0), ("b", slower))
    )
    found = ahead(one, other, one, other)
    assert least <= found.share <= most
    assert found.interval[0] <= found.share <= found.interval[1]
    low, high = found.range_90
    assert low < 1.0 / slower < high


def test_a_tie_counts_half_and_a_run_that_ended_too_soon_does_not_count() -> None:
    nan, inf = math.nan, math.inf
    found = ahead([1.0, 2.0, nan, 3.0, nan], [2.0, 2.0, 3.0, nan, nan], [inf] * 5, [inf, inf, inf, 2.0, inf])
    assert (found.ahead, found.ties, found.undecided, found.share) == (1, 1, 2, 0.5)
    assert str(ahead([nan], [nan], [1.0], [1.0])) == "undecided"
    assert Ahead(1, 0, 0, 1, ()).builtins()["share"] is None


def test_the_range_of_the_ratio_includes_fleets_in_which_one_setting_missed_the_target() -> None:
    nan = math.nan
    late, first, ends = [9.0, 9.5] + [nan] * 18, [10.0] * 20, [100.0] * 20
    assert row("late", ahead(late, first, ends, ends))[1:3] == ("10% (2 to 28)", "0.95× or more")
    assert row("first", ahead(first, late, ends, ends))[2] == "1.06× or less"
    mixed = [9.0] * 9 + [nan] + [10.0] * 10, [10.0] * 9 + [10.0] + [nan] * 10
    assert row("mixed", ahead(*mixed, ends, ends))[2] == "–"
    rare = [9.0] * 20 + [nan], [10.0] * 21, [100.0] * 21, [100.0] * 21
    assert row("rare", ahead(*rare))[2] == "0.90 to 0.90×"
    assert ahead(late, first, ends, ends).builtins()["ratio_90"] == [pytest.approx(0.9475), None]
    none = [nan, nan], [5.0, 5.0], [10.0, 10.0], [10.0, 10.0]
    assert row("never", ahead(*none))[2] == "2.00× or more"


def test_page_terminal_and_json_have_the_number_of_fleets_in_which_a_setting_is_ahead(tmp_path: Path) -> None:
    folders = two(tmp_path)
    for folder in folders:
        file = folder / "experiment.toml"
        file.write_text(file.read_text() + "[fleet]\nmodel_errors = 'drawn'\n")
    printed = StringIO()
    Console(file=printed, width=80).print(compare(folders, tmp_path / "out", 0.5))
    text = printed.getvalue()
    assert "Over plausible fleets" in text
    assert max(map(len, text.splitlines())) <= 80
    says = "fedavg ×3 is ahead of fedbuff ×3 in 0 of 3 plausible fleets (95% interval of the share: 0 to"
    assert says in Page(tmp_path / "out" / "report.html").text
    rows = read_json(tmp_path / "out" / "summary.json")["comparison"]["rows"]
    assert rows[0]["to_target"]["ahead_of_first"] is None
    over = rows[1]["to_target"]["ahead_of_first"]
    assert (over["fleets"], over["ahead"], over["share"]) == (3, 0, 0.0)
    assert over["ratio_90"] == pytest.approx([2.0, 2.0])


def test_a_comparison_of_seeds_does_not_mention_fleets(tmp_path: Path) -> None:
    compare(two(tmp_path), tmp_path / "out", 0.5)
    assert "plausible" not in Page(tmp_path / "out" / "report.html").text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--fleets", "3", "--seeds", "1..3"], "--seeds and --fleets: give only one of them"),
        (["--fleets", "3", "--clock", "wall"], "--fleets needs the virtual clock"),
        (["--fleets", "1"], "--fleets"),
        (["--fleets", "3", "--set", "fleet.model_errors=none"], "because --fleets replaces it"),
    ],
)
def test_invalid_options_are_refused(options: list[str], says: str, tmp_path: Path, edgefl: Shell) -> None:
    file = tmp_path / "e.toml"
    file.write_text('[fleet]\ndevices = { pi-4 = 2 }\n[clock]\nkind = "virtual"\n[stop]\nversions = 1\n')
    assert says in edgefl.refuses(2, "sweep", str(file), *options, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
