"""Runs an experiment, kills its processes at random times, resumes the run until it is done, and checks it.

In each round, one run with its own seed is killed and resumed until it is done, and is then checked by
`edgefl.lab.outcome`. Rounds are repeated until the requested number of kills is reached.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from edgefl import config, failpoints
from edgefl.errors import ConfigError, unknown
from edgefl.experiment import Experiment
from edgefl.host.children import kill_all
from edgefl.host.process import adopt_orphans
from edgefl.lab import outcome
from edgefl.lab.outcome import KINDS, PLACES, DisturbedRun, Findings, Kill
from edgefl.processes import command_of, finding_edgefl
from edgefl.results.record import Record
from edgefl.results.rows import FILE_NAME
from edgefl.results.run_folder import EXPERIMENT_FILE, is_done
from edgefl.run.client import WITNESS
from edgefl.seeds import stream

BESIDE = ("die", *failpoints.OF_SUMS)
"""Failpoints (named places in the code) at which a process other than the server dies."""
PEERS = {"client", "worker", "evaluator", "secure", *BESIDE}
"""Kinds of processes whose death does not end the ``edgefl`` command, and their failpoints."""
KEEPERS = {"supervisor", "zygote", "server"}
"""Kinds of processes of which any single one can be killed without losing an update, under either clock.
Under the wall clock, after such a kill, the other kinds of this set are spared until the run recovers."""
_MODULES = {"edgefl.run.zygote": "zygote", "edgefl.run.server_process": "server"}
EARLY_SHARE = 0.25
"""Share of kills that are early: they do not wait until the run has recovered from the previous kill."""
EARLY_S = 2.0
"""Minimum mean delay in seconds before an early kill if, because of the previous kill, the run restarts or
replaces a process of `KEEPERS`. It also applies to the first kill."""
MAX_SERVERS = 2
"""Maximum number of servers and zygotes (processes that fork the clients) that are killed without a new
version in between. One more kill would end the run, which could then be resumed from its checkpoint."""
ENDS_COMMAND = {"supervisor", "governor"}
"""Kinds of processes whose death ends the command, after a final checkpoint is written."""
COMMITTED_S = 0.15
"""Seconds after a kill during which versions made before the kill may still be recorded."""
DELIVERED_S = 1.0
"""Seconds after the kill of a zygote during which the server may still process messages from the clients of
that zygote."""
PATIENCE_S = 120.0
"""Maximum number of seconds for which a command may run without recording a new version."""
GONE_S = 20.0
"""Maximum number of seconds for which a process of the run may outlive the command."""
POLL_S = 0.02
MAX_FAILURES = 3
"""A round is given up after this number of consecutive commands that end without a kill."""
MAX_MORE_DESCRIPTORS = 8
PLACE_S = 3.0
"""Number of seconds within which the server of a recovered run must reach its failpoint."""
MAX_PASSES = dict.fromkeys(PLACES, 30) | dict.fromkeys(("unnamed", "renamed", "named"), 3)
"""Maximum of k for each failpoint, where a process dies when it reaches the failpoint for the k-th time. The
number k is drawn on a logarithmic scale. Its maximum is small for failpoints in checkpoints, which are rarely
reached."""
MAX_TURNS = 4
"""Maximum number of kills at each failpoint except ``die`` while one command runs; then the run is stopped
and resumed with a new command."""
MAX_FRUITLESS = 3
"""A failpoint is considered unreachable after this number of servers failed to reach it in time."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The experiment to run, the number of kills, and the kinds of processes to kill."""

    file: Path
    changes: tuple[str, ...] = ()
    """Changes to keys of the experiment, such as ``"strategy.name=fedavg"``."""
    clock: str | None = None
    kills: int = 20
    seed: int = 0
    """Seed with which the times of the kills and the processes to kill are drawn."""
    every_s: float = 1.0
    """Mean time in seconds from a recovery (for early kills: from the previous kill) to the next kill."""
    failpoints: int = 0
    """If not 0, ``kills`` is ignored, and a process dies this often at each failpoint that is reached."""
    only: frozenset[str] = frozenset()
    """Kinds of processes to kill, or failpoints to use; an empty set stands for all."""

    def __post_init__(self) -> None:
        what, names = ("failpoint", PLACES) if self.failpoints else ("process", KINDS)
        for name in sorted(self.only - set(names)):
            raise ConfigError(f"--only: {unknown(what, name, names)}")
        object.__setattr__(self, "only", self.only or frozenset(names))


