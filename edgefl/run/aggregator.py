"""Sums updates to make the next version of the model.

A sum reads updates in place, in their slots, and writes the next version into a ring entry that no process
reads. If an update was altered or is not finite, the sum is discarded and the latest version remains.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np

from edgefl import failpoints, kernels
from edgefl.core.events import Sum
from edgefl.core.strategy_calls import combined
from edgefl.errors import RunError
from edgefl.experiment import Experiment
from edgefl.kernels.arguments import SCALE_BLOCK, Checksums, Doubles, Floats, Update
from edgefl.kernels.steps import ServerOptimizer, start
from edgefl.parameters.buffer import ParameterBuffer, blocks, with_scales
from edgefl.privacy.mechanism import Clipped, Mechanism
from edgefl.privacy.source import Source
from edgefl.results.rows import Aggregation
from edgefl.run.hidden import HiddenSums, Members, id_of, rounding_warning
from edgefl.run.slots import Lease, Slots
from edgefl.secure import SecureError
from edgefl.strategies.base import Strategy, VectorSum
from edgefl.strategies.rows import Rows

SAFE_STEP = 1e18
"""A step that cannot change any element by more than this bound is not checked for overflow: the bound and
its square, which adaptive optimisers compute, are far below the maximum of float32."""


class SumResult(msgspec.Struct):
    """Result of a sum. If ``bad`` lists tasks whose updates are unusable, no version was published; otherwise
    ``norms`` holds the squared norms of the updates."""

    bad: tuple[int, ...] = ()
    altered: tuple[int, ...] = ()
    """Tasks whose update no longer has the checksum with which it was sent."""
    checksums: tuple[int, ...] = ()
    seconds: float = 0.0
    norms: Sequence[float] = ()
    clip_norm: float | None = None
    salt: str = ""
    zero: tuple[int, ...] = ()
    """With differential privacy, the tasks whose updates were replaced by zeros; see `Summed.zero`."""
    weights: tuple[float, ...] = ()
    """The weights that `Strategy.combine` chose; empty if it returned a combined vector instead, or if the
    strategy does not read individual updates."""
    refused: str = ""
    """Reason why a sum of hidden (masked or encrypted) updates was refused, so none of them is used. Empty
    if it was not refused."""
    rounded: str = ""
    """Warning if rounding distorted the first sum of masked updates; empty if not."""


@dataclass
class Aggregator(Slots):
    """Manages the slots, the ring entries and the sums of one parameter buffer. It is not thread-safe."""

    optimizer: ServerOptimizer
    backend: str | None = None
    privacy: Mechanism | None = None
    deferred: Sum | None = None
    """Sum that waits for a free ring entry."""
    waiting: Sum | None = None
    """Sum that waits until enough clients are online to unmask it, or until their exchange of shares ends."""
    exchanged: Sequence[str] = ()
    """Names of the vectors that the server and the clients exchange in addition to the model."""
    own: Sequence[str] = ()
    """Names of the vectors that only the server has; in a ring entry they follow the optimiser's vectors."""
    hidden: HiddenSums | None = None
    """Sums hidden (masked or encrypted) updates; None if the server can read individual updates."""
    combine: Callable[[Rows, Sequence[float]], list[float] | Floats] | None = None
    """Function that combines the updates for a strategy that reads them one by one; see
    `edgefl.core.strategy_calls.combined`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._backend = kernels.backend(self.backend)
        self.totals = SimpleNamespace(updates=0, seconds=0.0, bytes=0)
        self._clipped = Clipped([], 0)
        self._chosen: tuple[float, ...] = ()  # weights that `combine` chose for the step
        self._zero: set[int] = set()  # tasks whose updates count as zero
        self._salt = self._refused = self._rounded = ""

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        strategy: Strategy,
        buffer: ParameterBuffer,
        size: int,
        source: Source | None = None,
        statistics: int = 0,
    ) -> Aggregator:
        """Create the aggregator of a run whose model has ``size`` elements.

        ``source`` is the source of privacy noise. The last ``statistics`` of the elements are the module's
        buffers, such as the running statistics of batch normalisation.
        """
        assert isinstance(experiment.fleet.devices, dict)
        most = strategy.max_weight(sum(experiment.fleet.devices.values()))
        rules, private = experiment.privacy, None
        if rules is not None and rules.central and most is not None and source is not None:
            private = Mechanism(rules, most, source)
        return cls(
            buffer,
            strategy.optimizer(),
            experiment.server.kernel_backend,
            private,
            blocks=blocks(size, len(strategy.vectors)),
            measures=strategy.measures,
            exchanged=strategy.vectors,
            own=strategy.server_vectors,
            statistics=statistics,
            combine=partial(combined, strategy) if strategy.reads == "updates" else None,
        )

    def restore_noise(self, salts: dict[int, str]) -> None:
        """Restore the privacy noise of the versions that an earlier process made.

        ``salts`` holds the salt of each version's noise; see `edgefl.core.events.Summed.salt`.
        """
        if self.privacy is not None:
            self.privacy.tree.restore(salts)

    def begin(self) -> None:
        """Initialise the optimiser's vectors for the first version. The strategy's vectors start as zeros."""
        start(self.optimizer, self.buffer.vectors(self.buffer.latest[1])[: self.optimizer.vectors])

    def measure(self, lease: Lease) -> tuple[float, float]:
        """Return two L2 norms: ‖u‖ of the update u of a task, and ‖w_n − w_k‖ of the change from the task's
        base version w_k to the latest version w_n."""
        buffer, slot, backend, block = self.buffer, lease.slot, self._backend, self.blocks[0]
        (update,), (scale,) = self._updates([slot], block)
        norm = math.sqrt(kernels.sq_norm(update, backend, scale=scale) + sum(self._exact_squares([slot])))
        latest, base, distance = buffer.latest[1], self._bases[slot], 0.0
        if base != latest:
            now, then = (buffer.model(entry)[block] for entry in (latest, base))
            change = np.empty_like(now)
            kernels.weighted_sum(change, now, [then], [-1.0], backend)
            distance = math.sqrt(kernels.sq_norm(change, backend))
        return (norm if math.isfinite(norm) else math.inf), distance

    def count(self, sums: int, updates: int, seconds: float) -> None:
        """Add ``sums`` sums, which used ``updates`` updates in total, to the totals that `cost` returns."""
        shape, totals = self.buffer.shape, self.totals
        totals.updates += updates
        totals.seconds += seconds
        totals.bytes += updates * shape.update_bytes + sums * 2 * 4 * shape.size

    def cost(self) -> Aggregation:
        """Return the totals of all sums so far: updates, bytes and seconds."""
        threads = kernels.threads() if self._backend in ("c", "numba") else 1
        return Aggregation(backend=self._backend, threads=threads, **vars(self.totals))

    def members(self, action: Sum, *, zero: bool) -> Members:
        """Return the client, the slot and the weight of each update in a hidden sum.

        With differential privacy, updates that are replaced by zeros are included only if ``zero`` is True.
        """
        assert self.hidden is not None
        leases, size = [self.leases[task] for task in action.tasks], self.hidden.rules.size
        pairs, whole = zip(action.tasks, leases, action.weights, strict=True), zero or self.privacy is None
        return [
            (lease.client, lease.slot, weight)
            for task, lease, weight in pairs
            if whole or (task not in self._zero and any(id_of(self.buffer.raw(lease.slot), size)))
        ]

    def sum(self, action: Sum, entry: int, zero: Sequence[int] = ()) -> SumResult:
        """Make version ``action.version`` in ring entry ``entry`` and publish it, unless an update is bad.

        A differentially private step counts a bad update as zero instead. When a step is repeated after a
        resume, ``zero`` lists the tasks whose updates were bad the first time.
        """
        failpoints.pass_by("sum")
        self.buffer.retire(entry)
        self._zero, self._refused, self._rounded = set(zero), "", ""
        while (result := self._attempt(action, entry)) is None:
            pass
        return result

    def _attempt(self, action: Sum, entry: int) -> SumResult | None:
        """Try the sum once; return None if it must be repeated with some updates counted as zero."""
        buffer, leases, tasks = self.buffer, self.leases, action.tasks
        slots = [leases[task].slot for task in tasks]
        altered: tuple[int, ...] = ()
        started = time.perf_counter()
        try:
            norms, seen = self._make_model(action, slots, entry)
        except SecureError as error:
            if self.privacy is not None:  # which updates are dropped must not depend on data, so drop all
                self._zero.update(tasks)
                self._refused = str(error)
                return None
            sums = tuple(kernels.checksum(buffer.slot(slot), self._backend) for slot in slots)
            return SumResult(bad=tasks, checksums=sums, refused=str(error))
        whole = norms
        if self.exchanged or self.own:
            whole = [*map(sum, zip(norms, self._make_vectors(action, slots, entry), strict=True))]
        sent = tuple([buffer.checksum[slot] for slot in slots])
        if sent != seen:
            altered = tuple(task for task, was, now in zip(tasks, sent, seen, strict=True) if was != now)
            if self.privacy is None:
                return SumResult(bad=altered, altered=altered, checksums=seen)
            if not self._zero.issuperset(altered):
                self._zero.update(altered)
                return None
        if not all(map(math.isfinite, whole)):
            bad = tuple(task for task, norm in zip(tasks, whole, strict=True) if not math.isfinite(norm))
            return SumResult(bad=bad, checksums=seen)
        seconds = time.perf_counter() - started
        weights = action.weights if self.combine is None else self._chosen or (1.0,) * len(slots)
        sizes = [abs(weight) * math.sqrt(norm) for weight, norm in zip(weights, whole, strict=True)]
        # The total of `sizes` is an upper bound on the change of every element, so it is rarely necessary to
        # check all elements. It does not cover the sums in `parts`, or a vector that the strategy combined.
        unbounded = bool(action.parts) or (self.combine is not None and not self._chosen)
        if unbounded or max(1.0, self.optimizer.lr) * sum(sizes) > SAFE_STEP:
            made = (buffer.model(entry), *buffer.vectors(entry))
            if not all(np.isfinite(vector).all() for vector in made):  # drop the largest update
                if self.privacy is not None:  # dropping the update would reveal its size
                    why = "numbers in the updates are too large"
                    raise RunError(f"version {action.version} of the model would not be finite: {why}")
                return SumResult(bad=(tasks[sizes.index(max(sizes))],), checksums=seen)
        failpoints.pass_by("summed")
        buffer.publish(action.version, entry)
        failpoints.pass_by("published")
        self.count(1, len(slots), seconds)
        next_norm = None
        if self.privacy is not None and action.clip_norm is not None:
            next_norm = self.privacy.next_norm(action.version, self._clipped, action.clip_norm, self._salt)
        zero = tuple(task for task in tasks if task in self._zero)
        return SumResult(
            (),
            altered,
            seen,
            seconds,
            norms,
            next_norm,
            self._salt,
            zero,
            self._chosen,
            self._refused,
            self._rounded,
        )

    def _make_model(self, action: Sum, slots: list[int], entry: int) -> tuple[list[float], tuple[int, ...]]:
        """Write the next model and the optimiser's vectors.

        For each update, return the squared norm of its change to the model, and its checksum.
        """
        if self.hidden is not None:
            return self._make_hidden(action, slots, entry)
        buffer, block = self.buffer, self.blocks[0]
        updates, scales = self._updates(slots, block)
        weights, scaled = list(action.weights), buffer.shape.update_format.scaled
        model = buffer.model(entry)[block]
        exact = [found for slot in slots if (found := buffer.exact(slot)) is not None]
        decoded = bool(exact) and self.combine is not None
        if decoded:
            updates, scales, exact = self._decoded(updates, scales, exact), [None] * len(updates), []
        added = self._exact_squares(slots) if exact else [0.0] * len(slots)
        if self.privacy is not None and action.clip_norm is not None:
            parts = zip(updates, scales, added, strict=True)
            squares = [
                kernels.sq_norm(update, self._backend, scale=scale) + more for update, scale, more in parts
            ]
            self._zero |= {
                task for task, square in zip(action.tasks, squares, strict=True) if not math.isfinite(square)
            }
            for place in self._zero_places(action):
                squares[place], updates[place] = 0.0, np.zeros_like(updates[place])
                if (scale := scales[place]) is not None:
                    scales[place] = np.zeros_like(scale)
                if exact:
                    exact[place], added[place] = np.zeros_like(exact[place]), 0.0
            self._clipped = self.privacy.clip(weights, squares, action.clip_norm)
            weights = self._clipped.weights
            if deviation := self.privacy.deviation(action.clip_norm):
                numbers = np.array([action.version, *weights, deviation]).tobytes()
                summed = [task for task in action.tasks if task not in self._zero]
                pieces = [buffer.raw(self.leases[task].slot).data for task in summed]
                self._salt = self.privacy.source.digest(numbers, *pieces)
                updates = [*updates, self.privacy.noise(action.version, model.size, self._salt)]
                weights, scales = [*weights, deviation], [*scales, None]
        sums = None if self.exchanged or decoded else np.empty(len(updates), dtype=np.uint64)
        if self.combine is None:
            norms = self._step(action, entry, updates, weights, scales, sums, exact)
        else:  # compute norms and checksums first, because the strategy must read only finite updates
            zeros, given = [0.0] * len(updates), scales if scaled else None
            norms = kernels.weighted_sum(
                model, None, updates, zeros, self._backend, scales=given, checksums=sums
            )
            if np.isfinite(norms).all():
                self._step(action, entry, *self._combined(action, updates, scales))
        if sums is None:  # a checksum covers the whole update, including its vectors
            seen = [kernels.checksum(buffer.slot(slot), self._backend) for slot in slots]
        else:
            seen = sums[: len(slots)].tolist()
        for place in self._zero_places(action):
            seen[place] = kernels.checksum(buffer.slot(slots[place]), self._backend)
        if scaled or buffer.shape.exact:
            pairs = zip(seen, slots, strict=True)
            seen = [with_scales(one, buffer.scales(slot), buffer.exact(slot)) for one, slot in pairs]
        return (norms[: len(slots)] + added).tolist(), tuple(seen)

    def _exact_squares(self, slots: Sequence[int]) -> list[float]:
        """Return the squared norm of the running statistics in each slot; 0 unless they are stored as float32
        after a rounded update."""
        parts = map(self.buffer.exact, slots)
        return [0.0 if part is None else kernels.sq_norm(part, self._backend) for part in parts]

    def _decoded(
        self, updates: list[Update], scales: list[Floats | None], exact: Sequence[Floats]
    ) -> list[Update]:
        """Return rounded updates as float32, ending with their running statistics, which are not rounded."""
        made: list[Update] = []
        for update, scale, part in zip(updates, scales, exact, strict=True):
            out, given = np.empty(update.size, np.float32), None if scale is None else [scale]
            kernels.weighted_sum(out, None, [update], [1.0], self._backend, scales=given)
            out[-part.size :] = part
            made.append(out)
        return made

    def _make_hidden(self, action: Sum, slots: list[int], entry: int) -> tuple[list[float], tuple[int, ...]]:
        """Write the next model from the sum of hidden updates.

        For each update, return an upper bound on its squared norm, and the checksum of the hidden update.
        """
        assert self.hidden is not None
        buffer, size = self.buffer, self.hidden.rules.size
        seen = tuple(kernels.checksum(buffer.slot(slot), self._backend) for slot in slots)
        bounds = [buffer.shape.size * self.hidden.rules.clip**2] * len(slots)
        sent = (buffer.checksum[slot] for slot in slots)
        altered = {task for task, was, now in zip(action.tasks, sent, seen, strict=True) if was != now}
        if not altered <= self._zero:
            return bounds, seen  # the caller drops altered updates; do not request their sum
        members = self.members(action, zero=False)
        total, unit = np.zeros(size, np.float32), 1.0
        if members:
            total, unit = self.hidden.sum(buffer, members)
            if action.version == 1:
                self._rounded = rounding_warning(self.hidden.rules, total, unit, members)
        vectors, factors = [total], [unit]
        mechanism, norm = self.privacy, action.clip_norm
        if mechanism is not None and norm is not None and (deviation := mechanism.deviation(norm)):
            exact = np.array([action.version, *(weight for *_, weight in members), deviation]).tobytes()
            pieces = [buffer.raw(slot).data for _, slot, _ in members]
            self._salt = mechanism.source.digest(exact, *pieces)
            vectors.append(mechanism.noise(action.version, size, self._salt))
            factors.append(deviation)
        self._step(action, entry, vectors, factors, [None] * len(vectors))
        return bounds, seen

    def _step(
        self,
        action: Sum,
        entry: int,
        updates: list[Update],
        weights: Sequence[float],
        scales: list[Floats | None],
        checksums: Checksums | None = None,
        exact: Sequence[Floats] = (),
    ) -> Doubles:
        """Write the next model from these updates and weights; return the squared norms of the updates.

        If ``checksums`` is given, it is filled with the updates' checksums. ``exact`` holds the running
        statistics of the updates if the updates themselves are rounded.
        """
        buffer, old_entry, block = self.buffer, self.buffer.latest[1], self.blocks[0]
        model, base = (buffer.model(at)[block] for at in (entry, old_entry))
        old, new = (buffer.vectors(at)[: self.optimizer.vectors] for at in (old_entry, entry))
        norms = kernels.weighted_step(
            model,
            base,
            updates,
            weights,
            self.optimizer,
            [vector[block] for vector in old],
            [vector[block] for vector in new],
            self._backend,
            base_scale=action.base_scale,
            scales=scales if any(scale is not None for scale in scales) else None,
            checksums=checksums,
        )
        self._average(action, model, base, weights, updates, scales, exact)
        return norms

    def _combined(
        self, action: Sum, updates: list[Update], scales: list[Floats | None]
    ) -> tuple[list[Update], list[float], list[Floats | None]]:
        """Let the strategy combine the updates; return the vectors to sum, their weights and their scales.

        If the strategy chose weights, the vectors are the updates; otherwise there is one combined vector.
        """
        assert self.combine is not None
        clients = [self.leases[task].client for task in action.tasks]
        given = scales if self.buffer.shape.update_format.scaled else None
        found = self.combine(Rows(updates, given, clients, self._backend), action.weights)
        if isinstance(found, np.ndarray):
            self._chosen = ()
            return [np.ascontiguousarray(found)], [1.0], [None]
        self._chosen = tuple(found)
        return updates, found, scales

    def _zero_places(self, action: Sum) -> list[int]:
        return [place for place, task in enumerate(action.tasks) if task in self._zero]

    def _average(
        self,
        action: Sum,
        model: Floats,
        base: Floats,
        weights: Sequence[float],
        updates: list[Update],
        scales: list[Floats | None],
        exact: Sequence[Floats],
    ) -> None:
        """Write the next running statistics: the weighted average of the clients' statistics.

        The weights are those of the step, or those that `Strategy.combine` chose. Negative weights count as
        0, because a negative share of a variance could make the average negative. If the weights add up to
        more than 1, they are divided by their sum. Differential privacy forbids this division, because the
        sum may reveal how many clients were drawn. An update holds the change of the statistics since its
        base version, so the difference between the base version and the latest version is added.
        """
        if not self.statistics:
            return
        first = model.size - self.statistics
        if exact:  # after the updates there may be noise
            updates = [*exact, *(noise[first:] for noise in updates[len(exact) :])]
            scales = [None] * len(updates)
        else:
            first = first // SCALE_BLOCK * SCALE_BLOCK
            updates = [update[first:] for update in updates]
            scales = [None if scale is None else scale[first // SCALE_BLOCK :] for scale in scales]
        base_scale = 1.0 if self.buffer.shape.statistics else action.base_scale
        shares, total = self._chosen or action.weights, 1.0
        if base_scale == 1.0 and self.privacy is None:
            shares = tuple(max(0.0, share) for share in shares)
            weights = [max(0.0, weight) for weight in weights]
            total = max(1.0, sum(shares))
        one = self.combine is not None and not self._chosen  # the strategy combined the updates
        part = VectorSum(weights if one else [weight / total for weight in weights], base_scale)
        made = np.empty(model.size - first, np.float32)
        self._vector_sum(made, base[first:], part, updates, scales)
        averaged, latest = made[-self.statistics :], base[-self.statistics :]
        if self.buffer.shape.statistics:
            slots = [self.leases[task].slot for task in action.tasks]
            older = [self.buffer.statistics(slot) - latest for slot in slots]
            if any(change.any() for change in older):  # otherwise keep the bits of the plain average
                changes, factors = [averaged, *older], [1.0, *(share / total for share in shares)]
                averaged = np.empty_like(averaged)
                kernels.weighted_sum(averaged, None, changes, factors, self._backend)
        model[-self.statistics :] = averaged

    def _make_vectors(self, action: Sum, slots: list[int], entry: int) -> list[float]:
        """Write the strategy's next vectors; add ``into_model`` times each vector to the model.

        For each update, return the squared norm of its changes to the exchanged vectors.
        """
        entries, norms = (entry, self.buffer.latest[1]), np.zeros(len(slots))
        model = self.buffer.model(entry)[self.blocks[0]]
        weights = slice(model.size - self.statistics)
        for place, name in enumerate((*self.exchanged, *self.own), start=1):
            sent = place < len(self.blocks)
            block = self.blocks[place if sent else 0]
            if sent:
                out, base = (self.buffer.model(at)[block] for at in entries)
            else:
                own = self.optimizer.vectors + place - len(self.blocks)
                out, base = (self.buffer.vectors(at)[own][block] for at in entries)
            part = action.parts.get(name, VectorSum(action.weights if sent else [0.0] * len(slots)))
            found = self._vector_sum(out, base, part, *self._updates(slots, block))
            norms += found if sent else 0.0
            if part.into_model:
                model[weights] += np.float32(part.into_model) * out[weights]
        return norms.tolist()

    def _vector_sum(
        self, out: Floats, base: Floats, part: VectorSum, updates: list[Update], scales: list[Floats | None]
    ) -> Doubles:
        """Write base_scale · base + Σ weights[k] · updates[k] to ``out``.

        Return the updates' squared norms.
        """
        weights, start = list(part.weights), None if part.base_scale == 0.0 else base
        if part.base_scale not in (0.0, 1.0):  # add the base as one more vector
            updates, scales, weights = [base, *updates], [None, *scales], [part.base_scale, *weights]
            start = None
        given = scales if self.buffer.shape.update_format.scaled else None
        norms = kernels.weighted_sum(out, start, updates, weights, self._backend, scales=given)
        return norms[-len(part.weights) :]

    def _updates(self, slots: list[int], block: slice) -> tuple[list[Update], list[Floats | None]]:
        """Return one block of elements of each update in these slots, and the scales of these elements."""
        buffer = self.buffer
        if not self.exchanged:
            return [buffer.slot(slot) for slot in slots], [buffer.scales(slot) for slot in slots]
        part = slice(block.start // SCALE_BLOCK, -(-block.stop // SCALE_BLOCK))
        scales = [None if (scale := buffer.scales(slot)) is None else scale[part] for slot in slots]
        return [buffer.slot(slot)[block] for slot in slots], scales
