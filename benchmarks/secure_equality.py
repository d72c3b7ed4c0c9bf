"""Check that sums of masked updates equal sums of the same updates without masks.

    python benchmarks/secure_equality.py [--kind pairwise]

A sum has 10 or 100 updates of 25,000,000 parameters, weighted as if their staleness were 0 to 20. Their masks
are created, shared among ten holders, summed, recovered and removed as in a run, while 0, 1 or 3 holders do
not answer. With ``--kind pairwise``, the updates are from the clients of a round, and 0, 10 or 30 % of the
clients drop out before they upload. Each result is compared with three sums of the same updates Δ, which have
the weights w or, rounded to integers, n:

- integers: Σ n·round(Δ/step), computed with numpy's int64, must be equal in every element;
- exact: Σ n·Δ in float64 may differ by Σ n·step/2 and one rounding to float32;
- plain: the kernel's Σ w·Δ in float32 may also differ by the rounding of the weights and of its additions.

Sealed shares are stored in temporary files (20 GB for 100 updates), so that memory use stays below 8 GiB.
With ``--kind pairwise``, the files contain the masked updates (10 GB), which are all in memory while they are
summed. The exit code is 1 if a sum is wrong.
"""

from __future__ import annotations

import argparse
import resource
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from edgefl import kernels
from edgefl.kernels.arguments import Floats
from edgefl.kernels.field import Words
from edgefl.secure.coded import Answer, Holder, Member, Request, Rules, Sender, sum_of_masks
from edgefl.secure.coding import Code
from edgefl.secure.fixed import FixedPoint, integer_weights
from edgefl.secure.keys import KEY_BYTES, KeyPair
from edgefl.secure.pairwise import Participant, RoundRules, least_threshold, unmasked

HOLDERS, RECOVER, PRIVATE = 10, 7, 2
LOST = (0, 1, 3)
"""How many of the ten holders do not answer. With pairwise masks, how many tenths of the clients drop out."""
STALENESS, RESOLUTION, CLIP = 20, 256, 1.0
DEVIATION = 0.1
"""Standard deviation of the elements of updates: a tenth of `CLIP`, so that no element is clipped."""
GROUP = 10
"""Number of updates per call of a kernel."""


class Sums(NamedTuple):
    """Four sums of the same updates Δ."""

    masked: Words
    """Σ n·(round(Δ/step) + mask) modulo p."""
    whole: np.ndarray
    """Σ n·round(Δ/step), int64."""
    exact: np.ndarray
    """Σ n·Δ, float64."""
    plain: Floats
    """Σ w·Δ by the kernel that sums plain updates."""


class Errors(NamedTuple):
    """Differences between an unmasked sum and the sums in `Sums`."""

    unequal: int
    """Number of elements that differ from those of the integer sum."""
    exact: float
    """Largest difference from the exact sum, divided by the bound on it."""
    plain: float
    """Largest difference from the plain kernel's sum, divided by the bound on it."""


