"""Run well-known programs under `edgefl exec`; compare their speed with published results on real devices.

    python benchmarks/published_programs.py [--device pi-4]… [--only TEXT] [--awake]

7-zip (``7zz``), OpenSSL, sysbench and two Python programs run as phones, at the time scale that edgefl
chooses for their number of threads. Rates are multiplied by the time scale, and times are divided by it. For
each program, the benchmark prints the result, the published result, and their ratio (above 1: faster than the
device). It reports programs that are not installed. Run it on a quiet host; it takes some minutes.

Sources of the published results: ThomasKaiser/sbc-bench (64-bit) for 7-zip and AES (for the Pixel 4, a core
of the same type in a Snapdragon 7c, scaled from 2552 to 2840 MHz), leoncode.co.uk for sysbench,
chaitanyamehta.github.io for n-body (158.3 s for 5 million steps, scaled from 1.5 to 1.8 GHz), and
alexdedyura/cpu-benchmark for the loop (79.2 s for 10,000 rounds).
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from edgefl import programs
from edgefl.programs.likeness import class_of
from edgefl.results.tables import show, table

NBODY = """
import time
from edgefl.host.code_operations import python_bodies
began_s = time.perf_counter()
python_bodies(100_000)
print("took", time.perf_counter() - began_s)
"""
ROUNDS = """
import time
began_s = time.perf_counter()
for _ in range(200):
    for x in range(1, 1000):
        3.141592 * 2**x
    for x in range(1, 10000):
        float(x) / 3.141592
    for x in range(1, 10000):
        float(3.141592) / x
print("took", time.perf_counter() - began_s)
"""


class Program(NamedTuple):
    """A program that prints a result (a rate or a time), and the published results on real devices."""

    name: str
    command: tuple[str, ...]
    printed: str
    """Regular expression for the program's output. Its first group is the result."""
    published: dict[str, tuple[float, float]]
    """Lowest and highest published result, keyed by device."""
    threads: int = 1
    is_rate: bool = True
    """False if the result is a time."""


SEVEN_ZIP = r"Tot:\s+\d+\s+\d+\s+(\d+)"
EVENTS = r"events per second:\s+([0-9.]+)"
PROGRAMS = (
    Program("7-zip, 1 thread, MIPS", ("7zz", "b", "1", "-mmt1", "-md22"), SEVEN_ZIP,
            {"pi-4": (1741, 1769), "pi-5": (3196, 3305), "pixel-4": (3464, 3464)}),
    Program("7-zip, 4 threads, MIPS", ("7zz", "b", "1", "-mmt4", "-md22"), SEVEN_ZIP,
            {"pi-4": (5628, 5784)}, threads=4),
    Program("AES-256-CBC, kB/s", ("openssl", "speed", "-elapsed", "-seconds", "3", "-bytes", "16384",
                                  "-evp", "aes-256-cbc"), r"AES-256-CBC\s+([0-9.]+)k",
            {"pi-4": (36300, 36300), "pi-5": (1368000, 1368000), "pixel-4": (1460000, 1620000)}),
    Program("sysbench cpu, 1 thread, events/s", ("sysbench", "--threads=1", "--time=4", "cpu", "run"), EVENTS,
            {"pi-4": (1477.83, 1477.83), "pi-5": (2737.49, 2737.49)}),
    Program("sysbench cpu, 4 threads, events/s",
            ("sysbench", "--threads=4", "--time=4", "cpu", "run"), EVENTS,
            {"pi-4": (5900.85, 5900.85), "pi-5": (10945.45, 10945.45)}, threads=4),
    Program("n-body in Python, 100,000 steps, s", (sys.executable, "-c", NBODY), r"took ([0-9.]+)",
            {"pi-4": (2.638, 2.638)}, is_rate=False),
    Program("the loop of cpu-benchmark, 200 rounds, s", (sys.executable, "-c", ROUNDS), r"took ([0-9.]+)",
            {"pi-4": (1.584, 1.584)}, is_rate=False),
)  # fmt: skip


def measured(program: Program, device: str, awake: bool) -> tuple[float, programs.ProgramsResult]:
    """Run a program as a phone; return the program's result in emulated time, and edgefl's result."""
    like = class_of(program.command)
    phone = programs.Phone(device=device, command=program.command, like=like, threads=program.threads)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        result = programs.run([phone], programs.ProgramOptions(out=out, awake=awake, print_lines=False))
        texts = [(out / "phones" / f"0-{device}.{end}").read_text() for end in ("out", "err")]
    found = re.search(program.printed, "\n".join(texts))
    if found is None:
        sys.exit(f"{program.name} on {device}: no figure in what it printed:\n{''.join(texts)[-2000:]}")
    scale = result.time_scale if program.is_rate else 1 / result.time_scale
    return float(found[1]) * scale, result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", action="append")
    parser.add_argument("--only", default="", help="part of the programs' names")
    parser.add_argument("--awake", action="store_true", help="keep idle cores busy")
    given = parser.parse_args()
    rows, factors = [], []
    for program in PROGRAMS:
        if given.only not in program.name:
            continue
        if shutil.which(program.command[0]) is None:
            print(f"{program.name}: {program.command[0]} is not installed", file=sys.stderr)
            continue
        for device, (low, high) in program.published.items():
            if given.device and device not in given.device:
                continue
            figure, result = measured(program, device, given.awake)
            reference = (low + high) / 2
            factor = figure / reference if program.is_rate else reference / figure
            factors.append(max(factor, 1 / factor))
            for reason in result.held.reasons:
                print(f"{program.name} on {device}: INVALID: {reason}", file=sys.stderr)
            verdict = "VALID" if result.valid else "INVALID"
            published = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            values = f"{figure:.4g}", published, f"{factor:.2f}", f"{result.time_scale:.3g}", verdict
            rows.append((program.name, device, *values))
    if not rows:
        sys.exit("no program was run: none matches --device and --only, or none is installed")
    heads = ("program", "device", ">emulated", ">published", ">factor", ">scale", "verdict")
    title = f"median factor {statistics.median(factors):.2f}, largest {max(factors):.2f}"
    show(table(heads, rows, title))


if __name__ == "__main__":
    main()
