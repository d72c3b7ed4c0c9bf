"""Counts of real processes: they are equal under all conditions, and include every kind of added work."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl.devices import load_device, load_network
from edgefl.errors import ConfigError, NotMet
from edgefl.regression import baseline
from edgefl.regression.callgrind import count_native, why_not
from edgefl.regression.counted import _works_on
from edgefl.regression.counts import (
    INSTRUCTIONS,
    NATIVE_CODE,
    WAITS,
    WORKS_ON,
    CountedRun,
    CountedVerdict,
    compare,
    entry_of,
    summary,
)
from edgefl.regression.measure import count
from edgefl.regression.measurement import MeasurementPlan
from edgefl.regression.process import FunctionLocation, MeasuringProcess, PrepareRequest, locate
from tests.patience import Patience
from tests.process import counted_steps as steps
from tests.process import native_steps as natives

pytestmark = pytest.mark.usefixtures("warm_measuring")


def counted(
    process: MeasuringProcess, function: Callable[..., Any], *, device: str = "moto-g4", **kwargs: Any
) -> CountedRun:
    setup = locate(prepare) if function is steps.train else None
    if setup is not None:
        kwargs = {"batches": 2, **kwargs}
    request = msgspec.structs.replace(asked(function, setup, **kwargs), device=device)
    return count(process, MeasurementPlan(load_device(device), load_network("lte"), request, 9, 0.0))


def asked(
    function: Callable[..., Any], setup: FunctionLocation | None = None, **kwargs: Any
) -> PrepareRequest:
    return PrepareRequest(
        function=locate(function), setup=setup, args=[], kwargs=kwargs, path=list(sys.path), device="moto-g4",
        network="lte", shots=None, limit_s=1000.0,
    )  # fmt: skip


def prepare(batches: int, **_: Any) -> Any:
    return steps.prepare(batches)


def against(before: CountedRun, now: CountedRun) -> CountedVerdict:
    versions = baseline.versions()
    return compare(entry_of("test", "step", before, versions), now, versions)


@pytest.fixture(scope="module")
def unchanged(process: MeasuringProcess) -> CountedRun:
    return counted(process, steps.train)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (steps.sorts, {NATIVE_CODE}),
        (steps.sorts_and_trains, {NATIVE_CODE}),
        (steps.sorts_in_a_kept_thread, {NATIVE_CODE}),
        (steps.sorts_later, {NATIVE_CODE, WAITS, WORKS_ON}),
        (steps.sleeps, {WAITS}),
        (steps.trains_and_sleeps, {WAITS}),
    ],
)
def test_counts_give_no_time_for_native_code_and_waiting(
    process: MeasuringProcess, function: Callable[..., Any], why: set[str]
) -> None:
    """Sorting a million numbers executes only 30 bytecode instructions: less than 1 µs on a phone."""
    run = counted(process, function)
    if run.untimed not in why:  # a pause of the host may be charged to a call, which then seems to work
        run = counted(process, function)
    assert (run.untimed in why, run.seconds) == (True, None)
    assert summary(run).endswith(f", no time: {run.untimed}")


def test_counts_give_a_time_for_torch_and_python(unchanged: CountedRun) -> None:
    assert unchanged.untimed == ""
    assert unchanged.link_s > 0
    assert unchanged.seconds == unchanged.model_s + unchanged.python_s + unchanged.link_s > 0.001


@pytest.mark.parametrize("function", [steps.counts_in_a_thread, steps.sends_often])
def test_waiting_for_a_thread_that_computes_and_sending_are_explained(
    process: MeasuringProcess, function: Callable[..., Any]
) -> None:
    assert counted(process, function).untimed == ""


def test_a_call_that_only_waits_sometimes_is_explained(process: MeasuringProcess) -> None:
    """On a busy host, a call may wait several times in a row for a thread that the host does not schedule."""
    assert counted(process, steps.waits_in_its_first_calls).untimed == ""


def test_a_thread_without_a_core_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reports how long a thread waited for a core only after the wait, so its state is read as well."""
    monkeypatch.setattr("edgefl.regression.counted._others_s", lambda: 0.0)
    goes_on = True

    def sorts() -> None:
        while goes_on:
            np.random.default_rng(0).random(1 << 22).sort()

    patience = Patience(60.0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(sorts)
        try:
            while not _works_on():
                assert not patience.over()
        finally:
            goes_on = False
        while _works_on():  # an idle thread does not
            assert not patience.over()


def test_counts_are_equal_under_other_conditions(
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
    ("more", "leader", "figure", "where"),
    [
        ({"loops": 11, "sent": 5 << 20}, "sent_bytes", INSTRUCTIONS, "counted_steps.normalised"),
        ({"double": True, "leak_mib": 30}, "tensor_kept_bytes", "copy_bytes", ""),
        ({"twice": True}, "", INSTRUCTIONS, "counted_steps.evaluate"),
    ],
)
def test_added_work_is_found_in_its_figure(
    process: MeasuringProcess,
    unchanged: CountedRun,
    more: dict[str, Any],
    leader: str,
    figure: str,
    where: str,
) -> None:
    grew = {one.name: one for one in against(unchanged, counted(process, steps.train, **more)).grew}
    assert where in grew[figure].where
    if leader:
        assert next(iter(grew)) == leader
        assert round((grew[leader].now - grew[leader].before) / 2**20) in (5, 30)


def test_the_figures_of_torch_are_those_of_one_call(unchanged: CountedRun) -> None:
    figures = unchanged.first.figures
    assert figures["parameters"] == 4 * 25 + 4 + 2304 * 10 + 10
    assert figures["sent_bytes"] == 1000
    forward, gradients = 2 * 8 * 2304 * 10, 2  # of weight and input
    assert figures["matmul_flop"] == 2 * (forward * (1 + gradients) + forward)  # two batches, and evaluation
    assert unchanged.model_s > unchanged.python_s > 0


def test_a_device_with_a_slowdown_is_the_median_device(process: MeasuringProcess, tmp_path: Path) -> None:
    """Slowdowns are uniform from 1 to 5, so the median device takes 3 times as long as the fastest."""
    fastest = tmp_path / "fastest.toml"
    fastest.write_text(
        'id = "fastest"\nname = "Any"\nclass = "paper"\ncpu.rate_gflops.train = 10\nsources.cpu = "paper"\n'
    )
    median, least = (
        counted(process, steps.train, device=name) for name in ("paper-defedavg-slowdowns", str(fastest))
    )
    assert median.model_s == pytest.approx(3.0 * least.model_s)
    assert median.python_s == pytest.approx(3.0 * least.python_s)


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


def test_work_that_depends_on_time_is_reported_as_varying(process: MeasuringProcess) -> None:
    assert set(counted(process, steps.depends_on_time).varying()) == {INSTRUCTIONS}


def test_a_function_may_be_a_coroutine_or_start_a_program_or_a_thread(process: MeasuringProcess) -> None:
    short, long = (counted(process, steps.waits, seconds=seconds) for seconds in (0.0, 0.03))
    assert against(short, long) == CountedVerdict()  # the event loop's turns depend on time
    assert short.first.instructions is not None
    assert short.first.instructions[f"{steps.__name__}.waits"] > 5
    assert counted(process, steps.starts_a_program).processes
    assert not short.processes
    assert counted(process, steps.leaves_a_thread).varying() == {}


def test_python_code_in_kept_threads_is_counted_or_said_to_be_left_out(process: MeasuringProcess) -> None:
    """Python before 3.12 cannot trace threads that started earlier."""
    few, many = (counted(process, steps.adds_in_a_kept_thread, turns=turns) for turns in (10, 10**6))
    said = "bytecode in threads that it keeps is not counted"
    assert (said in summary(few), said in summary(many)) == (False, sys.version_info < (3, 12))
    assert bool(against(few, many).grew) == (sys.version_info >= (3, 12))


@pytest.mark.parametrize(
    ("name", "given", "returned"),
    [
        ("wrapped_coroutine", {}, "coroutine that nothing awaits"),
        ("wrapped_generator", {}, "generator that nothing iterates over"),
        *(("returns_lazily", {"kind": kind}, f"{kind} that nothing iterates over")
          for kind in ("generator", "map", "filter", "zip")),
    ],
)  # fmt: skip
def test_a_function_that_does_its_work_later_is_refused(
    process: MeasuringProcess, name: str, given: dict[str, str], returned: str
) -> None:
    why = rf"do its work when it is called \(got {name}, which returned a {returned}\)"
    with pytest.raises(ConfigError, match=why):
        counted(process, getattr(steps, name), **given)


def test_a_function_may_return_a_generator_that_it_has_started(process: MeasuringProcess) -> None:
    assert counted(process, steps.returns_the_rest_of_a_generator).first.instructions


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (steps.misses_a_file, r"FileNotFoundError: caf\\udce9"),
        (steps.exits_when_it_is_called_again, "the function ended its process with exit code 3$"),
        (steps.fails_when_it_is_called_again, r"again failed on moto-g4:(.|\n)*ValueError: called again"),
    ],
)
def test_an_exception_or_an_end_of_the_function_is_shown(
    process: MeasuringProcess, function: Callable[..., Any], says: str
) -> None:
    with pytest.raises(NotMet, match=says):
        counted(process, function)


