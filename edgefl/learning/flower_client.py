"""Use a Flower client in edgefl: ``training.function = "flower:my_app:client_fn"``, or a `ClientApp`.

For each trip (download, training and upload), the app receives one train message like those of Flower's own
strategies. The message contains the model as arrays with the keys and the order of ``state_dict()``, and the
app's reply contains the trained model.
docs/flower.md lists what the app receives.
"""

from __future__ import annotations

import random
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_post_hook

from edgefl.errors import ConfigError, TrainingError
from edgefl.learning.custom import ClientExamples, Context
from edgefl.loading import call, load_attribute
from edgefl.toml import flat

PREFIX = "flower:"
EXAMPLES_KEY = "num-examples"
"""Name of the metric by which Flower's strategies weight replies."""


class Reply(NamedTuple):
    """The trained arrays keyed by name, the number of training examples, and the client's metrics."""

    arrays: Mapping[str, NDArray[Any]]
    examples: object
    metrics: Mapping[str, Any]


class FlowerTraining:
    """A training function that calls a Flower app; it is created once and called for each trip.

    ``name`` is the value of ``training.function`` in the experiment, ``folders`` are searched for the app's
    module, and ``clients`` is the number of partitions. Raises `ConfigError` if Flower or the app is missing
    or invalid.
    """

    def __init__(self, name: str, folders: Sequence[Path], clients: int) -> None:
        try:
            from flwr.clientapp import ClientApp
        except ImportError:
            raise ConfigError(
                f"training.function: {name!r} needs Flower: pip install 'edgefl[flower]'"
            ) from None
        app_name = name.removeprefix(PREFIX)
        given = load_attribute(app_name, "training.function", folders)
        if not isinstance(given, ClientApp):
            given = call(lambda: ClientApp(client_fn=given), name, "training.function")
        self._app, self._clients = given, clients
        self.__module__ = app_name.partition(":")[0]  # so that errors refer to lines of the app's file
        self._run_config = run_config(sys.modules[self.__module__].__file__)

    def __call__(self, model: torch.nn.Module, examples: ClientExamples, context: Context) -> None:
        from flwr.app import Array, ArrayRecord
        from flwr.app import Context as Node
        from flwr.app.message import RecordDict

        state = model.state_dict()
        sent = ArrayRecord({key: Array(tensor.cpu().numpy()) for key, tensor in state.items()})
        place = {"partition-id": context.client, "num-partitions": self._clients}
        node = Node(1, context.client + 1, place, RecordDict(), dict(self._run_config))
        with _steps_accounted(examples, context), _seeded(context.rng):
            reply = self._app(self._message(sent, context), node)
        if len(node.state):
            raise TrainingError("stores records in context.state, which edgefl does not keep between trips")
        answer = self._answer(reply)
        _load(state, answer.arrays)
        context.counted = _count(answer.examples)
        context.log(**{key: value for key, value in answer.metrics.items() if isinstance(value, int | float)})

    @property
    def _older(self) -> bool:
        """True if the app is a ``client_fn`` of Flower's older API, whose messages use different keys."""
        return self._app._call is not None

    def _message(self, sent: Any, context: Context) -> Any:
        """Create a train message in the format of Flower's own strategies."""
        from flwr.app import ConfigRecord, Message, MessageType, Metadata, RecordDict

        rule = context.rule
        figures = {
            "server-round": context.version + 1,
            "lr": rule.lr,
            "batch-size": rule.batch_size,
            "local-epochs": rule.epochs or 1,
            "proximal-mu": rule.terms.prox_mu,
        }
        if self._older:
            figures.update({key.replace("-", "_"): value for key, value in figures.items()})
        keys = ("fitins.parameters", "fitins.config") if self._older else ("arrays", "config")
        content = RecordDict(dict(zip(keys, (sent, ConfigRecord(figures)), strict=True)))
        sent_at = {"created_at": time.time(), "ttl": 3600.0}
        return Message(
            content=content,
            metadata=Metadata(
                1, "", 0, context.client + 1, "", "", **sent_at, message_type=MessageType.TRAIN
            ),
        )

    def _answer(self, reply: Any) -> Reply:
        if reply.has_error():
            raise TrainingError(f"replied with an error: {reply.error.reason}")
        return _older_answer(reply.content) if self._older else _newer_answer(reply.content)


def _newer_answer(content: Any) -> Reply:
    arrays, metrics = list(content.array_records.values()), list(content.metric_records.values())
    if len(arrays) != 1 or len(metrics) > 1:
        got = f"{len(arrays)}, {len(metrics)}"
        raise TrainingError(f"must reply with one ArrayRecord and at most one MetricRecord (got {got})")
    figures = dict(metrics[0].items()) if metrics else {}
    return Reply(
        {key: each.numpy() for key, each in arrays[0].items()}, figures.pop(EXAMPLES_KEY, None), figures
    )


def _older_answer(content: Any) -> Reply:
    from flwr.common import Code, parameters_to_ndarrays
    from flwr.compat.common.recorddict_compat import recorddict_to_fitres

    result = recorddict_to_fitres(content, keep_input=True)
    if result.status.code != Code.OK:
        raise TrainingError(f"replied {result.status.code.name}: {result.status.message}")
    arrays = dict(zip(map(str, range(10**6)), parameters_to_ndarrays(result.parameters), strict=False))
    return Reply(arrays, result.num_examples, result.metrics)


def _load(state: Mapping[str, torch.Tensor], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Copy arrays into the model: by key if they have the keys of the model, else by position."""
    if arrays.keys() != state.keys():
        arrays = dict(zip(state, arrays.values(), strict=False)) if len(arrays) == len(state) else {}
    for key, tensor in state.items():
        got = np.shape(arrays[key]) if arrays else "another number of arrays"
        if got != (wanted := tuple(tensor.shape)):
            raise TrainingError(
                f"must reply with the experiment's model: {key!r} has shape {wanted} (got {got})"
            )
    with torch.no_grad():
        for key, tensor in state.items():
            tensor.copy_(torch.from_numpy(np.array(arrays[key])))


def _count(examples: object) -> int | None:
    if examples is not None and (not isinstance(examples, int | float) or not 0 <= examples < 2**53):
        raise TrainingError(f"must reply with a number of examples (got {examples!r})")
    return None if examples is None else int(examples)


@contextmanager
def _steps_accounted(examples: ClientExamples, context: Context) -> Iterator[None]:
    """Record each step of a torch optimiser.

    If the app takes no such step, all steps of the trip are recorded after the app has returned.
    """
    sizes = context.rule.batches(len(examples), context.left)

    def made(*_: object) -> None:
        context.step(next(sizes, 1))

    hook = register_optimizer_step_post_hook(made)
    try:
        yield
    finally:
        hook.remove()
    if context.steps == 0:
        for size in sizes:
            context.step(size)


@contextmanager
def _seeded(rng: np.random.Generator) -> Iterator[None]:
    """Seed the global generators of Python and numpy, which apps use, and restore their state on exit."""
    before, numpys = random.getstate(), np.random.get_state()
    random.seed(int(rng.integers(2**63)))
    np.random.seed(int(rng.integers(2**32)))
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpys)


def run_config(module: str | None) -> dict[str, Any]:
    """Return the app's table ``[tool.flwr.app.config]``, flattened as Flower does; {} if there is none."""
    for folder in Path(module or "").resolve().parents:
        try:
            app = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]
        except (OSError, KeyError, TypeError, ValueError):
            continue
        return dict(flat(app.get("config", {})))
    return {}
