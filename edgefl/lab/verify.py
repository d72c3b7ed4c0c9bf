"""Verifies a finished run by recomputing every update and every version in the order of the run's journal.

The journal contains all events in chronological order, from which the core derives the base version and the
client of each task. A single process can therefore check a run under either clock to the last bit, without
waiting.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from edgefl import config
from edgefl.core.events import Arrived, Died, Evaluate, Failed, Release, Sum, Summed, Train
from edgefl.devices.fleet import fleet_of
from edgefl.errors import ConfigError, RunError, listed
from edgefl.experiment import Experiment
from edgefl.files import read_secret
from edgefl.host.capacity import host
from edgefl.hosts.nodes import software
from edgefl.kernels.arguments import Floats
from edgefl.loading import changed_modules, own_code
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.privacy.source import Secret, Source, source_of
from edgefl.results import run_folder
from edgefl.results.own_code import resumed_code
from edgefl.results.record import Record
from edgefl.results.report import FILE_NAME as REPORT_FILE
from edgefl.results.report import is_whole
from edgefl.results.result import Result
from edgefl.results.rows import EvaluationRow, Meta
from edgefl.results.summary import summary_text
from edgefl.results.trace import FILE_NAME as TRACE_FILE
from edgefl.results.trace import trace_text
from edgefl.run.aggregator import Aggregator
from edgefl.run.demands import shape_of
from edgefl.run.engine import is_kept
from edgefl.run.hidden import SECRET_BYTES, HiddenSums, Members, Parties, Phones, check_secure, scheme_of
from edgefl.run.server_process import core_of
from edgefl.run.update import UpdateMaker, loss_of
from edgefl.run.workload import Workload
from edgefl.secure import SECRET_FILE
from edgefl.strategies import resolve

if TYPE_CHECKING:
    from edgefl.run.secure_parties import SumReply

Say = Callable[[int, int], None]
"""Callback that receives the number of versions recomputed so far and the total number of versions."""


_ARRIVAL = ("arrived_s", "staleness", "examples", "steps", "loss")
"""Columns of a trip whose values are determined when its update arrives."""


class Verdict(NamedTuple):
    """The result of a successful verification."""

    versions: int
    updates: int
    model_sha256: str


def verify(folder: str | Path, say: Say | None = None, code: Path | None = None) -> Verdict:
    """Repeat the run in ``folder`` and compare it with its record.

    This compares the checksum, loss, steps, staleness and time of each update; the updates, weights and time
    of each version; each evaluation, with its trips and, under the virtual clock, its time; the hash of the
    last model and the model on disk; and the files derived from the record. Modules that the run names are
    imported only from the folder ``code``, which the caller trusts.

    With secure aggregation, a run deletes its phones' secret when it is done. Without this secret, updates
    are masked or encrypted with a new secret, so that their checksums differ and are not compared; their sums
    are the same.

    Raises `RunError` at the first difference, and `ConfigError` if the folder contains no run that has ended.
    """
    folder = Path(folder)
    if code is not None and not code.is_dir():
        raise ConfigError(f"--code {code}: must be an existing folder")
    with Record(folder) as record:
        run_folder.check_experiment(folder, record.meta.toml)
        if (status := record.meta.status) not in ("done", "interrupted"):
            raise ConfigError(f"{folder}: the run has not ended (status {status}) and cannot be verified")
        experiment = config.load(folder / run_folder.EXPERIMENT_FILE, recorded=True)
        if (keys := own_code(msgspec.to_builtins(experiment))) and code is None:
            raise ConfigError(
                f"{folder}: {', '.join(keys)} would run code of this run's author; if you trust it, name the "
                f"folder that it is in: --code {record.meta.base or '.'}"
            )
        replay = _Replay(experiment, record, code or Path.cwd())
        with closing(replay.buffer):
            try:
                return replay.run(folder, say)
            except RunError as error:
                changed = listed(changed_modules(record.meta.code, replay.code))
                causes = f"; the run {text}" if (text := resumed_code(record)) else ""
                causes += f"; of your own code and files, {changed} changed since the run" if changed else ""
                if there := elsewhere(record.meta):
                    causes += f"; it was computed on {there}, which may give different bits"
                if causes:
                    raise RunError(f"{error}{causes}") from None
                raise


def elsewhere(meta: Meta) -> str:
    """Return the CPUs and the software of the hosts that trained, as far as they differ from this host's.

    >>> elsewhere(Meta(host={"cpu": "an abacus"}, software={"torch": "1.0"}))
    'an abacus, torch 1.0'
    """
    cpus = {node.cpu for node in meta.nodes} or {meta.host.get("cpu", "")}
    known = {name: meta.software.get(name, here) for name, here in software().items()}
    others = {f"{name} {version}" for name, version in known.items() - software().items()}
    return listed((cpus - {"", host().cpu}) | others)


class _Replay:
    def __init__(self, experiment: Experiment, record: Record, base: Path) -> None:
        clients = fleet_of(experiment)
        strategy = resolve(experiment.strategy, [base])
        check_secure(experiment, strategy, len(clients))
        self._record = record
        self._workload = workload = Workload(experiment, clients, base)
        # Train a little, as the run did: training may change the state of layers.
        self.code = workload.prepared().code
        workload.settle()
        source = source_of(experiment, record.folder)
        self._compares_checksums = True
        if workload.rules is not None:
            workload.phones_secret, self._compares_checksums = _phones_secret(record.folder, source)
        self._core = core_of(experiment, strategy, workload.known, source)
        flat = workload.flat
        shape = shape_of(experiment, strategy, flat.size, len(clients), statistics=flat.buffers, ring=2)
        self.buffer = buffer = ParameterBuffer.create(shape)
        buffer.model(0)[:] = flat.whole
        buffer.publish(version=0, entry=0)
        self._aggregator = Aggregator.of(experiment, strategy, buffer, flat.size, source, flat.buffers)
        self._aggregator.measures = False  # the journal contains the measured values
        self._aggregator.hidden = _hidden_sums(workload, len(clients), buffer)
        self._aggregator.begin()
        self._update = UpdateMaker(workload, buffer)
        self._trained: dict[int, tuple[Train, Floats]] = {}
        """The `Train` action and the base model of each running task, keyed by the task's index."""
        self._models: WeakValueDictionary[int, Floats] = WeakValueDictionary()
        self._updates = 0
        self._requested: dict[int, tuple[float, int]] = {}
        """The time of the request to evaluate a version, and the number of client trips until then, keyed by
        version."""

    def run(self, folder: Path, say: Say | None) -> Verdict:
        record, trips = self._record, self._record.trips
        rows = {task: row for task, *row in trips.rows("task", "checksum_sent", *_ARRIVAL)}
        made_at_s = dict(record.versions.rows("version", "at_s"))
        measured = {row.version: row for row in record.evaluations}
        self._measure(measured.get(0))
        sums = {version: (tasks.tolist(), weights.tolist()) for version, tasks, weights in record.sums()}
        versions = int(record.versions["version"].max(initial=0))
        order: Sum | None = None
        for _, event in record.events():
            match event:
                case Arrived(task=task) if task in self._trained:
                    self._compare(event, rows.get(task, [0]))
                case Summed(version=version, bad=(), at_s=at_s, zero=zero) if order is not None:
                    if made_at_s.get(version) != at_s:
                        said = f"but the record says {made_at_s.get(version)}"
                        raise RunError(f"version {version} was made at {at_s} s, {said}")
                    entry = self._aggregator.free_entry()
                    assert entry is not None, "nobody else reads this ring"
                    found = self._aggregator.sum(order, entry, zero=zero)
                    if found.bad or found.zero != zero:
                        what = f"version {order.version} cannot be recomputed"
                        raise RunError(f"{what}: an update is not finite")
                    if (list(order.tasks), list(found.weights or order.weights)) != sums.get(version):
                        wrong = "was made from other updates or weights than the record says"
                        raise RunError(f"version {order.version} {wrong}")
                    self._measure(measured.get(version))
                    if say is not None:
                        say(version, versions)
            actions = self._core.handle(event)
            if isinstance(event, Arrived) and is_kept(event.task, actions):
                self.buffer.accepted(event.client, event.task)
            failed = event.task if isinstance(event, Failed | Died) else None
            if failed is not None and self._core.is_zero(failed):
                self._aggregator.write_zero(failed)
            for action in actions:
                match action:
                    case Train(task=task, client=client, version=version):
                        # Keep the base model: the number of steps is known only when the update arrives.
                        lease = self._aggregator.lease(task=task, client=client, version=version)
                        self._aggregator.fetched(lease.slot)
                        if (model := self._models.get(version)) is None:
                            model = self._models[version] = self.buffer.model(lease.entry).copy()
                        self._trained[task] = action, model
                    case Sum():
                        order = action
                    case Release(task=task):
                        self._aggregator.release(task)
                        self._trained.pop(task, None)
                    case Evaluate(version=version):
                        self._requested[version] = self._core.now_s, self._core.trips
        self._check_requests(measured.values())
        return self._conclude(folder)

    def _check_requests(self, rows: Iterable[EvaluationRow]) -> None:
        """Compare the number of trips before each evaluation with the record.

        Under the virtual clock, the time of the evaluation is also compared. Under the wall clock, this time
        is read when the request is carried out; it is not in the journal. A run that was killed at its end
        and resumed may have an evaluation that the repetition does not request; it is not compared.
        """
        for row in rows:
            at_s, trips = self._requested.get(row.version, (row.at_s, row.trips))
            at_s = row.at_s if self._record.meta.clock == "wall" else at_s
            if (row.at_s, row.trips) != (at_s, trips):
                raise RunError(
                    f"version {row.version} was evaluated at {at_s} s, after {trips} trips, but the record "
                    f"says {row.at_s} s, {row.trips} trips"
                )

    def _compare(self, event: Arrived, row: list[Any]) -> None:
        task, sent = event.task, row[0]
        order, base = self._trained.pop(task)
        client, until = order.client, order.until
        np.copyto(self._workload.flat.whole, base)
        if until is None or until.at_s == math.inf:
            steps = None if until is None else until.steps
        else:  # which steps a time allows depends on the trip's plan, which is not made again
            steps = event.steps if event.allowed is None else event.allowed
        trained = self._update.train(client, order.trip, order.version, base, None, until, steps)
        raw = self.buffer.raw(self._aggregator.leases[task].slot)
        self._update.write(raw, client, task, base, cohort=order.cohort)
        checksum = self._update.checksum(raw)
        self.buffer.written(self._aggregator.leases[task].slot, task=task, checksum=checksum)
        self._updates += 1
        if self._compares_checksums and sent != checksum:
            raise RunError(
                f"the update of task {task} (client {client}, trip {order.trip}, from version "
                f"{order.version}) has checksum {checksum:016x}, but the record says {sent:016x}"
            )
        staleness = self._core.arrival_version - order.version
        made = (event.at_s, staleness, event.examples, trained.steps, loss_of(trained))
        for name, here, there in zip(_ARRIVAL, made, row[1:], strict=True):
            if not _same(here, there):
                raise RunError(f"the update of task {task} has {name} {here}, but the record says {there}")

    def _measure(self, row: EvaluationRow | None) -> None:
        """Evaluate the latest version again and compare the result with ``row``, the recorded evaluation."""
        if row is None:
            return
        np.copyto(self._workload.flat.whole, self.buffer.model(self.buffer.latest[1]))
        found, scores = self._workload.assess(row.version, lambda: None)
        made = {name: getattr(found, name) for name in ("loss", "accuracy", "metrics")}
        made |= {name: tuple(getattr(found, name).tolist()) for name in ("correct", "total")}
        made |= {"client_loss": tuple(scores.loss), "client_accuracy": tuple(scores.accuracy)}
        made |= {name: tuple(getattr(scores, name)) for name in ("personal_loss", "personal_accuracy")}
        for name, here in made.items():
            if not _same(here, there := getattr(row, name)):
                raise RunError(f"version {row.version} has {name} {here}, but the record says {there}")

    def _conclude(self, folder: Path) -> Verdict:
        meta, (version, entry) = self._record.meta, self.buffer.latest
        model = self.buffer.model(entry)
        made = hashlib.sha256(model.data).hexdigest()
        if made != meta.model_sha256:
            recorded = f"the record says {meta.model_sha256}"
            raise RunError(f"version {version} has model_sha256 {made}, but {recorded}")
        try:
            saved = Result(folder).model()
        except ConfigError as error:
            raise RunError(str(error)) from None
        for part in self._workload.flat.layout:
            here = model[part.part]
            there = saved.get(part.name)
            if there is None or there.shape != part.shape or there.tobytes() != here.tobytes():
                raise RunError(f"{folder}: {part.name} of the final model differs from version {version}")
        check_results(folder, self._record)
        return Verdict(version, self._updates, made)


