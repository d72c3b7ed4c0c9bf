"""``edgefl exec``: run copies of any command, each of which emulates a device with its network link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli.paths import folder_option
from edgefl.cli.predict_code import CLASSES
from edgefl.cli.run import INVALID, AcceptInvalid, Quiet
from edgefl.errors import ConfigError, listed
from edgefl.terminal import say

if TYPE_CHECKING:
    from edgefl.programs import Phone, ProgramsResult
    from edgefl.programs.messages import Absence

Devices = Annotated[
    list[str] | None,
    typer.Option("--device", "-d", metavar="NAME[=COUNT]", help="A profile; may be repeated."),
]
FleetFile = Annotated[str | None, typer.Option(metavar="FILE", help="A fleet instead of --device.")]
Network = Annotated[
    str | None, typer.Option(metavar="NAME", help="A network profile; by default the device's.")
]
TimeScale = Annotated[str, typer.Option(metavar="auto|S", help="Wall seconds per emulated second.")]
Throttle = Annotated[str, typer.Option(metavar="sigstop|cgroup|off", help="Mechanism that slows processes.")]
Out = Annotated[Path | None, folder_option("Folder for the record.")]


def execute(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="May contain {i}, {device} and {connect:PORT}.", show_default=False
        ),
    ],
    device: Devices = None,
    fleet: FleetFile = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", "-n", metavar="N", min=1, help="Phones of each device without a count; default 1."
        ),
    ] = None,
    network: Network = None,
    connect: Annotated[
        list[str] | None,
        typer.Option(
            "--connect",
            metavar="PORT=HOST:PORT",
            help="Forward this local port to a server; may be repeated.",
        ),
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="CORES",
            help="Cores of this host: 0.3 for all threads together; 0.3x4,0.1x4: one core per thread.",
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help=f"What the program resembles, which sets its speed: {', '.join(CLASSES)}; torch, "
            "torch:MODEL or torch:MODEL@BATCH: a training step; KIND=SHARE,…: a mix, by shares of its "
            "time; auto (default): by the program's name.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Maximum threads at once; the phone gets only its N fastest cores."
        ),
    ] = None,
    time_scale: TimeScale = "auto",
    throttle: Throttle = "sigstop",
    memory: Annotated[
        str, typer.Option(metavar="auto|cgroup|watch|off", help="Mechanism that limits memory.")
    ] = "auto",
    churn: Annotated[
        str | None,
        typer.Option(metavar="ON,OFF", help="Mean emulated seconds online and offline, alternating."),
    ] = None,
    leave: Annotated[
        str | None,
        typer.Option(
            metavar="stop|kill",
            help="What happens to the processes of a phone that goes offline; default stop.",
        ),
    ] = None,
    charge: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Initial battery charge; an empty battery ends the phone."),
    ] = None,
    awake: Annotated[
        bool,
        typer.Option(
            "--awake",
            help="Keep this host's idle cores busy at the lowest priority; an idle core is slower at first.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of jitter, loss and churn.")] = 0,
    out: Out = None,
    accept_invalid: AcceptInvalid = False,
    quiet: Quiet = False,
) -> int:
    """Run copies of a command with a device's speed, memory and link.

    The exit code is the first nonzero code of a copy, or 3 if all are 0 and the emulation was INVALID.
    """
    from edgefl import programs
    from edgefl.host.process import inherited_descriptors
    from edgefl.programs.result import UnwrittenRecord
    from edgefl.programs.view import make_view

    inherited = inherited_descriptors()
    phones = phones_of(
        command, device or [], fleet, count, network, connect or [], share, like, threads, seed=seed
    )
    options = programs.ProgramOptions(
        time_scale=scale_of(time_scale),
        throttle=throttle,
        memory=memory,
        seed=seed,
        charge=charge,
        absence=_absence(churn, leave),
        awake=awake,
        out=out,
        descriptors=inherited,
    )
    guessed = like is None and share is None and throttle != "off"
    if not quiet and guessed and any(phone.like == "interpreter" for phone in phones):
        torch = "if it trains with torch, add --like torch:MODEL or --like torch"
        say(f"edgefl: the program runs at the phone's speed in interpreted code; {torch}", err=True)
    if not quiet and network is not None and not connect:
        say(f"edgefl: --network {network} limits nothing without --connect PORT=HOST:PORT", err=True)
    if not quiet:
        say_unlimited(memory, phones)
    view, unwritten = make_view(len(phones), quiet, limited=throttle != "off"), ""
    try:
        result = programs.run(phones, options, view)
    except UnwrittenRecord as error:
        result, unwritten = error.result, str(error)
    say_result(result, quiet)
    if unwritten:
        say(f"edgefl: {unwritten}", err=True)
    incomplete = 1 if unwritten or view.failed else 0
    return result.exit_code or incomplete or (0 if result.valid or accept_invalid else INVALID)


def phones_of(
    command: list[str],
    devices: list[str],
    fleet: str | None,
    count: int | None,
    network: str | None,
    connect: list[str],
    share: str | None,
    like: str | None = None,
    threads: int | None = None,
    *,
    seed: int,
) -> list[Phone]:
    from edgefl.devices import load_fleet
    from edgefl.programs import Phone
    from edgefl.programs.likeness import read_likeness
    from edgefl.programs.phone import check_count, read_connect, read_share

    if (fleet is None) == (not devices):
        raise ConfigError("give --device NAME, once or more, or --fleet FILE")
    if like is not None and share is not None:
        raise ConfigError(f"--like {like}: cannot be combined with --share, which sets the speed")
    if like not in (None, "auto"):
        read_likeness(like)
    counts = [_counted(text, count or 1) for text in devices]
    if count is not None and all("=" in text for text in devices):
        raise ConfigError(f"--count {count}: has no effect, since every device has its own count")
    networks: dict[str, str] = {}
    if fleet is not None:
        found = load_fleet(fleet)
        counts = [*found.drawn(seed).items()]
        of = found.network
        networks = of if isinstance(of, dict) else dict.fromkeys(found.devices, of)
    check_count(sum(copies for _, copies in counts))
    connects = dict(map(read_connect, connect))
    if len(connects) < len(connect):
        raise ConfigError(f"--connect {' '.join(connect)}: give each port only once")
    return [
        Phone(
            device=name,
            command=tuple(command),
            network=networks.get(name) if network is None else network,
            connects=connects,
            share=None if share is None else read_share(share),
            like=like_of(like, name, command),
            threads=threads,
        )
        for name, copies in counts
        for _ in range(copies)
    ]


def like_of(like: str | None, device: str, command: list[str]) -> str:
    """Return ``like`` or, if it is "auto" or None, the class of code that the command resembles.

    If ``like`` is None and the cores of the device are unknown, the class is torch.
    """
    from edgefl.devices import load_device
    from edgefl.programs.likeness import TORCH, class_of

    if like not in (None, "auto"):
        return like
    known = load_device(device).clusters or like == "auto"
    return class_of(command) if known else TORCH


def _counted(text: str, count: int) -> tuple[str, int]:
    """Parse NAME or NAME=COUNT into the device's name and the number of phones, by default ``count``."""
    name, equals, copies = text.rpartition("=")
    if not equals:
        return text, count
    if not copies.isascii() or not copies.isdecimal() or not int(copies):
        raise ConfigError(f"--device {text!r}: must be NAME or NAME=COUNT with a count of at least 1")
    return name, int(copies)


