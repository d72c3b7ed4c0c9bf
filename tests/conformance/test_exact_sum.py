"""Sums whose bits do not depend on order or parts: the same on every back end and instruction set."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import islice, pairwise

import numpy as np
import pytest

from edgefl import kernels
from edgefl.kernels.exact import LARGEST, exact_sum, fits

SIZES = (1, 255, 2048, 5000, 40_001)


def updates_of(size, count=9):
    """Updates of all formats, of very different sizes; their weights and scales."""
    draws = np.random.default_rng(size)
    updates, scales = [], []
    for k in range(count):
        x = (draws.normal(size=size) * 10.0 ** draws.uniform(-6, 1)).astype(np.float32)
        scale = None
        if k % 3 == 1:
            x = x.astype(np.float16)
        elif k % 3 == 2:
            x = draws.integers(-127, 127, size).astype(np.int8)
            scale = draws.uniform(0, 0.01, -(-size // 256)).astype(np.float32)
        updates.append(x)
        scales.append(scale)
    return updates, draws.uniform(-1, 1, count), scales


def made(size, backend, order=None, parts=1):
    """The sum of parts of the updates in some order, norms and checksums in the updates' own order."""
    updates, weights, scales = updates_of(size)
    order = np.arange(len(updates)) if order is None else order
    total, norms, checksums = np.zeros(size), np.empty(len(updates)), np.empty(len(updates), np.uint64)
    for first, last in pairwise(np.linspace(0, len(order), parts + 1).astype(int)):
        out, mine = np.zeros(size), order[first:last]
        found = exact_sum(
            out, [updates[k] for k in mine], weights[mine], backend, scales=[scales[k] for k in mine]
        )
        norms[mine], checksums[mine] = found
        total += out
    return total.tobytes(), norms.tobytes(), checksums.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_the_bits_are_those_of_any_back_end_order_and_parts(size):
    expected = made(size, "reference")
    for name, state in kernels.backends().items():
        if state == "ok":
            assert made(size, name) == expected, name
    draws = np.random.default_rng(1)
    for parts in (1, 2, 5):
        assert made(size, None, draws.permutation(9), parts) == expected


def test_every_instruction_set_and_any_number_of_threads_give_the_same_bits():
    extension = pytest.importorskip("edgefl.kernels._c")
    before = extension.isa()
    try:
        for threads in (1, 3):
            kernels.set_threads(threads)
            for name in extension.isas():
                extension.set_isa(name)
                assert made(300_000, "c") == made(300_000, "reference"), name
    finally:
        extension.set_isa(before)
        kernels.set_threads(None)


def beside_half_way():
    """Yields weights and float32 numbers whose products are 2⁻⁹⁷ from half-way between multiples of 2⁻⁴⁰."""
    for number in range(2**23 + 1, 2**24, 2):
        for beside in (1, -1):  # of 2^56 in 2^57
            weight = (2**56 + beside) * pow(number, -1, 2**57) % 2**57
            if 2**52 <= weight < 2**53:
                yield weight * 2.0**-60, number * 2.0**-37


def test_products_are_rounded_one_by_one_wherever_they_lie_between_two_numbers():
    """By rational numbers. But for the last bits of the weights many of ``few`` would lie half-way."""
    draws, size = np.random.default_rng(5), 61
    weights = [0.5, -0.25, 1.0, 1 / 3, 2.0**-20, 0.0, -1e-300, -1.5]
    few = [draws.integers(-9, 10, size) * 2.0**-40 for _ in weights]
    more = [draws.integers(-(2**23), 2**23, size) * 2.0 ** draws.integers(-55, -40, size) for _ in weights]
    beside = list(islice(beside_half_way(), 8))
    near = ([weight for weight, _ in beside], [np.full(size, number) for _, number in beside])
    for numbers, values in ((weights, few), (weights, more), near):
        updates, expected = [x.astype(np.float32) for x in values], np.zeros(size)
        for weight, x in zip(numbers, updates, strict=True):
            odd = float((np.array([weight]).view(np.int64) | (weight != 0.0)).view(np.float64)[0])
            steps = [Fraction(odd) * Fraction(float(one)) * 2**40 for one in x]
            assert not any(step.denominator == 2 for step in steps)
            expected += [round(step) / 2.0**40 for step in steps]
        for order in (np.arange(8), draws.permutation(8), draws.permutation(8)):
            for backend, state in kernels.backends().items():
                if state == "ok":
                    out = np.zeros(size)
                    exact_sum(out, [updates[k] for k in order], [numbers[k] for k in order], backend)
                    assert out.tolist() == expected.tolist(), backend


def test_it_is_the_weighted_sum_but_for_rounding_and_has_its_norms_and_checksums():
    updates, weights, scales = updates_of(5000)
    out, plain = np.zeros(5000), np.empty(5000, np.float32)
    sums = np.empty(len(updates), np.uint64)
    norms, checksums = exact_sum(out, updates, weights, scales=scales)
    assert (
        norms.tolist()
        == kernels.weighted_sum(plain, None, updates, weights, scales=scales, checksums=sums).tolist()
    )
    assert checksums.tolist() == sums.tolist()
    size = max(abs(weight) * math.sqrt(norm) for weight, norm in zip(weights, norms, strict=True))
    assert np.abs(out - plain).max() <= len(updates) * size * 2.0**-23
    exact = sum(
        weight
        * (x.astype(float) if scale is None else np.repeat(scale, 256)[: x.size] * x.astype(np.float32))
        for x, weight, scale in zip(updates, weights, scales, strict=True)
    )
    assert np.abs(out - exact).max() <= len(updates) * 2.0**-40


def test_a_sum_that_may_be_too_large_does_not_fit():
    top = np.array([LARGEST / 2, 0], np.float32)
    for weights, expected in (([1.0, 0.99], True), ([1.0, 1.0], False), ([-1.0, 1.0], False)):
        norms, _ = exact_sum(np.zeros(2), [top, top], weights)
        assert fits(weights, norms) is expected
    assert not fits([1.0], exact_sum(np.zeros(1), [np.array([np.nan], np.float32)], [1.0])[0])


def test_wrong_arguments_are_named():
    x, good = np.zeros(3, np.float32), np.zeros(3)
    for kind, what, call in (
        (TypeError, "out must be float64", lambda: exact_sum(x, [x], [1.0])),
        (
            ValueError,
            r"weights must have 1 entries like updates \(got 2\)",
            lambda: exact_sum(good, [x], [1, 2]),
        ),
        (ValueError, r"updates\[0\] must have 3 elements", lambda: exact_sum(good, [x[:2]], [1.0])),
        (
            ValueError,
            "scales must be given for an int8|scales\\[0\\] must be",
            lambda: exact_sum(good, [x.astype(np.int8)], [1.0]),
        ),
        (
            ValueError,
            r"updates\[0\] must not overlap out",
            lambda: exact_sum(good, [good.view(np.float32)[:3]], [1.0]),
        ),
        (TypeError, "weights must be numbers", lambda: exact_sum(good, [x], ["a"])),
    ):
        with pytest.raises(kind, match=what):
            call()
