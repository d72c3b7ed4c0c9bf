"""Resuming after a killed server: the buffer of another run is refused, and secure noise is drawn once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_world import World

from edgefl import experiment, failpoints
from edgefl.core.events import Left
from edgefl.errors import ConfigError, RunError
from edgefl.results.record import Record
from edgefl.results.rows import MemoryUse, NodeRow
from edgefl.results.store import Store
from edgefl.run import resume, supervisor
from edgefl.run.hosting import ThisHost
from edgefl.run.timeline import InFlightWork
from edgefl.strategies.fedbuff import FedBuff

STRATEGY = FedBuff(buffer_size=4, momentum=0.9, server_lr=0.3)


class Killed(BaseException):
    """Stands in for a kill signal: no code catches it."""


class Server(World):
    """A world whose server commits its events to the record before it sends tasks."""

    def __init__(self, folder: Path, left: object = None) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, STRATEGY, experiment.Stop(trips=300), wall=True, left=left)  # type: ignore[arg-type]

    def turn(self) -> bool:
        more = super().turn()
        self.flush()
        return more


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return a server that was killed after its twentieth commit."""
    server = Server(tmp_path / "killed")
    passed = 0

    def pass_by(name: str) -> None:
        nonlocal passed
        passed += name == "committed"
        if passed > 20:
            raise Killed

    resume.save(tmp_path / "killed", server.engine, InFlightWork(), [])
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "pass_by", pass_by)
        with pytest.raises(Killed):
            server.join().finish()
    return server


def test_a_killed_run_with_secure_noise_cannot_be_resumed_but_an_interrupted_one_can(
    killed: Server, tmp_path: Path
) -> None:
    """A version that is made twice would have different noise the second time."""
    secure = pytest.raises(ConfigError, match="killed under the wall clock and uses secure or local noise")
    for status in ("running", "interrupted"):
        killed.store.set_meta(status=status)
        resume.save(tmp_path / "killed", killed.engine, InFlightWork(), [])
        fresh = Server(tmp_path / status)
        parts = (tmp_path / "killed", fresh.core, fresh.aggregator, killed.store)
        if status == "running":
            with secure:
                resume.restore(*parts, once=True)
        else:
            resume.restore(*parts, once=True)
            cost = fresh.aggregator.cost()  # regression: sums before the interruption were not counted
            assert cost.updates == 4 * killed.core.version > 0
            assert cost.bytes == killed.aggregator.cost().bytes
            assert cost.seconds == pytest.approx(killed.aggregator.cost().seconds)
        fresh.close()
    killed.store.journal(Left(0, killed.now, "after the last checkpoint"))
    killed.store.commit()
    with pytest.raises(ConfigError, match="killed under the wall clock and uses secure or local noise"):
        resume.restore(*parts, once=True)
    killed.close()


def test_a_buffer_of_another_run_is_refused(killed: Server, tmp_path: Path) -> None:
    killed.store.close(commit=False)
    other = Server(tmp_path / "other")
    with pytest.raises(ConfigError, match="the parameter buffer does not match the record"):
        Server(tmp_path / "killed", left=other.buffer)
    other.close()
    killed.buffer.close()


def test_a_run_without_room_for_its_results_names_the_command_that_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(tmp_path).close()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "journal-0000000001.safetensors").touch()

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervisor, "write_results", full)
    usage = {"used": 0.5, "others": 0.0, "steal": None, "throttled": None}

    class Parts:
        _folder, _interrupts, _memory, _hosts = tmp_path, 0, MemoryUse(), ThisHost()
        _plan, _usage = SimpleNamespace(load=0.1), SimpleNamespace(usage=lambda: usage)
        _error = supervisor._Supervisor._error

    parts: Any = Parts()
    with pytest.raises(RunError, match="No space left on device; carry on with: edgefl resume"):
        supervisor._Supervisor._write_results(parts)


def test_a_resumed_run_is_judged_by_the_worst_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(tmp_path).close()
    monkeypatch.setattr(supervisor, "write_results", lambda folder: {})
    parts_of_run = ((0.1, None, 0.4, 5.0), (0.0, 0.3, 0.95, None), (None, 0.2, 0.5, None))
    for steal, throttled, load, shared_mib in parts_of_run:
        usage = {"used": 0.5, "others": 0.0, "steal": steal, "throttled": throttled}
        hosts, node = ThisHost(), {"cpu": "", "cores": 1.0, "system": "", "machine": "", "host_step_s": 0.1}
        hosts.rows = [NodeRow(name=f"node {load}", peers=[0], **node)]  # type: ignore[arg-type]
        parts: Any = SimpleNamespace(
            _folder=tmp_path,
            _interrupts=0,
            _memory=MemoryUse(shared_mib=shared_mib),
            _hosts=hosts,
            _plan=SimpleNamespace(load=load),
            _usage=SimpleNamespace(usage=lambda usage=usage: usage),
        )
        supervisor._Supervisor._write_results(parts)
    with Record(tmp_path) as record:
        meta = record.meta
        assert (meta.steal, meta.throttled, meta.load, meta.memory.shared_mib) == (0.1, 0.3, 0.95, 5.0)
        assert [node.name for node in meta.nodes] == ["node 0.4", "node 0.95", "node 0.5"]  # of all parts
