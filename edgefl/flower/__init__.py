"""Use Flower and edgefl together (`docs/flower.md`).

    average.py    `fast`, which makes a Flower strategy compute its weighted averages with edgefl's kernels
    runtime.py    Flower's own runtime on emulated phones, each of which runs one SuperNode (`edgefl flower`)
    server.py     a separate process that runs Flower's SuperLink and starts the app

`edgefl.learning.flower_client` uses a Flower app's clients as edgefl clients. Flower itself
(`pip install 'edgefl[flower]'`) is imported on first use.
"""

from __future__ import annotations

from edgefl.flower.average import fast

__all__ = ["fast"]
