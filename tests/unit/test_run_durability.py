"""A server that is killed anywhere in its work: its successor has the same numbers, and all that was told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_world import World

from edgefl import experiment, failpoints
from edgefl.core.events import Arrived, Left
from edgefl.errors import ConfigError
from edgefl.results.record import Record
from edgefl.run import messages, resume
from edgefl.run.timeline import Ahead, Delivery, Happening
from edgefl.strategies.fedasync import FedAsync
from edgefl.strategies.fedbuff import FedBuff

STRATEGIES = {"fedbuff": FedBuff(buffer_size=4, momentum=0.9, server_lr=0.3), "fedasync": FedAsync()}
TRIPS = experiment.Stop(trips=300)
PLACES = ("commit", "committed", "sum", "summed", "published")


class Killed(BaseException):
    """Nothing catches it, as nothing catches a signal."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """By place, the number of times that it is passed before the process dies there."""
    left: dict[str, int] = {}

    def pass_by(name: str) -> None:
        if name in left:
            left[name] -= 1
            if left[name] < 0:
                raise Killed

    monkeypatch.setattr(failpoints, "pass_by", pass_by)
    yield left
    left.clear()


class Server(World):
    """A world whose server secures what it does, and whose clients note what they were told."""

    def __init__(self, folder: Path, name: str, **given: Any) -> None:
        super().__init__(folder, STRATEGIES[name], TRIPS, wall=True, **given)
        self.folder, self.name = folder, name
        self.sent: dict[int, tuple[int, int, bytes, bytes]] = {}
        """Every update: client, checksum, numbers, and what its client keeps."""
        self.acknowledged: set[int] = set()
        self.made: dict[int, list[bytes]] = {}
        """Every version: model and vectors."""
        self._last: dict[int, int] = {}
        real = self.engine.take

        def take(happening: Happening) -> None:
            if isinstance(happening, Delivery):
                self._note(happening.done)
            real(happening)

        self.engine.take = take  # type: ignore[method-assign]

    def _note(self, done: messages.Done) -> None:
        kept = self.buffer.kept(done.client, new=True)
        kept[:] = self.buffer.kept(done.client) + np.float32([1, done.task])
        numbers = self.buffer.slot(done.slot).tobytes()
        self.sent[done.task] = (done.client, done.checksum, numbers, kept.tobytes())

    def begin(self) -> Server:
        resume.save(self.folder, self.engine, Ahead(), [])
        self.join()
        self.flush()
        return self

    def successor(self, **given: Any) -> Server:
        """The next server, whose clients are new processes."""
        self.store.close(commit=False)
        found = Server(self.folder, self.name, **given)
        found.sent, found.made, found.acknowledged = self.sent, self.made, self.acknowledged
        for client in sorted((*found.core.running, *found.core.idle)):
            found.engine.take(Left(client, found.now, "interrupted"))
        return found

    def go_on(self) -> Server:
        self.engine.carry_out(self.core.pending())
        self.join()
        self.flush()
        return self

    def turn(self) -> bool:
        more = super().turn()
        self.flush()
        return more

    def give(self, task: messages.Task) -> None:
        super().give(task)
        self._waiting = [*getattr(self, "_waiting", []), task]

    def flush(self) -> None:
        self.made[self.core.version] = self.numbers()  # one that was undone is made again, of others
        super().flush()
        for task in getattr(self, "_waiting", []):
            if task.client in self._last:
                self.acknowledged.add(self._last[task.client])
            self._last[task.client] = task.task
        self._waiting: list[messages.Task] = []

    def numbers(self) -> list[bytes]:
        entry = self.buffer.latest[1]
        return [vector.tobytes() for vector in (self.buffer.model(entry), *self.buffer.vectors(entry))]

    def state(self) -> list[Any]:
        """All that the run goes on from."""
        held = {
            update.task: self.buffer.raw(self.aggregator.leases[update.task].slot).tobytes()
            for update in self.core.held
        }
        kept = [self.buffer.kept(client).tobytes() for client in range(self.buffer.shape.clients)]
        return [self.core.version, self.core.trips, self.numbers(), held, kept]


def check_nothing_is_lost(server: Server) -> None:
    """The numbers are those of before, and every update that was acknowledged has arrived, once."""
    version, _, numbers, held, kept = server.state()
    assert numbers == server.made.setdefault(version, numbers)
    server.store.commit()
    arrived = [event for _, event in server.store.replay() if isinstance(event, Arrived)]
    tasks = [event.task for event in arrived]
    assert len(set(tasks)) == len(tasks)
    assert server.acknowledged <= set(tasks)
    with Record(server.folder) as record:
        sent = dict(zip(*(record.trips[name].tolist() for name in ("task", "checksum_sent")), strict=True))
    assert all(sent[task] == server.sent[task][1] for task in tasks)
    assert held == {task: server.sent[task][2] for task in held}
    last = {event.client: server.sent[event.task][3] for event in arrived}
    if server.stopped is None:  # what arrives after that is not taken
        assert [last.get(client, b"\0" * 8) for client in range(len(kept))] == kept


def run_until_killed(server: Server) -> None:
    server.begin()
    with pytest.raises(Killed):
        server.finish()


@pytest.mark.parametrize("name", STRATEGIES)
def test_killed_at_every_place_one_after_the_other(tmp_path: Path, name: str, kill: dict[str, int]) -> None:
    server = Server(tmp_path, name)
    server.begin()
    for place in (*PLACES, *PLACES):
        kill[place] = 3
        with pytest.raises(Killed):
            server.finish()
        kill.clear()
        server = server.successor(left=server.buffer)
        check_nothing_is_lost(server)
        server.go_on()
    server.finish()
    assert server.stopped == "trips"
    check_nothing_is_lost(server)
    server.close()
    with Record(tmp_path) as record:
        fates, uses = record.trips["fate"], record.trips["uses"]
        assert set(fates) <= {"applied", "discarded", "lost"}
        assert ((uses == 1) == (fates == "applied")).all()
        assert (record.trips["checksum_seen"] == record.trips["checksum_sent"])[fates == "applied"].all()
        assert record.versions["version"].tolist() == list(range(1, server.core.version + 1))


def test_no_version_is_made_twice_where_its_noise_would_differ(tmp_path: Path, kill: dict[str, int]) -> None:
    """A run with secure noise goes on if it was stopped in order, and not if all of it was killed."""
    server = Server(tmp_path, "fedbuff")
    kill["committed"] = 20
    run_until_killed(server)
    kill.clear()
    for status in ("running", "interrupted"):
        server.store.set_meta(status=status)
        resume.save(tmp_path, server.engine, Ahead(), [])
        (tmp_path / status).mkdir()
        fresh = Server(tmp_path / status, "fedbuff")
        parts = (fresh.core, fresh.aggregator, server.store)
        if status == "running":
            with pytest.raises(ConfigError, match="killed under the wall clock, with secure noise"):
                resume.restore(tmp_path, *parts, once=True)
        else:
            resume.restore(tmp_path, *parts, once=True)
        fresh.close()
    server.store.journal(Left(0, server.now, "what a last checkpoint does not hold"))
    server.store.commit()
    with pytest.raises(ConfigError, match="killed under the wall clock, with secure noise"):
        resume.restore(tmp_path, fresh.core, fresh.aggregator, server.store, once=True)
    server.close()


def test_a_buffer_of_another_run_is_refused(tmp_path: Path, kill: dict[str, int]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = Server(tmp_path / "one", "fedbuff")
    kill["committed"] = 20
    run_until_killed(one)
    kill.clear()
    one.store.close(commit=False)
    two = Server(tmp_path / "two", "fedbuff")
    with pytest.raises(ConfigError, match="the parameter buffer is not that of the record"):
        Server(tmp_path / "one", "fedbuff", left=two.buffer)
    two.close()
    one.buffer.close()


@pytest.mark.parametrize(
    "broken",
    ["told before it is committed", "the slot is given away too early", "a version is overwritten too early"],
)
def test_a_server_that_keeps_too_little_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: dict[str, int], broken: str
) -> None:
    """The tests above see what they are there to see."""
    server = Server(tmp_path, "fedasync" if "version" in broken else "fedbuff", ring=2)
    if broken.startswith("told"):
        monkeypatch.setattr(server.ahead, "secure", server.aggregator.settle)
    else:
        server.aggregator.recoverable = False
        monkeypatch.setattr(server.aggregator, "settle", lambda: None)
        monkeypatch.setattr(World, "flush", lambda self: None)
    kill["summed"] = 6
    run_until_killed(server)
    kill.clear()
    with pytest.raises((AssertionError, ConfigError)):
        check_nothing_is_lost(server.successor(left=server.buffer))
    server.buffer.close()
