"""What a process that the zygote forked does with its life."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.limits.confinement import ClientLimits
from edgefl.limits.pacing import set_time_slice, set_timer_slack
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.run import control
from edgefl.run.client import Client
from edgefl.run.evaluator import Evaluator
from edgefl.run.process import keep_freed_memory
from edgefl.run.worker import Worker

if TYPE_CHECKING:
    from edgefl.run.workload import Workload

SLICE_NS = 400_000
"""Longer than the server's, so that the server runs first, and long enough that switching costs little."""


def run_peer(
    spec: control.Spawn, workload: Workload, buffer: ParameterBuffer, lifeline: int, limits: ClientLimits
) -> None:
    """Be a client, a worker or the evaluator until the server says goodbye."""
    set_timer_slack()
    set_time_slice(SLICE_NS)
    if spec.role == control.CLIENT:
        Client(spec, workload, buffer, lifeline, limits).run()
        return
    keep_freed_memory()  # what a phone frees goes back: there may be a thousand of them
    workload.settle()
    if spec.role == control.WORKER:
        Worker(spec, workload, buffer, lifeline).run()
    else:
        Evaluator(spec, workload, buffer, lifeline).run()
