"""Interrupting and resuming a run: `save` writes a checkpoint, `restore` and `recover` continue the run.

Replaying the journal of events through a new core restores the state of all tasks. A checkpoint holds the
model, the vectors and the updates that belong to this state. Under the virtual clock it also holds unfinished
work, so that a resumed run gives the same bits. `restore` reads a checkpoint; `recover` reads the parameter
buffer of a killed server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from edgefl.core import Core
from edgefl.core.events import (
    Action,
    Evaluate,
    Evaluated,
    Event,
    Release,
    Summed,
    Train,
)
from edgefl.devices.dynamics import Dynamics
from edgefl.errors import ConfigError, SlotError
from edgefl.parameters import checkpoint
from edgefl.parameters.checkpoint import Layout, SavedState
from edgefl.results.run_folder import CHECKPOINTS
from edgefl.results.store import Store
from edgefl.run.aggregator import Aggregator
from edgefl.run.engine import Engine
from edgefl.run.timeline import Answer, InFlightWork, Restored

_answers = msgspec.msgpack.Decoder(list[Answer])


def save(
    folder: Path, engine: Engine, in_flight: InFlightWork, layout: Layout, *, final: bool = False
) -> None:
    """Write the record, then a checkpoint, so that the journal includes all events before the checkpoint."""
    engine.record_open(running=final)
    store, core, aggregator, clock = engine.store, engine.core, engine.aggregator, engine.timeline.clock
    store.sync()
    buffer = aggregator.buffer
    entry = buffer.latest[1]
    tasks = (*(held.task for held in core.held), *in_flight.tasks)
    leases = {task: aggregator.leases[task] for task in tasks}
    clients, statistics = range(buffer.shape.clients), bool(buffer.shape.statistics)
    early = {aggregator.leases[task].client for task in in_flight.tasks} if clients else set()
    checkpoint.write(
        folder / CHECKPOINTS,
        SavedState(
            version=core.version,
            journal_seq=store.seq,
            emulated_s=clock.now_s(),
            wall_s=clock.wall_s(),
            model=buffer.model(entry),
            vectors=buffer.vectors(entry),
            held={task: buffer.raw(lease.slot) for task, lease in leases.items()},
            kept={client: left for client in clients if (left := buffer.kept(client)).any()},
            early={client: buffer.kept(client, new=True) for client in sorted(early)},
            statistics={task: buffer.statistics(lease.slot) for task, lease in leases.items() if statistics},
            bases={version: buffer.model(at) for version, at in in_flight.entries.items() if at != entry},
            answers=msgspec.msgpack.encode(in_flight.answers),
        ),
        layout,
        final=final,
    )
    if engine.write_ahead is not None:
        aggregator.settle()


class _JournalReplay:
    """Replays the journal through a new core and dynamics, and tracks tasks and evaluations."""

    def __init__(self, core: Core, dynamics: Dynamics | None) -> None:
        self._core, self._dynamics = core, dynamics
        self._tasks: dict[int, tuple[Train, float]] = {}
        self._assessing: dict[int, tuple[float, int]] = {}
        self.evaluated: Evaluated | None = None
        """The last evaluation."""
        self.salts: dict[int, str] = {}
        """Salts of the privacy noise in the versions, keyed by version; see `Summed.salt`."""

    def handle(self, event: Event) -> list[Action]:
        """Replay the next event; return the core's actions."""
        core = self._core
        actions = core.handle(event)
        match event:
            case Evaluated(version=version):
                self._assessing.pop(version, None)
                self.evaluated = event
            case Summed(version=version, salt=salt, bad=()) if salt:
                self.salts[version] = salt
        for action in actions:
            match action:
                case Train(task=task):
                    self._tasks[task] = action, core.now_s
                case Release(task=task):
                    self._tasks.pop(task, None)
                case Evaluate(version=version):
                    self._assessing[version] = core.now_s, core.trips
        if self._dynamics is not None:
            self._dynamics.observe(event, actions, core.now_s)
        return actions

    def state(self, last: SavedState, entries: dict[int, int], answers: Iterable[Answer] = ()) -> Restored:
        """Return the state of the resumed run; ``entries`` are the ring entries of the available versions."""
        return Restored(
            checkpoint=last,
            emulated_s=max(last.emulated_s, self._core.now_s),
            tasks={task: self._tasks[task] for task in sorted(self._core.tasks)},
            # Versions that are no longer in the ring were dropped by the evaluation queue.
            assessing={
                version: requested for version, requested in self._assessing.items() if version in entries
            },
            entries=entries,
            answers={answer.task: answer for answer in answers},
            evaluated=self.evaluated,
        )