Tell = Callable[[Findings, str], None]
"""A callback that reports progress. Its arguments are the findings so far and the current activity."""


def disturb(plan: Plan, folder: Path, tell: Tell) -> Findings:
    """Kill, resume and judge runs as ``plan`` describes, in the folder ``folder``.

    The files of rounds without a violation are removed. After Ctrl-C, the function returns the findings so
    far. Raises `ConfigError` if the experiment is invalid, or if the folder holds earlier runs.
    """
    experiment = config.load(plan.file, plan.changes, clock=plan.clock)
    findings = Findings(experiment.clock.kind, experiment.server.transport)
    if any(folder.glob("seed-*")):
        raise ConfigError(f"--out {folder} contains runs of an earlier 'edgefl chaos'; name another folder")
    rules = experiment.privacy
    if rules is not None and rules.noise == "secure" and rules.noise_multiplier:
        why = "two runs with secret noise differ, and none can be verified after its end"
        raise ConfigError(f"privacy.noise: must be 'seeded' with edgefl chaos ({why}), got 'secure'")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    draw = stream(plan.seed, "chaos")
    wall = experiment.clock.kind == "wall"
    reached = {"die": wall, **dict.fromkeys(failpoints.OF_SUMS, experiment.server.secure is not None)}
    killer = (
        _FailpointKiller(plan, draw, plan.only - {name for name, is_there in reached.items() if not is_there})
        if plan.failpoints
        else _RandomKiller(plan, draw, one_keeper=wall)
    )
    try:
        while killer.more and not _is_hopeless(findings):
            _Round(plan, experiment, folder, findings, killer, tell).run()
    except KeyboardInterrupt:
        findings.interrupted = True
    with contextlib.suppress(OSError):
        folder.rmdir()  # fails if the folder of a round with a violation was kept
    return findings


def _is_hopeless(findings: Findings) -> bool:
    """Return True if the last two rounds had no kill, because the runs are too short or fail."""
    return len(findings.rounds) > 1 and not any(each.kills for each in findings.rounds[-2:])


class _Stopwatch:
    """Measures elapsed seconds; a pause of the whole machine counts as at most one second."""

    def __init__(self) -> None:
        self.now_s, self._looked = 0.0, time.monotonic()

    def look(self) -> float:
        now = time.monotonic()
        self.now_s += min(now - self._looked, 1.0)
        self._looked = now
        return self.now_s


class Command:
    """An ``edgefl run`` or ``edgefl resume`` command that runs in its own process session."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command_of("edgefl", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=finding_edgefl({**os.environ, **environment}),
            )

    def family(self) -> dict[psutil.Process, str]:
        """Return the living processes of the run, including orphans, with their kinds ("" if unknown)."""
        found = {}
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(pid) == self.process.pid:
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found[process] = self._kind(process)
        return found

    def _kind(self, process: psutil.Process) -> str:
        if process.pid == self.process.pid:
            return "supervisor"
        if (name := process.name()).startswith("edgefl-"):  # Linux truncates names to 15 characters
            label = name.split("-")[1]
            return next((kind for kind in KINDS if kind.startswith(label)), "")
        return next((kind for module, kind in _MODULES.items() if module in process.cmdline()), "")

    def output(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()

    def collect(self) -> list[psutil.Process]:
        """Return the living processes of the run, and reap adopted orphans that have ended."""
        alive = list(self.family())
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if child.status() == psutil.STATUS_ZOMBIE and child.pid != self.process.pid:
                    os.waitpid(child.pid, os.WNOHANG)
        return alive

    def end(self) -> None:
        """Interrupt the command, and kill the run's processes that are still alive after `GONE_S` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                self.process.wait(GONE_S)
        kill_all(self.family())
        self.process.wait()
        psutil.wait_procs(self.collect(), timeout=1.0)


