"""Stopping and carrying on: a checkpoint of the run's state, and the state from a checkpoint.

Replaying the journal through a fresh core says what was under way; a checkpoint holds the numbers that belong
to it, under the virtual clock also of work in flight. So a resumed run goes on with the same bits.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgefl.core import Core
from edgefl.core.events import Arrived, Evaluate, Evaluated, Left, Release, Train
from edgefl.devices.dynamics import Dynamics
from edgefl.errors import ConfigError
from edgefl.parameters import checkpoint
from edgefl.parameters.checkpoint import Layout, SavedState
from edgefl.results.run_folder import CHECKPOINTS
from edgefl.results.store import Store
from edgefl.run.engine import Engine
from edgefl.run.slots import Aggregator
from edgefl.run.timeline import OF_TRAINING, Ahead, Answer, Restored

_answers = msgspec.msgpack.Decoder(list[Answer])


def save(folder: Path, engine: Engine, ahead: Ahead, layout: Layout, *, final: bool = False) -> None:
    """Write a checkpoint of this instant: record first, so that the journal reaches as far as the numbers."""
    engine.record_open(running=final)
    store, core, aggregator, clock = engine.store, engine.core, engine.aggregator, engine.timeline.clock
    store.sync()
    buffer = aggregator.buffer
    entry = buffer.latest[1]
    leases = {task: aggregator.leases[task] for task in (*(held.task for held in core.held), *ahead.tasks)}
    clients = range(buffer.shape.clients)
    early = {aggregator.leases[task].client for task in ahead.tasks} if clients else set()
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
            bases={version: buffer.model(at) for version, at in ahead.entries.items() if at != entry},
            answers=msgspec.msgpack.encode(ahead.answers),
        ),
        layout,
        final=final,
    )


def restore(
    folder: Path, core: Core, aggregator: Aggregator, store: Store, dynamics: Dynamics | None = None
) -> Restored:
    """Rewind the record to the last checkpoint, replay it through fresh parts, and refill the buffer."""
    last = checkpoint.latest(folder / CHECKPOINTS, journal_seq=store.seq)
    store.truncate(last.journal_seq)
    tasks: dict[int, tuple[Train, float]] = {}
    assessing: dict[int, tuple[float, int]] = {}
    deaths: dict[int, list[float]] = {}
    for _, event in store.replay():
        actions = core.handle(event)
        match event:
            case Evaluated(version=version):
                assessing.pop(version, None)
            case Arrived(client=client):
                deaths.pop(client, None)
            case Left(client=client, at_s=at_s, reason=reason) if reason.startswith(OF_TRAINING):
                deaths.setdefault(client, []).append(at_s)
        for action in actions:
            match action:
                case Train(task=task):
                    tasks[task] = action, core.now_s
                case Release(task=task):
                    tasks.pop(task, None)
                case Evaluate(version=version):
                    assessing[version] = core.now_s, core.trips
        if dynamics is not None:
            dynamics.observe(event, actions, core.now_s)
    buffer = aggregator.buffer
    if core.version != last.version or last.model.size != buffer.shape.size:
        raise ConfigError(f"the checkpoint in {folder} does not belong to its record")
    if len(last.bases) + 2 > buffer.shape.ring:
        raise ConfigError(
            f"the checkpoint in {folder} holds {len(last.bases) + 1} versions; "
            f"a ring of {buffer.shape.ring} has no room for them and the next"
        )
    bases = {**dict(sorted(last.bases.items())), last.version: last.model}
    entries = {version: (1 + place) % len(bases) for place, version in enumerate(bases)}
    for version, model in bases.items():  # the last is in entry 0
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
        update = last.held[held.task]
        aggregator.restore(task=held.task, client=held.client, version=held.base_version, update=update)
    answers = {answer.task: answer for answer in _answers.decode(last.answers)} if last.answers else {}
    running = {task: tasks[task] for task in sorted(core.tasks)}
    # A version that is not there any more had been passed over for a newer one.
    measurable = {version: asked for version, asked in assessing.items() if version in entries}
    return Restored(last, running, measurable, entries, answers, deaths)
