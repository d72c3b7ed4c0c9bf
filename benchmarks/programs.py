"""Measure with the programs' own clocks how accurately `edgefl exec` limits programs on ten phones at once.

    python benchmarks/programs.py [--quick] [--phones 10] [--share 0.08] [--throttle sigstop|cgroup]

For a busy loop and for ``sha256sum`` of 100 MB, the ratio of CPU time to wall time, as measured by the parent
process, is compared with the phone's share of a core. ``curl`` downloads 10 MB (1 MB with --quick) from a
server on this machine, over the networks lte and 3g-slow. The time that it reports is compared with the time
that a handshake, the request and the response should take according to the network profile. The benchmark
prints medians of the absolute errors, the range of the errors (below 0: too little CPU time, or too fast a
download), and the errors that edgefl itself measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from edgefl import programs
from edgefl.devices import load_network
from edgefl.devices.link import Link
from edgefl.results.tables import percent, show, table

AROUND = """
import resource, subprocess, sys, time
began_s, own_s = time.monotonic(), time.process_time()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime + time.process_time() - own_s, time.monotonic() - began_s)
"""
LOOP = "import time\nwhile time.process_time() < {cpu_s}: pass"


class QuietHandler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Print nothing: phones may close their connections early."""


def printed(phones: list[programs.Phone], throttle: str) -> tuple[list[list[float]], programs.ProgramsResult]:
    """Run the phones; return the numbers that each phone printed, and edgefl's own result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        options = programs.ProgramOptions(time_scale=1.0, throttle=throttle, out=out, print_lines=False)
        result = programs.run(phones, options)
        if result.exit_code:
            sys.exit(
                f"a phone ended with {result.exit_code}: {(out / 'phones' / '0-moto-g4.err').read_text()}"
            )
        texts = [(out / "phones" / f"{number}-moto-g4.out").read_text() for number in range(len(phones))]
    return [[float(word) for word in text.split()] for text in texts], result


def row(name: str, errors: list[float], result: programs.ProgramsResult) -> tuple[object, ...]:
    for reason in result.reasons:
        print(f"{name}: {reason}", file=sys.stderr)
    own = percent(result.held.median_abs_error, 2), percent(result.held.p95_abs_error, 2)
    ends = (percent(end, 2) for end in (min(errors), max(errors)))
    median = percent(statistics.median(map(abs, errors)), 2)
    return name, median, *ends, *own, "VALID" if result.valid else "INVALID"


def computing(name: str, command: tuple[str, ...], given: argparse.Namespace) -> tuple[object, ...]:
    """Return a table row with the errors of a command's CPU rate."""
    around = (sys.executable, "-I", "-S", "-c", AROUND, *command)
    phone = programs.Phone(device="moto-g4", command=around, share=given.share, network="none")
    found, result = printed([phone] * given.phones, given.throttle)
    return row(name, [cpu_s / wall_s / given.share - 1.0 for cpu_s, wall_s in found], result)


def transfer(
    name: str, network: str, nbytes: int, port: int, given: argparse.Namespace
) -> tuple[object, ...]:
    """Return a table row with the errors of a download's time."""
    form = "%{time_total} %{size_request} %{size_header} %{size_download}"
    url = "http://{connect:28080}/file"
    phone = programs.Phone(
        device="moto-g4", command=("curl", "-sS", "-o", "/dev/null", "-w", form, url), network=network,
        share=given.share, connects={28080: f"127.0.0.1:{port}"},
    )  # fmt: skip
    found, result = printed([phone] * given.phones, given.throttle)
    profile = load_network(network)
    # `edgefl exec` applies the mean rate
    down, up = replace(profile.down, rate_cv=0.0), replace(profile.up, rate_cv=0.0)
    link = Link(replace(profile, down=down, up=up), np.random.default_rng(0))
    round_trip_s = (link.network.down.delay_ms + link.network.up.delay_ms) / 1e3
    errors = []
    for took_s, request, header, body in found:
        assert body == nbytes
        declared_s = (
            round_trip_s + link.up(int(request)).declared_s + link.down(int(header + body)).declared_s
        )
        errors.append(took_s / declared_s - 1.0)
    return row(f"{name}, {declared_s:.1f} s", errors, result)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--phones", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.08)
    parser.add_argument("--throttle", default="sigstop")
    given = parser.parse_args()
    mbytes = 1 if given.quick else 10
    with tempfile.TemporaryDirectory() as folder:
        hashed, sent = Path(folder) / "hashed", Path(folder) / "file"
        noise = np.random.default_rng(0)
        hashed.write_bytes(noise.bytes(100_000_000))
        sent.write_bytes(noise.bytes(mbytes * 1_000_000))
        server = QuietServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port, loop = server.server_address[1], LOOP.format(cpu_s=0.3 if given.quick else 1.0)
        rows = [
            computing("busy loop", (sys.executable, "-I", "-S", "-c", loop), given),
            computing("sha256sum of 100 MB", ("sha256sum", str(hashed)), given),
            transfer(f"curl of {mbytes} MB, lte", "lte", mbytes * 1_000_000, port, given),
            transfer(f"curl of {mbytes} MB, 3g-slow", "3g-slow", mbytes * 1_000_000, port, given),
        ]
        server.shutdown()
        server.server_close()
    title = f"{given.phones} phones at once, {given.share:g} cores each, throttle {given.throttle}"
    heads = ("command", ">median", ">from", ">to", ">edgefl's", ">p95", "verdict")
    show(table(heads, rows, title))


if __name__ == "__main__":
    main()
