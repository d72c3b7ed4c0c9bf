"""Flower beside edgefl: what each gives the other (`docs/flower.md`).

    average.py    a Flower strategy whose weighted averages are our kernels' (`fast`)
    runtime.py    Flower's own runtime on phones: a SuperNode each (`edgefl flower`)
    server.py     the SuperLink and the app's run beside them, a process of its own

A Flower app's clients as clients of edgefl are `edgefl.learning.flower_client`. Flower itself
(`pip install 'edgefl[flower]'`) is imported only by what is called.
"""

from __future__ import annotations

from edgefl.flower.average import fast

__all__ = ["fast"]
