"""Validation that types cannot express: keys that depend on each other, or on the profiles that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from edgefl.errors import ProfileError, listed, near, unknown
from edgefl.experiment import (
    MAX_CLIENTS,
    MAX_PROCESSES,
    Attackers,
    Evaluation,
    Experiment,
    Fleet,
    Privacy,
    Secure,
    Stop,
    Training,
)
from edgefl.validation import Fault, join, shown, wrong


class ProfileFault(Fault, ProfileError):
    """The profile named by ``key`` is missing or invalid."""


def _at(key: str, text: str, kind: type[Fault] = Fault) -> Fault:
    return kind(key, f"{key}: {text}")


def _no_effect(key: str, needs: str, got: Any) -> Fault:
    return _at(key, f"has no effect without {needs}, got {shown(got)}")


def check_relations(found: Experiment) -> None:
    """Raise a `Fault` if keys contradict each other. ``fleet.devices`` must be a table, not a file's name."""
    assert isinstance(found.fleet.devices, dict)
    virtual = found.clock.kind == "virtual"
    most = MAX_CLIENTS if virtual else MAX_PROCESSES
    if (total := sum(found.fleet.devices.values())) > most:
        where = "" if virtual else " under the wall clock (each is a process)"
        raise _at("fleet.devices", f"must have at most {most} clients in all{where}, got {total}")
    _check_fleet(found.fleet)
    _check_attackers(found.fleet.attackers, virtual=virtual)
    _check_name(found.name)
    _check_training(found)
    _check_growth(found)
    _check_evaluation(found)
    _check_stop(found.stop)
    _check_privacy(found.privacy, found.server.update_format)
    _check_secure(found.server.secure)
    _check_partition(found, found.fleet.devices)
    if not isinstance(found.strategy["name"], str):
        raise wrong("strategy.name", "a string, such as 'fedbuff'", found.strategy["name"])


def _check_fleet(fleet: Fleet) -> None:
    pair = ("mean_online_s", "mean_offline_s")
    missing = [f"fleet.churn.{name}" for name in pair if getattr(fleet.churn, name) is None]
    if len(missing) == 1:
        raise _at(missing[0], f"missing; {' and '.join(pair)} only work together")
    if fleet.charge != 1.0 and not fleet.battery:
        raise _no_effect("fleet.charge", "fleet.battery = true", fleet.charge)


def _check_attackers(rules: Attackers | None, *, virtual: bool) -> None:
    if rules is None:
        return
    if rules.z is not None and rules.kind != "alie":
        raise _no_effect("fleet.attackers.z", "fleet.attackers.kind = 'alie'", rules.z)
    if rules.scale != 1.0 and (rules.kind in ("label-flip", "alie") or ":" in rules.kind):
        raise _no_effect("fleet.attackers.scale", "kind 'sign-flip' or 'gaussian'", rules.scale)
    if rules.kind == "alie" and not virtual:
        why = "another kind if clock.kind = 'wall' (an 'alie' attacker trains as several clients)"
        raise wrong("fleet.attackers.kind", why, rules.kind)


def _check_name(name: str) -> None:
    if not 0 < len(name.encode()) <= 100 or "/" in name or name.startswith(".") or not name.isprintable():
        rule = "1 to 100 bytes of printable text, without '/' or a leading '.' (it names a folder)"
        raise wrong("name", rule, name)


def _check_training(found: Experiment) -> None:
    training = found.training
    if training.steps is not None and training.epochs is not None:
        got = f"steps = {training.steps} and epochs = {training.epochs}"
        raise Fault("training.steps", f"training: give steps or epochs, not both; got {got}")
    # FedNova normalises by the number of steps, which is correct for plain SGD only.
    for key, off in (("momentum", 0.0), ("lr_normalization", False)):
        if found.strategy["name"] == "fednova" and getattr(training, key) != off:
            raise wrong(f"training.{key}", f"{shown(off)} with fednova", getattr(training, key))
    if training.device != "cpu" and found.clock.kind == "wall":
        rule = "'cpu' if clock.kind = 'wall' (clients are paced by their CPU time)"
        raise wrong("training.device", rule, training.device)
    if training.function is not None and training.function.startswith("flower:"):
        _check_flower(found)


