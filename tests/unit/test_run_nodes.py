"""Nodes of a run: which may join, which peers each hosts, and machine load. No process is started."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from shell import Shell
from tables import arrows

from edgefl.cli import main
from edgefl.errors import ConfigError, RunError
from edgefl.experiment import Clock, Experiment, Fleet, Server, Stop
from edgefl.host.capacity import machine
from edgefl.host.channel import Refused
from edgefl.host.confinement import Enforcement
from edgefl.host.pacing import Pacer
from edgefl.hosts import messages, node
from edgefl.hosts.nodes import Nodes, on_nodes, opened, software
from edgefl.learning.operations import BatchWork, StepWork
from edgefl.parameters.buffer import Shape
from edgefl.run import control
from edgefl.run.client import ClientProcess
from edgefl.run.connection import Cancelled
from edgefl.run.demands import wall_scale
from edgefl.run.hosting import Share
from edgefl.run.messages import Task
from edgefl.run.zygote import Zygote
from edgefl.strategies.fedbuff import FedBuff
from edgefl.zeromq import keys

OTHER = keys.Key("other", bytes(32), keys.public(bytes(32)))
SAME = control.Fingerprint("data", "training")
SHAPE = Shape(8, 5, 3)
WANTED = Experiment(fleet=Fleet(devices={"pi-4": 6}), stop=Stop(versions=3), clock=Clock(kind="virtual"))


def joining(
    cores: float = 2.0, workers: int = 1, where: str = "", device: str = "", **versions: str
) -> messages.Join:
    about = {**software(), **versions}
    return messages.Join(("cpu", 2, "Linux"), where or str(cores), cores, about, workers, device)


class World(Nodes):
    """The server's view of a run's nodes. The tests make up the nodes' messages and read the answers."""

    def __init__(self) -> None:
        super().__init__("tcp://127.0.0.1:*", None)
        self.lines: list[str] = []
        self.say = self.lines.append

    def handle(self, name: str, *sent: messages.FromNode) -> list[control.FromHosts]:
        return [answer for message in sent for answer in self._handle(name, message)]

    def ready(self, name: str, join: messages.Join, step_s: float = 0.001) -> list[control.FromHosts]:
        return self.handle(name, join, messages.Agreed(SAME, step_s))

    def start(self, *nodes: str, workers: int = 1, peers: int = 0) -> None:
        """Let these nodes join, start the run, and spawn this number of peers."""
        for name in nodes:
            self.ready(name, joining(workers=workers))
        self.adopt(SHAPE)
        for number in range(peers):
            self.spawn(spawn(number))

    def sent_to(self, name: str) -> list[messages.ToNode]:
        """Return the messages to this node since the last call."""
        outbox = self._nodes[name].outbox
        return [outbox.popleft() for _ in range(len(outbox))]


Prepare = Callable[..., World]


@pytest.fixture
def prepare() -> Iterator[Prepare]:
    """Make a `World` that is ready for nodes."""
    made: list[World] = []

    def prepare(same_bits: bool, wanted: Experiment = WANTED) -> World:
        made.append(world := World())
        world.prepare(control.Prepare(wanted, "", fingerprint=True), same_bits=same_bits)
        assert list(world.expect(SAME, 0.001)) == []
        return world

    yield prepare
    for world in made:
        world._nodes.clear()
        world.close()


@pytest.fixture
def world(prepare: Prepare) -> World:
    return prepare(same_bits=True)


def spawn(number: int, epoch: int = 0) -> control.Spawn:
    return control.Spawn("worker", number, epoch, "", "", 0, 1.0)


