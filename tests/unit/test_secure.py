"""Tests of secure aggregation with coded masks: sums are exact, and each misuse is refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl import kernels
from edgefl.kernels.field import PRIME, Words

pytest.importorskip("cryptography", reason="needs edgefl[secure]")

from benchmarks.secure_equality import Trial, is_right
from edgefl.secure import SecureError, masks
from edgefl.secure.coded import Answer, Holder, Member, Request, Rules, Sender, unmasked
from edgefl.secure.coding import Code
from edgefl.secure.fixed import LARGEST_SUM, FixedPoint, integer_weights
from edgefl.secure.keys import KeyPair

SIZE = 1001


@pytest.mark.parametrize("clip", [1e-6, 0.1, 1.0, 3.7, 1e6])
@pytest.mark.parametrize("total_weight", [1, 10, 640, 100 * 255])
def test_the_error_of_a_sum_is_within_half_a_step_per_weight(clip: float, total_weight: int) -> None:
    """The sum is compared with exact arithmetic. Truncation instead of rounding would double the error."""
    fixed, rng = FixedPoint(clip, total_weight), np.random.default_rng(1)
    weights = [total_weight // 2, total_weight - total_weight // 2]
    assert fixed.total_weight * fixed.levels <= LARGEST_SUM < 4 * fixed.total_weight * fixed.levels
    updates = [(clip * rng.uniform(-1, 1, 300)).astype(np.float32) for _ in weights]
    updates[0][:2] = [np.float32(clip), -np.float32(clip)]
    encoded = [np.zeros(300, np.uint32) for _ in weights]
    for words, update in zip(encoded, updates, strict=True):
        assert fixed.encode(words, update, words) <= 300
    total, out = np.empty(300, np.uint32), np.empty(300, np.float32)
    kernels.field_sum(total, encoded, weights)
    fixed.decode(out, total, np.zeros_like(total), weights)
    for i in range(300):
        exact = sum(n * Fraction(float(u[i])) for n, u in zip(weights, updates, strict=True))
        bound = Fraction(fixed.step) * total_weight / 2 + abs(exact) / 2**23
        assert abs(Fraction(float(out[i])) - exact) <= bound


def test_elements_above_the_clip_are_clipped_and_counted() -> None:
    fixed, out = FixedPoint(0.5, 10), np.zeros(3, np.uint32)
    assert fixed.encode(out, np.array([0.75, -9, 0.25], np.float32), out) == 2
    decoded = np.empty(3, np.float32)
    fixed.decode(decoded, out, np.zeros(3, np.uint32), [1])
    assert decoded.tolist() == [0.5, -0.5, 0.25]


def test_integer_weights_are_within_half_a_unit_and_exact_if_weights_are_equal() -> None:
    weights = [(1 + tau) ** -0.5 / 10 for tau in range(21)]
    whole, unit = integer_weights(weights, 64)
    assert max(abs(n * unit - w) for n, w in zip(whole, weights, strict=True)) <= unit / 2
    assert integer_weights([0.1, 0.1], 64) == ([64, 64], 0.1 / 64)
    for wrong in ([], [0.0, 0.0], [1.0, -1.0], [float("nan")]):
        with pytest.raises(ValueError, match="weights must"):
            integer_weights(wrong, 64)


def test_masks_are_uniform_below_p_and_differ_by_seed() -> None:
    mask = masks.expand(bytes(32), 1 << 17)
    assert not np.array_equal(mask, masks.expand(bytes(31) + b"\1", 1 << 17))
    counts = np.bincount(mask >> np.uint32(28), minlength=16)
    assert abs(counts / 2**13 - 1).max() < 0.1
    assert np.array_equal(mask[:70_000], masks.expand(bytes(32), 70_000))


def test_words_of_p_or_more_are_replaced_by_uniform_ones() -> None:
    words = np.array([PRIME, 5, PRIME + 4, PRIME - 1], np.uint32)
    masks._Spare(bytes(32)).replace(words)
    assert words[[1, 3]].tolist() == [5, PRIME - 1]
    assert words.max() < PRIME
    assert words[0] != words[2]


@pytest.mark.parametrize("updates", [10, 100])
def test_masked_sums_equal_integer_sums_whichever_holders_are_lost(updates: int, tmp_path: Path) -> None:
    trial = Trial(SIZE, updates, tmp_path)
    sums, answers = trial.sums(), list(trial.answers())
    for rest in (answers, answers[1:], answers[3:], answers[:-3]):
        assert is_right(trial.errors(sums, rest))
    with pytest.raises(SecureError, match="6 holders answered; 7 are needed"):
        trial.errors(sums, answers[4:])


@pytest.mark.parametrize("wrong", ["truncates", "doubles"])
def test_the_benchmark_detects_wrong_sums(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoding rounds towards zero, or a client sends twice its update."""
    trial, encode, mask = Trial(SIZE, 10, tmp_path), FixedPoint.encode, Sender.mask

    def truncate(self: FixedPoint, out: Words, update: Any, words: Words) -> int:
        return encode(self, out, np.trunc(update / np.float32(self.step)) * np.float32(self.step), words)

    def double(self: Sender, out: Any, update: Any, trip: int) -> Any:
        return mask(self, out, update if self._client else 2 * update, trip)

    if wrong == "truncates":
        monkeypatch.setattr(FixedPoint, "encode", truncate)
    else:
        monkeypatch.setattr(Sender, "mask", double)
    sums = trial.sums()
    assert not is_right(trial.errors(sums, list(trial.answers())))


