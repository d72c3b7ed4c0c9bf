"""Counting in real processes: equal counts under all conditions; each kind of planted work in its figure."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgefl.devices import load_device, load_network
from edgefl.errors import ConfigError, NotMet
from edgefl.regression import baseline
from edgefl.regression.callgrind import count_native, why_not
from edgefl.regression.counts import INSTRUCTIONS, CountedRun, CountedVerdict, compare, entry_of
from edgefl.regression.measure import count
from edgefl.regression.measurement import MeasurementPlan
from edgefl.regression.process import FunctionLocation, MeasuringProcess, PrepareRequest, locate
from tests.process import counted_steps as steps
from tests.process import native_steps as natives

pytestmark = pytest.mark.usefixtures("warm_measuring")


@pytest.fixture(scope="module")
def process(warm_measuring: None) -> Iterator[MeasuringProcess]:
    with contextlib.closing(MeasuringProcess()) as started:
        yield started


def counted(process: MeasuringProcess, function: Callable[..., Any], **kwargs: Any) -> CountedRun:
    setup = locate(prepare) if function is steps.train else None
    if setup is not None:
        kwargs = {"batches": 2, **kwargs}
    request = asked(function, setup, **kwargs)
    return count(process, MeasurementPlan(load_device("moto-g4"), load_network("lte"), request, 9, 0.0))


def asked(
    function: Callable[..., Any], setup: FunctionLocation | None = None, **kwargs: Any
) -> PrepareRequest:
    return PrepareRequest(
        function=locate(function), setup=setup, args=[], kwargs=kwargs, path=list(sys.path), device="moto-g4",
        network="lte", shots=None, limit_s=120.0,
    )  # fmt: skip


def prepare(batches: int, **_: Any) -> Any:
    return steps.prepare(batches)


def against(before: CountedRun, now: CountedRun) -> CountedVerdict:
    versions = baseline.versions()
    return compare(entry_of("test", "step", before, versions), now, versions)


@pytest.fixture(scope="module")
def unchanged(process: MeasuringProcess) -> CountedRun:
    return counted(process, steps.train)


def test_native_code_of_other_libraries_has_no_time_by_counts(process: MeasuringProcess) -> None:
    """By its 30 instructions sorting a million numbers would take a phone less than a microsecond."""
    native = counted(process, steps.sorts)
    assert (native.covered, native.seconds) == (False, None)


def test_torch_and_python_have_a_time_by_counts(unchanged: CountedRun) -> None:
    assert unchanged.covered
    assert unchanged.seconds is not None
    assert unchanged.seconds > 0.001


def test_another_process_under_other_conditions_counts_the_same(
    unchanged: CountedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_conditions = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "77"}
    for name, value in other_conditions.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(MeasuringProcess()) as other:
        again = counted(other, steps.train)
    assert unchanged.varying() == again.varying() == {}
    assert against(unchanged, again) == against(again, unchanged) == CountedVerdict()


@pytest.mark.parametrize(
    ("more", "figure", "where"),
    [
        ({"loops": 11}, INSTRUCTIONS, "counted_steps.normalised"),
        ({"double": True}, "copy_bytes", ""),
        ({"twice": True}, INSTRUCTIONS, "counted_steps.evaluate"),
        ({"sent": 5 << 20}, "sent_bytes", ""),
        ({"leak_mib": 30}, "tensor_kept_bytes", ""),
        ({"batches": 3}, "matmul_flop", ""),
    ],
)
def test_planted_work_is_in_its_figure(
    process: MeasuringProcess, unchanged: CountedRun, more: dict[str, Any], figure: str, where: str
) -> None:
    grew = {one.name: one for one in against(unchanged, counted(process, steps.train, **more)).grew}
    assert where in grew[figure].where
    if figure in ("sent_bytes", "tensor_kept_bytes"):
        assert next(iter(grew)) == figure  # leads the line
        assert round((grew[figure].now - grew[figure].before) / 2**20) in (5, 30)


def test_torchs_figures_are_those_of_one_call(unchanged: CountedRun) -> None:
    figures = unchanged.first.figures
    assert figures["parameters"] == 4 * 25 + 4 + 2304 * 10 + 10
    assert figures["sent_bytes"] == 1000
    forward, gradients = 2 * 8 * 2304 * 10, 2  # of weight and input
    assert figures["matmul_flop"] == 2 * (forward * (1 + gradients) + forward)  # two batches, and evaluation
    assert unchanged.model_s > unchanged.python_s > 0


def test_memory_that_python_keeps_is_counted(process: MeasuringProcess) -> None:
    found = against(
        counted(process, steps.keeps_python_objects), counted(process, steps.keeps_python_objects, mib=30)
    )
    assert {one.name for one in found.grew} == {"python_peak_bytes", "python_kept_bytes"}


def test_random_numbers_are_seeded_and_the_first_call_does_not_count(process: MeasuringProcess) -> None:
    runs = [counted(process, steps.draws) for _ in range(2)]
    assert runs[0].first.instructions == runs[1].first.instructions
    assert runs[0].varying() == {}
    later = counted(process, steps.first_call_is_another).first.instructions
    assert later is not None
    assert list(later) == [f"{steps.__name__}.first_call_is_another"]  # nothing of edgefl, nothing of inspect
    assert sum(later.values()) < 200


def test_work_that_depends_on_time_is_known_to_vary_and_the_rest_is_steady(process: MeasuringProcess) -> None:
    assert set(counted(process, steps.depends_on_time).varying()) == {INSTRUCTIONS}


def test_coroutines_programs_and_threads(process: MeasuringProcess) -> None:
    short, long = (counted(process, steps.waits, seconds=seconds) for seconds in (0.0, 0.03))
    assert against(short, long) == CountedVerdict()  # the event loop's turns depend on time
    assert short.first.instructions is not None
    assert short.first.instructions[f"{steps.__name__}.waits"] > 5
    assert counted(process, steps.starts_a_program).processes
    assert not short.processes
    assert counted(process, steps.leaves_a_thread).varying() == {}


@pytest.mark.parametrize("name", ["wrapped_coroutine", "wrapped_generator"])
def test_a_function_that_does_its_work_later_is_refused(process: MeasuringProcess, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"do its work when it is called \(got {name}, which returned a"):
        counted(process, getattr(steps, name))


def test_a_message_that_is_not_utf_8_is_the_functions(process: MeasuringProcess) -> None:
    with pytest.raises(NotMet, match=r"FileNotFoundError: caf\\udce9"):
        counted(process, steps.misses_a_file)


def test_a_function_can_end_what_it_started(process: MeasuringProcess) -> None:
    assert counted(process, steps.ends_a_program_and_a_fork).processes


@pytest.mark.parametrize("name", ["leaves_a_fork", "ignores_its_children"])
def test_a_function_can_leave_processes_and_ignore_their_end(process: MeasuringProcess, name: str) -> None:
    """A process that is left has the other end of the pipe to the measuring process."""
    assert counted(process, getattr(steps, name)).first.instructions


def test_the_memory_of_a_function_that_measures_it_too_is_counted(process: MeasuringProcess) -> None:
    less, more = (counted(process, steps.measures_its_memory, keep=size) for size in (100_000, 200_000))
    assert [one.name for one in against(less, more).grew] == ["python_peak_bytes"]


def test_an_exception_of_a_later_call_is_the_functions(process: MeasuringProcess) -> None:
    with pytest.raises(
        NotMet, match=r"fails_when_it_is_called_again failed on moto-g4:(.|\n)*ValueError: called again"
    ):
        counted(process, steps.fails_when_it_is_called_again)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_native_instructions_are_exact_and_those_of_programs_count() -> None:
    """Only the program gets more to do, and the functions that compute the bytes count exactly the same."""
    few, many = (
        count_native(asked(natives.compresses_and_sorts, count=5000, lines=lines)) for lines in (400, 2000)
    )
    assert sum(many.values()) > 1.01 * sum(few.values())
    assert sum(count for name, count in few.items() if many.get(name) == count) > 20 * 5000


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_function_that_fails_in_valgrind_is_one_failure() -> None:
    with pytest.raises(NotMet, match=r"fails_when_it_is_called_again failed in Valgrind:(.|\n)*called again"):
        count_native(asked(natives.fails_when_it_is_called_again))
