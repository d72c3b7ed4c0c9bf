"""A measured function's device: its link, its clock."""

from __future__ import annotations

import array

import msgspec
import numpy as np
import pytest
import torch

from edgefl.devices import load_device, load_network
from edgefl.devices.link import Disconnected
from edgefl.errors import ConfigError
from edgefl.regression.repetition import DeviceClock, DeviceHandle, ProcessUsage, nbytes


def handle(network: str | None = "lte", **changes: object) -> DeviceHandle:
    link = None if network is None else load_network(network)
    if link is not None and changes:
        link = msgspec.structs.replace(link, up=msgspec.structs.replace(link.up, **changes))
    return DeviceHandle(load_device("pixel-3a"), link, 0)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"abc", 3),
        (bytearray(5), 5),
        (memoryview(b"abcd"), 4),
        (array.array("d", [1.0, 2.0]), 16),
        (np.zeros((3, 4), np.float16), 24),
        (np.zeros((4, 4))[::2, ::2], 32),
        (torch.zeros(10, requires_grad=True), 40),
        (torch.zeros(10, dtype=torch.bfloat16), 20),
    ],
)
def test_bytes_are_counted_in_whatever_holds_them(data: object, count: int) -> None:
    assert nbytes(data) == count


@pytest.mark.parametrize("data", ["text", 7, [1, 2], None, {"a": b""}])
def test_what_holds_no_bytes_is_refused(data: object) -> None:
    with pytest.raises(TypeError, match=r"send\(\) takes bytes, an array or a tensor \(got "):
        nbytes(data)


def test_what_is_sent_is_counted_and_takes_what_the_link_takes() -> None:
    one = handle()
    assert one.name == "pixel-3a"
    took = one.send(bytes(1_000_000)) + one.send(bytes(500_000))
    assert one.sent_bytes == 1_500_000
    assert took > 1_500_000 * 8 / (load_network("lte").up.rate_mbps or 0) / 1e6
    one.begin(None)
    assert one.sent_bytes == 0


def test_without_a_network_nothing_is_sent_and_a_link_that_breaks_says_so() -> None:
    with pytest.raises(ConfigError, match="device 'pixel-3a' has no network to send over; name one"):
        handle(None).send(b"x")
    with pytest.raises(Disconnected, match="the link was lost after"):
        handle(loss_pct=50.0, on_loss="disconnect").send(bytes(10_000_000))


def test_the_clock_adds_computing_and_transfers_and_is_never_early() -> None:
    clock = DeviceClock(slowdown=3.0, time_scale=0.1)
    burn_s = _burn(0.002)
    assert clock.now_s() >= 3.0 * burn_s
    clock.transfer(0.05)
    times = clock.end(model_s=0.0)
    assert times.radio_s == 0.05
    assert times.declared_s >= 3.0 * burn_s + 0.05
    assert times.achieved_s >= times.declared_s


def test_the_model_is_waited_for_where_it_is_longer_and_nothing_without_a_time_scale() -> None:
    times = DeviceClock(slowdown=1.0, time_scale=0.1).end(model_s=0.2)
    assert 0.2 <= times.declared_s <= times.achieved_s
    assert times.blocked_s == 0.0
    clock = DeviceClock(slowdown=1.0, time_scale=0.0)
    clock.transfer(1e6)
    assert clock.end(0.0).declared_s >= 1e6


def test_usage_is_what_was_used_in_between() -> None:
    before = ProcessUsage.now()
    burn_s = _burn(0.005)
    used = ProcessUsage.now().since(before)
    assert used.cpu_ns >= burn_s * 1e9
    assert used.wall_ns >= used.cpu_ns * 0.99


def _burn(seconds: float) -> float:
    """Use so much CPU time at least; returns how much."""
    start = ProcessUsage.now().cpu_ns
    while (used := (ProcessUsage.now().cpu_ns - start) / 1e9) < seconds:
        pass
    return used
