"""``edgefl profiles``: listing, showing, checking, importing and exporting."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from shell import Shell

from edgefl import devices
from edgefl.cli import main
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import RunError

PROFILES = bundled_folder()
CONNECTIVITY = str(Path(__file__).parent / "import_samples" / "connectivity.ini")


def test_all_profiles_are_listed_in_80_columns(edgefl: Shell) -> None:
    out = edgefl.fits("profiles")
    for name in (*devices.device_names(), *devices.network_names(), *devices.fleet_names()):
        assert name in out
    assert re.search(r"nexus-6 +budget +2014 +1\.6", out)  # FLASH measured 1.64 s for this step


def test_one_profile_as_json_equals_its_entry_in_the_list(edgefl: Shell) -> None:
    listed = json.loads(edgefl.shows("profiles", "--json"))
    assert set(listed) == {"devices", "networks", "fleets"}
    for name, kind in (("pi-4", "devices"), ("lte", "networks"), ("mixed-24", "fleets")):
        one = json.loads(edgefl.shows("profiles", name, "--json"))
        assert one == listed[kind][name]
        assert one["id"] == name


def test_a_profile_whose_name_is_like_a_command_is_shown(
    tmp_path: Path, edgefl: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("phones-2020", "iphone-xs", "cable"):  # like phones and scale
        assert json.loads(edgefl.shows("profiles", name, "--json"))["id"] == name
    monkeypatch.chdir(tmp_path)
    own = (PROFILES / "devices" / "pi-4.toml").read_text().replace('id = "pi-4"', 'id = "phone"')
    Path("phone.toml").write_text(own)
    assert json.loads(edgefl.shows("profiles", "phone.toml", "--json"))["id"] == "phone"


def test_a_sorted_search_as_json_is_sorted(edgefl: Shell) -> None:
    listed = json.loads(edgefl.shows("profiles", "--find", "board", "--sort", "year", "--json"))
    years = [device.get("year", 9999) for device in listed["devices"].values()]
    assert len(years) > 3
    assert years == sorted(years)


def test_paths_of_traces_are_shown_as_in_the_profiles_file(tmp_path: Path, edgefl: Shell) -> None:
    shutil.copytree(PROFILES / "networks", tmp_path / "mine")
    for name in ("lte-varying", str(tmp_path / "mine" / "lte-varying.toml")):
        shown = json.loads(edgefl.shows("profiles", name, "--json"))
        assert shown["up"]["trace"] == "traces/lte-varying-up.trace"
    for argument in ("--json", "lte-varying"):
        out = edgefl.shows("profiles", argument)
        assert "traces/lte-varying-up.trace" in out
        assert str(PROFILES.parent) not in out


def test_a_profile_is_shown_with_the_sources_of_its_figures(edgefl: Shell) -> None:
    out = edgefl.fits("profiles", "pi-4")
    assert "memory.ram_mib" in out
    assert "4096" in out
    assert "ThomasKaiser" in out
    assert re.search(r"torch +0\.1\d+ +0\.0\d+–0\.\d", out)
    assert edgefl.fits("profiles", str(PROFILES / "devices" / "pi-4.toml")) == out
    assert edgefl.fits("profiles", "show", "pi-4") == out


def test_the_time_of_a_step_is_that_of_the_median_device(edgefl: Shell) -> None:
    out = edgefl.shows("profiles", "paper-defedavg-slowdowns")  # 0.102 s on the fastest device
    assert re.search(r"one rate +0\.3", out)


def test_check_names_all_problems(tmp_path: Path, edgefl: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    good = [str(path) for path in sorted((PROFILES / "networks").glob("*.toml"))[:3]]
    assert edgefl.shows("profiles", "check", *good).splitlines() == [f"{path}: ok" for path in good]
    bad = tmp_path / "bad.toml"
    bad.write_text('id = "bad"\nnmae = "x"\nclass = "cheap"\n[memory]\nram_mib = 0\n')
    assert main(["profiles", "check", good[0], str(bad), str(tmp_path / "none.toml")]) == 2
    out, err = capsys.readouterr()
    for said in (
        *("unknown key 'nmae'; did you mean 'name'?", "name: missing", "class: must be one of"),
        "memory.ram_mib: must be a finite number above 0, got 0",
        *("memory.app_limit_mib: missing", "none.toml: no such file"),
    ):
        assert said in out
    assert err == "edgefl: 7 problems in 2 of 3 files\n"
    assert main(["profiles", "check", str(bad)]) == 2
    out, err = capsys.readouterr()
    assert str(bad) in out
    assert err.endswith(f" in {bad}\n")
    assert err.count("\n") == 1


def test_profiles_import_and_export(tmp_path: Path, edgefl: Shell) -> None:
    def imports(*more: str) -> list[str]:
        return ["profiles", "import", "webpagetest", CONNECTIVITY, *more]

    def exports(name: object, path: Path) -> list[str]:
        return ["profiles", "export", str(name), "webpagetest", "--out", str(path)]

    assert 'id = "hill"' in edgefl.shows(*imports("--only", "Hill"))
    assert "gives 3 profiles; name a folder for them: --out FOLDER" in edgefl.refuses(2, *imports())
    folder, out = tmp_path / "made" / "here", tmp_path / "hill.ini"
    wrote = "".join(f"wrote {folder / name}.toml\n" for name in ("village", "hill", "native"))
    assert edgefl.shows(*imports("--out", str(folder))) == wrote
    assert "village.toml exists there" in edgefl.refuses(2, *imports("--out", str(folder)))
    edgefl.shows(*exports(folder / "hill.toml", out))
    assert out.read_text().startswith('[hill]\nlabel="Hill, 2% lost"\nbwIn=900000\n')
    assert "exists; remove it" in edgefl.refuses(2, *exports(folder / "hill.toml", out))
    assert "cannot be written" in edgefl.refuses(2, *imports("--out", str(out)))
    assert "under cannot be written: File exists" in edgefl.refuses(2, *exports("lte", out / "under"))


def test_a_name_that_is_not_utf_8_is_one_line(tmp_path: Path, edgefl: Shell) -> None:
    file, out = tmp_path / os.fsdecode(b"caf\xe9.ini"), tmp_path / "made"
    file.write_bytes(Path(CONNECTIVITY).read_bytes())
    said = edgefl.refuses(2, "profiles", "import", "webpagetest", str(file), "--out", str(out))
    assert said == "caf?.ini: is not UTF-8; use another name"
    assert not out.exists()


def test_a_failed_import_leaves_nothing(
    tmp_path: Path, edgefl: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> Path:
        if path.name == "native.toml":
            raise RunError(f"{path} cannot be written: No space left on device")
        return written(path, content)

    written = importlib.import_module("edgefl.files").write_bytes
    monkeypatch.setattr("edgefl.files.write_bytes", full)
    command = ["profiles", "import", "webpagetest", CONNECTIVITY, "--out", str(tmp_path)]
    assert "No space left" in edgefl.refuses(2, *command)
    assert list(tmp_path.iterdir()) == []