def say_unlimited(memory: str, phones: Sequence[Phone]) -> None:
    """Say which devices the chosen mechanism does not limit, because their profile has no memory limit."""
    from edgefl.devices import load_device

    devices = {phone.device for phone in phones if memory in ("cgroup", "watch")}
    if without := [name for name in sorted(devices) if load_device(name).app_limit_mib is None]:
        why = "without app_limit_mib in its profile, a device has no memory limit"
        say(f"edgefl: --memory {memory} does not limit {listed(without)}: {why}", err=True)


def scale_of(text: str) -> float:
    if text == "auto":
        return text  # type: ignore[return-value]
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--time-scale {text!r}: must be 'auto' or a number above 0") from None


def _absence(churn: str | None, leave: str | None) -> Absence | None:
    from edgefl.programs.messages import Absence

    if leave not in (None, "stop", "kill"):
        raise ConfigError(f"--leave {leave!r}: must be 'stop' or 'kill'")
    if churn is None:
        if leave is not None:
            raise ConfigError(f"--leave {leave}: has no effect without --churn ON,OFF")
        return None
    try:
        on_s, off_s = map(float, churn.split(","))
    except ValueError:
        raise ConfigError(f"--churn {churn!r}: must be ON,OFF, mean seconds such as 60,20") from None
    return Absence(on_s, off_s, leave or "stop")  # type: ignore[arg-type]


def say_result(result: ProgramsResult, quiet: bool) -> None:
    """Print the verdict and the errors; if ``quiet``, print only an INVALID verdict."""
    from edgefl.results.headline import errors
    from edgefl.results.tables import many, seconds

    for phone in result.phones if not quiet else ():
        if phone.why:
            say(f"edgefl: phone {phone.phone} ({phone.device}): {phone.why}", err=True)
    held = result.held
    verdict = "VALID" if held.valid else f"INVALID: {'; '.join(held.reasons)}"
    error = errors(held.median_abs_error, held.p95_abs_error)
    if result.unjudged:
        verdict, error = "not judged", result.unjudged
    ran = sorted(phone.wall_s / result.time_scale for phone in result.phones)
    took = " to ".join(dict.fromkeys(map(seconds, (ran[0], ran[-1]))))
    scale = f"{took} of emulated time, time_scale {result.time_scale:g}"
    for code, device, factor in result.model_errors:
        error += f"; {code} code on a real {device}: within a factor of {factor:.2f} (90%)"
    if not (quiet and held.valid):
        phones = many(len(result.phones), "phone")
        say(f"edgefl: {verdict}; {phones}, {scale}, {error}", err=True)