def test_a_function_can_end_processes_that_it_started(process: MeasuringProcess) -> None:
    assert counted(process, steps.ends_a_program_and_a_fork).processes


@pytest.mark.parametrize("name", ["leaves_a_fork", "ignores_its_children"])
def test_a_function_may_leave_a_process_or_ignore_its_children(process: MeasuringProcess, name: str) -> None:
    """The process that is left behind keeps its end of the pipe to the measuring process open."""
    run = counted(process, getattr(steps, name))
    assert run.first.instructions
    assert run.processes == (run.seconds is None) == (name == "leaves_a_fork")


def test_memory_is_counted_also_if_the_function_uses_tracemalloc(process: MeasuringProcess) -> None:
    less, more = (counted(process, steps.measures_its_memory, keep=size) for size in (100_000, 200_000))
    assert [one.name for one in against(less, more).grew] == ["python_peak_bytes"]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_native_instructions_are_exact_and_those_of_programs_count() -> None:
    """Only the started program gets more work; the counts of functions that compress are exactly equal."""
    few, many = (
        count_native(asked(natives.compresses_and_sorts, count=5000, lines=lines)) for lines in (400, 2000)
    )
    assert sum(many.values()) > 1.01 * sum(few.values())
    assert sum(count for name, count in few.items() if many.get(name) == count) > 20 * 5000


