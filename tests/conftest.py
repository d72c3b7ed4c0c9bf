"""Hooks and fixtures of all tests: markers by folder, real data, a check that tests leave nothing behind."""

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
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

# Set this before torch is imported: a pool of OpenMP threads would not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["EDGEFL_OFFLINE"] = "1"  # tests download only from servers that they start

import hypothesis
import psutil
import pytest
import pytest_timeout

from edgefl import kernels
from edgefl.host import groups as hierarchy
from edgefl.host.fork_server import ForkServer
from edgefl.run import supervisor
from tests.patience import Patience, descendants
from tests.process import warm

# Importing these modules patches edgefl, so pytest must not collect them.
collect_ignore = ["fault/bad_clients.py", "fault/faulty_clients.py", "mutants"]
collect_ignore += [] if importlib.util.find_spec("flwr") else ["flower_app.py"]
gc.disable()  # until the tests are collected, since imported modules stay anyway
BOUND_S = 20.0
"""Maximum time in seconds to wait until the processes, threads and other resources of a test are gone."""
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # as under ``&`` or nohup; tests send these signals
        signal.signal(number, handler)

# The same examples on every machine, without time limits; HYPOTHESIS_PROFILE=explore tries more examples.
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
            "the installed edgefl is a copy, not these files: make check creates a .venv that uses them"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = tuple(f"{Path(__file__).with_name(name)}{os.sep}" for name in ("process", "fault"))
    for item in items:
        if str(item.path).startswith(folders):
            item.add_marker(pytest.mark.process)


SHARING = {
    "tests/conformance/test_cuda_shim.py": "library",
    "tests/process/test_nodes.py": "alone",
    "tests/process/test_regression_counted.py": "warm_measuring",
    "tests/process/test_pytest_plugin.py": "warm_measuring",
    "tests/process/test_regression_worker.py": "warm_measuring",
    "tests/process/test_results.py": "runs",
    "tests/process/test_sweep.py": "swept",
    "tests/fault/test_bit_flips.py": "recorded",
    "tests/fault/test_injected_errors.py": "recorded",
    "tests/fault/test_power_cuts.py": "recorded",
}
"""Maps each module whose tests share a slow fixture to the fixture's name."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Make ``--dist loadscope`` distribute single tests, except those that share a slow fixture.

    pytest-xdist 3.8 cannot mark the node ids of pytest 9.2, which ``--dist loadgroup`` would need.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SHARING.get(nodeid.partition("::")[0], nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported modules from later garbage collections; they would add 0.25 s to each collection.

    Also collect garbage less often: at the default rate, it takes a twentieth of the CPU time of all tests.
    """
    found = yield
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """Once half of a test's time limit has passed, no longer count time that the test waits for a core."""
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
    """The name of a kernel back end; the test runs once for each available back end."""
    return request.param


@pytest.fixture
def data_dir() -> Path:
    """The folder with real data sets; without one, the test is skipped."""
    named = os.environ.get("EDGEFL_DATA")
    if not named:
        pytest.skip("real data: EDGEFL_DATA does not name a folder")
    folder = Path(named)
    if not folder.is_dir():
        pytest.skip(f"real data: EDGEFL_DATA={named} is no folder")
    return folder


@pytest.fixture(scope="session")
def fork_server(_adopt_orphans: None) -> Iterator[ForkServer]:
    """Fork runs, sweeps, commands and programs from a process that has imported torch, to save the import.

    If a test has changed something that Python reads only when it starts, a new interpreter is started.
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
def _adopt_orphans() -> None:
    """Make this process the parent of orphans, so that a grandchild that was left behind is found."""
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
    """Check that the test leaves no process, thread, descriptor, shared memory, socket folder or group."""
    tmp_path_factory.getbasetemp()  # made on demand; it must be outside of the new temp folder
    # only this test writes into this folder; its name is short since paths of sockets must be short
    folder = tempfile.mkdtemp(prefix="t-")
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    before = Held.now(folder)
    try:
        yield
        left = _settle(before, folder)
    finally:
        _end_all(before.processes)
        shutil.rmtree(folder, ignore_errors=True)
    if left and FAILED not in request.node.stash:  # the test's own failure is reported instead
        pytest.fail(f"left behind: {'; '.join(left)}", pytrace=False)


class Held(NamedTuple):
    """Resources of this process, and what it has created in the system."""

    processes: frozenset[psutil.Process]
    threads: frozenset[str]
    descriptors: frozenset[tuple[str, str]]
    shared: frozenset[str]
    folders: frozenset[str]
    groups: frozenset[str]

    @classmethod
    def now(cls, folder: str) -> Held:
        return cls(
            processes=frozenset(_descendants()),
            threads=frozenset(_threads()),
            descriptors=frozenset(_descriptors()),
            shared=frozenset(_shared()),
            folders=frozenset(name for name in _entries(folder) if name.startswith("edgefl-")),
            groups=frozenset(_groups()),
        )

    def beyond(self, before: Held) -> list[str]:
        """Describe what is held now but was not held ``before``."""
        kinds = zip(self._fields, self, before, strict=True)
        return sorted(f"{kind}: {_named(item)}" for kind, now, then in kinds for item in now - then)


def _settle(before: Held, folder: str) -> list[str]:
    """Wait until all new resources are gone, for at most `BOUND_S`; describe those that are left."""
    _reap(before.processes)
    if not Held.now(folder).beyond(before):
        return []
    gc.collect()  # objects in a cycle still hold what they have opened
    patience = Patience(BOUND_S)
    while True:
        _reap(before.processes)
        left = Held.now(folder).beyond(before)
        if not left or patience.over():
            return left
        running = [process for process in _descendants() if process not in before.processes]
        if running:
            psutil.wait_procs(running, timeout=0.05)
        else:
            threading.Event().wait(0.01)


def _reap(before: frozenset[psutil.Process]) -> None:
    """Wait for orphans that have ended; this process is their parent now."""
    for process in _descendants():
        if process not in before:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _descendants() -> Iterator[psutil.Process]:
    for pid in descendants():
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _end_all(before: frozenset[psutil.Process]) -> None:
    """Kill what the test has left running, so that it cannot make other tests fail."""
    stray = [process for process in _descendants() if process not in before]
    for process in stray:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if stray:
        psutil.wait_procs(stray, timeout=BOUND_S)
        _reap(before)


def _threads() -> Iterator[str]:
    """Find Python's and ZeroMQ's threads; the pools of torch and BLAS are meant to stay."""
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
        with suppress(OSError):  # the descriptor of the listing itself
            yield number, os.readlink(f"/proc/self/fd/{number}")


def _shared() -> Iterator[str]:
    """Find this user's named shared memory, except memory that processes outside this session have mapped."""
    names = set(_entries("/dev/shm"))
    if not names:
        return
    own = {os.getpid(), *descendants()}
    for pid in set(psutil.pids()) - own:
        try:
            mapped = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            continue  # it has ended, or is another user's
        names -= {line.rpartition("/dev/shm/")[2] for line in mapped.splitlines() if "/dev/shm/" in line}
    for name in names:
        with suppress(OSError):  # it was removed
            if os.stat(f"/dev/shm/{name}").st_uid == os.getuid():
                yield name


def _groups() -> Iterator[str]:
    """Find control groups of this process and of processes that have ended.

    The groups of tests that run at the same time are left out.
    """
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
