"""Tests of coded masks in one process: sums while mask holders are offline, and the file of used masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgefl.errors import ConfigError, RunError
from edgefl.experiment import Experiment, Fleet, Secure, Server, Stop
from edgefl.host.channel import Channel, Refused, pair
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.strategies.fedbuff import FedBuff

pytest.importorskip("cryptography", reason="needs edgefl[secure]")

from edgefl.run import secure_process
from edgefl.run.hidden import HiddenSums, Members, Phones, Trip, phones_secret, rounding_warning
from edgefl.run.hidden_masks import Holders, MaskWriter, holders_of, rules_of
from edgefl.run.secure_parties import SumReply, Used
from edgefl.secure import SecureError

SIZE, CLIENTS, SEED = 100, 9, 3


def test_a_run_that_lost_its_phones_keys_is_refused(tmp_path: Path) -> None:
    wanted = Experiment(
        fleet=Fleet(devices={"pi-4": 2}), server=Server(secure=Secure()), stop=Stop(versions=1)
    )
    secret = phones_secret(wanted, tmp_path, begun=False)
    assert phones_secret(wanted, tmp_path) == phones_secret(wanted, tmp_path, begun=False) == secret
    assert len(secret) == 32
    for damaged in (secret[:5], secret + b"\n"):
        (tmp_path / "phones.key").write_bytes(damaged)
        words = rf"phones\.key: is damaged: it has {len(damaged)} bytes, not 32"
        with pytest.raises(ConfigError, match=words):
            phones_secret(wanted, tmp_path)
    (tmp_path / "phones.key").unlink()
    with pytest.raises(
        ConfigError, match=r"phones\.key is missing: without it, the updates held for the next version"
    ):
        phones_secret(wanted, tmp_path)
    (tmp_path / "phones.key").mkdir()
    with pytest.raises(ConfigError, match=r"phones\.key: cannot be read: Is a directory"):
        phones_secret(wanted, tmp_path)


def test_holders_that_are_offline_do_not_answer(tmp_path: Path) -> None:
    """U = 4 online holders suffice; with fewer, no request is sent. Mutant: offline holders answer."""
    secure = Secure(holders=5, recover=4, private=1, resolution=4)
    rules = rules_of(secure, FedBuff(buffer_size=3), SIZE, CLIENTS)
    buffer = ParameterBuffer.create(Shape(size=SIZE, ring=2, slots=3, extra=rules.overhead_bytes))
    phones, asked = Phones(b"s" * 32, SEED, CLIENTS), []
    holders = Holders(phones, rules, buffer, tmp_path / "used")

    class Process:
        def ask(self, members: Members, online: Sequence[int]) -> SumReply:
            asked.append(holders.reply(members, online))
            return asked[-1]

    writer, rng = MaskWriter(phones, rules), np.random.default_rng(1)
    updates = [rng.uniform(-0.9, 0.9, SIZE).astype(np.float32) for _ in range(3)]
    for client, update in enumerate(updates):
        writer.write(buffer.raw(client), update.copy(), Trip(client, client, None, 1.0))
    sums, members = HiddenSums("masks", rules, Process(), SEED, CLIENTS), [(k, k, 1.0) for k in range(3)]
    first, second, *_ = holders_of(SEED, CLIENTS, rules)
    sums.online = lambda client: client != first
    vector, unit = sums.sum(buffer, members)
    assert np.abs(unit * vector - sum(updates)).max() <= 3 * rules.step + 2.0**-21
    assert [answer.holder for answer in asked[0].answers] == [2, 3, 4, 5]
    sums.online = lambda client: client not in (first, second)
    assert sums.lacks_helpers(buffer, members)
    with pytest.raises(SecureError, match="3 of 5 clients that can unmask the sum are online; 4 are needed"):
        sums.sum(buffer, members)
    assert len(asked) == 1
    buffer.close()


@pytest.mark.parametrize(
    ("deviation", "warns"), [(4.0, ""), (1.0, ""), (0.25, "an error of about"), (0.01, "a sum of zeros")]
)
def test_updates_that_are_small_beside_the_rounding_are_noted(deviation: float, warns: str) -> None:
    """The elements of each update are normally distributed; ``deviation`` is in rounding steps.

    Mutant: the rounding error of a single update is compared with the sum of all updates.
    """
    rules = rules_of(Secure(resolution=4), FedBuff(buffer_size=8), 10_000, 8)
    members = [(client, client, 0.5) for client in range(8)]
    updates = np.random.default_rng(1).normal(0.0, deviation, (8, 10_000))
    total = (4 * rules.step * np.rint(updates).sum(axis=0)).astype(np.float32)
    found = rounding_warning(rules, total, 0.125, members)
    assert warns in found
    assert bool(warns) == bool(found)


def test_a_line_that_a_crash_truncated_is_dropped_and_written_again(tmp_path: Path) -> None:
    """Mutants: the truncated line is parsed, too; the next line is appended to it and is lost."""
    path, first, second = tmp_path / "used", {b"a" * 16: b"x" * 32}, {b"b" * 16: b"y" * 32}
    used = Used(path, [1, 2])
    for party, names in ((1, first), (2, second)):
        used.of[party].update(names)
        used.save()
    path.write_bytes(path.read_bytes()[:-5])
    again = Used(path, [1, 2])
    assert again.of == {1: first, 2: {}}
    again.of[2].update(second)
    again.save()
    assert Used(path, [1, 2]).of == {1: first, 2: second}


def test_a_process_that_cannot_continue_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the process is started again, which cannot help if the disk is full."""
    ours, theirs = pair()
    with theirs, (tmp_path / "buffer").open("wb") as file:
        monkeypatch.setattr(
            secure_process,
            "start_process",
            lambda module, incoming, *_: (None, Channel[Any](ours, incoming)),
        )
        Channel[Any](theirs, Any).tell(Refused("no space left", config=False))
        unknown: Any = None
        buffer: Any = SimpleNamespace(fd=file.fileno())
        process = secure_process.SecureProcess(unknown, tmp_path, 2, unknown, buffer)
        with pytest.raises(RunError, match="no space left"):
            process.ask([], [])
    ours.close()
