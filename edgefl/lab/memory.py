"""Compares the predicted memory of a training step with the measured growth of a process on this host.

Each network trains in a new forked process. The prediction is made in the same way as in a run: it is the sum
of the weights, the gradients and the peak of all other live bytes, which is traced with two small batches.
The growth is the peak resident memory minus the resident memory before the network was built; pages that are
mapped from files, such as libraries, are not counted. malloc is set to map each block above 64 KiB
separately, so that freed memory returns to the system.
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from edgefl.devices.measurements import IMAGE
from edgefl.errors import ConfigError, RunError
from edgefl.host.forked import call_forked
from edgefl.lab.bench import Say, silent
from edgefl.lab.truth import NETWORKS
from edgefl.learning.flat import FlatModel
from edgefl.learning.models import timm_network
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Trainer
from edgefl.learning.work import batch_work
from edgefl.results import tables
from edgefl.results.tables import percent

BATCH: Final = 8
MEDIAN_LIMIT, P90_LIMIT = 0.10, 0.25
QUICK: Final = ("mobilenetv2_100", "resnet18", "vit_tiny_patch16_224")
_MMAP_THRESHOLD: Final = -3
"""glibc's constant M_MMAP_THRESHOLD: the number of the parameter that `_grown_mib` sets with `mallopt`."""

Make = Callable[[], torch.nn.Module]


class MemoryRow(msgspec.Struct, frozen=True):
    """Predicted and measured memory of a training step of one network, in MiB."""

    network: str
    weights_mib: float
    live_mib: float
    """Peak of the total memory of the batch, the activations and the temporary tensors."""
    predicted_mib: float
    measured_mib: float

    @property
    def error(self) -> float:
        return abs(self.predicted_mib / self.measured_mib - 1)


def run(quick: bool = False, *, say: Say = silent) -> dict[str, Any]:
    """Predict and measure the memory for training the networks of `edgefl bench truth`; return plain values.

    With ``quick``, only three networks are measured. Raises `ConfigError` if timm is not installed.
    """
    rows: list[MemoryRow] = []
    for network in QUICK if quick else NETWORKS:
        rows.append(memory_row(network, partial(timm_network, network, IMAGE, 1000), IMAGE, BATCH))
        say(f"{network}: {rows[-1].predicted_mib:.1f} MiB predicted, {rows[-1].measured_mib:.1f} measured")
    errors = [one.error for one in rows]
    return {
        "batch": BATCH,
        "machine": platform.machine(),
        "rows": [msgspec.to_builtins(one) | {"error": one.error} for one in rows],
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "worst": max(errors),
    }


def memory_row(network: str, make: Make, shape: tuple[int, ...], batch: int) -> MemoryRow:
    """Predict the memory of one network in one forked process, and measure it in another.

    This function also limits torch in the calling process to one thread.
    """
    torch.set_num_threads(1)
    weights_mib, live_mib, predicted_mib = _in_fork(lambda: _predicted(make, shape, batch))
    (measured_mib,) = _in_fork(lambda: [_grown_mib(make, shape, batch)])
    return MemoryRow(network, weights_mib, live_mib, predicted_mib, measured_mib)


def _predicted(make: Make, shape: tuple[int, ...], batch: int) -> list[float]:
    module = make()
    live_bytes = batch_work(module, shape, meta=False).live_bytes(batch)
    flat = FlatModel(module)
    needed_bytes = 4 * (flat.size + flat.trainable) + live_bytes
    return [4 * flat.size / 2**20, live_bytes / 2**20, needed_bytes / 2**20]


def _grown_mib(make: Make, shape: tuple[int, ...], batch: int) -> float:
    """Return the growth of resident memory, in MiB, during two training steps like those of a client.

    The peak while the network is being built is excluded.
    """
    _libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
    kept = make()  # build once in advance, so that imports and caches are not measured
    x, y = np.ones((batch, *shape), np.float32), np.zeros(batch, np.int64)
    del kept
    gc.collect()
    _libc.malloc_trim(0)
    start_mib, file_mib = _status_mib("VmRSS"), _status_mib("RssFile")
    trainer = Trainer(FlatModel(make()))
    gc.collect()
    _libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM (the peak) to the current memory
    trainer.run(x, y, LocalRule(batch_size=batch, steps=2, lr=1e-3), np.random.default_rng(0))
    return _status_mib("VmHWM") - start_mib - (_status_mib("RssFile") - file_mib)


_libc = ctypes.CDLL(None)


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def _in_fork(measure: Callable[[], list[float]]) -> list[float]:
    """Call ``measure`` in a forked process; return its result, or raise the `ConfigError` that it raised."""

    def answer() -> bytes:
        try:
            return msgspec.json.encode(measure())
        except ConfigError as error:  # such as one that says that timm is not installed
            return msgspec.json.encode(str(error))

    data, _ = call_forked("edgefl-memory", answer)
    if not data:
        raise RunError("a process that measured memory ended early")
    found: list[float] | str = msgspec.json.decode(data, type=list[float] | str)
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def show(result: dict[str, Any]) -> None:
    heads = ["network", ">weights\nMiB", ">live\nMiB", ">predicted\nMiB", ">measured\nMiB", ">error"]
    lines = [
        [
            one["network"],
            *(f"{one[f'{name}_mib']:.1f}" for name in ("weights", "live", "predicted", "measured")),
            percent(one["error"]),
        ]
        for one in result["rows"]
    ]
    tables.show(tables.table(heads, lines, f"Memory of a training step on {result['batch']} images of 224²"))
    tables.show(
        f"|predicted ÷ measured - 1|: median {percent(result['median'])} (limit {percent(MEDIAN_LIMIT)}), "
        f"90% {percent(result['p90'])} (limit {percent(P90_LIMIT)}), worst {percent(result['worst'])}"
    )
