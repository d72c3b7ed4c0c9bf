"""The reference back end: readable numpy code. Other back ends must give the same bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgefl.kernels import arguments, steps
from edgefl.kernels.arguments import (
    LANES,
    SCALE_BLOCK,
    TILE,
    Averages,
    Doubles,
    Floats,
    Ids,
    SumArguments,
    Update,
)
from edgefl.kernels.field import PRIME, CodeArguments, FieldSumArguments
from edgefl.kernels.quantization import QuantizationArguments
from edgefl.kernels.ranks import GRAIN, RankArguments
from edgefl.kernels.steps import StepArguments

_MASK = (1 << 64) - 1
_CHUNK = 512 * TILE


def decoded(update: Update, scale: Floats | None, start: int, stop: int) -> Floats:
    """Return the elements ``start`` (a multiple of `TILE`) to ``stop`` of an update, as float32."""
    part = update[start:stop]
    if update.dtype == np.float32:
        return part
    if update.dtype == np.uint16:
        return (part.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if scale is None:
        return part.astype(np.float32)
    blocks = scale[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)]
    return np.repeat(blocks, SCALE_BLOCK)[: part.size] * part.astype(np.float32)


def weighted_sum(given: SumArguments, threads: int) -> Doubles:
    given = given.checked()
    norms = np.empty(len(given.updates))
    with np.errstate(all="ignore"):
        total = np.zeros_like(given.out) if given.base is None else given.base.copy()
        for k, (update, scale) in enumerate(zip(given.updates, given.scales, strict=True)):
            total += given.weights[k] * decoded(update, scale, 0, update.size)
            norms[k] = _sq_norm(update, scale)
        given.out[:] = total
    if given.checksums is not None:
        given.checksums[:] = [checksum(update, threads) for update in given.updates]
    return norms


def weighted_step(given: StepArguments, threads: int) -> Doubles:
    total, optimizer, old, new = given.checked()
    assert total.base is not None
    mean = np.empty_like(total.out)
    norms = weighted_sum(total._replace(out=mean, base=None), threads)
    with np.errstate(all="ignore"):
        steps.apply(optimizer, total.out, total.base, mean, old, new)
    return norms


def quantize(given: QuantizationArguments, threads: int) -> float:
    given = given.checked()
    round_all(given)
    with np.errstate(all="ignore"):
        return _sq_norm(given.out, given.scales)


def round_all(given: QuantizationArguments) -> None:
    """Quantise an update as `quantize` does, for checked arguments; ``left`` receives the rounding errors."""
    with np.errstate(all="ignore"):
        y = given.weight * given.update
        if given.residual is not None:
            y += given.residual
        rounded(given.out, y, given.scales)
        if given.left is not None:
            left = y - decoded(given.out, given.scales, 0, y.size)
            given.left[:] = np.where(np.isfinite(left), left, np.float32(0))


def rounded(out: Update, y: Floats, scales: Floats | None) -> None:
    """Round ``y`` to the type of ``out`` and write it to ``out``; for int8, also write the scales."""
    if scales is not None:
        blocks = np.zeros((scales.size, SCALE_BLOCK), dtype=np.float32)
        blocks.reshape(-1)[: y.size] = y
        most = np.abs(blocks).max(axis=1, initial=0)
        scales[:] = np.where(np.isfinite(most), most / np.float32(127), np.float32(np.nan))
        usable = (scales > 0)[:, None]
        steps = np.clip(blocks / np.where(usable, scales[:, None], np.float32(1)), -127, 127)
        out[:] = np.where(usable, np.rint(steps), 0).reshape(-1)[: y.size].astype(np.int8)
    elif out.dtype == np.uint16:
        bits = y.view(np.uint32)
        high, odd = bits >> np.uint32(16), (bits >> np.uint32(16)) & np.uint32(1)
        nearest = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        out[:] = np.where(np.isnan(y), high | np.uint32(0x40), nearest).astype(np.uint16)
    else:
        out[:] = y.astype(out.dtype)


def trimmed_mean(given: RankArguments, threads: int) -> None:
    updates, scales, out, trim = given.checked()
    assert out is not None
    assert scales is not None
    kept = len(updates) - 2 * trim
    for start in range(0, out.size, _CHUNK):
        stop = min(start + _CHUNK, out.size)
        rows = [decoded(update, scale, start, stop) for update, scale in zip(updates, scales, strict=True)]
        total = np.zeros(stop - start)
        for row in np.sort(rows, axis=0)[trim : trim + kept]:  # np.add.reduce adds a single column pairwise
            total += row
        out[start:stop] = (total / kept).astype(np.float32)


def products(given: RankArguments, threads: int) -> Doubles:
    updates, scales, _, _ = given.checked()
    assert scales is not None
    found = np.zeros((len(updates), len(updates)))
    for start in range(0, updates[0].size, GRAIN):
        stop = min(start + GRAIN, updates[0].size)
        rows = np.zeros((len(updates), GRAIN // LANES, LANES))
        for row, update, scale in zip(rows, updates, scales, strict=True):
            row.reshape(-1)[: stop - start] = decoded(update, scale, start, stop)
        for k, row in enumerate(rows):  # numpy adds the rows in order
            found[k] += folded_lanes(np.add.reduce(rows * row, axis=1))
    return found


def sq_norm(update: object, scale: object | None, threads: int) -> float:
    with np.errstate(all="ignore"):
        return _sq_norm(*arguments.update("update", update, None, scale))


def _sq_norm(update: Update, scale: Floats | None) -> float:
    total = 0.0
    if scale is not None:
        for tile in int8_norms(update, scale).tolist():  # `sum` rounds only once on Python 3.12 and newer
            total += tile
        return total
    for start in range(0, update.size, _CHUNK):
        x = decoded(update, scale, start, min(start + _CHUNK, update.size)).astype(np.float64)
        squares = np.zeros((-(-x.size // TILE), TILE // LANES, LANES))
        np.multiply(x, x, out=squares.reshape(-1)[: x.size])
        lanes = np.add.reduce(squares, axis=1)  # numpy adds the rows in order
        for tile in folded_lanes(lanes).tolist():
            total += tile
    return total


def folded_lanes(lanes: Doubles) -> Doubles:
    """Sum each row of 8 lanes pairwise, in the order in which SIMD code halves vectors."""
    halves = lanes[:, :4] + lanes[:, 4:]
    pairs = halves[:, :2] + halves[:, 2:]
    sums: Doubles = pairs[:, 0] + pairs[:, 1]
    return sums


def int8_norms(update: Update, scale: Floats) -> Doubles:
    """Return Σ_b scale_b² · Σ q² over the 8 scale blocks of each tile; squares and inner sums are exact."""
    tiles = -(-update.size // TILE)
    padded = np.zeros((tiles * LANES, SCALE_BLOCK), dtype=np.int32)
    padded.reshape(-1)[: update.size] = update
    factors = np.zeros(len(padded))
    factors[: scale.size] = scale
    blocks = factors * factors * np.square(padded).sum(axis=1)
    return folded_lanes(blocks.reshape(tiles, LANES))


def field_sum(given: FieldSumArguments, threads: int) -> None:
    out, vectors, weights = given.checked()
    total, prime = np.zeros(out.size, np.uint64), np.uint64(PRIME)
    for vector, weight in zip(vectors, weights, strict=True):
        total += vector.astype(np.uint64) * np.uint64(weight) % prime  # numpy 1 would compute in uint32
    out[:] = total % prime


def field_encode(given: CodeArguments, threads: int) -> int:
    update, out, mask, factor, clip = given.checked()
    limit = np.float32(clip or 0.0)
    with np.errstate(all="ignore"):
        limited = np.maximum(np.where(update < limit, update, limit), -limit)
        out[:] = (np.rint(limited * np.float32(factor)).astype(np.int64) + mask) % PRIME
        return int(np.count_nonzero(limited != update))


def field_decode(given: CodeArguments, threads: int) -> int:
    out, words, mask, factor, _ = given.checked()
    signed = (words.astype(np.int64) - mask) % PRIME
    signed[signed > PRIME // 2] -= PRIME
    with np.errstate(all="ignore"):
        np.multiply(signed.astype(np.float32), np.float32(factor), out=out)
    return int(np.abs(signed).max(initial=0))


def words_of(update: object) -> tuple[NDArray[np.uint32], int, int]:
    """Return an update's complete uint32 words, its remaining bytes as a number, and its size in bytes."""
    data = arguments.flat("update", update).view(np.uint8)
    words = data[: data.size // 4 * 4].view("<u4")
    return words, int.from_bytes(data[words.size * 4 :].tobytes(), "little"), data.size


def checksum(update: object, threads: int) -> int:
    words, tail, size = words_of(update)
    s1, s2 = tail, (words.size + 1) * tail
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK].astype(np.uint64)
        position = np.arange(start + 1, start + 1 + part.size, dtype=np.uint64)
        s1 += int(part.sum())
        s2 += int((position * part).sum())
    return folded(s1, s2, size)


