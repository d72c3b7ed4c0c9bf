"""The gate: what comes in is let through only if it fits, and what goes out waits for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from run_parts import SIZE, Parts, done, ready

from edgefl.run import messages
from edgefl.run.control import CLIENT, EVALUATOR, WORKER, Role
from edgefl.run.gate import MOST_IDLE, MOST_REPEATS, Checked, Refusal, ResendRequest, TaskReturned


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path)
    yield made
    made.close()


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[Parts]:
    (tmp_path / "wire").mkdir()
    made = Parts(tmp_path / "wire", transport="wire")
    yield made
    made.close()


def refused(parts: Parts) -> str:
    """The detail of the one message that was refused."""
    ((_, message),) = parts.received()
    assert isinstance(message, Refusal)
    assert message.kind == "malformed"
    return message.detail


def test_a_peer_is_ready_once_and_as_itself_only(parts: Parts) -> None:
    peer = parts.peer(CLIENT, 1, ready=False)
    parts.say(peer, ready(peer))
    parts.say(peer, ready(peer))
    assert [type(message) for _, message in parts.received()] == [messages.Ready]
    assert peer.ready
    parts.hand.at += 5
    parts.say(peer, messages.Beat())  # it is heard and says nothing
    assert parts.received() == []
    assert peer.last_message_s == parts.hand.at
    for message in (ready(peer, peer=2), ready(peer, epoch=1), ready(peer, role="evaluator")):
        parts.say(peer, message)
        assert "on another process's connection" in refused(parts)


def test_nobody_answers_for_a_peer_whose_password_it_does_not_know(parts: Parts) -> None:
    peer, other = parts.peer(CLIENT, 1, ready=False), parts.peer(EVALUATOR, 0)
    parts.say(peer, ready(peer, password=ready(other).password))
    assert refused(parts) == "wrong password for client 1"
    task, lease = parts.lease(1, holder=1)
    parts.say(peer, done(task, lease, parts.written(task, lease)))
    assert refused(parts) == "Trained arrived before Ready"
    assert not peer.ready


def test_strangers_and_expelled_peers_are_not_heard(parts: Parts) -> None:
    peer = parts.peer(CLIENT, 0)
    peer.expelled = True
    parts.say(peer, ready(peer))
    parts.socket.incoming.append((b"nobody", [b"hello"]))
    assert parts.received() == []


@pytest.mark.parametrize("rubbish", [b"", b"\xc1", b"\x93\x01\x02", bytes(70_000)])
def test_rubbish_is_refused_and_what_comes_behind_it_is_heard(parts: Parts, rubbish: bytes) -> None:
    bad, good = parts.peer(CLIENT, 0), parts.peer(CLIENT, 1, ready=False)
    parts.say(bad, rubbish)
    parts.say(good, ready(good))
    (first, refusal), (second, message) = parts.received()
    assert (first, second) == (bad, good)
    assert isinstance(refusal, Refusal)
    assert isinstance(message, messages.Ready)


def test_a_whole_update_comes_through_once(parts: Parts) -> None:
    peer = parts.peer(CLIENT, 1)
    peer.deaths_in_a_row = 3
    task, lease = parts.lease(client=1, holder=1)
    said = done(task, lease, parts.written(task, lease))
    parts.say(peer, said)
    assert parts.received() == [(peer, said)]
    assert peer.deaths_in_a_row == 0
    assert len(parts.costs) == 1
    parts.say(peer, said)
    assert parts.received() == []  # it came twice, or was said twice: it counts once
    parts.say(peer, done(*parts.lease(client=1, holder=1), 1))
    assert "not written" in refused(parts)


@pytest.mark.parametrize(
    ("changed", "detail"),
    [
        ({"task": 99}, "the sender does not hold"),
        ({"times": None}, "lacks the times of its trip"),
        ({"checksum": 1}, "whose checksum differs"),
    ],
)
def test_an_update_unlike_its_slot_is_refused(parts: Parts, changed: dict[str, int], detail: str) -> None:
    peer = parts.peer(CLIENT, 1)
    task, lease = parts.lease(client=1, holder=1)
    said = done(task, lease, parts.written(task, lease))
    parts.say(peer, msgspec.structs.replace(said, **changed))
    assert detail in refused(parts)


def test_an_update_from_another_version_is_given_back_with_a_word(parts: Parts) -> None:
    peer = parts.peer(CLIENT, 1)
    task, lease = parts.lease(client=1, holder=1)
    parts.say(peer, done(task, lease, parts.written(task, lease), trained_version=7))
    ((_, message),) = parts.received()
    assert message == TaskReturned(1, task, "version", f"task {task}: trained version 7 instead of 0")


def test_only_the_holder_of_a_task_speaks_of_it(parts: Parts) -> None:
    holder, other = parts.peer(WORKER, 1), parts.peer(WORKER, 0)
    client, evaluator = parts.peer(CLIENT, 1), parts.peer(EVALUATOR, 0)
    task, lease = parts.lease(client=2, holder=1)
    result = messages.TaskResult(task, 0, 2, 0.5, parts.written(task, lease), 0.1, 20.0, {})
    for peer, why in ((other, "does not hold"), (client, "times"), (evaluator, "does not hold")):
        parts.say(peer, messages.Trained([result]))
        assert why in refused(parts)
    parts.say(other, messages.Gone(2, task, "cannot"))
    assert parts.received() == []
    parts.say(holder, messages.Trained([result]))
    assert parts.received() == [(holder, result)]


def test_results_before_a_bad_one_of_the_same_message_count(parts: Parts) -> None:
    worker = parts.peer(WORKER, 0)
    (task, lease), (unwritten, other) = parts.lease(client=0, holder=0), parts.lease(client=1, holder=0)
    good = messages.TaskResult(task, 0, 2, 0.5, parts.written(task, lease), 0.1, 20.0, {})
    parts.say(
        worker,
        messages.Trained(
            [good, messages.TaskResult(unwritten, 0, 2, 0.5, 1, 0.1, 20.0, {}, order=other.order)]
        ),
    )
    first, second = parts.received()
    assert first == (worker, good)
    assert isinstance(second[1], Refusal)


@pytest.mark.parametrize(
    ("reason", "kind"), [("cancelled", ""), ("ValueError: no", "failed"), ("x" * 900, "failed")]
)
def test_a_task_that_is_given_back_says_why_in_bounds(parts: Parts, reason: str, kind: str) -> None:
    peer = parts.peer(CLIENT, 1)
    task, _ = parts.lease(client=1, holder=1)
    parts.say(peer, messages.Gone(1, task, reason))
    assert parts.received() == [(peer, TaskReturned(1, task, kind, reason[:500]))]
    parts.say(peer, messages.Gone(1, task, reason))  # it is over: nobody waits for it
    assert parts.received() == []


def test_only_the_evaluator_measures(parts: Parts) -> None:
    answer = messages.Assessed(0, 0.5, 0.5, [1], [2], {}, messages.NO_SCORES, "")
    parts.say(parts.peer(CLIENT, 0), answer)
    assert refused(parts) == "client 0 is not an evaluator"
    evaluator = parts.peer(EVALUATOR, 0)
    evaluator.deaths_in_a_row = 3
    parts.say(evaluator, answer)
    assert parts.received() == [(evaluator, answer)]
    assert evaluator.deaths_in_a_row == 0  # it is one that works


def test_parts_of_an_update_go_into_the_slot_of_their_sender(parts: Parts, wired: Parts) -> None:
    task, lease = parts.lease(client=1, holder=1)
    parts.say(parts.peer(CLIENT, 1), messages.Chunk(task, lease.slot, 0), bytes(4))
    assert "but this run uses shared memory" in refused(parts)
    peer, other = wired.peer(CLIENT, 1), wired.peer(CLIENT, 2)
    task, lease = wired.lease(client=1, holder=1)
    body = np.arange(SIZE, dtype=np.float32).tobytes()
    wired.say(other, messages.Chunk(task, lease.slot, 0), body)
    assert "the sender does not hold" in refused(wired)
    wired.say(peer, messages.Chunk(task, lease.slot, 0))
    assert "1 payload frame (got 0)" in refused(wired)
    assert not wired.buffer.slot(lease.slot).any()
    wired.say(peer, messages.Chunk(task, lease.slot, 0), body)
    assert wired.received() == []
    assert wired.buffer.slot(lease.slot).tobytes() == body
    said = done(task, lease, 5)
    wired.say(peer, said)
    assert wired.received() == [(peer, said)]
    assert int(wired.buffer.checksum[lease.slot]) == 5  # compared with what the sum reads


def test_a_peer_that_takes_nothing_is_refused_and_one_that_is_gone_is_not(parts: Parts) -> None:
    stuck, gone, well = (parts.peer(CLIENT, number) for number in range(3))
    parts.socket.full.add(stuck.identity)
    parts.socket.gone.add(gone.identity)
    parts.gate.dismiss(CLIENT)
    assert parts.socket.told(well) == [messages.Bye()]
    parts.gate.wait(1000)
    assert parts.socket.waited_ms == [0]  # there is something to say at once
    assert parts.received() == [(stuck, Refusal("hang", "does not read its messages"))]
    parts.gate.wait(1000)
    assert parts.socket.waited_ms == [0, 1000]


def test_a_peer_that_took_nothing_and_is_replaced_or_dead_by_now_is_not_refused(parts: Parts) -> None:
    stuck = [parts.peer(CLIENT, number) for number in range(2)]
    parts.socket.full |= {peer.identity for peer in stuck}
    parts.gate.dismiss(CLIENT)
    parts.peers.expect(CLIENT, 0, epoch=1)
    parts.peers.remove(CLIENT, 1, epoch=0)
    assert parts.received() == []


def test_an_update_counts_once_however_often_and_late_it_is_said(wired: Parts) -> None:
    client, worker = wired.peer(CLIENT, 1), wired.peer(WORKER, 1)
    task, lease = wired.lease(client=1, holder=1)
    body, said = bytes(4 * SIZE), done(task, lease, 5)
    wired.say(client, messages.Chunk(task, lease.slot, 0), body)
    wired.say(client, said)
    assert wired.received() == [(client, said)]
    wired.say(client, messages.Chunk(task, lease.slot, 0), b"late")
    wired.say(client, messages.Gone(1, task, "late"))
    assert wired.received() == []
    assert wired.buffer.slot(lease.slot).tobytes() == body
    another, lease = wired.lease(client=2, holder=1)
    result = messages.TaskResult(another, 0, 2, 0.5, 1, 0.1, 20.0, {}, order=lease.order)
    wired.say(worker, messages.Trained([result]))
    assert wired.received() == []  # it has overtaken the parts
    wired.say(worker, messages.Chunk(another, lease.slot, 0), body)
    for expected in ([(worker, result)], []):
        wired.say(worker, messages.Trained([result]))
        assert wired.received() == expected


@pytest.mark.parametrize("role", [CLIENT, WORKER, EVALUATOR])
def test_who_was_given_an_order_and_still_says_its_last_word_has_missed_it(parts: Parts, role: Role) -> None:
    peer, order = parts.peer(role, 1), parts.order(1)
    for _ in range(2):
        parts.gate.send(peer, order)
        parts.gate.send(peer, messages.Withdraw([9]))  # no order
        for _ in range(MOST_REPEATS):
            parts.say(peer, ready(peer))
        assert parts.received() == []  # these may have crossed with it
        parts.say(peer, ready(peer))
        assert parts.received() == [(peer, ResendRequest())]


@pytest.mark.parametrize("what", ["beats", "ready", "gone", "done", "parts"])
def test_a_flood_of_what_is_allowed_is_refused(wired: Parts, what: str) -> None:
    peer = wired.peer(CLIENT, 1)
    task, lease = wired.lease(client=1, holder=1 if what in ("done", "parts") else -1)
    part = messages.Chunk(task, lease.slot, 0)
    if what == "done":
        wired.say(peer, done(task, lease, 5))
        assert len(wired.received()) == 1
    said: dict[str, messages.FromClient | messages.TaskResult] = {
        "beats": messages.Beat(), "ready": ready(peer), "gone": messages.Gone(2, 99, "cannot"),
        "done": done(task, lease, 5), "parts": part,
    }  # fmt: skip
    payload = [bytes(1)] if what == "parts" else []
    for _ in range(MOST_IDLE):
        wired.say(peer, said[what], *payload)
    assert {type(message) for _, message in wired.received()} <= {ResendRequest}
    list(wired.peers.silent(5.0))  # a look at the peers: from now on it may speak again
    for _ in range(MOST_IDLE + 1):
        wired.say(peer, said[what], *payload)
    *_, (_, refusal) = wired.received()
    assert isinstance(refusal, Refusal)
    assert refusal.kind == "malformed"


def test_one_that_does_task_after_task_is_no_flood(parts: Parts) -> None:
    peer, said = parts.peer(CLIENT, 1), 0
    for _ in range(MOST_IDLE + 1):
        task, lease = parts.lease(client=1, holder=1)
        order = messages.Task(1, task, 0, 0, lease.entry, lease.slot, None, None, order=task)
        parts.gate.send(peer, messages.Tasks([order]))
        parts.say(peer, done(task, lease, parts.written(task, lease)))
        said += [type(message) for _, message in parts.received()] == [messages.TaskResult]
        parts.aggregator.release(task)
    assert said == MOST_IDLE + 1


def test_a_flood_is_one_also_of_a_client_that_is_given_its_task_again_and_again(parts: Parts) -> None:
    peer, order, heard = parts.peer(CLIENT, 1), parts.order(1), list[Checked]()
    for _ in range(MOST_IDLE + 1):
        parts.say(peer, ready(peer))
        for _, message in parts.received():
            parts.gate.send(peer, order)
            heard.append(message)
    assert len(heard) == MOST_IDLE // (MOST_REPEATS + 1) + 1
    assert isinstance(heard[-1], Refusal)
    assert heard[-1].detail.endswith("messages in a row without effect")