def test_any_shares_recover_a_weighted_sum_of_vectors() -> None:
    code, rng = Code(size=SIZE, holders=7, recover=5, private=2), np.random.default_rng(2)
    vectors = [rng.integers(0, PRIME, SIZE, dtype=np.uint32) for _ in range(3)]
    shares = [code.shares(v, rng.integers(0, PRIME, code.noise_size, dtype=np.uint32)) for v in vectors]
    weights = [1, 64, PRIME - 3]
    summed = {}
    for holder in range(7):
        summed[holder + 1] = np.empty(code.share_size, np.uint32)
        kernels.field_sum(summed[holder + 1], [s[holder] for s in shares], weights)
    expected = np.empty(SIZE, np.uint32)
    kernels.field_sum(expected, vectors, weights)
    for lost in ((), (1,), (1, 2), (3, 7), (5, 6)):
        rest = {holder: share for holder, share in summed.items() if holder not in lost}
        assert np.array_equal(code.recovered(rest), expected)


def test_t_shares_reveal_nothing_about_the_vector() -> None:
    """Any T shares of a vector are also the shares of every other vector, with some other noise."""
    code = Code(size=2, holders=4, recover=3, private=2)
    zero, other = np.zeros(2, np.uint32), np.array([7, 9], np.uint32)
    for pair in ((0, 1), (1, 3), (2, 3)):
        basis = []
        for place in range(code.noise_size):
            noise = np.zeros(code.noise_size, np.uint32)
            noise[place] = 1
            basis.append([int(code.shares(zero, noise)[h][i]) for h in pair for i in range(code.share_size)])
        without = np.zeros(code.noise_size, np.uint32)
        target = [-int(code.shares(other, without)[h][i]) for h in pair for i in range(code.share_size)]
        noise = np.array(solved(basis, target), np.uint32)
        shares = code.shares(other, noise)
        assert all(not shares[h].any() for h in pair)


def solved(columns: list[list[int]], target: list[int]) -> list[int]:
    """Return x with Σ x_j · columns[j] = target modulo p, by Gaussian elimination; fail if singular."""
    n = len(target)
    rows = [[columns[j][i] for j in range(n)] + [target[i] % PRIME] for i in range(n)]
    for i in range(n):
        pivot = next(r for r in range(i, n) if rows[r][i] % PRIME)
        rows[i], rows[pivot] = rows[pivot], rows[i]
        factor = pow(rows[i][i], -1, PRIME)
        rows[i] = [value * factor % PRIME for value in rows[i]]
        for r in range(n):
            if r != i:
                rows[r] = [(a - rows[r][i] * b) % PRIME for a, b in zip(rows[r], rows[i], strict=True)]
    return [row[n] for row in rows]


class Buffer:
    """Clients 0 … count−1, each of which has sent one update; the holders of their masks; and the request for
    the sum."""

    def __init__(self, count: int = 4, *, clip: float = 4.0, staleness: int = 3, **rules: int) -> None:
        numbers = {"holders": 5, "recover": 4, "private": 1, "least": 3, "resolution": 64} | rules
        code = Code(SIZE, numbers["holders"], numbers["recover"], numbers["private"])
        self.resolution = numbers["resolution"]
        fixed = FixedPoint(clip, count * self.resolution)
        self.rules = Rules(code, fixed, self.resolution, numbers["least"])
        self.keys = [KeyPair.new() for _ in range(count)]
        holder_keys = {number: KeyPair.new() for number in range(1, code.holders + 1)}
        publics = {number: keys.public for number, keys in holder_keys.items()}
        self.holders = [
            Holder(number, keys, {k: key.public for k, key in enumerate(self.keys)}.get, self.rules)
            for number, keys in holder_keys.items()
        ]
        self.senders = [Sender(k, key, publics, self.rules) for k, key in enumerate(self.keys)]
        rng = np.random.default_rng(count)
        self.updates = [rng.uniform(-clip, clip, SIZE).astype(np.float32) for _ in range(count)]
        floats = [(1 + k % (staleness + 1)) ** -0.5 for k in range(count)]
        self.weights, self.unit = integer_weights(floats, self.resolution)
        self.masked = [np.empty(SIZE, np.uint32) for _ in range(count)]
        sent = [s.mask(m, u, 0) for s, m, u in zip(self.senders, self.masked, self.updates, strict=True)]
        self.names, self.sealed = [name for name, _ in sent], [sealed for _, sealed in sent]

    def members(self, holder: int) -> list[Member]:
        parts = zip(self.names, self.weights, self.sealed, strict=True)
        return [Member(k, name, n, sealed[holder - 1]) for k, (name, n, sealed) in enumerate(parts)]

    def answers(self, **changes: Any) -> list[Answer]:
        """Return the holders' answers; ``changes`` apply to member 1 of each request."""
        found = []
        for holder in self.holders:
            members = self.members(holder.number)
            members[1] = msgspec.structs.replace(members[1], **changes)
            encoded = msgspec.msgpack.encode(Request(members))
            found.append(holder.answer(msgspec.msgpack.decode(encoded, type=Request)))
        return found

    def sum(self, answers: list[Answer], masked: list[Words] | None = None) -> Any:
        return unmasked(self.rules, masked or self.masked, self.weights, answers)