class _RandomKiller:
    """Kills processes at random times, mostly after the run has recovered from the previous kill."""

    def __init__(self, plan: Plan, draw: np.random.Generator, *, one_keeper: bool) -> None:
        self._plan, self._draw, self._left, self._one_keeper = plan, draw, plan.kills, one_keeper
        self._next("supervisor")

    def _next(self, killed: str) -> None:
        self._early = self._draw.random() < EARLY_SHARE
        slow = self._early and killed not in PEERS
        mean_s = max(EARLY_S, self._plan.every_s) if slow else self._plan.every_s
        self._gap_s = self._draw.exponential(mean_s)
        self._from_s: float | None = None

    @property
    def more(self) -> bool:
        return self._left > 0

    def turn(self, command: Command, now_s: float, waiting: list[str], *, steady: bool) -> str:
        """Kill a process if a kill is due, and return its kind; return "" if nothing was killed."""
        if self._from_s is not None and now_s < self._from_s:
            self._from_s = None  # another round has begun, whose time begins at 0
        if self._from_s is None and (steady or self._early):
            self._from_s = now_s
        if self._from_s is None or now_s < self._from_s + self._gap_s or not self.more:
            return ""
        spared: set[str] = set()
        if self._one_keeper and KEEPERS.intersection(waiting):
            restarts = waiting.count("server") + waiting.count("zygote")
            spared = KEEPERS.difference(waiting if restarts < MAX_SERVERS else ())
        wanted = self._plan.only - spared
        family = [(process, kind) for process, kind in command.family().items() if kind in wanted]
        if not family or command.process.poll() is not None:
            return ""
        process, kind = family[self._draw.integers(len(family))]
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return ""
        self._left -= 1
        self._next(kind)
        return kind

    def environment(self, folder: Path) -> dict[str, str]:
        return {}


