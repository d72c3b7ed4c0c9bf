"""Tests of the comparison of counted work with its baseline, and of the counting of bytecode."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from regression_samples import counted

from edgefl.devices import load_device
from edgefl.devices.code import clusters_of, throughput
from edgefl.host.code_operations import python_bodies
from edgefl.regression import baseline
from edgefl.regression.bytecode import CodeName, NotCounted, count_instructions
from edgefl.regression.callgrind import _named
from edgefl.regression.counted import by_owner, python_seconds
from edgefl.regression.counts import (
    FIGURES,
    NATIVE_CODE,
    NOT_COUNTED,
    WAITS,
    CountedEntry,
    CountedRun,
    CountedVerdict,
    Counts,
    Versions,
    compare,
    entry_of,
    summary,
)

HERE = Versions("3.11", "2.13.0")
replace = msgspec.structs.replace


def run_of(*instructions: dict[str, int] | None, figures: dict[str, int] | None = None) -> CountedRun:
    """A run whose two counts have these instructions by function; a single argument is used for both."""
    first, second = (
        Counts(figures=figures or {}, instructions=one) for one in (*instructions, instructions[0])[:2]
    )
    return replace(counted(), first=first, second=second)


def entry(run: CountedRun, versions: Versions = HERE) -> CountedEntry:
    return entry_of("test_step", "step", run, versions)


def against(
    before: CountedRun, now: CountedRun, tolerance: float = 0.0, versions: Versions = HERE
) -> CountedVerdict:
    return compare(entry(before), now, versions, tolerance)


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_fails_only_if_it_grew(name: str) -> None:
    few, many = 10**7, 10**7 + 10**5
    runs = [counted(count) if name == "instructions" else counted(**{name: count}) for count in (few, many)]
    if name == "native_instructions":
        runs = [counted().with_native({"spin": count}) for count in (few, many)]
    grew = against(*runs)
    assert [(one.name, one.before, one.now) for one in grew.grew] == [(name, few, many)]
    assert grew.unjudged == ()
    for before, now, tolerance in ((runs[1], runs[0], 0.0), (runs[0], runs[0], 0.0), (*runs, 0.011)):
        assert against(before, now, tolerance) == CountedVerdict()


def test_the_most_important_growth_is_first_and_growth_from_zero_has_no_percentage() -> None:
    before = counted(1000, matmul_flop=10**9, tensor_peak_bytes=50 << 20)
    now = counted(1001, matmul_flop=10**9 + 1, tensor_peak_bytes=51 << 20, sent_bytes=5 << 20)
    texts = [str(one) for one in against(before, now).grew]
    assert texts == [
        "sent 0 → 5 MiB",
        "peak memory of tensors 50 MiB → 51 MiB (+2.0%)",
        "Python bytecode instructions 1,000 → 1,001 (+0.10%; most in steps.step 1,000 → 1,001)",
        "FLOP of matrix products 1,000,000,000 → 1,000,000,001 (+0.00%)",
    ]


def test_the_function_that_grew_is_named() -> None:
    before = run_of({"steps.train": 100, "torch 2.13.0": 5000})
    now = run_of({"steps.train": 90, "steps.normalise": 60, "torch 2.13.0": 5400})
    (grew,) = against(before, now).grew
    assert "most in steps.normalise 0 → 60)" in str(grew)
    (grew,) = against(before, run_of({"steps.train": 100, "torch 2.13.0": 5400})).grew
    assert "most in torch 2.13.0 5,000 → 5,400)" in str(grew)


def test_growth_in_another_version_of_torch_is_not_judged_but_growth_in_ones_own_code_fails() -> None:
    before = run_of({"steps.train": 100, "torch 2.13.0": 5000}, figures={"calls": 10})
    newer = Versions("3.11", "2.14.0")
    upgraded = run_of({"steps.train": 100, "torch 2.14.0": 6000}, figures={"calls": 12})
    found = against(before, upgraded, versions=newer)
    assert found.grew == ()
    assert len(found.unjudged) == 2
    why = "torch is 2.14.0, the baseline's is 2.13.0, which may be the reason; save it again"
    assert why in found.unjudged[0]
    own = run_of({"steps.train": 110, "torch 2.14.0": 5000}, figures={"calls": 10})
    assert [one.name for one in against(before, own, versions=newer).grew] == ["instructions"]
    same = run_of({"steps.train": 100, "torch 2.14.0": 5000}, figures={"calls": 10})
    assert against(before, same, versions=newer) == CountedVerdict()
    for name in ("tensor_peak_bytes", "tensor_kept_bytes", "python_peak_bytes", "python_kept_bytes"):
        few, more = (
            run_of({f"torch {version}": 5000}, figures={name: mib << 20})
            for version, mib in (("2.13.0", 1), ("2.14.0", 3))
        )
        found = against(few, more, versions=newer)
        assert found.grew == ()
        assert why in found.unjudged[0]


def test_long_names_of_tests_and_functions_can_be_saved(tmp_path: Path) -> None:
    """The names of C++ templates and of a test's parameters may have thousands of characters."""
    templates = {f"void step<{'long, ' * 1000}{last}>(long)": 5 * 10**5 for last in ("int", "double")}
    run = counted().with_native(_named(Counter(templates)))
    made = entry_of(f"test_step[{'x' * 2000}]", "step", run, Versions("3.11", "2.13.0", "x86_64"))
    path = tmp_path / "edgefl-baselines" / "test_a.json"
    baseline.save(path, [], [msgspec.convert(msgspec.to_builtins(made), CountedEntry)])
    (found,) = baseline.load_counted(path).values()
    assert found == made
    assert [len(name) for name in found.native["x86_64"]] == [500]
    assert found.value("native_instructions", Versions("3.11", "2.13.0", "x86_64")) == 10**6
    code = {CodeName("/home/me/steps.py", "outer.<locals>." * 100 + "step"): 7}
    assert [(len(name), count) for name, count in by_owner(code).items()] == [(500, 7)]