@pytest.fixture
def no_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ``valgrind`` by a command that only starts the program: tests of failures need no counts."""
    (tmp_path / "valgrind").write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    (tmp_path / "valgrind").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.usefixtures("no_counts")
def test_a_failure_in_valgrind_is_reported_and_each_call_has_seeded_random_numbers() -> None:
    drawn = random.Random(0).randrange(10**6)
    why = rf"fails_when_it_is_called_again failed under Valgrind:(.|\n)*called again: \[{drawn}, {drawn}\]"
    with pytest.raises(NotMet, match=why):
        count_native(asked(natives.fails_when_it_is_called_again))
    late = msgspec.structs.replace(asked(natives.fails_when_it_is_called_again), limit_s=0.02)
    with pytest.raises(NotMet, match=r"took longer than 0\.02 s; set a larger limit_s= in the mark"):
        count_native(late)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.usefixtures("no_counts")
@pytest.mark.parametrize(
    ("function", "kind", "why"),
    [
        (natives.kills_its_process, NotMet, ": its process under Valgrind ended with signal 9 ('valgrind "),
        (natives.has_no_memory, NotMet, " failed under Valgrind:\nout of memory"),
        *(
            (function, ConfigError, ": Valgrind's counts cannot be read: they are not complete; is there ")
            for function in (natives.does_nothing, natives.leaves_half_of_its_counts)
        ),
    ],
)
def test_an_end_without_counts_says_why(
    function: Callable[..., Any], kind: type[Exception], why: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(function.__name__ + why)}"):
        count_native(asked(function))


def test_a_missing_valgrind_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs Valgrind; install it \(apt-get install valgrind\)$"):
        count_native(asked(natives.does_nothing))
