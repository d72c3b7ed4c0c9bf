"""Options of `edgefl.programs.run`, checked before anything starts."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from edgefl.errors import ConfigError, unknown
from edgefl.files import make_folder
from edgefl.host.awake import check_awake
from edgefl.host.capacity import Demand, TimeScale, choose_time_scale
from edgefl.host.groups import Groups, NoGroup, find
from edgefl.programs.messages import Absence
from edgefl.programs.phone import HeldPhone, check_charge
from edgefl.results.run_folder import require_free
from edgefl.validation import path

THROTTLES = ("sigstop", "cgroup", "off")
MEMORIES = ("auto", "cgroup", "watch", "off")
LEAVES = ("stop", "kill")
MIN_MEAN_S, MAX_MEAN_S = 1e-3, 1e9
MIN_TIME_SCALE, MAX_TIME_SCALE = 1e-6, 1e6
MIN_SHARE = 1e-6
"""Minimum share of a phone's fastest core, in cores of this host. The throttle stops a phone after each slice
of 2 ms of CPU time. At this share a stop lasts half an hour, and signals have no effect until it ends."""


class ProgramOptions(NamedTuple):
    """Conditions that all phones of a run share."""

    time_scale: float | Literal["auto"] = "auto"
    throttle: str = "sigstop"
    memory: str = "auto"
    seed: int = 0
    absence: Absence | None = None
    charge: float | None = None
    """Initial battery charge as a share of the capacity. Phones with a low battery are killed. If None, the
    battery never runs low."""
    out: Path | None = None
    """Results folder; if None, nothing is written."""
    print_lines: bool = True
    """True to copy the phones' output to the output of this process. With several phones, each line is
    prefixed with the phone's number and device."""
    awake: bool = False
    """True to keep this host's cores from going idle while phones are stopped (`edgefl.host.awake`)."""
    descriptors: tuple[int, ...] = ()
    """Open, inheritable descriptors above 2 that the commands inherit."""


DEFAULTS = ProgramOptions()


def checked(options: ProgramOptions) -> ProgramOptions:
    """Check the options, and create the results folder; return the options with the mechanisms to use.

    Raises `ConfigError` for the first invalid option.
    """
    _check_proc()
    throttle, memory = mechanisms(options)
    if options.awake:
        check_awake(throttle)
    if options.out is not None:
        options = options._replace(out=path("out", options.out))  # callers may pass a string
        assert options.out is not None
        require_free(options.out, "programs")
        try:
            make_folder(options.out)
        except OSError as error:
            raise ConfigError(f"--out {options.out}: cannot be created: {error.strerror}") from None
        if not os.access(options.out, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {options.out}: no file can be created in this folder")
    if (absence := options.absence) is not None:
        for mean_s in (absence.mean_online_s, absence.mean_offline_s):
            if not MIN_MEAN_S <= mean_s <= MAX_MEAN_S:
                allowed = f"must be from {MIN_MEAN_S:g} to {MAX_MEAN_S:g} s"
                raise ConfigError(f"churn: both mean times {allowed}, got {mean_s:g}")
        if absence.leave not in LEAVES:
            raise ConfigError(unknown("leave", absence.leave, LEAVES))
    if options.charge is not None and not 0 < options.charge <= 1:
        raise ConfigError(f"charge: must be above 0 and at most 1, got {options.charge:g}")
    if not -(1 << 63) <= options.seed < 1 << 63:
        raise ConfigError(f"seed: must be from -2**63 to 2**63 - 1, got {options.seed}")
    if options.time_scale != "auto" and not MIN_TIME_SCALE <= options.time_scale <= MAX_TIME_SCALE:
        allowed = f"must be 'auto' or from {MIN_TIME_SCALE:g} to {MAX_TIME_SCALE:g}"
        raise ConfigError(f"time_scale: {allowed}, got {options.time_scale:g}")
    return options._replace(throttle=throttle, memory=memory)


def scale_for(held: Sequence[HeldPhone], options: ProgramOptions) -> TimeScale:
    """Return the time scale of these phones.

    Raises `ConfigError` if a phone cannot run with the initial charge or with its share of a core.
    """
    if options.charge is not None:
        check_charge(held, options.charge)
    limited = held if options.throttle != "off" else ()
    demands = [Demand(math.fsum(one.cores), 1.0) for one in limited]
    if options.time_scale != "auto":  # judge each core: threads can run on several cores of this host
        demands = [Demand(core, 1.0) for one in limited for core in one.cores]
    scale = choose_time_scale(demands, scale=options.time_scale)
    for number, one in enumerate(limited):
        if (share := one.cores[0] / scale.value) < MIN_SHARE:
            gets = f"phone {number} gets {share:g} cores of this host at time_scale {scale.value:g}"
            raise ConfigError(f"{gets}; it needs at least {MIN_SHARE:g}, or it would hardly ever run")
    return scale


def _check_proc() -> None:
    """Raise `ConfigError` unless /proc shows the processes under the pids that this process sees."""
    shown = ""
    with contextlib.suppress(OSError):
        shown = os.readlink("/proc/self")
    if shown != str(os.getpid()):
        why = "shows the pids of another PID namespace" if shown else "is not mounted"
        raise ConfigError(f"/proc {why}, so phones cannot be limited; mount it (mount -t proc)")


def mechanisms(options: ProgramOptions) -> tuple[str, str]:
    """Return the mechanisms that limit CPU time and memory.

    Raises `ConfigError` if a mechanism is unknown or does not work on this host.
    """
    if options.throttle not in THROTTLES:
        raise ConfigError(unknown("throttle", options.throttle, THROTTLES))
    if options.memory not in MEMORIES:
        raise ConfigError(unknown("memory", options.memory, MEMORIES))
    if options.throttle == "cgroup" and (why := no_group("cpu")):
        raise ConfigError(f"throttle 'cgroup' cannot be used here: {why}; 'sigstop' needs no privileges")
    why = no_group("memory") if options.memory in ("auto", "cgroup") else ""
    if options.memory == "cgroup" and why:
        raise ConfigError(f"memory 'cgroup' cannot be used here: {why}; 'watch' needs no privileges")
    memory = options.memory if options.memory != "auto" else "watch" if why else "cgroup"
    return options.throttle, memory


def own_groups(options: ProgramOptions) -> contextlib.ExitStack:
    """With control groups v2, move this process into a subgroup until the returned stack is closed.

    The processes that it starts are then in the subgroup, too. The keeper creates the phones' groups in the
    original group, and could not limit them if this process were still there: a version 2 group that contains
    processes cannot limit the groups below it.
    """
    with contextlib.ExitStack() as stack:
        for controller, mechanism in (("cpu", options.throttle), ("memory", options.memory)):
            if mechanism == "cgroup" and find(controller).version == 2:
                stack.enter_context(Groups([controller]))
        return stack.pop_all()


def no_group(controller: str) -> str:
    """Return why no control group can be created on this host, or "" if one can."""
    try:
        Groups([controller]).close()
    except NoGroup as why:
        return str(why)
    return ""
