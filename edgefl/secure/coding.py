"""A code over the integers modulo p that splits a vector into shares; a few shares reveal nothing about it.

The vector is cut into U − T pieces, which are the coefficients of the lower powers of a polynomial. T random
vectors are the coefficients of the upper powers, and share j is the value of the polynomial at j. Any T
shares are uniformly random, and any U shares determine the polynomial. Shares are linear: a weighted sum of
the shares of several vectors is the share of the weighted sum of these vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec
import numpy as np

from edgefl import kernels
from edgefl.kernels.field import PRIME, Words
from edgefl.secure import SecureError


class Code(msgspec.Struct, frozen=True):
    """A code for vectors of ``size`` numbers modulo p.

    >>> code = Code(size=5, holders=4, recover=3, private=1)
    >>> shares = code.shares(np.arange(5, dtype=np.uint32), np.full(code.share_size, 9, np.uint32))
    >>> code.recovered({1: shares[0], 3: shares[2], 4: shares[3]}).tolist()
    [0, 1, 2, 3, 4]
    """

    size: int
    holders: int
    """N, the number of shares. Each share has a holder; holders are numbered from 1 to N."""
    recover: int
    """U, the number of shares that are sufficient to recover the vector."""
    private: int
    """T, the largest number of shares that together reveal nothing about the vector."""

    def __post_init__(self) -> None:
        if not 1 <= self.private < self.recover <= self.holders < PRIME or self.size < 1:
            got = f"private = {self.private}, recover = {self.recover}, holders = {self.holders}"
            raise ValueError(f"a code needs 1 ≤ private < recover ≤ holders (got {got})")

    @property
    def share_size(self) -> int:
        """Number of elements in one share: ⌈size / (U − T)⌉."""
        return -(-self.size // (self.recover - self.private))

    @property
    def noise_size(self) -> int:
        """Number of random elements that `shares` needs as noise: T · share_size."""
        return self.private * self.share_size

    def shares(self, vector: Words, noise: Words) -> list[Words]:
        """Return the N shares of ``vector``. The numbers in ``noise`` must be uniformly random, from 0 to
        p − 1, and must not be used again."""
        if vector.size != self.size or noise.size != self.noise_size:
            got = f"{vector.size} and {noise.size}"
            raise ValueError(f"vector and noise need {self.size} and {self.noise_size} numbers (got {got})")
        pieces = np.zeros((self.recover, self.share_size), np.uint32)
        data = (self.recover - self.private) * self.share_size
        pieces.reshape(-1)[: self.size] = vector
        pieces.reshape(-1)[data:] = noise
        made = []
        for holder in range(1, self.holders + 1):
            share = np.empty(self.share_size, np.uint32)
            kernels.field_sum(share, list(pieces), [pow(holder, i, PRIME) for i in range(self.recover)])
            made.append(share)
        return made

    def recovered(self, shares: Mapping[int, Words]) -> Words:
        """Recover the vector from at least U ``shares``, keyed by holder.

        Raises `SecureError` if there are fewer than U shares, or if a further share contradicts the first U.
        """
        if len(shares) < self.recover:
            raise SecureError(f"{len(shares)} shares arrived; {self.recover} are needed")
        for holder, share in shares.items():
            if not 1 <= holder <= self.holders:
                raise SecureError(
                    f"a share of holder {holder} arrived; holders are numbered from 1 to {self.holders}"
                )
            if share.size != self.share_size or int(share.max()) >= PRIME:
                raise SecureError(f"the share of holder {holder} is malformed")
        used = tuple(sorted(shares))[: self.recover]
        first, rows = [shares[holder] for holder in used], _inverse(used)
        for extra in sorted(shares.keys() - set(used)):
            expected = np.empty(self.share_size, np.uint32)
            powers = [pow(extra, i, PRIME) for i in range(self.recover)]
            columns = zip(*rows, strict=True)
            weights = [sum(p * r for p, r in zip(powers, column, strict=True)) % PRIME for column in columns]
            kernels.field_sum(expected, first, weights)
            if not np.array_equal(expected, shares[extra]):
                others = ", ".join(map(str, used))
                raise SecureError(f"the shares of holders {others} and {extra} contradict each other")
        pieces = np.empty((self.recover - self.private, self.share_size), np.uint32)
        for row, piece in zip(rows, pieces, strict=False):
            kernels.field_sum(piece, first, row)
        return pieces.reshape(-1)[: self.size]


@lru_cache(maxsize=64)
def _inverse(points: tuple[int, ...]) -> list[list[int]]:
    """Return a matrix for Lagrange interpolation: row i contains the weights with which a polynomial's values
    at ``points`` add up to its coefficient i.

    >>> _inverse((1, 2))[1] == [PRIME - 1, 1]
    True
    """
    master = [1]  # coefficients of Π (x − point), lowest power first
    for point in points:
        shifted, scaled = [0, *master], [*(-point * c for c in master), 0]
        master = [(a + b) % PRIME for a, b in zip(shifted, scaled, strict=True)]
    columns = []
    for point in points:
        quotient, carry = [0] * len(points), 0
        for power in range(len(points), 0, -1):  # divide by (x − point)
            carry = quotient[power - 1] = (master[power] + carry * point) % PRIME
        value = 1
        for other in points:
            value = value * (point - other) % PRIME if other != point else value
        factor = pow(value, -1, PRIME)
        columns.append([c * factor % PRIME for c in quotient])
    return [list(row) for row in zip(*columns, strict=True)]
