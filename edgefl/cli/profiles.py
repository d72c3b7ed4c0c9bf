"""The command ``edgefl profiles`` and its subcommands."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperGroup

from edgefl.cli.paths import AsJson, file_option, put, put_or_print, require_finite
from edgefl.errors import ConfigError, ProfileError, unknown
from edgefl.terminal import say

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edgefl.devices.profiles import Kind
    from edgefl.devices.schema import Device, Profile
    from edgefl.devices.time_model import TimeModel


FORMATS = "bouquetfl, devtools, fedscale, mahimahi, power-profile, webpagetest"
STEP = "LEAF's CNN for FEMNIST, forward and backward on 10 images"
LISTED = 12
"""If an import writes more files than this, only their number is printed."""


class Search(NamedTuple):
    """Filters and sort order of the list of devices.

    Every device passes a filter that is None. If ``sort`` is None, the order is alphabetical.
    """

    words: str | None = None
    year: int | None = None
    ram_gib: float | None = None
    sort: str | None = None

    def fits(self, device: Device) -> bool:
        """Return True if the device passes all filters."""
        cores = (each.uarch for each in device.clusters)
        text = " ".join((device.id, device.name, device.kind, device.soc or "", *cores)).lower()
        ram_mib = device.memory.ram_mib if device.memory else None
        return (
            all(word in text for word in (self.words or "").lower().split())
            and self.year in (None, device.year)
            and (self.ram_gib is None or ram_mib == 1024 * self.ram_gib)
        )

    def place(self, device: Device) -> tuple[float, str]:
        """Return a device's sort key. Devices whose value is unknown come last."""
        from edgefl.devices.time_model import FEMNIST_STEP

        model = _usual(device) if self.sort == "step" else None
        figures = {
            "year": device.year,
            "ram": device.memory and device.memory.ram_mib,
            "step": model and model.seconds(FEMNIST_STEP),
        }
        return figures.get(self.sort or "") or math.inf, device.id


class _Named(TyperGroup):
    """A group of commands that treats ``profiles NAME`` as ``profiles show NAME``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            misspelt = len(args) > 1 and difflib.get_close_matches(args[0], known, n=1)
            if not misspelt or _is_profile(args[0]):
                args = ["show", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Named, rich_markup_mode=None, subcommand_metavar="[NAME | COMMAND [ARGS]...]")


@app.callback(invoke_without_command=True)
def profiles(
    ctx: typer.Context,
    as_json: AsJson = False,
    find: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS", help="Only devices whose name, chip and cores together have all these words."
        ),
    ] = None,
    year: Annotated[int | None, typer.Option(metavar="YEAR", help="Only devices of this year.")] = None,
    ram_gib: Annotated[
        float | None,
        typer.Option("--ram-gib", metavar="GIB", help="Only devices with exactly this much memory."),
    ] = None,
    sort: Annotated[
        Literal["name", "year", "ram", "step"] | None,
        typer.Option(help="Sort order of devices; step: by training-step time, fastest first."),
    ] = None,
) -> None:
    """List devices, networks and fleets, or show one profile."""
    search = Search(find, year, ram_gib, sort)
    if ctx.invoked_subcommand is None:
        _list(as_json, search)
    elif as_json:
        raise ConfigError("profiles --json lists all profiles; for one, put --json after its name")
    elif search != Search():
        raise ConfigError(f"profiles {ctx.invoked_subcommand} cannot be combined with a search for devices")


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A profile's name, or the path of a file.")],
    as_json: AsJson = False,
) -> None:
    """Show a profile, each figure with its source. The word show may be omitted."""
    from edgefl.devices import to_json

    profile = _loaded(name)
    if as_json:
        say(json.dumps(to_json(profile), indent=2))
        return

    from edgefl.results import tables

    tables.show(*_profile_tables(profile))


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Profile files in TOML.")],
) -> None:
    """Report all errors in profile files."""
    from edgefl.devices import check_file

    wrong, count = 0, 0
    for file in files:
        problems = check_file(file)
        for problem in problems:
            say(problem)
        if not problems:
            say(f"{file}: ok")
        wrong, count = wrong + bool(problems), count + len(problems)
    if count:
        where = files[0] if len(files) == 1 else f"{wrong} of {len(files)} files"
        raise ConfigError(f"{count} problem{'s' if count > 1 else ''} in {where}")


@app.command("import")
def import_(
    format_name: Annotated[str, typer.Argument(metavar="FORMAT", help=f"One of {FORMATS}.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file in that format.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; by default a single file is printed.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile; by default the file's.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this entry of the file; may be repeated.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="fedscale: maximum number of clients, evenly spaced; default 100.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="power-profile: the device profile to complete with this file.")
    ] = None,
    up: Annotated[Path | None, typer.Option(help="mahimahi: file with the upload trace.")] = None,
) -> None:
    """Convert another project's file to profiles."""
    from edgefl.devices import formats
    from edgefl.devices.imports import ImportOptions

    made = formats.read(format_name, file, ImportOptions(name, tuple(only or ()), clients, base, up))
    for note in made.notes:
        say(note, err=True)
    if out is not None:
        _write(out, made.files)
    elif len(made.files) == 1:
        say(next(iter(made.files.values())), end="")
    else:
        raise ConfigError(f"{file} gives {len(made.files)} profiles; name a folder for them: --out FOLDER")


