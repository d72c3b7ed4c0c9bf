"""Baseline files: what is kept, in which order, and what is refused."""

from __future__ import annotations

import functools
import json
import stat
from pathlib import Path

import msgspec
import pytest
from regression_samples import entry, noisy, repetition

from edgefl.errors import ConfigError
from edgefl.regression import baseline

replace = msgspec.structs.replace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "edgefl-baselines" / "test_a.json"


def test_an_entry_holds_all_that_a_figure_depends_on(path: Path) -> None:
    one = entry()
    assert (one.device, one.network, one.mechanism) == ("pixel-3a", "lte", "work-paced")
    assert one.reference.against.reference == "train-small"
    assert "torch" in one.host.software
    assert "Python" in one.host.software
    rows = (one.cpu_s, one.host_cpu_s, one.peak_mib, one.sent_mib, one.reference.host_cpu_s)
    assert {len(row) for row in rows} == {15}
    assert entry(time_scale=0.0).mechanism == "not paced"
    assert baseline.load(path) == {}
    baseline.save(path, [one])
    assert baseline.load(path) == {one.key: one}


def test_saving_replaces_what_is_the_same_and_keeps_the_rest(path: Path) -> None:
    elsewhere = replace(entry(), host=replace(entry().host, fingerprint="other"))
    baseline.save(path, [entry(), entry(test="test_b[pi-4]"), elsewhere])
    newer = entry(noisy(1.5))
    baseline.save(path, [newer])
    found = baseline.load(path)
    assert len(found) == 3
    assert found[newer.key] == newer
    assert found[elsewhere.key] == elsewhere


def test_the_order_of_saving_does_not_show(path: Path, tmp_path: Path) -> None:
    entries = [entry(test="test_b[pi-4]"), entry(), entry(function="other")]
    baseline.save(path, entries)
    other = tmp_path / "other.json"
    for one in reversed(entries):
        baseline.save(other, [one])
    assert path.read_bytes() == other.read_bytes()


