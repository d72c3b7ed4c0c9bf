"""Results of phones that run any command: verdict, last line, page, live table, and the phones' output."""

from __future__ import annotations

import copy
import os
import pty
import select
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from test_programs import CAT

from benchmarks import programs as benchmark
from edgefl.cli import flower
from edgefl.cli.programs import say_result
from edgefl.flower.runtime import NodeMessage
from edgefl.host.capacity import Demand, capacity_cores, choose_time_scale
from edgefl.host.verdict import Conditions, HeldVerdict
from edgefl.programs import ProgramOptions, RunningPhones
from edgefl.programs.messages import PhoneState, TrafficState
from edgefl.programs.phone import Phone, look_up
from edgefl.programs.report import programs_page
from edgefl.programs.result import (
    ModelError,
    PhoneResult,
    ProgramsResult,
    UnwrittenRecord,
    judge,
    model_errors,
    way_result,
)
from edgefl.programs.running import UNLIMITED
from edgefl.programs.view import PhonesTable, PhonesView, waiting_text


def phone_result(**changes: object) -> PhoneResult:
    still = way_result(0, [], [])
    fields = {
        "phone": 0, "device": "moto-g4", "network": "lte", "command": ("cat",), "exit_code": 0, "why": "",
        "wall_s": 10.0, "cpu_s": 1.0, "wanting_s": 10.0, "declared_share": 0.1, "achieved_share": 0.1,
        "limit_mib": 512.0, "peak_mib": 1.0, "stops": 0, "connections": 0, "refused": 0, "broken": 0,
        "energy_j": None, "up": still, "down": still,
    }  # fmt: skip
    return PhoneResult(**{**fields, **changes})


def test_the_last_line_has_the_phones_times_and_the_model_error(capsys: pytest.CaptureFixture[str]) -> None:
    held = judge((), [], 1.0, Conditions())
    two = (phone_result(wall_s=8.0), phone_result(phone=1, wall_s=30.0))
    result = ProgramsResult(two, 4.0, 0, 30.0, "sigstop", "off", held, (ModelError("integer", "pi-4", 1.2),))
    say_result(result, quiet=False)
    shown = capsys.readouterr().err
    assert "; 2 phones, 2 s to 7.5 s of emulated time, time_scale 4, " in shown
    assert "; integer code on a real pi-4: within a factor of 1.20 (90%)" in shown
    assert result.summary()["model_errors"] == [{"code": "integer", "device": "pi-4", "factor": 1.2}]
    assert "model_errors" not in result._replace(model_errors=()).summary()
    say_result(result._replace(phones=two[:1]), quiet=False)
    assert "; 1 phone, 2 s of emulated time, " in capsys.readouterr().err


@pytest.mark.parametrize(("pauses", "factors"), [(True, [1.25, 1.25**2**0.5]), (False, [1.0, 1.25])])
def test_the_model_error_includes_that_of_pauses(pauses: bool, factors: list[float]) -> None:
    (held,) = look_up([Phone(device="pi-4", command=("cat",), share=0.1)])
    phones = [held, *(held._replace(error_factor=factor) for factor in (1.0, 1.0, 1.25))]
    found = model_errors(phones, pauses=pauses)
    assert [one.factor for one in found] == pytest.approx(factors)


@pytest.mark.parametrize(("throttle", "stated"), [("sigstop", 1), ("off", 0)])
def test_phones_that_are_not_limited_have_no_model_error(throttle: str, stated: int) -> None:
    held = look_up([CAT])[0]._replace(error_factor=1.2)
    running = Mock(_held=[held], _traffic=[], options=ProgramOptions(throttle=throttle), _awake_ended=False)
    running._ended = {}
    running._phone_result.return_value = phone_result()
    running._meter.usage.return_value = {}
    assert len(RunningPhones._judged(running, wall_s=10.0).model_errors) == stated


@pytest.mark.parametrize(("throttle", "reasons"), [("sigstop", (UNLIMITED,)), ("off", ())])
def test_a_process_that_could_not_be_limited_makes_the_verdict_invalid(
    throttle: str, reasons: tuple[str, ...]
) -> None:
    running = Mock(_held=[look_up([CAT])[0]], _traffic=[], _awake_ended=False)
    running.options, running._ended = ProgramOptions(throttle=throttle), {0: Mock()}
    running._ended[0].state.unlimited = True
    running._phone_result.return_value = phone_result()
    running._meter.usage.return_value = {}
    assert RunningPhones._judged(running, wall_s=10.0).reasons == reasons