def refused(buffer: Buffer, why: str, **changes: Any) -> None:
    """Check that each holder refuses the request, so that no sum is revealed."""
    answers = buffer.answers(**changes)
    with pytest.raises(SecureError, match=why):
        buffer.sum(answers)
    assert not any(answer.share for answer in answers)


def test_a_masked_sum_is_the_plain_sum_to_the_step() -> None:
    """The staleness of the updates is 0 to 20, and 30% of the holders are offline."""
    buffer = Buffer(10, staleness=20, holders=10, recover=7, private=2)
    made = buffer.sum(buffer.answers()[3:])
    pairs = zip(buffer.weights, buffer.updates, strict=True)
    plain = np.sum([n * u.astype(np.float64) for n, u in pairs], axis=0)
    bound = buffer.rules.fixed.step * sum(buffer.weights) / 2 + 2.0**-23 * np.abs(plain)
    assert (np.abs(made - plain) <= bound).all()


def test_a_mask_is_used_for_one_update_of_one_trip() -> None:
    """If a mask depended on the trip alone, the difference of two updates would be visible."""
    buffer = Buffer()
    again, changed = np.empty(SIZE, np.uint32), buffer.updates[0].copy()
    changed[0] += 0.5
    for update, trip in ((buffer.updates[0], 1), (changed, 0)):
        name, _ = buffer.senders[0].mask(again, update, trip)
        assert np.count_nonzero(again == buffer.masked[0]) < 3
        assert name != buffer.names[0]


def test_a_repeated_trip_sends_the_same_bytes() -> None:
    buffer, again = Buffer(), np.empty(SIZE, np.uint32)
    name, sealed = buffer.senders[0].mask(again, buffer.updates[0], 0)
    assert (name, sealed) == (buffer.names[0], buffer.sealed[0])
    assert np.array_equal(again, buffer.masked[0])


def test_a_masked_update_does_not_show_the_update() -> None:
    buffer = Buffer()
    plain = np.zeros(SIZE, np.uint32)
    buffer.rules.fixed.encode(plain, buffer.updates[0], plain)
    assert np.count_nonzero(plain == buffer.masked[0]) < 3


@pytest.mark.parametrize(
    ("least", "changes", "why"),
    [
        (4, {"client": 0}, "the sum includes updates from 3 clients; at least 4 are required"),
        (3, {"client": 77}, "client 77 is unknown"),
        # Weights outside this range would reveal an update or let the sum overflow.
        *(
            (3, {"weight": n}, f"the weight of client 1 is {n}; 1 to 64 is allowed")
            for n in (0, -1, 65, 2**40)
        ),
    ],
)
def test_a_request_that_violates_the_rules_is_refused(least: int, changes: dict[str, int], why: str) -> None:
    refused(Buffer(least=least), why, **changes)


def test_weights_whose_sum_could_overflow_are_refused() -> None:
    buffer = Buffer()
    tight = msgspec.structs.replace(buffer.rules, fixed=FixedPoint(4.0, sum(buffer.weights) - 1))
    for holder in buffer.holders:
        holder._rules = tight
    refused(buffer, "the weights add up to .*: the sum could overflow")


def test_an_altered_sealed_share_is_refused() -> None:
    buffer = Buffer()
    first = buffer.sealed[1][0]
    buffer.sealed[1] = [bytes([first[0] ^ 1]) + first[1:]] * 5
    refused(buffer, "a sealed message was altered")


def test_a_share_for_another_holder_or_from_another_sender_is_refused() -> None:
    buffer = Buffer()
    buffer.sealed[1] = buffer.sealed[1][::-1]
    answers = buffer.answers()
    assert [bool(answer.refused) for answer in answers] == [True, True, False, True, True]
    buffer = Buffer()
    refused(buffer, "another sender", sealed=buffer.sealed[2][0])


