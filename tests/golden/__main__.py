"""``python -m tests.golden record|compare [CASE...]`` checks that a refactoring has not changed any result.

``record`` writes golden.json, or the named cases in it; ``compare`` prints a line for each case that differs,
with the facts that differ. A CASE may be a pattern, such as ``verdict-*``. All cases together take minutes.
"""

from __future__ import annotations

import fnmatch
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edgefl.run import sweep
from tests.golden import runs, verdicts

COMPARED = "text-compare"
FILE = runs.HERE / "golden.json"
CLEAR = 180
"""Maximum length of a fact's JSON, in characters; a longer fact is split or becomes a digest (see `flat`)."""
SHOWN = 4
Facts = dict[str, Any]


def cases() -> list[str]:
    """Return all cases, the fast ones first."""
    return [*verdicts.CASES, COMPARED, *runs.CASES]


def machine() -> dict[str, str]:
    """Return the processor and the package versions, on which the last bits of trained numbers depend."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = ", ".join(cpu.get(key, "?") for key in ("model name", "cpu family", "model"))
    return {"cpu": name, **{package: version(package) for package in ("torch", "numpy")}}


def facts_of(names: Sequence[str]) -> Iterator[tuple[str, Facts]]:
    """Yield each case with its facts."""
    with (
        patch.dict(os.environ, COLUMNS="80", NO_COLOR="1", EDGEFL_BACKEND=""),
        tempfile.TemporaryDirectory(prefix="golden-") as out,
        sweep.warm() as warm,
    ):
        for name in names:
            try:
                with redirect_stdout(io.StringIO()):
                    found = _facts(name, Path(out) / name, warm)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            yield name, found


def _facts(name: str, folder: Path, warm: Any) -> Facts:
    if name in runs.CASES:
        runs.make(name, folder, warm)
        return runs.facts(folder)
    return flat(_compared(folder, warm) if name == COMPARED else verdicts.CASES[name]())


def _compared(folder: Path, warm: Any) -> dict[str, Any]:
    """Return what ``edgefl compare`` prints about several runs, and other commands about the first run."""
    names = fnmatch.filter(runs.CASES, "compare-*")
    for name in names:
        runs.make(name, folder / name, warm)
    first, *others = (str(folder / name) for name in names)
    beside = ["compare", first, *others, "--out", str(folder / "beside")]
    commands = [
        beside,
        [*beside, "--target", "0.5"],
        *([made, first] for made in ("verify", "report", "trace")),
    ]
    text = "".join(map(verdicts.said, commands)).replace(str(folder), "DIR")
    comparison = json.loads((folder / "beside" / "summary.json").read_text())["comparison"]
    return {"text": text.splitlines(), "comparison": comparison}


def flat(value: Any, path: str = "", depth: int = 3) -> Facts:
    """Flatten nested facts to a dict keyed by path. A long fact is split into its parts, down to ``depth``
    levels; a part that is still long becomes a digest."""
    if len(json.dumps(value, ensure_ascii=False)) <= CLEAR:
        return {path: value}
    if not depth or not isinstance(value, dict | list | tuple):
        return {path: runs.digest(value)}
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    found = (flat(part, f"{path}.{key}".lstrip("."), depth - 1) for key, part in parts)
    return {key: fact for each in found for key, fact in each.items()}


def different(name: str, golden: Mapping[str, Any], found: Mapping[str, Any], here: bool) -> list[str]:
    """Describe the facts that differ from the recorded ones. ``here`` is True if they were recorded on this
    machine; if not, only facts that are equal on all machines are compared."""
    case = runs.CASES.get(name, {})
    if not here and runs.CASES.get(runs.golden_name(name), {}).get("learned"):
        return []
    if "error" in found and "error" not in golden:
        return [f"error: {found['error']}"]
    said = []
    for key in dict.fromkeys([*golden, *found]):
        old, new = golden.get(key, "nothing"), found.get(key, "nothing")
        if "stopped" in case and key.startswith("incidents"):  # the record also has the stop
            continue
        elsewhere = not here and not _holds_everywhere(name, key, old)
        if not elsewhere and not _same(old, new, here):
            said.append(f"{key}: {old} -> {new}")
    return said


def _holds_everywhere(name: str, key: str, fact: Any) -> bool:
    if name in runs.CASES:
        return key.rpartition(".")[2] not in runs.TRAINED
    exact = name in ("verdict-profiles", "text-help", "text-keys", "text-profiles")
    return exact or (name.startswith("verdict-") and "#" not in str(fact))


def _same(old: Any, new: Any, here: bool) -> bool:
    if here or json.dumps(old) == json.dumps(new):
        return json.dumps(old) == json.dumps(new)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(_same(a, b, here) for a, b in zip(old, new, strict=True))
    return isinstance(old, float) and isinstance(new, float) and math.isclose(old, new, rel_tol=1e-8)


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"machine": {}, "cases": {}}
    return found


def compare(names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each case that differs."""
    known = recorded()
    here = known["machine"] == machine()
    for name, found in facts_of(names):
        old = known["cases"].get(runs.golden_name(name))
        off = ["not recorded"] if old is None else different(name, old, json.loads(json.dumps(found)), here)
        if off:
            more = f" (and {len(off) - SHOWN} more)" if len(off) > SHOWN else ""
            yield f"{name}: {'; '.join(off[:SHOWN])}{more}"


def record(names: Sequence[str]) -> Iterator[str]:
    """Write the facts of these cases; yield a line for each that failed."""
    known = recorded()
    if len(names) < len(cases()) and known["machine"] not in ({}, machine()):
        raise SystemExit(f"golden.json is from another machine, {known['machine']}: record all cases")
    found = dict(facts_of([name for name in names if runs.golden_name(name) == name]))
    for name, facts in found.items():
        if ("error" in facts) is not bool(runs.CASES.get(name, {}).get("refused")):
            yield f"{name}: {facts.get('error', 'no error')}"
    every = {**known["cases"], **found}
    ordered = {name: every[name] for name in cases() if name in every}
    lines = (f"{json.dumps(name)}: {json.dumps(of, ensure_ascii=False)}" for name, of in ordered.items())
    head = f'{{"machine": {json.dumps(machine())}, "cases": {{\n'
    FILE.write_text(head + ",\n".join(lines) + "\n}}\n")


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if a case differs or failed."""
    if not arguments or arguments[0] not in ("record", "compare"):
        raise SystemExit(__doc__)
    patterns = arguments[1:] or ["*"]
    names = [name for name in cases() if any(fnmatch.fnmatch(name, each) for each in patterns)]
    if missing := [each for each in patterns if not fnmatch.filter(names, each)]:
        raise SystemExit(f"no case {', '.join(missing)}; available: {', '.join(cases())}")
    if arguments[0] == "compare" and recorded()["machine"] != machine():
        print("another machine: only counts and emulated times are compared", file=sys.stderr)
    off = 0
    for line in (record if arguments[0] == "record" else compare)(names):
        print(line, flush=True)
        off += 1
    print(f"{len(names)} cases, {off} differ or failed", file=sys.stderr)
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
