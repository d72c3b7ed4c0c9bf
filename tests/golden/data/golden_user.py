"""Code as a user of edgefl may write it, for the golden runs. It imports only names that docs/ documents."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from edgefl.learning.data import Dataset
from edgefl.strategies import Buffered

STOP = os.environ.get("GOLDEN_STOP", "")
"""``SIGNAL STEP FILE``: the first worker that reaches the step creates FILE and signals the whole run."""


class Net(nn.Sequential):
    """A network with running statistics, which can stop the run that trains it."""

    calls = pid = 0

    def forward(self, inputs):
        if STOP:
            if os.getpid() != self.pid:  # forked from one that has tried it
                self.pid, self.calls = os.getpid(), 0
            self.calls += 1
            number, step, file = STOP.split(" ", 2)
            if self.calls == int(step) and Path("/proc/self/comm").read_text().startswith("edgefl-worker"):
                stop_once(int(number), Path(file))
        return super().forward(inputs)


def stop_once(number, file):
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return
    os.killpg(0, number)
    signal.pause()


def net(input_shape, classes):
    return Net(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))


def letters(input_shape, classes):
    return nn.Sequential(nn.Embedding(classes, 6), nn.Linear(6, classes))


def words(spec, seed):
    """Return token sequences of 12 owners. The next token is mostly the previous one plus 1, modulo 11."""
    rng = np.random.default_rng(5)
    rows = np.cumsum(rng.choice([1, 2, 5], (300, 9), p=[0.8, 0.1, 0.1]), axis=1) % 11
    x, y = rows[:, :-1], rows[:, 1:]
    owners = np.arange(240) * 12 // 240
    return Dataset.of("words", [(x[:240], y[:240]), (x[240:], y[240:])], 11, owners)


def images(spec, seed):
    """Return images with three channels: one picture for each class, plus noise."""
    rng = np.random.default_rng(6)
    y = np.arange(240) % 4
    x = (rng.standard_normal((4, 3, 16, 16))[y] + rng.standard_normal((240, 3, 16, 16))).astype(np.float32)
    return x[:200], y[:200], x[200:], y[200:]


def split(labels, profiles, rng):
    """Deal out the examples by position. Client k gets a number of examples proportional to k + 1."""
    share = np.repeat(np.arange(len(profiles)), np.arange(1, len(profiles) + 1))
    owner = share[np.arange(len(labels)) % len(share)]
    return [np.flatnonzero(owner == client) for client in range(len(profiles))]


def smooth(outputs, targets):
    return cross_entropy(outputs, targets, label_smoothing=0.1)


def evaluate(model, x, y):
    outputs = model(x)
    return {"top2": (outputs.topk(2, dim=1).indices == y[:, None]).any(1).float().mean()}


def train(model, examples, context):
    adam = torch.optim.Adam(model.parameters(), lr=context.rule.lr)
    for x, y in examples.batches():
        loss = context.criterion(model(x + 0.1 * torch.randn_like(x)), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        context.step(len(y), loss)
    context.log(drawn=float(context.rng.random()))


def fails(model, examples, context):
    """Train, but raise an error on every third trip of two clients."""
    if context.client in (1, 4) and context.trip % 3 == 1:
        raise ValueError(f"trip {context.trip} of client {context.client}")
    train(model, examples, context)


class Cubed(Buffered):
    """A user-defined strategy whose weights decrease with the cube of 1 + staleness."""

    def weights(self, state, updates, view):
        return [(1.0 + update.staleness) ** -3 / len(updates) for update in updates]
