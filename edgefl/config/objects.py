"""Replace Python objects with names that an experiment file can hold and every process of a run can import.

A run's processes start with a fresh interpreter, and the record must name the code that ran, so that the run
can be resumed and verified. Classes and functions are therefore named by module, and arrays are saved to a
file in the run's folder. Objects without such a name (a lambda, a function in a notebook cell) are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edgefl.config import config
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.files import DATA_FILES
from edgefl.loading import INSTALLED, own_code
from edgefl.strategies import Strategy, names

_KEYS_OF_FILES = ("fleet.devices", "fleet.network", "fleet.availability", "data.path", "data.labels")
"""Keys that may contain paths relative to the experiment's file, or tables with such paths."""


class Reference(NamedTuple):
    """The name of a class or function, ``"my_module:name"``, and the folder from which it is imported."""

    name: str
    folder: Path


class Named(NamedTuple):
    """An experiment that refers to Python objects by name, and the folder from which they are imported."""

    experiment: Experiment
    base: Path
    trusted: tuple[str, ...]
    """Modules that the caller has already imported from other folders."""
    data: Any
    """Arrays to write to the run's folder, or None."""
    strategies: tuple[dict[str, Any], ...]
    """The experiment's table ``strategy`` for each additional strategy of a grid."""


def opened(experiment: object, grid: Collection[str] = ()) -> tuple[Experiment, Path | None]:
    """Return an experiment and the folder of its file; the folder is None if no file was given.

    For ``grid``, see `config.load`. Raises `ConfigError` for a file that is missing or invalid, and for
    anything other than an experiment.
    """
    if isinstance(experiment, Experiment):
        return experiment, None
    if isinstance(experiment, str | Path):
        return config.load(experiment, grid=grid), Path(experiment).absolute().parent
    got = type(experiment).__name__
    raise ConfigError(f"experiment: must be an Experiment or the path of a TOML file, got a {got}")


def name_objects(
    experiment: Experiment,
    home: Path | None = None,
    *,
    strategy: Any = None,
    model: Any = None,
    data: Any = None,
    partition: Any = None,
    strategies: Collection[Any] = (),
    grid: Mapping[str, Collection[Any]] = {},
) -> Named:
    """Return the experiment with importable names of the given objects; ``home`` is the folder of its file.

    ``strategy`` is an instance or a class, ``model`` is a function or class that creates a model, ``data`` is
    a function, a `Dataset` or four arrays, ``partition`` is a function, and ``strategies`` are the strategies
    of the ``grid``. Each may also be a name, as in an experiment's file. If neither the file nor such a name
    refers to the user's code, and no value of the grid refers to such code or to a file, modules are imported
    from the folder of one of the objects instead of ``home``. Raises `ConfigError` for an object that other
    processes cannot import.
    """
    words = [("strategy.name", each) for each in (strategy, *strategies)]
    words += [("model.name", model), ("data.name", data), ("data.partition", partition)]
    beside = any(isinstance(word, str) and own_code({key: word}) for key, word in words)
    keeps_home = home is not None and (beside or _refers_beside(grid) or own_code(config.plain(experiment)))
    arrays = None if callable(data) or isinstance(data, str) else data
    found: list[Reference] = []
    for value, key, table, field in (
        (model, "model", "model", "name"),
        (partition, "partition", "data", "partition"),
        (data if arrays is None else None, "data", "data", "name"),
    ):
        if value is not None:
            if not isinstance(value, str):
                found.append(reference(value, key))
            name = value if isinstance(value, str) else found[-1].name
            experiment = _replaced(experiment, table, **{field: name})
    chosen = [_strategy(strategy)] if strategy is not None else []
    others = [_strategy(each) for each in strategies]
    if chosen:
        experiment = msgspec.structs.replace(experiment, strategy=chosen[0][0])
    found += [refers for _, refers in (*chosen, *others) if refers is not None]
    here = Path.cwd().resolve()
    folders = [refers.folder for refers in found if refers.folder != here]
    base = home or next(iter(folders), here)
    if home is not None and not keeps_home:
        base = next((folder for folder in folders if folder.name not in INSTALLED), home)
    elsewhere = [refers for refers in found if refers.folder not in (here, base)]
    trusted = tuple(dict.fromkeys(refers.name.partition(":")[0].partition(".")[0] for refers in elsewhere))
    return Named(experiment, base, trusted, arrays, tuple(table for table, _ in others))


def _refers_beside(grid: Mapping[str, Collection[Any]]) -> bool:
    """Return True if a value of a grid may refer to code or to a file beside the experiment's file."""
    return any(
        key in ("fleet", "data") or key.startswith(_KEYS_OF_FILES) or own_code({key: config.plain(value)})
        for key, values in grid.items()
        for value in values
    )


