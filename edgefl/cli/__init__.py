"""The command ``edgefl``. Its subcommands import modules only when they run, so that help appears quickly.

    __init__     the app, its exit codes, and errors printed as one line
    run          run, resume, compare, report, trace, verify, keys
    nodes        serve, join, keygen
    sweep        sweep, export
    predict      predict
    predict_code predict --code
    programs     exec
    flower       flower
    profiles     profiles
    measure      measure, calibrate
    doctor       doctor
    lab          reproduce, chaos, bench
    gate         gate comment, gate badge
    paths        arguments and options that several commands share, and checks of files and folders

The exit code is 0 on success, 1 if a run failed or its model learned nothing, 2 if a command, file or setting
is invalid, and 3 if a run completed but was INVALID (0 with --accept-invalid). It is 130 after Ctrl-C, 143
after SIGTERM and 129 after SIGHUP; `edgefl.__main__` sets these codes, and `main` returns 130 for all three.
exec returns the first nonzero exit code of the commands that it runs, or one of the codes above if all are 0.
flower returns 1 if the app's run did not complete, 3 if it completed but was INVALID, and 0 otherwise.
"""

from __future__ import annotations

import codecs
import copy
import errno
import functools
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.main import get_command, get_command_name

from edgefl.cli import (
    doctor,
    flower,
    gate,
    lab,
    measure,
    nodes,
    predict,
    profiles,
    programs,
    run,
    sweep,
)
from edgefl.errors import ConfigError, EdgeflError, of_system, shortened
from edgefl.terminal import printable, say

app = typer.Typer(
    name="edgefl",
    help="Emulate a fleet of heterogeneous phones on one machine, and run federated learning on it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    run.run, run.resume, run.compare, run.report, run.trace, run.verify, nodes.serve, nodes.join,
    sweep.sweep, sweep.export, run.keys, nodes.keygen, predict.predict, flower.flower, lab.reproduce,
    lab.chaos, measure.calibrate, measure.measure, doctor.doctor,
):  # fmt: skip
    app.command()(command)
app.command("exec", context_settings={"allow_interspersed_args": False})(programs.execute)
app.add_typer(profiles.app, name="profiles")
app.add_typer(lab.bench, name="bench")
app.add_typer(gate.app, name="gate")

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The error that typer raises for a wrong command line. Typer may bundle its own copy of click, so this class
cannot simply be imported from click."""


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            say(f"edgefl {version('edgefl')}")
        except PackageNotFoundError:
            say("edgefl is not installed, so its version is unknown")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments``, by default that of this process, and return the exit code."""
    # otherwise matplotlib prints a warning if the home folder is not writable
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _takes_all(stream):
            stream.reconfigure(errors="replace")  # print ? for characters that the terminal lacks
    try:
        _require_current_folder()
        words = sys.argv[1:] if arguments is None else list(arguments)
        code = command_tree(words[0] if words else "")(words, prog_name="edgefl", standalone_mode=False)
        _flush()
        if code == 130:  # typer returns this after Ctrl-C
            return _say(130, "interrupted")
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return _unread()
    except SystemExit as stop:  # rich and click exit like this if the output is closed
        _flush()
        return stop.code if isinstance(stop.code, int) else 1
    except _UsageError as error:
        return _misused(error)
    except ConfigError as error:
        return _say(2, str(error))
    except (run.Interrupted, KeyboardInterrupt, typer.Abort) as error:
        return _say(130, str(error) or "interrupted")
    except EdgeflError as error:
        return _say(1, str(error))
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if not name or name == __package__.partition(".")[0] or os.environ.get("EDGEFL_TRACEBACK"):
            raise
        return _say(2, f"this command needs {name}, which is not installed: pip install {name}")
    except UnicodeEncodeError as error:  # the name of a file or folder
        if os.environ.get("EDGEFL_TRACEBACK"):
            raise
        if sys.getfilesystemencoding() != "utf-8":
            name = shortened(error.object)
            return _say(2, f"{name}: this locale cannot write the name; set LC_ALL=C.UTF-8")
        if error.reason != "surrogates not allowed":
            raise
        return _say(2, f"{shortened(_unencodable(error))}: is not UTF-8; use another name")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG and error.filename is not None:  # the name comes from the user
            name = shortened(os.fsdecode(error.filename))
            return _say(2, f"{name}: the name is too long for the file system")
        if os.environ.get("EDGEFL_TRACEBACK"):
            raise
        return _say(1, f"{of_system(error)} (EDGEFL_TRACEBACK=1 shows where)")
    except (MemoryError, SystemError) as error:  # CPython may raise SystemError instead of MemoryError
        if os.environ.get("EDGEFL_TRACEBACK"):
            raise
        return _say(1, f"out of memory{f': {error}' if str(error) else ''} (EDGEFL_TRACEBACK=1 shows where)")


def _require_current_folder() -> None:
    """Raise `ConfigError` if the current folder was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was deleted; change to another one (cd)") from None


@functools.cache
def command_tree(name: str) -> Any:
    """Return the app with only the command of that name, or with all commands if there is no such command.

    This saves time: typer needs a tenth of a second to read the signatures of all commands.
    """
    one = copy.copy(app)
    one.registered_commands = [
        each
        for each in app.registered_commands
        if name == (each.name or (each.callback and get_command_name(each.callback.__name__)))
    ]
    one.registered_groups = [group for group in app.registered_groups if group.name == name]
    return get_command(one if one.registered_commands or one.registered_groups else app)


def _takes_all(stream: io.TextIOWrapper) -> bool:
    """Return True if printing to the stream never raises an error, for any text.

    In the C locale, the stream's error handler is surrogateescape. It prints undecodable bytes in file names,
    but raises an error for characters that the encoding lacks.
    """
    if stream.errors == "surrogateescape":
        return codecs.lookup(stream.encoding).name == "utf-8"
    return stream.errors != "strict"


def _say(code: int, text: str) -> int:
    say(f"edgefl: {printable(' '.join(text.splitlines()))}", err=True)
    _flush()
    return code


def _unencodable(error: UnicodeEncodeError) -> str:
    """Return the name that cannot be encoded; the text that holds it may be that of a whole file."""
    odd = error.object[error.start]
    return next(word for word in error.object.split() if odd in word).strip("\"',")


def _misused(error: Any) -> int:
    """Print what is wrong with a command line, or print the help if there were no arguments."""
    if type(error).__name__ == "NoArgsIsHelpError":
        say(error.format_message(), err=True)
        return 2
    command = error.ctx.command_path if error.ctx is not None else "edgefl"
    message = error.format_message().rstrip(".")
    for found in getattr(error.__cause__, "errors", list)()[:1]:  # pydantic's error contains the value
        given = repr(shortened(str(found["input"])))
        message += "" if given in message else f", got {given}"
    return _say(2, f"{message}; see: {command} --help")


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError as error:
        _unread()
        if not isinstance(error, BrokenPipeError):
            raise


def _unread() -> int:
    """Prevent an error in Python's last flush if the reader closed standard output, as ``| head`` does."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return 1
