"""A client's training by the user's own function, ``train(model, examples, context)``.

``model`` contains the downloaded parameters w_k at the start and the trained parameters y at the end.
`ClientExamples` are the examples of the client; `Context` describes the trip (download, training and upload)
and counts its steps, which determine the time on the device. docs/clients.md contains example functions.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float32, from_numpy, set_default_dtype, set_grad_enabled
from torch.nn.functional import cross_entropy

from edgefl.errors import ConfigError, TrainingError, described
from edgefl.learning.arithmetic import Arithmetic, torch_seed
from edgefl.learning.dataset import Examples
from edgefl.learning.flat import FlatModel
from edgefl.learning.losses import Loss
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Rows, TrainResult
from edgefl.loading import signature
from edgefl.strategies.base import TripInputs

MAX_METRICS = 16
"""Maximum number of metrics that a trip may log."""
LONGEST_NAME = 32

TrainFunction = Callable[[Any, "ClientExamples", "Context"], object]


class Context:
    """One trip of one client: its identifiers, its inputs, and the count of its steps.

    ``client``, ``trip`` and ``version`` are whole numbers, ``rule`` is the experiment's ``[training]`` table,
    ``criterion(outputs, targets)`` is the experiment's loss, and ``rng`` is a numpy generator for this trip
    (torch is also seeded for the trip). ``start`` is w_k, and ``vectors`` are the vectors that the strategy
    broadcasts; all are read-only and float32 of shape (size,). Vectors written to ``send[name]`` are sent
    with the update. ``kept[name]`` is a vector that the client keeps between trips; a change takes effect
    once the server accepts the update.
    """

    def __init__(
        self,
        client: int,
        trip: int,
        given: TripInputs,
        rule: LocalRule,
        rng: np.random.Generator,
        sizes: Sequence[int],
        criterion: Loss,
        done: Callable[[int], None] | None = None,
    ) -> None:
        self.criterion = criterion
        self.client, self.trip, self.version = client, trip, given.version
        self.rule, self.rng = rule, rng
        self.start, self.vectors = given.start, given.vectors
        self.send, self.kept = given.send, given.kept
        self.metrics: dict[str, float] = {}
        """The values that were passed to `log`, keyed by name."""
        self.steps = 0
        """Number of steps recorded so far."""
        self.examples = 0
        """Number of examples used in these steps."""
        self.counted: int | None = None
        """Number of examples by which a strategy weights the update; None for all examples of the client."""
        self.stopped: BaseException | None = None
        """Exception with which edgefl ended the trip: the task was cancelled, or device memory ran out."""
        self._sizes, self._done = sizes, done
        self._loss, self._weight = 0.0, 0

    @property
    def left(self) -> int:
        """Number of steps that are left in this trip."""
        return len(self._sizes) - self.steps

    @property
    def loss(self) -> float:
        """Mean of the losses passed to `step`, weighted by examples; NaN if none was passed."""
        return self._loss / self._weight if self._weight else math.nan

    def step(self, examples: int, loss: float | Tensor | None = None) -> bool:
        """Record one step on this number of examples; return True while the trip has steps left.

        Under the wall clock, the call waits until the device would have finished the step. It raises an
        exception if the task was cancelled, and `TrainingError` if the trip has no steps left: ``[training]``
        limits the number of steps, and so do strategies that end trips at a given time.
        """
        count = operator.index(examples)
        if count < 1:
            raise ValueError(f"step: examples must be at least 1 (got {count})")
        if self.stopped is not None:  # the user's function caught the exception and continued
            raise self.stopped
        if self.left <= 0:
            raise TrainingError(
                f"made more steps than the {len(self._sizes)} that [training] allows this trip: end when "
                "context.step(…) is false, or loop over examples.batches()"
            )
        if loss is not None:
            self._loss += _figure(loss) * count
            self._weight += count
        self.steps += 1
        self.examples += count
        self._account(self._sizes[self.steps - 1])
        return self.left > 0

    def log(self, **metrics: float | Tensor) -> None:
        """Record metrics of this trip; a later value replaces an earlier value of the same name.

        Values that are not finite become NaN.
        """
        for name, value in metrics.items():
            figure = _figure(value)
            self.metrics[name] = figure if math.isfinite(figure) else math.nan
        if len(self.metrics) > MAX_METRICS or any(len(name) > LONGEST_NAME for name in metrics):
            raise ValueError(
                f"log accepts at most {MAX_METRICS} metrics, with names of up to {LONGEST_NAME} letters "
                f"(got {len(self.metrics)} metrics)"
            )

    def finish(self) -> None:
        """Account for the steps that the function did not take; the device spends their time anyway."""
        for size in self._sizes[self.steps :]:
            self._account(size)

    def _account(self, size: int) -> None:
        if self._done is not None:
            try:
                self._done(size)
            except BaseException as why:
                self.stopped = why
                raise


class ClientExamples:
    """The examples of a client, as torch tensors."""

    def __init__(
        self,
        x: Examples,
        y: NDArray[Any],
        rows: Rows,
        context: Context,
        to: Callable[[NDArray[Any], NDArray[Any]], tuple[Tensor, Tensor]],
    ) -> None:
        self._x, self._y, self._rows, self._context, self._to = x, y, rows, context, to

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def x(self) -> Tensor:
        """All inputs, as a tensor of shape (n, *input_shape)."""
        return self._tensors_of(self._rows)[0]

    @cached_property
    def y(self) -> Tensor:
        """All labels, as a tensor of shape (n, …)."""
        return self._tensors_of(self._rows)[1]

    def batches(self, size: int | None = None, epochs: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of ``size`` (default: ``training.batch_size``), in a new seeded order in each epoch.

        The batches end after ``epochs`` epochs, or when the trip has no steps left. Call `Context.step` after
        each batch.
        """
        context = self._context
        size, epoch = size or context.rule.batch_size, 0
        while context.left and (epochs is None or epoch < epochs):
            order, before, epoch = context.rng.permutation(self._rows), context.steps, epoch + 1
            for first in range(0, len(order), size):
                if not context.left:
                    return
                yield self._tensors_of(order[first : first + size])
            if context.steps == before and epochs is None:
                raise TrainingError(
                    "made no step in an epoch: call context.step(len(y), loss) after each batch"
                )

    def _tensors_of(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return self._to(self._x[rows], self._y[rows])


class CustomTrainer:
    """Trains a model in place with the user's ``function``, which error messages refer to as ``name``.

    >>> from torch import nn, optim
    >>> def train(model, examples, context):
    ...     sgd = optim.SGD(model.parameters(), lr=context.rule.lr)
    ...     for x, y in examples.batches():
    ...         loss = context.criterion(model(x), y)
    ...         sgd.zero_grad()
    ...         loss.backward()
    ...         sgd.step()
    ...         context.step(len(y), loss)
    ...     context.log(last=loss)
    >>> flat = FlatModel(nn.Linear(2, 3))
    >>> x, y, rows = np.zeros((5, 2), np.float32), np.arange(5) % 3, np.arange(5)
    >>> trainer = CustomTrainer(flat, train, "here:train", LocalRule(epochs=1, batch_size=2))
    >>> trainer.run(x, y, rows, 0, 0, TripInputs(0, flat.array.copy()), np.random.default_rng(0)).steps
    3
    """

    def __init__(
        self,
        flat: FlatModel,
        function: TrainFunction,
        name: str,
        rule: LocalRule,
        criterion: Loss = cross_entropy,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self._criterion = criterion
        self._flat, self._function, self._name, self._rule = flat, function, name, rule
        self._arithmetic = arithmetic or Arithmetic()

    def run(
        self,
        x: Examples,
        y: NDArray[Any],
        rows: Rows,
        client: int,
        trip: int,
        given: TripInputs,
        rng: np.random.Generator,
        done: Callable[[int], None] | None = None,
        steps: int | None = None,
        rule: LocalRule | None = None,
    ) -> TrainResult:
        """Run one trip from the model's current state, on the examples in ``rows`` of ``x`` and ``y``.

        ``done`` and ``steps`` are as in `edgefl.learning.train.Trainer.run`; ``rule`` replaces the rule of
        the trainer. If the function fails, the method raises a `TrainingError` that names the function and
        the line.
        """
        flat, rule, device = self._flat, rule or self._rule, self._flat.vector.device
        sizes = list(rule.batches(len(rows), steps))
        context = Context(client, trip, given, rule, rng, sizes, self._criterion, done)
        if sizes:
            flat.begin_training()
            flat.clear_gradients()  # those of the last trip in this process, perhaps of another client
            try:
                with torch_seed(int(rng.integers(2**63)), device):
                    self._call(ClientExamples(x, y, rows, context, self._tensors), context)
                self._gather()
            finally:  # the next trip in this process may belong to another client
                flat.restore()
                set_grad_enabled(True)
                set_default_dtype(float32)
            flat.pull()
            context.finish()
        return TrainResult(context.steps, context.examples, context.loss, context.metrics, context.counted)

    def _tensors(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[Tensor, Tensor]:
        device = self._flat.vector.device
        return self._arithmetic.batch(x, device), from_numpy(y).to(device)

    def _gather(self) -> None:
        """Copy the trained model into the flat vector, including tensors that the function replaced."""
        try:
            self._flat.gather()
        except ConfigError as error:
            raise TrainingError(f"{self._name!r}{_place(self._function)} {error}") from None

    def _call(self, examples: ClientExamples, context: Context) -> None:
        process = os.getpid()
        try:
            self._function(self._flat.module, examples, context)
        except MemoryError:
            raise
        except BaseException as error:  # also SystemExit and KeyboardInterrupt, which would end the process
            if error is not context.stopped:
                raise raised(self._function, self._name, error) from error
            raise
        finally:
            if os.getpid() != process:  # the function forked: end the copy of this process
                os._exit(0)
        if context.stopped is not None:  # the function suppressed the exception
            raise context.stopped


def check_function(function: Any, name: str) -> None:
    """Raise `ConfigError` if the function cannot be called as ``train(model, examples, context)``."""
    kinds = {
        "an async function": inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function),
        "a generator function (it has a yield)": inspect.isgeneratorfunction(function),
    }
    for kind in (kind for kind, found in kinds.items() if found):
        raise ConfigError(f"{name!r} is {kind}; calling it does not train: give a plain function")
    try:
        signature(function, follow_wrapped=False).bind("model", "examples", "context")
    except ValueError:
        pass  # the callable has no inspectable signature
    except TypeError as error:
        raise ConfigError(
            f"{name!r} must take three arguments, (model, examples, context): {error}"
        ) from None


def raised(function: Any, name: str, error: BaseException) -> TrainingError:
    """Return a one-line error for a failure in the user's function, with the file name and line number."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    frame = next((one for one in reversed(frames) if one.filename == file), frames[-1])
    own = isinstance(error, TrainingError)
    what = " ".join(str(error).split()) if own else f"raised {described(error)}"
    return TrainingError(f"{name!r} ({Path(frame.filename).name}:{frame.lineno}) {what}")


def _place(function: Any) -> str:
    """Return where a function is defined, as " (FILE:LINE)"; "" for a callable without Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""


def _figure(value: float | Tensor) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)  # the item may be a bool
