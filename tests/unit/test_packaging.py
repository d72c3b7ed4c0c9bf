"""Tests that the package, its metadata and the examples in its documentation agree with the code."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl import config, experiment, strategies
from edgefl.cli import app
from edgefl.core import Core
from edgefl.strategies import names as built_in
from edgefl.strategies import resolve
from edgefl.testing import fleet, run_in_memory

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "edgefl").rglob("*.py"))

IMPORTED_AS = {"pillow": "PIL", "pyzmq": "zmq", "scikit-learn": "sklearn"}


@pytest.fixture(scope="module")
def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for requirement in requirements]


@functools.cache
def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """All import statements of the file, including those inside functions."""
    return [node for node in statements(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node, at any depth."""
    for part in ("body", "handlers", "cases", "orelse", "finalbody"):
        inner = getattr(node, part, [])
        for one in inner if isinstance(inner, list) else []:
            yield one
            yield from statements(one)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(path: Path) -> set[str]:
    """Top-level names of all modules that the file imports."""
    found: set[str] = set()
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_every_import_is_declared_and_every_dependency_is_imported(project: Any) -> None:
    declared = {IMPORTED_AS.get(name, name) for name in names(project["dependencies"])}
    used: set[str] = set().union(*map(imported, SOURCES))
    extras = {"pytest", "ray", "flwr", "timm", "cryptography", "pfl", "flsim", "hydra", "omegaconf"}
    extras |= {"datasets", "flwr_datasets", "mlflow", "wandb"}
    assert used - set(sys.stdlib_module_names) - {"edgefl"} - declared - extras == set()
    assert declared - used == set()


def test_every_dependency_is_pinned_explained_and_without_an_upper_bound(project: Any) -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    extras = [name for extra in project["optional-dependencies"].values() for name in names(extra)]
    assert set(names(project["dependencies"]) + extras) <= set(pins)
    assert all(re.fullmatch(r"[0-9.]+", version) for version in pins.values())  # torch without a local tag
    assert sorted(pins) == list(pins)
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        assert re.fullmatch(r"[a-z-]+>=[0-9.]+", requirement)
        assert f"**{names([requirement])[0]}**" in explained


