"""A program that only trains: its processes train for random clients, and no update is sent or summed."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
from typing import Any

import torch

from . import task as shared


def main(folder: str) -> None:
    task, clients = shared.prepare(folder)
    report = shared.Report(task.seconds, "torch")
    fork = multiprocessing.get_context("fork")
    done = fork.SimpleQueue()

    def work(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        start, net = shared.net_of(task), shared.net_of(task)
        state = copy.deepcopy(start.state_dict())
        while True:
            net.load_state_dict(state)
            shared.train(net, *random.choice(clients), task)
            done.put(None)

    workers: list[Any] = [fork.Process(target=work, args=(n,), daemon=True) for n in range(task.processes)]
    for worker in workers:
        worker.start()
    ended = False
    while not ended:
        for _ in range(task.cohort):
            done.get()
        ended = report.add(task.cohort)
    for worker in workers:
        os.kill(worker.pid, 9)
        worker.join()
