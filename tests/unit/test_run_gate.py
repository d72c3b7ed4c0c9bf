"""Tests of the gate: it admits only valid messages, and does not wait for a peer that reads no messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from run_parts import SIZE, Parts, done, ready

from edgefl.run import messages
from edgefl.run.control import CLIENT, EVALUATOR, WORKER, Role
from edgefl.run.gate import MAX_IDLE, MAX_REPEATS, Checked, Refusal, ResendRequest, TaskReturned


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
    """Check that one message was received and refused; return the reason."""
    ((_, message),) = parts.received()
    assert isinstance(message, Refusal)
    assert message.kind == "malformed"
    return message.detail


def test_ready_counts_once_and_only_under_the_peers_own_name(parts: Parts) -> None:
    peer = parts.peer(CLIENT, 1, ready=False)
    parts.say(peer, ready(peer))
    parts.say(peer, ready(peer))
    assert [type(message) for _, message in parts.received()] == [messages.Ready]
    assert peer.ready
    parts.hand.at += 5
    parts.say(peer, messages.Beat())  # it is received but not passed on
    assert parts.received() == []
    assert peer.last_message_s == parts.hand.at
    for message in (ready(peer, peer=2), ready(peer, epoch=1), ready(peer, role="evaluator")):
        parts.say(peer, message)
        assert "on another process's connection" in refused(parts)


def test_a_wrong_password_is_refused_and_so_is_a_result_before_ready(parts: Parts) -> None:
    peer, other = parts.peer(CLIENT, 1, ready=False), parts.peer(EVALUATOR, 0)
    parts.say(peer, ready(peer, password=ready(other).password))
    assert refused(parts) == "wrong password for client 1"
    parts.say(peer, ready(peer, password="é"))
    assert refused(parts) == "wrong password for client 1"
    task, lease = parts.lease(1, holder=1)
    parts.say(peer, done(task, lease, parts.written(task, lease)))
    assert refused(parts) == "Trained arrived before Ready"
    assert not peer.ready


def test_messages_of_unknown_and_expelled_peers_are_ignored(parts: Parts) -> None:
    peer = parts.peer(CLIENT, 0)
    peer.expelled = True
    parts.say(peer, ready(peer))
    parts.socket.incoming.append((b"nobody", [b"hello"]))
    assert parts.received() == []


@pytest.mark.parametrize("invalid", [b"", b"\xc1", b"\x93\x01\x02", bytes(70_000)])
def test_an_invalid_message_is_refused_and_the_next_one_is_received(parts: Parts, invalid: bytes) -> None:
    bad, good = parts.peer(CLIENT, 0), parts.peer(CLIENT, 1, ready=False)
    parts.say(bad, invalid)
    parts.say(good, ready(good))
    (first, refusal), (second, message) = parts.received()
    assert (first, second) == (bad, good)
    assert isinstance(refusal, Refusal)
    assert isinstance(message, messages.Ready)


def test_a_repeated_result_counts_once(parts: Parts) -> None:
    peer = parts.peer(CLIENT, 1)
    peer.deaths_in_a_row = 3
    task, lease = parts.lease(client=1, holder=1)
    result = done(task, lease, parts.written(task, lease))
    parts.say(peer, result)
    assert parts.received() == [(peer, result)]
    assert peer.deaths_in_a_row == 0
    assert len(parts.costs) == 1
    parts.say(peer, result)
    assert parts.received() == []  # sent or delivered twice
    parts.say(peer, done(*parts.lease(client=1, holder=1), 1))
    assert "not written" in refused(parts)


@pytest.mark.parametrize(
    ("changed", "detail"),
    [
        ({"task": 99}, "it does not hold"),
        ({"times": None}, "lacks the times of its trip"),
        ({"checksum": 1}, "whose checksum differs"),
    ],
)
def test_a_result_that_does_not_fit_its_task_or_slot_is_refused(
    parts: Parts, changed: dict[str, int], detail: str
) -> None:
    peer = parts.peer(CLIENT, 1)
    task, lease = parts.lease(client=1, holder=1)
    result = done(task, lease, parts.written(task, lease))
    parts.say(peer, msgspec.structs.replace(result, **changed))
    assert detail in refused(parts)


def test_a_result_of_another_version_returns_its_task_with_the_reason(parts: Parts) -> None:
    peer = parts.peer(CLIENT, 1)
    task, lease = parts.lease(client=1, holder=1)
    parts.say(peer, done(task, lease, parts.written(task, lease), trained_version=7))
    ((_, message),) = parts.received()
    assert message == TaskReturned(1, task, "version", f"task {task}: trained version 7 instead of 0")


def test_results_are_accepted_only_from_the_holder_of_the_task(parts: Parts) -> None:
    holder, other = parts.peer(WORKER, 1), parts.peer(WORKER, 0)
    client, evaluator = parts.peer(CLIENT, 1), parts.peer(EVALUATOR, 0)
    task, lease = parts.lease(client=2, holder=1)
    result = done(task, lease, parts.written(task, lease), times=None)
    for peer, why in ((other, "does not hold"), (client, "times"), (evaluator, "does not hold")):
        parts.say(peer, result)
        assert why in refused(parts)
    parts.say(other, messages.Gone(2, task, "cannot"))
    assert parts.received() == []
    parts.say(holder, result)
    assert parts.received() == [(holder, result)]


def test_results_before_an_invalid_one_in_a_message_count(parts: Parts) -> None:
    worker = parts.peer(WORKER, 0)
    (task, lease), (unwritten, other) = parts.lease(client=0, holder=0), parts.lease(client=1, holder=0)
    good = done(task, lease, parts.written(task, lease), times=None)
    parts.say(worker, messages.Trained([good, done(unwritten, other, 1, times=None)]))
    first, second = parts.received()
    assert first == (worker, good)
    assert isinstance(second[1], Refusal)


@pytest.mark.parametrize(
    ("reason", "kind"), [("cancelled", ""), ("ValueError: no", "failed"), ("x" * 900, "failed")]
)
def test_a_returned_task_has_a_reason_of_at_most_500_characters(parts: Parts, reason: str, kind: str) -> None:
    peer = parts.peer(CLIENT, 1)
    task, _ = parts.lease(client=1, holder=1)
    parts.say(peer, messages.Gone(1, task, reason))
    assert parts.received() == [(peer, TaskReturned(1, task, kind, reason[:500]))]
    parts.say(peer, messages.Gone(1, task, reason))  # the task has ended
    assert parts.received() == []


def test_evaluations_are_accepted_only_from_the_evaluator(parts: Parts) -> None:
    answer = messages.Assessed(0, 0.5, 0.5, [1], [2], {}, messages.NO_SCORES, "")
    parts.say(parts.peer(CLIENT, 0), answer)
    assert refused(parts) == "client 0 is not an evaluator"
    evaluator = parts.peer(EVALUATOR, 0)
    evaluator.deaths_in_a_row = 3
    parts.say(evaluator, answer)
    assert parts.received() == [(evaluator, answer)]
    assert evaluator.deaths_in_a_row == 0  # it works


def test_chunks_of_an_update_are_written_into_the_senders_slot(parts: Parts, wired: Parts) -> None:
    task, lease = parts.lease(client=1, holder=1)
    parts.say(parts.peer(CLIENT, 1), messages.Chunk(task, lease.slot, 0), bytes(4))
    assert "but this run uses shared memory" in refused(parts)
    peer, other = wired.peer(CLIENT, 1), wired.peer(CLIENT, 2)
    task, lease = wired.lease(client=1, holder=1)
    body = np.arange(SIZE, dtype=np.float32).tobytes()
    wired.say(other, messages.Chunk(task, lease.slot, 0), body)
    assert "it does not hold" in refused(wired)
    wired.say(peer, messages.Chunk(task, lease.slot, 0))
    assert "1 payload frame (got 0)" in refused(wired)
    assert not wired.buffer.slot(lease.slot).any()
    wired.say(peer, messages.Chunk(task, lease.slot, 0), body)
    assert wired.received() == []
    assert wired.buffer.slot(lease.slot).tobytes() == body
    result = done(task, lease, 5)
    wired.say(peer, result)
    assert wired.received() == [(peer, result)]
    assert int(wired.buffer.checksum[lease.slot]) == 5  # compared with what the sum reads


def test_a_peer_that_does_not_read_is_refused_and_one_that_has_gone_is_not(parts: Parts) -> None:
    stuck, gone, well = (parts.peer(CLIENT, number) for number in range(3))
    parts.socket.full.add(stuck.identity)
    parts.socket.gone.add(gone.identity)
    parts.gate.dismiss(CLIENT)
    assert parts.socket.sent_to(well) == [messages.Bye()]
    parts.gate.wait(1000)
    assert parts.socket.waited_ms == [0]  # there is already something to report
    assert parts.received() == [(stuck, Refusal("hang", "does not read its messages"))]
    parts.gate.wait(1000)
    assert parts.socket.waited_ms == [0, 1000]


def test_a_peer_that_did_not_read_is_not_refused_once_it_is_replaced_or_removed(parts: Parts) -> None:
    stuck = [parts.peer(CLIENT, number) for number in range(2)]
    parts.socket.full |= {peer.identity for peer in stuck}
    parts.gate.dismiss(CLIENT)
    parts.peers.expect(CLIENT, 0, epoch=1)
    parts.peers.remove(CLIENT, 1, epoch=0)
    assert parts.received() == []


def test_over_the_wire_an_update_counts_once_and_only_after_its_chunks(wired: Parts) -> None:
    client, worker = wired.peer(CLIENT, 1), wired.peer(WORKER, 1)
    task, lease = wired.lease(client=1, holder=1)
    body, result = bytes(4 * SIZE), done(task, lease, 5)
    wired.say(client, messages.Chunk(task, lease.slot, 0), body)
    wired.say(client, result)
    assert wired.received() == [(client, result)]
    wired.say(client, messages.Chunk(task, lease.slot, 0), b"late")
    wired.say(client, messages.Gone(1, task, "late"))
    assert wired.received() == []
    assert wired.buffer.slot(lease.slot).tobytes() == body
    another, lease = wired.lease(client=2, holder=1)
    result = done(another, lease, 1, times=None)
    wired.say(worker, result)
    assert wired.received() == []  # it has overtaken the chunks
    wired.say(worker, messages.Chunk(another, lease.slot, 0), body)
    for expected in ([(worker, result)], []):
        wired.say(worker, result)
        assert wired.received() == expected


@pytest.mark.parametrize("role", [CLIENT, WORKER, EVALUATOR])
def test_a_peer_that_repeats_ready_after_an_order_needs_it_again(parts: Parts, role: Role) -> None:
    peer, order = parts.peer(role, 1), parts.order(1)
    for _ in range(2):
        parts.gate.send(peer, order)
        parts.gate.send(peer, messages.Withdraw([9]))  # no order
        for _ in range(MAX_REPEATS):
            parts.say(peer, ready(peer))
        assert parts.received() == []  # they may have been sent before the order arrived
        parts.say(peer, ready(peer))
        assert parts.received() == [(peer, ResendRequest())]


@pytest.mark.parametrize("what", ["beats", "ready", "gone", "done", "chunks"])
def test_a_flood_of_valid_messages_is_refused(wired: Parts, what: str) -> None:
    peer = wired.peer(CLIENT, 1)
    task, lease = wired.lease(client=1, holder=1 if what in ("done", "chunks") else -1)
    if what == "done":
        wired.say(peer, done(task, lease, 5))
        assert len(wired.received()) == 1
    sent: dict[str, messages.FromClient | messages.TaskResult] = {
        "beats": messages.Beat(), "ready": ready(peer), "gone": messages.Gone(2, 99, "cannot"),
        "done": done(task, lease, 5), "chunks": messages.Chunk(task, lease.slot, 0),
    }  # fmt: skip
    payload = [bytes(1)] if what == "chunks" else []
    for _ in range(MAX_IDLE):
        wired.say(peer, sent[what], *payload)
    assert {type(message) for _, message in wired.received()} <= {ResendRequest}
    list(wired.peers.silent(5.0))  # a check for silent peers resets the count
    for _ in range(MAX_IDLE + 1):
        wired.say(peer, sent[what], *payload)
    *_, (_, refusal) = wired.received()
    assert isinstance(refusal, Refusal)
    assert refusal.kind == "malformed"


def test_results_of_many_tasks_are_no_flood(parts: Parts) -> None:
    peer, received = parts.peer(CLIENT, 1), 0
    for _ in range(MAX_IDLE + 1):
        task, lease = parts.lease(client=1, holder=1)
        order = messages.Task(1, task, 0, 0, lease.entry, lease.slot, None, None, order=task)
        parts.gate.send(peer, messages.Tasks([order]))
        parts.say(peer, done(task, lease, parts.written(task, lease)))
        received += [type(message) for _, message in parts.received()] == [messages.TaskResult]
        parts.aggregator.release(task)
    assert received == MAX_IDLE + 1


def test_repeated_ready_messages_are_a_flood_even_if_each_is_answered(parts: Parts) -> None:
    peer, order, received = parts.peer(CLIENT, 1), parts.order(1), list[Checked]()
    for _ in range(MAX_IDLE + 1):
        parts.say(peer, ready(peer))
        for _, message in parts.received():
            parts.gate.send(peer, order)
            received.append(message)
    assert len(received) == MAX_IDLE // (MAX_REPEATS + 1) + 1
    assert isinstance(received[-1], Refusal)
    assert received[-1].detail.endswith("messages in a row without effect")
