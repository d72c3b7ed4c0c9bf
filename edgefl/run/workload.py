"""The workload of a run: data, model, and each client's examples, device and link."""

from __future__ import annotations

import hashlib
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from edgefl.devices import Device
from edgefl.devices.condition import Condition
from edgefl.devices.fleet import ClientInfo, KnownClients, Trips, device_of, kinds_of
from edgefl.devices.plan import End, TripPlan
from edgefl.devices.profiles import own_files
from edgefl.errors import ConfigError, EdgeflError, TrainingError, described, exit_as_error
from edgefl.experiment import Experiment, Training
from edgefl.learning.arithmetic import Arithmetic
from edgefl.learning.attacks import Attack, Floats
from edgefl.learning.custom import CustomTrainer, TrainFunction, check_function
from edgefl.learning.data import load_data
from edgefl.learning.evaluate import EvalResult
from edgefl.learning.flat import FlatModel
from edgefl.learning.losses import loss_on_zeros, make_loss
from edgefl.learning.models import make_model
from edgefl.learning.operations import BatchWork, StepWork
from edgefl.learning.partition import Parts, hold_out, partition
from edgefl.learning.rule import LocalRule, check_terms
from edgefl.learning.train import Rows, Trainer, TrainResult
from edgefl.learning.work import batch_work, traced_work
from edgefl.loading import digests, load_attribute
from edgefl.parameters.buffer import FORMATS, update_bytes
from edgefl.privacy.local import LocalNoise
from edgefl.run.assessor import Assessor
from edgefl.run.control import Fingerprint, FirstTrip, Prepared
from edgefl.run.hidden import rules_of
from edgefl.run.messages import ClientScores
from edgefl.seeds import stream
from edgefl.strategies import resolve
from edgefl.strategies.base import Strategy, TripInputs


def own_training(
    training: Training, strategy: Strategy, base: Path, clients: int
) -> tuple[TrainFunction, str] | None:
    """Return the user's own training function, from the strategy or the experiment, and its name.

    Return None if clients train with SGD.
    """
    method, name = type(strategy).train is not Strategy.train, training.function
    kind = type(strategy).__name__
    if not method and name is None:
        return None
    if method and name is not None:
        raise ConfigError(f"training.function: strategy {kind} trains in its own way; leave out {name!r}")
    if name is not None and strategy.local_rule().vectors:
        raise ConfigError(
            f"training.function: strategy {kind} adds terms to SGD's gradient that {name!r} leaves out; "
            "leave the function out, or write a strategy with its own train method (docs/clients.md)"
        )
    if training.precision != "float32":
        raise ConfigError(
            "training.precision: must be 'float32' with your own training function (which may use "
            f"torch.autocast), got {training.precision!r}"
        )
    if name is None:
        name = f"{kind}.train"
        check_function(strategy.train, name)
        return strategy.train, name
    if name.startswith("flower:"):
        from edgefl.learning.flower_client import FlowerTraining

        return FlowerTraining(name, [base], clients), name
    function = load_attribute(name, "training.function", [base])
    if not callable(function):
        raise ConfigError(f"training.function: {name!r} must be a function (got {type(function).__name__})")
    check_function(function, name)
    return function, name


@contextmanager
def _refusing_training() -> Iterator[None]:
    """Turn a failure of the user's training function, which is tried before the run, into a `ConfigError`."""
    try:
        yield
    except TrainingError as error:
        raise ConfigError(f"training.function: {error}") from error


@contextmanager
def _refusing_model(name: str, task: str = "run a training step") -> Iterator[None]:
    """Turn an error in a model's training step, or another ``task``, into a `ConfigError` with the user's
    file and line."""
    try:
        with exit_as_error():
            yield
    except EdgeflError:
        raise
    except Exception as error:
        package = str(Path(__file__).parents[1])
        frames = reversed(traceback.extract_tb(error.__traceback__))
        own = (f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(package))
        at = f" ({Path(frame.filename).name}:{frame.lineno})" if (frame := next(own, None)) else ""
        what = described(error)[:300]
        raise ConfigError(f"model.name: {name!r} cannot {task}{at}: {what}") from error


