"""The test's interface to the measuring process: requests to this process, and its answers.

    CountRequest   ──► CountedRun | Failure    once per function
    PrepareRequest ──► TrialRun | Failure      once per function that is timed
    RepeatRequest  ──► Repetition | Failure    once per repetition, each in its own process

Requests and answers are plain data without code.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import inspect
import os
import reprlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast

import msgspec

from edgefl.errors import ConfigError, RunError, described
from edgefl.files import encodable
from edgefl.host.channel import Channel, Closed
from edgefl.host.children import Exit, end_child, kill_tree
from edgefl.host.memory import is_no_memory
from edgefl.host.process import start_process, without_gpus
from edgefl.loading import signature
from edgefl.regression.counts import CountedRun

ENDING_S = 1.0
"""A measuring process or a `sides.Stem` is killed if it has not ended this many seconds after its channel
closed."""

ReferenceName = Literal["train-small", "train-large", "interpreted"]
REFERENCE_VERSION = 2
"""Version of the reference programs in `repetition`. Results relative to different versions are not
comparable."""

MAX_AT_A_TIME = 10_000
"""Maximum number of calls or units that are timed together, as one shot. For an empty function, a shot has a
few thousand calls."""
AtATime = Annotated[int, msgspec.Meta(ge=1, le=MAX_AT_A_TIME)]

R = TypeVar("R")
RestClass = Literal["interpreter", "integer", "memory", "crypto", "division", "float"]


class FunctionLocation(msgspec.Struct, frozen=True):
    """The module and the name of a function that every process can import."""

    module: str
    file: str
    qualname: str


class ShotSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reference that is timed alternately with a function, and the shot sizes of both.

    A shot is ``units`` units of the reference's work, or ``calls`` calls of the function, timed together.
    """

    reference: ReferenceName
    units: AtATime
    calls: AtATime


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Import a function and try it out on a device."""

    function: FunctionLocation
    setup: FunctionLocation | None
    args: list[Any]
    kwargs: dict[str, Any]
    path: list[str]
    device: str
    network: str | None
    like: RestClass = "interpreter"
    """Class of code to which the function's code outside torch belongs, such as interpreted Python."""
    shots: ShotSizes | None
    """The reference and the shot sizes of the baseline. If None, the most similar reference is chosen, and
    its shots are sized to take about as long as the function's shots, up to a maximum."""
    limit_s: float
    """Maximum wall-clock time of each process that runs the function, in seconds."""
    folder: str = "."
    """Working folder of the function."""


class CountRequest(PrepareRequest, frozen=True, kw_only=True, tag="count"):
    """Import a function and count its work."""


class RepeatRequest(msgspec.Struct, frozen=True, tag="repeat"):
    """Run the function once at the device's pace, then time further calls."""

    index: int
    time_scale: float
    """Wall-clock seconds per emulated second in the first call; if it is 0, the call never waits."""


class TrialRun(msgspec.Struct, frozen=True, kw_only=True, tag="trial"):
    """A function's cost, measured in a temporary process."""

    shots: ShotSizes
    reference_flop: float
    """Number of floating-point operations in a unit of the reference."""
    reference_s: float
    """Time in seconds that a unit of the reference takes on the device."""
    flop: float
    """Number of floating-point operations in the torch operations of one call."""
    model_s: float
    """Time in seconds that the torch operations of one call take on the device."""
    rest: float
    """Share of the CPU time that is spent outside torch; 1 if the device has no time model."""
    rest_s: float
    """Time in seconds that a unit of the stand-in program (`repetition.RestWork`) takes on the device; 0 if
    there is no such program."""
    pace: float
    """Seconds that code outside torch takes on the device, per CPU second of the whole call on this host.

    It is measured once, and is used to pace calls.
    """
    error_factor: float | None
    """The times of 90% of real devices are within this factor of the modelled time of torch and other code
    together. None if the profile has no time model or does not list the cores, or if this time is 0."""
    pairs: int
    """Number of shots of the function in a repetition."""
    imported: list[str]
    """Modules of torch that the function's first call imported, in the order of their imports."""


class Repetition(msgspec.Struct, frozen=True, kw_only=True, tag="repetition"):
    """The metrics of one repetition's process. CPU times are seconds on this host; other times are
    emulated seconds."""

    cpu_s: list[float]
    """CPU time of each shot, which is a group of calls of the function that are timed together."""
    reference_cpu_s: list[float]
    """CPU time of each shot of the reference. These shots alternate with the shots of the function; the first
    and the last shot of a repetition are the reference's."""
    rest_cpu_s: list[float]
    """CPU time of each unit of the stand-in program (`repetition.RestWork`); empty if there is no such
    program."""
    blocked_s: float
    """Time during which the first call neither computed nor waited for a core or the link."""
    peak_mib: float
    """Peak memory growth during the first call, in MiB."""
    sent_bytes: int
    """Number of bytes that the first call sent."""
    radio_s: float
    """Duration of the transfers in the first call."""
    declared_s: float
    """Declared duration of the first call: the time that the device would take."""
    achieved_s: float
    """Achieved duration of the first call: the time that the paced call took."""
    waited: float
    """Share of the timed part that the process spent runnable but without a core."""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The reason why a function cannot be measured, or how its process ended during the measurement."""

    kind: Literal["refused", "absent", "foreign", "memory", "raised", "signal", "late", "skipped", "expected"]
    why: str


Request = PrepareRequest | CountRequest | RepeatRequest
Answer = TrialRun | CountedRun | Repetition | Failure


def failure_of(error: BaseException) -> Failure:
    """Return the reason why a function failed; for most exceptions, with the traceback of the user's code."""
    found = _failure_of(error)
    return Failure(found.kind, encodable(found.why))


