"""Measure the cost of secure aggregation on this host.

    python benchmarks/secure.py [PARAMETERS [UPDATES]]

For each stage, the benchmark prints the time in seconds (the best of several runs) and the number of bytes of
inputs and outputs per second. It also measures the plain sum of the same updates for comparison.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from edgefl import kernels
from edgefl.kernels.field import PRIME
from edgefl.secure import masks
from edgefl.secure.coded import Holder, Member, Request, Rules, Sender, unmasked
from edgefl.secure.coding import Code
from edgefl.secure.fixed import FixedPoint
from edgefl.secure.keys import KeyPair


def best_s(work: Callable[[], object], times: int = 7) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def main(parameters: int = 25_000_000, updates: int = 10) -> None:
    rng = np.random.default_rng(0)
    print(f"{parameters} parameters, {updates} updates, {kernels.threads()} threads, {kernels.backend()}")
    floats = [rng.standard_normal(parameters, dtype=np.float32) for _ in range(updates)]
    words = [rng.integers(0, PRIME, parameters, dtype=np.uint32) for _ in range(updates)]
    out, total = np.empty(parameters, np.float32), np.empty(parameters, np.uint32)
    weights = [int(n) for n in rng.integers(1, 256, updates)]
    fixed = FixedPoint(4.0, 256 * updates)

    def said(what: str, seconds: float, nbytes: int) -> float:
        print(f"{what:<42}{seconds:>9.4f} s{nbytes / seconds / 1e9:>8.2f} GB/s")
        return seconds

    def sums(what: str) -> None:
        size = 4 * parameters * (updates + 1)
        plain_s = best_s(lambda: kernels.weighted_sum(out, None, floats, [w / 256 for w in weights]))
        masked_s = best_s(lambda: kernels.field_sum(total, words, weights))
        said(f"plain sum, {what}", plain_s, size)
        said(f"masked sum, {what}", masked_s, size)
        print(f"masked ÷ plain updates per second: {plain_s / masked_s:.2f}")

    sums("all threads")
    kernels.set_threads(1)
    sums("one thread")
    said("mask from a seed, one core", best_s(lambda: masks.expand(bytes(32), parameters)), 4 * parameters)
    said(
        "encode and mask, one core", best_s(lambda: fixed.encode(total, floats[0], words[0])), 12 * parameters
    )
    said(
        "unmask and decode, one core",
        best_s(lambda: kernels.field_decode(out, total, words[0], fixed.step)),
        12 * parameters,
    )
    size = min(parameters, 1_000_000)
    rules = Rules(Code(size, 5, 4, 1), FixedPoint(4.0, 256 * updates), 256, 2)
    keys = [KeyPair.new() for _ in range(updates)]
    held = {number: KeyPair.new() for number in range(1, 6)}
    publics = {number: key.public for number, key in held.items()}
    senders = [Sender(k, key, publics, rules) for k, key in enumerate(keys)]
    masked = [np.empty(size, np.uint32) for _ in keys]
    sent = [s.mask(m, f[:size], 0) for s, m, f in zip(senders, masked, floats, strict=False)]
    client_s = best_s(lambda: senders[0].mask(masked[0], floats[0][:size], 0))
    said(f"a client's whole masking, {size} parameters", client_s, 4 * size)
    holder = Holder(1, held[1], lambda client: keys[client].public, rules)
    parts = zip(sent, weights, strict=True)
    request = Request([Member(k, name, n, sealed[0]) for k, ((name, sealed), n) in enumerate(parts)])
    said(
        f"a holder's answer to {updates} updates",
        best_s(lambda: holder.answer(request)),
        updates * rules.sealed_bytes,
    )
    answers = []
    for number, key in held.items():
        helper = Holder(number, key, lambda client: keys[client].public, rules)
        members = zip(sent, weights, strict=True)
        asked = [Member(k, name, n, sealed[number - 1]) for k, ((name, sealed), n) in enumerate(members)]
        answers.append(helper.answer(Request(asked)))
    server_s = best_s(lambda: unmasked(rules, masked, weights, answers))
    said("the server's sum, recovery and unmasking", server_s, 4 * size * updates)
    print(f"upload: {4 * size} bytes masked + {rules.overhead_bytes} bytes of shares")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
