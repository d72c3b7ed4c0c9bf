"""What a mark may ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgefl.errors import ConfigError
from edgefl.regression.device import (
    DeviceTest,
    EdgeDevice,
    MarkOptions,
    Session,
    SessionOptions,
    _plain,
    mark_options,
)


def test_each_profile_is_a_wish_with_the_same_keys() -> None:
    found = mark_options(
        ["pixel-3a", "pi-4"], {"repetitions": 20, "network": "3g", "seconds": 2, "peak_mib": 100.0}
    )
    assert [one.profile for one in found] == ["pixel-3a", "pi-4"]
    assert {(one.repetitions, one.network) for one in found} == {(20, "3g")}
    assert found[0].budgets == {"seconds": 2.0, "peak_mib": 100.0}


@pytest.mark.parametrize(
    ("profiles", "keys", "says"),
    [
        ([], {}, "edge_device: no profile is named; name one or more"),
        (["pixel3a"], {}, "device profile 'pixel3a' not found; did you mean 'pixel-3a'? have: "),
        ([3], {}, "edge_device: a profile is named by a string (got 3)"),
        (["pi-4", "pi-4"], {}, "edge_device: a profile is named twice: pi-4, pi-4"),
        (["pi-4"], {"second": 1}, "edge_device key 'second' not found; did you mean 'seconds'? have: "),
        (["pi-4"], {"seconds": "2"}, "edge_device: seconds must be a finite number of at least 0 (got '2')"),
        (["pi-4"], {"joules": -1}, "edge_device: joules must be a finite number of at least 0 (got -1)"),
        (["pi-4"], {"time_scale": True}, "edge_device: time_scale must be a finite number"),
        (["pi-4"], {"repetitions": 8}, "repetitions must be a whole number of at least 9 (got 8)"),
        (["pi-4"], {"repetitions": 9.5}, "repetitions must be a whole number of at least 9 (got 9.5)"),
        (["pi-4"], {"network": "5gg"}, "network profile '5gg' not found;"),
    ],
)
def test_what_is_not_allowed_is_one_line(profiles: list[Any], keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mark_options(profiles, keys)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_a_device_without_a_processor_times_nothing() -> None:
    where = DeviceTest("test_a", Path("test_a.py"), "test_a", 1)
    with pytest.raises(ConfigError, match="has a delay model instead of a processor"):
        EdgeDevice(MarkOptions("paper-half-normal"), where, Session(SessionOptions()))


def test_a_devices_own_network_is_its_link_unless_another_is_named() -> None:
    where = DeviceTest("test_a", Path("test_a.py"), "test_a", 1)
    for wish, network in ((MarkOptions("pixel-3a"), "lte"), (MarkOptions("pixel-3a", network="3g"), "3g")):
        device = EdgeDevice(wish, where, Session(SessionOptions()))
        assert device.name == "pixel-3a"
        assert device.network is not None
        assert device.network.id == network


@pytest.mark.parametrize("value", [1, 1.5, "a", True, None, [1, [2]], {"a": {"b": 1}}])
def test_what_json_holds_is_an_argument(value: Any) -> None:
    assert _plain("batch", value) is value


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), b"x", object(), {"a": {1, 2}}])
def test_anything_else_is_not(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch must be what JSON holds, .* let setup= make anything else"):
        _plain("batch", value)
