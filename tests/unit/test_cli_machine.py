"""The command line: profiles, calibrate and doctor."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl.cli import main
from edgefl.errors import RunError


def test_profiles_lists_all_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from edgefl import devices

    assert main(["profiles"]) == 0
    out = capsys.readouterr().out
    for name in (*devices.device_names(), *devices.network_names(), *devices.fleet_names()):
        assert name in out
    assert max(map(len, out.splitlines())) <= 80


def test_profiles_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(listed) == {"devices", "networks", "fleets"}
    for name, kind in (("pi-4", "devices"), ("lte", "networks"), ("mixed-24", "fleets")):
        assert main(["profiles", name, "--json"]) == 0
        one = json.loads(capsys.readouterr().out)
        assert one == listed[kind][name]
        assert one["id"] == name


def test_profiles_say_where_their_traces_are_as_their_files_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgefl.devices import profiles

    shipped = profiles.bundled_folder() / "networks"
    shutil.copytree(shipped, tmp_path / "mine")
    up = {}
    for name in ("lte-varying", str(tmp_path / "mine" / "lte-varying.toml")):
        assert main(["profiles", name, "--json"]) == 0
        up[name] = json.loads(capsys.readouterr().out)["up"]["trace"]
    assert set(up.values()) == {"traces/lte-varying-up.trace"}
    for arguments in (["profiles", "--json"], ["profiles", "lte-varying"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert "traces/lte-varying-up.trace" in out
        assert str(shipped.parent.parent) not in out


def test_a_profile_shows_figures_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles", "pi-4"]) == 0
    out = capsys.readouterr().out
    assert "memory.ram_mib" in out
    assert "4096" in out
    assert "ThomasKaiser" in out
    assert max(map(len, out.splitlines())) <= 80


def test_profiles_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from edgefl.devices import load_device, to_json
    from edgefl.toml import write

    good = tmp_path / "pi-4.toml"
    good.write_text(write(to_json(load_device("pi-4"))))
    assert main(["profiles", "check", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: good\n"
    bad = tmp_path / "pi-4.toml"
    bad.write_text(good.read_text().replace("4096", "-1").replace("1800", "nan"))
    assert main(["profiles", "check", str(bad)]) == 2
    out, err = capsys.readouterr()
    assert str(bad) in out
    assert err.startswith(f"edgefl: {bad}: ")
    assert err.count("\n") == 1


def test_profiles_check_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiles = Path(__file__).parents[2] / "profiles"
    good = [str(path) for path in sorted((profiles / "networks").glob("*.toml"))[:3]]
    assert main(["profiles", "check", *good]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{path}: good" for path in good]
    bad = tmp_path / "bad.toml"
    bad.write_text('id = "bad"\nnmae = "x"\nclass = "cheap"\n[memory]\nram_mib = 0\n')
    assert main(["profiles", "check", good[0], str(bad), str(tmp_path / "none.toml")]) == 2
    out, err = capsys.readouterr()
    for said in ("unknown key 'nmae'; did you mean 'name'?", "name: missing", "class: must be one of"):
        assert said in out
    assert "memory.ram_mib: must be a finite number above 0, got 0" in out
    assert "memory.app_limit_mib: missing" in out
    assert "none.toml: no such file" in out
    assert err == "edgefl: 2 of 3 files: 7 problems\n"


def test_a_profiles_own_file_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "profiles" / "networks" / "3g.toml"
    assert main(["profiles", str(path)]) == 0
    by_path = capsys.readouterr().out
    assert main(["profiles", "show", "3g"]) == 0
    assert capsys.readouterr().out == by_path


def test_profiles_import_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = Path(__file__).parent / "import_samples" / "connectivity.ini"
    assert main(["profiles", "import", "webpagetest", str(sample), "--only", "Hill"]) == 0
    assert 'id = "hill"' in capsys.readouterr().out
    assert main(["profiles", "import", "webpagetest", str(sample)]) == 2
    assert "makes 3 files; say where to: --out FOLDER" in capsys.readouterr().err
    folder = tmp_path / "made" / "here"
    assert main(["profiles", "import", "webpagetest", str(sample), "--out", str(folder)]) == 0
    assert capsys.readouterr().out == "".join(
        f"wrote {folder / name}.toml\n" for name in ("village", "hill", "native")
    )
    assert main(["profiles", "import", "webpagetest", str(sample), "--out", str(folder)]) == 2
    assert "village.toml exists there" in capsys.readouterr().err
    out = tmp_path / "hill.ini"
    assert main(["profiles", "export", str(folder / "hill.toml"), "webpagetest", "--out", str(out)]) == 0
    assert out.read_text().startswith('[hill]\nlabel="Hill, 2% lost"\nbwIn=900000\n')
    assert main(["profiles", "export", str(folder / "hill.toml"), "webpagetest", "--out", str(out)]) == 2
    assert "exists; remove it" in capsys.readouterr().err
    assert main(["profiles", "import", "webpagetest", str(sample), "--out", str(out)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["profiles", "export", "lte", "webpagetest", "--out", str(out / "under")]) == 2
    assert "under cannot be written: File exists" in capsys.readouterr().err


def test_an_import_that_cannot_be_written_whole_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> Path:
        if path.name == "native.toml":
            raise RunError(f"{path} cannot be written: No space left on device")
        return written(path, content)

    written = importlib.import_module("edgefl.results.run_folder").write_bytes
    monkeypatch.setattr("edgefl.results.run_folder.write_bytes", full)
    sample = Path(__file__).parent / "import_samples" / "connectivity.ini"
    assert main(["profiles", "import", "webpagetest", str(sample), "--out", str(tmp_path)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_calibrate_shows_rates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from edgefl.limits import calibration
    from edgefl.limits.calibration import Measured, Rate

    rate = Rate(median=50.0, cv=0.02, samples=(50.0,) * 9)
    measured = Measured(
        gemm_gflops={"64": rate},
        conv_gflops={"3x3": rate},
        depthwise_gflops=rate,
        train_gflops=rate,
        triad_gbytes_per_s=rate,
        triad_mib=64.0,
        cache_mib=480.0,
        blas="mkl",
    )
    found = calibration.Calibration(
        fingerprint="f", cpu="a processor", cores=2, library="a library", at_unix_s=0.0, measured=measured
    )
    forced: list[bool] = []

    def calibrate(force: bool) -> calibration.Calibration:
        forced.append(force)
        return found

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    assert main(["calibrate"]) == 0
    out = capsys.readouterr().out
    for words in ("a processor", "training step", "conv 3x3", "50", "192 MiB are not well past the cache"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["calibrate", "--fresh", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["gemm_gflops"]["64"]["median"] == 50.0
    assert forced == [False, True]


def test_doctor_finds_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {
        "python",
        "cores",
        "memory",
        "torch",
        "cuda",
        "kernel c",
        "memfd",
        "throttle cgroup",
        "open files",
    } <= set(found)
    assert found["kernel reference"]["problem"] == ""
    assert not any("looking failed" in finding["problem"] for finding in found.values())
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "memfd" in out
    assert max(map(len, out.splitlines())) <= 80


def test_doctor_goes_on_where_a_look_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgefl.cli import doctor

    def _odd_thing() -> Iterator[doctor.Check]:
        raise OSError("no such thing here")

    monkeypatch.setattr(doctor, "_LOOKS", (_odd_thing, doctor._python))
    odd, python = doctor.examine()
    assert odd == ("odd thing", "?", "looking failed: OSError: no such thing here")
    assert python.what == "python"