def test_peers_go_to_the_node_with_most_room_and_depart_with_a_lost_node(world: World) -> None:
    assert world.ready("a", joining(workers=2)) == [control.Gathered(1)]
    assert world.ready("b", joining(workers=1)) == [control.Gathered(2)]
    world.adopt(SHAPE)
    assert [share.peers for share in world.shares(3)] == [[0, 1], [2]]
    for number in range(3):
        world.spawn(spawn(number))
    prepare, adopt, *spawns = world.sent_to("a")
    assert (type(prepare), adopt) == (control.Prepare, control.Adopt(initialise=False, shape=SHAPE))
    assert spawns == [spawn(0), spawn(1)]
    assert world.handle("a", control.Departed("worker", 1, 7, "an older one's")) == []
    ended = control.Departed("worker", 1, 0, "signal 9")
    assert world.handle("a", ended) == [ended]
    (gone,) = world.handle("a", Refused("interrupted", config=False))
    assert gone == control.Departed("worker", 0, 0, "node a is lost: interrupted")
    assert world.lines[-1] == "node a is lost: interrupted"
    (row,) = world.rows
    assert (row.name, row.peers, row.lost) == ("a", [0, 1], "interrupted")


def test_lines_about_a_node_are_shortened(world: World) -> None:
    with socket.socket() as wakes:
        world.open(wakes.fileno(), world.lines.append)
        world.handle("a", msgspec.structs.replace(joining(), host=("c" * 10_000, 2, "Linux")))
        world.handle("b", joining(torch="9" * 10_000))
        world.handle("a", Refused("w" * 10_000, config=False))
    about = [line.split(":")[0] for line in world.lines]
    assert about == ["node a joined", "node b was rejected", "node a is lost"]
    assert max(map(len, world.lines)) <= 500


def test_the_workers_of_a_stopped_node_go_to_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a run never ended. A stopped node ends no worker, but Linux keeps its connection open."""
    monkeypatch.setattr(world, "_reachable", lambda node: True)
    world.start("a", "b", workers=2, peers=4)
    for number in range(2):  # both are silent, but only b ends its worker
        assert world.expel(control.Expel("worker", number, 0)) is None
    ended = control.Departed("worker", 1, 0, "signal 9")
    assert world.handle("b", ended) == [ended]
    assert list(world.receive()) == []
    monkeypatch.setattr("edgefl.hosts.nodes.ENDING_S", -1.0)
    world._next_check_s = time.monotonic()
    why = "node a is lost: it did not end a process of the run within -1 s"
    assert list(world.receive()) == [control.Departed("worker", number, 0, why) for number in (0, 2)]
    world.sent_to("b")
    world.spawn(spawn(0, epoch=1))
    assert world.sent_to("b") == [spawn(0, epoch=1)]


def test_a_new_server_does_not_wait_for_a_stopped_node(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a node never confirms that the peers of the killed server have ended."""
    monkeypatch.setattr(world, "_reachable", lambda node: True)
    world.start("a", "b")
    assert list(world.clear(1)) == []
    assert world.handle("b", control.Cleared(1)) == []
    assert list(world.receive()) == []
    monkeypatch.setattr("edgefl.hosts.nodes.ENDING_S", -1.0)
    world._next_check_s = time.monotonic()
    assert list(world.receive()) == [control.Cleared(1)]
    assert [node.name for node in world.agreed] == ["b"]


def test_a_move_that_a_new_server_makes_needless_is_forgotten(world: World) -> None:
    """Otherwise a later crash of the same worker would look like its move."""
    world.start("a", peers=2)
    world.ready("b", joining())
    assert [*world._nodes["a"].moved] == [("worker", 1)]
    assert list(world.clear(1)) == []
    world.spawn(spawn(1, epoch=1))
    crash = control.Departed("worker", 1, 1, "signal 9")
    assert world.handle("a", crash) == [crash]


