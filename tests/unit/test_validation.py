"""Tests of the validator of experiments, profiles and strategies."""

from __future__ import annotations

import copy
import dataclasses
from typing import Annotated, Any, Literal

import msgspec
import pytest

from edgefl.validation import Fault, convert, faults, shown, wrong


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alpha: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    beta_weight: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None


class Table(msgspec.Struct, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(ge=1, le=9)]
    inner: Inner = Inner()
    kind: Literal["wall", "virtual"] = "wall"
    scale: Annotated[float, msgspec.Meta(gt=0)] | Literal["auto"] = "auto"
    devices: Annotated[dict[str, int] | str, msgspec.Meta(description="counts or a name")] = {}
    pairs: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(min_length=1)] = ((1, 2),)
    label: Annotated[str, msgspec.Meta(min_length=1)] = "a"
    on: bool = False
    of_key: int | None = msgspec.field(default=None, name="key")
    anything: Any = None


@dataclasses.dataclass(frozen=True)
class Strategy:
    size: Annotated[int, msgspec.Meta(ge=1)] = 1


def test_a_fault_can_be_passed_to_another_process() -> None:
    """Regression: `multiprocessing.Pool.map` waited forever for a worker that raised a fault.

    `copy.copy` rebuilds an exception in the same way as `pickle` does in another process.
    """
    found = copy.copy(Fault("stop.trips", "stop.trips: is wrong"))
    assert (type(found), found.key, str(found)) == (Fault, "stop.trips", "stop.trips: is wrong")


def texts(value: Any, of: Any = Table, key: str = "") -> list[str]:
    found = list(faults(value, of, key))
    assert all(fault.key in str(fault) for fault in found)
    return [str(fault) for fault in found]


NUMBER = "a finite number above 0"
COUNT = "a whole number from 1 to 9"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"count": 0}, f"count: must be {COUNT}, got 0"),
        ({"count": 1.0}, f"count: must be {COUNT}, got 1.0"),
        ({"count": True}, f"count: must be {COUNT}, got true"),
        ({"count": 10**5000}, f"count: must be {COUNT}, got a very long integer"),
        ({"inner": {"alpha": 0}}, f"inner.alpha: must be {NUMBER}, got 0"),
        ({"inner": {"alpha": float("inf")}}, f"inner.alpha: must be {NUMBER}, got inf"),
        ({"inner": {"alpha": float("nan")}}, f"inner.alpha: must be {NUMBER}, got nan"),
        ({"inner": {"alpha": 10**400}}, f"inner.alpha: must be {NUMBER}, got 100000"),
        (
            {"inner": {"beta_weight": 1}},
            "inner.beta_weight: must be a number of at least 0 and below 1, got 1",
        ),
        ({"inner": 3}, "inner: must be a table, got 3"),
        (
            {"inner": {"alhpa": 1}},
            "unknown key 'inner.alhpa'; did you mean 'inner.alpha'? allowed in [inner]:",
        ),
        ({"inner": {"kind": 1}}, "unknown key 'inner.kind'; allowed in [inner]: alpha, beta_weight"),
        (
            {"alpha": 1},
            "unknown key 'alpha'; did you mean 'inner.alpha'? allowed at the top level: anything, count,",
        ),
        ({"kind": "wal"}, "kind: must be 'virtual' or 'wall', got 'wal'; did you mean 'wall'?"),
        ({"scale": -0.5}, f"scale: must be {NUMBER} or 'auto', got -0.5"),
        ({"scale": "fast"}, f"scale: must be {NUMBER} or 'auto', got 'fast'"),
        ({"devices": 3}, "devices: must be counts or a name, got 3"),
        ({"devices": {"pi-4": "x"}}, "devices.pi-4: must be a whole number, got 'x'"),
        ({"devices": {3: 3}}, "devices: keys must be strings, got 3"),
        ({"pairs": []}, "pairs: must be an array that is not empty, got []"),
        ({"pairs": [[1, 2], [1, 2, 3]]}, "pairs[1]: must be an array of 2, got [1, 2, 3]"),
        ({"pairs": [[1, 2], [1, "x"]]}, "pairs[1][1]: must be a whole number, got 'x'"),
        ({"label": ""}, "label: must be a string that is not empty, got ''"),
        ({"on": 1}, "on: must be true or false, got 1"),
        ({"key": "x"}, "key: must be a whole number, got 'x'"),
        ({"of_key": 3}, "unknown key 'of_key';"),
    ],
)
def test_a_fault_names_the_key_the_allowed_values_and_the_given_one(given: dict[str, Any], said: str) -> None:
    (text,) = texts({"count": 1, **given})
    assert text.startswith(said)
    with pytest.raises(Fault) as caught:
        convert({"count": 1, **given}, Table)
    assert str(caught.value) == text


def test_all_faults_of_a_value_are_found() -> None:
    assert texts({"inner": {"alpha": 0, "x": 1}, "on": "yes"}) == [
        "inner.alpha: must be a finite number above 0, got 0",
        "unknown key 'inner.x'; allowed in [inner]: alpha, beta_weight",
        "on: must be true or false, got 'yes'",
        "count: missing; must be a whole number from 1 to 9",
    ]
    assert texts(3) == ["must be a table, got 3"]
    assert texts({"size": 0}, Strategy, "strategy") == [
        "strategy.size: must be a whole number of at least 1, got 0"
    ]
    assert texts(0, Annotated[int, msgspec.Meta(ge=1)], "buffer_size") == [
        "buffer_size: must be a whole number of at least 1, got 0"
    ]


def test_a_valid_value_is_converted() -> None:
    class Loose(msgspec.Struct):
        a: int = 0

    assert texts({"b": 1}, Loose) == []  # unknown keys are allowed
    table = {"count": 3, "inner": {"alpha": 1}, "scale": 2, "key": 5, "anything": {"x": [None]}}
    found = convert(table, Table)
    assert (found.count, found.inner.alpha, found.scale, found.of_key) == (3, 1.0, 2.0, 5)
    assert convert({"size": 2}, Strategy) == Strategy(2)


def test_a_constraint_that_only_msgspec_checks_is_a_fault_too() -> None:
    with pytest.raises(Fault, match=r"^size: Expected `int` that's a multiple of 2$"):
        convert(3, Annotated[int, msgspec.Meta(multiple_of=2)], "size")


def test_long_values_are_cut() -> None:
    assert len(shown("x" * 100)) == len(shown(list(range(100)))) == 60
    assert str(wrong("a", "short", 1j)) == "a: must be short, got a complex"


def test_cyclic_and_deeply_nested_values_are_cut() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    shared: list[Any] = []
    deep: list[Any] = []
    table: dict[str, Any] = {}
    for _ in range(60):
        shared = [shared, shared]
    for _ in range(600):
        deep = [deep]
    table["a"] = table
    for value, start in ((circle, "[1, [1, "), (shared, "[[["), (deep, "[[["), (table, "{ a = { a = ")):
        assert shown(value).startswith(start)
        assert len(shown(value)) == 60
        (text,) = texts(value, Annotated[float, msgspec.Meta(ge=0)], "download")
        assert text.startswith("download: must be a finite number of at least 0, got ")
        assert len(text) < 120
