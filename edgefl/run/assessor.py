"""Evaluates a model on the server's and the clients' test examples, and calls the user's function for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from edgefl.config.checks import check_measured
from edgefl.errors import ConfigError, EdgeflError, described, exit_as_error
from edgefl.experiment import Experiment
from edgefl.learning.arithmetic import torch_seed
from edgefl.learning.dataset import Dataset
from edgefl.learning.evaluate import EvalResult, OwnEvaluation, evaluate
from edgefl.learning.flat import FlatModel
from edgefl.learning.losses import NON_NEGATIVE, Loss
from edgefl.learning.partition import Parts
from edgefl.run.connection import of_training
from edgefl.run.messages import NO_SCORES, ClientScores
from edgefl.seeds import stream
from edgefl.terminal import printable

LONGEST_PROBLEM = 500
"""The reason why an evaluation failed is cut to this many characters in the record."""


class Assessor:
    """Evaluates the model in ``flat``.

    ``held_out`` holds, for each client, the indices of the training examples that serve as the client's own
    test examples.

    The constructor tries the user's evaluation function once. Raises `ConfigError` if the function fails, or
    if the experiment requests something that cannot be measured.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: Dataset,
        flat: FlatModel,
        loss: Loss,
        held_out: Parts,
        base: Path,
    ) -> None:
        self._settings, self._seed = experiment.evaluation, experiment.seed
        self._data, self._flat, self._loss, self.held_out = data, flat, loss, held_out
        self._test_y = data.test_y[: self._settings.max_examples]
        self._own: OwnEvaluation | None = None
        self._clients = self._draw()
        anything = (-math.inf, math.inf)
        measured = {"loss": (0.0, math.inf) if experiment.training.loss in NON_NEGATIVE else anything}
        if (function := self._settings.function) is not None:
            self._own = OwnEvaluation(function, [base], self._seed)
            torch.set_num_threads(1)  # its module, imported just now, may have changed it
            self._own.measure(flat, data.test_x, self._test_y)
            measured |= dict.fromkeys(self._own.names, anything)
        scored = data.classes is not None and (experiment.stop.accuracy is None or self._has_accuracy())
        if scored or "accuracy" in measured:
            measured["accuracy"] = (0.0, 1.0)
        check_measured(experiment.stop, measured)

    def _has_accuracy(self) -> bool:
        """Return True if the model has an output for each class, so that its accuracy can be measured.

        Return True also if the model or the loss fails; the trial of a training step reports such a failure.
        """
        data, flat = self._data, self._flat
        first = flat.array.copy()
        try:
            # `torch_seed` restores the random streams at the end.
            with exit_as_error(), torch_seed(0, flat.vector.device):
                found = evaluate(flat, data.test_x, self._test_y[:64], data.classes, loss=self._loss)
        except Exception:
            return True
        finally:
            flat.restore()
            flat.prepare()
            np.copyto(flat.array, first)
        return not math.isnan(found.accuracy)

    @property
    def test_examples(self) -> int:
        """Number of the server's test examples on which models are evaluated."""
        return len(self._test_y)

    def assess(
        self, personalise: Callable[[int], None], beat: Callable[[], None]
    ) -> tuple[EvalResult, ClientScores]:
        """Evaluate the model on the server's test examples and, if requested, on the clients' test examples.

        ``personalise`` trains the model in `flat` as the given client would; ``beat`` is called for every
        batch. If the user's function, model or loss fails, the result holds the ``problem`` and all values
        that were measured before the failure.
        """
        data, found = self._data, EvalResult(math.nan, math.nan)
        self._flat.prepare()  # personal models of the last evaluation may have changed integer buffers

        def on_forward(*_: object) -> None:
            beat()

        try:
            # The hook also sends heartbeats while the user's function runs.
            with exit_as_error(), register_module_forward_pre_hook(on_forward):
                found = evaluate(self._flat, data.test_x, self._test_y, data.classes, loss=self._loss)
                if self._own is not None:
                    found = found.with_metrics(self._own.measure(self._flat, data.test_x, self._test_y))
                return found, self._on_clients(personalise)
        except EdgeflError as error:
            problem = str(error)
        except Exception as error:  # a user's model or loss may fail on examples on which nobody trains
            if not of_training(error):
                raise
            problem = f"the model cannot be evaluated: {described(error)}"
        return found._replace(problem=printable(problem)[:LONGEST_PROBLEM]), NO_SCORES

    def _on_clients(self, personalise: Callable[[int], None]) -> ClientScores:
        base, clients = self._flat.array.copy(), self._clients
        scores = [self._score(client) for client in clients]
        personal = []
        for client in clients if self._settings.clients == "personal" else ():
            np.copyto(self._flat.array, base)
            personalise(client)
            personal.append(self._score(client))
        return ClientScores(clients, *self._columns(scores), *self._columns(personal))

    def _score(self, client: int) -> EvalResult:
        rows, data = self.held_out[client], self._data
        return evaluate(self._flat, data.train_x[rows], data.train_y[rows], data.classes, loss=self._loss)

    def _columns(self, scores: Sequence[EvalResult]) -> tuple[list[float], list[float]]:
        """Return the losses (NaN if a loss is not finite) and, if targets are classes, the accuracies."""
        losses = [found.loss if math.isfinite(found.loss) else math.nan for found in scores]
        return losses, [] if self._data.classes is None else [found.accuracy for found in scores]

    def _draw(self) -> list[int]:
        """Draw the clients on which the model is evaluated, from all clients with held-out examples.

        The list is empty if the experiment does not request an evaluation on clients.
        """
        if self._settings.clients == "none":
            return []
        able = np.flatnonzero(self.held_out.sizes).tolist()
        if not able:
            raise ConfigError(
                "evaluation.clients: no client has a test example; at least one client needs two examples"
            )
        order = stream(self._seed, "measured-clients").permutation(len(able))
        return sorted(able[place] for place in order[: self._settings.max_clients])