def reference(value: Any, key: str) -> Reference:
    """Return the name by which every process can import a class or function.

    >>> reference(reference, "model").name
    'edgefl.config.objects:reference'
    >>> reference(lambda: 0, "model")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: model: '<lambda>' is defined inside a function or class; ...
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        kind = type(value).__name__
        raise ConfigError(f"{key}: must be a function or class defined in a module, got a {kind}")
    advice = (
        "define it at the top level of a file, such as mine.py (in a notebook: %%writefile mine.py), "
        "and import it"
    )
    if not name.isidentifier():
        inner = name.rpartition(".")[2]
        where = "defined inside a function or class"
        raise ConfigError(f"{key}: {inner!r} is {where}; {advice}")
    holder = sys.modules.get(module)
    if getattr(holder, name, None) is not value:
        raise ConfigError(f"{key}: {module}.{name} now refers to another object; {advice}")
    file = getattr(holder, "__file__", None)
    if module in ("__main__", "__mp_main__"):  # the latter in a process of multiprocessing
        spec = getattr(holder, "__spec__", None)
        module = spec.name if spec is not None else Path(file).stem if file else ""
    if file is None or not all(part.isidentifier() for part in module.split(".")):
        where = (
            "defined at a prompt or in a notebook"
            if file is None
            else f"in {file}, which cannot be imported by name"
        )
        raise ConfigError(f"{key}: {name!r} is {where}; {advice}")
    path = Path(file).resolve()
    depth = module.count(".") + (path.name == "__init__.py")
    return Reference(f"{module}:{name}", path.parents[depth])


def _strategy(given: Any) -> tuple[dict[str, Any], Reference | None]:
    """Return the experiment's table for a strategy, given as an instance, a class or a name."""
    if isinstance(given, str):
        return {"name": given}, None
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, Strategy):
        raise ConfigError(f"strategy: must be a Strategy or a strategy's name, got a {kind.__name__}")
    own = kind.__module__.rpartition(".")
    refers = None
    if own[0] == "edgefl.strategies" and (name := own[2].replace("_", "-")) in names():
        table: dict[str, Any] = {"name": name}
    else:
        refers = reference(kind, "strategy")
        table = {"name": refers.name}
    if not isinstance(given, type):
        for field in dataclasses.fields(given):
            value = getattr(given, field.name)
            default = field.default
            if field.init and not (value is default or (type(value) is type(default) and value == default)):
                table[field.name] = value
    return table, refers


def _replaced(experiment: Experiment, table: str, **fields: str) -> Experiment:
    """Return the experiment with other ``fields`` of a table, which may be a dict (see `config.validate`)."""
    given = getattr(experiment, table)
    if isinstance(given, Mapping):
        return msgspec.structs.replace(experiment, **{table: {**given, **fields}})
    return msgspec.structs.replace(experiment, **{table: msgspec.structs.replace(given, **fields)})


@contextlib.contextmanager
def trusting(modules: tuple[str, ...]) -> Iterator[None]:
    """Let processes started in this context import these modules, which the caller has imported."""
    before = os.environ.get("EDGEFL_MODULES")
    if modules:
        os.environ["EDGEFL_MODULES"] = ",".join(filter(None, (before, *modules)))
    try:
        yield
    finally:
        if modules and before is None:
            del os.environ["EDGEFL_MODULES"]
        elif before is not None:
            os.environ["EDGEFL_MODULES"] = before


@contextlib.contextmanager
def with_arrays(named: Named, folder: Path) -> Iterator[Experiment]:
    """Save the experiment's arrays to a file in ``folder``, and yield the experiment with the file's path.

    The file is removed if the body of the ``with`` statement raises an exception, unless the file was already
    there or the folder now contains a run or a sweep to which it may belong.
    """
    if named.data is None:
        yield named.experiment
        return
    from edgefl.learning.array_set import save_arrays
    from edgefl.results.run_folder import EXPERIMENT_FILE, RUNS

    made, taken = not folder.exists(), (folder / EXPERIMENT_FILE).exists()
    before = {*folder.glob(DATA_FILES)}
    file = save_arrays(named.data, folder)
    try:
        yield _replaced(named.experiment, "data", name="arrays", path=str(file.absolute()))
    except BaseException:
        with contextlib.suppress(OSError):
            used = not taken and any((folder / name).exists() for name in (EXPERIMENT_FILE, RUNS))
            if file not in before and not used:
                file.unlink()
                if made:
                    folder.rmdir()
        raise
