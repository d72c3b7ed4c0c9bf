"""Tests of comparisons of the base commit with the head: each side runs its own code in every layout of a
repository, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from setuptools.command.editable_wheel import _finder_template

from edgefl.errors import ConfigError, NotMet
from edgefl.regression import against
from edgefl.regression.against import AgainstBase, Comparison, verdict_of
from edgefl.regression.checkout import find_base
from edgefl.regression.process import FunctionLocation
from edgefl.regression.sides import CallRequest
from tests.patience import Patience

STEPS = """
MIB = {mib}

def step():
    held = b"x" * (MIB << 20)
    return len(held)

def stale():
    return 1
"""
PASSES_ON = """
from {module} import step as inner

def step():
    return inner()
"""

ENDS_A_FORK = """
import os, signal, time

def step():
    if (pid := os.fork()) == 0:
        time.sleep(10)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0) == (pid, signal.SIGTERM)
"""


@pytest.fixture(autouse=True)
def _short_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "PAIR_S", 0.05)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    top.mkdir()
    git(top, "init", "-q", "-b", "main")
    return top


def git(top: Path, *arguments: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    done = subprocess.run(
        ["git", "-C", str(top), *who, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout


def write(top: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)


def commit(top: Path, files: dict[str, str]) -> None:
    write(top, files)
    git(top, "add", "--all")
    git(top, "commit", "-q", "-m", "a commit")


def call(module: str, file: Path, name: str = "step") -> CallRequest:
    return CallRequest(
        function=FunctionLocation(module, str(file), name), setup=None, args=[], kwargs={}, device="pixel-3a",
        network=None, layout=0, limit_s=120.0,
    )  # fmt: skip


@pytest.fixture
def compare(repository: Path) -> Iterator[Callable[..., Comparison]]:
    """A function that compares a call with the same call at HEAD, which is checked out once per ``build``."""
    with contextlib.ExitStack() as stack:
        made: dict[tuple[str | None, ...], AgainstBase] = {}

        def compare(request: CallRequest, build: str | None = None) -> Comparison:
            key = build, os.environ.get("PYTHONPATH")  # which a process reads when it starts
            if key not in made:
                made[key] = AgainstBase(find_base("HEAD", repository), build)
                stack.callback(made[key].close)
            return made[key].compare(request.function.qualname, request, 0.05, 1e-9, lambda _: None)

        yield compare


def mib_of(found: Comparison) -> tuple[int, int]:
    """Return the MiB that the functions of base and head used, rounded to tens."""
    assert not found.unjudged
    (pair,) = found.pairs
    return round(pair.base_mib, -1), round(pair.head_mib, -1)


LAYOUTS = {
    "package in the top folder": ("top/steps.py", "top.steps"),
    "package in src": ("src/pkg/steps.py", "pkg.steps"),
    "module beside the test": ("tests/steps.py", "steps"),
    "top folder that is a package": ("own.py", "project.own"),
    "package that a test imports": ("tests/test_steps.py", "test_steps"),
}


def test_the_base_runs_its_own_code_in_every_layout(
    repository: Path, compare: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [file for file, module in LAYOUTS.values() if module != "test_steps"]
    packages = dict.fromkeys(["__init__.py", "top/__init__.py", "src/pkg/__init__.py"], "")
    test = {"tests/test_steps.py": PASSES_ON.format(module="pkg.steps")}
    commit(repository, {**dict.fromkeys(steps, STEPS.format(mib=10)), **packages, **test})
    write(repository, dict.fromkeys(steps, STEPS.format(mib=30)))
    for path in (".", "..", "src", "tests"):
        monkeypatch.syspath_prepend(repository / path)
    for layout, (file, module) in LAYOUTS.items():
        assert mib_of(compare(call(module, repository / file))) == (10, 30), layout


def test_a_function_can_end_its_own_processes(repository: Path, compare: Callable[..., Comparison]) -> None:
    commit(repository, {"steps.py": ENDS_A_FORK})
    write(repository, {"new.py": ""})
    assert not compare(call("steps", repository / "steps.py")).unjudged


def test_the_base_runs_its_own_code_with_an_editable_install(
    repository: Path, compare: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An editable install is an import hook of setuptools, which maps the package to its folder."""
    hook = _finder_template("pkg", {"pkg": str(repository / "code")}, {})
    starts = "import __editable___pkg_finder\n__editable___pkg_finder.install()\n"
    write(tmp_path / "hook", {"__editable___pkg_finder.py": hook, "sitecustomize.py": starts})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"))
    monkeypatch.syspath_prepend(tmp_path / "hook")
    code = {"code/__init__.py": "", "code/steps.py": STEPS.format(mib=10)}
    commit(repository, {**code, "test_steps.py": PASSES_ON.format(module="pkg.steps")})
    write(repository, {"code/steps.py": STEPS.format(mib=30)})
    assert mib_of(compare(call("test_steps", repository / "test_steps.py"))) == (10, 30)