class Trial:
    """K updates with their weights and keys. ``folder`` contains the sealed shares, one file per holder."""

    def __init__(self, size: int, updates: int, folder: Path, seed: int = 0) -> None:
        self.size, self._folder, self._seed = size, folder, seed
        self._names: list[bytes] = []
        staleness = np.rint(np.linspace(0, STALENESS, updates))
        self.weights = ((1.0 + staleness) ** -0.5 / updates).tolist()
        self.whole, self.unit = integer_weights(self.weights, RESOLUTION)
        code = Code(size, HOLDERS, RECOVER, PRIVATE)
        self.rules = Rules(code, FixedPoint(CLIP, RESOLUTION * updates), RESOLUTION, updates)
        self._keys = [KeyPair.new() for _ in range(updates)]
        self._held = {number: KeyPair.new() for number in range(1, HOLDERS + 1)}
        publics = {number: key.public for number, key in self._held.items()}
        self._senders = [Sender(k, key, publics, self.rules) for k, key in enumerate(self._keys)]

    def update(self, k: int) -> Floats:
        rng = np.random.default_rng([self._seed, len(self.weights), k])
        return np.float32(DEVIATION) * rng.standard_normal(self.size, np.float32)

    def sums(self) -> Sums:
        """Mask all updates, and sum them in groups of `GROUP` updates."""
        sums, count = self._zeros(), len(self.weights)
        for first in range(0, count, GROUP):
            group = range(first, min(first + GROUP, count))
            words = [np.empty(self.size, np.uint32) for _ in group]
            for k, out in zip(group, words, strict=True):
                self._mask(k, self._added(sums, k), out)
            masked = _summed([sums.masked, *words], [1, *(self.whole[k] for k in group)])
            sums = sums._replace(masked=masked)
        return sums

    def plain(self, members: Sequence[int]) -> Sums:
        sums = self._zeros()
        for k in members:
            self._added(sums, k)
        return sums

    def _zeros(self) -> Sums:
        size = self.size
        masked, plain = np.zeros(size, np.uint32), np.zeros(size, np.float32)
        return Sums(masked, np.zeros(size, np.int64), np.zeros(size), plain)

    def _added(self, sums: Sums, k: int) -> Floats:
        """Add update k to the sums without masks, and return the update."""
        update, step = self.update(k), np.float32(self.rules.fixed.step)
        sums.whole[:] += self.whole[k] * np.rint(update / step).astype(np.int64)
        sums.exact[:] += self.whole[k] * update.astype(np.float64)
        kernels.weighted_sum(sums.plain, sums.plain, [update], [self.weights[k]])
        return update

    def _mask(self, k: int, update: Floats, out: Words) -> None:
        name, sealed = self._senders[k].mask(out, update, 0)
        self._names.append(name)
        for number, share in enumerate(sealed, start=1):
            with open(self._folder / str(number), "ab") as file:
                file.write(share)

    def answers(self) -> Iterator[Answer]:
        for number, key in self._held.items():
            with open(self._folder / str(number), "rb") as file:
                pairs = enumerate(zip(self._names, self.whole, strict=True))
                size = self.rules.sealed_bytes
                members = [Member(k, name, weight, file.read(size)) for k, (name, weight) in pairs]
            holder = Holder(number, key, lambda k: self._keys[k].public, self.rules)
            yield holder.answer(Request(members))

    def errors(self, sums: Sums, answers: Sequence[Answer]) -> Errors:
        out = np.empty(self.size, np.float32)
        self.rules.fixed.decode(out, sums.masked, sum_of_masks(self.rules, answers), self.whole)
        return self.compared(out, sums, range(len(self.whole)))

    def compared(self, out: Floats, sums: Sums, members: Sequence[int]) -> Errors:
        fixed, counts = self.rules.fixed, [self.whole[k] for k in members]
        weights = [self.weights[k] for k in members]
        unequal = np.count_nonzero(out != sums.whole.astype(np.float32) * np.float32(fixed.step))
        bound = sum(counts) * fixed.step / 2
        rounding = np.abs(sums.exact) * 2.0**-23
        exact = np.max(np.abs(out - sums.exact) / (bound + rounding))
        # Weights are rounded by up to unit/2, and each addition of the plain sum is rounded, too.
        largest = sum(abs(n * self.unit - w) for n, w in zip(counts, weights, strict=True))
        element = CLIP * (largest + len(weights) * sum(weights) * 2.0**-23)
        plain = np.max(np.abs(self.unit * out.astype(np.float64) - sums.plain))
        allowed = self.unit * (bound + float(np.max(rounding))) + element
        return Errors(int(unequal), float(exact), float(plain / allowed))


