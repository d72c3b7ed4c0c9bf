"""The fixture that proves that nothing is left behind must itself find what is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.process

LEAKS = {
    "process": "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)",
    "orphan": "subprocess.run(['sh', '-c', 'sleep 1000 >&- 2>&- <&- &'], check=True)",
    "thread": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "descriptor": "os.open(os.devnull, os.O_RDONLY)",
    "memfd": "os.memfd_create('x')",
    "context": "KEPT.append(zmq.Context()); KEPT[-1].socket(zmq.PULL)",
    "shared": "open('/dev/shm/edgefl-test-left', 'w').close()",
    "folder": "tempfile.mkdtemp(prefix='edgefl-')",
}
FOUND = {
    "process": "processes: * input()",
    "orphan": "processes: * sleep 1000",
    "thread": "threads: Thread-*",
    "descriptor": "descriptors: * /dev/null",
    "memfd": "descriptors: * /memfd:x*",
    "context": "*threads: ZMQbg/*",
    "shared": "shared: edgefl-test-left",
    "folder": "folders: edgefl-*",
}


CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text()


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """Where what is left stays, so that it need not be waited for."""
    pytester.makeconftest(CONFTEST.replace("BOUND_S = 20.0", "BOUND_S = 0.5"))
    pytester.makeini("[pytest]\nmarkers = process\n    slow\n")
    return pytester


def _run(inner: pytest.Pytester, body: str) -> pytest.RunResult:
    inner.makepyfile(
        "import os, subprocess, sys, tempfile, threading, zmq\n"
        "KEPT = []\n"
        f"def test_it(nothing_left):\n    {body}\n"
    )
    return inner.runpytest_subprocess("-p", "no:cacheprovider")


@pytest.mark.parametrize("leak", LEAKS)
def test_finds(inner: pytest.Pytester, leak: str) -> None:
    try:
        result = _run(inner, LEAKS[leak])
    finally:
        if leak == "shared":
            os.unlink("/dev/shm/edgefl-test-left")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*left behind: *{FOUND[leak].lstrip('*')}*"])


def test_passes_what_ends_by_itself(inner: pytest.Pytester) -> None:
    body = (
        "subprocess.run(['sh', '-c', 'sleep 0.1 >&- 2>&- <&- &'], check=True)\n"
        "    with zmq.Context() as context, context.socket(zmq.PULL):\n        pass\n"
        "    threading.Thread(target=KEPT.append, args=(1,)).start()\n"
    )
    inner.makeconftest(CONFTEST)
    _run(inner, body).assert_outcomes(passed=1)


def test_says_nothing_more_of_a_failed_test(inner: pytest.Pytester) -> None:
    _run(inner, "KEPT.append(os.open(os.devnull, 0)); assert False").assert_outcomes(failed=1)


def test_process_tests_get_it_unasked(inner: pytest.Pytester) -> None:
    inner.mkdir("process")
    inner.path.joinpath("process", "test_there.py").write_text(
        "import os\ndef test_it(request):\n"
        "    assert request.node.get_closest_marker('process')\n"
        "    os.open(os.devnull, os.O_RDONLY)\n"
    )
    inner.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1, errors=1)


def test_data_dir_is_skipped_with_a_reason(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    inner.makepyfile("def test_it(data_dir): pass")
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    inner.runpytest_subprocess("-rs").stdout.fnmatch_lines(["*EDGEFL_DATA does not name a folder*"])
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere/at/all")
    inner.runpytest_subprocess("-rs").stdout.fnmatch_lines(["*EDGEFL_DATA=/nowhere/at/all is no folder*"])