def _check_flower(found: Experiment) -> None:
    """Raise a `Fault` for a key that a Flower app, which loads its own examples, cannot obey."""
    attackers = found.fleet.attackers
    for key, given in (
        ("fleet.attackers.kind", attackers is not None and attackers.kind == "label-flip"),
        ("data.growth", found.data.growth is not None),
        ("data.client_test_fraction", found.data.client_test_fraction > 0.0),
    ):
        if given:
            raise _at(key, "has no effect on a Flower app (training.function), which loads its own examples")
    for name in ("momentum", "weight_decay", "lr_normalization"):
        if (got := getattr(found.training, name)) != getattr(Training(), name):
            raise _at(
                f"training.{name}", f"is not sent to a Flower app (training.function), got {shown(got)}"
            )


def _check_growth(found: Experiment) -> None:
    growth = found.data.growth
    if growth is None:
        return
    if growth.least_per_trip > growth.most_per_trip:
        limit = f"at most data.growth.most_per_trip = {growth.most_per_trip:g}"
        raise wrong("data.growth.least_per_trip", limit, growth.least_per_trip)
    for key, given in (("privacy", found.privacy), ("server.secure", found.server.secure)):
        if given is not None:
            why = "the server would have to know how many examples each client has on each trip"
            raise _at(key, f"cannot be combined with data.growth: {why}")


def _check_evaluation(found: Experiment) -> None:
    if found.evaluation.every_trips is not None and found.evaluation.every_s is not None:
        raise Fault("evaluation.every_s", "evaluation: give every_trips or every_s, not both")
    for name in ("every_trips", "every_s"):
        versions = found.evaluation.every_versions
        if getattr(found.evaluation, name) is not None and versions != Evaluation().every_versions:
            text = f"evaluation: give every_versions or {name}, not both"
            raise Fault("evaluation.every_versions", f"{text}; got every_versions = {versions}")
    if found.evaluation.clients != "none" and not found.data.client_test_fraction:
        needs = "data.client_test_fraction above 0 (examples that clients hold out)"
        raise _at("evaluation.clients", f"needs {needs}")
    if found.data.evaluate_on == "validation" and not found.data.validation_fraction:
        raise _at("data.evaluate_on", "'validation' needs data.validation_fraction above 0")


def _check_stop(stop: Stop) -> None:
    ends = [name for name in stop.__struct_fields__ if name not in ("min_improvement", "accuracy_over")]
    if all(getattr(stop, name) is None for name in ends):
        raise _at("stop", f"has no stopping condition; give at least one of: {', '.join(ends)}")
    if stop.min_improvement and stop.patience_evaluations is None:
        raise _no_effect("stop.min_improvement", "stop.patience_evaluations", stop.min_improvement)
    if stop.accuracy_over != 1 and stop.accuracy is None:
        raise _no_effect("stop.accuracy_over", "stop.accuracy", stop.accuracy_over)
    goal = stop.metric
    if goal is not None and (goal.at_least is None) == (goal.at_most is None):
        raise _at("stop.metric", "give either at_least or at_most")
    if goal is not None and goal.name == "accuracy":
        raise _at("stop.metric.name", "accuracy has a key of its own: use stop.accuracy")


def _check_secure(secure: Secure | None) -> None:
    if secure is None:
        return
    kinds = dict.fromkeys(("holders", "recover", "private"), ("masks",)) | {"clip": ("masks", "pairwise")}
    for name, used_by in kinds.items():
        if secure.kind not in used_by and (got := getattr(secure, name)) != getattr(Secure(), name):
            needs = f"server.secure.kind = {' or '.join(map(shown, used_by))}"
            raise _no_effect(f"server.secure.{name}", needs, got)


