"""The program for Flower: FedAvg on Flower's simulation engine.

Each Ray actor is a process that gets a share of the cores. It loads the data and the network once and keeps
them in memory; Flower leaves such caching to the client app.
"""

from __future__ import annotations

import itertools
import os
from functools import cache
from typing import Any

import torch
from torch import nn

from . import task as shared


@cache
def _worker(folder: str) -> tuple[shared.Task, Any, nn.Module]:
    task, clients = shared.prepare(folder)
    return task, clients, shared.net_of(task)


def main(folder: str) -> None:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    task, _ = shared.prepare(folder)
    os.environ["RAY_DEDUP_LOGS"] = "0"
    client, server = ClientApp(), ServerApp()
    report = shared.Report(task.seconds, "flwr")

    @client.train()  # type: ignore[untyped-decorator,unused-ignore]
    def train(message: Message, context: Context) -> Message:
        wanted, clients, net = _worker(folder)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = clients[int(context.node_config["partition-id"])]
        shared.train(net, x, y, wanted)
        content = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()  # type: ignore[untyped-decorator,unused-ignore]
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=task.cohort / task.clients,
            fraction_evaluate=0.0,
            min_train_nodes=task.cohort,
            min_evaluate_nodes=0,
            min_available_nodes=task.clients,
        )
        arrays = ArrayRecord(shared.net_of(task).state_dict())
        for number in itertools.count(1):
            messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
            replies = list(grid.send_and_receive(messages))
            if failed := [reply for reply in replies if reply.has_error()]:
                raise RuntimeError(failed[0].error.reason)
            averaged, _ = strategy.aggregate_train(number, replies)
            arrays = averaged
            if report.add(len(replies)):
                return

    torch.set_num_threads(1)
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=task.clients,
        backend_config={
            "init_args": {"num_cpus": task.processes * task.threads, "log_to_driver": False},
            "client_resources": {"num_cpus": task.threads, "num_gpus": 0.0},
        },
    )
