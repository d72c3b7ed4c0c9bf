"""Tests that the fixture `nothing_left` finds everything that a test leaves behind."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LEAKS = {
    "process": ("subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)", "* input()"),
    "orphan": ("subprocess.run(['sh', '-c', 'sleep 1000 >&- 2>&- <&- &'], check=True)", "* sleep 1000"),
    "thread": ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "threads: Thread-*"),
    "descriptor": ("KEPT.append(os.open(os.devnull, os.O_RDONLY))", "descriptors: * /dev/null"),
    "memfd": ("KEPT.append(os.memfd_create('x'))", "descriptors: * /memfd:x*"),
    "context": (
        "KEPT.append(zmq.Context()); KEPT[-1].socket(zmq.PULL)\n"
        "    while not any('ZMQ' in name for name in conftest._threads()):  # they name themselves\n"
        "        pass",
        "*threads: ZMQbg/*",
    ),
    "shared": ("open('/dev/shm/edgefl-test-left', 'w').close()", "shared: edgefl-test-left"),
    "mapped": (
        "with open('/dev/shm/edgefl-test-mapped', 'w+b', 0) as file: "
        "file.truncate(9); KEPT.append(mmap.mmap(file.fileno(), 9))",
        "shared: edgefl-test-mapped",
    ),
    "folder": ("tempfile.mkdtemp(prefix='edgefl-')", "folders: edgefl-*"),
}
"""Maps each kind of leak to the body of a test that leaks, and to a pattern of the message about the leak."""
TESTS = """
import conftest, mmap, os, pytest, subprocess, sys, tempfile, threading, zmq
KEPT = []

@pytest.fixture
def no_patience(monkeypatch):
    monkeypatch.setattr(conftest, "BOUND_S", 0.0)
    yield

def test_of_what_ends_by_itself(nothing_left):
    subprocess.run(['sh', '-c', 'sleep 0.1 >&- 2>&- <&- &'], check=True)
    with zmq.Context() as context, context.socket(zmq.PULL):
        pass
    threading.Thread(target=KEPT.append, args=(1,)).start()

def test_that_fails_says_nothing_more(no_patience, nothing_left):
    KEPT.append(os.open(os.devnull, 0))
    assert False

def test_of_other_processes():
    assert "edgefl-test-other" in os.listdir("/dev/shm")
    assert "edgefl-test-other" not in conftest._shared()

def test_of_data(data_dir):
    pass

@pytest.fixture
def nowhere(monkeypatch):
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere/at/all")

def test_of_no_data(nowhere, data_dir):
    pass
"""
PROCESS_TEST = """
import conftest, os
def test_it(request, monkeypatch):
    monkeypatch.setattr(conftest, "BOUND_S", 0.0)
    assert request.node.get_closest_marker('process')
    os.open(os.devnull, os.O_RDONLY)
"""


def test_the_fixture_finds_all_leaks_and_nothing_else(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inner session runs in another process, and does not wait for leaks to end."""
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = process\n    slow\n")
    given = "no_patience, nothing_left"
    tests = [f"def test_{name}({given}):\n    {body}\n" for name, (body, _) in LEAKS.items()]
    pytester.makepyfile(test_inner="\n".join([TESTS, *tests]))
    pytester.mkdir("process")
    (pytester.path / "process" / "test_there.py").write_text(PROCESS_TEST)
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # conftest's helpers
    try:
        with open("/dev/shm/edgefl-test-other", "w+b", 0) as file:
            file.truncate(9)
            with mmap.mmap(file.fileno(), 9):
                result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs")
    finally:
        for path in Path("/dev/shm").glob("edgefl-test-*"):
            path.unlink()
    result.assert_outcomes(passed=len(LEAKS) + 3, failed=1, skipped=2, errors=len(LEAKS) + 1)
    for name, (_, found) in LEAKS.items():
        result.stdout.fnmatch_lines(
            [f"*ERROR at teardown of test_{name} *", f"*left behind: *{found.lstrip('*')}*"]
        )
    result.stdout.fnmatch_lines(["*EDGEFL_DATA does not name a folder*"])
    result.stdout.fnmatch_lines(["*EDGEFL_DATA=/nowhere/at/all is no folder*"])