def _phones_secret(folder: Path, source: Source) -> tuple[bytes, bool]:
    """Return the secret of the phones' keys and True, or a new secret and False if the run deleted it."""
    path = folder / SECRET_FILE
    if path.exists():
        return read_secret(path, SECRET_BYTES), True
    if isinstance(source, Secret):
        missing = f"{folder}: {SECRET_FILE}, the secret of the phones' keys, is missing"
        raise ConfigError(
            f"{missing}; without it, the masked or encrypted updates and the noise derived from them differ"
        )
    return secrets.token_bytes(SECRET_BYTES), False


class _Parties:
    """The parties that unmask or decrypt sums, called directly instead of in a separate process."""

    def __init__(self, parties: Parties) -> None:
        self._parties = parties

    def ask(self, members: Members, online: Sequence[int]) -> SumReply:
        return self._parties.reply(members, frozenset(online))


def _hidden_sums(workload: Workload, clients: int, buffer: ParameterBuffer) -> HiddenSums | None:
    """Return the object that sums masked or encrypted updates; None without secure aggregation."""
    rules, secure = workload.rules, workload.experiment.server.secure
    if rules is None or secure is None:
        return None
    phones = Phones(workload.phones_secret, workload.experiment.seed, clients)
    parties = scheme_of(secure.kind).parties(phones, rules, buffer, None)
    return HiddenSums(secure.kind, rules, _Parties(parties), workload.experiment.seed, clients)


def check_results(folder: Path, record: Record) -> None:
    """Raise `RunError` if a file derived from the record exists but does not match the record."""
    for name, text in ((run_folder.SUMMARY_FILE, summary_text(record)), (TRACE_FILE, trace_text([record]))):
        if (path := folder / name).is_file() and path.read_bytes() != text.encode():
            raise RunError(f"{path} does not match the record")
    if (path := folder / REPORT_FILE).is_file() and not is_whole(path.read_bytes()):
        raise RunError(f"{path} was changed after it was written")


def _same(here: Any, there: Any) -> bool:
    """Return True if two values are equal; NaN is considered equal to NaN."""
    if isinstance(here, tuple):
        return len(here) == len(there) and all(map(_same, here, there))
    return bool(here == there) or (here != here and there != there)
