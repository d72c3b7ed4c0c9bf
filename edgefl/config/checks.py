"""What is allowed in an experiment: types by the classes themselves, figures by one table of rules."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import inspect

from edgefl.errors import ConfigError
from edgefl.experiment import Clock, Experiment
from edgefl.toml import literal

MAX_CLIENTS = 100_000
MAX_COUNT = 10**9
MAX_WORKERS = 256
"""Each is a process that computes; results are the same for any number of them."""
MAX_FLOAT32 = 3e38


class Fault(ConfigError):
    """Something wrong with one dotted ``key``."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def shape(tables: Any) -> None:
    """Raise a `Fault` at the first key of ``tables`` that is unknown, missing or of another type."""
    _shape(tables, inspect.type_info(Experiment), "")


def figures(tables: Any) -> None:
    """Raise a `Fault` at the first figure outside its bounds, or at keys that contradict each other.

    ``tables`` have the right shape, and ``fleet.devices`` is a table.
    """
    _storable(tables, "")
    for key, value in _leaves(tables, ""):
        rule = _RULES.get(key)
        if rule is not None and not rule[0](value):
            raise Fault(key, f"{key}: must be {rule[1]}, got {shown(value)}")
    _counts(tables["fleet"]["devices"])
    _churn(tables["fleet"].get("churn", {}))
    _charge(tables["fleet"])
    _cells(tables["fleet"])
    _name(tables.get("name", "experiment"))
    _training(tables.get("training", {}))
    _plain_sgd(tables)
    _device(tables)
    if not tables.get("stop"):
        raise Fault("stop", f"stop: no end given; give at least one of: {', '.join(_fields('stop'))}")
    _data(tables.get("data", {}), tables["fleet"]["devices"])
    strategy = tables.get("strategy", {"name": "fedbuff"})
    if not isinstance(strategy["name"], str):
        got = shown(strategy["name"])
        raise Fault("strategy.name", f"strategy.name: must be a string, such as 'fedbuff', got {got}")


