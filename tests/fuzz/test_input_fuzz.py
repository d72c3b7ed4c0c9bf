"""Fuzzes the command line with damaged experiments and profiles: each is accepted or refused in one line.

A seeded generator damages one of the files in `SEEDS`: it changes keys, values and types, truncates the file,
or inserts bytes that are not UTF-8. A fake supervisor checks the experiment as a run does and plans trips.
``EDGEFL_FUZZ_CASES`` sets the number of cases.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgefl import config
from edgefl.cli import main
from edgefl.devices.fleet import Trips, fleet_of, joins_at_s, presence_of
from edgefl.devices.profiles import bundled_folder
from edgefl.experiment import Experiment
from edgefl.learning.operations import BatchWork, StepWork
from edgefl.run import supervisor
from edgefl.run.demands import checked

FAST, ALL = 20, int(os.environ.get("EDGEFL_FUZZ_CASES", "200"))
LONGEST = 300
"""Maximum length of a printed line, in characters."""

EXPERIMENT = """
name = "small"
seed = 1

[fleet]
devices = { pi-4 = 2, "device.toml" = 2 }
network = { pi-4 = "lte", "device.toml" = "network.toml" }
join_spread_s = 2.5
variation = 0.5

[fleet.churn]
mean_online_s = 60.0
mean_offline_s = 20
die_per_trip = 0.01

[data]
partition = "dirichlet"
alpha = 0.3
test_fraction = 0.25

[model]
name = "mlp"
args = { hidden = [32] }

[training]
steps = 5
batch_size = 16
lr = 0.05

[strategy]
name = "fedbuff"
buffer_size = 2
server_lr = 0.5
max_staleness = 4

[privacy]
clip_norm = 1.0
noise_multiplier = 0.5

[clock]
kind = "virtual"
workers = 1

[server]
update_format = "float32"

[evaluation]
every_versions = 3

[stop]
versions = 4
accuracy = 0.9
"""
FLEET = """
id = "fleet"
name = "Two kinds"
source = "none"
network = "lte"

