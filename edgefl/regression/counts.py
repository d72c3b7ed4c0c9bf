"""The counted work of a function, and pure functions that compare it with a baseline.

Counts depend on the code, its inputs and the versions of Python and its packages. They do not depend on the
host, its CPU, its number of cores, its load or its hash seed, so one baseline serves all hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, NamedTuple

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
MAX_NAME = 500
"""Maximum length of the name of a counted function; longer ones are cut off (`cut_off`)."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, msgspec.Meta(min_length=1)]

INSTRUCTIONS, NATIVE = "instructions", "native_instructions"
NOTHING = 3
"""Maximum number of instructions that an empty function executes; a function with one call executes at least
five."""
NOT_COUNTED = (
    "not counted: there are too many (make the test's inputs smaller), or the function calls sys.settrace or "
    "catches a RecursionError, which ends the counting in Python before 3.12"
)
NATIVE_CODE = "native code is not counted"
WAITS, WORKS_ON = "it sleeps or waits", "its threads go on working after the call"
"""Reasons why the time cannot be predicted from the counts."""
KIB, MIB = 1 << 10, 1 << 20


class Figure(NamedTuple):
    """A counted metric: its name in messages, its unit, and the growth that is always ignored."""

    text: str
    unit: str = ""
    """``B`` for bytes; empty for plain numbers."""
    least: int = 0
    weight: int = 10
    """In messages, metrics are sorted by their growth divided by the earlier amount or by this weight,
    whichever is larger."""
    share: float = 0.0
    """Growth that is always ignored, as a share of the earlier amount."""
    beside_processes: int = 0
    """Growth that is ignored if the function starts processes, whose results arrive at varying times."""

    def ignored(self, processes: bool) -> int:
        """Return the growth that is ignored, whatever the earlier amount."""
        return max(self.least, self.beside_processes if processes else 0)


FIGURES: Mapping[str, Figure] = {
    "sent_bytes": Figure("sent", "B", weight=64 * KIB),
    INSTRUCTIONS: Figure("Python bytecode instructions", weight=1000),
    "calls": Figure("torch operations"),
    **{
        f"{kind}_flop": Figure(f"FLOP of {text}", weight=10**6)
        for kind, text in {
            "conv": "convolutions",
            "thin": "convolutions of few channels",
            "pointwise": "1×1 convolutions",
            "depthwise": "depthwise convolutions",
            "depthwise_backward": "depthwise convolutions, backward",
            "matmul": "matrix products",
            "recurrent": "recurrent cells",
        }.items()
    },
    **{
        f"{kind}_bytes": Figure(f"bytes moved by {text}", "B", weight=MIB)
        for kind, text in {
            "conv": "convolutions",
            "matmul": "matrix products",
            "norm": "normalisation",
            "pool": "pooling",
            "elementwise": "elementwise operations",
            "copy": "copies and conversions",
        }.items()
    },
    "depthwise_planes": Figure("planes of depthwise convolutions"),
    "parameters": Figure("updated parameters", weight=1000),
    "tensor_peak_bytes": Figure("peak memory of tensors", "B", weight=MIB, beside_processes=16 * KIB),
    "tensor_kept_bytes": Figure("memory of tensors after the call", "B", weight=MIB),
    "python_peak_bytes": Figure("peak memory of Python objects", "B", 16 * KIB, MIB),
    "python_kept_bytes": Figure("memory of Python objects after the call", "B", 16 * KIB, MIB),
    NATIVE: Figure("native instructions", weight=10**6, share=0.005),
}
"""The metrics, keyed by name, in the order in which they are listed. The growth that is ignored covers noise:
Python's allocations vary by a few hundred bytes, the number of native instructions varies with the lengths of
paths and of the environment, and the peak memory of tensors depends on when the workers of a DataLoader
deliver their batches."""
BY_TORCH = frozenset(
    name for name in FIGURES if name.endswith(("_flop", "_planes")) or name in ("calls", "parameters")
) | {
    f"{kind}_bytes"
    for kind in ("conv", "matmul", "norm", "pool", "elementwise", "copy", "tensor_peak", "tensor_kept")
}
"""Metrics that may differ between versions of torch."""
BY_PYTHON = frozenset({INSTRUCTIONS, "python_peak_bytes", "python_kept_bytes"})
"""Metrics that depend on the version of Python: a baseline stores them for each version separately."""


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counted work of one call of a function. Counts that are 0 are left out."""

    figures: dict[str, int]
    """The counts other than instructions, keyed by their names in `FIGURES`."""
    instructions: dict[str, int] | None
    """Numbers of executed bytecode instructions, keyed by function for the user's code, and by package and
    version (``torch 2.13.0``) for other code; None if they were not counted."""
    native: dict[str, int] | None = None
    """Numbers of native instructions, keyed by function; None if they are not counted."""

    def all(self) -> dict[str, int]:
        """Return all counts that are not 0."""
        pairs = {name: self.value(name) for name in FIGURES}
        return {name: value for name, value in pairs.items() if value}

    def value(self, name: str) -> int | None:
        """Return a metric's value; None if it is not counted."""
        if name in (INSTRUCTIONS, NATIVE):
            return _sum(self.parts(name))
        return self.figures.get(name, 0)

    def parts(self, name: str) -> dict[str, int] | None:
        """Return each function's instruction count for the metric ``name``; None if it is not counted."""
        return self.native if name == NATIVE else self.instructions