def result_of(call: Callable[[], R]) -> R | Failure:
    """Return the result of a call, or why it failed."""
    try:
        return call()
    except BaseException as error:
        return failure_of(error)


def _failure_of(error: BaseException) -> Failure:
    if isinstance(error, ConfigError):
        return Failure("refused", str(error))
    if is_no_memory(error):
        return Failure("memory", "")
    if _raised_as(error, "_pytest.outcomes", "Skipped") or _raised_as(error, "unittest.case", "SkipTest"):
        return Failure("skipped", str(error))
    if _raised_as(error, "_pytest.outcomes", "XFailed"):
        return Failure("expected", str(error))
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename.startswith(str(Path(__file__).parent)):
        frames.pop(0)  # so that the traceback begins with the user's code
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return Failure("raised", "".join(lines).rstrip())


def _raised_as(error: BaseException, module: str, name: str) -> bool:
    """Return True if the exception is of class ``name`` of ``module``, which need not be loaded."""
    return module in sys.modules and isinstance(error, getattr(sys.modules[module], name))


_OF_TESTS = ("PYTEST_CURRENT_TEST", "COV_CORE_", "COVERAGE_PROCESS_")
"""Prefixes of environment variables that measuring processes do not inherit. These variables name pytest's
current test, or make coverage start in each new interpreter. Coverage slows down the files that it measures,
and these may include the head's files but not the base's."""


class Surroundings(NamedTuple):
    """The environment variables, the working folder and ``sys.path`` that a test gives to the function that
    it runs."""

    environment: dict[str, str]
    folder: str
    path: list[str]

    @classmethod
    def now(cls) -> Self:
        """Return the surroundings of this process, without the variables in `_OF_TESTS`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TESTS)}
        entries: list[Any] = sys.path  # Python's import ignores entries that are not str, such as a `Path`
        return cls(kept, os.getcwd(), [entry for entry in entries if isinstance(entry, str)])


class MeasuringProcess:
    """A process that runs the functions of a module, each in a forked process. Call `close` at the end."""

    def __init__(self, surroundings: Surroundings | None = None) -> None:
        """Start the process with the environment in ``surroundings``, by default with this process's own.

        The folder and the path in ``surroundings`` are ignored, because each request names its own.
        """
        given = (surroundings or Surroundings.now()).environment
        environment = {name: value for name, value in given.items() if name != "PYTHONHASHSEED"}
        self._channel: Channel[Answer]
        self.popen, self._channel = start_process(
            "edgefl.regression.worker", Answer, without_gpus(environment)
        )

    def ask(self, request: Request) -> Answer:
        """Send a request and return the answer; a `RepeatRequest` repeats the function prepared last.

        Raises ConfigError if the request is refused, RunError if the process ends.
        """
        try:
            self._channel.send(request)
            answer = self._channel.receive()
        except Closed:
            end = Exit(self.popen.wait())
            raise RunError(f"the measuring process ended with {end}; its message is above") from None
        except BaseException:
            self.close()  # a pending answer would be mistaken for the answer to the next request
            raise
        if isinstance(answer, Failure) and answer.kind == "refused":
            raise ConfigError(answer.why)
        return answer

    def close(self) -> None:
        """End the process and all processes that it started; kill them if the user interrupts the wait."""
        self._channel.close()
        try:
            end_child(self.popen, ENDING_S)  # it may still be importing the user's module
        except BaseException:
            kill_tree(self.popen)
            self.popen.wait()
            raise


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold a lock so that no other edgefl test measures on this host: two tests would disturb each other."""
    # The lock is on the folder of temporary files itself, so that no file is left behind.
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # a process that another thread has forked keeps the folder open
        os.close(folder)


