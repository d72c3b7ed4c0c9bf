"""``edgefl flower``: run an unchanged Flower app on Flower's runtime; each SuperNode emulates a phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli.programs import (
    Devices,
    FleetFile,
    Network,
    Out,
    Throttle,
    TimeScale,
    phones_of,
    say_result,
    say_unlimited,
    scale_of,
)
from edgefl.cli.run import INVALID, AcceptInvalid, Quiet
from edgefl.terminal import say

if TYPE_CHECKING:
    from edgefl.flower.runtime import FlowerResult


def flower(
    app: Annotated[Path, typer.Argument(metavar="APP", help="The folder of a Flower app.")],
    device: Devices = None,
    fleet: FleetFile = None,
    network: Network = None,
    run_config: Annotated[
        list[str] | None, typer.Option("--run-config", "-c", metavar="KEY=VALUE", help="Passed to flwr run.")
    ] = None,
    time_scale: TimeScale = "auto",
    throttle: Throttle = "sigstop",
    memory: Annotated[
        str, typer.Option(metavar="off|auto|cgroup|watch", help="Mechanism that limits memory.")
    ] = "off",
    seed: Annotated[int, typer.Option(help="Seed of jitter and loss.")] = 0,
    out: Out = None,
    accept_invalid: AcceptInvalid = False,
    quiet: Quiet = False,
) -> int:
    """Run a Flower app on Flower's runtime, one SuperNode per phone.

    The exit code is 1 if the app's run did not complete, 3 if it completed but the emulation was INVALID,
    and 0 otherwise.
    """
    from edgefl.flower import runtime
    from edgefl.programs import ProgramOptions

    runtime.check(app)
    phones = phones_of([], device or [], fleet, None, network, [], share=None, like="torch", seed=seed)
    options = ProgramOptions(
        time_scale=scale_of(time_scale), throttle=throttle, memory=memory, seed=seed, out=out
    )
    if not quiet:
        say_unlimited(memory, phones)
    result = runtime.run(app, phones, options, run_config or [])
    if not quiet:
        _say_messages(result)
    say_result(result.phones, quiet)
    return result.exit_code or (0 if result.phones.valid or accept_invalid else INVALID)


def _say_messages(result: FlowerResult) -> None:
    """Print one line per phone: the error of its compute time, and each message's emulated time."""
    from edgefl.results.tables import percent

    scale = result.phones.time_scale
    for phone in result.phones.phones:
        own = [one for one in result.messages if one.phone == phone.phone]
        times = (f"{one.kind} {one.number} {one.seconds / scale:.1f} s" for one in own)
        took = ", ".join(times) or "no message"
        off = result.phones.cpu_error(phone)
        error = "not judged" if off is None else f"off by {percent(off, 2)}"
        say(f"edgefl: phone {phone.phone} ({phone.device}), compute time {error}: {took}", err=True)