def restore(
    folder: Path,
    core: Core,
    aggregator: Aggregator,
    store: Store,
    dynamics: Dynamics | None = None,
    *,
    once: bool = False,
) -> Restored:
    """Rewind the record to the last checkpoint, replay the journal, and refill the buffer.

    If ``once`` is True, no version may be made twice: raises `ConfigError` unless the run was interrupted at
    this checkpoint, without being killed.
    """
    last = checkpoint.latest(folder / CHECKPOINTS, journal_seq=store.seq)
    if once and (store.meta("status"), store.seq) != ("interrupted", last.journal_seq):
        raise ConfigError(
            f"{folder}: the run was killed under the wall clock and uses secure or local noise; resuming it "
            "would repeat steps whose results were already seen, with different noise, and spend their "
            "privacy budget twice; start a new run"
        )
    replay = _JournalReplay(core, dynamics)
    for _, event in store.replay(until=last.journal_seq):
        replay.handle(event)
    aggregator.restore_noise(replay.salts)
    entries = _refill(folder, last, core, aggregator)
    checkpoint.forget_after(folder / CHECKPOINTS, last.journal_seq)
    store.truncate(last.journal_seq)
    aggregator.count(*store.summed())
    return replay.state(last, entries, _answers.decode(last.answers) if last.answers else ())


def _refill(folder: Path, last: SavedState, core: Core, aggregator: Aggregator) -> dict[int, int]:
    """Copy a checkpoint into the buffer; return the ring entry of each version, keyed by version."""
    buffer = aggregator.buffer
    if core.version != last.version or last.model.size != buffer.shape.size:
        raise ConfigError(f"the checkpoint in {folder} does not belong to its record")
    if buffer.shape.statistics and last.held.keys() - last.statistics.keys():
        raise ConfigError(
            f"the checkpoint in {folder} lacks the running statistics that updates started from: an earlier "
            "version of edgefl wrote it; start a new run"
        )
    if len(last.bases) >= buffer.shape.ring:  # a full ring is fine: the next sum waits
        raise ConfigError(
            f"the checkpoint in {folder} holds {len(last.bases) + 1} versions; "
            f"a ring of {buffer.shape.ring} has no room for them"
        )
    bases = {**dict(sorted(last.bases.items())), last.version: last.model}
    entries = {version: (1 + place) % len(bases) for place, version in enumerate(bases)}
    for version, model in bases.items():  # the last version is placed in entry 0
        buffer.model(entries[version])[:] = model
        buffer.publish(version, entries[version])
    for vector, saved in zip(buffer.vectors(0), last.vectors, strict=True):
        vector[:] = saved
    for client, left in last.kept.items():
        buffer.kept(client)[:] = left
    for client, left in last.early.items():
        buffer.kept(client, new=True)[:] = left
    for held in core.held:
        if held.task not in last.held:
            raise ConfigError(f"the checkpoint in {folder} lacks the update of task {held.task}")
        aggregator.restore(
            task=held.task,
            client=held.client,
            version=held.base_version,
            update=last.held[held.task],
            statistics=last.statistics.get(held.task),
        )
    aggregator.settle()
    return entries


def recover(
    folder: Path, core: Core, aggregator: Aggregator, store: Store, dynamics: Dynamics | None = None
) -> Restored:
    """Continue from the buffer of a killed server and the part of its record that was committed.

    The buffer may be ahead of the record, but never behind it. A change that is not in the record was not
    sent to any client, so it is undone. Raises `ConfigError` if the buffer and the record do not match.
    """
    last = checkpoint.latest(folder / CHECKPOINTS, journal_seq=store.seq)
    replay, unended = _JournalReplay(core, dynamics), store.unended()
    for _, event in store.replay():
        _end(store, unended, replay.handle(event))
    aggregator.restore_noise(replay.salts)
    aggregator.count(*store.summed())
    buffer = aggregator.buffer
    entries = {version: entry for entry, version in enumerate(buffer.entry_version) if version >= 0}
    for version in [version for version in entries if version > core.version]:
        buffer.retire(entries.pop(version))
    try:
        buffer.publish(core.version, entries[core.version])
        buffer.revert_accepted(core.tasks)
        aggregator.take_over(core.held)
    except (KeyError, SlotError) as error:
        raise ConfigError(f"the parameter buffer does not match the record in {folder}: {error}") from None
    return replay.state(last, entries)


def _end(store: Store, unended: Collection[int], actions: list[Action]) -> None:
    """Record the end of each trip that the killed server ended but did not record."""
    for action in actions:
        if isinstance(action, Release) and action.task in unended:
            store.released(action.task, action.fate, action.reason)