def _sum(parts: Mapping[str, int] | None) -> int | None:
    return None if parts is None else sum(parts.values())


class CountedRun(msgspec.Struct, frozen=True, kw_only=True, tag="counted"):
    """Two counts of the same call, and the call's time on the device, predicted from the counts."""

    first: Counts
    second: Counts
    model_s: float
    """Time in seconds that torch's operations take on the device, according to its time model."""
    python_s: float
    """Time in seconds that Python code outside torch takes on the device, computed from how fast the device
    interprets Python. Native code of other libraries is not included."""
    link_s: float = 0.0
    """Time in seconds that the device's link takes for the sent bytes."""
    error_factor: float | None
    """The times of 90% of real devices are within this factor of ``model_s`` + ``python_s``. None if the
    profile has no time model or does not list the cores, or if both times are 0."""
    processes: bool
    """True if the function started processes, which are not counted here."""
    kept_threads: bool = False
    """True if the call used threads that existed before it and whose instructions could not be counted."""
    imported: list[str] = []
    """Modules of torch that the first call imported, in the order of their imports."""
    untimed: str = ""
    """Why the counts do not explain the time of the call, such as `NATIVE_CODE`; empty if they do."""

    @property
    def seconds(self) -> float | None:
        """Predicted time on the device in seconds; None if the counts may miss most of the work."""
        known = not self.untimed and not self.processes and self.first.instructions is not None
        return self.model_s + self.python_s + self.link_s if known else None

    def with_native(self, native: dict[str, int]) -> CountedRun:
        """Return this run with ``native`` as the native instructions of both counts.

        Both counts get the same numbers, because native instructions are counted only once for a run.
        """
        replace = msgspec.structs.replace
        first, second = (replace(one, native=native) for one in (self.first, self.second))
        return replace(self, first=first, second=second)

    @property
    def nothing(self) -> bool:
        """True if the function does nothing."""
        executed = self.first.value(INSTRUCTIONS)
        idle = executed is not None and executed <= NOTHING
        return idle and not any(self.first.figures.get(name) for name in ("calls", "sent_bytes"))

    def varying(self) -> dict[str, tuple[int, int]]:
        """Return the metrics whose two counts differ by more than the ignored amount, with both counts."""
        pairs = {name: (self.first.value(name), self.second.value(name)) for name in FIGURES}
        return {
            name: (one, other)
            for name, (one, other) in pairs.items()
            if one is not None
            and other is not None
            and abs(one - other) > FIGURES[name].ignored(self.processes)
        }


class PythonEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts under one version of Python."""

    figures: dict[Name, Count]
    instructions: dict[Name, Count] | None

    def lacks(self, name: str) -> bool:
        """Return True if a metric was not saved, because it varied."""
        return self.instructions is None if name == INSTRUCTIONS else name not in self.figures


class CountedEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts of one function in one test. They are valid on all hosts."""

    test: Text
    function: Text
    torch: str
    """Version of torch."""
    figures: dict[Name, Count]
    python: dict[Name, PythonEntry]
    """Counts that depend on the version of Python, keyed by its minor version, such as ``3.11``."""
    native: dict[Name, dict[Name, Count]] = {}
    """Numbers of native instructions of each function, keyed by machine, C library and Python version."""
    varying: tuple[Name, ...] = ()
    """Metrics that differed between two counts of the same call; they are not compared (`left_out`)."""

    @property
    def key(self) -> tuple[str, str]:
        """Key of the entry, which is unique within a baseline file."""
        return self.test, self.function

    @property
    def uncounted(self) -> bool:
        """True if instructions could not be counted (not just varied) under at least one Python version."""
        return INSTRUCTIONS not in self.varying and any(
            one.instructions is None for one in self.python.values()
        )

    def merged(self, before: CountedEntry | None) -> CountedEntry:
        """Return this entry, with the counts for other versions of Python added from ``before``."""
        if before is None:
            return self
        python = dict(sorted({**before.python, **self.python}.items()))
        native = dict(sorted({**before.native, **self.native}.items()))
        others = [one for version, one in python.items() if version not in self.python]
        kept = {name for name in BY_PYTHON.intersection(before.varying) for one in others if one.lacks(name)}
        varying = tuple(sorted(kept.union(self.varying)))
        return msgspec.structs.replace(self, python=python, native=native, varying=varying)

    def left_out(self, versions: Versions) -> tuple[Name, ...]:
        """Return the metrics that are not compared, because they varied when counted with these versions."""
        python = self.python.get(versions.python)
        saved = {name for name in BY_PYTHON if python is not None and not python.lacks(name)}
        return tuple(sorted({*self.varying} - saved))

    def value(self, name: str, versions: Versions) -> int | None:
        """Return a metric's value; None if it is not known for these versions."""
        if name in (INSTRUCTIONS, NATIVE):
            return _sum(self.parts(name, versions))
        if name not in BY_PYTHON:
            return self.figures.get(name, 0)
        python = self.python.get(versions.python)
        return None if python is None else python.figures.get(name, 0)

    def parts(self, name: str, versions: Versions) -> dict[str, int] | None:
        """Return each function's instruction count for the metric ``name``.

        Return None if the baseline does not contain these counts for the software versions in ``versions``.
        """
        if name == NATIVE:
            return self.native.get(versions.native)
        python = self.python.get(versions.python)
        return None if python is None else python.instructions


class Versions(NamedTuple):
    """Versions of the software on which counts depend."""

    python: str
    """Minor version of Python, such as ``3.11``."""
    torch: str
    native: str = ""
    """Machine, C library and version of Python, on which native instructions depend."""


def entry_of(test: str, function: str, run: CountedRun, versions: Versions) -> CountedEntry:
    """Return the baseline entry of a run."""
    varying = run.varying()
    figures = {name: run.first.figures[name] for name in FIGURES if run.first.figures.get(name)}
    steady = {name: value for name, value in sorted(figures.items()) if name not in varying}
    both = INSTRUCTIONS not in varying and run.second.instructions is not None
    executed = run.first.instructions if both else None
    python = PythonEntry(
        figures={
            name: run.first.figures.get(name, 0)
            for name in sorted(BY_PYTHON - {INSTRUCTIONS})
            if name not in varying
        },
        instructions=None if executed is None else dict(sorted(executed.items())),
    )
    return CountedEntry(
        test=test,
        function=function,
        torch=versions.torch,
        figures={name: value for name, value in steady.items() if name not in BY_PYTHON},
        python={versions.python: python},
        native={} if run.first.native is None else {versions.native: dict(sorted(run.first.native.items()))},
        varying=tuple(sorted(varying)),
    )


class Growth(NamedTuple):
    """A metric that grew since the baseline."""

    name: str
    before: int
    now: int
    where: str = ""
    """The functions whose instructions grew the most."""

    def __str__(self) -> str:
        figure = FIGURES[self.name]
        share = share_text(self.before, self.now, figure.weight / 100)
        inside = "; ".join(filter(None, (share, self.where)))
        more = f" ({inside})" if inside else ""
        return f"{figure.text} {amounts(self.before, self.now, figure.unit)}{more}"

    @property
    def rank(self) -> float:
        """Growth divided by the earlier amount or by the metric's ``weight``, whichever is larger."""
        return (self.now - self.before) / max(self.before, FIGURES[self.name].weight)