def test_a_source_distribution_has_every_file_and_needs_no_network(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for line in re.findall(r"^COPY (?!--from)(.*)$", (ROOT / "Containerfile").read_text(), re.MULTILINE):
        *files, _ = line.split()
        for file in files:
            if (ROOT / file).is_dir():
                shutil.copytree(
                    ROOT / file, source / file, ignore=shutil.ignore_patterns("*.so", "__pycache__")
                )
            else:
                source.mkdir(exist_ok=True)
                shutil.copy(ROOT / file, source / file)
    for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Containerfile"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path)]
    offline = os.environ | {"PIP_NO_INDEX": "1"}
    done = subprocess.run(command, cwd=source, env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        found = {name.partition("/")[2] for name in packed.getnames()}
    given = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {name for name in given if "egg-info" not in name} - found == set()


def test_the_citation_has_the_version_and_license_of_the_package(project: Any) -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation


def test_the_command_starts_the_main_function(project: Any) -> None:
    assert project["scripts"] == {"edgefl": "edgefl.__main__:main"}


def test_every_folder_of_code_is_a_package_and_the_package_run_does_not_hide_the_function() -> None:
    assert [path for path in SOURCES if not (path.parent / "__init__.py").is_file()] == []
    importlib.import_module("edgefl.run.supervisor")
    assert callable(edgefl.run)


def test_no_code_is_compiled_from_text() -> None:
    """Ruff's rules ban eval, exec and pickle, but cannot ban this builtin."""
    for path in SOURCES:
        assert not re.search(r"(?<![\w.])compile\(", path.read_text()), path


def packages_imported(path: Path) -> set[str]:
    """The packages and top-level modules of edgefl that the file imports."""
    found: set[str] = set()
    for node in imports_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "edgefl":
            module = str(node.module).split(".")
            found |= {module[1]} if len(module) > 1 else {alias.name for alias in node.names}
    return found & {path.stem for path in (ROOT / "edgefl").iterdir()}


def in_cycles(uses: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the packages or modules that are in an import cycle or depend on one, with what they use."""
    while free := {user for user, used in uses.items() if not used & uses.keys()}:
        uses = {user: used for user, used in uses.items() if user not in free}
    return uses


def test_packages_import_each_other_in_one_direction() -> None:
    below: dict[str, set[str]] = {}
    for path in SOURCES:
        package = path.relative_to(ROOT / "edgefl").parts[0].removesuffix(".py")
        if package != "__init__":
            below.setdefault(package, set()).update(packages_imported(path) - {package})
    assert in_cycles(below) == {}


def test_a_packages_docstring_names_its_modules() -> None:
    """The package ``strategies`` is exempt, since its modules are named after their algorithms."""
    for package in {path.parent for path in SOURCES} - {ROOT / "edgefl", ROOT / "edgefl" / "strategies"}:
        docstring = ast.get_docstring(parsed(package / "__init__.py")) or ""
        modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
        assert modules - set(re.findall(r"\w+", docstring)) == set(), package


def test_files_import_each_other_in_one_direction_even_inside_functions() -> None:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
    files = {name: path for path, name in names.items() if path.stem != "__init__"}
    below: dict[str, set[str]] = {}
    for name, path in files.items():
        below[name] = set()
        for node in imports_of(path):
            if isinstance(node, ast.Import):
                below[name] |= {alias.name for alias in node.names}
            elif node.module:
                below[name] |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    assert in_cycles(below) == {}


def test_no_shipped_file_has_a_path_of_a_developers_machine() -> None:
    shipped = [*SOURCES, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*.toml")]
    shipped += [ROOT / name for name in ("pyproject.toml", "setup.py", "Makefile", "constraints.txt")]
    for path in shipped:
        found = re.search(r"/(?:home|root|Users|workspace|opt)/\w", path.read_text())
        assert found is None, f"{path}: {found}"


EXPERIMENTS = [
    path for path in (ROOT / "experiments").rglob("*.toml") if path.parent.name not in ("tuned", "studies")
]


@pytest.mark.parametrize("path", sorted(EXPERIMENTS), ids=lambda path: path.stem)
def test_every_shipped_experiment_loads(path: Path) -> None:
    wanted = config.load(path)
    resolve(wanted.strategy).check(sum(wanted.fleet.devices.values()))


def test_the_readme_shows_experiments_and_commands_that_exist(tmp_path: Path) -> None:
    readme, listed = (ROOT / "README.md").read_text(), (ROOT / "docs" / "commands.md").read_text()
    for block in re.findall(r"```toml\n(.*?)```", readme, re.DOTALL):
        path = tmp_path / "e.toml"
        path.write_text(block)
        config.load(path)
    commands = {one.name or one.callback.__name__ for one in app.registered_commands if one.callback}
    commands |= {group.name for group in app.registered_groups if group.name}
    assert set(re.findall(r"`edgefl ([a-z]+)", listed)) == commands
    assert set(re.findall(r"(?:`|\$ )edgefl (\w+)", readme)) <= commands
    (group,) = [group.typer_instance for group in app.registered_groups if group.name == "bench"]
    benches = {command.callback.__name__ for command in group.registered_commands}
    assert set(re.findall(r"`edgefl bench {([\w,]+)}", listed)[0].split(",")) == benches
    for file in re.findall(r"experiments/[\w-]+\.toml", readme):
        assert (ROOT / file).is_file()
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()


TEXT = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")


def block(mark: str) -> str:
    found = re.search(re.escape(mark) + r"\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None, f"docs/strategies.md has no {mark}"
    return found[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("by_loss.py", "by_age.py", "buffered_adam.py"):
        (tmp_path / name).write_text(block(f"<!-- file: {name} -->"), encoding="utf-8")
    return tmp_path


def test_the_example_passes_the_kit_as_printed(folder: Path) -> None:
    (folder / "try_it.py").write_text(block("<!-- test -->"), encoding="utf-8")
    command = [sys.executable, "-W", "error", "try_it.py"]
    done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    assert done.stdout


def test_the_tables_and_strategies_of_the_strategies_page_run(folder: Path) -> None:
    tables = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    made = [resolve(tomllib.loads(table)["strategy"], [folder]) for table in tables]
    assert [type(strategy).__name__ for strategy in made] == ["FedBuff", "ByLoss"]
    adam = resolve({"name": "buffered_adam:BufferedAdam", "server_lr": 0.5}, [folder])
    assert (adam.optimizer().kind, adam.optimizer().lr) == ("adam", 0.5)
    for strategy in (made[1], adam):
        core = Core(strategy, fleet(4), 1, experiment.Stop(versions=5))
        assert len(run_in_memory(core, [1.0, 2.0, 3.0, 4.0]).models) == 6


def test_the_strategies_page_has_all_base_classes_and_built_in_strategies() -> None:
    for name in ("Asynchronous", "Buffered", "Polled", "Rounds", "ServerOptimizer", "Strategy"):
        assert f"`{name}`" in TEXT
        assert name in strategies.__all__
        assert hasattr(strategies, name)
    assert [name for name in built_in() if f"`{name}`" not in TEXT] == []
