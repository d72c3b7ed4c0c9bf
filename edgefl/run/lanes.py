"""Executes the runs of a sweep: starts or resumes missing runs, and reads finished runs from their folders.

Several runs can execute in parallel lanes. A lane is a process that executes one run after another on its
share of the cores; the results have the same bits as those of `supervisor.run`. Each lane has a process group
of its own, so that Ctrl-C reaches only the main process, which then requests a checkpoint from each lane and
waits until the lanes have ended.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from edgefl import config
from edgefl.errors import ConfigError, EdgeflError, RunError
from edgefl.experiment import Experiment
from edgefl.host.channel import Channel, Closed, Refused
from edgefl.host.children import Exit, end_child
from edgefl.host.fork_server import ForkedChild, ForkServer, FromForkServer
from edgefl.host.process import become_child
from edgefl.results.result import Result
from edgefl.results.run_folder import EXPERIMENT_FILE, is_done
from edgefl.run import supervisor
from edgefl.run.hosting import Hosts
from edgefl.terminal import printable

GRACE_S = 10.0
"""Time limit in seconds for the exit of an idle lane; a lane that takes longer is killed."""


OpenHosts = Callable[[Experiment], AbstractContextManager[Hosts | None]]
"""Provides the hosts on which the clients or workers of a run are started, until the run has ended; None
stands for this host."""


def this_host(experiment: Experiment) -> AbstractContextManager[None]:
    """Provide None, so that the experiment runs on this host only."""
    return nullcontext()


def finished(
    wanted: Experiment,
    folder: Path,
    base: Path,
    fork_server: Callable[[], ForkServer] | None = None,
    quiet: bool = True,
    hosts: OpenHosts = this_host,
) -> Result:
    """Return the finished run of an experiment in ``folder``; if necessary, start or resume it first.

    A run is shown live on a terminal unless ``quiet``. ``hosts`` provides the hosts on which the clients or
    workers of the run are started. Raises `ConfigError` if the folder holds a run with other settings.
    """
    if (found := existing(wanted, folder, base)) is not None:
        return found
    started = fork_server() if fork_server is not None else None
    with hosts(wanted) as opened:
        if (folder / EXPERIMENT_FILE).is_file():
            return supervisor.resume(folder, quiet, fork_server=started, hosts=opened, passing=True)
        return supervisor.run(wanted, folder, quiet, base, fork_server=started, hosts=opened, passing=True)


def existing(wanted: Experiment, folder: Path, base: Path) -> Result | None:
    """Return the finished run in ``folder``, or None if the folder holds no finished run.

    Raises `ConfigError` if the folder holds a run with other settings.
    """
    if not (file := folder / EXPERIMENT_FILE).is_file():
        return None
    if config.dump(config.load(file, recorded=True)) != config.dump(config.validate(wanted, base)):
        raise ConfigError(
            f"{folder} holds a run with different settings; use a different --out, or delete the folder"
        )
    return Result(folder) if is_done(folder) else None


class Forks(msgspec.Struct, frozen=True, tag="forks"):
    """The first message to a lane; the channel to the lane's own fork server is attached."""


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Request to a lane to execute a run."""

    experiment: Experiment
    folder: str
    base: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The lane has started; from now on, SIGTERM ends it, or the run that it executes."""


class Made(msgspec.Struct, frozen=True, tag="made"):
    """The run is finished, and its results are in its folder."""


FromLane = Ready | Made | Refused


class Lane(NamedTuple):
    process: ForkedChild
    channel: Channel[FromLane]


