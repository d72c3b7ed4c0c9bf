"""The data, the network, the local training and the speed report that all programs share."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

MIN_ROUNDS = 3
"""Minimum number of rounds. Speed is measured only after the first round, which includes the start-up."""


class Task(NamedTuple):
    """A setting with its numbers of processes and threads, as `edgefl.lab.peers` writes it to a file."""

    net: str
    """Name of the network, a key of `NETS`."""
    clients: int
    cohort: int
    """Number of updates per new model; in a synchronous framework, the number of clients per round."""
    batch_size: int
    lr: float
    steps: int | None
    """Number of SGD steps in a trip; None means one epoch."""
    asynchronous: bool
    """True if all clients train all the time (FedBuff, FedStaleWeight), False for rounds (FedAvg)."""
    data: str
    """Name of the data set in edgefl."""
    shape: list[int]
    """Shape of the array with the inputs of all clients."""
    seconds: float
    """Duration in seconds of the measurement after the first round."""
    processes: int
    threads: int
    """Number of torch threads in each process."""


@cache
def read(folder: str) -> tuple[Task, list[tuple[Tensor, Tensor]]]:
    """Return the task in ``folder``, and each client's examples as a pair of inputs and classes."""
    task = Task(**json.loads((Path(folder) / "task.json").read_text()))
    x = torch.from_numpy(np.fromfile(Path(folder) / "x", np.float32).reshape(task.shape))
    y = torch.from_numpy(np.fromfile(Path(folder) / "y", np.int64))
    held = len(y) // task.clients
    return task, [(x[at : at + held], y[at : at + held]) for at in range(0, held * task.clients, held)]


def _cnn_pfl(_: Sequence[int]) -> nn.Module:
    """Create the CNN of pfl-research's CIFAR-10 benchmark (``simple_cnn``), with 1,626,442 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
        *(nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def _linear(shape: Sequence[int]) -> nn.Module:
    """Create a logistic regression, which has 7,850 parameters for images of 28×28 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 10))


def _cnn_groupnorm(_: Sequence[int]) -> nn.Module:
    """Create edgefl's ``cnn-groupnorm`` (468,458 parameters) in environments without edgefl."""
    layers: list[nn.Module] = []
    for before, after, rate in ((1, 32, 0.3), (32, 64, 0.5)):
        for width in (before, after):
            conv = nn.Conv2d(width, after, 3, padding="same")
            layers += [conv, nn.ReLU(), nn.GroupNorm(after // 4, after)]
        layers += [nn.MaxPool2d(2), nn.Dropout2d(rate)]
    head = (nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.GroupNorm(32, 128), nn.Dropout(0.5))
    return nn.Sequential(*layers, *head, nn.Linear(128, 10))


NETS = {"cnn-pfl": _cnn_pfl, "linear": _linear, "cnn-groupnorm": _cnn_groupnorm}


def make(input_shape: Sequence[int], classes: int = 10, *, net: str) -> nn.Module:
    """Create the network ``net`` of `NETS`, for ten classes.

    edgefl requires this signature of functions that create a model.
    """
    return NETS[net](input_shape)


def net_of(task: Task) -> nn.Module:
    """Create the task's network."""
    return make(task.shape[1:], net=task.net)


def train(net: nn.Module, x: Tensor, y: Tensor, task: Task) -> None:
    """Train ``net`` in place on one client's examples with SGD, as fast as torch allows."""
    optimizer = torch.optim.SGD(net.parameters(), lr=task.lr, foreach=True)
    net.train()
    for rows in torch.split(torch.randperm(len(y)), task.batch_size)[: task.steps]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class Report:
    """Prints the time at which each new model is complete, and decides when the measurement ends."""

    def __init__(self, seconds: float, package: str) -> None:
        print(json.dumps({"version": metadata.version(package)}), flush=True)
        self._seconds, self._first_s = seconds, 0.0
        self._rounds = self._trips = 0

    def add(self, trips: int) -> bool:
        """Report a new model, made from ``trips`` updates; return True if the program should end."""
        now_s = time.monotonic()
        self._trips += trips
        self._rounds += 1
        self._first_s = self._first_s or now_s
        print(json.dumps({"trips": self._trips, "at_s": now_s}), flush=True)
        return self._rounds >= MIN_ROUNDS and now_s >= self._first_s + self._seconds


def prepare(folder: str) -> tuple[Task, list[tuple[Tensor, Tensor]]]:
    """Read the task and the examples (see `read`), and limit torch to the task's number of threads."""
    found = read(folder)
    torch.set_num_threads(found[0].threads)
    return found
