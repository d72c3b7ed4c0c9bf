"""`run` and `start` start the phones' processes, forward output and signals, and judge the result."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from edgefl.errors import RunError
from edgefl.files import write_json, write_text
from edgefl.host.awake import Started
from edgefl.host.capacity import TimeScale, UsageMeter, capacity_cores
from edgefl.host.channel import Channel, Closed
from edgefl.host.children import end_child
from edgefl.host.process import STOPS, allow_open_files, handled, start_process
from edgefl.host.throttle import cpu_ns
from edgefl.host.verdict import Conditions
from edgefl.programs import messages
from edgefl.programs.options import DEFAULTS, ProgramOptions, checked, own_groups, scale_for
from edgefl.programs.phone import (
    HeldPhone,
    Phone,
    environment,
    filled,
    local_host,
    look_up,
    open_listeners,
)
from edgefl.programs.result import (
    PhoneResult,
    ProgramsResult,
    UnwrittenRecord,
    judge,
    model_errors,
    way_result,
)
from edgefl.programs.tree import RUN_VARIABLE, end_marked
from edgefl.programs.view import PhonesView
from edgefl.results.run_folder import SUMMARY_FILE

REPORT_FILE = "report.html"
OUTPUTS = "phones"
"""Name of the folder with the phones' output in a results folder."""
TURN_S = 0.5
LONGEST_LINE = 1 << 16
MAX_KEPT = 20_000
"""Maximum number of transmissions recorded per link direction; later ones are not recorded."""
OUT_OF_FILES = (
    "edgefl reached its limit on open files, so connections were refused or delayed; raise the hard limit "
    "(ulimit -Hn)"
)
UNLIMITED = "a process ran as another user (sudo), so it could not be limited; use --throttle cgroup"
AWAKE_ENDED = "the process that keeps the host's cores busy ended early"
ENDING_S = 20.0


def run(
    phones: Sequence[Phone], options: ProgramOptions = DEFAULTS, view: PhonesView | None = None
) -> ProgramsResult:
    """Run the phones' commands until all have ended.

    SIGINT, SIGTERM and SIGHUP are forwarded to the commands; a second such signal kills the phones. Once all
    commands have ended, such a signal drops the data that is still in transit.

    Raises `ConfigError` for invalid phones or options, `RunError` if one of edgefl's own processes dies, and
    `UnwrittenRecord`, which holds the result, if the record cannot be written.
    """
    running = start(phones, options, view)
    with running.forwarding_signals(), running:
        running.wait()
    return running.result()


def start(
    phones: Sequence[Phone], options: ProgramOptions = DEFAULTS, view: PhonesView | None = None
) -> RunningPhones:
    """Start the phones; leaving the ``with`` block ends them. Raises `ConfigError` for invalid phones or
    options."""
    options = checked(options)
    held = look_up(phones)
    return RunningPhones(held, options, scale_for(held, options), view or PhonesView())


