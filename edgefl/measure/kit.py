"""Measure the time that a device takes for each class of torch operation; write the result as JSON.

This file needs only Python 3.8 and torch 1.13, or newer versions. To measure a device, copy this file to the
device and run it there:

    python kit.py --out result.json

`edgefl measure` runs the kit on this machine or over ssh, and `edgefl profiles fit result.json` makes a
device profile from the result. The kit has eight short workloads, each of which is dominated by a different
class of operation. A workload consists of parts of different sizes, to separate the cost of operations from
the cost of moving bytes. The time of a part is the time of one step: either a forward pass, a backward pass
and an update by SGD with momentum, or only a forward pass.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

VERSION = 1
"""Version of the workloads, recorded in every result: results of different versions cannot be compared."""
BATCH = 4
MINUTES = 8.0
QUICK_MINUTES = 0.4
STABLE = 0.01
"""Relative standard error of the mean step time below which the measurement of a part stops."""
MIN_STEPS = 5
"""Minimum number of timed steps per part, or 2 if the part's share of the time budget runs out first."""


class Part(NamedTuple):
    """One part of a workload: a step whose time is measured."""

    make: Callable[[], Any]
    """Function that creates the torch module of this part."""
    shape: tuple[int, ...]
    """Shape of one example in the input batch."""
    batch: int = BATCH
    train: bool = True
    """True if a step is a forward pass, a backward pass and an update; False if it is only a forward pass."""


def loss(outputs: Any) -> Any:
    """Return the sum of the squared outputs. This loss gives every output a gradient, and costs only two
    passes over the outputs."""
    return outputs.pow(2).sum()