def test_the_spaces_in_a_native_name_are_no_version() -> None:
    here = Versions("3.11", "2.13.0", "x86_64")
    before, now = (
        counted(calls=1).with_native({f"long step<long, {kind}>(long)": count})
        for kind, count in (("int", 10**6), ("double", 2 * 10**6))
    )
    found = compare(entry(before, here), now, here)
    assert [one.name for one in found.grew] == ["native_instructions"]
    assert str(found.grew[0]).endswith("(+100.0%; most in long step<long, double>(long) 0 → 2,000,000)")
    newer = compare(entry(before, here), now, here._replace(torch="2.14.0"))
    assert newer.grew == ()
    assert "torch is 2.14.0, the baseline's is 2.13.0" in newer.unjudged[0]


def test_each_version_of_python_has_its_own_counts_and_the_others_stay(tmp_path: Path) -> None:
    old, new = Versions("3.11", "2.13.0"), Versions("3.12", "2.13.0")
    path = tmp_path / "edgefl-baselines" / "test_a.json"
    before = run_of({"steps.train": 100}, figures={"sent_bytes": 7})
    baseline.save(path, [], [entry(before, old)])
    other = run_of({"steps.train": 90}, figures={"sent_bytes": 8})
    found = compare(baseline.load_counted(path)["test_step", "step"], other, new)
    assert [one.name for one in found.grew] == ["sent_bytes"]  # is judged nevertheless
    assert found.unjudged[0].startswith(
        "Python's instructions and memory: the baseline contains them for Python 3.11, but not"
    )
    baseline.save(path, [], [entry(run_of({"steps.train": 90}), new)])
    (kept,) = baseline.load_counted(path).values()
    assert {name: one.instructions for name, one in kept.python.items()} == {
        "3.11": {"steps.train": 100}, "3.12": {"steps.train": 90},
    }  # fmt: skip
    text = path.read_text()
    baseline.save(path, [], [entry(run_of({"steps.train": 90}), new)])
    assert path.read_text() == text  # the same figures give the same file
    assert json.loads(text)["counted"][0]["python"]["3.12"]["instructions"] == {"steps.train": 90}


