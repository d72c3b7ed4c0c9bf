"""Live table of running phones, which is redrawn on a terminal and not shown elsewhere."""

from __future__ import annotations

import contextlib
import errno
import io
import select
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from edgefl.host.capacity import VERDICT_TEXT, TimeScale, capacity_cores
from edgefl.programs import messages
from edgefl.programs.phone import HeldPhone
from edgefl.programs.result import MIN_CPU_S
from edgefl.results.tables import FittedTable, number, percent, table
from edgefl.terminal import can_redraw, say

REDRAW_S = 0.5
MAX_ROWS = 20


class PhonesView:
    """A view without a table, which only prints the phones' output."""

    def __init__(self, quiet: bool = True) -> None:
        self._quiet = quiet
        self.failed = False
        """True once output could not be written, for example because the disk is full."""

    def begin(self, held: Sequence[HeldPhone], scale: TimeScale) -> None:
        """Set the phones and the time scale.

        Unless the view is quiet, print the scale if it is not 1 or the host cannot sustain it.
        """
        if not self._quiet and (scale.value != 1.0 or scale.verdict != "fits"):
            with contextlib.suppress(OSError):
                say(f"edgefl: {_explained(held, scale)}", err=True)

    def update(
        self, states: Mapping[int, messages.PhoneState], traffic: Sequence[messages.TrafficState]
    ) -> None:
        """Update the table. This is called often."""

    def write(self, stream: IO[bytes], data: bytes) -> bool:
        """Write output of a phone, waiting while the reader is slow; return False if the reader is gone.

        Any other error is printed once, and the output is lost.
        """
        try:
            _write_all(stream, data)
        except ValueError:  # the stream is closed
            return False
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EBADF):
                return False
            if not self.failed:
                self.failed = True
                text = f"output of the phones is lost: {stream.name} cannot be written: {error.strerror}"
                with contextlib.suppress(OSError):
                    say(f"edgefl: {text}", err=True)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _write_all(stream: IO[bytes], data: bytes | memoryview) -> None:
    """Write all data without buffering it, even if the stream is non-blocking."""
    stream.flush()
    raw, rest = getattr(stream, "raw", stream), memoryview(data)
    while rest:
        written = raw.write(rest)
        if written is None:  # the write would have blocked
            poller = select.poll()
            poller.register(stream, select.POLLOUT)
            poller.poll()
        else:
            rest = rest[written:]


class _WaitingFile(io.RawIOBase):
    """A file to which writes are always complete, even if its descriptor is non-blocking."""

    def __init__(self, descriptor: int) -> None:
        self._file = io.FileIO(descriptor, "w", closefd=False)

    def write(self, data: Any, /) -> int:
        _write_all(self._file, view := memoryview(data))
        return view.nbytes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()


def waiting_text(stream: TextIO) -> TextIO:
    """Return a text stream with the same descriptor, whose writes block even if the descriptor does not."""
    buffered = io.BufferedWriter(_WaitingFile(stream.fileno()))
    return io.TextIOWrapper(buffered, stream.encoding, "backslashreplace")


def _explained(held: Sequence[HeldPhone], scale: TimeScale) -> str:
    """Return an explanation of the time scale and of how to reduce it."""
    cores = capacity_cores()
    needed = scale.load * scale.value * cores
    text = f"time_scale {scale.value:g}: a second of a phone takes {scale.value:g} s here"
    if not needed:  # the phones' computing is not limited
        return text
    text += (
        f". If all their cores are busy, the phones need {needed:.1f} cores of this host at time_scale 1; "
        f"it has {cores:g}"
    )
    text += VERDICT_TEXT[scale.verdict]
    if scale.value > 1.0 and any(len(one.cores) > 1 and one.phone.threads is None for one in held):
        text += ". If the program has at most N busy threads, --threads N makes it faster"
    return text


class PhonesTable(PhonesView):
    """A view that redraws a table in place; the last state of the table remains on the terminal."""

    def __init__(self, console: Console, limited: bool = True) -> None:
        """``limited`` is False if the phones' computing is not limited, and so has no declared speed."""
        super().__init__(quiet=False)
        self._limited = limited
        self._live = Live(console=console, auto_refresh=False)
        self._held: Sequence[HeldPhone] = ()
        self._drawn_s = 0.0

    def begin(self, held: Sequence[HeldPhone], scale: TimeScale) -> None:
        super().begin(held, scale)
        self._held = held

    def update(
        self, states: Mapping[int, messages.PhoneState], traffic: Sequence[messages.TrafficState]
    ) -> None:
        due = time.monotonic() - self._drawn_s >= REDRAW_S
        if due or all(
            number in states and states[number].state == "ended" for number in range(len(self._held))
        ):
            self._drawn_s = time.monotonic()
            with contextlib.suppress(OSError):
                self._live.update(self.picture(states, traffic), refresh=True)

    def write(self, stream: IO[bytes], data: bytes) -> bool:
        if not stream.isatty():
            return super().write(stream, data)
        text = data.decode(errors="replace").rstrip("\n")
        with contextlib.suppress(OSError):
            self._live.console.print(Text.from_ansi(text))
        return True

    def picture(
        self, states: Mapping[int, messages.PhoneState], traffic: Sequence[messages.TrafficState]
    ) -> FittedTable:
        """Return the current table, running phones first."""
        rows = []
        for place, (held, sent) in enumerate(zip(self._held, traffic, strict=True)):
            state = states.get(place)
            if state is None:
                continue
            known = self._limited and state.cpu_s >= MIN_CPU_S
            rate = state.cpu_s / state.declared_cpu_s if known else None
            sizes = f"{number(sent.up_bytes / 1e6)}", f"{number(sent.down_bytes / 1e6)}"
            name = f"{place} {held.device.id}"
            row = name, state.state, number(state.cpu_s), percent(rate), f"{state.rss_mib:.0f}", *sizes
            rows.append((state.state == "ended", row))
        rows.sort(key=lambda one: one[0])
        shown = [row for _, row in rows[:MAX_ROWS]]
        more = f"and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else None
        heads = (
            "phone",
            "state",
            ">CPU time, s",
            ">of declared speed",
            ">memory, MiB",
            ">sent, MB",
            ">received, MB",
        )
        return table(heads, shown, caption=more)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()


def make_view(phones: int, quiet: bool, limited: bool = True) -> PhonesView:
    """Return the view that suits the terminal on stderr; a single phone is shown without a table."""
    if not can_redraw() or phones <= 1 or quiet:
        return PhonesView(quiet)
    return PhonesTable(Console(file=waiting_text(sys.stderr), highlight=False), limited)