def test_a_mask_that_is_in_the_sum_twice_is_refused() -> None:
    buffer = Buffer()
    refused(buffer, "one mask is in the sum twice", mask=buffer.names[0])


@pytest.mark.parametrize("change", [{"weight": 63}, {"client": 0}, None])
def test_a_mask_that_was_used_in_another_sum_is_refused(change: dict[str, int] | None) -> None:
    """The difference between two sums reveals an update if they differ in one weight, or if one sum lacks one
    update (None)."""
    buffer = Buffer()
    assert all(answer.share for answer in buffer.answers())
    if change is None:
        for given in (buffer.weights, buffer.names, buffer.sealed):
            del given[3:]  # type: ignore[attr-defined]
    refused(buffer, "was used in another sum", **(change or {}))


def test_the_same_request_has_the_same_answer() -> None:
    """A server that was killed before it published the version repeats its request."""
    buffer = Buffer()
    assert buffer.answers() == buffer.answers()


def test_missing_repeated_and_malformed_answers_are_refused() -> None:
    buffer = Buffer()
    answers = buffer.answers()
    first, *others = answers
    for given, why in (
        (answers[:3], "3 holders answered; 4 are needed"),
        ([first, *answers], "holder 1 answered twice"),
        ([Answer(1, b"123"), *others], r"has 3 bytes, not"),
        ([Answer(1, b"\xff" * len(first.share)), *others], "not below p"),
        ([Answer(9, first.share), *others], "a share of holder 9 arrived; holders are numbered from 1 to 5"),
    ):
        with pytest.raises(SecureError, match=why):
            buffer.sum(given)


@pytest.mark.parametrize("change", [1, 2**31, PRIME - 1])
def test_a_wrong_answer_contradicts_the_others(change: int) -> None:
    buffer = Buffer()
    answers = buffer.answers()
    words = np.frombuffer(answers[2].share, np.uint32).copy()
    words[5] = (int(words[5]) + change) % PRIME
    answers[2] = Answer(3, words.tobytes())
    with pytest.raises(SecureError, match="contradict each other"):
        buffer.sum(answers)


def test_a_sum_whose_masks_do_not_cancel_is_not_returned() -> None:
    """With the minimum of U answers, one is wrong; or a client sent another masked update than requested."""
    buffer = Buffer()
    answers = buffer.answers()
    noise = masks.expand(bytes(32), buffer.rules.code.share_size)
    for given, masked in (
        ([Answer(1, noise.tobytes()), *answers[1:4]], buffer.masked),
        (answers, [buffer.masked[0], *buffer.masked[:3]]),
    ):
        with pytest.raises(SecureError, match="the masks do not cancel"):
            buffer.sum(given, masked)


def test_an_update_that_is_not_finite_is_not_sent() -> None:
    buffer = Buffer()
    for value in (np.nan, np.inf):
        with pytest.raises(SecureError, match="the update is not finite"):
            buffer.senders[0].mask(buffer.masked[0], np.full(SIZE, value, np.float32), 0)


def test_missing_copied_and_invalid_keys_are_refused() -> None:
    buffer, keys = Buffer(), KeyPair.new()
    with pytest.raises(SecureError, match="keys of 1 holders are known; 5 are needed"):
        Sender(0, keys, {1: keys.public}, buffer.rules)
    with pytest.raises(SecureError, match="two holders have the same key"):
        Sender(0, keys, dict.fromkeys(range(1, 6), keys.public), buffer.rules)
    with pytest.raises(SecureError, match="public key is invalid"):
        keys.seal(bytes(32), b"purpose", b"")


def test_a_threshold_that_permits_two_sums_with_one_mask_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recover must be at least 4 \(got 3\)"):
        Buffer(holders=5, recover=3, private=1)
    for wrong in ({"private": 0}, {"private": 4}, {"recover": 6}):
        with pytest.raises(ValueError, match="private < recover ≤ holders"):
            Buffer(**wrong)


def test_a_server_that_splits_the_holders_obtains_one_sum_at_most() -> None:
    """A holder answers only one of two requests that use a mask for different sums, so at most one request
    gets enough answers."""
    buffer = Buffer()
    one = [h.answer(Request(buffer.members(h.number))) for h in buffer.holders[:3]]
    buffer.weights[1] -= 1
    two = [h.answer(Request(buffer.members(h.number))) for h in buffer.holders]
    assert [bool(a.share) for a in one] == [True] * 3
    assert [bool(a.share) for a in two] == [False] * 3 + [True] * 2
    for answers in (one, two):
        with pytest.raises(SecureError, match="are needed"):
            buffer.sum(answers)