@app.command()
def fit(
    rows: Annotated[
        list[Path],
        typer.Argument(metavar="ROWS", help="Measured steps: CSV files, or JSON from edgefl measure."),
    ],
    out: Annotated[Path, file_option("Profile file to write.")],
    profile: Annotated[str | None, typer.Option(help="Use only the rows of this profile.")] = None,
    runtime: Annotated[str | None, typer.Option(help="Use only the rows of this runtime.")] = None,
    prior: Annotated[
        str | None, typer.Option(help="A similar device, for costs that the rows do not cover.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(min=1.01, help="Factor by which costs may differ from those of --prior.")
    ] = None,
    apart: Annotated[
        float,
        typer.Option(
            min=1.0, max=10.0, help="Factor by which the profile's device may differ from the measured one."
        ),
    ] = 1.0,
) -> None:
    """Make a device's profile from measured steps."""
    from edgefl.devices import fitted
    from edgefl.devices.fit import SPREAD, predicted, summary

    require_finite("--spread", spread)
    require_finite("--apart", apart)
    _check_name(out)
    recipe = fitted.Recipe(
        files=tuple(file.name for file in rows),
        profile=profile,
        runtime=runtime,
        prior=prior,
        spread=spread or SPREAD,
        apart=apart,
    )
    chosen = fitted.only(rows, profile, runtime)
    if all(file.suffix == ".json" for file in rows):
        from edgefl.devices.kit_result import fit_kit, misfit

        steps = [m.row for m in chosen]
        found = fit_kit(steps, recipe.prior_model(chosen[0].runtime), spread=recipe.spread, apart=apart)
        parts = [predicted(found.model, row) for row in steps]
        for part in parts:
            times = f"{part.row.seconds:.4g} s measured, {part.predicted_s:.4g} s fitted"
            say(f"{part.row.network}: {times}, ratio {part.factor:.2f}")
        if (line := misfit(parts)) is not None:
            say(line)
    else:
        found = recipe.fit(chosen)
    for unseen in sorted(found.unseen, key=lambda unseen: unseen.factor):
        row = unseen.row
        times = f"{row.seconds:.4g} s measured, {unseen.predicted_s:.4g} s predicted by a fit without it"
        say(f"{row.network}: {times}, factor {unseen.factor:.2f}")
    if found.unseen:
        errors = summary(found.unseen)
        text = f"median error {errors.median:.1%}, 90% within {errors.p90:.1%}"
        worst = f"worst factor {errors.worst_factor:.2f}; {errors.held:.0%} within their intervals"
        say(f"{errors.rows} steps, each predicted by a fit without it: {text}, {worst}")
    put_or_print(out, fitted.profile_text(out, chosen, found, recipe).encode())


@app.command()
def cores(
    boards: Annotated[
        Path | None,
        typer.Argument(metavar="BOARDS", help="A CSV file of sbc-bench results; by default the bundled one."),
    ] = None,
    out: Annotated[Path | None, file_option("File to write; by default the result is printed.")] = None,
) -> None:
    """Fit the rates of core types to measured boards."""
    from edgefl.devices.boards import bundled_boards, read_boards
    from edgefl.devices.code_fit import fit as fit_cores
    from edgefl.devices.code_fit import write as cores_text

    put_or_print(out, cores_text(fit_cores(read_boards(boards or bundled_boards()))).encode())


@app.command("from")
def from_(
    core: Annotated[str, typer.Option(metavar="CORE", help="The fastest core, such as cortex-a76.")],
    mhz: Annotated[float, typer.Option(metavar="MHZ", min=100, max=10_000, help="Its maximum clock rate.")],
    ram_gib: Annotated[
        float | None, typer.Option("--ram-gib", metavar="GIB", min=0.1, max=1024, help="Memory.")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A measured network: mobilenet_v2, cnn-femnist, timm:NAME, …"),
    ] = None,
    ms: Annotated[
        float | None,
        typer.Option(metavar="MS", min=1e-3, max=1e7, help="Its inference time in TFLite, in milliseconds."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the profile; by default its core and clock.")
    ] = None,
    out: Annotated[Path | None, file_option("File to write; by default the result is printed.")] = None,
) -> None:
    """Make a phone's profile from its core and clock.

    The measured time of one network makes the profile's interval much narrower.
    """
    from edgefl.devices.phone_estimate import Measured, estimated_profile, measured_work

    require_finite("--mhz", mhz)
    require_finite("--ram-gib", ram_gib)
    if (network is None) != (ms is None):
        raise ConfigError("--network MODEL and --ms MS are needed together")
    measured = None
    if network is not None and ms is not None:
        measured = Measured(network, measured_work(network), ms / 1e3)
    _check_name(out, name)
    named = out.stem if out is not None else name
    put_or_print(out, estimated_profile(core, mhz, ram_gib, measured, named).encode())


@app.command()
def phones(
    rows: Annotated[
        Path, typer.Option("--phones", metavar="FILE", help="A CSV file of phones' inference times.")
    ],
    networks: Annotated[Path, typer.Option(metavar="FILE", help="A CSV file of the networks' layers.")],
    source: Annotated[str, typer.Option(help="Where the times were published.")],
    out: Annotated[Path | None, file_option("File to write; by default the result is printed.")] = None,
) -> None:
    """Fit the table of phones to measured inference times."""
    from edgefl.devices.phone_file import table_text
    from edgefl.devices.phone_fit import fit as fit_phones
    from edgefl.devices.phone_networks import read_networks
    from edgefl.devices.phone_rows import read_rows
    from edgefl.devices.profiles import phone_table

    measured, layers = read_rows(rows), read_networks(networks)
    table = fit_phones(
        measured, layers, source, phone_table().phones, lambda text: say(f"{text} …", err=True)
    )
    put_or_print(out, table_text(table).encode())


@app.command()
def scale(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A device, or the path of its profile.")],
    like: Annotated[
        str | None, typer.Option(help="The measured device; by default the one with the most similar cores.")
    ] = None,
    runtime: Annotated[str, typer.Option(help="Runtime of the measured device.")] = "torch",
    out: Annotated[Path | None, file_option("File to write; by default the result is printed.")] = None,
) -> None:
    """Scale a measured device's times to another device.

    The scale follows from published figures of both devices.
    """
    from edgefl.devices.scaling import scaled_file

    _check_name(out)
    put_or_print(out, scaled_file(name, like, runtime, None if out is None else out.stem).encode())


@app.command()
def export(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A network, or a fleet for fedscale.")],
    format_name: Annotated[
        str, typer.Argument(metavar="FORMAT", help="One of devtools, fedscale, mahimahi, webpagetest.")
    ],
    out: Annotated[
        Path | None,
        file_option("File to write; missing folders are created. By default the profile is printed."),
    ] = None,
    way: Annotated[
        Literal["down", "up"] | None,
        typer.Option(help="mahimahi: direction of the network; down by default."),
    ] = None,
) -> None:
    """Write a profile in another project's format."""
    from edgefl.devices.formats import write

    written = write(name, format_name, way)
    put_or_print(out, written.content)
    if written.left_out:
        say(f"left out, because {format_name} has no such field: {', '.join(written.left_out)}", err=True)


def _check_name(out: Path | None, name: str | None = None) -> None:
    """Raise `ConfigError` if ``name`` or the stem of ``out`` is not a valid name, or if they differ."""
    from edgefl.devices.schema import NAME_PATTERN, NAME_WORDS

    if out is not None and name not in (None, out.stem):
        raise ConfigError(f"--name {name}: must be the file's name, {out.stem!r}, or be left out")
    for option, given in (("--out", None if out is None else out.stem), ("--name", name)):
        if given is not None and not re.fullmatch(NAME_PATTERN, given):
            raise ConfigError(f"{option}: must be {NAME_WORDS}, got {given!r}")


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write all files to the folder, or no file if one of them cannot be written."""
    for file in files:
        if (folder / file).exists():
            raise ConfigError(f"--out {folder}: {file} exists there; remove it or name another folder")
    try:
        for file, text in files.items():
            put(folder / file, text.encode())
    except ConfigError:
        for file in files:
            with contextlib.suppress(OSError):
                (folder / file).unlink(missing_ok=True)
        raise
    many = [f"wrote {len(files)} files to {folder}"]
    say("\n".join(many if len(files) > LISTED else [f"wrote {folder / file}" for file in files]))


def _list(as_json: bool, search: Search) -> None:
    from edgefl import devices as kinds
    from edgefl.devices.profiles import as_written

    devices = map(kinds.load_device, kinds.device_names())
    found = sorted(filter(search.fits, devices), key=search.place)
    if as_json:
        plain: dict[str, dict[str, Any]] = {}
        listed: list[tuple[Kind, Profile]] = [("devices", device) for device in found]
        if search == Search():
            listed = [(kind, as_written(kind, name)) for name, kind in _bundled().items()]
        for kind, profile in listed:
            plain.setdefault(kind, {})[profile.id] = kinds.to_json(profile)
        say(json.dumps(plain, indent=2))
        return

    from edgefl.results.tables import show, table

    show(_devices_table(found))
    if search != Search():
        return
    networks, fleets = [], []
    for network in map(kinds.load_network, kinds.network_names()):
        down, up = network.down, network.up
        rates = ["trace" if way.trace else way.rate_mbps for way in (down, up)]
        networks.append((network.id, *rates, down.delay_ms + up.delay_ms, down.loss_pct, up.loss_pct))
    for fleet in map(kinds.load_fleet, kinds.fleet_names()):
        fleets.append((fleet.id, fleet.clients, len(fleet.devices), fleet.name))
    show(
        table(
            ("network", ">down, Mbit/s", ">up, Mbit/s", ">round trip, ms", ">loss down, %", ">loss up, %"),
            networks,
        ),
        table(("fleet", ">clients", ">device profiles", "name"), fleets),
    )


def _devices_table(devices: Sequence[Device]) -> RenderableType:
    from edgefl.devices.time_model import FEMNIST_STEP
    from edgefl.results.tables import table

    rows = []
    for device in devices:
        model = _usual(device)
        step_s = None if model is None else model.seconds(FEMNIST_STEP)
        ram = device.memory.ram_mib if device.memory else None
        known = (device.kind, device.year, step_s, ram, device.app_limit_mib, device.network)
        rows.append((device.id, *known, device.name))
    heads = ("device", "class", ">year", ">training step, s", ">RAM, MiB", ">per app, MiB", "network", "name")
    return table(heads, rows, caption=f"Training step: {STEP}. Per app: memory that an app gets.", spare=(7,))


def _usual(device: Device, runtime: str | None = None) -> TimeModel | None:
    """Return the time model of the median device, as `edgefl predict` uses it.

    Return None if only a delay model sets the time.
    """
    from edgefl.devices.prediction import time_model

    return None if device.time_model() is None else time_model(device, runtime)


def _bundled() -> dict[str, Kind]:
    """Return the kind of each bundled profile, keyed by the profile's name."""
    from edgefl.devices.profiles import TYPES, bundled_names

    return {name: kind for kind in TYPES for name in bundled_names(kind)}


def _is_profile(name: str) -> bool:
    """Return True if ``name`` is the name of a bundled profile or the path of a file."""
    from edgefl.devices.profiles import is_path

    return is_path(name) or name in _bundled()


def _loaded(name: str) -> Profile:
    """Load a profile of any kind by name or path; paths in it stay relative, as written."""
    from edgefl.devices.profiles import as_written, is_path, kind_of, read_tables

    bundled = _bundled()
    if not is_path(name) and name not in bundled:
        raise ProfileError(unknown("profile", name, bundled))
    return as_written(kind_of(read_tables(Path(name))) if is_path(name) else bundled[name], name)


def _profile_tables(profile: Profile) -> tuple[RenderableType, ...]:
    """Return a table of the profile's values and uncertainties, a list of sources, and the step times."""
    from rich.table import Table
    from rich.text import Text

    from edgefl.devices import Device, to_json
    from edgefl.results.tables import table

    plain = to_json(profile)
    sources: dict[str, str] = plain.pop("sources", {})
    uncertainty: dict[str, float] = plain.pop("uncertainty", {})
    numbers: dict[str, int] = {}
    rows = []
    for key, value in _flat(plain):
        source, factor = _nearest(key, sources), _nearest(key, uncertainty)
        number = numbers.setdefault(source, len(numbers) + 1) if source is not None else ""
        rows.append((key, value, "" if factor is None else f"{factor:g}x", number))
    numbered = Table.grid(padding=(0, 1), pad_edge=True)
    for source, number in numbers.items():
        numbered.add_row(Text(str(number)), Text(source))
    times = _times(profile) if isinstance(profile, Device) and profile.cpu else ()
    return table(("field", "value", ">within", ">source"), rows), numbered, *times


def _times(device: Device) -> tuple[RenderableType, ...]:
    """Return a table of the step time in each runtime of the device, with the default runtime first."""
    from rich.text import Text

    from edgefl.devices.phones import TFLITE
    from edgefl.devices.time_model import FEMNIST_STEP
    from edgefl.results.tables import table

    trained = [name for name in device.runtime if name != TFLITE]
    models = {name: _usual(device, name) for name in trained} or {"one rate": _usual(device)}
    used = _usual(device)
    rows = []
    for name, model in sorted(models.items(), key=lambda item: (item[1] != used, item[0])):
        if model is not None:
            found = model.predict(FEMNIST_STEP)
            rows.append((name, found.seconds, f"{found.low_s:.3g}–{found.high_s:.3g}"))
    times = table(("runtime", ">training step, s", ">90% interval, s"), rows), Text(f"Training step: {STEP}")
    return (*times, *_inference(device))


def _inference(device: Device) -> list[str]:
    """Return a line with the time of inference, or no line if the device has no runtime for inference."""
    from edgefl.devices.phones import TFLITE
    from edgefl.devices.prediction import time_model
    from edgefl.devices.profiles import phone_table

    if TFLITE not in device.runtime:
        return []
    found = time_model(device, TFLITE).predict(phone_table().typical_work())
    what = f"inference of the typical network of profiles/phones.toml in {TFLITE}"
    return [f"{what}: {found.seconds:.3g} s, 90% within {found.low_s:.3g}–{found.high_s:.3g} s"]


def _flat(plain: Any, key: str = "") -> list[tuple[str, object]]:
    """Return nested values as a list of rows, each with a dotted key and its value."""
    if isinstance(plain, dict):
        return [row for name, v in plain.items() for row in _flat(v, f"{key}.{name}" if key else name)]
    steps = {"temp_c", "freq_scale"}  # entries of ``thermal.trips`` are shown in one row
    if isinstance(plain, list) and plain and all(isinstance(x, dict) and x.keys() == steps for x in plain):
        return [(key, ", ".join(f"{item['temp_c']:g} °C: {item['freq_scale']:g}" for item in plain))]
    if isinstance(plain, list) and any(isinstance(item, dict) for item in plain):
        return [row for place, v in enumerate(plain) for row in _flat(v, f"{key}[{place}]")]
    if not isinstance(plain, list):
        return [(key, plain)]
    lists = (item if isinstance(item, list) else None for item in plain)
    texts = [
        f"{one:g}" if several is None else f"[{_listed([f'{x:g}' for x in several], 3)}]"
        for one, several in zip(plain, lists, strict=True)
    ]
    return [(key, _listed(texts, 4))]


def _listed(texts: list[str], most: int) -> str:
    """Join strings with commas. If there are more than ``most``, show the first two, the last and the count.

    >>> _listed(["1", "2", "3", "4", "5"], 4), _listed(["1", "2"], 4)
    ('1, 2, … 5 (5)', '1, 2')
    """
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[:2])}, … {texts[-1]} ({len(texts)})"


def _nearest(key: str, tables: dict[str, Any]) -> Any:
    """Return the entry for ``key`` or, if there is none, the entry for the innermost enclosing table.

    Return None if neither the key nor an enclosing table has an entry.
    """
    steps = key.replace("[", ".").split(".")
    prefixes = (".".join(steps[:count]) for count in range(len(steps), 0, -1))
    return next((tables[name] for name in prefixes if name in tables), None)
