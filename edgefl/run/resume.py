"""Stopping and carrying on: a checkpoint of the run's state, and the state from a checkpoint.

Replaying the journal through a fresh core says what was under way; a checkpoint holds the numbers that belong
to it. Under the virtual clock that includes work in flight: what has been computed before it is due, and the
versions that the rest starts from. So a resumed run goes on with the same bits.

When checkpoints are written: where the server says so, and now and then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from edgefl.core import Core
from edgefl.core.unfinished import Unfinished
from edgefl.devices.dynamics import Dynamics
from edgefl.errors import ConfigError
from edgefl.parameters import checkpoint
from edgefl.parameters.checkpoint import Checkpoint, Layout
from edgefl.results.run_folder import CHECKPOINTS
from edgefl.results.store import Store
from edgefl.run import messages
from edgefl.run.clock import Alarms, WallClock
from edgefl.run.engine import Executor
from edgefl.run.progress import Stopwatch
from edgefl.run.slots import Aggregator

Answer = messages.Result | messages.Gone
_answers = msgspec.msgpack.Decoder(list[Answer])


@dataclass(frozen=True)
class Ahead:
    """Work in flight at one instant."""

    answers: list[Answer] = field(default_factory=list)
    """What workers said of tasks whose arrival is not due yet."""
    tasks: list[int] = field(default_factory=list)
    """Those of these tasks whose update lies in its slot."""
    entries: dict[int, int] = field(default_factory=dict)
    """Versions that are still to be read, by a task or the evaluator, and their ring entries."""


@dataclass(frozen=True)
class Restored:
    """What a resumed run goes on from, besides its core, its buffer and its record."""

    checkpoint: Checkpoint
    unfinished: Unfinished
    entries: dict[int, int]
    """Versions that were to be read, and the ring entries that hold them now."""
    answers: dict[int, Answer]


def save(
    folder: Path,
    executor: Executor,
    clock: WallClock,
    layout: Layout,
    ahead: Ahead | None = None,
    *,
    final: bool = False,
) -> None:
    """Write a checkpoint of this instant: record first, so that the journal reaches as far as the numbers."""
    ahead = ahead or Ahead()
    executor.record_open(running=final)
    store, core, aggregator = executor.store, executor.core, executor.aggregator
    store.sync()
    buffer = aggregator.buffer
    entry = buffer.latest[1]
    leases = {task: aggregator.leases[task] for task in (*(held.task for held in core.held), *ahead.tasks)}
    clients = range(buffer.shape.residuals)
    early = {aggregator.leases[task].client for task in ahead.tasks} if buffer.shape.residuals else set()
    checkpoint.write(
        folder / CHECKPOINTS,
        Checkpoint(
            version=core.version,
            journal_seq=store.seq,
            emulated_s=clock.now_s(),
            wall_s=clock.wall_s(),
            model=buffer.model(entry),
            vectors=buffer.vectors(entry),
            held={task: buffer.raw(lease.slot) for task, lease in leases.items()},
            residuals={client: left for client in clients if (left := buffer.residual(client)).any()},
            early_residuals={client: buffer.residual(client, new=True) for client in sorted(early)},
            bases={version: buffer.model(at) for version, at in ahead.entries.items() if at != entry},
            answers=msgspec.msgpack.encode(ahead.answers),
        ),
        layout,
        final=final,
    )


def restore(
    folder: Path, core: Core, aggregator: Aggregator, store: Store, dynamics: Dynamics | None = None
) -> Restored:
    """Rewind the record to the last checkpoint, replay it through a fresh ``core``, and refill the buffer.

    A fresh ``dynamics`` is shown the replay, and so gets to where it was.
    """
    last = checkpoint.latest(folder / CHECKPOINTS, journal_seq=store.seq)
    store.truncate(last.journal_seq)
    unfinished = Unfinished()
    for _, event in store.replay():
        actions = core.handle(event)
        unfinished.observe(event, actions, core)
        if dynamics is not None:
            dynamics.observe(event, actions, core.now_s)
    buffer = aggregator.buffer
    if core.version != last.version or last.model.size != buffer.shape.size:
        raise ConfigError(f"the checkpoint in {folder} does not belong to its record")
    entries = _refill_ring(folder, last, aggregator)
    for client, left in last.residuals.items():
        buffer.residual(client)[:] = left
    for client, left in last.early_residuals.items():
        buffer.residual(client, new=True)[:] = left
    for held in core.held:
        if held.task not in last.held:
            raise ConfigError(f"the checkpoint in {folder} lacks the update of task {held.task}")
        update = last.held[held.task]
        aggregator.restore(task=held.task, client=held.client, version=held.base_version, update=update)
    answers = {answer.task: answer for answer in _answers.decode(last.answers)} if last.answers else {}
    return Restored(last, unfinished, entries, answers)


def _refill_ring(folder: Path, last: Checkpoint, aggregator: Aggregator) -> dict[int, int]:
    """Put the checkpoint's versions into the ring; returns their entries."""
    buffer = aggregator.buffer
    if len(last.bases) + 2 > buffer.shape.ring:
        raise ConfigError(
            f"the checkpoint in {folder} holds {len(last.bases) + 1} versions; "
            f"a ring of {buffer.shape.ring} has no room for them and the next"
        )
    entries = {}
    for entry, (version, model) in enumerate(sorted(last.bases.items()), start=1):
        buffer.model(entry)[:] = model
        buffer.publish(version, entry)
        entries[version] = entry
    buffer.model(0)[:] = last.model
    for vector, saved in zip(buffer.vectors(0), last.vectors, strict=True):
        vector[:] = saved
    buffer.publish(last.version, 0)
    entries[last.version] = 0
    return entries


SHARE = 0.05
"""Most of the time that checkpoints may take."""


class Save(Protocol):
    """Writes a checkpoint of this instant."""

    def __call__(self, *, final: bool) -> None: ...


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, save: Save, every_s: float, alarms: Alarms, watch: Stopwatch) -> None:
        self._save, self._every_s, self._alarms, self._watch = save, every_s, alarms, watch

    def begin(self) -> None:
        """From now on one every so many wall seconds, but never for more than a small share of the time."""
        self._alarms.after(self._every_s, self._again)

    def write(self, *, final: bool = False) -> None:
        """Write one now; ``final`` also writes the model alone."""
        before = self._watch.to("checkpoint")
        self._save(final=final)
        self._watch.to(before)

    def _again(self) -> None:
        started = time.monotonic()
        self.write()
        took_s = time.monotonic() - started
        self._alarms.after(max(self._every_s, took_s / SHARE), self._again)
