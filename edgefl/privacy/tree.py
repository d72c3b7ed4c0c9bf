"""DP-FTRL noise: a binary tree over the versions (Kairouz et al. 2021, arXiv:2103.00039)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.kernels.arguments import Floats
from edgefl.privacy.source import Source

Node = tuple[int, int]
"""(level, index), index from 1: the node over leaves (index − 1)·2^level + 1 to index·2^level."""


def nodes(version: int) -> set[Node]:
    """The disjoint nodes that cover versions 1 to ``version``: one per binary digit 1.

    >>> sorted(nodes(6))  # versions 1 to 4, and 5 to 6
    [(1, 3), (2, 1)]
    """
    return {(level, version >> level) for level in range(version.bit_length()) if version >> level & 1}


def place(version: int, restart_every: int | None) -> tuple[int, int]:
    """Return the number of a version's tree, from 0, and the number of its leaf in that tree, from 1.

    >>> place(5, None), place(5, 4)
    ((0, 5), (1, 1))
    """
    tree, leaf = divmod(version - 1, restart_every or version)
    return tree, leaf + 1


class TreeNoise:
    """Adds N_t − N_{t−1} to version t's step, so that the model's total noise is N_t.

    N_t is the sum of the noise of `nodes`(t), each N(0, 1) in every parameter; a step changes two nodes on
    average. Every ``restart_every`` versions a new tree starts, and the finished tree's noise remains
    (Kairouz et al. 2021, appendix D.2). With ``honaker`` a node's noise is the average of its own and the sum
    of its children's estimates, weighted by inverse variance (their appendix B.3, after Honaker 2015), which
    reduces its variance from σ² to σ²/(2 − 2^−level).

    A node's noise is named by its position and by the content of the version that introduced it
    (`Source.digest`), and generated again to subtract it. So a resumed run has the same noise, and a version
    recomputed from other updates has other noise: the difference between the two versions reveals no update.

    >>> from edgefl.privacy.source import Seeded
    >>> TreeNoise(Seeded(1)).step(1, size=3).shape
    (3,)
    """

    def __init__(self, source: Source, restart_every: int | None = None, *, honaker: bool = False) -> None:
        self._source, self._restart_every, self._honaker = source, restart_every, honaker
        self._salts: dict[int, str] = {}
        self._kept: set[Node] = set()
        self._made: dict[tuple[int, Node, str], Floats] = {}  # Honaker's estimates, cached for `_kept`

    def restore(self, salts: Mapping[int, str]) -> None:
        """Continue after versions with these content digests, keyed by version."""
        self._salts = dict(salts)

    def step(self, version: int, size: int, salt: str = "") -> Floats:
        """Noise of the step to ``version``, with content digest ``salt``: float32 of shape (size,)."""
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
        """Return a node's noise; with ``honaker`` it is averaged with its children's estimates."""
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
