"""Nodes: who may come, who hosts which peer, how their machines were; by messages, without processes."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from edgefl.cli import main
from edgefl.errors import ConfigError, RunError
from edgefl.experiment import Clock, Experiment, Fleet, Server, Stop
from edgefl.host.capacity import machine
from edgefl.host.channel import Refused
from edgefl.hosts import messages, node
from edgefl.hosts.nodes import Nodes, on_nodes, opened, software
from edgefl.parameters.buffer import Shape
from edgefl.run import control
from edgefl.zeromq import keys

OTHER = keys.Key("other", bytes(32), keys.public(bytes(32)))
SAME = control.Fingerprint("data", "training")
WANTED = Experiment(fleet=Fleet(devices={"pi-4": 6}), stop=Stop(versions=3), clock=Clock(kind="virtual"))


def joining(
    cores: float = 2.0, workers: int = 1, where: str = "", device: str = "", **versions: str
) -> messages.Join:
    about = {**software(), **versions}
    return messages.Join(("cpu", 2, "Linux"), where or str(cores), cores, about, workers, device)


class World(Nodes):
    """Nodes that say what they are told to say."""

    def __init__(self) -> None:
        super().__init__("tcp://127.0.0.1:*", None)
        self.lines: list[str] = []
        self.say = self.lines.append

    def hear(self, name: str, *said: messages.FromNode) -> list[control.FromHosts]:
        return [answer for message in said for answer in self._handle(name, message)]

    def ready(self, name: str, join: messages.Join, step_s: float = 0.001) -> list[control.FromHosts]:
        return self.hear(name, join, messages.Agreed(SAME, step_s))

    def told(self, name: str) -> list[messages.ToNode]:
        outbox = self._nodes[name].outbox
        return [outbox.popleft() for _ in range(len(outbox))]


def begun(same_bits: bool = True) -> World:
    world = World()
    world.prepare(control.Prepare(WANTED, "", fingerprint=True), same_bits=same_bits)
    assert list(world.expect(SAME, 0.001)) == []
    return world


@pytest.fixture
def world() -> Iterator[World]:
    made = begun()
    yield made
    made._nodes.clear()
    made.close()


def spawn(number: int) -> control.Spawn:
    return control.Spawn("worker", number, 0, "", "", 0, 1.0)


def test_peers_go_where_there_is_most_room_and_a_lost_nodes_have_departed(world: World) -> None:
    assert world.ready("a", joining(workers=2)) == [control.Gathered(1)]
    assert world.ready("b", joining(workers=1)) == [control.Gathered(2)]
    shape = Shape(8, 5, 3)
    world.adopt(shape)
    assert [share.peers for share in world.shares(3)] == [[0, 1], [2]]
    for number in range(3):
        world.spawn(spawn(number))
    prepare, adopt, *spawns = world.told("a")
    assert (type(prepare), adopt) == (control.Prepare, control.Adopt(initialise=False, shape=shape))
    assert spawns == [spawn(0), spawn(1)]
    assert world.hear("a", control.Departed("worker", 1, 7, "an older one's")) == []
    ended = control.Departed("worker", 1, 0, "signal 9")
    assert world.hear("a", ended) == [ended]
    (gone,) = world.hear("a", Refused("interrupted", config=False))
    assert gone == control.Departed("worker", 0, 0, "node a is lost: interrupted")
    assert world.lines[-1] == "node a is lost: interrupted"
    (row,) = world.rows
    assert (row.name, row.peers, row.lost) == ("a", [0, 1], "interrupted")


def test_a_node_cannot_print_long_lines(world: World) -> None:
    with socket.socket() as wakes:
        world.open(wakes.fileno(), world.lines.append)
        world.hear("a", msgspec.structs.replace(joining(), host=("c" * 10_000, 2, "Linux")))
        world.hear("b", joining(torch="9" * 10_000))
        world.hear("a", Refused("w" * 10_000, config=False))
    assert [line.split(":")[0] for line in world.lines] == [
        "node a joined",
        "node b was rejected",
        "node a is lost",
    ]
    assert max(map(len, world.lines)) <= 500


def test_the_workers_of_a_node_that_is_stopped_go_elsewhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped node ends no silent worker, and Linux acknowledges for it: a virtual run waited for ever."""
    monkeypatch.setattr(world, "_reachable", lambda node: True)
    for name in "ab":
        world.ready(name, joining(workers=2))
    world.adopt(Shape(8, 5, 3))
    for number in range(4):
        world.spawn(spawn(number))
    for number in range(2):  # both are silent, but only b ends its worker
        assert world.expel(control.Expel("worker", number, 0)) is None
    ended = control.Departed("worker", 1, 0, "signal 9")
    assert world.hear("b", ended) == [ended]
    assert list(world.receive()) == []
    monkeypatch.setattr("edgefl.hosts.nodes.ENDING_S", -1.0)
    world._next_check_s = time.monotonic()
    why = "node a is lost: it has not ended a process of the run for -1 s, as if it were stopped"
    assert list(world.receive()) == [control.Departed("worker", number, 0, why) for number in (0, 2)]
    world.told("b")
    world.spawn(msgspec.structs.replace(spawn(0), epoch=1))
    assert world.told("b") == [msgspec.structs.replace(spawn(0), epoch=1)]


