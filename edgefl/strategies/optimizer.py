"""Carries a `ServerOptimizer` out on flat vectors: the last part of every step, after the weighted sum.

The definition is the kernels', whose back ends make the same step in the pass of the sum.
"""

from __future__ import annotations

from edgefl.kernels.steps import CHUNK, apply, start

__all__ = ["CHUNK", "apply", "start"]
