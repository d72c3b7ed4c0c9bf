"""Plant seven regressions in a repository, and print which kind of device test (tier) detects each of them.

    python benchmarks/gate_planted.py [--only NAME]

Each regression is a change of one function, whose test is `edge_device.run(steps.NAME)`. There are three
tiers:

    counted   `pytest --edgefl-compare` with a baseline that was saved for the previous commit on this host
    elsewhere the same, but with settings as on another host: ATen without AVX, OpenBLAS for another processor
    against   `pytest --edgefl-against=HEAD~1`, which needs no baseline

For each regression, the table shows the tiers that detected it (REGRESSION), the tier that must detect it
(*), and the message. An unchanged function is also tested, and must be OK in all tiers. The benchmark needs a
C compiler and Valgrind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from edgefl.results.tables import show, table

COMMON = """
import ctypes, json, subprocess, sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

HELD = []
WORDS = [f"word{number % 97}" for number in range(3000)]


def library():
    return ctypes.CDLL(str(Path(__file__).with_name("sum.so")))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def evaluate(model, images):
    with torch.no_grad():
        return float(model(images).argmax(1).sum())

"""
C_SOURCE = """
long total(const unsigned char *bytes, long count) {
    volatile long sum = 0;
    for (long place = 0; place < count; place++) sum += bytes[place] STEP;
    return sum;
}
"""


class Plant(NamedTuple):
    """The body of a function before and after the change, and the tier that must detect the change."""

    name: str
    before: str
    after: str
    tier: str
    mark: str = ""
    arguments: str = ""


PLANTS = (
    Plant("leak_30_mib", "HELD.append(bytearray(1))", "HELD.append(bytearray(30 << 20))", "counted"),
    Plant(
        "preprocessing",
        "return [word.upper() for word in WORDS[:2600]]",
        "return [word.upper() for word in WORDS]",
        "counted",
    ),
    Plant(
        "float64",
        "return net()(torch.ones(32, 28, 28))",
        "return net()(torch.ones(32, 28, 28).double().float())",
        "counted",
    ),
    Plant(
        "evaluation_twice",
        "return evaluate(net(), torch.ones(32, 28, 28))",
        "model = net(); evaluate(model, torch.ones(32, 28, 28)); "
        "return evaluate(model, torch.ones(32, 28, 28))",
        "counted",
    ),
    Plant(
        "sends_5_mb_more",
        "edge_device.send(bytes(1000))",
        "edge_device.send(bytes(5_001_000))",
        "counted",
        ', network="lte"',
        "edge_device",
    ),
    Plant(
        "c_loop",
        "return library().total(bytes(400_000), ctypes.c_long(400_000))",
        "",  # the change is in the C source
        "counted",
        ', counted="native"',
    ),
    Plant(
        "slower_program",
        'return subprocess.run([sys.executable, "-ISc", "sum(range(1_500_000))"], check=True).returncode',
        'return subprocess.run([sys.executable, "-ISc", "sum(range(2_500_000))"], check=True).returncode',
        "against",
    ),
    Plant("unchanged", "return sorted(set(WORDS))", "", "none"),
)
TIERS = {
    "counted": (["--edgefl-compare"], {}),
    "elsewhere": (["--edgefl-compare"], {"ATEN_CPU_CAPABILITY": "default", "OPENBLAS_CORETYPE": "Prescott"}),
    "against": (["--edgefl-against=HEAD~1", "--edgefl-build=cc -O1 -shared -fPIC -o sum.so sum.c"], {}),
}


def write(top: Path, plants: list[Plant], *, planted: bool) -> None:
    """Write the files of the repository, after the change if ``planted`` is True, otherwise before it."""
    functions, tests = [COMMON], ["import pytest\nimport steps\n"]
    for one in plants:
        body = one.after if planted and one.after else one.before
        functions.append(f"def {one.name}({one.arguments}):\n    {body}\n\n")
        tests.append(
            f'@pytest.mark.edge_device("moto-g4"{one.mark})\n'
            f"def test_{one.name}(edge_device):\n    edge_device.run(steps.{one.name})\n"
        )
    (top / "steps.py").write_text("\n".join(functions))
    (top / "test_steps.py").write_text("\n".join(tests))
    (top / "sum.c").write_text(C_SOURCE.replace("STEP", "* 3 / 2" if planted else ""))
    (top / ".gitignore").write_text("*.so\n__pycache__\nout.json\n")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", "sum.so", "sum.c"], cwd=top, check=True)


def commit(top: Path, message: str) -> None:
    git = ("git", "-C", str(top), "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", message], check=True)


def judged(top: Path, options: list[str], changed: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Run the device tests with these pytest options and with the environment variables in ``changed``.

    Return each function's outcome and the reason for it, keyed by function.
    """
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--edgefl-json=out.json", *options,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=top, env={**os.environ, **changed}, capture_output=True, text=True, check=False
    )
    out = top / "out.json"
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    if not rows:
        raise SystemExit(done.stdout + done.stderr)
    out.unlink()
    return {
        row["test"].partition("test_steps.py::test_")[2].partition("[")[0]: (row["outcome"], row["why"])
        for row in rows
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of the plants' names")
    given = parser.parse_args()
    plants = [one for one in PLANTS if given.only in one.name]
    with tempfile.TemporaryDirectory() as folder:
        top = Path(os.path.realpath(folder))
        subprocess.run(["git", "init", "-q", "-b", "main", str(top)], check=True)
        write(top, plants, planted=False)
        judged(top, ["--edgefl-save"], {})
        commit(top, "before")
        write(top, plants, planted=True)
        commit(top, "planted")
        found = {tier: judged(top, *how) for tier, how in TIERS.items()}
    rows = []
    for one in plants:
        outcomes = [found[tier].get(one.name, ("?", ""))[0] for tier in TIERS]
        marked = [
            f"{outcome}*" if tier.startswith(one.tier) else outcome
            for tier, outcome in zip(TIERS, outcomes, strict=True)
        ]
        rows.append((one.name, *marked, found[one.tier][one.name][1] if one.tier in found else ""))
    show(table(("plant", *TIERS, "line"), rows, "Outcome by tier; * must detect the change"))


if __name__ == "__main__":
    main()
