"""`Phone` is a command, a device, a network and forwarded connections; `HeldPhone` adds the profiles."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edgefl.devices import Device, Network, load_device, load_network
from edgefl.devices.code import Rate
from edgefl.devices.condition import Power, power_of
from edgefl.errors import ConfigError, ProfileError
from edgefl.host.process import without_gpus
from edgefl.programs.likeness import TORCH, HostSpeeds, core_shares, is_shared

MAX_PHONES = 10_000
_PLACEHOLDER = re.compile(r"(?<!\$)\{(i|device|connect:(\d+))\}")
INDEX_VARIABLE = "EDGEFL_PHONE"
"""Environment variable that holds the phone's number, counted from 0."""


class Phone(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of a command, and the device and network whose speed, memory and bandwidth it gets.

    The command and the values of the environment may contain placeholders: ``{i}`` is the phone's number,
    counted from 0; ``{device}`` is the name of its device; and ``{connect:PORT}`` is the address
    ``host:port`` at which the phone reaches a server.

    >>> phone = Phone(device="moto-g4", command=("curl", "{connect:8080}"), connects={8080: "localhost:80"})
    >>> phone.share is None
    True
    """

    device: str
    """Name of a device profile, or the path of a profile file."""
    command: tuple[str, ...]
    network: str | None = None
    """Name or path of a network profile. If None, the device's network; no limits if it has none."""
    environment: dict[str, str] = {}
    """Environment variables that are added to those of this process."""
    connects: dict[int, str] = {}
    """Local ports, mapped to servers (``host:port``). Connections to such a port use the phone's link."""
    share: float | tuple[float, ...] | None = None
    """CPU share in cores of this host: one number that all threads share, or a number per core of the device,
    fastest first, each used by one runnable thread. If None, the share is derived from ``like``."""
    like: str = TORCH
    """Code that the command resembles (see `read_likeness`). The phone runs at the speed at which its
    device runs such code."""
    threads: int | None = None
    """Maximum number of threads that the command runs in parallel. The phone gets this number of the device's
    cores, fastest first; None for all cores."""
    folder: str | None = None
    """Working folder of the command; None for the current folder."""


class HeldPhone(NamedTuple):
    """A phone with its loaded profiles."""

    phone: Phone
    device: Device
    network: Network
    cores: tuple[float, ...]
    """Shares of the device's cores, in cores of this host at time scale 1, fastest core first."""
    error_factor: float | None = None
    """Factor f such that 90% of real devices run code like ``phone.like`` within a factor f of the phone's
    speed; None if the share was given."""
    core_w: tuple[float, ...] = ()
    """Power of each of ``cores`` at full speed, in watts above idle; () if the profile does not state it."""

    @property
    def power(self) -> Power | None:
        """Power model of the phone; None if the profile lacks a battery or the power used by computing."""
        with contextlib.suppress(ProfileError):
            return power_of(self.device, self.network)
        return None

    @property
    def limit_mib(self) -> float | None:
        return self.device.app_limit_mib


def look_up(phones: Sequence[Phone]) -> list[HeldPhone]:
    """Load the profiles of the phones. Raises `ConfigError` for the first invalid setting.

    If a phone's share depends on the speed of this host, the host is measured, which takes seconds.
    """
    check_count(len(phones))
    found, host = [], HostSpeeds()
    shares: dict[tuple[str, str], tuple[Rate, ...]] = {}
    for number, phone in enumerate(phones):
        where = f"phone {number}"
        device, error_factor = load_device(phone.device), None
        _check_command(phone, where)
        if phone.threads is not None and phone.threads < 1:
            raise ConfigError(f"{where}: threads must be at least 1, got {phone.threads}")
        if phone.share is None:
            if (kind := (phone.device, phone.like)) not in shares:  # a model is traced, for seconds
                shares[kind] = core_shares(device, phone.like, host)
            speeds = shares[kind]
            cores, error_factor = [one.value for one in speeds], max(one.spread for one in speeds)
        else:
            cores = [*phone.share] if isinstance(phone.share, tuple) else [phone.share]
        if phone.threads is not None and len(cores) == 1 and is_shared(phone.share or phone.like):
            raise ConfigError(f"{where}: threads has no effect, since all threads share {cores[0]:.3g} cores")
        for core in cores or (0.0,):
            if not 0 < core < 1e6:
                raise ConfigError(f"{where}: share must be a finite number of cores above 0, got {core:g}")
        network = load_network(device.network or "none" if phone.network is None else phone.network)
        used = tuple(sorted(cores, reverse=True)[: phone.threads])
        powers = _powers_w(device, cores, phone)[: len(used)]
        found.append(HeldPhone(phone, device, network, used, error_factor, powers))
    return found


def _powers_w(device: Device, cores: Sequence[float], phone: Phone) -> tuple[float, ...]:
    """Return the power of each core in watts, fastest core first; () if the profile does not state it.

    If all threads share one speed, the result is one number: the power of all cores together. If the phone's
    share was given, the cores with the highest frequencies are the fastest; otherwise ``cores`` are the
    speeds, in the order of the clusters.
    """
    if device.busy_w is None:
        return ()
    powers = device.core_w
    if is_shared(phone.share or phone.like) or len(cores) > len(powers):
        return (device.busy_w / len(cores),) * len(cores)
    speeds = cores if phone.share is None else device.core_mhz
    return tuple(power for _, power in sorted(zip(speeds, powers, strict=True), key=lambda pair: -pair[0]))


def check_count(phones: int) -> None:
    """Raise `ConfigError` if the number of phones is out of range."""
    if not 1 <= phones <= MAX_PHONES:
        raise ConfigError(f"phones: must be from 1 to {MAX_PHONES}, got {phones}")


def check_charge(phones: Sequence[HeldPhone], charge: float) -> None:
    """Raise `ConfigError` if the initial charge has no effect, or if a phone would be off from the start."""
    powers = [power_of(held.device, held.network) for held in phones]
    if not any(powers):
        raise ConfigError(f"charge {charge:g}: has no effect, since no phone's profile has a [battery]")
    for held, power in zip(phones, powers, strict=True):
        if power is not None and charge * power.capacity_j <= power.least_j:
            least = f"the min_soc of {held.device.id!r}, {power.least_j / power.capacity_j:g}"
            raise ConfigError(f"charge {charge:g}: must be above {least}, or the phone starts switched off")


def _check_command(phone: Phone, where: str) -> None:
    if not phone.command:
        raise ConfigError(f"{where}: there is no command; give one after --")
    command: Any = phone.command
    sequence = isinstance(command, Sequence) and not isinstance(command, str)
    if not sequence or not all(isinstance(word, str) for word in command):
        words = "must be a sequence of strings, such as ('sleep', '5')"
        raise ConfigError(f"{where}: command {words}, got {command!r}")
    added: Mapping[Any, Any] = phone.environment
    for name, value in added.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            must = "names and values must be strings"
            raise ConfigError(f"{where}: environment: {must}, got {name!r}: {value!r}")
    if any("\0" in word for word in (*phone.command, *phone.environment, *phone.environment.values())):
        raise ConfigError(f"{where}: its command or environment contains a NUL byte")
    for name in phone.environment:
        if not name or "=" in name:
            raise ConfigError(f"{where}: environment: a name must not be empty or contain '=', got {name!r}")
    for text in (*phone.command, *phone.environment.values()):
        for found in _PLACEHOLDER.finditer(text):
            if found[2] is not None and int(found[2]) not in phone.connects:
                raise ConfigError(f"{where}: {found[0]} needs --connect {found[2]}=HOST:PORT")
    if phone.folder is not None and not Path(phone.folder).is_dir():
        raise ConfigError(f"{where}: folder {phone.folder!r} does not exist")
    path = phone.environment.get("PATH", os.environ.get("PATH", os.defpath))
    program = phone.command[0]
    here = os.path.join(phone.folder or ".", program) if "/" in program else program
    if _PLACEHOLDER.search(program) is None and shutil.which(here, path=path) is None:
        raise ConfigError(f"{where}: command {program!r} not found, or not executable")


def local_host(number: int, count: int) -> str:
    """Return the loopback address on which phone ``number`` of ``count`` phones listens.

    >>> local_host(0, 1), local_host(0, 2), local_host(300, 400)
    ('127.0.0.1', '127.1.0.1', '127.1.1.51')
    """
    return "127.0.0.1" if count == 1 else f"127.1.{number // 250}.{number % 250 + 1}"


Address = tuple[int, tuple[Any, ...]]
"""Family of a socket address, and the address in the form that `socket.connect` takes."""


class ForwardedPort(NamedTuple):
    """A listening socket, and the addresses of the server to which its connections are forwarded.

    A connection goes to the first of these addresses that accepts it.
    """

    listener: socket.socket
    server: tuple[Address, ...]


def open_listeners(phones: Sequence[HeldPhone]) -> list[list[ForwardedPort]]:
    """Open the listening sockets of each phone.

    Raises `ConfigError` for an invalid address or a port that is in use.
    """
    servers: dict[str, tuple[Address, ...]] = {}
    ports: list[list[ForwardedPort]] = []
    try:
        for number, held in enumerate(phones):
            ports.append([])
            for port, text in held.phone.connects.items():
                if text not in servers:
                    servers[text] = _server(text)
                host = local_host(number, len(phones))
                # A connection to the listener itself would be forwarded to it again, without end.
                others = tuple(address for address in servers[text] if not _leads_to(address, host, port))
                if not others:
                    must = "must lead elsewhere; the phone itself listens there"
                    raise ConfigError(f"connect {port}={text}: {must}")
                ports[-1].append(ForwardedPort(_listen(host, port), others))
    except BaseException:
        for opened in (opened for some in ports for opened in some):
            opened.listener.close()
        raise
    return ports


def _leads_to(address: Address, host: str, port: int) -> bool:
    """Return True if a connection to ``address`` reaches a listener at ``host:port``.

    Linux connects to this machine (127.0.0.1) if the address is 0.0.0.0.
    """
    family, (name, number, *_) = address
    at = "127.0.0.1" if name == "0.0.0.0" else name
    return family == socket.AF_INET and (at, number) == (host, port)


def split_address(text: str) -> tuple[str, int]:
    """Split ``host:port``; IPv6 addresses must be in brackets.

    >>> split_address("server:9092"), split_address("[::1]:80")
    (('server', 9092), ('::1', 80))
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not _is_port(port):
        raise ConfigError(f"connect {text!r}: must be HOST:PORT with a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= 65535


def read_connect(text: str) -> tuple[int, str]:
    """Split ``PORT=HOST:PORT`` into port and server.

    >>> read_connect("9092=server:9092")
    (9092, 'server:9092')
    """
    port, equals, server = text.partition("=")
    if not equals or not _is_port(port):
        raise ConfigError(f"connect {text!r}: must be PORT=HOST:PORT with ports from 1 to 65535")
    split_address(server)
    return int(port), server


_SHARES = re.compile(r"([0-9.e+-]+)(?:x([1-9][0-9]?))?")


def read_share(text: str) -> float | tuple[float, ...]:
    """Parse a phone's share: a number that all threads share, or ``SHARExCORES,...`` for one core per thread.

    >>> read_share("0.3"), read_share("0.3x1"), read_share("0.3x2,0.1")
    (0.3, (0.3,), (0.3, 0.3, 0.1))
    """
    found = [_SHARES.fullmatch(part) for part in text.split(",")]
    try:
        cores = [float(one[1]) for one in found if one for _ in range(int(one[2] or 1))]
    except ValueError:
        cores = []
    if None in found or not cores:
        raise ConfigError(
            f"--share {text!r}: must be a number of cores, or SHARExCORES,... such as 0.3x4,0.1x4"
        )
    return cores[0] if "x" not in text and len(found) == 1 else tuple(cores)


def _server(text: str) -> tuple[Address, ...]:
    host, port = split_address(text)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"connect {text!r}: host {host!r} not found ({error})") from None
    return tuple((int(family), address) for family, _, _, _, address in found)


RECEIVE_BYTES = 1 << 18
"""Size of the receive buffer for data from a phone. It is small, so that a program's writes succeed only
shortly before the link sends the data."""


def _listen(host: str, port: int) -> socket.socket:
    if not 1 <= port <= 65535:
        raise ConfigError(f"connect {port}: must be a port from 1 to 65535")
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"connect {port}: cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def filled(text: str, number: int, device: str, host: str) -> str:
    """Return ``text`` with its placeholders replaced; shell variables such as ``${i}`` are left unchanged.

    >>> filled("{device}-{i} http://{connect:80} {x} ${i}", 3, "pi-4", "127.0.0.1")
    'pi-4-3 http://127.0.0.1:80 {x} ${i}'
    """

    def value(found: re.Match[str]) -> str:
        if found[2] is not None:
            return f"{host}:{found[2]}"
        return str(number) if found[1] == "i" else device

    return _PLACEHOLDER.sub(value, text)


def environment(held: HeldPhone, number: int, host: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the phone's processes.

    GPUs are hidden from them, unless variables that the phone adds make a GPU visible.
    """
    own = {key: filled(value, number, held.device.id, host) for key, value in held.phone.environment.items()}
    ways = {f"EDGEFL_CONNECT_{port}": f"{host}:{port}" for port in held.phone.connects}
    return {**without_gpus(base), **own, **ways, INDEX_VARIABLE: str(number)}