def test_a_new_server_does_not_wait_for_a_node_that_is_stopped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never confirms that the peers of the killed server have ended."""
    monkeypatch.setattr(world, "_reachable", lambda node: True)
    for name in "ab":
        world.ready(name, joining())
    world.adopt(Shape(8, 5, 3))
    assert list(world.clear(1)) == []
    assert world.hear("b", control.Cleared(1)) == []
    assert list(world.receive()) == []
    monkeypatch.setattr("edgefl.hosts.nodes.ENDING_S", -1.0)
    world._next_check_s = time.monotonic()
    assert list(world.receive()) == [control.Cleared(1)]
    assert [node.name for node in world.agreed] == ["b"]


def test_the_time_for_which_edgefl_serve_itself_was_stopped_does_not_count(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not read the nodes' answers yet when it goes on."""
    monkeypatch.setattr(world, "_reachable", lambda node: True)
    world.ready("a", joining())
    world.adopt(Shape(8, 5, 3))
    world.spawn(spawn(0))
    world.expel(control.Expel("worker", 0, 0))
    world._nodes["a"].ending["worker", 0] -= 100.0
    world._next_check_s = time.monotonic() - 99.0
    assert list(world.receive()) == []
    world._nodes["a"].ending["worker", 0] -= 100.0
    world._next_check_s = time.monotonic()
    assert [type(found) for found in world.receive()] == [control.Departed]


def test_peers_without_a_node_wait_for_one(world: World) -> None:
    world.ready("a", joining())
    world.adopt(Shape(8, 5, 3))
    world.hear("a", control.Refused("gone", config=False))
    world.spawn(spawn(0))
    world.spawn(spawn(1))
    assert world.expel(control.Expel("worker", 1, 0)) == control.Departed(
        "worker", 1, 0, "no node could run it"
    )
    world.ready("b", joining())
    assert world.told("b")[-1] == spawn(0)


def test_a_node_that_comes_late_is_given_the_workers_that_others_have_no_room_for(world: World) -> None:
    world.ready("a", joining(workers=2))
    world.ready("b", joining(workers=2))
    world.adopt(Shape(8, 5, 3))
    for number in range(4):
        world.spawn(spawn(number))
    for gone in world.hear("b", Refused("gone", config=False)):
        assert isinstance(gone, control.Departed)
        world.spawn(msgspec.structs.replace(spawn(gone.peer), epoch=1))
    world.told("a")
    assert world.ready("c", joining(workers=2)) == [control.Gathered(2)]
    assert world.told("a") == [control.Expel("worker", number, 1) for number in (1, 3)]
    for number in (1, 3):
        why = "node c has room for it"  # which is no fault of the task that it had in hand
        ended = world.hear("a", control.Departed("worker", number, 1, "signal 9", 7))
        assert ended == [control.Departed("worker", number, 1, why)]
    for number in (1, 3):
        world.spawn(msgspec.structs.replace(spawn(number), epoch=2))
    assert [one for one in world.told("c") if isinstance(one, control.Spawn)] == [
        msgspec.structs.replace(spawn(number), epoch=2) for number in (1, 3)
    ]
    assert world.ready("d", joining(workers=4)) == [control.Gathered(3)]  # nobody has too many