def _check_privacy(privacy: Privacy | None, update_format: str) -> None:
    if privacy is None:
        return
    unused = [] if privacy.mechanism == "tree" else ["honaker", "restart_every"]
    unused += [] if privacy.quantile is not None else ["quantile_noise", "quantile_rate"]
    for name in unused:
        if (got := getattr(privacy, name)) != getattr(Privacy(clip_norm=1.0), name):
            needs = "privacy.quantile" if name.startswith("quantile") else "privacy.mechanism = 'tree'"
            raise _no_effect(f"privacy.{name}", needs, got)
    if privacy.local_noise_multiplier:
        _check_local(privacy)
        if privacy.central and update_format != "float32":
            why = "'float32' with both noise_multiplier and local_noise_multiplier (rounding a client's noise"
            raise wrong("server.update_format", f"{why} can change its update by more than L)", update_format)


def _check_local(privacy: Privacy) -> None:
    if privacy.max_participations is None:
        needs = "on how many trips local_noise_multiplier protects a client"
        raise _at("privacy.max_participations", f"missing; it sets {needs}")
    if privacy.quantile is not None:
        why = "unset with local_noise_multiplier (the server sees only noisy norms)"
        raise wrong("privacy.quantile", why, privacy.quantile)
    for name in () if privacy.central else ("mechanism", "restart_every", "honaker"):
        if (got := getattr(privacy, name)) != getattr(Privacy(clip_norm=1.0), name):
            raise _no_effect(f"privacy.{name}", "privacy.noise_multiplier above 0", got)


def check_measured(stop: Stop, measured: Mapping[str, tuple[float, float]]) -> None:
    """Raise a `Fault` if ``stop`` names a metric that is not evaluated, or a target that cannot be reached.

    ``measured`` maps the name of each evaluated metric to its smallest and largest possible value.
    """
    have = ", ".join(sorted(measured))
    if stop.accuracy is not None and "accuracy" not in measured:
        instead = 'use stop.metric = { name = "loss", at_most = … }'
        raise _at("stop.accuracy", f"accuracy is not evaluated here, only {have}; {instead}")
    if stop.metric is not None and stop.metric.name not in measured:
        raise _at("stop.metric.name", unknown("measure", stop.metric.name, measured))
    if (goal := stop.metric) is not None:
        least, most = measured[goal.name]
        if goal.at_least is not None and not goal.met(most):
            raise wrong("stop.metric.at_least", f"at most {most:g}, the largest {goal.name}", goal.at_least)
        if goal.at_most is not None and not goal.met(least):
            raise wrong("stop.metric.at_most", f"at least {least:g}, the smallest {goal.name}", goal.at_most)


def _check_partition(found: Experiment, devices: Mapping[str, int]) -> None:
    if found.data.partition_args and not found.data.partition.startswith("flwr:"):
        raise _at("data.partition_args", "only partitions 'flwr:…' take arguments")
    if found.data.partition == "by-device" and not found.data.labels:
        raise _at("data.labels", "missing; partition 'by-device' needs PROFILE = [LABEL, ...]")
    for name, held in found.data.labels.items():
        key = join("data.labels", name)
        if name not in devices:
            raise _at(key, f"is not in fleet.devices;{near(name, devices)} available: {listed(devices)}")
        if not held or len(set(held)) < len(held) or min(held) < 0:
            raise wrong(key, "distinct labels of at least 0", held)