def locate(function: Any, name: str = "the function", owner: type | None = None) -> FunctionLocation:
    """Return a module-level function's location. Raises ConfigError if other processes cannot find it.

    If ``owner`` is given, the function is a method of this class, which may have inherited it.
    """
    if not callable(function):
        got = " ".join(reprlib.repr(function).split())
        raise ConfigError(f"{name} must be a function at the top of a module (got {got}: not callable)")
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    for kind, noun in (("generator", "a generator"), ("asyncgen", "an async generator")):
        # The call of such a function only returns an object, which does the work later.
        if getattr(inspect, f"is{kind}function")(inner):
            got = f"{inner.__qualname__}, {noun} function"
            raise ConfigError(
                f"{name} must do its work when it is called, as a plain function does (got {got})"
            )
    if isinstance(function, functools._lru_cache_wrapper):
        got = getattr(function, "__qualname__", "a function")
        raise ConfigError(
            f"{name} must do its work whenever it is called (got {got}, whose results functools caches); "
            f"call it in a function that calls {got}.cache_clear() first"
        )
    if getattr(owner, getattr(function, "__name__", ""), None) is not function:
        owner = None  # the class has no method of this name, as with ``test_a = staticmethod(other)``
    if (why := _hidden(function, owner)) is not None:
        raise ConfigError(
            f"{name} must be defined at module level, so that another process can import it (got {why})"
        )
    file = Path(str(_source(function) if owner is None else inspect.getsourcefile(owner))).resolve()
    module, qualname = _names(function, owner)
    # The module of a script's own functions has a different name in another process.
    return FunctionLocation(f"_script_{file.stem}" if module == "__main__" else module, str(file), qualname)


def _names(function: Any, owner: type | None) -> tuple[str, str]:
    """Return the name of the module, and the qualified name, by which a function can be found."""
    if owner is None:
        return function.__module__, function.__qualname__
    return owner.__module__, f"{owner.__qualname__}.{function.__name__}"


def _hidden(function: Any, holder: type | None) -> str | None:
    """Return why the function cannot be found by its module and name; None if it can."""
    if not inspect.isfunction(function):
        return f"a {type(function).__name__}"
    place, qualname = _names(function, holder)
    module = sys.modules.get(place)
    if "<lambda>" in qualname:
        return "a lambda"
    if "<locals>" in qualname:
        return f"{qualname.replace('.<locals>', '')}, which is inside another function"
    *owners, last = qualname.split(".")
    try:
        owner: Any = functools.reduce(getattr, owners, module)
        found, raw = getattr(owner, last), inspect.getattr_static(owner, last)
    except AttributeError:
        found = raw = None
    if owners and not isinstance(raw, staticmethod) and not _is_simple(owner):
        return f"{qualname}, a method whose class cannot be instantiated without arguments"
    if found is not function or not _source(function):
        return f"{place}.{qualname}, but this name refers to another object"
    return None


def _source(function: Callable[..., Any]) -> str | None:
    """Return the file of a function's module, not that of a decorator such as `torch.no_grad`."""
    inner = inspect.unwrap(function)
    same = inspect.isfunction(inner) and inner.__module__ == function.__module__
    return inspect.getsourcefile(inner if same else function)


def _is_simple(owner: Any) -> bool:
    """Return True for a class that can be instantiated without arguments, such as a test class."""
    if not inspect.isclass(owner) or inspect.isabstract(owner):
        return False
    try:
        signature(owner).bind()
    except (TypeError, ValueError):
        return False
    return True


def find(where: FunctionLocation) -> Callable[..., Any]:
    """Return the function; a method is bound to a new object of its class.

    Raises ConfigError if the module cannot be imported or does not contain the function.
    """
    try:
        *owners, last = where.qualname.split(".")
        owner: Any = functools.reduce(getattr, owners, _module(where))
        found = getattr(owner, last)  # unlike that of `getattr_static`, its AttributeError has a name
        if inspect.isclass(owner) and not isinstance(inspect.getattr_static(owner, last), staticmethod):
            found = getattr(owner(), last)
        return cast(Callable[..., Any], found)
    except BaseException as error:  # also SystemExit, and pytest's exception for a skipped module
        why = encodable(described(error))
        raise ConfigError(f"{where.file}: cannot be imported: {why}") from error


def _module(where: FunctionLocation) -> ModuleType:
    if where.module in sys.modules:
        return sys.modules[where.module]
    _add_package(where)
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(where.module)
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(where.file):
        return importlib.import_module(where.module)
    spec = importlib.util.spec_from_file_location(where.module, where.file)
    assert spec is not None
    return _execute(spec)


def _add_package(where: FunctionLocation) -> None:
    """Import a module's outermost package from its folder, unless the package can be found on ``sys.path``.

    pytest does the same with ``--import-mode=importlib``, so that the module can import other modules of its
    package.
    """
    top, *inner = where.module.split(".")
    file = Path(where.file)
    above = len(inner) - (file.name != "__init__.py")
    if not inner or top in sys.modules or above >= len(file.parents) or file.parents[above].name != top:
        return
    if importlib.util.find_spec(top) is not None:
        return
    init = file.parents[above] / "__init__.py"
    spec = importlib.util.spec_from_file_location(top, init) if init.exists() else None
    if spec is None:
        spec = ModuleSpec(top, None, is_package=True)
        spec.submodule_search_locations = [str(init.parent)]
    _execute(spec)


def _execute(spec: ModuleSpec) -> ModuleType:
    """Import the module with this specification; if that fails, remove it from ``sys.modules``."""
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    return module
