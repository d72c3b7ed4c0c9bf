"""What all tests share: markers by folder, real data if there is any, proof that nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

# Before anything imports torch: its thread pool would not survive a fork, and the cores are few.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["EDGEFL_OFFLINE"] = "1"  # tests download from servers of their own only

import hypothesis
import psutil
import pytest
import pytest_timeout

from edgefl import kernels
from edgefl.host import groups as hierarchy
from edgefl.host.fork_server import ForkServer
from edgefl.run import supervisor
from tests.patience import Patience
from tests.process import warm

# Modules that take the place of others where they are imported.
collect_ignore = ["fault/bad_clients.py", "fault/faulty_clients.py", "mutants"]
collect_ignore += [] if importlib.util.find_spec("flwr") else ["flower_app.py"]
gc.disable()  # until the tests are collected, since all that is imported for them stays
BOUND_S = 20.0
"""How long something that is on its way out may take: a bound, not a delay."""
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # a script's ``&``, ``nohup``; and tests send it
        signal.signal(number, handler)

# The same examples on every machine, and no bar in seconds; HYPOTHESIS_PROFILE=explore looks further.
STALLS = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("edgefl", deadline=None, derandomize=True, suppress_health_check=STALLS)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "edgefl"))


def pytest_configure() -> None:
    found = [
        each.read_text("direct_url.json") or "" for each in importlib.metadata.distributions(name="edgefl")
    ]
    if any(found) and not any('"editable": true' in each for each in found):
        raise pytest.UsageError(
            "edgefl is installed as a copy, not as these files: make check makes a .venv with these"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = tuple(f"{Path(__file__).with_name(name)}{os.sep}" for name in ("process", "fault"))
    for item in items:
        if str(item.path).startswith(folders):
            item.add_marker(pytest.mark.process)


SHARING = {
    "tests/process/test_nodes.py": "alone",
    "tests/process/test_regression_counted.py": "warm_measuring",
    "tests/process/test_pytest_plugin.py": "warm_measuring",
    "tests/process/test_regression_worker.py": "warm_measuring",
    "tests/process/test_results.py": "runs",
    "tests/process/test_sweep.py": "swept",
    "tests/fault/test_bit_flips.py": "recorded",
    "tests/fault/test_power_cuts.py": "recorded",
}
"""Modules whose tests share a fixture that takes seconds, and its name."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have ``--dist loadscope`` hand out tests one by one, except those that share such a fixture.

    ``--dist loadgroup`` does not group with pytest 9.2, whose node ids pytest-xdist 3.8 cannot mark.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SHARING.get(nodeid.partition("::")[0], nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is there for good out of each later garbage collection, which would take a quarter second."""
    found = yield
    gc.enable()
    gc.collect()
    gc.freeze()
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """Have a test's time limit follow what the machine gives it, once half of it has passed."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    rest: list[Patience] = []

    def look(*_: object) -> None:
        __tracebackhide__ = True
        if not rest:
            rest.append(Patience(settings.timeout / 2))
        elif rest[0].over():
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout / 2, 1.0)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.failed:
        item.stash[FAILED] = True
    return report


FAILED = pytest.StashKey[bool]()