def check_storable(value: Any, key: str = "") -> None:
    """Raise a `Fault` if a value cannot be written to the run's TOML file and read back."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise _at(key, f"keys must be strings, got {shown(name)}")
            check_storable(name, key)
            check_storable(item, join(key, name))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            check_storable(item, f"{key}[{place}]")
    elif isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise wrong(key, "text that can be encoded as UTF-8", value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise wrong(key, "a 64-bit integer", value)
    elif not isinstance(value, (bool, int, float)):
        raise wrong(key, "a string, number, true or false, array or table", value)


# ---- profiles ----------------------------------------------------------------------------------


def check_profiles(fleet: Fleet) -> None:
    """Raise a `ProfileFault` if a resolved ``[fleet]`` names a profile that is missing or incomplete."""
    from edgefl.devices import load_device
    from edgefl.devices.presence import read_availability

    devices, network = fleet.devices, fleet.network
    assert isinstance(devices, dict)
    for name in devices:
        _try(load_device, name, "fleet.devices", f"fleet.devices.{name}")
    _check_ids(devices)
    _check_effects(fleet, devices)
    if fleet.availability is not None:
        _try(read_availability, fleet.availability, "fleet.availability")
    if isinstance(network, str):
        _try(_read_network, network, "fleet.network")
    else:
        for name, net in network.items():
            if name not in devices:
                text = unknown("device in the fleet", name, devices)
                raise _at(f"fleet.network.{name}", text, ProfileFault)
            _try(_read_network, net, f"fleet.network.{name}")
        if missing := listed(name for name in devices if name not in network):
            text = f"has no entry for {missing}; give one for each device, or one network for all"
            raise _at("fleet.network", text, ProfileFault)


def _check_ids(names: Iterable[str]) -> None:
    """Raise a `ProfileFault` if two device profiles have the same id, because results are keyed by id."""
    from edgefl.devices import load_device

    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(own := load_device(name).id, name)
        if other != name:
            text = f"the id {own!r} is also that of {other!r}; rename the file and the id in it"
            raise _at(f"fleet.devices.{name}", text, ProfileFault)


def _read_network(name: str) -> None:
    """Read a network profile and the traces that it replays."""
    from edgefl.devices import load_network
    from edgefl.devices.link import read_trace

    network = load_network(name)
    for way in (network.down, network.up):
        if way.trace is not None:
            read_trace(way.trace)


def _check_effects(fleet: Fleet, names: Iterable[str]) -> None:
    """Raise a `ProfileFault` if a fleet setting has no effect on any of the fleet's profiles."""
    from edgefl.devices import load_device
    from edgefl.devices.condition import power_of
    from edgefl.devices.phones import TFLITE
    from edgefl.devices.thermal import thermal_model

    devices = [load_device(name) for name in names]
    runtimes = sorted({runtime for device in devices for runtime in device.runtime})
    if fleet.runtime is not None and fleet.runtime not in runtimes:
        raise _at("fleet.runtime", unknown("runtime of the fleet", fleet.runtime, runtimes), ProfileFault)
    for device in devices:
        used = fleet.runtime if fleet.runtime in device.runtime else device.runtime_name
        if used == TFLITE and not device.timed_by_draw:
            why = f"{device.id} would use {TFLITE!r}, which has only inference times, and clients train"
            others = listed(name for name in runtimes if name != TFLITE) or "none"
            raise _at("fleet.runtime", f"{why}; available: {others}", ProfileFault)
    if fleet.model_errors == "drawn" and all(one.exact or one.timed_by_draw for one in devices):
        why = "has no effect, since no compute time of the fleet's devices has an error interval"
        raise _at("fleet.model_errors", f"'drawn' (also set by --fleets) {why}", ProfileFault)
    if fleet.thermal and not any(thermal_model(device) for device in devices):
        needs = "thermal.trips, ambient_c, r_c_per_w, tau_s and busy_w"
        raise _at("fleet.thermal", f"no device of the fleet gives all of {needs}", ProfileFault)
    if fleet.battery:
        for name in names:
            _try(lambda name: power_of(load_device(name)), name, "fleet.battery")
        if not any(device.battery for device in devices):
            raise _at("fleet.battery", "no device of the fleet has a [battery]", ProfileFault)
    leaves = fleet.availability or fleet.battery or fleet.thermal or fleet.churn.mean_online_s is not None
    if fleet.on_leave == "finish" and not leaves and not any(device.availability for device in devices):
        ways = "fleet.churn.mean_online_s, fleet.availability, fleet.battery or fleet.thermal"
        text = f"has no effect if phones never leave; give {ways}"
        raise _at("fleet.on_leave", text, ProfileFault)


def _try(load: Callable[[str], object], name: str, label: str, key: str | None = None) -> None:
    try:
        load(name)
    except (ProfileError, ValueError) as error:  # ValueError if a path contains a NUL byte
        raise ProfileFault(key or label, f"{label}: {error}") from None