MEASURED_TRIPS = 5
SAMPLED_EXAMPLES = 1000
"""Approximate number of examples whose inputs are part of a fingerprint."""
CACHE_BYTES = 64 * 2**20
"""Size in bytes of an array that is updated before each measured trip. It is larger than the caches of a CPU
core, so that the update evicts the data of the training from the caches."""


class Workload:
    """Data, model, training and evaluation of a run, as used by clients, workers and the evaluator."""

    def __init__(self, experiment: Experiment, clients: Sequence[ClientInfo], base: Path) -> None:
        torch.set_num_threads(1)
        self._arithmetic = Arithmetic.of(experiment.training)
        self._arithmetic.check()
        seed = experiment.seed
        self.experiment = experiment
        self._clients = clients
        strategy = resolve(experiment.strategy, [base])
        own = own_training(experiment.training, strategy, base, len(clients))
        self._strategy = strategy
        self.upload, self.vectors = strategy.upload, strategy.vectors
        self.client_vectors = strategy.client_vectors
        self.data = load_data(experiment.data, seed, [base])
        data, profiles = self.data, [info.profile for info in clients]
        parts = partition(experiment.data, data.train_y, profiles, data.classes, seed, data.owners, [base])
        self._rows, held_out = hold_out(parts, experiment.data.client_test_fraction, seed)
        self.attack = Attack(experiment.fleet.attackers, len(clients), seed, data, [base])
        self._local_noise = LocalNoise.of(experiment)
        self.protects = self._local_noise is not None
        """True if clients add noise to their updates; a client whose training fails then sends only noise."""
        self._loss = make_loss(experiment.training.loss, data, [base])
        module = make_model(experiment.model, data.input_shape, data.outputs, seed, [base])
        self.rule = LocalRule.of(experiment.training, strategy.local_rule())
        check_terms(strategy, self.rule, profiles)
        self.flat = FlatModel(module, vectors=len(self.vectors))
        self._trainer = Trainer(self.flat, self._loss, self._arithmetic)
        self._custom: CustomTrainer | None = None
        if own is not None:
            self._custom = CustomTrainer(self.flat, *own, self.rule, self._loss, self._arithmetic)
        kind = type(strategy)
        plain = kind.begin_trip is Strategy.begin_trip and kind.end_trip is Strategy.end_trip
        self.needs_inputs = own is not None or not plain or bool(self.vectors or self.client_vectors)
        """True if a trip's training needs the trip's `TripInputs`."""
        self._state = self.flat.trainable * (1 + self.rule.state_vectors) if own is None else 0
        """Number of elements in gradients and optimizer state that are missing from the trace of a step."""
        torch.set_num_threads(1)  # the user's modules, which are imported by now, may have changed it
        self.work = self._work()
        self._check_memory()
        numbers = self.flat.whole.size
        update_format = experiment.server.update_format
        exact = FORMATS[update_format].exact(self.flat.buffers)
        up_bytes = update_bytes(update_format, numbers, exact)
        self.rules = rules_of(experiment, strategy, self.flat.size, len(clients))
        """Rules of secure aggregation; None if the run does not use secure aggregation."""
        self.phones_secret = b""
        """Secret from which the phones' keys are derived; empty without secure aggregation."""
        up_bytes += 0 if self.rules is None else self.rules.overhead_bytes
        self._trips = Trips(
            experiment,
            clients,
            self._rows.sizes.data,
            self.work,
            4 * numbers,
            up_bytes,
            transfers_apart=strategy.transfers_apart,
            rules=self.rules,
        )
        self.known = KnownClients(self._trips)
        """The information about each client that the strategy may use."""
        self.host_step_s = 0.0
        """CPU time of a training step on this host, in seconds; `prepared` measures it."""
        self._assessor = Assessor(experiment, data, self.flat, self._loss, held_out, base)

    def own_weight(self, client: int) -> float:
        """Return the client's `Strategy.own_weight` divided by the fleet's largest own weight.

        Return 1 if the strategy defines no own weights.
        """
        weight = self._weight_of(int(self._rows.sizes[client]))
        return 1.0 if not weight else weight / self._largest_weight

    def _weight_of(self, examples: int) -> float | None:
        return self._strategy.own_weight(examples, self.rule.work(examples).steps)

    @cached_property
    def _largest_weight(self) -> float:
        return max(self._weight_of(examples) or 0.0 for examples in set(self._rows.sizes.tolist()))

    def _own_rule(self, client: int) -> LocalRule:
        """Return the rule of local training for this client, with the client's own learning rate."""
        if (terms := self.rule.terms).lr is None:
            return self.rule
        factor = terms.lr_factor(client, self._clients[client].profile)
        return self.rule if factor == 1.0 else replace(self.rule, lr=factor * self.rule.lr)

    def _work(self) -> BatchWork:
        """Return the work of a training step, as declared in the experiment or as counted in traced steps."""
        if (flop := self.experiment.model.flops_per_example) is not None:
            return BatchWork(fixed=StepWork(), per_example=StepWork(matmul_flop=flop))
        if self._custom is None:
            dtype, loss = self.data.train_x[:1].dtype, loss_on_zeros(self._loss, self.data)
            return batch_work(self.flat.module, self.data.input_shape, dtype=dtype, loss=loss, meta=False)
        return self._watched(self._custom)

    def _watched(self, trainer: CustomTrainer) -> BatchWork:
        """Return the work of a step of the user's training function, traced on the client with the most
        examples."""
        first, client = self.flat.array.copy(), self._largest()
        rows = self._rows[client]

        def train(batch: int) -> tuple[int, int]:
            rule = replace(self.rule, batch_size=batch)
            rng = stream(self.experiment.seed, "batches", client, 0)
            np.copyto(self.flat.array, first)
            x, y, given = self.data.train_x, self.data.train_y, self._blank()
            result = trainer.run(x, y, rows, client, 0, given, rng, rule=rule)
            if not result.steps:
                raise TrainingError("made no step: call context.step(len(y), loss) after each step")
            return result.steps, result.examples

        try:
            known = [self.flat.vector, self.flat.grad, *self.flat.module.buffers()]
            with _refusing_training():
                found = traced_work(train, min(self.rule.batch_size, len(rows)), known, self.flat.module)
            self._state = self.flat.gradients
            return found
        finally:
            np.copyto(self.flat.array, first)

    def peak_mib(self, client: int) -> float:
        """Return the peak memory of the client's training in MiB; see `_needed_mib`."""
        return self._needed_mib(self.examples(client))

    def _needed_mib(self, examples: int) -> float:
        """Return the peak memory of a training step in MiB.

        It includes weights, gradients, optimizer state, batch, activations and temporaries, and excludes the
        copy of the downloaded model, the update and the strategy's vectors. It is computed from the step's
        trace, so it is the same on all hosts and under both clocks.
        """
        live = self.work.live_bytes(min(self.rule.batch_size, examples))
        return (4 * (self.flat.size + self._state) + live) / 2**20

    def _check_memory(self) -> None:
        """Raise `ConfigError` if a step needs more memory than the device allows an app to use."""
        if self.experiment.fleet.memory == "off":
            return
        for info in kinds_of(self._clients).values():
            limit_mib = self.device(info.client).app_limit_mib
            if limit_mib is None or self._needed_mib(self.rule.batch_size) <= limit_mib:
                continue
            alike = (client for client, one in enumerate(self._clients) if one.profile == info.profile)
            examples = max(map(self.examples, alike))
            if (needed_mib := self._needed_mib(examples)) <= limit_mib:
                continue
            room = limit_mib * 2**20 - 4 * (self.flat.size + self._state)
            fits = [(room - fixed) // slope for fixed, slope in self.work.live if slope > 0]
            hint = f"a batch size of at most {int(min(fits))}, " if fits and min(fits) >= 1 else ""
            raise ConfigError(
                f"training.batch_size: a step on {min(self.rule.batch_size, examples)} examples needs "
                f"{needed_mib:.4g} MiB, but {info.profile} allows {limit_mib:g} (memory.app_limit_mib); "
                f"choose {hint}a smaller model, or fleet.memory = 'off'"
            )

    def _largest(self) -> int:
        """Return the client with the most examples."""
        return int(np.argmax(self._rows.sizes))

    def device(self, client: int) -> Device:
        """Return the device that this client emulates."""
        return device_of(self.experiment, client, self._clients[client].profile)

    def step_s(self, client: int) -> float:
        """Return the time in seconds of a step on a full batch at the full speed of the client's device."""
        return self._trips.full_step_s(client)

    def examples(self, client: int) -> int:
        """Return the number of the client's training examples, which is n_k in FedAvg."""
        return len(self._rows[client])

    def plan(
        self, client: int, trip: int, end: End | None = None, condition: Condition | None = None
    ) -> TripPlan:
        """Compute the plan of a client's trip; see `Trips.plan`."""
        return self._trips.plan(client, trip, end, condition)

    def train(
        self,
        client: int,
        trip: int,
        done: Callable[[float], None] | None,
        steps: int | None = None,
        given: TripInputs | None = None,
    ) -> TrainResult:
        """Train the model in `flat` as the client does on this trip, for ``steps`` steps if given.

        ``done`` is called after each step with the seconds that the step takes at the device's full speed.
        ``given`` holds the trip's inputs. Only custom training and strategies with vectors, ``begin_trip`` or
        ``end_trip`` use them (`needs_inputs`).
        """
        rng = stream(self.experiment.seed, "batches", client, trip)
        step_s, data, rows = self._trips.step_s, self.data, self._rows_on(client, trip)
        step = None if done is None else lambda examples: done(step_s(client, examples))
        x, y = data.train_x, self.attack.targets(client, data.train_y)
        rule = self._own_rule(client)
        if given is None and self.needs_inputs:
            given = self._blank()
        with exit_as_error():
            if given is not None:
                self._strategy.begin_trip(self.flat.array, given)
            if self._custom is None:
                result = self._trainer.run(x, y, rule, rng, step, rows, steps, given)
            else:
                assert given is not None
                result = self._custom.run(x, y, rows, client, trip, given, rng, step, steps, rule)
            if given is not None:
                self._strategy.end_trip(self.flat.array, given)
        if self.experiment.data.growth is not None and result.counted is None:
            return result._replace(counted=len(rows))
        return result

    def _rows_on(self, client: int, trip: int) -> Rows:
        """Return the indices of the examples that the client has on this trip.

        Without ``data.growth``, the client has all its examples on every trip.
        """
        rows = self._rows[client]
        if self.experiment.data.growth is None:
            return rows
        order = stream(self.experiment.seed, "arrival of data", client).permutation(len(rows))
        return rows[order[: self._trips.data.held(client, trip)]]

    def finish_update(
        self,
        client: int,
        trip: int,
        base: Floats,
        done: Callable[[float], None] | None,
        steps: int | None = None,
        amplify: Callable[[Floats, int], None] | None = None,
    ) -> str:
        """Change the trained model in `flat` into the model that the client sends.

        ``base`` is the model that the client downloaded. An attack on updates changes the attackers' updates;
        all other clients clip their update and add noise if the experiment has local noise. ``done`` is
        called with 0 after each training step of an attack. If the strategy sets the end of the trip, an
        attack also trains for ``steps`` steps, and ``amplify(model, steps)`` applies the strategy's gain to
        each model that it has trained. Return the reason why only noise is sent, or "" if the update is sent.
        """
        if not self.attack.replaces_update(client):
            noise = self._local_noise
            finite = noise is None or noise.protect(self.flat.array, base, client, trip)
            return "" if finite else "not finite"
        flat, others = self.flat.array, []
        step = None if done is None else lambda examples: done(0.0)
        if colluders := self.attack.colluders(client, trip):
            own = flat.copy()
            for other in colluders:
                np.copyto(flat, base)
                rng = stream(self.experiment.seed, "collusion", client, trip, other)
                made = self._train_apart(other, rng, done=step, steps=steps)
                if amplify is not None:
                    amplify(flat, made)
                others.append(flat - base)
            np.copyto(flat, own)
        self.attack.change(flat, base, client, trip, others)
        return ""

    def fail(self, base: Floats, why: str) -> TrainResult:
        """Reset the model in `flat` to ``base``; return the result of a failed training."""
        np.copyto(self.flat.array, base)
        return TrainResult(steps=0, examples=0, loss=math.nan, failed=why)

    def _blank(self) -> TripInputs:
        """Return the inputs of a run's first trip: the model in `flat`, and zeros for all other vectors."""
        names = (self.vectors, self.vectors, self.client_vectors)
        vectors, send, kept = (
            {name: np.zeros(self.flat.size, np.float32) for name in each} for each in names
        )
        return TripInputs.of(0, self.flat.array.copy(), vectors, send, kept, self.flat.buffers)

    def assess(self, version: int, beat: Callable[[], None]) -> tuple[EvalResult, ClientScores]:
        """Evaluate the version in `flat`, which may be overwritten; see `Assessor.assess`."""
        return self._assessor.assess(partial(self._personalise, version), beat)

    def _personalise(self, version: int, client: int) -> None:
        """Train the model in `flat` as on one more trip of the client, but with a separate random stream."""
        self._train_apart(client, stream(self.experiment.seed, "personal", client, version), version)

    def _train_apart(
        self,
        client: int,
        rng: np.random.Generator,
        version: int = 0,
        done: Callable[[int], None] | None = None,
        most: int | None = None,
        steps: int | None = None,
    ) -> int:
        """Train the model in `flat` on the client's examples (at most ``most`` of them), outside any trip.

        If ``steps`` is given, train for this number of steps. Return the number of steps made.

        The vectors that clients keep between trips are not available: SGD ignores them, and the user's
        function receives zeros.
        """
        data, rows, rule = self.data, self._rows[client][:most], self._own_rule(client)
        if self._custom is None:
            rule = replace(rule, terms=replace(rule.terms, control=None, linear=None))
            with exit_as_error():
                return self._trainer.run(data.train_x, data.train_y, rule, rng, done, rows, steps).steps
        given = self._blank()._replace(version=version)
        x, y = data.train_x, data.train_y
        return self._custom.run(x, y, rows, client, 0, given, rng, done, steps, rule).steps

    def settle(self) -> None:
        """Move the model to the CPU or GPU on which this process computes from now on."""
        self._arithmetic.move(self.flat)

    def fingerprint(self) -> Fingerprint:
        """Return two digests: one of the data, the split and the first model; one of the model after training
        for one trip."""
        data, first = hashlib.sha256(), self.flat.array.copy()
        every = 1 + len(self.data.train_x) // SAMPLED_EXAMPLES
        for part in (self.data.train_x[::every], self.data.train_y, self._rows.sizes, self._rows.rows, first):
            data.update(np.ascontiguousarray(part).tobytes())
        client = self._largest()
        self.train(client, 0, None)
        trained = hashlib.sha256(self.flat.array.tobytes()).hexdigest()
        np.copyto(self.flat.array, first)
        return Fingerprint(data.hexdigest(), trained)

    def prepared(self) -> Prepared:
        """Train for a few trips, restore the model, and return the workload's properties and costs."""
        first = self.flat.array.copy()
        # Fill the caches with other data before each trip, as the trips of other clients would. A run under
        # the virtual clock does not wait for phones, so it does not need the time with cold caches.
        client = self._largest()
        other = np.zeros(CACHE_BYTES if self.experiment.clock.kind == "wall" else 0, dtype=np.uint8)
        costs = []
        for trip in range(1 + MEASURED_TRIPS):
            other += 1
            started = time.thread_time()
            with _refusing_training(), _refusing_model(self.experiment.model.name):
                steps = self.train(client, trip, None).steps
            costs.append((time.thread_time() - started) / max(1, steps))
        self.host_step_s = float(np.median(costs[1:]))
        self._try_smallest_batch()
        self.attack.try_own(self.flat.size)
        # In a fork of this process, torch would wait for ever for this process's threads.
        if (threads := torch.get_num_threads()) > 1 and self.experiment.training.device == "cpu":
            raise ConfigError(
                f"your own code sets torch's threads to {threads}, but a phone's process trains with one; "
                "leave out torch.set_num_threads"
            )
        np.copyto(self.flat.array, first)
        held = self._labels()
        own = filter(None, [*own_files(self.experiment.fleet), self.experiment.data.path])
        return Prepared(
            size=self.flat.size,
            buffers=self.flat.buffers,
            layout=[(entry.name, list(entry.shape), entry.offset) for entry in self.flat.layout],
            examples=self._rows.sizes.tobytes(),
            held_out=self._assessor.held_out.sizes.tobytes(),
            classes=held.sizes.tobytes(),
            labels=held.rows.tobytes(),
            first_trips=self._first_trips(),
            work=self.work,
            remark="\n".join(filter(None, (self._outputs_remark(), self._terms_remark()))),
            code=digests(own),
            host_step_s=self.host_step_s,
            test_examples=self._assessor.test_examples,
            dataset=self.data.name,
        )

    def _try_smallest_batch(self) -> None:
        """Train on the fleet's smallest batch: batch normalisation, for example, fails on one example."""
        sizes = set(self._rows.sizes.tolist())
        if self.experiment.data.growth is not None:
            least = min(self._trips.data.held(client, 0) for client in range(len(self._clients)))
            sizes = set(range(least, min(max(sizes), least + self.rule.batch_size) + 1))
        smallest = {size: min(self.rule.sizes(size), default=size) for size in sizes}
        size = min(smallest, key=lambda examples: (smallest[examples], examples))
        if self._custom is None and smallest[size] < self.rule.batch_size:
            with _refusing_model(self.experiment.model.name):
                self._train_apart(self._largest(), np.random.default_rng(0), most=size)

    def _outputs_remark(self) -> str:
        """Return a remark if the model has more outputs than the data have classes, otherwise "".

        Raises `ConfigError` if the model has no output for a class with which a client trains, because cross
        entropy would fail on the client's trips.
        """
        data, module = self.data, self.flat.module
        if data.classes is None or data.target_shape:
            return ""
        training, name = module.training, self.experiment.model.name
        module.eval()
        with _refusing_model(name, "evaluate a test example"), torch.no_grad():
            outputs = module(torch.tensor(data.test_x[:1]))
        module.train(training)
        if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2:
            return ""
        count, largest = outputs.shape[1], int(data.train_y[self._rows.rows].max())
        if attackers := self.attack.clients:  # with 'label-flip', they train with other classes
            rows = self._rows.rows[np.isin(self._rows.owners, list(attackers))]
            theirs = self.attack.targets(min(attackers), data.train_y)
            largest = max(largest, int(theirs[rows].max()))
        if count <= largest and self._custom is None and self.experiment.training.loss == "cross_entropy":
            has = f"{count} outputs, for the classes 0 to {count - 1}"
            raise ConfigError(f"model.name: {name!r} has {has}, but a client trains with class {largest}")
        if count <= data.classes:
            return ""
        return f"model {name!r} has {count} outputs for {data.classes} classes"

    def _terms_remark(self) -> str:
        """Return a remark if the user's training function must add the strategy's proximal term itself,
        otherwise ""."""
        function, mu = self.experiment.training.function, self.rule.terms.prox_mu
        if function is None or function.startswith("flower:") or not mu:
            return ""
        name = self.experiment.strategy["name"]
        what = f"strategy {name!r} adds a proximal term with μ = {mu:g} to the gradient"
        return f"{what}, which {function!r} must add itself (context.rule.terms.prox_mu)"

    def _labels(self) -> Parts:
        """Return the distinct classes of each client's training set; empty if targets are not classes."""
        rows, labels = self._rows, self.data.labels
        if labels is None:
            return Parts(rows.rows[:0], np.zeros(len(rows), np.int64))
        classes = int(labels.max()) + 1
        owners, held = np.divmod(np.unique(rows.owners * classes + labels[rows.rows]), classes)
        return Parts(held, np.bincount(owners, minlength=len(rows)))

    def _first_trips(self) -> list[FirstTrip]:
        if self.experiment.clock.kind == "virtual":
            return []
        totals_s = (self.plan(client, 0).total_s for client in range(len(self._clients)))
        return [
            FirstTrip(known.steps, known.down_s, known.compute_s, total_s)
            for known, total_s in zip(self.known, totals_s, strict=True)
        ]
