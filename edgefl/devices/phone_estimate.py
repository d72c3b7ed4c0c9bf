"""Makes a phone's profile from its core and clock, and optionally its RAM and one measured inference time."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from edgefl import toml
from edgefl.devices import phones
from edgefl.devices.code import find_core, reduced
from edgefl.devices.imports import profile_names
from edgefl.devices.phone_profiles import BRIDGE_PROFILE, TRAINING, facts, training
from edgefl.devices.phones import FAMILIES, TFLITE, Costs, Phone, PhoneTable
from edgefl.devices.profiles import load_device, phone_table
from edgefl.devices.scaling import with_runtime
from edgefl.devices.time_model import Prediction, TimeModel, joined
from edgefl.learning.operations import StepWork
from edgefl.validation import wrong

FAR: Final = 10.0
"""A measured time is rejected if it is outside its predicted interval by more than this factor."""


class Measured(NamedTuple):
    """One measured inference."""

    network: str
    work: StepWork
    seconds: float


def estimated_profile(
    core: str,
    mhz: float,
    ram_gib: float | None = None,
    measured: Measured | None = None,
    name: str | None = None,
) -> str:
    """Return the text of a profile file for a phone with this core, clock, RAM and measured inference.

    Raises `ConfigError` for an unknown core, and for a measured time that is not plausible for this core.
    """
    table = phone_table()
    core = known_core(table, core)
    (slug,) = profile_names([f"{core}-{mhz:g}"])
    phone = Phone(
        id=name or slug, model="", name=f"phone with {core} at {mhz:g} MHz", kind="tier",
        core=core, mhz=mhz, ram_gib=ram_gib, units={},
    )  # fmt: skip
    about = phone.about()
    known = f"{core}, {mhz:g} MHz" + (f", {ram_gib:g} GiB" if ram_gib else "")
    costs, model = phones.prior(table, about), phones.of_core(table, about)
    if measured is not None:
        _check_plausible(measured, model.predict(measured.work), known)
        known += f" and {measured.seconds * 1e3:g} ms of {measured.network}"
        costs = phones.observed(costs, table.amounts, measured.work, measured.seconds)
        model = phones.of_one_network(table, about, measured.work, measured.seconds)
    return _text(table, phone, costs, model, f"derived: edgefl profiles from, by {known}; {table.source}")


def _check_plausible(measured: Measured, expected: Prediction, known: str) -> None:
    if expected.low_s / FAR <= measured.seconds <= expected.high_s * FAR:
        return
    times_s = (expected.low_s, expected.high_s, expected.low_s / FAR, expected.high_s * FAR, measured.seconds)
    low, high, least, most, got = (float(f"{time_s * 1e3:.3g}") for time_s in times_s)
    why = f"{low:g} to {high:g} milliseconds are expected of {known}"
    raise wrong("--ms", f"from {least:g} to {most:g} for {measured.network} ({why})", got)


def known_core(table: PhoneTable, name: str) -> str:
    """Return a core's name as spelled in the table of phones, or else as spelled by `find_core`."""
    cores = {reduced(core): core for core in (*FAMILIES, *(phone.core for phone in table.phones)) if core}
    plain = reduced(name.partition("(")[0])
    short = plain.removesuffix("gold").removesuffix("prime")  # the table has "Kryo 485" for both
    return cores.get(plain) or cores.get(short) or find_core(name)


def _text(table: PhoneTable, phone: Phone, costs: Costs, model: TimeModel, source: str) -> str:
    bridge = load_device(BRIDGE_PROFILE).runtime[TRAINING]
    trains, slower = training(table, costs, bridge)
    typical = model.error_factor_of(table.typical_work())
    factor = float(f"{joined(trains.error_factor, typical):.4g}")
    trains = msgspec.structs.replace(trains, error_factor=factor)
    text = toml.write(facts(phone, trains, source))
    about = f"derived: {TRAINING} of {BRIDGE_PROFILE} x {slower:.3g}, the ratio of inference times"
    return with_runtime(with_runtime(text, TFLITE, model, source), TRAINING, trains, about)


def measured_work(network: str, input_shape: tuple[int, ...] | None = None) -> StepWork:
    """Count the work of one inference of a network. Raises `ConfigError` if the network is unknown."""
    from edgefl.devices.prediction import traced
    from edgefl.learning.benchmark_networks import NAMED
    from edgefl.learning.models import model_to_trace

    if network in NAMED:
        make, usual = NAMED[network]
        module, shape = make(), input_shape or usual
    else:
        module, shape = model_to_trace(network, input_shape)
    return traced(module, shape, inference=True, runtime=TFLITE).at(1)
