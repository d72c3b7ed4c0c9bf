"""HTML report of a command that ran on emulated phones."""

from __future__ import annotations

from shlex import join
from textwrap import shorten

from edgefl.programs.result import PhoneResult, ProgramsResult, WayResult
from edgefl.results.page import bullets, card, html_table, page, stat
from edgefl.results.tables import many, number, percent, seconds


def programs_page(result: ProgramsResult, name: str) -> str:
    """Return the HTML page with the verdict and a row per phone."""
    median, p95 = percent(result.held.median_abs_error, 2), percent(result.held.p95_abs_error, 2)
    fidelity = ("VALID", "", "good") if result.held.valid else ("INVALID", "", "bad")
    if result.unjudged:
        fidelity = ("not judged", result.unjudged, "")
    headline = [
        stat("Fidelity", *fidelity),
        stat("Enforcement error", median, f"median; 95th percentile {p95}"),
        stat("Phones", str(len(result.phones)), f"exit code {result.exit_code}"),
        stat("Wall time", seconds(result.wall_s), f"{result.time_scale:g} × the emulated time"),
    ]
    links = [row for one in result.phones for row in _link_rows(one)]
    sections = {
        "Phones": [
            card("Computing", _COMPUTING, html_table(_CPU, [_cpu_row(result, one) for one in result.phones])),
            *([card("Links", _LINKS, html_table(_LINK, links))] if links else []),
        ],
    }
    invalid = "<b>INVALID.</b> The emulation missed its accuracy limits." + bullets(result.held.reasons)
    parts = [
        many(len(result.phones), "phone"),
        f"throttle {result.throttle}",
        f"memory limit {result.memory}",
    ]
    if result.awake:
        parts.append("idle cores kept busy")
    return page(
        "edgefl exec",
        name,
        " · ".join(
            (
                *dict.fromkeys(shorten(join(one.command), 80, placeholder=" …") for one in result.phones),
                *parts,
            )
        ),
        headline,
        sections,
        "The errors are enforcement errors, without the error of the device model; see docs/programs.md",
        banner="" if result.held.valid else invalid,
    )


_COMPUTING = (
    "The speed of each phone in cores of this host: declared, and achieved while it ran or waited for a "
    "core. A positive error means slower than declared."
)
_CPU = (
    "Phone", ">Exit code", ">Wall time, s", ">CPU time, s", ">Cores declared", ">Cores achieved", ">Error",
    ">Peak memory, MiB", ">Memory limit, MiB", ">Absences", ">Energy, J", "Ended by the emulation",
)  # fmt: skip


def _cpu_row(result: ProgramsResult, one: PhoneResult) -> tuple[object, ...]:
    return (
        f"{one.phone} {one.device}", one.exit_code, one.wall_s, one.cpu_s, one.declared_share,
        one.achieved_share, percent(result.cpu_error(one), 2), one.peak_mib, one.limit_mib, one.stops or None,
        one.energy_j, one.why,
    )  # fmt: skip


_LINKS = (
    "A transmission is a busy period of one direction; its declared time follows from its bytes and the "
    "network profile. Transmissions delayed by the receiver are not measured. Times are emulated seconds."
)
_LINK = (
    "Phone",
    "Network",
    "Direction",
    ">Sent, MB",
    ">Transmissions",
    ">Declared time, s",
    ">Achieved time, s",
    ">Median error",
    ">Broken connections",
)


def _link_rows(one: PhoneResult) -> list[tuple[object, ...]]:
    ways: dict[str, WayResult] = {"up": one.up, "down": one.down} if one.connections else {}
    return [
        (
            f"{one.phone} {one.device}", one.network, name, number(way.bytes / 1e6), way.transmissions,
            way.declared_s, way.achieved_s, percent(way.median_error, 2), one.broken or None,
        )
        for name, way in ways.items()
    ]  # fmt: skip
