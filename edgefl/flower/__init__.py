"""Use Flower and edgefl together (`docs/flower.md`).

    average.py    `fast`: a Flower strategy whose weighted averages use edgefl's kernels
    runtime.py    Flower's own runtime on emulated phones, one SuperNode each (`edgefl flower`)
    server.py     the SuperLink and the app's run, in a separate process

`edgefl.learning.flower_client` uses a Flower app's clients as edgefl clients. Flower itself
(`pip install 'edgefl[flower]'`) is imported on first use.
"""

from __future__ import annotations

from edgefl.flower.average import fast

__all__ = ["fast"]
