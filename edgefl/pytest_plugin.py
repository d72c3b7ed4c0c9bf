"""The pytest plugin: it runs a function with the speed and memory of a device, and checks its cost.

    @pytest.mark.edge_device("pixel-3a", "moto-g4")
    def test_training_step(edge_device):
        edge_device.run(training_step, batch=32).assert_budget(seconds=2.0, peak_mib=120)

Every pytest session loads this module. It imports the measuring code only when a test uses the mark or the
fixture.
"""

from __future__ import annotations

import inspect
import itertools
import shutil
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if "wrapper" not in inspect.signature(pytest.hookimpl).parameters:
    raise pytest.UsageError(
        "edgefl's plugin needs pluggy 1.2 or newer; upgrade pytest and pluggy, or leave the plugin out with "
        "-p no:edgefl.pytest_plugin"
    )

if TYPE_CHECKING:
    from edgefl.regression.checkout import Base
    from edgefl.regression.device import EdgeDevice, MarkOptions
    from edgefl.regression.session import Session
    from edgefl.regression.table import ResultRow, Written

FIXTURE = "edge_device"
ITSELF = "_edge_device_itself"
UNKNOWN = "–"
"""Text shown in place of a device's name for a failure that belongs to no device."""
CRASHED = "???"
"""Phase in the report that pytest-xdist or pytest-forked creates for a test whose process crashed."""
ABORTED: dict[int, str] = {
    pytest.ExitCode.INTERRUPTED: "was interrupted",
    pytest.ExitCode.INTERNAL_ERROR: "had an internal error",
}
"""Maps each exit status of a session that ended before all of its tests had run to a phrase for messages."""
NEEDS_LINUX = "edgefl needs Linux"
REPLACED = "a fixture of your own with this name replaces edgefl's, so the test has no device; rename yours"
RERUN = "rerun"
"""Outcome of a failed attempt in the report of pytest-rerunfailures, which runs the test once more."""
RESULTS = ("against", "json", "report")
"""Options that publish results even if no test ran on a device."""
MAX_VALUE = 200
"""Maximum length of a parameter's value in the name of a test, in characters."""
_MARK = (
    "edge_device(*profiles, repetitions=15, network=None, time_scale=1, limit_s=120, seconds=, peak_mib=, "
    "sent_mib=, joules=, end='middle', tolerance=0, counted='python', like='interpreter'): run the test "
    "once on each of these emulated devices, within these budgets; counted work may grow by `tolerance` "
    "percent; if the test does not use the edge_device fixture, the test function itself runs on the device"
)
_SESSION: pytest.StashKey[Session] = pytest.StashKey()
_DEVICE: pytest.StashKey[EdgeDevice] = pytest.StashKey()
_FUNCTION: pytest.StashKey[Callable[..., object]] = pytest.StashKey()
"""The test's own function. When the test runs, pytest-asyncio has already wrapped an ``async def``."""
_ROWS: pytest.StashKey[list[dict[str, Any]]] = pytest.StashKey()
_BASE: pytest.StashKey[Base | None] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("edgefl", "edgefl: tests on emulated devices").addoption
    kept = "Save the counted work of passing tests in edgefl-baselines/MODULE.json beside each test module."
    add("--edgefl-save", action="store_true", help=kept)
    more = "Fail if a function does more counted work than in its baseline. All hosts give the same verdict."
    add("--edgefl-compare", action="store_true", help=more)
    timed = "Save and compare CPU time and memory too; this needs a baseline from this host."
    add("--edgefl-timed", action="store_true", help=timed)
    against = (
        "Fail if a function takes more time or memory, or sends more bytes, than at REF (a branch, tag or "
        "commit). The last common commit of HEAD and REF is checked out, and its code and the current code "
        "are measured alternately."
    )
    add("--edgefl-against", metavar="REF", help=against)
    build = "Shell command that prepares the checkout of --edgefl-against, run in its top folder."
    add("--edgefl-build", metavar="COMMAND", help=build)
    grows = (
        "Percentage by which measured figures may grow with --edgefl-timed, and times and memory with "
        "--edgefl-against (default: 5)."
    )
    add("--edgefl-tolerance", metavar="PCT", default="5", help=grows)
    never = "Outcome of a test that could not be judged (default: fail)."
    add("--edgefl-invalid", choices=("fail", "skip"), default="fail", help=never)
    wall = "Wall-clock seconds per emulated second of the device (default: 1); 0 turns pacing off."
    add("--edgefl-time-scale", metavar="X", help=wall)
    add(
        "--edgefl-repetitions",
        metavar="N",
        help="Minimum number of repetitions, 9 or more; overrides the marks.",
    )
    add("--edgefl-json", metavar="FILE", help="Write the results to FILE, for `edgefl gate`.")
    shown = "Write an HTML page of the results, with the history of the baselines in git."
    add("--edgefl-report", metavar="FILE", help=shown)
    cap = (
        "Maximum wall-clock seconds of the measurements in each test, not counting imports (default: 40 with "
        "--edgefl-against, otherwise no limit). A test that needs more time cannot be judged."
    )
    add("--edgefl-limit", metavar="S", help=cap)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)
    config.pluginmanager.register(_SessionReport(config), "edgefl-rows")
    for option in ("tolerance", "time_scale", "repetitions", "limit"):
        _number(config, option)
    for option in ("json", "report"):
        if config.getoption(f"edgefl_{option}") == "":  # for example from an unset shell variable
            raise pytest.UsageError(f"--edgefl-{option}: must be the name of a file (got '')")
    for option in RESULTS:
        if sys.platform != "linux" and config.getoption(f"edgefl_{option}") is not None:
            raise pytest.UsageError(f"--edgefl-{option}: {NEEDS_LINUX}")
    config.stash[_BASE] = _base(config)


