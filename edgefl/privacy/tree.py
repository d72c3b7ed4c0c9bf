"""DP-FTRL noise, which is organised as a binary tree over the versions (Kairouz et al. 2021,
arXiv:2103.00039)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.kernels.arguments import Floats
from edgefl.privacy.source import Source

Node = tuple[int, int]
"""A node of the tree as (level, index), where indices start at 1. The node covers the leaves
(index − 1)·2^level + 1 to index·2^level."""


def nodes(version: int) -> set[Node]:
    """Return the disjoint nodes that together cover versions 1 to ``version``. There is one node for each
    digit 1 in the binary representation of ``version``.

    >>> sorted(nodes(6))  # versions 1 to 4, and 5 to 6
    [(1, 3), (2, 1)]
    """
    return {(level, version >> level) for level in range(version.bit_length()) if version >> level & 1}


def place(version: int, restart_every: int | None) -> tuple[int, int]:
    """Return the index of the tree that contains a version, counted from 0, and the index of the version's
    leaf in that tree, counted from 1.

    >>> place(5, None), place(5, 4)
    ((0, 5), (1, 1))
    """
    tree, leaf = divmod(version - 1, restart_every or version)
    return tree, leaf + 1


class TreeNoise:
    """Generates the noise N_t − N_{t−1} for the step to version t, so that the total noise in the model is
    N_t.

    N_t is the sum of the noise of `nodes`(t). The noise of a node is N(0, 1) in every parameter. On average,
    a step adds or removes two nodes. After every ``restart_every`` versions a new tree starts, and the noise
    of the finished tree remains in the model (Kairouz et al. 2021, appendix D.2). If ``honaker`` is True, the
    noise of a node is the average of the node's own noise and the sum of its children's estimates, weighted
    by inverse variance (appendix B.3 of the same paper, after Honaker 2015). This reduces the noise's
    variance from σ² to σ²/(2 − 2^−level).

    The noise of a node is generated from the node's position and from a digest of the updates in the version
    that introduced the node (`Source.digest`). Noise that is to be subtracted is generated again, so a
    resumed run has the same noise. A version that is computed again from other updates has different noise,
    so that the difference between the two versions reveals no update.

    >>> from edgefl.privacy.source import Seeded
    >>> TreeNoise(Seeded(1)).step(1, size=3).shape
    (3,)
    """

    def __init__(self, source: Source, restart_every: int | None = None, *, honaker: bool = False) -> None:
        self._source, self._restart_every, self._honaker = source, restart_every, honaker
        self._salts: dict[int, str] = {}
        self._kept: set[Node] = set()
        self._made: dict[tuple[int, Node, str], Floats] = {}  # Honaker's estimates of the nodes in `_kept`

    def restore(self, salts: Mapping[int, str]) -> None:
        """Restore the noise of existing versions. ``salts`` contains the digest of each version's updates,
        keyed by version."""
        self._salts = dict(salts)

    def step(self, version: int, size: int, salt: str = "") -> Floats:
        """Return the noise for the step to ``version`` as ``size`` float32 numbers; ``salt`` is the digest of
        the updates in this version."""
        tree, leaf = place(version, self._restart_every)
        self._salts[version] = salt
        now, before = nodes(leaf), nodes(leaf - 1)
        self._kept = now | before
        out = np.zeros(size, np.float32)
        for node in sorted(now - before):
            out += self._estimate(tree, node, size)
        for node in sorted(before - now):
            out -= self._estimate(tree, node, size)
        self._made = {name: made for name, made in self._made.items() if name[0] == tree and name[1] in now}
        return out

    def _estimate(self, tree: int, node: Node, size: int) -> Floats:
        """Return the noise of a node. If ``honaker`` is True, the noise is averaged with the estimates of the
        node's children."""
        level, index = node
        salt = self._salts.get(tree * (self._restart_every or 0) + (index << level), "")
        if (made := self._made.get((tree, node, salt))) is not None:
            return made
        ids: list[int | str] = [level, index, *([tree] if tree else []), *([salt] if salt else [])]
        own = self._source.normal(size, "privacy", *ids)
        if self._honaker:
            if level:
                below = self._estimate(tree, (level - 1, 2 * index - 1), size)
                below = below + self._estimate(tree, (level - 1, 2 * index), size)
                weight = np.float32(1.0 / (2.0 - 2.0**-level))
                own = weight * own + (np.float32(1.0) - weight) * below
            if node in self._kept:
                self._made[tree, node, salt] = own
        return own