class CountedVerdict(NamedTuple):
    """The metrics that grew, and the reasons why other metrics could not be judged."""

    grew: tuple[Growth, ...] = ()
    unjudged: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Names of the metrics that were not compared, because they varied when the baseline was saved."""


def compare(
    before: CountedEntry, now: CountedRun, versions: Versions, tolerance: float = 0.0
) -> CountedVerdict:
    """Compare a run's counts with a baseline.

    Each metric may grow by ``tolerance``, a share of its baseline. A run contains two counts of each metric.
    If they differ, the metric is judged only if both lead to the same result. A metric that grew cannot be
    judged if a new version of torch, Python or a package may be the reason.
    """
    grew: list[Growth] = []
    unjudged, left_out = list(_absent(before, now, versions)), before.left_out(versions)
    for name in FIGURES:
        if name in left_out or not _known(name, before, now, versions):
            continue
        match _judged(name, before.value(name, versions), now, tolerance):
            case str(why):
                unjudged.append(why)
            case Growth() as growth:
                found, why = _explained(growth, before, now, versions, tolerance)
                if why:
                    unjudged.append(
                        f"{found}: {why}, which may be the reason; save it again with this version"
                    )
                else:
                    grew.append(found)
    return CountedVerdict(tuple(sorted(grew, key=lambda one: -one.rank)), tuple(unjudged), left_out)


def _known(name: str, before: CountedEntry, now: CountedRun, versions: Versions) -> bool:
    """Return True if a metric is counted now and the baseline contains it for these versions."""
    if name == NATIVE:
        return now.first.native is not None and versions.native in before.native
    return name not in BY_PYTHON or versions.python in before.python


def _absent(before: CountedEntry, now: CountedRun, versions: Versions) -> Iterator[str]:
    """Yield a message for each kind of count that the baseline does not contain for these versions."""
    if versions.python not in before.python:
        yield (
            "Python's instructions and memory: the baseline contains them for Python "
            f"{_names(before.python)}, but not for {versions.python}; save it once with this version, too"
        )
    if now.first.native is not None and versions.native not in before.native:
        yield (
            f"native instructions: the baseline contains them for {_names(before.native)}, but not for "
            f"{versions.native}; save it once in this environment, too"
        )


def _names(known: Mapping[str, object]) -> str:
    return "; ".join(sorted(known)) or "none"


def _allowed(name: str, old: int, tolerance: float, processes: bool) -> float:
    figure = FIGURES[name]
    return old + max(figure.ignored(processes), max(tolerance, figure.share) * old)


def _judged(name: str, old: int | None, now: CountedRun, tolerance: float) -> Growth | str | None:
    """Return the growth of a metric, the reason why it cannot be judged, or None if it did not grow."""
    figure = FIGURES[name]
    first, second = now.first.value(name), now.second.value(name)
    if first is None or second is None:
        return f"{figure.text}: {NOT_COUNTED}"
    if old is None:
        return f"{figure.text}: not counted when the baseline was saved; save it again"
    most = _allowed(name, old, tolerance, now.processes)
    if max(first, second) <= most:
        return None
    if min(first, second) > most:
        return Growth(name, old, min(first, second))
    return (
        f"{figure.text}: two counts of one call differ ({amount(first, figure.unit)} and "
        f"{amount(second, figure.unit)}), around the baseline's {amount(old, figure.unit)}; does the "
        "count depend on time, threads or random numbers? seed the random numbers, or allow more growth "
        "with tolerance= in the mark"
    )


def _explained(
    growth: Growth, before: CountedEntry, now: CountedRun, versions: Versions, tolerance: float
) -> tuple[Growth, str]:
    """Return the growth with the functions that grew, and the version changes that may explain the growth."""
    name = growth.name
    old, new = before.parts(name, versions) or {}, now.first.parts(name) or {}
    if name == INSTRUCTIONS:
        return _instructions(old, new, growth, _allowed(name, growth.before, tolerance, now.processes))
    if name in BY_PYTHON:  # memory of Python's objects, which any executed package may have created
        return growth, ", ".join(why for _, why in _other_versions(old, new))
    by_torch = name in BY_TORCH
    if name == NATIVE:
        growth = growth._replace(where=_where(old, new, new))
        by_torch = bool(before.figures.get("calls") or now.first.figures.get("calls"))
    other = by_torch and before.torch != versions.torch
    return growth, f"torch is {versions.torch}, the baseline's is {before.torch}" if other else ""


def _instructions(
    old: Mapping[str, int], new: Mapping[str, int], growth: Growth, allowed: float
) -> tuple[Growth, str]:
    """Return the growth with the functions that grew the most, and the packages that may explain the growth.

    A package's new version explains the growth only if the growth of all other code is within the tolerance.
    """
    own = [name for name in new if " " not in name]
    found = growth._replace(where=_where(old, new, own) or _where(old, new, new))
    versions = dict(_other_versions(old, new))
    changed = {name: new.get(name, 0) - old.get(name, 0) for name in {*old, *new}}
    rest = sum(count for name, count in changed.items() if name.rpartition(" ")[0] not in versions)
    return found, "" if rest > allowed - growth.before else ", ".join(versions.values())


def _where(old: Mapping[str, int], new: Mapping[str, int], names: Iterable[str]) -> str:
    """Return a text that names the two of these functions that grew the most; "" if none grew."""
    grown = {name: new[name] - old.get(name, 0) for name in names if new[name] > old.get(name, 0)}
    most = sorted(grown, key=lambda name: (-grown[name], name))[:2]
    each = ", ".join(f"{name} {old.get(name, 0):,} → {new[name]:,}" for name in most)
    return f"most in {each}" if each else ""


def _other_versions(old: Mapping[str, int], new: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield each package whose version has changed, and a message that states both versions."""
    then = dict(name.rpartition(" ")[::2] for name in old if " " in name)
    for package, version in (name.rpartition(" ")[::2] for name in new if " " in name):
        if then.get(package, version) != version:
            yield package, f"{package} is {version}, the baseline's is {then[package]}"