def _base(config: pytest.Config) -> Base | None:
    """Return the commit to compare with. Raises UsageError if there is no such commit."""
    if (ref := config.getoption("edgefl_against")) is None:
        return None
    from edgefl.errors import ConfigError
    from edgefl.regression.checkout import find_base

    try:
        return find_base(ref, config.rootpath)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    # Check the type first: some objects, such as `unittest.mock.call`, have every attribute. A mark of a
    # module applies only to the module's tests, not to its other functions.
    function = _function_of(obj)
    if function is None or not collector.istestfunction(function, name):
        return
    marks = _listed(getattr(function, "pytestmark", []))
    if any(mark.name == "edge_device" for mark in marks) or collector.get_closest_marker("edge_device"):
        pytest.mark.usefixtures(ITSELF)(function)


def _function_of(obj: object) -> FunctionType | None:
    """Return ``obj`` if it is a function, or the function of a static or class method; otherwise None."""
    try:
        if isinstance(obj, staticmethod | classmethod):
            obj = obj.__func__
        return obj if inspect.isfunction(obj) else None
    except Exception:  # a lazy object, such as Django's settings, may be unable to tell its class
        return None


def _listed(marks: Any) -> Sequence[Any]:
    """Return the value of an attribute ``pytestmark``, which may be a single mark, as a sequence."""
    return marks if isinstance(marks, list | tuple) else [marks]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (mark := _mark_of(metafunc.definition)) is None or sys.platform != "linux":
        return
    _require_one_mark(metafunc.definition)
    from edgefl.errors import ConfigError
    from edgefl.regression.device import mark_options

    try:
        wanted = mark_options(mark.args, mark.kwargs)
    except ConfigError as error:
        raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from None
    metafunc.parametrize(
        FIXTURE if FIXTURE in metafunc.fixturenames else ITSELF,
        wanted,
        ids=[_short_name(profile) for profile in mark.args],
        indirect=True,
    )


def _mark_of(test: pytest.Item) -> pytest.Mark | None:
    """Return the mark of a test, or else that of its class or module.

    A class's own mark replaces those that it inherits, which pytest lists first.
    """
    for node in reversed(test.listchain()):
        if marks := [mark for mark in node.own_markers if mark.name == "edge_device"]:
            return marks[-1 if isinstance(node, pytest.Class) else 0]
    return None


