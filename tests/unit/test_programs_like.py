"""`edgefl exec --like CLASS`: a phone's cores have the device's speed in such code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgefl.cli import main
from edgefl.cli.programs import phones_of, say_result
from edgefl.devices import load_device
from edgefl.devices.code import clusters_of, rate
from edgefl.errors import ConfigError
from edgefl.host import calibration
from edgefl.host.verdict import Conditions
from edgefl.programs import Phone, core_shares
from edgefl.programs.phone import look_up
from edgefl.programs.result import ModelError, ProgramsResult, judge
from tests.unit.test_code_operations import calibrated

HOST = calibrated(integer=4000.0, crypto=800.0)
PHONE = Phone(device="pixel-4", command=("cat",), like="integer")


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "calibrate", lambda: HOST)


def test_each_core_has_its_own_speed_in_the_class() -> None:
    big, middle, little = clusters_of(load_device("pixel-4"))
    expected = [rate(each, "integer").value / 4000 for each in (big, *[middle] * 3, *[little] * 4)]
    (held,) = look_up([PHONE])
    assert held.cores == pytest.approx(sorted(expected, reverse=True))
    assert held.cores[0] > 2 * held.cores[-1]


def test_the_class_decides_the_share() -> None:
    """A Raspberry Pi 4 has no AES instructions: 36 of 800 MB/s; its integer rate is half of the host's."""
    integer, crypto = (
        core_shares(load_device("pi-4"), like, HOST)[0].value for like in ("integer", "crypto")
    )  # type: ignore[arg-type]
    assert 0.4 < integer < 0.6
    assert crypto == pytest.approx(36.3 / 800, rel=0.1)


def test_the_model_error_is_the_widest_core_s() -> None:
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
        (["--like", "integer", "--share", "0.2"], "--like integer: not together with --share"),
    ],
)
def test_invalid_options_are_one_line(
    arguments: Sequence[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["exec", "--device", "pi-4", *arguments, "cat"]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_all_phones_have_the_class() -> None:
    phones = phones_of(["cat"], ["pi-4=2", "pi-5"], None, None, None, [], None, "crypto")
    assert [(each.device, each.like) for each in phones] == [
        (name, "crypto") for name in ("pi-4", "pi-4", "pi-5")
    ]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python3", "x.py"], "interpreter"),
        (["/usr/local/bin/node", "x.js"], "interpreter"),
        (["env", "A=python", "perl5.36", "x.pl"], "interpreter"),
        (["7zz", "b"], "integer"),
        (["/usr/bin/openssl", "speed", "aes-256-cbc"], "crypto"),
        (["sysbench", "--threads=4", "cpu", "run"], "division"),
        (["sysbench", "memory", "run"], "integer"),
        (["./pythonic"], "integer"),
        (["make", "python"], "integer"),
        (["env"], "integer"),
    ],
)
def test_auto_chooses_by_the_program(command: list[str], expected: str) -> None:
    (phone,) = phones_of(command, ["pi-4"], None, None, None, [], None, "auto")
    assert phone.like == expected


def test_the_last_line_and_the_record_state_the_model_error(capsys: pytest.CaptureFixture[str]) -> None:
    held = judge((), [], 1.0, Conditions())
    result = ProgramsResult((), 1.0, 0, 1.0, "sigstop", "off", held, (ModelError("integer", "pi-4", 1.2),))
    say_result(result, quiet=False)
    assert "; integer code on a real pi-4: within a factor of 1.20 (90%)" in capsys.readouterr().err
    assert result.summary()["model_errors"] == [{"code": "integer", "device": "pi-4", "factor": 1.2}]
    assert "model_errors" not in result._replace(model_errors=()).summary()