def test_time_for_which_edgefl_serve_was_stopped_does_not_count(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the command continues, it has not yet read the answers that the nodes have sent meanwhile."""
    monkeypatch.setattr(world, "_reachable", lambda node: True)
    world.start("a", peers=1)
    world.expel(control.Expel("worker", 0, 0))
    world._nodes["a"].ending["worker", 0] -= 100.0
    world._next_check_s = time.monotonic() - 99.0
    assert list(world.receive()) == []
    world._nodes["a"].ending["worker", 0] -= 100.0
    world._next_check_s = time.monotonic()
    assert [type(found) for found in world.receive()] == [control.Departed]


def test_peers_without_a_node_wait_for_the_next_one(world: World) -> None:
    world.start("a")
    world.handle("a", control.Refused("gone", config=False))
    world.spawn(spawn(0))
    world.spawn(spawn(1))
    departed = control.Departed("worker", 1, 0, "no node could run it")
    assert world.expel(control.Expel("worker", 1, 0)) == departed
    world.ready("b", joining())
    assert world.sent_to("b")[-1] == spawn(0)


def test_a_node_that_joins_late_gets_the_workers_for_which_others_lack_room(world: World) -> None:
    world.start("a", "b", workers=2, peers=4)
    for gone in world.handle("b", Refused("gone", config=False)):
        assert isinstance(gone, control.Departed)
        world.spawn(spawn(gone.peer, epoch=1))
    world.sent_to("a")
    assert world.ready("c", joining(workers=2)) == [control.Gathered(2)]
    assert world.sent_to("a") == [control.Expel("worker", number, 1) for number in (1, 3)]
    for number in (1, 3):
        why = "node c has room for it"  # its task is not blamed
        ended = world.handle("a", control.Departed("worker", number, 1, "signal 9", 7))
        assert ended == [control.Departed("worker", number, 1, why)]
    for number in (1, 3):
        world.spawn(spawn(number, epoch=2))
    assert [one for one in world.sent_to("c") if isinstance(one, control.Spawn)] == [
        spawn(number, epoch=2) for number in (1, 3)
    ]
    assert world.ready("d", joining(workers=4)) == [control.Gathered(3)]  # no node has too many


def test_a_new_server_waits_for_the_nodes_that_had_joined_before(world: World) -> None:
    world.start("a", "b")
    assert list(world.clear(1)) == []
    assert world.ready("late", joining()) == [control.Gathered(3)]
    assert world.handle("a", control.Cleared(1)) == []
    assert world.handle("b", Refused("gone", config=False)) == [control.Cleared(1)]


@pytest.mark.parametrize(
    ("same_bits", "found", "versions", "why"),
    [
        (True, SAME, {"torch": "1.0"}, "it has torch 1.0, but this host has"),
        (False, SAME, {"edgefl": "0.0"}, "it has edgefl 0.0, but this host has"),
        (False, control.Fingerprint("other", "training"), {}, "its data, their split or its initial model"),
        (True, control.Fingerprint("data", "other"), {}, "its training steps give different bits"),
        (False, control.Fingerprint("data", "other"), {"torch": "1.0"}, ""),
    ],
)
def test_nodes_with_other_data_bits_or_packages_are_rejected(
    prepare: Prepare, same_bits: bool, found: control.Fingerprint, versions: dict[str, str], why: str
) -> None:
    world = prepare(same_bits)
    world.handle("a", joining(**versions), messages.Agreed(found, 0.001))
    assert (why in world.lines[-1] and not world.agreed) if why else world.agreed


def test_nodes_compare_the_bits_of_the_device_on_which_their_workers_train() -> None:
    """Regression: with training.device = "cuda", the trial ran on the CPU, so any GPU was accepted."""
    work = BatchWork(fixed=StepWork(), per_example=StepWork())
    prepared = control.Prepared(8, [], b"", b"", b"", b"", [], work, 0.1, 1, "digits")
    workload, sent = Mock(), list[Any]()
    workload.prepared.return_value, workload.fingerprint.return_value = prepared, SAME
    for on_gpu in (False, True):
        workload.reset_mock()
        parts: Any = SimpleNamespace(
            _load=lambda: workload,
            _request=control.Prepare(WANTED, "", fingerprint=True),
            _on_gpu=on_gpu,
            _channel=SimpleNamespace(send=sent.append),
        )
        Zygote._prepare(parts)
        calls = [name for name, *_ in workload.method_calls]
        assert calls == ["prepared", *["settle"] * on_gpu, "fingerprint"]
    assert [one.fingerprint for one in sent] == [SAME, SAME]


def test_a_node_of_another_edgefl_gets_the_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message of another version may have different fields."""
    answers: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(world._door, "receive", lambda: [(b"a", [b"\xc1"])])
    monkeypatch.setattr(world._door, "send", lambda name, frames: answers.append((name, *frames)))
    assert list(world.receive()) == []
    ((name, answer),) = answers
    (refused,) = msgspec.msgpack.decode(answer, type=list[messages.ToNode])
    why = f"its message is not valid for edgefl {software()['edgefl']}"
    assert (name, refused) == (b"a", Refused(why, config=True))
    assert world.lines == []  # a node could repeat this without limit


def test_a_node_that_joins_when_the_run_has_ended_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop in a shell may start it again while other nodes are still ending."""
    answers: list[tuple[str, str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(world, "_closed", True)
        patch.setattr(world, "_answer", lambda name, why: answers.append((name, why)))
        assert world.ready("a", joining()) == []
    assert answers == [("a", "the run has ended")]
    assert not world._nodes


def test_clients_are_distributed_by_the_cores_and_the_step_time_of_each_node(prepare: Prepare) -> None:
    """Nodes on one machine share its cores."""
    world = prepare(same_bits=False)
    world.ready("a", joining(4.0, where="one"))
    world.ready("b", joining(4.0, where="one"))
    world.ready("c", joining(4.0, where="two"), step_s=0.002)
    assert [node.cores for node in world.agreed] == [2.0, 2.0, 4.0]
    assert [len(share.peers) for share in world.shares(60)] == [20, 20, 20]
    world.handle("b", Refused("gone", config=False))
    assert [node.cores for node in world.agreed] == [4.0, 4.0]


def test_a_node_that_is_a_device_is_one_client_of_its_profile(prepare: Prepare) -> None:
    wanted = Experiment(fleet=Fleet(devices={"pi-4": 2, "moto-g4": 1}), stop=Stop(versions=3))
    world = prepare(False, wanted)
    world.ready("pi", joining(device="pi-4"))
    assert [share.peers for share in world.shares(3)] == [[0]]  # no node is there for the other clients
    world.ready("host", joining())
    assert [share.peers for share in world.shares(3)] == [[0], [1, 2]]
    world.ready("watch", joining(device="watch-a7"))
    assert "this run has no client with the profile watch-a7 that needs a host" in world.lines[-1]
    world.adopt(SHAPE)
    world.ready("another", joining(device="pi-4"))  # the run has begun, and each client has a host
    assert "this run has no client with the profile pi-4 that needs a host" in world.lines[-1]
    world.handle("pi", Refused("gone", config=False))
    world.handle("host", Refused("gone", config=False))
    world.spawn(control.Spawn("client", 1, 1, "", "", 0, 1.0))
    world.ready("again", joining(device="pi-4"))
    assert [type(one) for one in world.sent_to("again")] == [control.Prepare, control.Adopt, control.Spawn]
    world.handle("again", Refused("gone", config=False))
    world.ready("quick", joining(device="pi-4"))  # the device is back before its client rejoins
    world.spawn(control.Spawn("client", 1, 2, "", "", 0, 1.0))
    assert [type(one) for one in world.sent_to("quick")] == [control.Prepare, control.Adopt, control.Spawn]


def test_a_node_at_its_own_pace_is_rejected_by_a_run_with_another_time_scale(prepare: Prepare) -> None:
    world = prepare(False, Experiment(fleet=Fleet(devices={"pi-4": 1}), stop=Stop(versions=3)))
    world.adopt(SHAPE)
    world.spawn(control.Spawn("client", 0, 0, "", "", 0, 5.0))
    world.ready("pi", msgspec.structs.replace(joining(device="pi-4"), as_is=True))
    assert world.lines[-1] == "node pi was rejected: it joined with --as-is, which needs a time scale of 1"
    world.ready("other", joining(device="pi-4"))
    assert [type(one) for one in world.sent_to("other")] == [control.Prepare, control.Adopt, control.Spawn]


def test_a_node_at_its_own_pace_needs_no_time_scale() -> None:
    """Regression: its training takes its whole trip, so the run was refused, or its host was overloaded."""
    prepared: Any = SimpleNamespace(first_trips=[control.FirstTrip(10, 0.0, 1.0, 1.0)] * 2)
    own, host = Share("pi", [0], 0.1, 1.0, as_is=True), Share("host", [1], 0.001, 1.0)
    for shares, load in (([own], 0.0), ([own, host], 0.012)):
        scale = wall_scale(WANTED, FedBuff(), prepared, shares)
        assert (scale.value, scale.verdict, scale.load) == (1.0, "fits", pytest.approx(load))


def test_a_device_at_its_own_pace_waits_before_its_first_trip() -> None:
    """Regression: its download ended before it had begun, and the server refused the negative time."""
    waited: list[int] = []

    def download(*_: object) -> None:
        raise Cancelled

    parts: Any = SimpleNamespace(
        _pacer=Pacer(time_scale=1.0, wait=lambda _: None),
        _model=lambda task, frames: None,
        _transport=SimpleNamespace(room=lambda task: None),
        _workload=SimpleNamespace(plan=lambda *_: SimpleNamespace(dies_s=math.inf)),
        _server=SimpleNamespace(wait_until=waited.append),
        _download=download,
    )
    task = Task(0, 0, 0, 0, 0, 0, None, None, wait_s=2.0)
    with pytest.raises(Cancelled):
        ClientProcess._trip(parts, task, (), 1000)
    assert waited == [2_000_001_000]


def test_a_runs_usage_is_that_of_its_busiest_machine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    for name, where, steal in (("a", machine(), 0.0), ("b", machine(), 0.0), ("c", "far", 0.3)):
        world.ready(name, joining(where=where))
        used = {"used": 0.2, "others": 0.5, "steal": steal, "throttled": None}
        ended.append((name.encode(), [msgspec.msgpack.encode([messages.NodeEnded(used)])]))
    monkeypatch.setattr(world._door, "send", lambda *_: None)
    monkeypatch.setattr(world._door, "receive", lambda: ended)
    world.close()
    found = world.usage({"used": 0.1, "others": 0.6, "steal": 0.1, "throttled": 0.0})
    assert {name: round(value or 0.0, 9) for name, value in found.items()} == {
        "used": 0.5,
        "others": 0.5,  # of machine c: here it is 0.7 - 0.5
        "steal": 0.3,
        "throttled": 0.0,
    }


def test_a_node_loading_at_the_end_is_not_recorded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.handle("a", joining())
    with monkeypatch.context() as patch:
        patch.setattr(world, "_closed", True)
        assert (world.handle("a", messages.NodeEnded({})), world.rows) == ([], [])


def test_a_node_does_not_wait_for_a_zygote_that_is_loading_data(monkeypatch: pytest.MonkeyPatch) -> None:
    kill, child = Mock(), Mock()
    monkeypatch.setattr(node, "kill_tree", kill)
    for adopted in (True, False):
        parts: Any = SimpleNamespace(_zygote=Mock(), _child=child, _adopted=adopted)
        node._Node._end_zygote(parts)
    kill.assert_called_once_with(child)


@pytest.mark.parametrize(
    ("bind", "line"),
    [
        ("tcp://0.0.0.0:*", "anybody who can reach this address could join"),
        ("0.0.0.0:7000", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:port", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:70000", "port must be from 1 to 65534"),
        ("tcp://127.0.0.1:0", "port must be from 1 to 65534"),
    ],
)
def test_an_address_that_is_invalid_or_open_to_everybody_is_refused(bind: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line), opened(bind, None, 1):
        pass


def test_a_port_is_refused_if_it_or_the_next_one_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for first in (port, port - 1):
            at = f"tcp://127.0.0.1:{first}"
            with pytest.raises(ConfigError, match=r"--bind: tcp://127.0.0.1:\d+: \w"), opened(at, None, 1):
                pass


JOINS = """
here:7000 -> ADDRESS: must be tcp://HOST:PORT (got 'here:7000')
tcp://127.0.0.1 -> ADDRESS: must be tcp://HOST:PORT (got 'tcp://127.0.0.1')
tcp://127.0.0.1:* -> ADDRESS: must be tcp://HOST:PORT (got 'tcp://127.0.0.1:*')
tcp://127.0.0.1:99999 -> ADDRESS: port must be from 1 to 65534, as the next one is used too (got 99999)
tcp://[::1::]:7000 -> tcp://[::1::]:7000: host '[::1::]' not found (
tcp://127.0.0.1:7000 --device pi4 -> device profile 'pi4' not found; did you mean 'pi-4'?
tcp://127.0.0.1:7000 --workers 100001 -> --workers: must be at most 100000, got 100001
tcp://127.0.0.1:7000 --as-is -> --as-is: needs --device NAME
tcp://127.0.0.1:7000 --device pi-4 --workers 2 -> --workers: has no effect with --device
"""


@pytest.mark.parametrize(("arguments", "line"), arrows(JOINS))
def test_a_node_that_cannot_join_prints_one_line(arguments: str, line: str, edgefl: Shell) -> None:
    assert edgefl.refuses(2, "join", *arguments.split()).startswith(line)


@pytest.mark.parametrize(("key", "wants"), [(None, r"a key \(--key FILE\)"), (OTHER, "another key")])
def test_a_node_without_the_right_key_states_what_it_needs(key: keys.Key | None, wants: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, contextlib.ExitStack() as stack:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        outside = node._Node(address, key, joining(), stack)
        outside._until_s = 0.0
        assert outside._join_failure() == "no run answers there, which is this host itself"
        while not outside._line.reached:
            outside._line.broke()
        with pytest.raises(
            RunError, match=rf"^{address}: the server there requires {wants}, or is not a run$"
        ):
            outside._turn()


def test_a_run_gets_the_reason_why_a_node_cannot_limit_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    why, told = "fleet.throttle: 'cgroup' cannot be used here", list[str]()
    monkeypatch.setattr(node, "enforced", Mock(side_effect=ConfigError(why)))
    parts: Any = SimpleNamespace(
        _address="tcp://there:7000",
        _stack=contextlib.ExitStack(),
        _report_leaving=told.append,
        _as_is=False,
        _start_zygote=Mock(),
        _zygote=Mock(),
    )
    with pytest.raises(ConfigError, match=why):
        node._Node._carry_out(parts, control.Prepare(WANTED, "", fingerprint=True))
    assert told == [why]
    parts._as_is = True  # a real device is not limited, so it need not be able to limit clients
    node._Node._carry_out(parts, control.Prepare(WANTED, "", fingerprint=True))
    assert parts._zygote.tell.call_args.args[0].enforcement == Enforcement()


def test_an_explicit_shm_transport_is_reported_as_changed_to_wire(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "one.toml"
    serve = ["serve", str(file), "--bind", "nowhere"]
    for transport, arguments, lines in (
        ("", [], 1),
        ("wire", [], 1),
        ("shm", [], 2),
        ("", ["shm"], 2),
        ("shm", ["wire"], 1),
    ):
        server = f'[server]\ntransport = "{transport}"\n' if transport else ""
        file.write_text(f'[fleet]\ndevices = {{ "pi-4" = 2 }}\n[stop]\nversions = 3\n{server}')
        assert main([*serve, *(f"--set=server.transport={name}" for name in arguments)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == lines
        assert ("server.transport is 'wire' on nodes" in err) == (lines == 2)


def test_opened_nodes_have_an_address_and_missing_keys_are_refused(tmp_path: Path) -> None:
    with opened("tcp://127.0.0.1:*", None, 1) as nodes:
        assert nodes.address.startswith("tcp://127.0.0.1:")
        assert nodes.door == "tcp://127.0.0.1:*"
    with pytest.raises(ConfigError, match="edgefl keygen"), opened("tcp://127.0.0.1:*", tmp_path, 1):
        pass
    contradicts = pytest.raises(ConfigError, match="--insecure: cannot be combined with --keys")
    with contradicts, opened("tcp://127.0.0.1:*", tmp_path, 1, insecure=True):
        pass


def test_more_nodes_than_keys_are_refused(tmp_path: Path) -> None:
    keys.make(tmp_path, ["one"])
    line = "1 node key, but the run waits for 2 nodes, each with its own key; create more keys with: edgefl"
    with pytest.raises(ConfigError, match=line), opened("tcp://127.0.0.1:*", tmp_path, 2):
        pass


def test_nodes_use_the_wire_transport() -> None:
    given = Experiment(fleet=WANTED.fleet, stop=WANTED.stop, server=Server())
    assert on_nodes(given, Path()).server.transport == "wire"


NOTHING = Refused("", config=False)
FIRST = msgspec.to_builtins([joining(), messages.Agreed(SAME, 0.001)])


def first(**changed: object) -> bytes:
    """Return a node's first messages with some fields changed."""
    return msgspec.msgpack.encode(
        [{**one, **{k: v for k, v in changed.items() if k in one}} for one in FIRST]
    )


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\xc1"],
        [msgspec.msgpack.encode([NOTHING]).replace(b"\xa0", b"\xa1\xff")],  # no UTF-8
        [b"\x91\x82\xa4type\xa7refused\xa1x" + b"\x91" * 100_000 + b"\xc0"],
        [first(workers=0)],
        [first(workers=10**9)],
        [first(cores=float("nan"))],
        [first(host_step_s=0.0)],
        [first(host_step_s=float("inf"))],
    ],
)  # fmt: skip
def test_a_node_that_sends_an_invalid_message_is_lost(
    world: World, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world._door, "send", lambda *_: None)
    incoming = iter([(b"b", [first()]), (b"a", [first()]), (b"a", frames)])
    monkeypatch.setattr(world._door, "receive", lambda: incoming)
    world.adopt(SHAPE)
    assert list(world.receive()) == [control.Gathered(1), control.Gathered(2)]
    assert world.lines[-1] == "node a is lost: it sent an invalid message"
    assert [node.name for node in world.agreed] == ["b"]