class _FailpointKiller:
    """Makes each server that a command starts die at one of the failpoints ``places`` (`edgefl.failpoints`).

    Every second server may die as soon as it starts; the others die only after the run has recovered, so that
    versions are published in between. Clients, and the process that unmasks sums, die at failpoints of their
    own.
    """

    def __init__(self, plan: Plan, draw: np.random.Generator, places: Iterable[str]) -> None:
        self._draw, self._each = draw, plan.failpoints
        self._left = dict.fromkeys(sorted(places), plan.failpoints)
        self._fruitless: Counter[str] = Counter()
        self._places: list[str] = []
        """Failpoints at which the current server and each of its successors die, in this order."""
        self._armed = Path()
        """Path of a file; while this file exists, processes count how often they pass a failpoint."""
        self._early = False
        self._seen = 0
        self._since_s = 0.0
        """The last time, in seconds since the start of the round, at which the run had not yet recovered."""

    @property
    def more(self) -> bool:
        return bool(self._left)

    def environment(self, folder: Path) -> dict[str, str]:
        """Return environment variables with the failpoints of the next command.

        There is one failpoint for each server that the command will start, and some for other processes.
        """
        names = [name for name in self._left if name not in BESIDE]
        turns = min([MAX_TURNS, *(self._left[name] for name in names)])
        self._places = [name for _ in range(turns) for name in self._draw.permutation(names).tolist()]
        self._armed, self._seen, self._early = folder.with_name("armed"), 0, True
        self._arm(now=True)
        points = [f"{name}:{k}:{self._passes(name)}" for k, name in enumerate(self._places)]
        for client, trip in self._draw.permutation(_last_trips(folder))[: self._left.get("die", 0)]:
            points.append(f"die:{client}:{trip + 1 + self._passes('die')}")
        sums = [name for name in self._left if name in failpoints.OF_SUMS]
        points += [f"{name}:{k}:{self._passes(name)}" for name in sums for k in range(turns)]
        return {"EDGEFL_FAILPOINTS": ",".join(points), failpoints.WHILE: str(self._armed)}

    def _arm(self, *, now: bool) -> None:
        if now:
            self._armed.touch()
        else:
            self._armed.unlink(missing_ok=True)

    def _passes(self, place: str) -> int:
        return int(np.exp(self._draw.uniform(0.0, np.log(MAX_PASSES[place] + 1)))) - 1

    def turn(self, command: Command, now_s: float, waiting: list[str], *, steady: bool) -> str:
        """Return the failpoint at which a process died, or "" if no process died.

        If the failpoint was not reached in time, kill a process so that the run continues, and return the
        kind of that process.
        """
        died = [line.removeprefix(failpoints.SAYS) for line in command.output() if failpoints.SAYS in line]
        if len(died) > self._seen:
            place = died[self._seen]
            self._seen += 1
            self._next(place)
            return place
        if not steady:
            self._since_s = now_s
            return ""
        self._arm(now=True)
        given_s = PLACE_S if self._places or self._left.keys() <= set(BESIDE) else 0.0
        if now_s < self._since_s + given_s or not self.more:
            return ""
        kind = "server" if self._places else "supervisor"
        for process in [process for process, its in command.family().items() if its == kind]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            self._next("")
            return kind
        return ""

    def _next(self, place: str) -> None:
        """Update the counts after a death at the failpoint ``place`` ("": the failpoint was not reached)."""
        if place:
            self._left[place] = self._left.get(place, 0) - 1
        if place not in BESIDE:
            meant, self._places = self._places[:1] or BESIDE, self._places[1:]
            self._fruitless.update(meant if not place else ())
            self._early = not self._early
            self._arm(now=self._early)
        never = {name for name, left in self._left.items() if left == self._each}
        never = {name for name in never if self._fruitless[name] >= MAX_FRUITLESS}
        self._left = {name: left for name, left in self._left.items() if left > 0 and name not in never}