def test_phones_that_were_too_fast_or_too_slow_are_invalid() -> None:
    assert judge([phone_result()], [(1.0, 1.0)], 1.0, Conditions())[:3] == (0.0, 0.0, ())
    median, _, reasons, _ = judge([phone_result(achieved_share=0.2)], [(1.0, 1.0)], 1.0, Conditions())
    assert median == pytest.approx(0.5)
    assert [reason.split()[0] for reason in reasons] == ["median", "95th", "computing"]
    median, _, reasons, _ = judge([phone_result()], [(1.0, 1.5)] * 3, 1.0, Conditions())
    assert median == pytest.approx(0.5)
    assert reasons[-1].startswith("transmissions took 50.0% longer")
    busy = Conditions(others=0.9)
    assert judge([phone_result(achieved_share=0.2)], [], 1.0, busy).reasons[1:2] == (
        "other processes used 90% of the host",
    )
    assert judge([phone_result()], [], 1.0, busy).valid


def test_uncounted_cpu_time_is_invalid_but_not_slow() -> None:
    """Half of the CPU time was counted. The rest may have been used, so the phone is not called too slow."""
    lost = phone_result(cpu_s=0.5, achieved_share=0.05, uncounted_s=0.5)
    median, _, reasons, _ = judge([lost, phone_result(), lost], [], 1.0, Conditions())
    assert median == 0.0
    assert len(reasons) == 1
    assert reasons[0].startswith("phone 0: a process ignores SIGCHLD or has set SA_NOCLDWAIT, so")
    assert "up to 100% of what was counted" in reasons[0]
    assert reasons[0].endswith(" (and 1 more)")
    assert judge([phone_result(uncounted_s=0.02)], [], 1.0, Conditions()).valid


def test_too_little_work_is_not_judged() -> None:
    slept = phone_result(cpu_s=0.01, wanting_s=0.1, achieved_share=0.5)
    assert slept.cpu_error is None
    assert judge([slept], [(0.001, 0.01)], 1.0, Conditions())[:3] == (None, None, ())


def test_the_report_page_has_the_verdict_and_its_reasons() -> None:
    carried = way_result(1000, [1.0], [1.01])
    one = phone_result(connections=1, up=carried, down=carried, why="out of memory", command=("<b>",))
    held = HeldVerdict(0.1, 0.2, ("slow <x>",), Conditions())
    result = ProgramsResult((one,), 1.0, 0, 10.0, "sigstop", "watch", held)
    text = programs_page(result, "name")
    assert "INVALID" in text
    assert "slow &lt;x&gt;" in text
    assert "out of memory" in text
    assert result.summary()["phones"][0]["up"]["bytes"] == 1000


def test_the_benchmark_of_programs_shows_edgefls_own_errors() -> None:
    held = HeldVerdict(0.1, 0.2, (), Conditions())
    result = ProgramsResult((phone_result(),), 1.0, 0, 10.0, "sigstop", "off", held)
    assert benchmark.row("loop", [-0.01, 0.02], result)[4:] == ("10.00%", "20.00%", "VALID")