def test_a_figure_that_varied_under_one_version_of_python_is_compared_under_the_others() -> None:
    old, new = Versions("3.11", "2.13.0"), Versions("3.12", "2.13.0")
    steady = run_of({"steps.train": 100}, figures={"python_peak_bytes": 1 << 20})
    varies = run_of({"steps.train": 100}, {"steps.train": 120}, figures={"python_peak_bytes": 1 << 20})
    varies = replace(varies, second=replace(varies.second, figures={}))
    more = run_of({"steps.train": 200}, figures={"python_peak_bytes": 3 << 20})
    for first, second in ((old, new), (new, old)):  # whichever was saved first
        saved = entry(varies if first is old else steady, first)
        saved = entry(varies if second is old else steady, second).merged(saved)
        names = ("instructions", "python_peak_bytes")
        assert compare(saved, more, old) == CountedVerdict(left_out=names)
        found = compare(saved, more, new)
        assert ({one.name for one in found.grew}, found.left_out) == ({*names}, ())
    assert entry(steady, old).merged(saved).varying == ()
    none = run_of({"steps.train": 100})
    saved = entry(none, new).merged(entry(varies, old))
    assert entry(none, old).merged(saved).varying == ()


def test_a_figure_whose_two_counts_differ_is_judged_only_if_both_grew() -> None:
    steady = run_of({"steps.train": 100}, figures={"sent_bytes": 7})
    varies = run_of({"steps.train": 100}, {"steps.train": 120}, figures={"sent_bytes": 8})
    found = against(steady, varies)
    assert [one.name for one in found.grew] == ["sent_bytes"]
    assert found.unjudged[0].startswith(
        "Python bytecode instructions: two counts of one call differ (100 and 120)"
    )
    more = run_of({"steps.train": 110}, {"steps.train": 120})
    assert [(one.before, one.now) for one in against(steady, more).grew] == [(100, 110)]  # both are more
    assert against(steady, run_of({"steps.train": 80}, {"steps.train": 100})) == CountedVerdict()
    saved = entry(varies)
    assert (saved.varying, saved.python["3.11"].instructions) == (("instructions",), None)
    found = compare(saved, run_of({"steps.train": 500}, figures={"sent_bytes": 8}), HERE)
    assert found == CountedVerdict(left_out=("instructions",))  # and shown in the table


def test_batches_of_worker_processes_may_arrive_later() -> None:
    """With a DataLoader's workers, the memory's peak varies by a few small batches, but the memory that is
    still in use afterwards does not."""
    few, many = 15_488, 15_488 + (16 << 10)
    for processes in (False, True):
        before, now, more, kept = (
            replace(counted(9, **figures), processes=processes)
            for figures in (
                {"tensor_peak_bytes": few},
                {"tensor_peak_bytes": many},
                {"tensor_peak_bytes": many + 1},
                {"tensor_peak_bytes": few, "tensor_kept_bytes": 8},
            )
        )
        varies = replace(before, second=now.second)
        assert bool(varies.varying()) == bool(against(before, now).grew) == (not processes)
        assert bool(against(before, varies).unjudged) == (not processes)
        found = [one.name for run in (more, kept) for one in against(before, run).grew]
        assert found == ["tensor_peak_bytes", "tensor_kept_bytes"]


def test_uncounted_figures_are_neither_compared_nor_timed() -> None:
    uncounted = run_of(None, figures={"calls": 10})
    for before in (counted(100, calls=10), uncounted):
        found = against(before, uncounted)
        assert found == CountedVerdict(unjudged=(f"Python bytecode instructions: {NOT_COUNTED}",))
    found = against(uncounted, counted(100, calls=11))
    assert [one.name for one in found.grew] == ["calls"]  # is judged nevertheless
    assert found.unjudged[0].endswith(": not counted when the baseline was saved; save it again")
    once = run_of({"steps.train": 100}, None)
    assert [entry(one).uncounted for one in (uncounted, once, counted(100))] == [True, True, False]
    assert summary(run_of(None)) == "counted: bytecode not counted"
    assert run_of(None).seconds is None  # the time of torch's operations alone would be far too short


def recurse() -> None:
    recurse()


def catches_a_recursion() -> None:
    with pytest.raises(RecursionError):
        recurse()


def replaces_the_trace_function() -> None:
    sys.settrace(None)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no trace function counts")