def test_the_base_runs_its_own_code_with_an_editable_install_of_a_namespace_package(
    repository: Path, compare: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For namespace packages, setuptools also adds an entry to ``sys.path`` that is not a folder."""
    folder = str(repository / "space")
    hook = _finder_template("space", {"space": folder}, {"space": [folder]})
    starts = "import __editable___space_finder\n__editable___space_finder.install()\n"
    write(tmp_path / "hook", {"__editable___space_finder.py": hook, "sitecustomize.py": starts})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "hook"), *sys.path, "space.__path_hook__"])
    test = {"tests/test_steps.py": PASSES_ON.format(module="space.steps")}
    commit(repository, {"space/steps.py": STEPS.format(mib=10), **test})
    write(repository, {"space/steps.py": STEPS.format(mib=30)})
    assert mib_of(compare(call("test_steps", repository / "tests/test_steps.py"))) == (10, 30)


STARTS_PYTHON = """
import subprocess
import sys
from pathlib import Path

def step():
    command = [sys.executable, "-c", "import inner; print(inner.__file__)"]
    file = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert Path(file).is_relative_to(Path(__file__).parents[1])
"""


def test_python_programs_that_a_function_starts_import_from_the_files_of_its_side(
    repository: Path, compare: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(repository, {"own/inner.py": "", "tests/test_steps.py": STARTS_PYTHON})
    write(repository, {"own/inner.py": "changed = True"})
    monkeypatch.setenv("PYTHONPATH", str(repository / "own"))
    assert not compare(call("test_steps", repository / "tests/test_steps.py")).unjudged


def test_code_that_base_and_head_import_from_the_same_file_is_not_judged(
    repository: Path, compare: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere"
    write(copy, {"steps.py": STEPS.format(mib=1), "link.py": "import sys"})
    commit(repository, {"own/steps.py": STEPS.format(mib=10), "test_a.py": PASSES_ON.format(module="steps")})
    write(repository, {"own/steps.py": STEPS.format(mib=30)})
    monkeypatch.syspath_prepend(copy)
    found = compare(call("steps", copy / "steps.py"))
    assert "outside the repository" in found.unjudged
    assert verdict_of(found, 0.05).outcome == "INVALID"
    # A hook outside the repository that always loads the head's file.
    loads = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("steps", {str(repository / "own/steps.py")!r})
sys.modules["steps"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
    write(copy, {"sitecustomize.py": loads})
    monkeypatch.setenv("PYTHONPATH", str(copy))
    found = compare(call("test_a", repository / "test_a.py"))
    assert "the base would import steps from the head's file" in found.unjudged


@pytest.mark.parametrize("source", ["src", "python"])
def test_an_installed_copy_of_the_repository_is_not_judged(
    source: str,
    repository: Path,
    compare: Callable[..., Comparison],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A copy is recognised by its name in the repository's ``src``, or by pip's record of its origin."""
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    installed = tmp_path / "user/lib/python{}.{}/site-packages".format(*sys.version_info)
    package = {"pkg/__init__.py": "", "pkg/steps.py": STEPS.format(mib=1)}
    record = {
        "pkg-1.dist-info/direct_url.json": json.dumps({"url": repository.as_uri(), "dir_info": {}}),
        "pkg-1.dist-info/RECORD": "pkg/__init__.py,,\npkg/steps.py,,\n",
    }
    write(installed, {**package, **(record if source == "python" else {})})
    code = {f"{source}/{name}": text for name, text in package.items()}
    code[f"{source}/pkg/steps.py"] = STEPS.format(mib=2)
    commit(repository, {**code, "test_a.py": PASSES_ON.format(module="pkg.steps")})
    write(repository, {f"{source}/pkg/steps.py": STEPS.format(mib=30)})
    monkeypatch.syspath_prepend(installed)
    found = compare(call("test_a", repository / "test_a.py"))
    assert "pkg is imported from its installed copy" in found.unjudged
    assert "pip install -e" in found.unjudged


def test_modules_that_must_see_a_changed_environment_are_not_preloaded(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head sets a variable, which a module outside the repository reads when imported."""
    monkeypatch.setattr(against, "SCHEDULE", ((2, 1),))
    monkeypatch.setattr(against, "MIN_LAYOUTS", 2)
    elsewhere = repository.parent / "elsewhere"
    decides = "import os\nMIB = int(os.environ.get('GATE_MIB', '10'))\n"
    write(elsewhere, {"decides.py": decides})
    uses = "import decides\n\ndef step():\n    return len(b'x' * (decides.MIB << 20))\n"
    commit(repository, {"steps.py": uses, "plain.py": uses})
    write(repository, {"steps.py": f"import os\nos.environ['GATE_MIB'] = '30'\n{uses}"})
    monkeypatch.syspath_prepend(elsewhere)
    with contextlib.closing(AgainstBase(find_base("HEAD", repository))) as made:
        for module, mib in (("plain", 10), ("steps", 30)):
            request = call(module, repository / f"{module}.py")
            found = made.compare("step", request, 10.0, 1000.0, lambda _: None)
            assert {round(pair.base_mib, -1) for pair in found.pairs} == {10}
            assert {round(pair.head_mib, -1) for pair in found.pairs} == {mib}
            assert len(found.pairs) == 2


def test_each_test_gives_its_environment_and_folder_to_both_sides(
    repository: Path, compare: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = (
        "import os\nfrom pathlib import Path\n\ndef step():\n"
        "    mib = int(os.environ['GATE_MIB']) + int(Path('mib').read_text())\n"
        "    mib += 90 * ('PYTEST_CURRENT_TEST' in os.environ)  # names the test that runs first\n"
        "    return len(b'x' * (mib << 20))\n"
    )
    commit(repository, {"steps.py": reads, "a/mib": "0", "b/mib": "30"})
    write(repository, {"steps.py": f"{reads}\nSINCE = 1\n"})
    for variable, folder, mib in (("10", "a", 10), ("30", "a", 30), ("30", "b", 60)):
        monkeypatch.setenv("GATE_MIB", variable)
        monkeypatch.chdir(repository / folder)
        assert mib_of(compare(call("steps", repository / "steps.py"))) == (mib, mib)


def test_each_test_gives_its_path_to_both_sides(
    repository: Path, compare: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit(repository, {"steps.py": "def step():\n    pass\n\ndef imports():\n    import elsewhere\n"})
    write(repository, {"new.py": ""})
    write(tmp_path / "other", {"elsewhere.py": ""})
    assert not compare(call("steps", repository / "steps.py")).unjudged
    monkeypatch.syspath_prepend(tmp_path / "other")
    assert not compare(call("steps", repository / "steps.py", "imports")).unjudged


def test_a_module_that_changes_the_environment_when_a_function_runs_stays_preloaded(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a training step with torch does so. No stem (the process that is forked) is restarted."""
    monkeypatch.setattr(against, "SCHEDULE", ((1, 1),))
    monkeypatch.setattr(against, "MIN_LAYOUTS", 1)
    started: list[int] = []

    class CountedStem(against.Stem):
        def __init__(self, hash_seed: int, padding: int) -> None:
            super().__init__(hash_seed, padding)
            started.append(self.popen.pid)

    monkeypatch.setattr(against, "Stem", CountedStem)
    elsewhere = repository.parent / "elsewhere"
    write(elsewhere, {"late.py": "import os\nos.environ['GATE_LATE'] = '1'\n"})
    steps = "def step():\n    import late\n    return late\n"
    commit(repository, {"steps.py": steps})
    write(repository, {"steps.py": f"{steps}\nSINCE = 1\n"})
    monkeypatch.syspath_prepend(elsewhere)
    with contextlib.closing(AgainstBase(find_base("HEAD", repository))) as made:
        for _ in range(4):
            found = made.compare("step", call("steps", repository / "steps.py"), 10.0, 1000.0, lambda _: None)
            assert len(found.pairs) == 1
    assert len(started) == 1


def test_a_new_function_passes(repository: Path, compare: Callable[..., Comparison]) -> None:
    steps = f"{STEPS.format(mib=1)}\nclass Test:\n    def stale(self):\n        return 1\n"
    commit(repository, {"steps.py": steps})
    write(repository, {"steps.py": steps.replace("stale", "fresh"), "more.py": STEPS.format(mib=1)})
    for module, name in (("steps", "fresh"), ("steps", "Test.fresh"), ("more", "step")):
        found = compare(call(module, repository / f"{module}.py", name))
        assert found.missing == (f"steps.py has no {name}" if name != "step" else "more.py does not exist")
        assert verdict_of(found, 0.05).outcome == "PASS"
        assert "nothing to compare with yet" in verdict_of(found, 0.05).why


def test_a_function_whose_file_is_in_no_commit_is_not_judged(
    repository: Path, compare: Callable[..., Comparison]
) -> None:
    """The base's checkout has neither the files of submodules nor those that git ignores."""
    commit(repository, {".gitignore": "made.py\n"})
    write(repository, {**dict.fromkeys(("made.py", "sub/steps.py"), STEPS.format(mib=1)), "other.py": ""})
    git(repository / "sub", "init", "-q")
    for file, why in (("made.py", "git ignores "), ("sub/steps.py", "is in another repository, such as a ")):
        found = compare(call(Path(file).stem, repository / file))
        assert why in found.unjudged
        assert "--edgefl-build" in found.unjudged
        assert verdict_of(found, 0.05).outcome == "INVALID"


def test_a_stem_that_was_killed_is_replaced(repository: Path) -> None:
    """For example, the system may kill it because memory is short; later tests are compared all the same."""
    commit(repository, {"a.py": STEPS.format(mib=1), "b.py": STEPS.format(mib=1)})
    write(repository, {"c.py": ""})
    with contextlib.closing(AgainstBase(find_base("HEAD", repository))) as made:
        for name in ("a", "b"):
            found = made.compare("step", call(name, repository / f"{name}.py"), 0.05, 1e-9, lambda _: None)
            assert len(found.pairs) == 1
            for stem in made._stems:
                stem.popen.kill()
                stem.popen.wait()


def test_the_limit_of_a_function_does_not_include_imports(
    repository: Path, compare: Callable[..., Comparison]
) -> None:
    commit(repository, {"steps.py": f"import time\ntime.sleep(3)\n{STEPS.format(mib=1)}"})
    write(repository, {"other.py": ""})
    limited = msgspec.structs.replace(call("steps", repository / "steps.py"), limit_s=2.0)
    assert len(compare(limited).pairs) == 1


def test_branches_that_have_ended_are_reaped(repository: Path, compare: Callable[..., Comparison]) -> None:
    """A session may have hundreds of files of tests, each with branches of its own."""
    commit(repository, dict.fromkeys(("a.py", "b.py"), STEPS.format(mib=1)))
    write(repository, {"other.py": ""})
    for module in "abab":
        assert compare(call(module, repository / f"{module}.py")).pairs
    children = psutil.Process().children(recursive=True)
    # Of eight, the last two, and perhaps the two before, which may have been ending when those were forked.
    assert 2 <= sum(child.name() == "edgefl-branch" for child in children) < 8


def test_an_import_that_hangs_at_the_base_is_not_judged_and_ends(repository: Path) -> None:
    hangs = "import threading\nthreading.Event().wait()\n"
    commit(repository, {"hangs.py": hangs, "steps.py": STEPS.format(mib=1)})
    write(repository, {"hangs.py": STEPS.format(mib=1)})
    with contextlib.closing(AgainstBase(find_base("HEAD", repository))) as made:
        limited = msgspec.structs.replace(call("hangs", repository / "hangs.py"), limit_s=2.0)
        found = made.compare("step", limited, 0.05, 1e-9, lambda _: None)
        late = r"at HEAD \(\w+\) it did not finish its import within \d+ s; set a larger limit_s= "
        assert re.match(late, found.unjudged)
        assert "\n" not in found.unjudged
        left = psutil.Process().children(recursive=True)
        assert not [one for one in left if one.name() == "edgefl-branch" and one.status() != "zombie"]
        steps = call("steps", repository / "steps.py")
        assert len(made.compare("step", steps, 0.05, 1e-9, lambda _: None).pairs) == 1


BROKEN = {
    "import nothing_of_this_name": "No module named 'nothing_of_this_name'",
    "def step():\n    raise ValueError('broken at base')": "ValueError: broken at base",
    "def step():\n    import os\n    os._exit(3)": "exit code 3",
    "def step():\n    import os\n    os._exit(0)": "exit code 0",
    "def step():\n    import os\n    os.kill(os.getpid(), 9)": "signal 9",
    "def step(:\n": "SyntaxError",
}


def test_a_broken_base_is_not_judged(repository: Path, compare: Callable[..., Comparison]) -> None:
    files = [f"broken_{number}.py" for number in range(len(BROKEN))]
    commit(repository, dict(zip(files, BROKEN, strict=True)))
    write(repository, dict.fromkeys(files, STEPS.format(mib=1)))
    for file, why in zip(files, BROKEN.values(), strict=True):
        found = compare(call(Path(file).stem, repository / file))
        assert why in found.unjudged
        assert "--edgefl-build" in found.unjudged
        assert verdict_of(found, 0.05).outcome == "INVALID"


def test_a_broken_head_fails(repository: Path, compare: Callable[..., Comparison]) -> None:
    commit(repository, {"steps.py": STEPS.format(mib=1)})
    write(repository, {"steps.py": "def step():\n    raise ValueError('broken at head')"})
    with pytest.raises(NotMet, match="ValueError: broken at head"):
        compare(call("steps", repository / "steps.py"))


def test_the_base_has_the_files_of_its_build(
    repository: Path, compare: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = STEPS.format(mib=1).replace("MIB = 1", "import made\nMIB = made.MIB")
    commit(repository, {"steps.py": uses, ".gitignore": "made.py\n"})
    write(repository, {"made.py": "MIB = 30\n", "other.py": ""})
    monkeypatch.syspath_prepend(repository)
    steps = call("steps", repository / "steps.py")
    assert "No module named 'made'" in compare(steps).unjudged
    assert mib_of(compare(steps, "echo MIB = 10 > made.py")) == (10, 30)


def test_a_build_that_fails_runs_once_and_each_test_says_so(
    repository: Path, compare: Callable[..., Comparison], tmp_path: Path
) -> None:
    commit(repository, dict.fromkeys(("a.py", "b.py"), STEPS.format(mib=1)))
    write(repository, {"other.py": ""})
    whys = set()
    for module in ("a", "b", "a"):
        with pytest.raises(ConfigError) as caught:
            compare(call(module, repository / f"{module}.py"), f"echo once >> {tmp_path}/ran\nexit 3")
        whys.add(str(caught.value))
    assert (tmp_path / "ran").read_text() == "once\n"
    (why,) = whys
    assert re.fullmatch(
        "--edgefl-build: 'echo .* exit 3' failed in the base's checkout with exit code 3: .*", why
    )


def test_more_memory_is_a_regression_and_comes_first_in_the_verdict(
    repository: Path, compare: Callable[..., Comparison]
) -> None:
    commit(repository, {"steps.py": STEPS.format(mib=12)})
    write(repository, {"steps.py": STEPS.format(mib=32)})
    found = verdict_of(compare(call("steps", repository / "steps.py")), 0.05)
    assert found.outcome == "FAIL"
    assert found.grew[0] == "peak_mib"
    assert re.match(r"peak memory \+(19|20)[.\d]* MiB: 1\d[.\d]* → 3\d[.\d]* MiB", found.why)


def test_the_sleep_of_a_function_counts(repository: Path, compare: Callable[..., Comparison]) -> None:
    """The time of a call includes time without CPU use."""
    text = "import time\n\ndef step():\n    time.sleep({})\n"
    commit(repository, {"steps.py": text.format(0.002)})
    write(repository, {"steps.py": text.format(0.02)})
    (pair,) = compare(call("steps", repository / "steps.py")).pairs
    assert pair.base_s > 0.002
    assert pair.head_s > 0.02
    assert pair.log_ratio > 0


KILLED = """
import sys
import time
from pathlib import Path
from edgefl.regression.checkout import Checkout, find_base

made = Checkout(find_base("HEAD", Path(sys.argv[1])))
print(made.root, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_checkout_is_removed_after_any_signal(number: signal.Signals, repository: Path) -> None:
    commit(repository, {"steps.py": STEPS.format(mib=1)})
    write(repository, {"steps.py": ""})
    started = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(repository)], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert started.stdout is not None
    with started.stdout:
        root = Path(started.stdout.readline().strip())
        assert (root / "steps.py").read_text() == STEPS.format(mib=1)
        os.killpg(started.pid, number)  # Ctrl-C reaches all processes of a terminal
        started.wait()
    patience = Patience(60.0)
    while root.parent.exists() or str(root) in git(repository, "worktree", "list"):
        assert not patience.over()
        time.sleep(0.05)