@pytest.mark.parametrize(
    "message",
    [
        messages.NodeEnded({}),
        messages.Agreed(SAME, 0.001),
        messages.Agreed(control.Fingerprint("other", "training"), 0.001),
    ],
)
def test_a_node_that_sends_a_message_at_the_wrong_time_is_lost(
    world: World, message: messages.FromNode
) -> None:
    world.start("a", "b", peers=2)
    why = "node a is lost: it sent a message at the wrong time"
    assert world.handle("a", message) == [control.Departed("worker", 0, 0, why)]
    assert world.lines[-1] == why
    assert [node.name for node in world.agreed] == ["b"]
    (row,) = world.rows
    assert (row.name, row.lost) == ("a", "it sent a message at the wrong time")


def test_a_node_that_ends_before_the_comparison_of_fingerprints_is_forgotten() -> None:
    world = World()
    world.prepare(control.Prepare(WANTED, "", fingerprint=True), same_bits=True)
    assert world.handle("a", joining(), messages.Agreed(SAME, 0.001), messages.NodeEnded({})) == []
    assert list(world.expect(SAME, 0.001)) == world.agreed == []
    world.close()


def test_experiments_whose_clients_keep_vectors_are_refused_before_a_node_joins() -> None:
    for changes in ({"strategy": {"name": "scaffold"}}, {"server": Server(update_format="int8")}):
        with pytest.raises(ConfigError, match="nodes cannot keep a client's vectors"):
            on_nodes(msgspec.structs.replace(WANTED, **changes), Path())