def cut_off(counts: Mapping[str, int]) -> dict[str, int]:
    """Truncate names that are too long for a baseline, such as C++ templates; sum the counts of equal names.

    >>> long = "std::map<" * 100
    >>> [(len(name), count) for name, count in cut_off({"f": 1, long + "1": 2, long + "2": 3}).items()]
    [(1, 1), (500, 5)]
    """
    found: dict[str, int] = {}
    for name, count in counts.items():
        short = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
        found[short] = found.get(short, 0) + count
    return found


def share_text(before: float, now: float, least: float = 0.0) -> str:
    """Return a change in percent or as a factor; empty if the earlier amount was 0 or below ``least``.

    >>> share_text(200, 230), share_text(10, 500), share_text(1, 5001), share_text(0, 5)
    ('+15.0%', '×50', '×5,001', '')
    """
    if before <= 0 or before < least:
        return ""
    if now > 10 * before:
        times = now / before
        return f"×{times:,.0f}" if times >= 1000 else f"×{times:.3g}"
    share = now / before - 1
    return f"{share:+.{2 if 0 < abs(share) < 0.001 else 1}%}"


def amounts(before: int, now: int, unit: str) -> str:
    """Return two amounts as text, with an arrow between them.

    >>> amounts(0, 5 * 2**20, "B")
    '0 → 5 MiB'
    """
    return f"{amount(before, unit)} → {amount(now, unit)}"


def amount(count: int, unit: str) -> str:
    """Return a count as text; bytes are converted to a suitable unit.

    >>> amount(1234567, ""), amount(500, "B"), amount(5 * 2**20 + 2**18, "B")
    ('1,234,567', '500 B', '5.25 MiB')
    """
    if unit != "B":
        return f"{count:,}"
    for size, name in ((1 << 30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= size:
            return f"{count / size:.4g} {name}"
    return f"{count} B" if count else "0"


def summary(run: CountedRun) -> str:
    """Return the counts as one line of a table."""
    counts, figures = run.first, run.first.figures
    executed = counts.value(INSTRUCTIONS)
    flop = sum(count for name, count in figures.items() if name.endswith("_flop"))
    sizes = {"tensor_peak_bytes": "tensors", "python_peak_bytes": "Python", "sent_bytes": "sent"}
    parts = [
        "bytecode not counted" if executed is None else f"{executed:,} bytecode",
        "" if counts.native is None else f"{sum(counts.native.values()):,} native",
        f"{figures.get('calls', 0):,} torch operations, {flop / 1e6:.4g} MFLOP" if flop else "",
        *(f"{amount(figures[name], 'B')} {text}" for name, text in sizes.items() if figures.get(name)),
        "bytecode in threads that it keeps is not counted" if run.kept_threads else "",
        "" if run.untimed in ("", NATIVE_CODE if counts.native else "") else f"no time: {run.untimed}",
        "its child processes are not counted" if run.processes and counts.native is None else "",
    ]
    return "counted: " + ", ".join(filter(None, parts))
