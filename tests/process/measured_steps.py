"""Functions that the process tests run on emulated devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch

WEIGHTS = torch.zeros(64, 64)
CALLS: list[int] = []


def step(batch: int = 8, mib: int = 0) -> None:
    held = b"x" * (mib << 20)
    for _ in range(3):
        torch.mm(torch.ones(batch, 64), WEIGHTS)
    del held


def prepared(batch: int) -> torch.Tensor:
    return torch.ones(batch, 64)


def with_setup(inputs: torch.Tensor, batch: int) -> None:
    assert inputs.shape == (batch, 64)
    torch.mm(inputs, WEIGHTS)


def upload(edge_device: Any, count: int) -> None:
    assert edge_device.name == "pixel-3a"
    edge_device.send(torch.zeros(count, dtype=torch.uint8))


def torch_hungry() -> None:
    torch.ones(1 << 30)


def python_hungry() -> None:
    b"x" * (1 << 30)


def broken() -> None:
    raise ValueError("the loss is\nnot finite")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def dies_of_a_real_time_signal() -> None:
    os.kill(os.getpid(), 40)


def ends_what_it_started() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        child = subprocess.Popen(["sleep", "300"])
        child.send_signal(number)
        assert child.wait() == -number


def leaves() -> None:
    os._exit(3)


def makes_an_optimizer() -> None:
    """Make a first optimizer in this process, for which torch imports hundreds of modules."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()


def sleeps() -> None:
    time.sleep(0.05)


def works_in_a_child() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", "sum(range(5_000_000))"], check=True)


_FILL = "import hashlib\nblock = b'x' * ({mib} << 20)\nfor _ in range(3): hashlib.sha256(block).digest()"


def fills_a_child(mib: int) -> None:
    """Run a child that fills ``mib`` MiB and hashes them three times."""
    subprocess.run([sys.executable, "-I", "-S", "-c", _FILL.format(mib=mib)], check=True)


def fills_a_fork(mib: int) -> None:
    if (child := os.fork()) == 0:
        exec(_FILL.format(mib=mib))
        os._exit(0)
    os.waitpid(child, 0)


def fills_a_child_and_leaves_it(mib: int) -> None:
    """Start a child that fills ``mib`` MiB, reports this, and does not end."""
    code = f"block = b'x' * ({mib} << 20)\nprint(flush=True)\ninput()"
    pipe = subprocess.PIPE
    CALLS.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=pipe, stdout=pipe))
    CALLS[-1].stdout.readline()


def starts_much_that_takes_little() -> None:
    for _ in range(30):
        subprocess.run(["true"], check=True)


def forks_and_does_nothing() -> None:
    for _ in range(10):
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)


def remembers() -> None:
    """Fail if a process from which this one was forked has called this function."""
    assert threading.active_count() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
    CALLS.append(os.getpid())
    assert len(set(CALLS)) == 1


def hangs() -> None:
    print("hanging", flush=True)
    threading.Event().wait()


def leaves_a_daemon() -> None:
    """On the first call, leave a daemon in another session. It keeps the inherited descriptors open."""
    if CALLS or os.fork():
        CALLS.append(os.getpid())
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.pause()


def leaves_a_daemon_and_hangs() -> None:
    leaves_a_daemon()
    hangs()


def comes_back_twice() -> None:
    if not CALLS:
        CALLS.append(os.fork())
