"""DP-FTRL's noise, a binary tree over the versions (Kairouz et al. 2021, arXiv:2103.00039)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.kernels.arguments import Floats
from edgefl.privacy.source import Source

Node = tuple[int, int]
"""Level and index, from 1: leaves (index − 1)·2^level + 1 to index·2^level."""


def nodes(version: int) -> set[Node]:
    """The nodes (level, index) whose leaves are versions 1 to ``version``: one for each binary digit 1.

    >>> sorted(nodes(6))  # versions 1 to 4, and 5 to 6
    [(1, 3), (2, 1)]
    """
    return {(level, version >> level) for level in range(version.bit_length()) if version >> level & 1}


def place(version: int, restart_every: int | None) -> tuple[int, int]:
    """The tree that a version is a leaf of, from 0, and the number of that leaf, from 1.

    >>> place(5, None), place(5, 4)
    ((0, 5), (1, 1))
    """
    tree, leaf = divmod(version - 1, restart_every or version)
    return tree, leaf + 1


class TreeNoise:
    """N_t − N_{t−1}: what version t's step gets so that the model holds the tree's noise once, as N_t.

    N_t is the sum of `nodes`(t), each drawn from N(0, 1) in every parameter; a step's difference changes two
    nodes on average. After every ``restart_every`` versions a new tree begins, and the finished one's noise
    stays (Kairouz et al. 2021, appendix D.2). With ``honaker`` a node is estimated from below: itself and the
    sum of its children's estimates, each weighed by its inverse variance (their appendix B.3, of Honaker
    2015), which leaves σ²/(2 − 2^−level) of its σ².

    A node's numbers are named by its place and the content of the version that it came with
    (`Source.digest`), and drawn again when it leaves. So a resumed run draws the same, and a version that is
    made again of other updates gets other noise: the difference of both shows no update bare.

    >>> from edgefl.privacy.source import Seeded
    >>> TreeNoise(Seeded(1)).step(1, size=3).shape
    (3,)
    """

    def __init__(self, source: Source, restart_every: int | None = None, *, honaker: bool = False) -> None:
        self._source, self._restart_every, self._honaker = source, restart_every, honaker
        self._salts: dict[int, str] = {}
        self._kept: set[Node] = set()
        self._made: dict[tuple[int, Node, str], Floats] = {}  # Honaker's estimates of those

    def restore(self, salts: Mapping[int, str]) -> None:
        """Go on behind versions whose contents had these names."""
        self._salts = dict(salts)

    def step(self, version: int, size: int, salt: str = "") -> Floats:
        """The noise of the step that makes ``version`` of a content ``salt``: float32 of shape (size,)."""
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
        """The noise in the estimate of a node's sum."""
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
