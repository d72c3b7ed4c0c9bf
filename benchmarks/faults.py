"""Simulate thousands of power cuts or bit flips, and check that runs survive them (docs/reliability.md).

    python benchmarks/faults.py power-cuts [--states 4] [--resumes 30] [--clock wall]
    python benchmarks/faults.py bit-flips [--flips 20000] [--commands 50]

The exit code is 1 if the outcome of any fault is not one of the allowed outcomes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import modules of tests/

from edgefl import Checkpoint, Experiment, Server, Stop, seeds
from tests.fault import bit_flips as flipped
from tests.fault import disk, power_cut, shim
from tests.process import runs
from tests.process.test_virtual_resume import outcome


def small_run(clock: str, versions: int) -> Experiment:
    more = {"stop": Stop(versions=versions), "checkpoint": Checkpoint(every_s=1e-6)}
    if clock == "virtual":
        return runs.virtual(**more)
    return runs.experiment(server=Server(heartbeat_s=runs.PATIENCE_S), **more)


def power_cuts(asked: argparse.Namespace, place: Path) -> Counter[str]:
    """Check states that a power cut may leave on disk; return the number of times that each outcome occurred.

    ``--states`` such states are drawn and checked after each file change of a recorded run. One more is drawn
    after each of ``--resumes`` randomly chosen changes, and resumed with the command ``edgefl resume``.
    """
    wanted = small_run(asked.clock, 60)
    changes = power_cut.record(wanted, place / "files", shim.build(place))
    judge = power_cut.Judge(wanted, changes, place / "judge")
    said: Counter[str] = Counter()
    different: set[int] = set()
    for cut in power_cut.cuts(changes, asked.states, seed=asked.seed):
        different.add(hash(frozenset(cut.files.items())))
        said[judge(cut) or "as it should be"] += 1
    print(f"{len(changes)} changes, {len(different)} different states")
    chosen = seeds.stream(asked.seed, "resumes").choice(len(changes), asked.resumes, replace=False)
    for cut in power_cut.cuts(changes, 1, set(chosen.tolist()), asked.seed + 1):
        said[judge.resumes(cut) or "resumed by the command, the same outcome"] += 1
    return said


def bit_flips(asked: argparse.Namespace, place: Path) -> Counter[str]:
    """Flip single bits in the files of a finished run and of a killed run; return the number of each outcome.

    After a flip, the run is read in this process or, for ``--commands`` flips, by ``edgefl verify`` (finished
    run) or ``edgefl resume`` (killed run).
    """
    changes = power_cut.record(small_run("virtual", 60), place / "files", shim.build(place))
    disk.write(flipped.killed(changes), place / "killed")
    said: Counter[str] = Counter()
    for kind, folder in (("finished", place / "files" / "run"), ("killed", place / "killed" / "run")):
        read = flipped.Reader(folder, place / f"{kind}-spoilt")
        for flip in flipped.flips(folder, asked.flips // 2, asked.seed):
            said[f"{kind}: {read(flip)}"] += 1
        for flip in flipped.flips(folder, asked.commands // 2, asked.seed + 1):
            found = flipped.commanded(folder, flip, place / "run")
            if found == "resume: exit code 0" and outcome(place / "run") != outcome(place / "files" / "run"):
                found = f"{found}: another outcome"
            said[found] += 1
    return said


GOOD = (
    "as it should be", "resumed by the command, the same outcome",
    *(f"{kind}: {words}" for kind in ("finished", "killed") for words in flipped.GOOD),
    *(f"{kind}: {words}" for kind in ("verify", "resume") for words in ("exit code 0", "one line")),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fault", choices=["power-cuts", "bit-flips"])
    parser.add_argument("--states", type=int, default=4, help="states after each change")
    parser.add_argument("--resumes", type=int, default=30, help="states resumed by the command itself")
    parser.add_argument("--flips", type=int, default=20_000, help="bits flipped and read")
    parser.add_argument("--commands", type=int, default=50, help="bits flipped and read by a command")
    parser.add_argument("--clock", choices=["virtual", "wall"], default="virtual")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    started = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        said = {"power-cuts": power_cuts, "bit-flips": bit_flips}[asked.fault](asked, place)
    finally:
        shutil.rmtree(place)
    for words, count in said.most_common():
        print(f"{count:8,}  {words}")
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(words not in GOOD for words in said))


if __name__ == "__main__":
    sys.exit(main())
