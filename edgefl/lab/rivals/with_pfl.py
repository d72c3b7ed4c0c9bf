"""The program for pfl-research: `FederatedAveraging` on the simulated backend, in one or several processes.

Several processes divide each cohort among themselves and add up their sums with torch's gloo backend, as
pfl's documentation describes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn

from . import task as shared

ADDRESSES, RANK = "PFL_WORKER_ADDRESSES", "PFL_WORKER_RANK"


def main(folder: str) -> None:
    task, clients = shared.prepare(folder)
    if task.processes > 1 and RANK not in os.environ:
        _start_ranks(task.processes)
        return
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops.selector import get_default_framework_module
    from pfl.model.pytorch import PyTorchModel

    net: Any = shared.net_of(task)
    net.loss = types.MethodType(_loss, net)
    net.metrics = types.MethodType(_metrics, net)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    users = FederatedDataset(
        lambda user: Dataset(list(clients[user]), user_id=str(user)),
        get_user_sampler("random", list(range(task.clients))),
    )
    distributed = get_default_framework_module().distributed
    first = distributed.global_rank == 0
    report = shared.Report(task.seconds, "pfl") if first else None

    class Timer(TrainingProcessCallback):  # type: ignore[misc,unused-ignore]
        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> Any:
            ended = torch.tensor([float(report.add(task.cohort))]) if report else torch.zeros(1)
            (ended,) = distributed.all_reduce([ended])
            return bool(ended), type(metrics)()

    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            train_cohort_size=task.cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(
            local_num_epochs=None if task.steps else 1,
            local_num_steps=task.steps,
            local_learning_rate=task.lr,
            local_batch_size=task.batch_size,
        ),
        callbacks=[Timer()],
        send_metrics_to_platform=False,
    )


def _loss(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    self.train()
    return nn.functional.cross_entropy(self(x), y)


def _metrics(self: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Return a loss of 0 without evaluating, to save time: pfl calls this twice per trip of round 0."""
    from pfl.metrics import Weighted

    return {"loss": Weighted(0.0, len(y))}


def _start_ranks(count: int) -> None:
    """Run this program once for each rank (process); exit with the code of the first rank that fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    known = {**os.environ, ADDRESSES: ",".join([address] * count)}
    ranks = [subprocess.Popen(sys.orig_argv, env={**known, RANK: str(rank)}) for rank in range(count)]
    for rank in ranks:
        if rank.wait():
            raise SystemExit(rank.returncode)
