"""Measure the speed of one thread for each class of code except torch, in units of `edgefl.devices.code`.

The programs are ``kernels/code.c`` and, in Python, the five-body problem. `SCALES` converts their rates to
the units of 7-zip, OpenSSL and sysbench, which were measured on the same host (docs/code.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from edgefl.host.calibration import Rate

AMOUNTS = {"integer": 2_000_000, "memory": 25_000, "crypto": 10_000_000, "division": 20, "float": 100_000}
"""Amount of work in one call of each program, in bytes (``integer``, ``crypto``), positions (``memory``),
searches (``division``) or steps (``float``). `SCALES` is valid only for these amounts, because the decoder of
``integer`` speeds up while its probabilities adapt."""
SCALES = {"integer": 4.6e-5, "memory": 2.05e-3, "crypto": 0.94e-6, "division": 0.93, "float": 1.0}
"""Factors that convert the units of work in `AMOUNTS` to the published units of `edgefl.devices.code`."""
SCALE_SPREADS = {
    "integer": 1.15,
    "memory": 1.4,
    "copy": 1.1,
    "crypto": 1.1,
    "division": 1.1,
    "float": 1.2,
    "simd": 1.3,
    "interpreter": 1.3,
}
"""For each class of code, the factor within which its value in `SCALES`, which was measured on a single busy
host, is assumed to hold on 90% of hosts. It allows for differences between compilers (``float``), libraries
(``simd``) and Python versions (``interpreter``)."""
PROGRAMS = ("copy", "interpreter", *AMOUNTS)
"""Classes of code whose speed is measured by running a program: all except ``simd``."""
PYTHON_STEPS = 2000
NO_EXTENSION = "edgefl was installed without a C compiler; install a C compiler, then edgefl again"
_MIB = 1 << 20


def program(code_class: str, copy_mib: float = 64.0) -> tuple[Callable[[], Any], float]:
    """Return the program for a class of `PROGRAMS`, and the work of one call of it, in published units.

    ``copy_mib`` is the amount that the program of the class ``copy`` copies. Raises ImportError if the class
    needs the C extension and the extension was not built.
    """
    if code_class == "copy":
        return _copy(copy_mib)
    if code_class == "interpreter":
        return lambda: python_bodies(PYTHON_STEPS), PYTHON_STEPS
    from edgefl.host import _code

    run = getattr(_code, "floats" if code_class == "float" else code_class)
    return partial(run, AMOUNTS[code_class]), AMOUNTS[code_class] * SCALES[code_class]


def simd(pointwise: Rate, depthwise: Rate) -> Rate:
    """Return the rate of MobileNet-v1, computed from the rates of its pointwise and depthwise convolutions.

    Of its operations, 97% are pointwise (1 × 1) convolutions, and 3% are depthwise ones.
    """
    samples = tuple(
        1 / (0.97 / one + 0.03 / other)
        for one, other in zip(pointwise.samples, depthwise.samples, strict=False)
    )
    median = 1 / (0.97 / pointwise.median + 0.03 / depthwise.median)
    return Rate(median=median, cv=max(pointwise.cv, depthwise.cv), samples=samples)


def _copy(mib: float) -> tuple[Callable[[], Any], float]:
    """Return a function that copies ``mib`` MiB from one array to another, and this amount in MB."""
    source, target = np.ones(int(mib * _MIB), dtype=np.uint8), np.zeros(int(mib * _MIB), dtype=np.uint8)
    return lambda: np.copyto(target, source), mib * _MIB / 1e6


def python_bodies(steps: int) -> float:
    """Advance the five-body problem by ``steps`` steps in plain Python; return x of the first body.

    >>> python_bodies(2) == python_bodies(2) != python_bodies(3)
    True
    """
    bodies = [
        ([5.0 * i, -3.0 * i, 0.3 * i], [0.6, 2.8 / (i + 1), 0.02 * i], 0.01 / i if i else 39.5)
        for i in range(5)
    ]
    pairs = [(a, b) for i, a in enumerate(bodies) for b in bodies[i + 1 :]]
    for _ in range(steps):
        for (x, v, m), (y, w, n) in pairs:
            dx, dy, dz = x[0] - y[0], x[1] - y[1], x[2] - y[2]
            squared = dx * dx + dy * dy + dz * dz
            factor = 0.001 / (squared * math.sqrt(squared))
            a, b = m * factor, n * factor
            v[0] -= dx * b
            v[1] -= dy * b
            v[2] -= dz * b
            w[0] += dx * a
            w[1] += dy * a
            w[2] += dz * a
        for x, v, _m in bodies:
            x[0] += 0.001 * v[0]
            x[1] += 0.001 * v[1]
            x[2] += 0.001 * v[2]
    return bodies[0][0][0]
