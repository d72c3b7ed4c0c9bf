"""``edgefl serve`` runs an experiment on nodes, ``join`` hosts its clients, ``keygen`` creates keys."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli import run
from edgefl.cli.paths import folder_option, named_folder
from edgefl.errors import ConfigError
from edgefl.experiment import MAX_PROCESSES
from edgefl.terminal import say

if TYPE_CHECKING:
    from edgefl.hosts.nodes import Nodes


def serve(
    file: run.ExperimentFile,
    bind: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="Address for nodes; port * takes any free port.")
    ],
    keys: Annotated[Path | None, folder_option("Keys of the server and of the hosts that may join.")] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, help="Begin when N nodes have joined.")
    ] = 1,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept and trust any host that can reach the address.")
    ] = False,
    set_: run.Changes = None,
    unset: run.UnsetKeys = None,
    clock: run.ClockKind = None,
    seed: run.Seed = None,
    out: run.Out = None,
    accept_invalid: run.AcceptInvalid = False,
    web: run.Web = False,
    web_port: run.WebPort = None,
    quiet: run.Quiet = False,
) -> int:
    """Run one experiment on nodes: see edgefl join."""
    run.require_torch()
    experiment = run.read_experiment(file, set_, unset, clock, seed, on_nodes=True)
    door = _door(bind, keys, nodes, insecure, quiet)
    return run.carry_out(experiment, file, out, accept_invalid, web, web_port, quiet, door)


@contextmanager
def _door(bind: str, keys: Path | None, wanted: int, insecure: bool, quiet: bool) -> Iterator[Nodes]:
    """Open the address at which nodes join. Unless ``quiet``, set the message that says how to join."""
    from edgefl.hosts.nodes import opened

    with opened(bind, keys, wanted, insecure=insecure) as door:
        if not quiet:
            door.invitation = f"edgefl: {_invitation(door)}{' --key NAME.key' if keys else ''}"
        yield door


def _invitation(door: Nodes) -> str:
    """Return a line with the command that a node runs to join the run."""
    from edgefl.hosts.nodes import LOOPBACK

    host, _, port = door.address.removeprefix("tcp://").rpartition(":")
    where = " on this host" if host in LOOPBACK else ""
    name = socket.gethostname() if host in ("0.0.0.0", "[::]") else host
    return f"nodes{where} join with: edgefl join tcp://{name}:{port}"


def _require_host(address: str) -> None:
    """Raise `ConfigError` for an invalid address or an unknown host."""
    from edgefl.zeromq.door import endpoint

    host, port = endpoint(address, "ADDRESS")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{address}: host {host!r} not found ({getattr(error, 'strerror', error)})"
        ) from None


def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Address of the run, tcp://HOST:PORT.")],
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="This host's key file, made by edgefl keygen."),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Host one client of the run, limited to this profile.")
    ] = "",
    as_is: Annotated[
        bool, typer.Option("--as-is", help="This host is the device itself: train at full speed.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Workers to host under the virtual clock; default: the usable cores."),
    ] = None,
) -> None:
    """Host clients or workers of a run that edgefl serve started.

    The command exits when the run ends.
    """
    from edgefl.devices.profiles import is_path, load_device
    from edgefl.hosts import node
    from edgefl.zeromq import keys

    run.require_torch()
    _require_host(address)
    if device and not is_path(device):  # a path refers to a file on the server
        load_device(device)
    if workers is not None and workers > MAX_PROCESSES:
        raise ConfigError(f"--workers: must be at most {MAX_PROCESSES}, got {workers}")
    if workers is not None and device:
        raise ConfigError("--workers: has no effect with --device, which makes this host a single client")
    if as_is and not device:
        raise ConfigError(
            "--as-is: needs --device NAME, the profile that this host's times are compared with"
        )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT for background jobs
    known = None if key is None else keys.read(key)
    outcome = node.join(address, known, workers=workers, device=device, as_is=as_is)
    say(f"the run has ended{f': {outcome}' if outcome else ''}")


def keygen(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of the keys, created if missing.", parser=named_folder),
    ],
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Hosts that may join.")] = None,
) -> None:
    """Create key pairs for the server and the hosts that may join."""
    from edgefl.zeromq.keys import make

    for path in make(folder, names or []):
        say(str(path))