class _Output:
    """Output stream of a phone (stdout or stderr)."""

    def __init__(self, fd: int, prefix: bytes, printed: IO[bytes] | None, file: IO[bytes] | None) -> None:
        self.fd, self._prefix, self._printed, self._file = fd, prefix, printed, file
        self._rest = b""

    def read(self, write: Callable[[IO[bytes], bytes], bool], ended: bool) -> bool:
        """Forward the available output; return False at the end of the output, or if its reader is gone.

        The caller then closes the phone's pipe, and the phone gets SIGPIPE, as with ``| head``. If ``ended``
        is True, this is the end of the output, even if a process still holds the pipe open.
        """
        data = b"" if ended else os.read(self.fd, 1 << 16)
        if self._file is not None:
            write(self._file, data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if self._rest and (not data or len(self._rest) > LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        if self._printed is not None and lines:
            taken = write(self._printed, b"".join(self._prefix + line + b"\n" for line in lines))
            if not taken and self._file is None:
                return False
        return bool(data)

    def close(self) -> None:
        os.close(self.fd)
        if self._file is not None:
            self._file.close()


class _Traffic:
    """Traffic statistics of a phone, as reported by the relay."""

    def __init__(self, phone: int) -> None:
        self.state = messages.TrafficState(phone, 0, 0, 0, 0, 0, 0, 0.0, 0.0)
        self.times: dict[str, tuple[list[float], list[float]]] = {"up": ([], []), "down": ([], [])}

    def add(self, message: messages.Transmitted) -> None:
        declared_s, achieved_s = self.times[message.way]
        room = MAX_KEPT - len(declared_s)
        declared_s += message.declared_s[:room]
        achieved_s += message.achieved_s[:room]


class RunningPhones:
    """Running phones; created by `start`. Leaving the ``with`` block ends them."""

    def __init__(
        self, held: Sequence[HeldPhone], options: ProgramOptions, scale: TimeScale, view: PhonesView
    ) -> None:
        self._held, self.options, self.scale, self._view = held, options, scale, view
        self.states: dict[int, messages.PhoneState] = {}
        self._ended: dict[int, messages.PhoneEnded] = {}
        self._traffic = [_Traffic(number) for number in range(len(held))]
        self._outputs: dict[int, _Output] = {}
        self._run_id = uuid.uuid4().hex
        self._stack = contextlib.ExitStack()
        self._broken = self._interrupted = self._delivering = self._closing = False
        self._low: set[int] = set()  # phones killed because of a low battery
        self._meter, self._idle_s, self._awake_ended = UsageMeter(), 0.0, False
        self._result: ProgramsResult | None = None
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()

    # ---- start ---------------------------------------------------------------------------------

    def _start(self) -> None:
        self._open_files = allow_open_files()
        self._stack.callback(self._close_outputs)
        self._stack.enter_context(own_groups(self.options))
        with contextlib.ExitStack() as ours:  # descriptors that only the child processes need
            # The relay's selector needs a low descriptor, so reserve one before the listeners take them.
            ours.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            forwarded_ports = open_listeners(self._held)
            listeners = [port.listener for some in forwarded_ports for port in some]
            for listener in listeners:
                ours.callback(listener.close)
            if self.options.out is not None:
                remove_record(self.options.out)
                remove_outputs(self.options.out / OUTPUTS)
            stdio = [self._stdio(number, ours) for number in range(len(self._held))]
            self._relay_channel = self._process(
                "relay", messages.FromRelay, [listener.fileno() for listener in listeners]
            )
            for number, (held, some) in enumerate(zip(self._held, forwarded_ports, strict=True)):
                network = held.phone.network or held.device.network or "none"
                ways = tuple((port.listener.fileno(), port.server) for port in some)
                self._relay_channel.tell(messages.Carry(number, network, ways))
            inherited = {fd for three in stdio for fd in three} - {0, 1, 2} | {*self.options.descriptors}
            self._keeper_channel = self._process("keeper", messages.FromKeeper, sorted(inherited))
            for number, (held, three) in enumerate(zip(self._held, stdio, strict=True)):
                self._keeper_channel.tell(self._launch(number, held, three))
        if self.options.awake:
            process, channel = start_process("edgefl.host.awake", Started, dict(os.environ))
            self._stack.callback(self._end_awake, process, channel)
            self._first(channel)
        for channel in (self._relay_channel, self._keeper_channel):
            self._first(channel)
        self._began_s = time.monotonic()
        self._meter.begin()
        self._stack.enter_context(self._view)
        self._view.begin(self._held, self.scale)
        absence, seed = self.options.absence, self.options.seed
        begin = messages.Begin(time.monotonic_ns(), self.scale.value, seed, absence)
        self._relay_channel.tell(begin)
        self._keeper_channel.tell(begin)

    def _process(self, name: str, incoming: Any, inherited: list[int]) -> Channel[Any]:
        module = f"edgefl.programs.{name}"
        process, channel = start_process(
            module, incoming, dict(os.environ), self._run_id, inherited=inherited
        )
        self._stack.callback(self._end, process, channel)
        return channel

    def _first(self, channel: Channel[Any]) -> None:
        try:
            channel.receive()
        except Closed:
            raise RunError("one of edgefl's own processes failed to start; its error is above") from None

    def _launch(self, number: int, held: HeldPhone, stdio: tuple[int, int, int]) -> messages.Launch:
        host = local_host(number, len(self._held))
        base = {**os.environ, RUN_VARIABLE: self._run_id}
        memory: Any = self.options.memory if held.limit_mib is not None else "off"
        throttle: Any = self.options.throttle
        return messages.Launch(
            phone=number,
            command=tuple(
                os.fsencode(filled(word, number, held.device.id, host)) for word in held.phone.command
            ),
            environment={
                os.fsencode(key): os.fsencode(value)
                for key, value in environment(held, number, host, base).items()
            },
            folder=None if held.phone.folder is None else os.fsencode(held.phone.folder),
            cores=tuple(core / self.scale.value for core in held.cores),
            limit_mib=held.limit_mib,
            throttle=throttle,
            memory=memory,
            stdio=stdio,
            ignored=tuple(number for number in STOPS if signal.getsignal(number) is signal.SIG_IGN),
            open_files=self._open_files,
            descriptors=tuple(sorted({*self.options.descriptors})),
        )

    def _stdio(self, number: int, theirs: contextlib.ExitStack) -> tuple[int, int, int]:
        """Open stdin, stdout and stderr of a phone. A single phone inherits this process's own."""
        alone = len(self._held) == 1 and self.options.print_lines
        given = alone and sys.__stdin__ is not None and not os.isatty(0)
        stdin = os.dup(0) if given else os.open(os.devnull, os.O_RDONLY)
        theirs.callback(os.close, stdin)
        if alone:
            return stdin, 1, 2
        device, out = self._held[number].device.id, self.options.out
        writers = []
        for ending, stream in (("out", sys.stdout), ("err", sys.stderr)):
            file: IO[bytes] | None = None
            if out is not None:
                path = out / OUTPUTS / f"{number}-{device}.{ending}"
                path.parent.mkdir(parents=True, exist_ok=True)
                file = path.open("wb", buffering=0)
            printed = getattr(stream, "buffer", None) if self.options.print_lines else None
            read, write = os.pipe()
            theirs.callback(os.close, write)
            writers.append(write)
            output = _Output(read, f"[{number} {device}] ".encode(), printed, file)
            self._outputs[read] = output
        return stdin, writers[0], writers[1]

    # ---- while the phones run ------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """True until every command has ended and all its output has been forwarded."""
        return len(self._ended) < len(self._held) or bool(self._outputs)

    @property
    def ended(self) -> list[int]:
        """Phones whose commands have ended."""
        return sorted(self._ended)

    def why(self, phone: int) -> str:
        """Return why the emulation ended a phone whose command has ended; "" if the command ended itself."""
        return self._ended[phone].why

    def wait(self, until_readable: int | None = None) -> None:
        """Wait until all phones have ended, or until the given descriptor (such as a pidfd) is readable."""
        while self.running:
            if self.turn(TURN_S, until_readable):
                return

    def turn(self, wait_s: float, *others: int | None) -> list[int]:
        """Wait up to ``wait_s`` seconds for output or messages, and process them.

        Return the descriptors in ``others`` that are readable.

        Callers that do not use `wait` must call this often: a phone blocks when its output pipe is full.
        """
        others_ = [fd for fd in others if fd is not None]
        # Once all phones have ended, all that they have written is in the pipes. A pipe that is then empty
        # but open is held by the keeper, which is about to close it, or by a process that edgefl cannot kill,
        # such as one of another user.
        all_ended = len(self._ended) == len(self._held)
        wait_ms = 0.0 if all_ended and self._outputs else wait_s * 1e3
        own = [self._keeper_channel.fileno(), self._relay_channel.fileno(), *self._outputs]
        poller = select.poll()
        for fd in (*own, *others_):
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(wait_ms)}
        for fd in {*self._outputs} if all_ended else ready & self._outputs.keys():
            if not self._outputs[fd].read(self._view.write, ended=fd not in ready):
                self._outputs.pop(fd).close()
        self._receive(self._keeper_channel, ready)
        self._receive(self._relay_channel, ready)
        self._drain_batteries()
        self._view.update(self.states, [traffic.state for traffic in self._traffic])
        return [fd for fd in others_ if fd in ready]

    def _drain_batteries(self) -> None:
        """Kill each phone whose battery is low."""
        if self.options.charge is None:
            return
        for number, state in self.states.items():
            power, used_j = self._held[number].power, self._energy_j(number, state)
            if power is None or used_j is None or number in self._ended or number in self._low:
                continue
            if self.options.charge * power.capacity_j - used_j <= power.least_j:
                self._low.add(number)
                why = f"battery low: {used_j:.3g} J used, {power.least_j:.3g} J are held in reserve"
                self._keeper_channel.tell(messages.SwitchOff(number, why))

    def _energy_j(self, number: int, state: messages.PhoneState) -> float | None:
        """Return the energy in joules that a phone has drawn from its battery, online and offline."""
        held = self._held[number]
        if (power := held.power) is None:
            return None
        sent, used = self._traffic[number].state, state.cpu_s / (state.declared_cpu_s or math.inf)
        computing_j = used * sum(w * s for w, s in zip(held.core_w, state.in_use_s, strict=False))
        return (
            power.idle_w * state.age_s / self.scale.value
            + computing_j / self.scale.value
            + power.up_w * sent.up_s
            + power.down_w * sent.down_s
        )

    def _declared_share(self, number: int, state: messages.PhoneState) -> float:
        """Return a phone's mean declared share, in cores of this host, while it ran or waited for a core."""
        cores = self._held[number].cores
        if len(cores) > 1 and state.wanting_s > 0:
            return state.declared_cpu_s / state.wanting_s
        return cores[0] / self.scale.value

    def _receive(self, channel: Channel[Any], ready: set[int]) -> None:
        if channel.fileno() not in ready and not channel.waiting:
            return
        try:
            for message in channel.receive_ready():
                self._handle(message)
        except Closed:
            self._lost(channel)

    def _lost(self, channel: Channel[Any]) -> NoReturn:
        self._broken = True
        name = "keeper" if channel is self._keeper_channel else "relay"
        raise RunError(f"the phones' {name} process ended unexpectedly; all phones were killed") from None

    def _handle(self, message: Any) -> None:
        match message:
            case messages.PhoneState():
                self.states[message.phone] = message
            case messages.PhoneEnded():
                self.states[message.state.phone] = message.state
                self._ended[message.state.phone] = message
            case messages.TrafficState():
                self._traffic[message.phone].state = message
            case messages.Transmitted():
                self._traffic[message.phone].add(message)

    def forward_signal(self, number: int) -> None:
        """Send a signal to the process group of each phone's command."""
        self._interrupt(messages.Pass(number))

    def kill(self) -> None:
        """Kill every phone's processes."""
        self._interrupt(messages.EndPhones())

    def _interrupt(self, message: messages.Pass | messages.EndPhones) -> None:
        """Send a message to the keeper. If this process waits only for data in transit, drop that data."""
        self._interrupted = True
        if not self._closing:
            self._keeper_channel.tell(message)
            if self._delivering:
                self._relay_channel.tell(messages.EndPhones())

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Forward SIGINT, SIGTERM and SIGHUP unless they are ignored; the second signal kills the phones."""
        seen = 0

        def handle(number: int) -> None:
            nonlocal seen
            seen += 1
            self.forward_signal(number) if seen == 1 else self.kill()

        with handled([number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN], handle):
            yield

    # ---- shutdown ------------------------------------------------------------------------------

    def close(self) -> None:
        """End the phones, receive the remaining messages, and write the results.

        Raises `UnwrittenRecord` if the results cannot be written.
        """
        with self._stack:
            wall_s = time.monotonic() - self._began_s
            try:
                if not self._broken:
                    self._finish()
            finally:
                self._closing = True  # the channels are closed next
        if self._broken:
            return
        self._result = self._judged(wall_s)
        if self.options.out is not None:
            try:
                _write(self.options.out, self._result)
            except RunError as error:
                raise UnwrittenRecord(str(error), self._result) from None

    def _finish(self) -> None:
        """Kill commands that still run, then end the relay.

        The data in transit is delivered, unless the commands were interrupted or the emulation has ended all
        phones. A command that crashed has no effect on the data of other phones.
        """
        if killed := len(self._ended) < len(self._held):
            self.kill()
        while self.running:
            self.turn(TURN_S)
        self._meter.end()
        ended = self._ended.values()
        interrupted = self._interrupted and any(one.code < 0 for one in ended)
        now = killed or interrupted or all(one.why for one in ended)
        try:
            self._relay_channel.send(messages.EndPhones(now=now))
            self._delivering = True
            while not isinstance(message := self._relay_channel.receive(), messages.Drained):
                self._handle(message)
        except Closed:
            self._lost(self._relay_channel)

    def result(self) -> ProgramsResult:
        """Return the result, which is available only after `close`."""
        assert self._result is not None
        return self._result

    def _end(self, process: subprocess.Popen[bytes], channel: Channel[Any]) -> None:
        """End one of edgefl's own processes; if it failed, kill all processes of the phones."""
        channel.close()
        code = 1  # counts as a failure if `end_child` raises an exception
        try:
            code = end_child(process, ENDING_S).code
        finally:
            if code:
                end_marked(self._run_id)

    def _close_outputs(self) -> None:
        for output in self._outputs.values():
            output.close()
        self._outputs.clear()

    def _end_awake(self, process: subprocess.Popen[bytes], channel: Channel[Any]) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._idle_s = cpu_ns(process.pid) / 1e9
        channel.close()
        self._awake_ended = end_child(process, ENDING_S).code != 0

    def _judged(self, wall_s: float) -> ProgramsResult:
        phones = tuple(self._phone_result(number) for number in range(len(self._held)))
        pairs = [
            pair
            for traffic in self._traffic
            for declared_s, achieved_s in traffic.times.values()
            for pair in zip(declared_s, achieved_s, strict=True)
        ]
        used = sum(one.cpu_s for one in phones) / (wall_s * capacity_cores()) if wall_s > 0 else None
        conditions = Conditions(load=used, **self._meter.usage(self._idle_s))
        held_back = self.options.throttle != "off"
        short = any(traffic.state.out_of_files for traffic in self._traffic)
        foreign = held_back and any(ended.state.unlimited for ended in self._ended.values())
        known = (OUT_OF_FILES, short), (UNLIMITED, foreign), (AWAKE_ENDED, self._awake_ended)
        return ProgramsResult(
            phones=phones,
            time_scale=self.scale.value,
            seed=self.options.seed,
            wall_s=wall_s,
            throttle=self.options.throttle,
            memory=self.options.memory,
            awake=self.options.awake,
            held=judge(
                phones if held_back else (),
                pairs,
                self.scale.value,
                conditions,
                [reason for reason, holds in known if holds],
            ),
            model_errors=model_errors(self._held, pauses=not self.options.awake) if held_back else (),
        )

    def _phone_result(self, number: int) -> PhoneResult:
        held, ended, traffic = self._held[number], self._ended[number], self._traffic[number]
        state, sent = ended.state, traffic.state
        return PhoneResult(
            phone=number,
            device=held.device.id,
            network=held.network.id,
            command=held.phone.command,
            exit_code=ended.code if ended.code >= 0 else 128 - ended.code,
            why=ended.why,
            wall_s=state.wall_s,
            cpu_s=state.cpu_s,
            wanting_s=state.wanting_s,
            declared_share=self._declared_share(number, state),
            achieved_share=state.cpu_s / state.wanting_s if state.wanting_s > 0 and state.cpu_s > 0 else None,
            limit_mib=held.limit_mib,
            peak_mib=state.peak_mib,
            stops=state.stops,
            uncounted_s=state.uncounted_s,
            connections=sent.connections,
            refused=sent.refused,
            broken=sent.broken,
            energy_j=self._energy_j(number, state),
            up=way_result(sent.up_bytes, *traffic.times["up"]),
            down=way_result(sent.down_bytes, *traffic.times["down"]),
        )


def remove_record(out: Path) -> None:
    """Remove an earlier command's summary and report, which would remain if this command is killed."""
    if (out / SUMMARY_FILE).is_file():  # otherwise edgefl did not write the report: see `require_free`
        for name in (REPORT_FILE, SUMMARY_FILE):
            (out / name).unlink(missing_ok=True)


def remove_outputs(folder: Path) -> None:
    """Remove the output files of an earlier command, which may have run on other phones."""
    for file in folder.glob("*-*.*"):
        if re.fullmatch(r"[0-9]+-.+\.(out|err)", file.name):
            file.unlink()


def _write(out: Path, result: ProgramsResult) -> None:
    from edgefl.programs.report import programs_page

    write_json(out / SUMMARY_FILE, result.summary())
    write_text(out / REPORT_FILE, programs_page(result, out.name))
