"""Count native instructions of a function and of all programs that it starts, with Valgrind's Callgrind.

A separate program, which runs under Callgrind, calls the function twice and counts only the second call. The
hash seed, the seeds of random numbers and Valgrind's memory layout are fixed. Valgrind's emulated processor
has the same instruction sets on every x86-64 host with AVX2. The program imports torch only if the function's
module does.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import msgspec

from edgefl.errors import ConfigError, NotMet, as_config_error
from edgefl.host.children import Exit
from edgefl.host.process import child_environment
from edgefl.regression import valgrind
from edgefl.regression.calls import bound, seed, takes_device
from edgefl.regression.counts import cut_off
from edgefl.regression.process import PrepareRequest, Surroundings, failure_of, find

FEW = 0.01
"""A function is listed by name only if it executes at least this share of all instructions."""
_COST = re.compile(r"[+*\-\d]\S* (\d+)$")
_FUNCTION = re.compile(r"fn=\((\d+)\)(?: (.*))?$")
_CALLEE = re.compile(r"cfn=\((\d+)\) (.*)$")
_NAMELESS = "code without symbols"


def why_not() -> str:
    """Return why native instructions cannot be counted here; empty if they can."""
    if shutil.which("valgrind") is None:
        return 'counted="native" needs Valgrind; install it (apt-get install valgrind)'
    if platform.machine() != "x86_64":
        return f'counted="native" needs an x86-64 processor (got {platform.machine()})'
    return ""


def environment() -> str:
    """Return the environment on which native counts depend: machine, C library and version of Python."""
    return f"{platform.machine()}, {' '.join(platform.libc_ver())}, Python {platform.python_version()}"


def count_native(request: PrepareRequest) -> dict[str, int]:
    """Return how many native instructions each function executed.

    Instructions are counted in the process that makes the call and in all processes that it starts. Raises
    `ConfigError` if this host cannot count them, and `NotMet` if the measured function fails.
    """
    if why := why_not():
        raise ConfigError(why)
    name = request.function.qualname
    with tempfile.TemporaryDirectory(prefix="edgefl-callgrind-") as folder:
        command = [
            "valgrind", "--tool=callgrind", "--quiet", "--trace-children=yes",
            f"--callgrind-out-file={folder}/out.%p", sys.executable, "-S", valgrind.__file__,
            __name__, folder,
        ]  # fmt: skip
        nowhere, environment = subprocess.DEVNULL, child_environment(Surroundings.now().environment)
        process = subprocess.Popen(
            command, env=environment | {"PYTHONHASHSEED": "0"}, stdin=subprocess.PIPE,
            stdout=nowhere, stderr=nowhere, start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(msgspec.msgpack.encode(request), timeout=request.limit_s)
        except subprocess.TimeoutExpired:
            late = f"took longer than {request.limit_s:g} s; set a larger limit_s= in the mark"
            raise NotMet(f"{name}: counting under Valgrind {late}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        failed = Path(folder, "failed")
        if failed.exists():
            raise NotMet(f"{name} failed under Valgrind:\n{failed.read_text()}")
        if process.returncode:
            end = f"its process under Valgrind ended with {Exit(process.returncode)}"
            raise NotMet(
                f"{name}: {end} ('valgrind --tool=callgrind true' shows whether Valgrind works here)"
            )
        found: Counter[str] = Counter()
        unread, whole = f"{name}: Valgrind's counts cannot be read", False
        with as_config_error(unread, OSError):
            for path in Path(folder).glob("out.*"):
                if path.name != f"out.{process.pid}":  # this file counts the code after the measured call
                    text = path.read_text(errors="replace")
                    found.update(_costs(text))
                    whole |= path.stem == f"out.{process.pid}" and "\ntotals: " in text
    if not whole:
        raise ConfigError(f"{unread}: they are not complete; is there space in {Path(folder).parent}?")
    return _named(found)


def _costs(text: str) -> dict[str, int]:
    """Return the number of instructions of each function, without its callees, from a Callgrind file."""
    names: dict[str, str] = {}
    costs: Counter[str] = Counter()
    function, callee = _NAMELESS, False
    for line in text.splitlines():
        if (found := _FUNCTION.match(line)) is not None:
            name = names.setdefault(found[1], found[2] or "0x")
            function = _NAMELESS if name.startswith("0x") else name
        elif (found := _CALLEE.match(line)) is not None:
            names[found[1]] = found[2]
        elif line.startswith("calls="):
            callee = True  # the next line with a cost belongs to the called function
        elif (found := _COST.match(line)) is not None:
            costs[function] += 0 if callee else int(found[1])
            callee = False
    return dict(costs)


def _named(costs: Counter[str]) -> dict[str, int]:
    """Return each function's instruction count; functions with less than 1% of the total are combined."""
    total = costs.total()
    named = {name: count for name, count in cut_off(costs).items() if count >= FEW * total}
    rest = total - sum(named.values())
    return named | ({"other functions": rest} if rest else {})


def main(folder: str) -> None:
    """Run the function that the request on stdin names. Callgrind writes its files to ``folder``."""
    try:
        request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=PrepareRequest)
        sys.path[:] = request.path
        function, setup = find(request.function), None if request.setup is None else find(request.setup)
        handle = _handle(request) if takes_device(function) else None
        seed()
        bound(function, setup, request.args, request.kwargs, handle)()
        seed()
        run = bound(function, setup, request.args, request.kwargs, handle)
        seed()
        # Callgrind wrote these files for programs that the first call started and that have ended.
        for path in Path(folder).glob("out.*"):
            if path.name != f"out.{os.getpid()}":
                path.unlink()
        valgrind.request(valgrind.START)
        valgrind.request(valgrind.ZERO)
        run()
        valgrind.request(valgrind.STOP)
        valgrind.request(valgrind.DUMP)
    except BaseException as error:
        Path(folder, "failed").write_text(failure_of(error).why or "out of memory")
    sys.stdout.flush()
    os._exit(0)


def _handle(request: PrepareRequest) -> object:
    from edgefl.regression.repetition import DeviceHandle

    return DeviceHandle.named(request.device, request.network)