def folded(s1: int, s2: int, size_bytes: int) -> int:
    """Combine both sums and the size into one checksum; ef_folded in kernels/cpu.c explains the factors."""
    h = (s1 + 0x9E3779B97F4A7C16 * s2 + 0xD1B54A32D192ED03 * (size_bytes + 1)) & _MASK
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    h = (h ^ h >> 27) * 0x94D049BB133111EB & _MASK
    return h ^ h >> 31


def delta(out: object, trained: object, base: object) -> int:
    return checksum(difference(out, trained, base), 1)


def difference(out: object, trained: object, base: object) -> Floats:
    """Write trained − base to ``out`` and return it."""
    target, after, before = arguments.delta(out, trained, base)
    with np.errstate(all="ignore"):
        return np.subtract(after, before, out=target)


def observe(averages: Averages, ids: Ids, values: Doubles, means: Doubles) -> None:
    mode, width, decay, count, state = averages
    for i, (client, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True)):
        first, seen = client * width, int(count[client])
        if mode == 0:
            state[first + seen % width] = value
        elif mode == 1:
            state[first] += value
        else:
            state[first] = decay * float(state[first]) + (1.0 - decay) * value if seen else value
        count[client] = seen + 1
        means[i] = mean(averages, client)


def mean(averages: Averages, client: int) -> float:
    """Return the average of one client's observations; 0 before the first one."""
    mode, width, _, count, state = averages
    first, seen = client * width, int(count[client])
    if seen == 0:
        return 0.0
    if mode == 2:
        return float(state[first])
    if mode == 1:
        return float(state[first]) / seen
    total = 0.0
    for entry in state[first : first + min(seen, width)].tolist():
        total += entry
    return total / min(seen, width)
