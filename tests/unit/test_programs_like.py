"""`edgefl exec --like CLASS`: a phone's cores have the device's speed in this class of code."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from shell import Shell

from edgefl.cli.programs import phones_of
from edgefl.devices import Device, load_device, load_fleet
from edgefl.devices.code import CodeClass, clusters_of, rate
from edgefl.devices.prediction import predict, time_model
from edgefl.devices.time_model import FEMNIST_STEP
from edgefl.errors import ConfigError
from edgefl.host import calibration
from edgefl.host.calibration import Calibration, Rate
from edgefl.host.host_operations import FEMNIST_FLOP
from edgefl.learning.models import model_to_trace
from edgefl.programs import Phone, core_shares
from edgefl.programs.likeness import HostSpeeds, TorchStep, class_of
from edgefl.programs.phone import look_up
from tests.unit.test_code_operations import calibrated


class Host(HostSpeeds):
    """A host of known speeds, on which each training step takes 4 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[TorchStep, str]] = []

    def calibrated(self, code: CodeClass | None = None) -> Calibration:
        found = calibrated(integer=4000.0, crypto=800.0, interpreter=160_000.0)
        rate = Rate(median=50.0, cv=0.0, samples=(50.0,))
        return replace(found, measured=replace(found.measured, train_gflops=rate))

    def steps_per_s(self, step: TorchStep, dtype: str) -> Rate:
        self.asked.append((step, dtype))
        return Rate(median=250.0, cv=0.0, samples=(250.0,))


HOST = Host()
PHONE = Phone(device="pixel-4", command=("cat",), like="integer")


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "calibrate", HOST.calibrated)
    monkeypatch.setattr(calibration, "calibrate_code", HOST.calibrated)


def test_each_core_has_its_own_speed_in_the_class() -> None:
    big, middle, little = clusters_of(load_device("pixel-4"))
    expected = [rate(each, "integer").value / 4000 for each in (big, *[middle] * 3, *[little] * 4)]
    (held,) = look_up([PHONE])
    assert held.cores == pytest.approx(sorted(expected, reverse=True))
    assert held.cores[0] > 2 * held.cores[-1]