def shown(value: Any) -> str:
    """``value`` as the user would write it in TOML, at most 60 characters."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "an array"
    try:
        text = repr(value) if isinstance(value, str) else literal(value)
    except TypeError:
        text = f"a {type(value).__name__}"
    except ValueError:  # an integer of thousands of digits
        text = "a very long integer"
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- types -------------------------------------------------------------------------------------


def _shape(value: Any, kind: inspect.Type, key: str) -> None:
    if isinstance(kind, inspect.StructType):
        _table(value, kind, key)
    elif isinstance(kind, inspect.DictType) and isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise Fault(key, f"{key}: keys must be strings, got {shown(name)}")
            _shape(item, kind.value_type, f"{key}.{name}")
    elif isinstance(kind, inspect.ListType) and isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            _shape(item, kind.item_type, f"{key}[{place}]")
    elif isinstance(kind, inspect.UnionType):
        _union(value, kind, key)
    elif isinstance(kind, inspect.LiteralType) and isinstance(value, str):
        _choice(value, kind.values, key)
    elif not _fits(value, kind):
        raise Fault(key, f"{key}: expected {_expected(kind)}, got {shown(value)}")


def _table(value: Any, kind: inspect.StructType, key: str) -> None:
    if not isinstance(value, Mapping):
        raise Fault(key, f"{key or 'experiment'}: expected a table, got {shown(value)}")
    fields = {field.name: field for field in kind.fields}
    for name in value:
        if name not in fields:
            raise _unknown(_join(key, str(name)), key, fields)
    for name, field in fields.items():
        if name in value:
            _shape(value[name], field.type, _join(key, name))
        elif field.required:
            missing = _join(key, name)
            raise Fault(missing, f"{missing}: missing; give {_MISSING.get(missing, 'it')}")


def _union(value: Any, kind: inspect.UnionType, key: str) -> None:
    fitting = [part for part in kind.types if _fits(value, part)]
    if not fitting:
        raise Fault(key, f"{key}: expected {_expected(kind)}, got {shown(value)}")
    _shape(value, fitting[0], key)


def _choice(value: str, allowed: Iterable[Any], key: str) -> None:
    words = [str(word) for word in allowed]
    if value not in words:
        raise Fault(key, f"{key}: {value!r} is not allowed;{_near(value, words)} allowed: {', '.join(words)}")


def _fits(value: Any, kind: inspect.Type) -> bool:
    """Whether ``value`` is of that type at its top."""
    if isinstance(value, bool):
        return isinstance(kind, (inspect.BoolType, inspect.AnyType))
    if isinstance(kind, inspect.LiteralType):
        return value in kind.values
    allowed = _PYTHON.get(type(kind))
    return allowed is None or isinstance(value, allowed)


_PYTHON: dict[type[inspect.Type], type | tuple[type, ...]] = {
    inspect.BoolType: bool,
    inspect.IntType: int,
    inspect.FloatType: (int, float),
    inspect.StrType: str,
    inspect.NoneType: type(None),
    inspect.DictType: Mapping,
    inspect.StructType: Mapping,
    inspect.ListType: (list, tuple),
}

_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.StrType: "a string",
    inspect.DictType: "a table",
    inspect.StructType: "a table",
    inspect.ListType: "an array",
}


def _expected(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_expected(part) for part in kind.types if not isinstance(part, inspect.NoneType))
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(repr(word) for word in kind.values)
    return _WORDS[type(kind)]


# ---- names -------------------------------------------------------------------------------------

_MISSING = {
    "fleet": "a [fleet] table with devices = { PROFILE = COUNT }",
    "fleet.devices": "{ PROFILE = COUNT } or the name of a fleet file",
}


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _near(got: str, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(got, list(allowed), n=1, cutoff=0.6)
    return f" did you mean {near[0]!r}?" if near else ""


def _unknown(dotted: str, table: str, fields: Iterable[str]) -> Fault:
    """The nearest known key: of the same name in any table, else of its initials or like it in this one."""
    name = dotted.rpartition(".")[2]
    here = [_join(table, field) for field in fields]
    known = [key for key in _all_keys() if key.rpartition(".")[2] == name]
    initials = _join(table, "".join(word[:1] for word in name.split("_")))
    if not known and len(name) > 2 and initials in here:
        known = [initials]
    hint = f" did you mean {known[0]!r}?" if known else _near(dotted, here)
    where = f"in [{table}]" if table else "at the top"
    return Fault(dotted, f"unknown key {dotted!r};{hint} allowed {where}: {', '.join(sorted(fields))}")


def _all_keys() -> list[str]:
    """Every key with a dot in it, of inner tables too."""
    return [key for key in _keys(inspect.type_info(Experiment), "") if "." in key]


def _keys(kind: inspect.Type, key: str) -> Iterator[str]:
    parts = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    tables = [part for part in parts if isinstance(part, inspect.StructType)]
    if key and not tables:
        yield key
    for table in tables:
        for field in table.fields:
            yield from _keys(field.type, _join(key, field.name))


def _fields(table: str) -> list[str]:
    return [key.partition(".")[2] for key in _all_keys() if key.partition(".")[0] == table]


# ---- figures -----------------------------------------------------------------------------------


def _positive(value: Any) -> bool:
    return not isinstance(value, (int, float)) or 0 < value < math.inf


def _not_negative(value: Any) -> bool:
    return not isinstance(value, (int, float)) or 0 <= value < math.inf


def _count(value: Any) -> bool:
    return not isinstance(value, int) or 1 <= value <= MAX_COUNT


_Rule = tuple[Callable[[Any], bool], str]
_POSITIVE: _Rule = (_positive, "a finite number greater than 0")
_NOT_NEGATIVE: _Rule = (_not_negative, "a finite number of at least 0")
_STEP: _Rule = (lambda v: 0 < v <= MAX_FLOAT32, f"a number greater than 0 and at most {MAX_FLOAT32:g}")
_COUNT: _Rule = (_count, f"a whole number from 1 to {MAX_COUNT}")

_RULES: dict[str, _Rule] = {
    "seed": (lambda v: 0 <= v < 2**63, f"a whole number from 0 to {2**63 - 1}"),
    "fleet.rejoin_s": _NOT_NEGATIVE,
    "fleet.join_spread_s": _NOT_NEGATIVE,
    "fleet.cells.count": _COUNT,
    "fleet.cells.uplink_mbps": _POSITIVE,
    "fleet.cells.downlink_mbps": _POSITIVE,
    "fleet.charge": (lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "fleet.churn.mean_online_s": _POSITIVE,
    "fleet.churn.mean_offline_s": _POSITIVE,
    "fleet.churn.die_per_trip": (lambda v: 0 <= v < 1, "a number of at least 0 and below 1"),
    "data.alpha": _POSITIVE,
    "data.classes_per_client": _COUNT,
    "data.test_fraction": (lambda v: 0 < v < 1, "a number between 0 and 1, both excluded"),
    "data.max_examples": _COUNT,
    "data.image_size": (lambda v: 1 <= v <= 4096, "a whole number from 1 to 4096"),
    "model.flops_per_example": _NOT_NEGATIVE,
    "training.steps": _COUNT,
    "training.epochs": _COUNT,
    "training.batch_size": _COUNT,
    "training.lr": _STEP,
    "training.momentum": (lambda v: 0 <= v < 1, "a number of at least 0 and below 1"),
    "training.weight_decay": (
        lambda v: 0 <= v <= MAX_FLOAT32,
        f"a number of at least 0 and at most {MAX_FLOAT32:g}",
    ),
    "clock.workers": (lambda v: 1 <= v <= MAX_WORKERS, f"a whole number from 1 to {MAX_WORKERS}"),
    "clock.time_scale": _POSITIVE,
    "server.heartbeat_s": _POSITIVE,
    "evaluation.every_versions": _COUNT,
    "evaluation.max_examples": _COUNT,
    "checkpoint.every_s": _POSITIVE,
    "stop.versions": _COUNT,
    "stop.trips": _COUNT,
    "stop.emulated_s": _POSITIVE,
    "stop.wall_s": _POSITIVE,
    "stop.accuracy": (lambda v: 0 < v <= 1, "a number above 0 and at most 1"),
}


def _leaves(tables: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        dotted = _join(key, name)
        if isinstance(value, Mapping):
            yield from _leaves(value, dotted)
        else:
            yield dotted, value


def _counts(devices: Mapping[str, int]) -> None:
    if not devices:
        raise Fault("fleet.devices", "fleet.devices: empty; give at least one PROFILE = COUNT")
    for name, count in devices.items():
        if not 1 <= count <= MAX_CLIENTS:
            key = f"fleet.devices.{name}"
            raise Fault(key, f"{key}: must be a whole number from 1 to {MAX_CLIENTS}, got {shown(count)}")
    if sum(devices.values()) > MAX_CLIENTS:
        total = sum(devices.values())
        raise Fault("fleet.devices", f"fleet.devices: at most {MAX_CLIENTS} clients in all, got {total}")


def _churn(churn: Mapping[str, Any]) -> None:
    pair = ("mean_online_s", "mean_offline_s")
    missing = [name for name in pair if churn.get(name) is None]
    if len(missing) == 1:
        key = f"fleet.churn.{missing[0]}"
        raise Fault(key, f"{key}: missing; {' and '.join(pair)} only work together")


def _charge(fleet: Mapping[str, Any]) -> None:
    charge = fleet.get("charge", 1.0)
    if charge != 1.0 and not fleet.get("battery"):
        text = f"fleet.charge: has no effect without fleet.battery = true, got {shown(charge)}"
        raise Fault("fleet.charge", text)


def _cells(fleet: Mapping[str, Any]) -> None:
    cells = fleet.get("cells")
    if cells is None:
        return
    if cells.get("uplink_mbps") is None and cells.get("downlink_mbps") is None:
        raise Fault("fleet.cells", "fleet.cells: give uplink_mbps, downlink_mbps, or both")
    for name in ("thermal", "battery"):
        if fleet.get(name):
            text = f"fleet.cells: not together with fleet.{name}, whose trips must not depend on each other"
            raise Fault("fleet.cells", text)


def _name(name: str) -> None:
    if not 0 < len(name.encode()) <= 100 or "/" in name or name.startswith(".") or not name.isprintable():
        rule = "1 to 100 bytes that name a folder: printable, no '/', no '.' at the start"
        raise Fault("name", f"name: must be {rule}, got {shown(name)}")


def _device(tables: Mapping[str, Any]) -> None:
    clock = tables.get("clock", {}).get("kind", Clock().kind)
    if tables.get("training", {}).get("device", "cpu") != "cpu" and clock == "wall":
        raise Fault(
            "training.device",
            "training.device: must be 'cpu' where clock.kind = 'wall' (phones are held to their CPU's pace), "
            "got 'cuda'",
        )


def _training(training: Mapping[str, Any]) -> None:
    if training.get("steps") is not None and training.get("epochs") is not None:
        got = f"steps = {training['steps']} and epochs = {training['epochs']}"
        raise Fault("training.steps", f"training: give steps or epochs, not both; got {got}")


def _plain_sgd(tables: Mapping[str, Any]) -> None:
    """FedNova divides by the number of steps, which is its normaliser for plain SGD alone."""
    training = tables.get("training", {})
    if tables.get("strategy", {}).get("name") != "fednova":
        return
    for key, off in (("momentum", 0.0), ("lr_normalization", False)):
        if (got := training.get(key, off)) != off:
            raise Fault(
                f"training.{key}", f"training.{key}: must be {shown(off)} with fednova, got {shown(got)}"
            )


def _data(data: Mapping[str, Any], devices: Mapping[str, int]) -> None:
    by_device = data.get("partition") == "by-device"
    labels: Mapping[str, Any] = data.get("labels", {})
    if by_device and not labels:
        raise Fault("data.labels", "data.labels: missing; partition 'by-device' needs PROFILE = [LABEL, ...]")
    for name, held in labels.items():
        key = f"data.labels.{name}"
        if name not in devices:
            have = ", ".join(sorted(devices))
            raise Fault(key, f"{key}: not in fleet.devices;{_near(name, devices)} have: {have}")
        if not held or len(set(held)) < len(held) or min(held) < 0:
            got = literal(list(held))[:60]
            raise Fault(key, f"{key}: must be labels of at least 0, each once, got {got}")


def _storable(value: Any, key: str) -> None:
    """Raise a `Fault` if a value cannot be written to the run's own TOML file and read back."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise Fault(key, f"{key}: keys must be strings, got {shown(name)}")
            _storable(name, key)
            _storable(item, _join(key, name))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            _storable(item, f"{key}[{place}]")
    elif isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise Fault(key, f"{key}: expected text that UTF-8 can hold, got {shown(value)}")
    elif not isinstance(value, (bool, int, float)):
        allowed = "a string, number, true or false, array or table"
        raise Fault(key, f"{key}: expected {allowed}, got {shown(value)}")
