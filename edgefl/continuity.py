"""Stopping and carrying on: a checkpoint of the run's state, and the state from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from edgefl import checkpoint
from edgefl.aggregator import Aggregator
from edgefl.checkpoint import Checkpoint, Layout
from edgefl.clock import WallClock
from edgefl.core import Core
from edgefl.dynamics import Dynamics
from edgefl.errors import ConfigError
from edgefl.executor import Executor
from edgefl.store import Store

FOLDER = "checkpoints"


def save(folder: Path, executor: Executor, clock: WallClock, layout: Layout, *, final: bool = False) -> None:
    """Write a checkpoint of this instant: record first, so that the journal reaches as far as the numbers."""
    executor.record_open(running=final)
    store, core, aggregator = executor.store, executor.core, executor.aggregator
    store.sync()
    buffer = aggregator.buffer
    entry = buffer.latest[1]
    checkpoint.write(
        folder / FOLDER,
        Checkpoint(
            version=core.version,
            journal_seq=store.seq,
            emulated_s=clock.now_s(),
            wall_s=clock.wall_s(),
            model=buffer.model(entry),
            vectors=buffer.vectors(entry),
            held={held.task: buffer.raw(aggregator.leases[held.task].slot) for held in core.held},
            residuals={
                client: left
                for client in range(buffer.shape.residuals)
                if (left := buffer.residual(client)).any()
            },
        ),
        layout,
        final=final,
    )


def restore(
    folder: Path, core: Core, aggregator: Aggregator, store: Store, dynamics: Dynamics | None = None
) -> Checkpoint:
    """Rewind the record to the last checkpoint, replay it through a fresh ``core``, and refill the buffer.

    A fresh ``dynamics`` is shown the replay, and so gets to where it was.
    """
    last = checkpoint.latest(folder / FOLDER, journal_seq=store.seq)
    store.truncate(last.journal_seq)
    for _, event in store.replay():
        actions = core.handle(event)
        if dynamics is not None:
            dynamics.observe(event, actions, core.now_s)
    buffer = aggregator.buffer
    if core.version != last.version or last.model.size != buffer.shape.size:
        raise ConfigError(f"the checkpoint in {folder} does not belong to its record")
    buffer.model(0)[:] = last.model
    for vector, saved in zip(buffer.vectors(0), last.vectors, strict=True):
        vector[:] = saved
    buffer.publish(last.version, 0)
    missing = [held.task for held in core.held if held.task not in last.held]
    if missing:
        raise ConfigError(f"the checkpoint in {folder} lacks the updates of tasks {missing[:5]}")
    for client, left in last.residuals.items():
        buffer.residual(client)[:] = left
    for held in core.held:
        update = last.held[held.task]
        aggregator.restore(task=held.task, client=held.client, version=held.base_version, update=update)
    return last