class _Round:
    """Kills and resumes one run until it is done, and then judges it."""

    def __init__(
        self,
        plan: Plan,
        experiment: Experiment,
        folder: Path,
        findings: Findings,
        killer: _RandomKiller | _FailpointKiller,
        tell: Tell,
    ) -> None:
        self._plan, self._findings, self._killer, self._tell = plan, findings, killer, tell
        self._virtual = experiment.clock.kind == "virtual"
        self._number = len(findings.rounds)
        self._round = DisturbedRun(seed=experiment.seed + self._number)
        self._folder = folder / f"seed-{self._round.seed}"
        self._run, self._undisturbed = self._folder / "killed", self._folder / "undisturbed"
        self._witness, self._temporary = self._folder / "witness", self._folder / "tmp"
        self._watch = _Stopwatch()
        self._highest = 0
        self._waiting: list[Kill] = []
        """Kills from which the run has not yet recovered."""
        self._descriptors: dict[psutil.Process, tuple[str, int, int]] = {}
        """Each process's kind, and how many files it had open at the first and at the last recovery."""

    def run(self) -> None:
        self._findings.rounds.append(self._round)
        self._temporary.mkdir(parents=True)
        if self._virtual and not self._run_undisturbed():
            return
        failures = 0
        while failures < MAX_FAILURES:
            kills = self._round.kills
            if self._command_ends_run():
                self._judge()
                break
            failures = 0 if self._round.kills > kills else failures + 1
        else:
            self._violated(f"{MAX_FAILURES} commands in a row ended early without a kill")
        if not self._round.violations:
            shutil.rmtree(self._folder)

    def _run_undisturbed(self) -> bool:
        command = self._start("run", self._undisturbed, {})
        try:
            while command.process.poll() is None:
                self._tell(self._findings, f"seed {self._round.seed}: undisturbed")
                time.sleep(POLL_S)
            if command.process.returncode == 0:
                return True
        finally:
            command.end()
        last = (command.output() or [""])[-1]
        if command.process.returncode == 2 and not self._number:
            raise ConfigError(last.removeprefix("edgefl: "))
        self._violated(f"the undisturbed run ended with exit code {command.process.returncode}: {last}")
        return False

    def _start(self, what: str, folder: Path, disturbance: Mapping[str, str]) -> Command:
        """Start a run in ``folder``, or resume the run that this folder contains."""
        arguments = [what, str(folder), "--accept-invalid", "--quiet"]
        if what == "run":
            changes = [word for change in self._plan.changes for word in ("--set", change)]
            clock = ["--clock", self._plan.clock] if self._plan.clock else []
            seed = ["--seed", str(self._round.seed)]
            to = ["--out", str(folder)]
            arguments = [what, str(self._plan.file), *changes, *clock, *seed, *to, *arguments[2:]]
        environment = {WITNESS: str(self._witness), "TMPDIR": str(self._temporary), **disturbance}
        return Command(arguments, environment, self._folder / "output.txt")

    def _command_ends_run(self) -> bool:
        """Start or resume the run and kill processes until the command ends.

        Return True if the run is over.
        """
        what = "resume" if (self._run / EXPERIMENT_FILE).exists() else "run"
        command = self._start(what, self._run, self._killer.environment(self._run))
        self._round.commands += 1
        killed: Counter[str] = Counter()
        last_s = self._watch.look()
        try:
            ended = False
            while not ended:
                ended = command.process.poll() is not None
                now_s = self._watch.look()
                if self._advanced(now_s, command):
                    last_s = now_s
                if now_s - last_s > PATIENCE_S:
                    self._violated(
                        f"no new version was recorded for {PATIENCE_S:g} s, with {_in_words(killed)} killed"
                    )
                    return False
                waiting = [kill.kind for kill in self._waiting]
                steady = self._highest > 0 and not waiting
                if kind := self._killer.turn(command, now_s, waiting, steady=steady):
                    killed[kind] += 1
                    self._note(kind, command)
                self._tell(self._findings, f"seed {self._round.seed}: version {self._highest}")
                time.sleep(0.0 if ended else POLL_S)
            self._wait_until_gone(command)
        finally:
            command.end()
        return self._look_at_end(command, what, killed)

    def _note(self, kind: str, command: Command) -> None:
        now_s = self._watch.look()
        self._advanced(now_s, command)  # count versions published before this kill
        kill = Kill(kind, self._number, self._round.commands, now_s)
        self._findings.kills.append(kill)
        self._waiting.append(kill)
        self._round.kills += 1

    def _advanced(self, now_s: float, command: Command) -> bool:
        """Read the newest recorded version, and return True if it is newer than all versions read before."""
        version = _versions_made(self._run)
        if version <= self._highest:
            return False
        self._highest = version
        if self._waiting:
            self._count_descriptors(command)
        for kill in list(self._waiting):
            if self._is_over(kill, now_s):
                kill.recovery_s = now_s - kill.at_s
                self._waiting.remove(kill)
        return True

    def _is_over(self, kill: Kill, now_s: float) -> bool:
        """Return True if a version that is recorded now proves that the run has recovered from ``kill``.

        Shortly after a kill, the version may still come from processes that were about to die.
        """
        if kill.kind in ENDS_COMMAND:
            return self._round.commands > kill.command
        after_s = DELIVERED_S if kill.kind == "zygote" else COMMITTED_S
        return kill.kind in PEERS or now_s - kill.at_s > after_s

    def _count_descriptors(self, command: Command) -> None:
        for process, kind in command.family().items():
            if kind in ("supervisor", "zygote"):
                with contextlib.suppress(psutil.Error):
                    number = process.num_fds()
                    _, first, _ = self._descriptors.get(process, (kind, number, number))
                    self._descriptors[process] = kind, first, number

    def _wait_until_gone(self, command: Command) -> None:
        ended_s = self._watch.look()
        while alive := command.collect():
            outlived_s = self._watch.look() - ended_s
            if outlived_s > GONE_S:
                names = ", ".join(sorted(_name(process) for process in alive))
                self._violated(f"still running {GONE_S:g} s after the supervisor ended: {names}")
                break
            self._round.outlived_s = max(self._round.outlived_s, outlived_s)
            time.sleep(POLL_S)
        for kind, first, last in self._descriptors.values():
            if last - first > MAX_MORE_DESCRIPTORS:
                self._violated(f"the {kind} held {last} files open, but only {first} at first")
        self._descriptors.clear()
        # Include the versions that were recorded with the last checkpoint.
        self._highest = max(self._highest, _versions_made(self._run))
        left = sorted(path.name for path in self._temporary.iterdir() if path.name.startswith("edgefl"))
        if left:
            self._violated(f"files left behind: {', '.join(left)}")

    def _look_at_end(self, command: Command, what: str, killed: Counter[str]) -> bool:
        """Return True if the run is over, and note a violation if no kill explains why the command ended.

        Killing a process whose kind is not in `PEERS` explains a failure, but no traceback or exit code 2.
        """
        code, output = command.process.returncode, command.output()
        last = output[-1] if output else f"exit code {code}"
        how = f"edgefl {what}, with {_in_words(killed)} killed,"
        if any("Traceback" in line for line in output):
            self._violated(f"{how} printed a traceback: {last}")
        if code == 0 or is_done(self._run):
            return True
        if code == 2:
            self._violated(f"{how} ended with exit code 2: {last}")
        elif not set(killed) - PEERS:
            self._violated(f"{how} ended early: {last}")
        return False

    def _judge(self) -> None:
        self._tell(self._findings, f"seed {self._round.seed}: judging")
        self._round.wall_s = self._watch.look()
        self._round.versions, self._round.trips = outcome.counts(self._run)
        for line in self._problems():
            self._violated(line)
        self._round.judged = True

    def _problems(self) -> Iterator[str]:
        problems = list(outcome.unreadable(self._run))
        yield from problems
        if problems:
            return
        if self._virtual:
            yield from outcome.differences(self._undisturbed, self._run)
        else:
            self._witness.touch()
            self._round.acknowledged = len(outcome.read_log(self._witness))
            code = self._plan.file.absolute().parent
            yield from outcome.broken_promises(self._run, self._witness, code)

    def _violated(self, line: str) -> None:
        self._round.violations.append(f"{line} ({self._folder})")


def _versions_made(folder: Path) -> int:
    """Return the newest recorded version, or −1 if no version can be read."""
    address = f"{(folder / FILE_NAME).resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=0.0)) as db:
            return int(db.execute("SELECT COALESCE(MAX(version), 0) FROM versions").fetchone()[0])
    except sqlite3.Error:
        return -1


def _last_trips(folder: Path) -> list[tuple[int, int]]:
    """Return pairs of a client and the index of its last trip; [] if the record is unreadable."""
    with contextlib.suppress(ConfigError), Record(folder) as record:
        return record.select("SELECT client, MAX(trip) FROM trips GROUP BY client")
    return []


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.name()} ({process.pid}, {process.status()})"
    except psutil.Error:
        return str(process.pid)


def _in_words(killed: Counter[str]) -> str:
    """Format how many processes of each kind were killed, or "nothing".

    >>> _in_words(Counter(["client", "client", "server"]))
    '2 × client, server'
    """
    words = [kind if count == 1 else f"{count} × {kind}" for kind, count in sorted(killed.items())]
    return ", ".join(words) or "nothing"