def test_a_server_that_is_replaced_waits_for_those_nodes_that_are_there(world: World) -> None:
    for name in "ab":
        world.ready(name, joining())
    world.adopt(Shape(8, 5, 3))
    assert list(world.clear(1)) == []
    assert world.ready("late", joining()) == [control.Gathered(3)]
    assert world.hear("a", control.Cleared(1)) == []
    assert world.hear("b", Refused("gone", config=False)) == [control.Cleared(1)]


@pytest.mark.parametrize(
    ("same_bits", "said", "versions", "why"),
    [
        (True, SAME, {"torch": "1.0"}, "it has torch 1.0, but this host has"),
        (False, SAME, {"edgefl": "0.0"}, "it has edgefl 0.0, but this host has"),
        (False, control.Fingerprint("other", "training"), {}, "its data, their split or its first model"),
        (True, control.Fingerprint("data", "other"), {}, "its training steps give different bits"),
        (False, control.Fingerprint("data", "other"), {"torch": "1.0"}, ""),
    ],
)
def test_nodes_that_hold_something_else_are_turned_away(
    same_bits: bool, said: control.Fingerprint, versions: dict[str, str], why: str
) -> None:
    world = begun(same_bits)
    world.hear("a", joining(**versions), messages.Agreed(said, 0.001))
    assert (why in world.lines[-1] and not world.agreed) if why else world.agreed
    world._nodes.clear()
    world.close()