def shares(cores: Sequence[int], lanes: int) -> list[list[int]]:
    """Divide cores among lanes. If there are fewer cores than lanes, several lanes share one core.

    >>> shares([0, 1, 2, 3, 4], 2), shares([0, 1], 3)
    ([[0, 1], [2, 3, 4]], [[0], [1], [0]])
    """
    if lanes > len(cores):
        return [[cores[lane % len(cores)]] for lane in range(lanes)]
    ends = [lane * len(cores) // lanes for lane in range(lanes + 1)]
    return [list(cores[first:end]) for first, end in itertools.pairwise(ends)]


def make_all(
    jobs: Sequence[Job], lanes: int, made: Callable[[int], None], fork_server: Callable[[], ForkServer]
) -> None:
    """Execute the missing runs, ``lanes`` of them in parallel.

    ``made`` is called with each run's index when the run is finished.

    Raises `ConfigError` or `RunError` for the first run that fails, and KeyboardInterrupt after a stop
    signal. The other runs then end with a checkpoint.
    """
    waiting, running = deque[tuple[int, Job]](), list[Lane]()
    for number, job in enumerate(jobs):
        if existing(job.experiment, Path(job.folder), Path(job.base)) is None:
            waiting.append((number, job))
        else:
            made(number)
    if not waiting:
        return
    with ExitStack() as stack:
        try:
            for share in shares(sorted(os.sched_getaffinity(0)), min(lanes, len(waiting))):
                running.append(stack.enter_context(_started(share, fork_server())))
            _hand_out(running, waiting, made)
        except BaseException:
            for lane in running:
                with suppress(ProcessLookupError):
                    os.kill(lane.process.pid, signal.SIGTERM)
            raise


def _hand_out(lanes: Sequence[Lane], waiting: deque[tuple[int, Job]], made: Callable[[int], None]) -> None:
    """Give each lane that is ready the next run, until all runs are finished."""
    poller, busy = select.poll(), dict[int, tuple[Lane, int | None]]()

    def give(lane: Lane) -> None:
        if waiting:
            number, job = waiting.popleft()
            busy[lane.channel.fileno()] = lane, number
            lane.channel.tell(job)
        else:
            poller.unregister(lane.channel)

    for lane in lanes:
        poller.register(lane.channel, select.POLLIN)
        busy[lane.channel.fileno()] = lane, None  # it still ignores SIGTERM, so a run could not be stopped
    while busy:
        for fd, _ in poller.poll():
            lane, number = busy.pop(fd)
            try:
                answer = lane.channel.receive()
            except Closed:
                raise RunError(f"the process of a run ended early: {Exit(lane.process.wait())}") from None
            if isinstance(answer, Refused):
                raise (ConfigError if answer.config else RunError)(answer.message)
            if number is not None:
                made(number)
            give(lane)


@contextmanager
def _started(cores: Sequence[int], fork_server: ForkServer) -> Iterator[Lane]:
    """Start a lane on these cores, and end it when the context exits. If a run is then in progress, the lane
    first writes a checkpoint."""
    mine = ",".join(map(str, cores))
    lane = Lane(*fork_server.start(__name__, FromLane, dict(os.environ), mine))
    try:
        with closing(fork_server.another()) as own:
            lane.channel.tell(Forks(), own.fileno())
        yield lane
    except BaseException:
        lane.channel.close()
        lane.process.wait()
        raise
    lane.channel.close()
    end_child(lane.process, GRACE_S)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def main(channel_fd: int, parent_pid: int, cores: str) -> None:
    os.setpgid(0, 0)
    become_child(parent_pid, "edgefl-lane")
    signal.signal(signal.SIGTERM, _stop)  # a run in progress installs its own handler
    os.sched_setaffinity(0, map(int, cores.split(",")))
    channel: Channel[Forks | Job] = Channel.inherit(channel_fd, Forks | Job)
    with suppress(Closed, KeyboardInterrupt):
        channel.receive()
        own: Channel[FromForkServer] = Channel.inherit(channel.descriptor(), FromForkServer)
        with ForkServer(own) as fork_server:
            channel.send(Ready())
            while isinstance(job := channel.receive(), Job):
                try:
                    finished(job.experiment, Path(job.folder), Path(job.base), lambda: fork_server)
                    channel.send(Made())
                except EdgeflError as error:
                    refused = Refused(printable(str(error)), config=isinstance(error, ConfigError))
                    channel.tell(refused)