@pytest.fixture(params=[name for name, status in kernels.backends().items() if status == "ok"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each back end of the kernels that is here."""
    return request.param


@pytest.fixture
def data_dir() -> Path:
    """The folder of real data sets, one folder each; the test is skipped where there is none."""
    named = os.environ.get("EDGEFL_DATA")
    if not named:
        pytest.skip("real data: EDGEFL_DATA does not name a folder")
    folder = Path(named)
    if not folder.is_dir():
        pytest.skip(f"real data: EDGEFL_DATA={named} is no folder")
    return folder


@pytest.fixture(scope="session")
def fork_server(_orphans_come_here: None) -> Iterator[ForkServer]:
    """Start the runs of `edgefl.run` and of sweeps as one sweep's: most of a short one is importing torch.

    So are commands and the processes of programs. Where a test has changed what only a new interpreter reads,
    a new one is started.
    """

    from edgefl.programs import running
    from edgefl.run import sweep

    class Warm(warm.Undrawn):
        def __post_init__(self) -> None:
            if commands.fit(os.environ):
                self.fork_server = self.fork_server or server
            super().__post_init__()

    with warm.started() as (server, commands), pytest.MonkeyPatch.context() as patch:
        cold = running.start_process, sweep.warm

        def start_process(*given: Any, **more: Any) -> Any:
            return (commands.start_process if commands.fit(os.environ) else cold[0])(*given, **more)

        def warm_sweep() -> AbstractContextManager[Callable[[], ForkServer]]:
            return nullcontext(lambda: server) if commands.fit(os.environ) else cold[1]()

        patch.setattr(running, "start_process", start_process)
        patch.setattr(sweep, "warm", warm_sweep)
        patch.setattr(supervisor, "_Supervisor", Warm)
        patch.setattr(warm, "commands", commands)
        yield server


@pytest.fixture(scope="session", autouse=True)
def _orphans_come_here() -> None:
    """Make this process the one that orphans fall to, so that a grandchild left behind is seen."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER; children do not inherit it


@pytest.fixture(autouse=True)
def _process_tests_leave_nothing(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("process"):
        request.getfixturevalue("nothing_left")


@pytest.fixture
def nothing_left(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """After the test no process, thread, descriptor, shared memory or socket folder of it is there."""
    tmp_path_factory.getbasetemp()  # pytest's own is made when first wanted; it must not lie in ours
    # A temp folder of its own, so that what is in it is this test's; short, since socket paths are.
    folder = tempfile.mkdtemp(prefix="t-")
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    before = Held.now(folder)
    try:
        yield
        gc.collect()
        left = _settle(before, folder)
    finally:
        _end_all(before.processes)
        shutil.rmtree(folder, ignore_errors=True)
    if left and FAILED not in request.node.stash:  # a failed test has said why already
        pytest.fail(f"left behind: {'; '.join(left)}", pytrace=False)


class Held(NamedTuple):
    """What this process holds, and what it has put into the system."""

    processes: frozenset[psutil.Process]
    threads: frozenset[str]
    descriptors: frozenset[tuple[str, str]]
    shared: frozenset[str]
    folders: frozenset[str]
    groups: frozenset[str]

    @classmethod
    def now(cls, folder: str) -> Held:
        return cls(
            processes=frozenset(psutil.Process().children(recursive=True)),
            threads=frozenset(_threads()),
            descriptors=frozenset(_descriptors()),
            shared=frozenset(_entries("/dev/shm")),
            folders=frozenset(name for name in _entries(folder) if name.startswith("edgefl-")),
            groups=frozenset(_groups()),
        )

    def beyond(self, before: Held) -> list[str]:
        """What is here that was not ``before``, in words."""
        words: list[str] = []
        for kind, now, then in zip(self._fields, self, before, strict=True):
            words += [f"{kind}: {_named(item)}" for item in now - then]
        return sorted(words)


def _settle(before: Held, folder: str) -> list[str]:
    """What is left once everything that is ending has ended, or the bound is reached."""
    patience = Patience(BOUND_S)
    while True:
        _reap(before.processes)
        left = Held.now(folder).beyond(before)
        if not left or patience.over():
            return left
        running = [p for p in psutil.Process().children(recursive=True) if p not in before.processes]
        if running:
            psutil.wait_procs(running, timeout=0.05)
        else:
            threading.Event().wait(0.01)


def _reap(before: frozenset[psutil.Process]) -> None:
    """Collect orphans that have ended: they fell to this process, so nobody else can."""
    for process in psutil.Process().children():
        if process not in before and _status(process) == psutil.STATUS_ZOMBIE:
            try:
                os.waitpid(process.pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def _end_all(before: frozenset[psutil.Process]) -> None:
    """Kill what the test left running, so that one failure does not become many."""
    stray = [p for p in psutil.Process().children(recursive=True) if p not in before]
    for process in stray:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    if stray:
        psutil.wait_procs(stray, timeout=BOUND_S)
        _reap(before)


def _threads() -> Iterator[str]:
    """Python's threads, and ZeroMQ's own by their name; torch's and BLAS's pools are kept on purpose."""
    for thread in threading.enumerate():
        yield f"{thread.name} ({thread.ident})"
    for task in _entries("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("ZMQ"):
            yield f"{name} ({task})"


def _descriptors() -> Iterator[tuple[str, str]]:
    for number in _entries("/proc/self/fd"):
        try:
            yield number, os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the descriptor that listed them


def _groups() -> Iterator[str]:
    """Control groups that this process made, or one that is no more; others' tests may run beside these."""
    for controller in ("cpu", "memory"):
        try:
            outer = hierarchy.find(controller).folder
        except hierarchy.NoGroup:
            continue
        for name in _entries(str(outer)):
            kind, _, rest = name.partition("-")
            pid = int(rest.partition("-")[0]) if kind == "edgefl" else None
            if pid is not None and (pid == os.getpid() or not psutil.pid_exists(pid)):
                yield str(outer / name)


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _named(item: object) -> str:
    if isinstance(item, psutil.Process):
        try:
            return f"{item.pid} {' '.join(item.cmdline())[:120] or item.name()}"
        except psutil.Error:
            return str(item.pid)
    return " ".join(item) if isinstance(item, tuple) else str(item)