class RoundTrial:
    """A round of K clients with pairwise masks. ``folder`` contains a file for each masked update."""

    def __init__(self, size: int, updates: int, folder: Path) -> None:
        self.trial, self._folder = Trial(size, updates, folder), folder
        names, fixed = frozenset(range(1, updates + 1)), self.trial.rules.fixed
        self._rules = RoundRules(b"a round", size, names, least_threshold(updates), fixed)
        self._secrets = {name: secrets.token_bytes(KEY_BYTES) for name in names}
        self._adverts = [one.advert() for one in self._participants()]
        self._sealed = {one.client: one.shares(self._adverts) for one in self._participants()}
        for one in self._participants():
            k = one.client - 1
            one.meet(self._adverts)
            one.masked(self.trial.update(k), self.trial.whole[k]).tofile(folder / str(one.client))

    def _participants(self) -> list[Participant]:
        """Create the clients of the round, each with its secret."""
        return [Participant(name, self._rules, secret) for name, secret in self._secrets.items()]

    def errors(self, lost: Collection[int]) -> Errors:
        """Unmask the sum of the updates of all but the ``lost`` clients; compare it with plain sums."""
        arrived = frozenset(self._secrets.keys() - set(lost))
        revealed = []
        for one in self._participants():
            if one.client in arrived:
                one.meet(self._adverts)
                for sender, sealed in self._sealed.items():
                    if sender != one.client:
                        one.receive(sender, sealed[one.client])
                revealed.append(one.reveal(arrived))
        files = {name: np.memmap(self._folder / str(name), np.uint32, "r") for name in sorted(arrived)}
        masked = {name: file.view(np.ndarray) for name, file in files.items()}
        weights = {name: self.trial.whole[name - 1] for name in masked}
        adverts = {advert.client: advert for advert in self._adverts}
        out = unmasked(self._rules, adverts, masked, weights, revealed)
        members = [name - 1 for name in masked]
        return self.trial.compared(out, self.trial.plain(members), members)


def _summed(vectors: Sequence[Words], weights: Sequence[int]) -> Words:
    out = np.empty(vectors[0].size, np.uint32)
    kernels.field_sum(out, vectors, weights)
    return out


def is_right(errors: Errors) -> bool:
    return errors.unequal == 0 and errors.exact <= 1.0 and errors.plain <= 1.0


def of_holders(parameters: int, count: int, folder: Path) -> Iterator[tuple[str, Errors]]:
    """Sum ``count`` updates whose masks are shared among holders, for each number of lost holders."""
    trial = Trial(parameters, count, folder)
    sums, answers = trial.sums(), list(trial.answers())
    for lost in LOST:
        gone = set(np.random.default_rng([count, lost]).choice(HOLDERS, lost, replace=False) + 1)
        yield (
            f"{lost} of {HOLDERS} holders lost",
            trial.errors(sums, [a for a in answers if a.holder not in gone]),
        )


def of_rounds(parameters: int, count: int, folder: Path) -> Iterator[tuple[str, Errors]]:
    """Sum the updates of ``count`` clients with pairwise masks, for each number of clients that drop out."""
    trial = RoundTrial(parameters, count, folder)
    for tenths in LOST:
        lost = np.random.default_rng([count, tenths]).choice(count, tenths * count // 10, replace=False) + 1
        yield f"{len(lost)} of {count} clients lost", trial.errors(lost.tolist())


KINDS = {"masks": of_holders, "pairwise": of_rounds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--updates", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--kind", choices=KINDS, default="masks")
    options = parser.parse_args()
    print(
        f"{options.kind}, {options.parameters} parameters, {kernels.threads()} threads, {kernels.backend()}"
    )
    right = True
    for count in options.updates:
        started = time.perf_counter()
        print(f"{count} updates")
        with TemporaryDirectory() as folder:
            for what, errors in KINDS[options.kind](options.parameters, count, Path(folder)):
                right = right and is_right(errors)
                unequal, exact, plain = errors
                print(
                    f"  {what}: {unequal} elements differ from the integer sum; difference from the",
                    end="",
                )
                print(f" exact sum {exact:.2f} of its bound, from the plain sum {plain:.2f}", flush=True)
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"  {time.perf_counter() - started:.0f} s, peak memory {peak_gib:.1f} GiB", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
