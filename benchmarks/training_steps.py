"""Compare edgefl's built-in training with bare torch loops: CPU time per step on one thread, in milliseconds.

    python benchmarks/training_steps.py [--turns 9] [--json FILE]

The bare loops draw the same batches and do the same steps with `torch.optim.SGD`. Two loops set gradients to
None, with and without `foreach`, and one loop sets gradients to zero. `ratio` is the time of the fastest bare
loop divided by that of edgefl's training. All loops take turns, and each time is the minimum over the turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from edgefl.learning.flat import FlatModel
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Trainer

STEPS, BATCH, LR = 20, 32, 0.01


def mlp(*hidden: int) -> nn.Module:
    sizes = [784, *hidden, 10]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cnn(first: int, second: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(49 * second, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp 40": lambda: mlp(40),
    "mlp 124": lambda: mlp(124),
    "cnn 16-32-350": lambda: cnn(16, 32, 350),
    "mlp 512-512": lambda: mlp(512, 512),
    "cnn 32-64-512": lambda: cnn(32, 64, 512),
    "mlp 1024-1024-512": lambda: mlp(1024, 1024, 512),
}
BARE = {"to None": (True, False), "to None, foreach": (True, True), "to zero, foreach": (False, True)}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((STEPS * BATCH, 784)).astype(np.float32)
Y = RNG.integers(0, 10, STEPS * BATCH)


def bare_loop(net: nn.Module, to_none: bool, foreach: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, foreach=foreach)

    def run() -> None:
        order = np.random.default_rng(0).permutation(len(Y))
        for start in range(0, len(Y), BATCH):
            batch = order[start : start + BATCH]
            optimizer.zero_grad(set_to_none=to_none)
            loss = cross_entropy(net(torch.from_numpy(X[batch])), torch.from_numpy(Y[batch]))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()

    return run


def edgefl_loop(net: nn.Module) -> Callable[[], object]:
    trainer, rule = Trainer(FlatModel(net)), LocalRule(steps=STEPS, batch_size=BATCH, lr=LR)
    return lambda: trainer.run(X, Y, rule, np.random.default_rng(0))


def measured(make: Callable[[], nn.Module], turns: int) -> dict[str, float]:
    loops: dict[str, Callable[[], object]] = {"edgefl": edgefl_loop(make())}
    loops |= {name: bare_loop(make(), *how) for name, how in BARE.items()}
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(1 + turns):
        for name, loop in loops.items():
            started = time.thread_time()
            loop()
            taken[name].append((time.thread_time() - started) / STEPS * 1e3)
    best = {name: min(each[1:]) for name, each in taken.items()}
    parameters = sum(parameter.numel() for parameter in make().parameters())
    return {"parameters": parameters, **best, "ratio": min(best[name] for name in BARE) / best["edgefl"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ["edgefl", *BARE]
    print(f"{'net':20} {'parameters':>10} " + " ".join(f"{name:>16}" for name in names) + "  ratio")
    rows = {}
    for net, make in NETS.items():
        rows[net] = row = measured(make, options.turns)
        figures = " ".join(f"{row[name]:16.3f}" for name in names)
        print(f"{net:20} {row['parameters']:10,.0f} {figures} {row['ratio']:6.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
