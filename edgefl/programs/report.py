"""HTML report of a command that ran on emulated phones."""

from __future__ import annotations

from edgefl.programs.result import PhoneResult, ProgramsResult, WayResult
from edgefl.results.page import card, html_table, page, stat
from edgefl.results.tables import many, number, percent, seconds


def programs_page(result: ProgramsResult, name: str) -> str:
    """Return the HTML page: the verdict, and a row per phone."""
    median, p95 = percent(result.held.median_abs_error, 2), percent(result.held.p95_abs_error, 2)
    headline = [
        stat("fidelity", *(("VALID", "", "good") if result.held.valid else ("INVALID", "", "bad"))),
        stat("error", median, f"median; p95 {p95}"),
        stat("phones", str(len(result.phones)), f"exit code {result.exit_code}"),
        stat("time", seconds(result.wall_s), f"of the wall, time_scale {result.time_scale:g}"),
    ]
    sections = {
        "Phones": [
            card("Computing", _COMPUTING, html_table(_CPU, map(_cpu_row, result.phones))),
            card(
                "Links", _LINKS, html_table(_LINK, [row for one in result.phones for row in _link_rows(one)])
            ),
        ],
    }
    if result.held.reasons:
        reasons = html_table(("reason",), [(reason,) for reason in result.held.reasons])
        sections = {"Why it is INVALID": [card("", "", reasons)], **sections}
    sub = f"{many(len(result.phones), 'phone')}, throttle {result.throttle}, memory {result.memory}"
    return page(
        "edgefl exec",
        name,
        sub,
        headline,
        sections,
        "Errors are of enforcement, not of the device model: docs/programs.md",
    )


_COMPUTING = (
    "Cores of this host declared for each phone, and achieved while it could run. A positive error means "
    "slower than declared."
)
_CPU = (
    "phone", "exit", ">wall s", ">CPU s", ">declared", ">achieved", ">error", ">peak MiB", ">limit", ">stops",
    ">joules", "why",
)  # fmt: skip


def _cpu_row(one: PhoneResult) -> tuple[object, ...]:
    return (
        f"{one.phone} {one.device}", one.exit_code, one.wall_s, one.cpu_s, one.declared_share,
        one.achieved_share, percent(one.cpu_error, 2), one.peak_mib, one.limit_mib, one.stops,
        one.energy_j, one.why,
    )  # fmt: skip


_LINKS = (
    "A transmission is a busy period of one direction; its declared time follows from its bytes and the "
    "network profile. Transmissions delayed by the receiver are not measured."
)
_LINK = (
    "phone",
    "network",
    "way",
    ">MB",
    ">transmissions",
    ">declared s",
    ">achieved s",
    ">median error",
    ">broken",
)


def _link_rows(one: PhoneResult) -> list[tuple[object, ...]]:
    ways: dict[str, WayResult] = {"up": one.up, "down": one.down} if one.connections else {}
    return [
        (
            f"{one.phone} {one.device}", one.network, name, number(way.bytes / 1e6), way.transmissions,
            way.declared_s, way.achieved_s, percent(way.median_error, 2), one.broken,
        )
        for name, way in ways.items()
    ]  # fmt: skip