def test_a_changed_metric_is_one_changed_line_of_a_file_for_all_to_read(path: Path) -> None:
    baseline.save(path, [entry()])
    before = path.read_text().splitlines()
    baseline.save(path, [replace(entry(), peak_mib=(1.0,) * 15)])
    after = path.read_text().splitlines()
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    assert max(map(len, after)) < 250
    json.loads(path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [file.name for file in path.parent.iterdir()] == ["test_a.json"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not a file of baselines: Input data was truncated"),
        ("[]", "not a file of baselines: Expected `object`, got `array`"),
        ("{}", "not a file of baselines: Object missing required field `edgefl_baselines`"),
        ('{"edgefl_baselines": 1, "entries": [{}]}', "missing required field `test` - at `$.entries[0]`"),
        ('{"edgefl_baselines": 1, "entries": [], "x": 1}', "contains unknown field `x`"),
        ('{"edgefl_baselines": 2, "entries": []}', "edgefl_baselines: got 2; allowed: 1"),
        ('{"edgefl_baselines": "\udcff"}', "not a file of baselines: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_broken_file_is_one_line_that_names_it_and_stays(path: Path, content: str, says: str) -> None:
    path.parent.mkdir()
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        baseline.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    before = path.read_bytes()
    with pytest.raises(ConfigError):
        baseline.save(path, [entry()])
    assert path.read_bytes() == before


def test_a_folder_is_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        baseline.load(tmp_path)


NUMBERS = [
    ("reference.against.units", 1, 10_000),
    ("reference.against.calls", 1, 10_000),
    ("reference.version", 0, 1_000_000),
    ("reference.flop", 0, 1e24),
    ("reference.host_cpu_s", None, 1e12),
    ("host.cores", 1, 1_000_000),
    ("seed", 0, 2**63 - 1),
    ("steal", 0, 1.0),
    ("waited", 0, 1.0),
    ("flop", 0, 1e24),
    ("host_cpu_s", 0, 1e12),
    ("cpu_s", 0, 1e12),
    ("peak_mib", 0, 1e12),
    ("sent_mib", 0, 1e12),
]
"""Every number of an entry, its least (None: above 0) and its most."""


@functools.cache
def as_saved() -> str:
    return json.dumps({"edgefl_baselines": 1, "entries": [msgspec.to_builtins(entry())]})


def tampered(path: Path, key: str, value: str) -> str:
    """What is said of a file in which this number, or the third of its row, is another."""
    plain = json.loads(as_saved())
    *outer, last = key.split(".")
    table = functools.reduce(lambda inner, name: inner[name], outer, plain["entries"][0])
    holder, at = (table[last], 2) if isinstance(table[last], list) else (table, last)
    holder[at] = "HERE"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(plain).replace('"HERE"', value))
    try:
        baseline.load(path)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < len(str(path)) + 150
        return str(error)
    return "taken"


def test_the_numbers_held_to_bounds_are_all_there_are() -> None:
    def numbers(table: dict[str, object], prefix: str = "") -> set[str]:
        found: set[str] = set()
        for name, value in table.items():
            if isinstance(value, dict):
                found |= numbers(value, f"{prefix}{name}.")
            elif not isinstance(value, str):
                found.add(prefix + name)
        return found

    assert numbers(msgspec.to_builtins(entry())) == {key for key, _, _ in NUMBERS}


@pytest.mark.parametrize(("key", "least", "most"), NUMBERS, ids=[key for key, _, _ in NUMBERS])
def test_impossible_numbers_are_refused(key: str, least: float | None, most: float, path: Path) -> None:
    whole, place = isinstance(most, int), f"entries[0].{key}"
    kind = "int" if whole else "float"
    assert "JSON is malformed" in tampered(path, key, "NaN")
    for value, got in (("true", "bool"), ('"7"', "str"), ("[]", "array")):
        assert f"got `{got}` - at `$.{place}" in tampered(path, key, value)
    assert "out of range" in tampered(path, key, "1e400")
    if whole:
        assert "Expected `int`, got `float`" in tampered(path, key, "2.5")
    else:
        assert "got 1e+30; allowed: float <= " in tampered(path, key, "1e30")
    assert f": got {10**30}; allowed: {kind} <= {most}" in tampered(path, key, str(10**30))
    assert f": got -1; allowed: {kind} >" in tampered(path, key, "-1")
    assert tampered(path, key, str(most)) == "taken"
    assert place in tampered(path, key, str(most + 1 if whole else most * 1.001))
    assert (tampered(path, key, "0") == "taken") == (least == 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peak_mib": (1.0,) * 3}, r"\[0\]\.peak_mib: got 3 figures; allowed: 15, as many as cpu_s"),
        ({"cpu_s": ()}, r"\[0\]\.cpu_s: got 0 figures; allowed: array of length >= 1"),
    ],
)
def test_rows_are_of_one_length_and_not_empty(path: Path, change: dict[str, object], says: str) -> None:
    baseline.save(path, [replace(entry(), **change)])
    with pytest.raises(ConfigError, match=says):
        baseline.load(path)


@pytest.mark.parametrize(
    ("load", "fits", "drift"),
    [
        *((load, True, 0.0) for load in (1.0, 1.05, 1 / 1.05)),
        *((load, True, 0.0546) for load in (1.15, 1 / 1.15)),
        *((1.19, True, 0.0751), (1.21, False, 0.0851), (0.83, False, 0.0825)),
    ],
)
def test_loads_too_far_apart_do_not_compare(load: float, fits: bool, drift: float) -> None:
    before, now = (entry([repetition(0.001 * factor, 0.001 * factor)] * 9) for factor in (1.0, load))
    assert before.cpu_s == now.cpu_s
    why = before.loads_apart(now)
    assert (why is None) == fits
    assert fits or f"takes {load:.2f} times the CPU time" in (why or "")
    assert before.drift(now) == pytest.approx(drift, abs=1e-4)


def test_waiting_for_a_core_is_a_load_too() -> None:
    before, now = (entry([repetition(waited=share)] * 9) for share in (0.1, 0.6))
    assert before.drift(now) == now.drift(before) == pytest.approx(0.08)