def test_a_node_of_another_edgefl_is_told_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first word may have other fields."""
    answers: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(world._door, "receive", lambda: [(b"a", [b"\xc1"])])
    monkeypatch.setattr(world._door, "send", lambda name, frames: answers.append((name, *frames)))
    assert list(world.receive()) == []
    ((name, answer),) = answers
    (refused,) = msgspec.msgpack.decode(answer, type=list[messages.ToNode])
    why = f"its message is not valid for edgefl {software()['edgefl']}"
    assert (name, refused) == (b"a", Refused(why, config=True))
    assert world.lines == []  # it may say so as often as it likes


def test_clients_are_placed_by_what_each_node_carries() -> None:
    """By its own cores, of which nodes on one machine have a part each, and its own time of a step."""
    world = begun(same_bits=False)
    world.ready("a", joining(4.0, where="one"))
    world.ready("b", joining(4.0, where="one"))
    world.ready("c", joining(4.0, where="two"), step_s=0.002)
    assert [node.cores for node in world.agreed] == [2.0, 2.0, 4.0]
    assert [len(share.peers) for share in world.shares(60)] == [20, 20, 20]
    world.hear("b", Refused("gone", config=False))
    assert [node.cores for node in world.agreed] == [4.0, 4.0]
    world._nodes.clear()
    world.close()


def test_a_node_that_is_a_device_is_one_client_of_its_profile() -> None:
    world = World()
    fleet = Fleet(devices={"pi-4": 2, "moto-g4": 1})
    wanted = Experiment(fleet=fleet, stop=Stop(versions=3))
    world.prepare(control.Prepare(wanted, "", fingerprint=True), same_bits=False)
    list(world.expect(SAME, 0.001))
    world.ready("pi", joining(device="pi-4"))
    assert [share.peers for share in world.shares(3)] == [[0]]  # nobody is there for the others
    world.ready("host", joining())
    assert [share.peers for share in world.shares(3)] == [[0], [1, 2]]
    world.ready("watch", joining(device="watch-a7"))
    assert "this run has no client with the profile watch-a7 that needs a host" in world.lines[-1]
    world.adopt(Shape(8, 5, 3))
    world.ready("another", joining(device="pi-4"))  # the run has begun, and all have a host
    assert "this run has no client with the profile pi-4 that needs a host" in world.lines[-1]
    world.hear("pi", Refused("gone", config=False))
    world.hear("host", Refused("gone", config=False))
    world.spawn(control.Spawn("client", 1, 1, "", "", 0, 1.0))
    world.ready("again", joining(device="pi-4"))
    assert [type(one) for one in world.told("again")] == [control.Prepare, control.Adopt, control.Spawn]
    world._nodes.clear()
    world.close()


def test_the_worst_machine_counts_and_nodes_on_one_are_not_each_others_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "others": 0.5,  # of the far one: here it is 0.7 - 0.5
        "steal": 0.3,
        "throttled": 0.0,
    }


@pytest.mark.parametrize(
    ("bind", "says"),
    [
        ("tcp://0.0.0.0:*", "anybody who reaches it could join"),
        ("0.0.0.0:7000", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:port", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:70000", "port must be from 1 to 65534"),
        ("tcp://127.0.0.1:0", "port must be from 1 to 65534"),
    ],
)
def test_a_door_that_is_none_or_open_to_all_is_one_line(bind: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says), opened(bind, None, 1):
        pass


def test_a_port_that_is_taken_or_whose_next_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for first in (port, port - 1):
            at = f"tcp://127.0.0.1:{first}"
            with pytest.raises(ConfigError, match=r"--bind: tcp://127.0.0.1:\d+: \w"), opened(at, None, 1):
                pass


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["here:7000"], "ADDRESS: must be tcp://HOST:PORT (got 'here:7000')"),
        (["tcp://127.0.0.1"], "ADDRESS: must be tcp://HOST:PORT (got 'tcp://127.0.0.1')"),
        (["tcp://127.0.0.1:*"], "ADDRESS: must be tcp://HOST:PORT (got 'tcp://127.0.0.1:*')"),
        (
            ["tcp://127.0.0.1:99999"],
            "ADDRESS: port must be from 1 to 65534, as the next one is used too (got 99999)",
        ),
        (["tcp://[::1::]:7000"], "tcp://[::1::]:7000: host '[::1::]' not found ("),
        (["tcp://127.0.0.1:7000", "--device", "pi4"], "device profile 'pi4' not found; did you mean 'pi-4'?"),
        (["tcp://127.0.0.1:7000", "--as-is"], "--as-is: needs --device NAME"),
    ],
)
def test_a_node_that_cannot_join_is_one_line_at_once(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"edgefl: {line}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("key", "wants"), [(None, r"a key \(--key FILE\)"), (OTHER, "another key")])
def test_a_node_that_is_not_let_in_says_what_it_lacks(key: keys.Key | None, wants: str) -> None:
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


def test_a_transport_that_nodes_cannot_have_is_a_line_where_somebody_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "one.toml"
    serve = ["serve", str(file), "--bind", "nowhere"]
    for said, arguments, lines in (
        ("", [], 1),
        ("wire", [], 1),
        ("shm", [], 2),
        ("", ["shm"], 2),
        ("shm", ["wire"], 1),
    ):
        server = f'[server]\ntransport = "{said}"\n' if said else ""
        file.write_text(f'[fleet]\ndevices = {{ "pi-4" = 2 }}\n[stop]\nversions = 3\n{server}')
        assert main([*serve, *(f"--set=server.transport={name}" for name in arguments)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == lines
        assert ("server.transport is 'wire' on nodes" in err) == (lines == 2)


def test_a_door_says_where_it_is_and_without_its_keys_there_is_none(tmp_path: Path) -> None:
    with opened("tcp://127.0.0.1:*", None, 1) as nodes:
        assert nodes.address.startswith("tcp://127.0.0.1:")
        assert nodes.door == "tcp://127.0.0.1:*"
    with pytest.raises(ConfigError, match="edgefl keygen"), opened("tcp://127.0.0.1:*", tmp_path, 1):
        pass
    contradicts = pytest.raises(ConfigError, match="--insecure: cannot be combined with --keys")
    with contradicts, opened("tcp://127.0.0.1:*", tmp_path, 1, insecure=True):
        pass


def test_a_run_that_waits_for_more_nodes_than_there_are_keys_is_one_line(tmp_path: Path) -> None:
    keys.make(tmp_path, ["one"])
    says = "1 node key, but the run waits for 2 nodes, each with its own key; to make more: edgefl keygen"
    with pytest.raises(ConfigError, match=says), opened("tcp://127.0.0.1:*", tmp_path, 2):
        pass


def test_on_nodes_numbers_go_over_the_wire() -> None:
    given = Experiment(fleet=WANTED.fleet, stop=WANTED.stop, server=Server())
    assert on_nodes(given, Path()).server.transport == "wire"


NOTHING = Refused("", config=False)
WORDS = msgspec.to_builtins([joining(), messages.Agreed(SAME, 0.001)])


def words(**changed: object) -> bytes:
    """What a node says first, with some of it changed."""
    return msgspec.msgpack.encode(
        [{**word, **{k: v for k, v in changed.items() if k in word}} for word in WORDS]
    )


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\xc1"],
        [msgspec.msgpack.encode([NOTHING]).replace(b"\xa0", b"\xa1\xff")],  # no UTF-8
        [b"\x91\x82\xa4type\xa7refused\xa1x" + b"\x91" * 100_000 + b"\xc0"],
        [words(workers=0)],
        [words(workers=10**9)],
        [words(cores=float("nan"))],
        [words(host_step_s=0.0)],
        [words(host_step_s=float("inf"))],
    ],
)  # fmt: skip
def test_what_is_no_message_costs_the_node_that_says_it(
    world: World, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world._door, "send", lambda *_: None)
    heard = iter([(b"b", [words()]), (b"a", [words()]), (b"a", frames)])
    monkeypatch.setattr(world._door, "receive", lambda: heard)
    world.adopt(Shape(8, 5, 3))
    said = list(world.receive())
    assert said == [control.Gathered(1), control.Gathered(2)]
    assert world.lines[-1] == "node a is lost: it sent an invalid message"
    assert [node.name for node in world.agreed] == ["b"]


@pytest.mark.parametrize(
    "said",
    [
        messages.NodeEnded({}),
        messages.Agreed(SAME, 0.001),
        messages.Agreed(control.Fingerprint("other", "training"), 0.001),
    ],
)
def test_a_node_that_ends_or_agrees_while_it_hosts_peers_is_lost_with_them(
    world: World, said: messages.FromNode
) -> None:
    for name in ("a", "b"):
        world.ready(name, joining())
    world.adopt(Shape(8, 5, 3))
    for number in range(2):
        world.spawn(spawn(number))
    why = "node a is lost: it sent a message at the wrong time"
    assert world.hear("a", said) == [control.Departed("worker", 0, 0, why)]
    assert world.lines[-1] == why
    assert [node.name for node in world.agreed] == ["b"]
    (row,) = world.rows
    assert (row.name, row.lost) == ("a", "it sent a message at the wrong time")


def test_a_node_that_ends_before_it_could_be_compared_is_forgotten() -> None:
    world = World()
    world.prepare(control.Prepare(WANTED, "", fingerprint=True), same_bits=True)
    assert world.hear("a", joining(), messages.Agreed(SAME, 0.001), messages.NodeEnded({})) == []
    assert list(world.expect(SAME, 0.001)) == world.agreed == []
    world.close()


def test_what_clients_would_keep_is_refused_before_anybody_joins() -> None:
    for changes in ({"strategy": {"name": "scaffold"}}, {"server": Server(update_format="int8")}):
        with pytest.raises(ConfigError, match="nodes cannot keep a client's vectors"):
            on_nodes(msgspec.structs.replace(WANTED, **changes), Path())