def workloads() -> dict[str, dict[str, Part]]:
    """Return all workloads, keyed by name; each is a dict of its parts, which are also keyed by name."""
    import torch
    from torch import nn

    class Apply(nn.Module):
        """A layer that applies a function to its input."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Any) -> Any:
            return self.function(x)

    class InputGate(nn.Module):
        """A layer that multiplies its input by one learned factor, so that the backward pass runs through all
        later layers."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    class Attention(nn.Module):
        """Attention without projections: two matrix products and a softmax, with heads of width 32."""

        def forward(self, x: Any) -> Any:
            heads = x.view(x.shape[0], x.shape[1], -1, 32).transpose(1, 2)
            weights = (heads @ heads.transpose(-2, -1) * 0.18).softmax(-1)
            return (weights @ heads).transpose(1, 2).reshape(x.shape)

    class Recurrent(nn.Module):
        def __init__(self, inputs: int, hidden: int) -> None:
            super().__init__()
            self.cell = nn.LSTM(inputs, hidden, 2, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.cell(x)[0][:, -1]

    def conv(channels: Sequence[int], kernel: int = 3, groups: int = 1, stride: int = 1) -> Any:
        """Return a sequence of convolutions. ``channels`` lists the number of channels before, between and
        after the convolutions. With ``groups=0``, the convolutions are depthwise."""
        padding = kernel // 2 if stride < kernel else 0
        pairs = [channels[place : place + 2] for place in range(len(channels) - 1)]
        layers = (nn.Conv2d(i, o, kernel, stride, padding, 1, groups or i, bias=False) for i, o in pairs)
        return nn.Sequential(*layers)

    def stack(*layers: Callable[[Any], Any]) -> Any:
        return nn.Sequential(InputGate(), *(x if isinstance(x, nn.Module) else Apply(x) for x in layers))

    def functions(*names: str) -> Any:
        return stack(*(getattr(nn.functional, name) for name in names))

    def swap(x: Any) -> Any:
        return x.transpose(1, -1).contiguous()

    def double(x: Any) -> Any:
        return torch.cat([x, x], 1)[:, : x.shape[1]]

    def add(x: Any) -> Any:
        return x + x

    def scale(x: Any) -> Any:
        return x * 0.5

    def few(x: Any) -> Any:
        for _ in range(50):
            x = (x * 0.5 + 0.5).relu().view(x.shape)
        return x

    def normed(channels: int, layers: int) -> Any:
        return stack(*(nn.BatchNorm2d(channels) for _ in range(layers)))

    def tiny() -> Any:
        layers: list[Any] = []
        for _ in range(15):
            layers += [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), few]
        return stack(*layers)

    return {
        "conv": {
            "56": Part(lambda: conv([64] * 4), (64, 56, 56)),
            "28": Part(lambda: conv([128] * 4), (128, 28, 28)),
            "14": Part(lambda: conv([256] * 4), (256, 14, 14)),
            "7": Part(lambda: conv([512] * 3), (512, 7, 7)),
            "narrow": Part(lambda: conv([16] * 4), (16, 112, 112)),
            "groups": Part(lambda: conv([256] * 4, groups=16), (256, 28, 28)),
            "stem": Part(lambda: conv([3, 48], 5, 1, 2), (3, 224, 224), BATCH * 2),
            "patches": Part(lambda: conv([3, 384], 16, 1, 16), (3, 224, 224), BATCH * 2),
        },
        "pointwise": {
            "56": Part(lambda: conv([64, 256, 64, 256], 1, 1), (64, 56, 56)),
            "28": Part(lambda: conv([40, 240, 40, 240, 40], 1, 1), (40, 28, 28)),
            "14": Part(lambda: conv([1024, 256, 1024, 256], 1, 1), (1024, 14, 14)),
            "7": Part(lambda: conv([960, 160, 960, 320, 1280], 1, 1), (960, 7, 7)),
            "narrow": Part(lambda: conv([16, 96, 24], 1, 1), (16, 112, 112)),
        },
        "depthwise": {
            "112": Part(lambda: conv([32] * 4, 3, 0), (32, 112, 112)),
            "28": Part(lambda: conv([240] * 4, 5, 0), (240, 28, 28)),
            "14": Part(lambda: conv([384] * 4, 7, 0), (384, 14, 14)),
            "7": Part(lambda: conv([960] * 4, 3, 0), (960, 7, 7)),
            "56 forward": Part(lambda: conv([96] * 4, 7, 0), (96, 56, 56), train=False),
            "28 forward": Part(lambda: conv([240] * 4, 3, 0), (240, 28, 28), train=False),
        },
        "matmul": {
            "wide": Part(lambda: stack(nn.Linear(384, 1536), nn.Linear(1536, 384)), (197, 384)),
            "narrow": Part(lambda: stack(nn.Linear(128, 512), nn.Linear(512, 128)), (784, 128)),
            "attention": Part(lambda: stack(Attention(), Attention()), (197, 384)),
        },
        "memory": {
            "relu": Part(lambda: functions(*["relu"] * 6), (64, 112, 112)),
            "gelu": Part(lambda: functions(*["gelu"] * 3), (64, 112, 112)),
            "arithmetic": Part(lambda: stack(add, scale, add, scale), (64, 112, 112)),
            "norm": Part(lambda: normed(64, 4), (64, 112, 112)),
            "layer norm": Part(lambda: stack(*(nn.LayerNorm(96) for _ in range(4))), (3136, 96)),
            "pool": Part(lambda: stack(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1)), (64, 112, 112)),
            "copy": Part(lambda: stack(swap, double, swap), (64, 112, 112)),
        },
        "calls": {"tiny": Part(tiny, (8, 2, 2))},
        "update": {
            "linear": Part(lambda: nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)), (2048,))
        },
        "recurrent": {"lstm": Part(lambda: Recurrent(64, 256), (40, 64), 16)},
    }


# ---- timing --------------------------------------------------------------------------------------


def stepper(part: Part) -> Callable[[], None]:
    """Return a function that runs one step of a part."""
    import torch

    module, inputs = part.make().train(part.train), torch.randn(part.batch, *part.shape)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-9, momentum=0.9)

    def train() -> None:
        optimizer.zero_grad()
        loss(module(inputs)).backward()
        optimizer.step()

    def infer() -> None:
        with torch.no_grad():
            module(inputs)

    return train if part.train else infer


def timed(step: Callable[[], None], budget_s: float) -> dict[str, Any]:
    """Repeat a step until its time is stable or ``budget_s`` seconds have passed; return the median wall time
    and CPU time of a step in seconds, the coefficient of variation, and the number of timed steps."""
    end = time.perf_counter() + budget_s
    step()
    wall: list[float] = []
    cpu: list[float] = []
    while len(wall) < 2 or (time.perf_counter() < end and not _stable(wall, budget_s)):
        at, cpu_at = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - at)
        cpu.append(time.process_time() - cpu_at)
    spread = statistics.pstdev(wall) / statistics.mean(wall)
    return {
        "wall_s": statistics.median(wall),
        "cpu_s": statistics.median(cpu),
        "cv": round(spread, 4),
        "steps": len(wall),
    }