def test_the_benchmark_of_programs_expects_the_mean_rate_of_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it drew a rate for each phone, which `edgefl run` does, but `edgefl exec` does not."""
    monkeypatch.setattr(benchmark, "printed", lambda *_: ([[5.0, 100.0, 300.0, 1e7]] * 2, None))
    monkeypatch.setattr(benchmark, "row", lambda name, errors, result: errors)
    given: Any = SimpleNamespace(phones=2, share=0.1, throttle="off")
    first, second = benchmark.transfer("curl", "lte", 10_000_000, 80, given)
    assert first == second


@pytest.mark.parametrize(
    ("throttle", "why"),
    [
        ("sigstop", "the phones hardly computed or sent anything"),
        ("off", "the phones' computing was not limited, and they hardly sent anything"),
    ],
)
def test_an_unjudged_result_is_not_called_valid(
    throttle: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = HeldVerdict(None, None, (), Conditions())
    result = ProgramsResult((phone_result(),), 1.0, 0, 10.0, throttle, "off", held)
    say_result(result, quiet=False)
    assert capsys.readouterr().err.startswith("edgefl: not judged; ")
    assert why == result.unjudged
    assert result.summary()["phones"][0]["cpu_error"] == (None if throttle == "off" else 0.0)
    text = programs_page(result, "name")
    assert ("not judged" in text, ">VALID<" in text) == (True, False)


@pytest.mark.parametrize(("share", "advised"), [(0.4, False), ((0.2, 0.2), True)])
def test_an_option_is_advised_only_where_it_is_allowed(
    share: float | tuple[float, ...], advised: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    held = look_up([Phone(device="pi-4", command=("cat",), share=share)])
    PhonesView(quiet=False).begin(held, choose_time_scale([Demand(0.4, 1.0)], scale=2.0))
    assert ("--threads N" in capsys.readouterr().err) == advised


def test_phones_that_are_not_limited_need_no_cores(capsys: pytest.CaptureFixture[str]) -> None:
    held = look_up([Phone(device="pi-4", command=("cat",), share=(0.2, 0.2))])
    PhonesView(quiet=False).begin(held, choose_time_scale([], scale=2.0))
    assert capsys.readouterr().err == "edgefl: time_scale 2: a second of a phone takes 2 s here\n"


def test_the_live_table_has_a_row_for_each_phone(capsys: pytest.CaptureFixture[str]) -> None:
    held = look_up([CAT] * 30)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    view = PhonesTable(console)
    view.begin(held, choose_time_scale([Demand(0.5, 1.0)] * 6, cores=capacity_cores(), scale=2.0))
    shown = capsys.readouterr().err
    assert shown.startswith("edgefl: time_scale 2: a second of a phone takes 2 s here.")
    assert "need 3.0 cores of this host at time_scale 1" in shown
    states = {
        number: PhoneState(
            phone=number, state="ended" if number < 5 else "running", wall_s=10.0, age_s=10.0, cpu_s=0.5,
            wanting_s=10.0, declared_cpu_s=0.5, in_use_s=(10.0,), rss_mib=12.0, peak_mib=12.0, stops=0,
            processes=1,
        )
        for number in range(30)
    }  # fmt: skip
    traffic = [TrafficState(number, 2_000_000, 0, 1, 1, 0, 0, 0.0, 0.0) for number in range(30)]
    console.print(view.picture(states, traffic))
    text = console.export_text()
    assert text.splitlines()[2].split() == ["5", "moto-g4", "running", "0.5", "100.0%", "12", "2", "0"]
    assert "and 10 more" in text
    unlimited = PhonesTable(console, limited=False)
    unlimited._held = held
    console.print(unlimited.picture(states, traffic))
    assert "%" not in console.export_text()
    console.file.close()


def test_a_slow_reader_of_a_nonblocking_pipe_gets_all_output() -> None:
    data = bytes(range(256)) * 4096  # 1 MiB, several times what the pipe holds
    read, write = os.pipe()
    os.set_blocking(write, False)
    with ThreadPoolExecutor(1) as pool, open(read, "rb") as reader:
        got = pool.submit(reader.read)
        with open(write, "wb") as writer:
            assert PhonesView().write(writer, data)
        assert got.result() == data


def test_a_slow_nonblocking_terminal_gets_all_output() -> None:
    lines = [f"line {number} {'x' * 60}" for number in range(200)]
    ours, theirs = pty.openpty()
    os.set_blocking(theirs, False)
    data = bytearray()
    with (
        ThreadPoolExecutor(1) as pool,
        open(theirs, "w") as terminal,
        open(ours, "rb", buffering=0) as reader,
    ):
        view = PhonesTable(Console(file=waiting_text(terminal), force_terminal=True, width=200))
        with suppress(BlockingIOError):
            while True:
                os.write(theirs, b"-" * 1000)
        writing = pool.submit(view.write, terminal.buffer, "\n".join(lines).encode())
        assert not wait([writing], timeout=0.1).done  # the terminal is full
        while not data.endswith(f"{lines[-1]}\r\n".encode()):
            assert select.select([reader], [], [], 20)[0]
            data += reader.read(1 << 16)
        assert writing.result()
    assert data.decode().lstrip("-").splitlines() == lines


def test_the_error_of_an_unwritten_record_can_be_passed_to_another_process() -> None:
    """`copy.copy` rebuilds an exception in the same way as `pickle` does in another process."""
    result: Any = object()
    found = copy.copy(UnwrittenRecord("the disk is full", result))
    assert (str(found), found.result) == ("the disk is full", result)


def test_only_a_missing_reader_ends_a_phones_output(capsys: pytest.CaptureFixture[str]) -> None:
    view = PhonesView()
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as unread:
        assert not view.write(unread, b"a\n")
    assert not view.write(unread, b"a\n")  # closed
    assert not view.failed
    with open("/dev/full", "wb") as full:
        assert all(view.write(full, b"a\n") for _ in range(2))
    assert view.failed
    lost = "edgefl: output of the phones is lost: /dev/full cannot be written: No space left on device\n"
    assert capsys.readouterr().err == lost


def test_the_times_of_a_flower_apps_messages_are_printed_in_emulated_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: they were wall seconds, 5 times as long with a time scale of 5."""
    phone = SimpleNamespace(phone=0, device="pi-4")
    phones = SimpleNamespace(time_scale=5.0, phones=[phone], cpu_error=lambda _: None)
    found: Any = SimpleNamespace(phones=phones, messages=[NodeMessage(0, "train", 1, 50.0)])
    flower._say_messages(found)
    assert capsys.readouterr().err == "edgefl: phone 0 (pi-4), compute time not judged: train 1 10.0 s\n"
