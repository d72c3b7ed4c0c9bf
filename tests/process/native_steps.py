"""Functions whose native instructions the process tests count. torch would be slow while counting."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import zlib
from pathlib import Path

CALLS: list[int] = []
TEXT = "".join(f"{number * 7919 % 10007:05}\n" for number in range(2000))


def compresses_and_sorts(count: int, lines: int) -> None:
    """Compress ``count`` bytes in this process, and have a program sort ``lines`` lines."""
    zlib.compress(bytes(number * 7919 % 251 for number in range(count)))
    text = TEXT[: 6 * lines]
    subprocess.run(["sort", "-n"], input=text, text=True, check=True, stdout=subprocess.DEVNULL)


def fails_when_it_is_called_again() -> None:
    CALLS.append(random.randrange(10**6))
    if len(CALLS) > 1:
        raise ValueError(f"called again: {CALLS}")


def does_nothing() -> None:
    pass


def kills_its_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def has_no_memory() -> None:
    raise MemoryError


def leaves_half_of_its_counts() -> None:
    """Write a file like that of Callgrind on a full disk."""
    Path(sys.argv[2], f"out.{os.getpid()}.1").write_text("fn=(1) half\n1 10\n")