def _stable(seconds: Sequence[float], budget_s: float) -> bool:
    if len(seconds) < MIN_STEPS or sum(seconds) < budget_s / 10:
        return False
    error = statistics.stdev(seconds) / math.sqrt(len(seconds))
    return error < STABLE * statistics.median(seconds)


def measure(minutes: float, threads: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure all workloads in about ``minutes`` minutes with ``threads`` torch threads; return the content
    of the JSON file. ``tell`` is called with a progress line for each part."""
    import torch

    torch.set_num_threads(threads)
    found = workloads()
    share_s = minutes * 60 / sum(map(len, found.values()))
    result = {**facts(), "threads": threads, "before": state()}
    parts: dict[str, Any] = {}
    for workload, members in found.items():
        for name, part in members.items():
            took = timed(stepper(part), share_s)
            parts[f"{workload}/{name}"] = {**took, **state()}
            milliseconds, spread = took["wall_s"] * 1e3, took["cv"]
            tell(f"{workload}/{name}: {milliseconds:.2f} ms, {took['steps']} steps, CV {spread:.0%}")
    return {**result, "parts": parts, "after": state()}


# ---- the host ------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """Describe the device, its operating system and the installed libraries."""
    import torch

    return {
        "kit": VERSION,
        "runtime": "torch",
        "device": device_name(),
        "cores": cores(),
        "host": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "ram_mib": _ram_mib(),
        },
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_name() -> str:
    """Return the name of the board, phone or processor."""
    board = _text("/proc/device-tree/model").strip("\0 \n")
    return board or _phone() or _processor() or platform.machine()


def _phone() -> str:
    try:
        names = ("ro.product.manufacturer", "ro.product.model")
        values = [subprocess.check_output(["getprop", name], text=True).strip() for name in names]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return " ".join(filter(None, values))


def _processor() -> str:
    lines = (line.partition(":") for line in _text("/proc/cpuinfo").splitlines())
    named = (value.strip() for key, _, value in lines if key.strip() in ("model name", "Hardware"))
    return next(named, "")


def _ram_mib() -> int | None:
    lines = _text("/proc/meminfo").split()
    return int(lines[1]) // 1024 if lines[:1] == ["MemTotal:"] else None


def state() -> dict[str, float]:
    """Return the current temperature, frequency and load of the device, as far as the system reports them."""
    temperatures = _numbers("/sys/class/thermal/thermal_zone*/temp")
    frequencies = _numbers("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
    readings = {}
    if temperatures:
        readings["temp_c"] = max(temperatures) / 1e3
    if frequencies:
        readings["mhz"] = max(frequencies) / 1e3
    with contextlib.suppress(OSError, AttributeError):  # Android apps cannot read the load
        readings["load"] = round(os.getloadavg()[0], 2)
    return readings


def _numbers(pattern: str) -> list[float]:
    texts = (_text(path).strip() for path in glob.glob(pattern))
    return [float(text) for text in texts if text.lstrip("-").isdigit()]


def _text(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit with the given command-line arguments, and return the exit code."""
    parser = argparse.ArgumentParser(description="Measure this device's time for each class of operation.")
    parser.add_argument("--out", help="JSON file to write (default: standard output)")
    parser.add_argument("--minutes", type=float, help=f"time budget (default: {MINUTES:g})")
    parser.add_argument("--quick", action="store_true", help="rough figures in half a minute")
    parser.add_argument("--threads", type=int, default=cores(), help="torch threads (default: one per core)")
    chosen = parser.parse_args(arguments)
    default = QUICK_MINUTES if chosen.quick else MINUTES
    minutes = default if chosen.minutes is None else chosen.minutes
    if chosen.threads < 1 or not 0 < minutes < 1e4:
        parser.error("--threads must be at least 1, and --minutes above 0 and below 10000")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        sys.exit(f"torch cannot be imported ({error}): pip install torch")
    result = measure(minutes, chosen.threads, lambda line: print(line, file=sys.stderr, flush=True))
    text = json.dumps(result, indent=1) + "\n"
    if chosen.out is None:
        print(text, end="")
        return 0
    try:
        with open(chosen.out, "w") as file:
            file.write(text)
    except OSError as error:
        print(text, end="")  # so that minutes of measurement are not lost
        sys.exit(f"{chosen.out} cannot be written ({error.strerror}); the result was printed instead")
    return 0


if __name__ == "__main__":
    sys.exit(main())