@pytest.mark.parametrize("function", [catches_a_recursion, replaces_the_trace_function])
def test_a_function_that_ends_the_counting_has_no_count(function: Callable[[], object]) -> None:
    with pytest.raises(NotCounted):
        count_instructions(function)


def add(a: int, b: int) -> int:
    return a + b


def instructions_of(function: object) -> int:
    counts = count_instructions(function)  # type: ignore[arg-type]
    return sum(count for code, count in counts.items() if code.qualname == "add")


def test_instructions_are_counted_exactly_also_in_threads() -> None:
    once = instructions_of(lambda: add(1, 2))
    assert once > 1
    assert instructions_of(lambda: [add(1, 2) for _ in range(1000)]) == 1000 * once

    def threads() -> None:
        made = [threading.Thread(target=lambda: add(1, 2)) for _ in range(3)]
        for thread in made:
            thread.start()
        for thread in made:
            thread.join()

    assert instructions_of(threads) == 3 * once


def endless() -> None:
    while True:
        pass


def ends_without_an_error() -> None:
    with contextlib.suppress(BaseException):
        endless()


def in_a_thread() -> None:
    thread = threading.Thread(target=ends_without_an_error)
    thread.start()
    thread.join()


@pytest.mark.parametrize("function", [endless, in_a_thread])
def test_counting_ends_at_its_limit_and_can_start_again(function: Callable[[], object]) -> None:
    with pytest.raises(NotCounted):
        count_instructions(function, most=1000)
    assert instructions_of(lambda: add(1, 2)) > 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_not_counted_and_does_not_end_at_the_limit() -> None:
    ended: list[int] = []

    def forks() -> None:
        if (pid := os.fork()) == 0:  # such as a worker of a DataLoader
            code = 1
            with contextlib.suppress(NotCounted):
                code = sum(0 for _ in range(2000))
            os._exit(code)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    assert sum(count_instructions(forks, most=1000).values()) < 100
    assert ended == [0]


def test_code_belongs_to_its_function_or_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blocked", None)
    stdlib, site = sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]
    counts = {
        CodeName(__file__, "add"): 1,
        CodeName(f"{site}/torch/nn/modules/module.py", "Module.__call__"): 2,
        CodeName(f"{site}/torch/optim/sgd.py", "SGD.step"): 4,
        CodeName(f"{stdlib}/json/encoder.py", "encode"): 8,
        CodeName(f"{stdlib}/pathlib.py", "Path.exists"): 16,
        CodeName(baseline.__file__, "load"): 32,
        CodeName("<string>", "__init__"): 64,
    }
    found = by_owner(counts)
    assert sorted(found.values()) == [1, 6, 8]
    assert next(name for name, count in found.items() if count == 1) == f"{__name__}.add"
    assert next(name for name, count in found.items() if count == 6).startswith("torch 2.")
    assert next(name for name, count in found.items() if count == 8).startswith("Python 3.")


def test_the_time_by_counts_is_that_of_ordinary_code() -> None:
    """Most bytecode instructions take longer than those of the five-body problem, the benchmark that defines
    a device's interpreter rate."""
    device = load_device("pixel-4")
    instructions = sum(count_instructions(lambda: python_bodies(100)).values())
    bodies_s = 100 / throughput(clusters_of(device), "interpreter", 1).value
    assert 1.5 < python_seconds(device, {"mine.step": instructions}) / bodies_s < 3.0


def test_a_device_without_a_list_of_cores_interprets_at_its_training_rate() -> None:
    times = [python_seconds(load_device(name), {"mine.step": 1000}) for name in ("tier-p10", "tier-p90")]
    assert times[0] > times[1] > 0


def test_a_summary_says_why_the_counts_give_no_time() -> None:
    native = replace(counted(), untimed=NATIVE_CODE)
    assert summary(native) == "counted: 100 bytecode, no time: native code is not counted"
    assert summary(native.with_native({"sort": 7})) == "counted: 100 bytecode, 7 native"
    assert native.with_native({"sort": 7}).seconds is None
    assert summary(replace(counted(), untimed=WAITS)).endswith("no time: it sleeps or waits")
    assert replace(counted(), link_s=1.0).seconds == pytest.approx(1.011)
