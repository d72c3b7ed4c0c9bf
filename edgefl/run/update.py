"""Makes a client's update in a client or worker process.

The process trains the model, multiplies the change of the model by a gain if the strategy cuts the task short
(`Cut`), writes the update and computes its checksum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from edgefl import failpoints, kernels
from edgefl.core.events import Cohort
from edgefl.kernels.arguments import Floats, Update
from edgefl.kernels.selection import select
from edgefl.parameters.buffer import ParameterBuffer, Raw, blocks, exact_part, with_scales
from edgefl.run.connection import of_training, reason
from edgefl.run.hidden import HiddenUpdates, Phones, Trip, norm_limit
from edgefl.run.messages import Cut, Task, TaskResult, TripTimes
from edgefl.strategies.base import TripInputs, Until

if TYPE_CHECKING:
    from edgefl.learning.train import TrainResult
    from edgefl.run.workload import Workload


def amplify(trained: Floats, base: Floats, gain: float, per_step: bool, steps: int) -> None:
    """Replace the trained model y by w + gain·(y − w), where w is the base model.

    If ``per_step`` is True, the gain is divided by ``steps``. If ``steps`` is 0, the model is not changed.
    """
    if steps:
        np.subtract(trained, base, out=trained)
        np.multiply(trained, np.float32(gain / steps if per_step else gain), out=trained)
        np.add(trained, base, out=trained)


def loss_of(result: TrainResult) -> float:
    """Return the training loss as messages report it: NaN if it is not finite."""
    return result.loss if math.isfinite(result.loss) else math.nan


class UpdateMaker:
    """Makes updates in the format of the parameter buffer.

    An update is Δ = y − w, the trained model minus the base model, or y if the strategy uploads models. It
    also holds the changes of the strategy's exchanged vectors, after the model. The model is trained in
    ``workload.flat``, which must hold the base model w.
    """

    def __init__(self, workload: Workload, buffer: ParameterBuffer) -> None:
        self._workload, self._buffer, self._shape = workload, buffer, buffer.shape
        self._format = buffer.shape.update_format
        self._backend = kernels.backend()
        self._plain, self._delta = self._format.name == "float32", select(self._backend).delta
        self._hidden: HiddenUpdates | None = None
        experiment, secure = workload.experiment, workload.experiment.server.secure
        if (rules := workload.rules) is not None and secure is not None:
            phones = Phones(workload.phones_secret, experiment.seed, len(workload.known))
            self._hidden = HiddenUpdates(phones, secure.kind, rules, norm_limit(experiment, rules))
            self._plain = False
        self._sum: int | None = None
        self._clipped = 0
        self._allowed: int | None = None
        self._size, shape = workload.flat.size, buffer.shape
        self._blocks = blocks(self._size, len(workload.vectors))
        self._own = self._size * len(workload.client_vectors)
        """Number of elements in the client's own vectors. In the state that is kept for the client, the
        rounding residual follows these vectors."""
        self._residual = slice(self._own, None) if shape.kept > self._own else None
        self._start = np.zeros(shape.size, np.float32) if len(self._blocks) > 1 else None
        """Vector to subtract from the trained model and vectors: the base model, followed by zeros, because
        training writes the changes of the vectors itself; None if no vectors are exchanged."""

    def train(
        self,
        client: int,
        trip: int,
        version: int,
        base: Floats,
        done: Callable[[float], None] | None,
        cut: Cut | Until | None = None,
        steps: int | None = None,
    ) -> TrainResult:
        """Train the model for this trip of the client, and apply the gain of ``cut``.

        If ``steps`` is given, train for this number of steps.
        """
        given = self._inputs(client, version, base) if self._workload.needs_inputs else None
        start = base[: self._size]
        try:
            result = self._workload.train(client, trip, done, steps, given)
        except Exception as error:
            if not self._workload.protects or not of_training(error):
                raise
            result = self._workload.fail(start, reason(error))
        self._allowed = None if result.steps == steps else steps

        def apply_gain(model: Floats, made: int) -> None:
            if cut is not None and (cut.gain != 1.0 or cut.per_step):
                # The gain does not apply to the running statistics, the last elements of the model.
                weights = slice(self._size - self._workload.flat.buffers)
                amplify(model[weights], start[weights], cut.gain, cut.per_step, made)

        apply_gain(self._workload.flat.array, result.steps)
        if not_finite := self._workload.finish_update(client, trip, start, done, steps, apply_gain):
            result = result._replace(failed=result.failed or not_finite)
        if self._own:
            old, new = (self._buffer.kept(client, new=side)[: self._own] for side in (False, True))
            if result.failed or not np.isfinite(new).all():  # the update is dropped or replaced by zeros
                np.copyto(new, old)
        return result

    def _inputs(self, client: int, version: int, base: Floats) -> TripInputs:
        """Return a trip's inputs; set the arrays for the changes of the exchanged vectors to zero."""
        size, workload, kept = self._size, self._workload, {}
        whole = workload.flat.whole
        whole[size:] = 0.0
        if self._start is not None:
            np.copyto(self._start[:size], base[:size])
        if self._own:
            new = self._buffer.kept(client, new=True)[: self._own]
            np.copyto(new, self._buffer.kept(client)[: self._own])
            kept = dict(zip(workload.client_vectors, new.reshape(-1, size), strict=True))
        start, *vectors = (base[block] for block in self._blocks)
        send = [whole[block] for block in self._blocks[1:]]
        names = workload.vectors
        return TripInputs.of(
            version,
            start,
            dict(zip(names, vectors, strict=True)),
            dict(zip(names, send, strict=True)),
            kept,
            workload.flat.buffers,
        )

    def write(
        self,
        raw: Raw,
        client: int,
        task: int,
        base: Floats,
        start: int = 0,
        stop: int | None = None,
        cohort: Cohort | None = None,
    ) -> None:
        """Write bytes ``start`` to ``stop`` of a task's update. Parts must be written in ascending order.

        A rounded or hidden update is written completely at ``start`` = 0, which overwrites the trained model.
        """
        stop, trained = raw.size if stop is None else stop, self._workload.flat.whole
        base = base if self._start is None else self._start
        model = self._workload.upload == "model"
        if self._plain and not model and stop - start == raw.size:
            self._sum = self._delta(raw.view(np.float32), trained, base)
        elif self._plain:
            self._sum = None
            part = slice(start // 4, stop // 4)  # a link may break within a number
            floats = raw[4 * part.start : 4 * part.stop].view(np.float32)
            if model:
                np.copyto(floats, trained[part])
            else:
                np.subtract(trained[part], base[part], out=floats)
        elif start == 0 and self._hidden is not None:
            np.subtract(trained, base, out=trained)
            trip = Trip(client, task, cohort, self._workload.own_weight(client))
            self._clipped = self._hidden.write(raw, trained, trip)
        elif start == 0:
            old = new = None  # rounding residual of the client's last update, and of this one
            if not model:
                np.subtract(trained, base, out=trained)
                if self._residual is not None:
                    old, new = self._buffer.kept(client), self._buffer.kept(client, new=True)
                    old, new = old[self._residual], new[self._residual]
            if (exact := exact_part(raw, self._shape)) is not None:
                statistics = trained[self._size - exact.size : self._size]
                exact[:] = statistics
                statistics[:] = 0.0
            values, scales = self._parts(raw)
            kernels.quantize(values, trained, scales=scales, residual=old, new_residual=new)

    def checksum(self, raw: Raw) -> int:
        """Return the checksum of the last complete update."""
        if self._sum is not None:
            return self._sum
        values, scales = self._parts(raw)
        exact = exact_part(raw, self._shape)
        return with_scales(kernels.checksum(values, self._backend), scales, exact)

    def result(
        self, task: Task, trained: TrainResult, checksum: int, cpu_s: float, times: TripTimes | None = None
    ) -> TaskResult:
        """Build the report on a task whose update is complete; a client adds its measured ``times``."""
        return TaskResult(
            task=task.task,
            trained_version=task.version - failpoints.hit("stale", task.client, task.trip),
            steps=trained.steps,
            loss=loss_of(trained),
            checksum=checksum,
            cpu_s=cpu_s,
            peak_mib=self._workload.peak_mib(task.client),
            metrics=dict(trained.metrics),
            counted=trained.counted,
            failed=trained.failed,
            order=task.order,
            times=times,
            clipped=self._clipped,
            allowed=self._allowed,
        )

    def _parts(self, raw: Raw) -> tuple[Update, Floats | None]:
        return self._format.values(raw, self._shape.size), self._format.scales(raw, self._shape.size)