def _require_one_mark(definition: pytest.Item) -> None:
    """Raise CollectError if the innermost function, class or module with a mark has more than one mark."""
    marks = next(filter(None, map(_own_marks, reversed(definition.listchain()))), [])
    if len(marks) > 1:
        devices = ", ".join(dict.fromkeys(f'"{device}"' for mark in marks for device in mark.args))
        raise pytest.Collector.CollectError(
            f"{definition.nodeid} has {len(marks)} edge_device marks, but only one is allowed; name all "
            f"devices in one mark, edge_device({devices}), or write a test for each mark"
        )


def _own_marks(node: Any) -> list[pytest.Mark]:
    """Return the edge_device marks of the node itself, excluding those that a class inherits."""
    own = vars(node.obj).get("pytestmark", []) if isinstance(node, pytest.Class) else node.own_markers
    marks: list[Any] = [getattr(one, "mark", one) for one in _listed(own)]
    return [mark for mark in marks if mark.name == "edge_device"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test if its mark has no effect, because it would pass without the measurement that it asks for.

    Where nothing can be measured, skip all tests on devices.
    """
    if sys.platform != "linux" and _on_device(item):
        pytest.skip(NEEDS_LINUX)
    if not isinstance(item, pytest.Function) or item.get_closest_marker("edge_device") is None:
        return
    given = item.callspec.params if hasattr(item, "callspec") else {}
    marks = item.callspec.marks if hasattr(item, "callspec") else []  # marks of parameters' values
    late = any(mark.name == "edge_device" for mark in marks)
    if (FIXTURE in given or ITSELF in given) and not late:
        return
    import unittest

    why = "the mark was added too late; write @pytest.mark.edge_device(…) above the function"
    if item.cls is not None and issubclass(item.cls, unittest.TestCase):
        why = "a method of a unittest.TestCase cannot run on devices; use a function or a plain class"
    pytest.fail(f"edge_device: {why}", pytrace=False)


# With ``wrapper=True``, this function would be in the traceback of each fixture that fails, in any project.
@pytest.hookimpl(hookwrapper=True, specname="pytest_runtest_setup")
def pytest_runtest_setup_judged(item: pytest.Item) -> Generator[None, Any, None]:
    """Fail or skip a test if a fixture ran a function on the device and the result could not be judged."""
    if _ROWS in item.stash:  # a rerun: reports must not contain the rows of the earlier attempt
        _keep(item, [])
    outcome = yield
    errors = sys.modules.get("edgefl.errors")
    if errors is None or not isinstance(outcome.exception, errors.Invalid):
        return
    why = str(outcome.exception)
    if (device := item.stash.get(_DEVICE, None)) is not None:
        from edgefl.regression.table import rows

        device.session.tell("")
        _keep(item, rows(device, item.nodeid, "", why, None))
    try:
        _end_unjudged(item.config, why)
    except BaseException as ended:
        outcome.force_exception(ended)


def _keep(item: pytest.Item, made: Sequence[ResultRow]) -> None:
    """Keep the rows of a test, also as JUnit properties, instead of those of an earlier attempt."""
    import msgspec

    from edgefl.regression.table import PROPERTIES, properties

    others = [one for one in item.user_properties if not str(one[0]).startswith(PROPERTIES)]
    item.user_properties[:] = [*others, *itertools.chain.from_iterable(map(properties, made))]
    item.stash[_ROWS] = msgspec.to_builtins(made)


def _end_unjudged(config: pytest.Config, why: str) -> NoReturn:
    """Fail or skip a test that could not be judged."""
    __tracebackhide__ = True
    if config.getoption("edgefl_invalid") == "skip":
        pytest.skip(f"COULD NOT BE JUDGED: {why}")
    pytest.fail(f"COULD NOT BE JUDGED: {why}", pytrace=False)


@pytest.fixture
def edge_device(request: pytest.FixtureRequest) -> EdgeDevice:
    """A device named in the test's mark; ``edge_device.run(function, …)`` runs a function on it."""
    if not hasattr(request, "param") or _mark_of(request.node) is None:
        which = 'edge_device: the test names no device; mark it: @pytest.mark.edge_device("pixel-3a")'
        pytest.fail(which, pytrace=False)
    return _make(request, request.param)


@pytest.fixture
def _edge_device_itself(request: pytest.FixtureRequest) -> EdgeDevice | None:
    """The device of a marked test that does not use `edge_device`: the test itself runs on it."""
    return _make(request, request.param) if hasattr(request, "param") else None


def _make(request: pytest.FixtureRequest, options: MarkOptions) -> EdgeDevice:
    from edgefl.errors import ConfigError
    from edgefl.regression.device import DeviceTest, EdgeDevice

    node = request.node
    label = _label(node.nodeid, node.callspec.params)
    # Different values of a parameter may look alike in the label, such as two large arrays.
    values = [id(value) for name, value in node.callspec.params.items() if name not in (FIXTURE, ITSELF)]
    group = f"{label} {values}"
    mark = _mark_of(node)
    devices = len(mark.args) if mark is not None else 1
    name = f"{node.parent.nodeid}::{node.name}".partition("::")[2]  # xdist adds a group to the node's own id
    test = DeviceTest(name, node.path, group, devices, label)
    node.stash.setdefault(_FUNCTION, node.function)
    try:
        made = node.stash[_DEVICE] = EdgeDevice(options, test, _session(request.config))
    except ConfigError as error:
        pytest.fail(str(error), pytrace=False)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    device = pyfuncitem.stash.get(_DEVICE, None)
    if device is None:
        if pyfuncitem.get_closest_marker("edge_device") is not None:
            pytest.fail(f"edge_device: {REPLACED}", pytrace=False)
        return (yield)
    from edgefl.regression.baseline import path_of
    from edgefl.regression.table import rows

    try:
        with device.judged() as found:
            result = yield
    finally:
        device.session.tell("")
        file = str(path_of(pyfuncitem.path)) if pyfuncitem.config.getoption("edgefl_save") else None
        failed = found.failed or _failed_subtests(pyfuncitem)
        made = [] if found.skipped else rows(device, pyfuncitem.nodeid, failed, found.invalid, file)
        _keep(pyfuncitem, made)
    if not (found.failed or found.invalid):
        return result
    if found.failed:
        pytest.fail(found.failed, pytrace=False)
    _end_unjudged(pyfuncitem.config, found.invalid)


def _failed_subtests(item: pytest.Item) -> str:
    """Return a reason for failing the test if one of its subtests has failed (pytest 9); otherwise ""."""
    key = getattr(sys.modules.get("_pytest.subtests"), "failed_subtests_key", None)
    counts: Mapping[Any, int] = item.config.stash.get(key, {}) if key is not None else {}
    failed = counts.get(getattr(item, "id", item.nodeid)) or counts.get(item.nodeid)
    return "a subtest failed" if failed else ""


@pytest.hookimpl(tryfirst=True, specname="pytest_pyfunc_call")
def pytest_pyfunc_call_on_device(pyfuncitem: pytest.Function) -> object:
    given: dict[str, Any] = pyfuncitem.funcargs
    device: EdgeDevice | None = given.get(ITSELF)
    if device is None:
        return None
    from edgefl.loading import signature

    function = pyfuncitem.stash[_FUNCTION]
    names = signature(function).parameters
    arguments = {name: given[name] for name in names if name in given}
    device.run_call(function, None, (), arguments, pyfuncitem.cls)
    return True


@pytest.hookimpl(specname="pytest_pyfunc_call")
def pytest_pyfunc_call_async(pyfuncitem: pytest.Function) -> None:
    """Fail a test that is an ``async def`` and that no other plugin has run."""
    if pyfuncitem.stash.get(_DEVICE, None) is not None and inspect.iscoroutinefunction(pyfuncitem.obj):
        from edgefl.errors import ConfigError

        raise ConfigError(
            f"{pyfuncitem.name} is an async def, which pytest does not run by itself: a test that uses "
            "edge_device must be a plain def (the function that it measures may call asyncio.run)"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)  # sees the report after pytest has applied the mark xfail
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if rows := _rows_of(item, report):
        # pytest-xdist copies a report's attributes from its workers.
        report.edgefl = rows  # type: ignore[attr-defined]
    return report


def _rows_of(item: pytest.Item, report: pytest.TestReport) -> list[dict[str, Any]]:
    """Return the rows of one phase of a test: setup, call or teardown."""
    rows = item.stash.get(_ROWS, []) if report.when != "teardown" else []
    if report.skipped and hasattr(report, "wasxfail"):
        return [{**row, "expected": True} for row in rows]
    failed_on_device = report.failed and sys.platform == "linux" and _on_device(item)
    if not failed_on_device or any(row["outcome"] != "PASS" for row in rows):
        return rows
    # No row contains the failure: it happened in setup or teardown, or a test with a strict xfail passed.
    return [*({**row, "entry": None, "counted": None} for row in rows), _error_row(item, report)]


def _on_device(item: pytest.Item) -> bool:
    if item.get_closest_marker("edge_device") is not None:
        return True
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return FIXTURE in fixtures and fixtures[FIXTURE][-1].func.__module__ == __name__


def _error_row(item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
    import msgspec

    from edgefl.regression.device import MarkOptions

    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    options = given.get(FIXTURE) or given.get(ITSELF)
    device = _short_name(options.profile) if isinstance(options, MarkOptions) else UNKNOWN
    why = _reason(report) if report.when == "call" else f"error in {report.when}: {_reason(report)}"
    plain: dict[str, Any] = msgspec.to_builtins(
        _failure(item.nodeid, _label(item.nodeid, given), device, why)
    )
    return plain


def _failure(test: str, label: str, device: str, why: str) -> ResultRow:
    """Return the row of a failure that belongs to no measured function."""
    from edgefl.regression.table import ResultRow

    return ResultRow(test=test, label=label, function="", device=device, outcome="FAIL", why=why)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a phase or a collection failed, in one line."""
    from edgefl.regression.device import shortened

    if (crash := getattr(report.longrepr, "reprcrash", None)) is not None:
        return shortened(crash.message)
    lines = report.longreprtext.splitlines()
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    return errors[-1] if errors else shortened(report.longreprtext)


def _label(nodeid: str, params: Mapping[str, object]) -> str:
    """Return a test's name without its device, but with its other parameters."""
    others = [f"{name}={_text(value)}" for name, value in params.items() if name not in (FIXTURE, ITSELF)]
    return f"{nodeid.partition('[')[0]} {','.join(others)}".strip()


def _text(value: object) -> str:
    """Return a parameter's value as text; a long text is cut off."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr() raises {type(error).__name__}>"
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"


def _short_name(profile: str) -> str:
    """Return the name of a profile; for a path, the name of the file without folder and suffix."""
    return Path(profile).stem if "/" in profile else profile


class _SessionReport:
    """Collects, shows and saves the result rows of all tests, including those from pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker = hasattr(config, "workerinput")
        self._placed: list[tuple[dict[str, Any], tuple[str, int | None]]] = []
        """Each row, with the file of its test (relative to the root folder) and the line number."""
        self._lost: list[pytest.TestReport | pytest.CollectReport] = []
        """pytest's reports on files that could not be collected and on tests whose process crashed. The files
        may contain device tests, and the tests may be device tests."""
        self._notes: list[str] = []
        self._interrupted = False

    def pytest_keyboard_interrupt(self) -> None:
        """Record that Ctrl-C or `pytest.exit` ended the session; the exit status may not show this."""
        self._interrupted = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self._worker:
            self._lost.append(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == RERUN:
            self._placed = [(row, place) for row, place in self._placed if row["test"] != report.nodeid]
            return
        if report.when == CRASHED:
            self._lost.append(report)
        self._placed += [(row, report.location[:2]) for row in getattr(report, "edgefl", ())]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (measuring := session.config.stash.get(_SESSION, None)) is not None:
            measuring.close()
        if self._worker or self._config.getoption("collectonly"):
            return
        if any(row["counted"] or row["entry"] for row, _ in self._placed):
            from edgefl.regression.table import save_all

            self._add(session, save_all(self._rows()))
        if self._placed or any(self._config.getoption(f"edgefl_{option}") for option in RESULTS):
            self._add(session, self._published(session))
        if not self._placed and self._config.getoption("edgefl_against") and not session.exitstatus:
            self._notes.append("edgefl: no test with the mark edge_device ran, so nothing was compared")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _add(self, session: pytest.Session, written: Written) -> None:
        """Add the lines to the terminal summary. If a file of results was not written, the session fails."""
        self._notes += written.lines
        if not (written.complete or session.exitstatus):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _published(self, session: pytest.Session) -> Written:
        """Write the results to all files that the options request."""
        import msgspec

        from edgefl.regression.gate import GateRow
        from edgefl.regression.publish import Outlets, PlacedRow, gate_results, publish

        option, base = self._config.getoption, self._config.stash[_BASE]
        top = self._config.rootpath
        placed = [
            PlacedRow(row, top / file, line)
            for row, (_, (file, line)) in zip(self._rows(), self._placed, strict=True)
        ]
        for one in self._lost:
            crashed = one.when == CRASHED
            why = str(one.longrepr) if crashed else f"could not be collected: {_reason(one)}"
            placed.append(PlacedRow(_failure(one.nodeid, one.nodeid, UNKNOWN, why), top / one.fspath, None))
        results = gate_results(
            placed,
            base.name if base is not None else "",
            top,
            skip=option("edgefl_invalid") == "skip",
        )
        early = "stopped early" if session.shouldfail or session.shouldstop else ""
        status = pytest.ExitCode.INTERRUPTED if self._interrupted else session.exitstatus
        if (ended := ABORTED.get(status, early)) and not results.red:
            why = f"pytest {ended}, so results of other tests may be missing"
            lost = GateRow(test="pytest", function="", device=UNKNOWN, outcome="FAIL", why=why)
            results = msgspec.structs.replace(results, rows=(*results.rows, lost))
        files, folder = map(option, ("edgefl_json", "edgefl_report")), self._config.invocation_params.dir
        outlets = Outlets(*(None if file is None else folder / file for file in files))
        return publish(results, {one.file for one in placed}, outlets)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not (self._placed or self._notes):
            return
        from edgefl.regression.table import lines
        from edgefl.terminal import printable

        terminalreporter.section("edgefl", sep="=")
        columns = shutil.get_terminal_size().columns
        for line in (*(lines(self._rows(), columns) if self._placed else ()), *self._notes):
            terminalreporter.write_line(printable(line))

    def _rows(self) -> list[ResultRow]:
        import msgspec

        from edgefl.regression.table import ResultRow

        return msgspec.convert([row for row, _ in self._placed], list[ResultRow])


def _session(config: pytest.Config) -> Session:
    """Return the session; it is created when the first test uses a device."""
    if _SESSION not in config.stash:
        from edgefl.regression.progress import Progress
        from edgefl.regression.session import Session, SessionOptions

        save, compare, timed = (config.getoption(f"edgefl_{name}") for name in ("save", "compare", "timed"))
        tolerance, repetitions = (_number(config, name) or 0 for name in ("tolerance", "repetitions"))
        scale, limit_s = _number(config, "time_scale"), _number(config, "limit")
        options = SessionOptions(
            save,
            compare,
            timed,
            tolerance / 100,
            scale,
            int(repetitions) or None,
            limit_s,
            against=config.stash[_BASE],
            build=config.getoption("edgefl_build"),
        )
        config.stash[_SESSION] = Session(options, Progress(config))
    return config.stash[_SESSION]


def _number(config: pytest.Config, option: str) -> float | None:
    """Return the value of a numeric option. Raises UsageError for an invalid number."""
    text = config.getoption(f"edgefl_{option}")
    if text is None:
        return None
    least = {"repetitions": 9, "limit": 1}.get(option, 0)
    name = f"--edgefl-{option.replace('_', '-')}"
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not least <= value < 1e6 or (option == "repetitions" and value != int(value)):
        kind = "a whole number" if option == "repetitions" else "a number"
        raise pytest.UsageError(f"{name}: must be {kind} of at least {least} (got {text!r})")
    return value
