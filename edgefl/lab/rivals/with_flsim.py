"""The program for FLSim: the synchronous trainer with FedAvg, or the asynchronous trainer with FedBuff.

The program runs in one process. FLSim 0.1.0 was written for Python 3.10 and older: its settings have mutable
defaults, which newer versions of Python reject unless the defaults are hashable. `_importable` makes them
hashable, and declares operators that are missing if torchvision was built with CUDA but torch was not; FLSim
imports torchvision, but does not use these operators. Nothing else in FLSim is changed.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch import library, nn

from . import task as shared


class _Ended(Exception):
    """Raised when the measurement is complete."""


def _importable() -> None:
    original = dataclasses.dataclass

    def made(cls: type, **given: Any) -> Any:
        hashed = {"unsafe_hash": True} if cls.__module__.startswith("flsim.") else {}
        return original(cls, **{**given, **hashed})

    def dataclass(cls: Any = None, **given: Any) -> Any:
        return partial(made, **given) if cls is None else made(cls, **given)

    dataclasses.dataclass = dataclass
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou) -> Tensor")


class _User:
    """One client's batches, which are created only once."""

    def __init__(self, x: Any, y: Any, task: shared.Task) -> None:
        held = len(y) if task.steps is None else task.steps * task.batch_size
        parts = zip(x[:held].split(task.batch_size), y[:held].split(task.batch_size), strict=True)
        self._batches = [{"features": features, "labels": labels} for features, labels in parts]
        self._examples = min(held, len(y))

    def train_data(self) -> Any:
        return iter(self._batches)

    def eval_data(self) -> Any:
        return iter(())

    def num_train_examples(self) -> int:
        return self._examples

    def num_train_batches(self) -> int:
        return len(self._batches)

    def num_eval_examples(self) -> int:
        return 0

    def num_eval_batches(self) -> int:
        return 0


def main(folder: str) -> None:
    task, clients = shared.prepare(folder)
    _importable()
    from flsim.clients.base_client import ClientConfig
    from flsim.optimizers.local_optimizers import LocalOptimizerSGDConfig
    from flsim.utils.example_utils import FLModel
    from omegaconf import OmegaConf

    users = [_User(x, y, task) for x, y in clients]
    data = SimpleNamespace(
        train_user_ids=lambda: list(range(len(users))),
        num_train_users=lambda: len(users),
        get_train_user=users.__getitem__,
        train_users=lambda: users,
        eval_users=list,
        test_users=list,
    )
    report = shared.Report(task.seconds, "flsim")

    class Model(FLModel):  # type: ignore[misc,unused-ignore]
        def fl_forward(self, batch: Any) -> Any:
            loss = nn.functional.cross_entropy(self.model(batch["features"]), batch["labels"])
            return SimpleNamespace(loss=loss, num_examples=len(batch["labels"]))

    made, settings = _asynchronous(task) if task.asynchronous else _synchronous(task)

    class Trainer(made):  # type: ignore[misc,valid-type,unused-ignore]
        def _calc_post_epoch_communication_metrics(self, *_: object) -> None:
            """Report a new model. Both trainers call this method after each new model."""
            if report.add(task.cohort):
                raise _Ended

    client = ClientConfig(epochs=1, optimizer=LocalOptimizerSGDConfig(lr=task.lr))
    config = OmegaConf.structured(settings(client=client))
    trainer = Trainer(model=Model(shared.net_of(task)), cuda_enabled=False, **config)
    with suppress(_Ended):
        trainer.train(data, None, num_total_users=len(users), distributed_world_size=1)


QUIET = {"epochs": 1e9, "do_eval": False, "report_train_metrics": False}


def _synchronous(task: shared.Task) -> tuple[Any, Any]:
    from flsim.optimizers.server_optimizers import FedAvgOptimizerConfig
    from flsim.servers.sync_servers import SyncServerConfig
    from flsim.trainers.sync_trainer import SyncTrainer, SyncTrainerConfig

    server = SyncServerConfig(server_optimizer=FedAvgOptimizerConfig())
    return SyncTrainer, partial(SyncTrainerConfig, users_per_round=task.cohort, server=server, **QUIET)


def _asynchronous(task: shared.Task) -> tuple[Any, Any]:
    """Return FedBuff's trainer and settings, with as many simultaneous trips as there are clients."""
    from flsim.optimizers.async_aggregators import FedAvgWithLRFedBuffAggregatorConfig
    from flsim.trainers.async_trainer import AsyncTrainer, AsyncTrainerConfig
    from flsim.utils.async_trainer.training_event_generator import AsyncTrainingEventGeneratorConfig
    from flsim.utils.timing.training_duration_distribution import PerUserGaussianDurationDistributionConfig

    events = AsyncTrainingEventGeneratorConfig(
        duration_distribution_generator=PerUserGaussianDurationDistributionConfig(
            training_duration_mean=task.clients - 1.0, training_duration_sd=1.0
        )
    )
    buffer = FedAvgWithLRFedBuffAggregatorConfig(lr=1.0, buffer_size=task.cohort)
    settings = partial(AsyncTrainerConfig, aggregator=buffer, training_event_generator=events, **QUIET)
    return AsyncTrainer, settings