def test_the_speed_of_equal_phones_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``torch:MODEL`` the computation takes seconds, and a run may have thousands of phones."""
    asked: list[tuple[str, str]] = []

    def shares(device: Device, like: str, host: HostSpeeds) -> Any:
        asked.append((device.id, like))
        return core_shares(device, like, host)

    monkeypatch.setattr("edgefl.programs.phone.core_shares", shares)
    held = look_up([PHONE, PHONE, replace(PHONE, like="crypto"), replace(PHONE, device="pi-4"), PHONE])
    assert asked == [("pixel-4", "integer"), ("pixel-4", "crypto"), ("pi-4", "integer")]
    assert held[0].cores == held[4].cores != held[2].cores


def test_the_class_decides_the_share() -> None:
    """A Raspberry Pi 4 has about half of the host's integer rate. But it has no AES instructions, so it
    encrypts only 36 MB/s; the host encrypts 800 MB/s."""
    integer, crypto = (
        core_shares(load_device("pi-4"), like, HOST)[0].value for like in ("integer", "crypto")
    )
    assert 0.4 < integer < 0.6
    assert crypto == pytest.approx(36.3 / 800, rel=0.1)


def test_the_share_of_torch_is_the_ratio_of_a_steps_times() -> None:
    device = load_device("moto-g4")
    (share,) = core_shares(device, "torch", HOST)
    seconds = time_model(device).seconds(FEMNIST_STEP)
    assert share.value * seconds == pytest.approx(FEMNIST_FLOP / 50e9)
    with pytest.raises(ConfigError, match="no computing rates"):
        core_shares(load_device("paper-exponential"), "torch", HOST)


def test_the_share_of_a_network_is_the_ratio_of_its_own_steps_times() -> None:
    """A device's time per FLOP, relative to the host's, depends on the network."""
    device = load_device("pi-4")
    (share,) = core_shares(device, "torch:mlp@8x1x28x28", HOST)
    module, shape = model_to_trace("mlp", (1, 28, 28))
    assert HOST.asked == [(TorchStep("mlp", 8, shape), "float32")]
    assert share.value == pytest.approx(0.004 / predict(module, 8, device=device, input_shape=shape).seconds)
    (token,) = core_shares(device, "torch:lstm-sent140", HOST)
    assert HOST.asked[-1] == (TorchStep("lstm-sent140", 16, (25,)), "int64")
    assert token.value != share.value


def test_the_times_of_the_parts_of_a_program_add_up() -> None:
    device = load_device("pi-4")
    (torch_part,) = core_shares(device, "torch:mlp@8x1x28x28", HOST)
    python = core_shares(device, "interpreter", HOST)[0]
    (both,) = core_shares(device, "interpreter=0.25,torch:mlp@8x1x28x28=0.75", HOST)
    assert 1 / both.value == pytest.approx(0.25 / python.value + 0.75 / torch_part.value)
    assert 1 < both.spread < max(python.spread, torch_part.spread)
    halves = core_shares(load_device("pixel-4"), "integer=0.5,crypto=0.5", HOST)
    assert len(halves) == 8
    assert halves[0].value > halves[-1].value


def test_the_phone_has_as_many_cores_as_the_program_has_threads() -> None:
    for threads in (1, 3, 100):
        (held,) = look_up([replace(PHONE, threads=threads)])
        assert len(held.cores) == min(threads, 8)
        assert held.cores[0] == max(held.cores)
    for phone in (Phone(device="pi-4", command=("cat",), threads=2), replace(PHONE, share=0.3, threads=1)):
        with pytest.raises(ConfigError, match="threads has no effect, since all threads share"):
            look_up([phone])


@pytest.mark.parametrize(
    ("share", "threads", "currents_ma"),
    [
        ((0.5, 0.4, 0.4, 0.4, 0.1, 0.1, 0.1, 0.1), None, [223.89, *[302.04] * 3, *[85.05] * 4]),
        ((0.5, 0.4, 0.4, 0.4, 0.1, 0.1, 0.1, 0.1), 2, [223.89, 302.04]),
        ((0.5, 0.4), None, [223.89, 302.04]),
        ((0.1, 0.1, 0.1, 0.1, 0.4, 0.4, 0.4, 0.5), None, [223.89, *[302.04] * 3, *[85.05] * 4]),
        (0.3, None, [223.89 + 3 * 302.04 + 4 * 85.05]),
    ],
    ids=["all cores", "at most two threads", "two cores", "ascending", "one speed for all"],
)
def test_each_core_draws_its_own_current(
    share: float | tuple[float, ...], threads: int | None, currents_ma: list[float]
) -> None:
    (held,) = look_up([Phone(device="pixel-4", command=("true",), share=share, threads=threads)])
    scale = held.device.busy_w / (223.89 + 3 * 302.04 + 4 * 85.05)
    assert held.core_w[: len(currents_ma)] == pytest.approx([ma * scale for ma in currents_ma])
    assert len(held.core_w) == len(held.cores)


def test_the_fastest_core_is_not_always_the_first_in_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    device = load_device("pixel-4")
    reversed_ = replace(device, cpu=replace(device.cpu, clusters=device.cpu.clusters[::-1]))
    monkeypatch.setattr("edgefl.programs.phone.load_device", lambda name: reversed_)
    (held,) = look_up([Phone(device="pixel-4", command=("true",), share=(0.5, *[0.4] * 3, *[0.1] * 4))])
    assert held.core_w[0] == pytest.approx(device.core_w[0])
    assert reversed_.fastest_core_w == pytest.approx(device.core_w[0])


def test_the_model_error_is_the_largest_of_the_cores() -> None:
    (held,) = look_up([Phone(device="flagship-d9300", command=("cat",), like="integer")])
    spreads = [one.spread for one in core_shares(load_device("flagship-d9300"), "integer", HOST)]
    assert held.error_factor == max(spreads) > min(spreads)
    (held,) = look_up([Phone(device="pixel-4", command=("cat",), share=0.5)])
    assert held.error_factor is None


def test_a_profile_without_cores_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'tier-p50': its profile lists no cpu\.clusters"):
        look_up([Phone(device="tier-p50", command=("cat",), like="integer")])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--like", "intger"], "code class 'intger' not found; did you mean 'integer'?"),
        (["--like", "torch:"], "code class 'torch:' not found"),
        (["--like", "integer=0.5,torch=0.4"], "the shares must add up to 1"),
        (["--like", "integer=0.5,torch=x"], "a share must be above 0 and at most 1, got 'x'"),
        (["--like", "torch:nothing"], "model 'nothing' not found"),
        (["--like", "integer", "--share", "0.2"], "--like integer: cannot be combined with --share"),
    ],
)
def test_invalid_options_are_one_line(arguments: Sequence[str], why: str, edgefl: Shell) -> None:
    assert why in edgefl.refuses(2, "exec", "--device", "pi-4", *arguments, "cat")


def test_all_phones_have_the_same_class() -> None:
    phones = phones_of(["cat"], ["pi-4=2", "pi-5"], None, None, None, [], None, "crypto", seed=0)
    assert [(each.device, each.like) for each in phones] == [
        (name, "crypto") for name in ("pi-4", "pi-4", "pi-5")
    ]


def test_the_seed_draws_the_phones_of_a_fleet_as_in_a_run() -> None:
    for seed in (0, 3):
        phones = phones_of(["cat"], [], "phones-2020", None, None, [], None, "crypto", seed=seed)
        assert Counter(each.device for each in phones) == load_fleet("phones-2020").drawn(seed)


def script(file: Path, interpreter: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!{interpreter}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("python3 -c 'import time\nprint(time.time())'", "interpreter"),
        ("/usr/local/bin/node x.js", "interpreter"),
        ("python3.13t x.py", "interpreter"),
        ("7zz b", "integer"),
        ("/usr/bin/openssl speed aes-256-cbc", "crypto"),
        ("sysbench --threads=4 cpu run", "division"),
        ("sysbench memory run", "integer"),
        ("./pythonic", "integer"),
        ("make python", "integer"),
        ("env", "integer"),
        ("env A=python perl5.36 x.pl", "interpreter"),
        ("env -i python3 x", "interpreter"),
        ("env -u A -C / B=1 openssl x", "crypto"),
        ("nice python3 x", "interpreter"),
        ("nice -n 5 openssl x", "crypto"),
        ("timeout 60 python3 x", "interpreter"),
        ("timeout --signal=KILL -k 5 60 nice -n5 openssl x", "crypto"),
        ("timeout 60 7z python3", "integer"),
        ("uv run openssl x", "crypto"),
        ("uv run no-such-file.py", "interpreter"),
        ("uv run --with numpy -m module", "interpreter"),
        ("nice", "integer"),
    ],
)
def test_a_programs_name_decides_its_class_also_behind_a_launcher(command: str, code: str) -> None:
    assert class_of(shlex.split(command)) == code


@pytest.mark.parametrize(
    ("interpreter", "code"),
    [
        ("/usr/bin/env python3", "interpreter"),
        ("/a/bin/python", "interpreter"),
        (" /usr/bin/env -S uv run --script", "interpreter"),
        ("/usr/bin/perl -w", "interpreter"),
        ("/bin/sh", "integer"),
    ],
)
def test_the_first_line_of_a_script_decides_its_class(
    interpreter: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "mine", interpreter)
    monkeypatch.chdir(tmp_path)
    assert class_of(["./mine"]) == code
    monkeypatch.setenv("PATH", str(tmp_path))
    assert class_of(["mine"]) == class_of(["nice", "mine", "x"]) == code


def test_the_shim_of_a_version_manager_has_the_class_of_its_program(tmp_path: Path) -> None:
    shim = script(tmp_path / "shims" / "mine", "/usr/bin/env bash")
    assert class_of([str(shim)]) == "integer"
    script(tmp_path / "versions" / "3.11" / "bin" / "mine", "/a/bin/python3.11")
    assert class_of([str(shim)]) == "interpreter"


def test_scripts_that_are_each_others_interpreters_are_no_endless_loop(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    script(first, str(second))
    script(second, str(first))
    assert class_of([str(first)]) == "integer"