[devices]
pi-4 = 2
"device.toml" = 1
"""


def profile(folder: str, name: str, new: str) -> str:
    """Return a bundled profile with another id."""
    return (bundled_folder() / folder / f"{name}.toml").read_text().replace(f'id = "{name}"', f'id = "{new}"')


SEEDS = {
    "experiment.toml": EXPERIMENT,
    "device.toml": profile("devices", "pixel-3a", "device"),
    "network.toml": profile("networks", "lte", "network"),
    "fleet.toml": FLEET,
}
VALUES = [
    "1e308", "-1e308", "5e-324", "1" + "0" * 23, "-1" + "0" * 23, str(2**63), str(2**31), "9" * 5000, "0",
    "-1", "-0.0", "nan", "inf", "-inf", "true", "[]", "{}", "[[1, 2], [3]]", '""', '"1"', "1979-05-27",
    "0x7fffffffffffffff", f'"{"9" * 400}%"', f'"0.{"1" * 300}%"', '"-5%"', '"a\\nb"', '"\\u202Egpj.exe"',
    '"\\u0000"', '"\\u001b[2J"', f'"{"x" * 5000}"', '"/dev/zero"', '"../.."', '"os:getcwd"', '"no_module:f"',
    "{ a = { b = { c = 1 } } }",
]  # fmt: skip
KEYS = [
    '"a\\nb"', '"\\u202Eyek"', '"\\u0000"', '"\\u001b[31m"', f'"{"k" * 4000}"', '""', '"é\\u0301"', "lr.lr",
    "versoins", '"\\uFFFF"', "devices", "name", '"pixel-4x"',
]  # fmt: skip
LINE = re.compile(r"^(\s*)([^=\[\n]+?)( = )(.+)$", re.MULTILINE)
WORD = re.compile(r'"[^"\n]+"|(?<![\w."])[A-Za-z][\w.-]+')
NUMBER = re.compile(r"(?<![\w.\"-])-?\d+(?:\.\d+)?(?![\w.\"-])")


def damaged(text: str, draw: random.Random) -> bytes:
    """Return the file with one to three changes."""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        how = draw.choice(["line", "line", "line", "number", "number", "word", "cut", "table", "bytes"])
        key, value = draw.choice(KEYS), draw.choice(VALUES)
        if how == "line" and (found := list(LINE.finditer(text))):
            one = draw.choice(found)
            lines = [f"{one[1]}{one[2]} = {value}", f"{one[1]}{key} = {one[4]}", f"{one[0]}\n{one[0]}"]
            text = text[: one.start()] + draw.choice(lines) + text[one.end() :]
        elif how in ("number", "word") and (
            found := list((NUMBER if how == "number" else WORD).finditer(text))
        ):
            one = draw.choice(found)
            text = text[: one.start()] + (value if how == "number" else key) + text[one.end() :]
        elif how == "cut":
            text = text[: draw.randrange(len(text) + 1)]
        elif how == "table":
            text += f"\n[{draw.choice(KEYS)}]\n{key} = {value}\n"
    raw = text.encode()
    if draw.random() < 0.1:
        at = draw.randrange(len(raw) + 1)
        bad = draw.choice([b"\xff", b"\x00", b"\xc3", b"\xed\xa0\x80", b"\r", b"\x1b[2J"])
        raw = raw[:at] + bad + raw[at:]
    return raw


def begin(experiment: Experiment, folder: Path, quiet: bool, base: Path, *_: Any, **__: Any) -> Any:
    """Do what a run does with its experiment before its processes start, and plan some trips."""
    experiment = checked(experiment, base)
    config.dump(experiment)
    clients = fleet_of(experiment)
    example = StepWork(matmul_flop=1e6, matmul_bytes=1e5, elementwise_bytes=1e5, calls=9.0)
    work = BatchWork(fixed=StepWork(), per_example=example)
    few = range(min(4, len(clients)))
    trips = Trips(experiment, clients, [60] * len(clients), work, 40_000, 40_000, first_tasks=4)
    for client in few:
        joins_at_s(experiment, client)
        presence_of(experiment, clients[client]).next_online_s(0.0)
        trips.known(client)
        trips.wait_s(client, client, 0)
        assert trips.plan(client, 3).total_s >= 0.0
    ended = {"no_progress": "", "stop_reason": "versions", "phase": {"warning": ""}}
    return SimpleNamespace(summary=lambda: {"fidelity": {"valid": True}, **ended})


RUN = "run experiment.toml --out run --quiet"
COMMANDS = {
    "experiment.toml": [RUN],
    "device.toml": ["profiles check device.toml", RUN],
    "network.toml": ["profiles check network.toml", RUN],
    "fleet.toml": [
        "profiles check fleet.toml", f"{RUN} --set fleet.devices=fleet.toml --unset fleet.network",
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "run", begin)
    return tmp_path


def attempt(case: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Run the commands of a case and return how many were refused."""
    draw, refused = random.Random(case), 0
    name = draw.choice([*SEEDS, "experiment.toml", "experiment.toml"])
    for file, text in SEEDS.items():
        (folder / file).write_bytes(damaged(text, draw) if file == name else text.encode())
    for words in COMMANDS[name]:
        command = words.split()
        if name == "experiment.toml" and draw.random() < 0.3:
            key = draw.choice(["training.lr", "stop.versions", "fleet.devices.pi-4", draw.choice(KEYS)])
            command += ["--set", f"{key}={draw.choice(VALUES)}"]
        code = main(command)
        out, err = capsys.readouterr()
        where = f"case {case}, {' '.join(command)}: {out[-500:]!r}, {err[:500]!r}"
        assert code in (0, 2), where
        for text in (out, err):
            assert text.replace("\n", "").isprintable(), where
            lines = text.replace(str(folder), ".").splitlines()
            assert max(map(len, lines), default=0) <= LONGEST, where
        if code == 2:
            assert err.startswith("edgefl: "), where
            assert err.count("\n") == 1, where
        refused += code == 2
    return refused


def test_the_undamaged_files_are_accepted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in SEEDS.items():
        (folder / name).write_text(text)
    for commands in COMMANDS.values():
        for command in commands:
            assert (main(command.split()), capsys.readouterr().err) == (0, ""), command


@pytest.mark.parametrize("cases", [range(FAST), pytest.param(range(FAST, ALL), marks=pytest.mark.slow)])
def test_damaged_files_do_not_crash(cases: range, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(attempt(case, folder, capsys) for case in cases) > len(cases) // 2
