"""Tests of sweeps: runs from a fork server equal those of ``edgefl run``; a repeated command resumes them."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np
import psutil
import pytest

import edgefl
from edgefl import Stop, cli, config
from edgefl.core.events import Arrived
from edgefl.errors import ConfigError, RunError
from edgefl.host.channel import Channel, Refused, pair
from edgefl.host.fork_server import Forked, ForkServer, FromForkServer, Reaped, Warm
from edgefl.results import report
from edgefl.results.record import Record
from edgefl.results.sweep import Sweep
from edgefl.run import control, lanes, supervisor
from edgefl.run.sweep import sweep
from tests.reports import Page

from .runs import BATCH_NORMALISED, Command, experiment, summary, virtual, wait_for_versions
from .warm import EMPTY

GRID = {"strategy.server_lr": ["0.5", "1.0"]}
SHORT = virtual(1, stop=Stop(versions=4), evaluation=edgefl.Evaluation(every_versions=2))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of four runs. Tests must not write into it."""
    out = tmp_path_factory.mktemp("swept") / "sweep"
    sweep(SHORT, out, seeds=[1, 2], grid=GRID)
    return out


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omit the pictures of comparisons, because drawing them takes a second of CPU time."""
    monkeypatch.setattr("edgefl.results.pictures.curves_picture", lambda *_, **__: EMPTY)
    monkeypatch.setattr(sys.modules[sweep.__module__], "plot", lambda *_, **__: None)


def test_a_run_of_a_sweep_has_the_bits_of_edgefl_run(swept: Path, tmp_path: Path) -> None:
    alone = edgefl.run(config.change(SHORT, ["strategy.server_lr=1.0", "seed=2"]), tmp_path / "alone")
    found = Sweep(swept)
    hashes = [run.result.summary()["model_sha256"] for run in found.runs]
    assert hashes[3] == alone.summary()["model_sha256"]
    assert len(set(hashes)) == 4
    with Record(found.runs[3].result.dir) as warm, Record(alone.dir) as cold:
        happened = [[event for _, event in record.events()] for record in (warm, cold)]
        arrivals = [[event for event in events if type(event) is Arrived] for events in happened]
        assert arrivals[0] == arrivals[1] != []
        assert warm.meta.toml == cold.meta.toml


@pytest.mark.usefixtures("fork_server", "undrawn")
def test_concurrent_runs_have_equal_bits(
    swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = tmp_path / "sweep", list[str]()
    grid = {"strategy.server_lr": ["0.5", "1.0", "2"]}
    found = sweep(SHORT, out, seeds=[1], grid=grid, jobs=2, say=said.append)
    hashes = [[run.result.summary()["model_sha256"] for run in each.runs] for each in (found, Sweep(swept))]
    assert hashes[0][:2] == hashes[1][::2]
    assert sorted(line.split("  ")[1] for line in said) == [f"{n} of 3" for n in range(1, 4)]
    again = list[str]()
    monkeypatch.setattr(lanes, "_hand_out", None)  # all runs exist, so no lane is started
    sweep(SHORT, out, seeds=[1], grid=grid, jobs=2, say=again.append)
    assert again == sorted(said)
    with pytest.raises(ConfigError, match="holds a run with different settings"):
        sweep(virtual(1, stop=Stop(versions=5)), out, seeds=[1], grid=grid, jobs=2)
    with pytest.raises(ConfigError, match=r"--jobs 2: .* virtual clock"):
        sweep(experiment(), tmp_path / "wall", seeds=[1, 2], jobs=2)
    assert not (tmp_path / "wall").exists()


def test_each_setting_has_the_same_drawn_fleets(swept: Path, tmp_path: Path) -> None:
    grid = {"strategy.server_lr": [0.5, 1.0]}
    found = edgefl.sweep(SHORT, tmp_path / "sweep", fleets=2, grid=grid, target=0.05)
    runs = [*found.runs, *Sweep(swept).runs]
    one, other, one_again, other_again, plain, *_ = (
        run.result.trips()["compute_declared_s"][0] for run in runs
    )
    assert one == one_again != other == other_again
    assert plain != one
    (over,) = found.fleets()["fleets"]
    assert over == 2
    assert (found.dir / "fleets.csv").read_text().startswith("label,fleets,ahead,ties,undecided,share")
    alone = edgefl.sweep(SHORT, found.dir, fleets=2, grid={"strategy.server_lr": [0.5]}, target=0.05)
    assert alone.fleets().rows == 0
    assert not (found.dir / "fleets.csv").exists()  # of two settings


def test_the_folder_of_a_sweep_has_tables_curves_and_a_report(swept: Path) -> None:
    found = Sweep(swept)
    assert [(run.label, run.seed) for run in found.runs] == [
        ("server_lr=0.5", 1), ("server_lr=0.5", 2), ("server_lr=1.0", 1), ("server_lr=1.0", 2)
    ]  # fmt: skip
    table, means = found.table(), found.means()
    assert table["strategy.server_lr"].tolist() == [0.5, 0.5, 1.0, 1.0]
    assert table["seed"].tolist() == [1, 2, 1, 2]
    assert means["label"].tolist() == ["server_lr=0.5", "server_lr=1.0"]
    np.testing.assert_allclose(means["accuracy"][0], table["accuracy"][:2].mean(), rtol=1e-5)
    curves = found.evaluations()
    assert curves["version"].tolist() == [0, 2, 4] * 4
    assert curves["seed"].tolist() == [1] * 3 + [2] * 3 + [1] * 3 + [2] * 3
    page = Page(swept / "report.html")
    links = [unquote(link) for link in page.links if link.endswith(".html")]
    assert links == [f"{run['folder']}/report.html" for run in summary(swept)["sweep"]["runs"]]
    assert "server_lr=1.0, seed 2" in page.text
    assert (swept / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert (swept / "runs.csv").read_text() == table.csv()


def test_a_sweep_is_compared_and_shown_by_its_folder(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["compare", str(swept), "--out", str(tmp_path / "out")]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed == str(Sweep(swept))
    labels = [row["label"] for row in summary(tmp_path / "out")["comparison"]["rows"]]
    assert labels == ["server_lr=0.5", "server_lr=1.0"]
    one = Sweep(swept).runs[0].result.dir
    shutil.copytree(one, tmp_path / "one")
    assert cli.main(["compare", str(tmp_path / "one"), str(swept), "--target", "0.2"]) == 0
    both = capsys.readouterr().out
    assert "Time to 20.0% accuracy" in both
    assert "server_lr=1.0 (sweep)" in both
    shutil.copytree(swept, tmp_path / "again" / "sweep")
    assert cli.main(["compare", str(swept), str(tmp_path / "again" / "sweep")]) == 0
    assert "server_lr=1.0" in capsys.readouterr().out.split("(sweep)", 2)[2]
    html = str(Sweep(swept)._repr_html_())
    assert "<caption>At the end</caption>" in html
    assert "<svg" in html
    gone = Sweep(tmp_path / "again" / "sweep")
    shutil.rmtree(gone.dir)
    assert str(gone).startswith(f"{gone!r}: {gone.runs[0].result.dir} is not a run's folder")
    assert gone._repr_html_() is None
    for arguments, words in (
        (["compare", str(swept), "--out", str(swept)], "holds another summary.json"),
        (["report", str(swept)], f"{swept} is not a run but holds runs; name one of them"),
        (["compare", str(swept), str(swept)], "is named twice"),
    ):
        assert cli.main(arguments) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "cut" / "runs").mkdir(parents=True)
    assert cli.main(["compare", str(tmp_path / "cut")]) == 2
    assert "cut holds an unfinished sweep or no sweep" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_sweep_in_python_shows_its_runs_on_a_terminal(
    swept: Path, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs exist already, so one line is printed for each run."""
    monkeypatch.setattr(sys.modules[sweep.__module__], "_compare", lambda *_: "")
    grid = {"strategy.server_lr": [0.5, 1.0]}
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    edgefl.sweep(SHORT, swept, seeds=[1, 2], grid=grid)
    assert len(capsys.readouterr().err.splitlines()) == (4 if terminal else 0)
    edgefl.sweep(SHORT, swept, seeds=[1, 2], grid=grid, quiet=terminal)
    assert len(capsys.readouterr().err.splitlines()) == (0 if terminal else 4)


@pytest.mark.usefixtures("undrawn")
def test_only_missing_runs_are_made(swept: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    shutil.copytree(swept, out)
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/record.sqlite")}
    lines: list[str] = []
    again = sweep(SHORT, out, seeds=[1, 2], grid=GRID, say=lines.append)
    assert len(lines) == 4
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again.table().csv() == Sweep(swept).table().csv()
    shutil.rmtree(out / "runs" / "server_lr=1.0-seed-1")  # a missing run, and one more choice
    more = sweep(SHORT, out, seeds=[1], grid={"strategy.server_lr": ["0.5", "1.0", "2"]})
    assert sum(path.stat().st_mtime_ns == at for path, at in before.items()) == 3
    hashes = [[run.result.summary()["model_sha256"] for run in found.runs] for found in (more, Sweep(swept))]
    assert hashes[0][:2] == hashes[1][::2]
    assert len(set(hashes[0])) == 3
    with pytest.raises(ConfigError, match="holds a run with different settings"):
        sweep(virtual(1, stop=Stop(versions=5)), out, seeds=[1], grid=GRID)


@pytest.mark.slow
def test_an_interrupted_or_killed_sweep_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    long = virtual(stop=Stop(versions=1000))
    file = tmp_path / "long.toml"
    file.write_text(config.dump(long))
    out = tmp_path / "sweep"
    arguments = ("sweep", str(file), "--seeds", "1..2", "--out", str(out))
    first = out / "runs" / "fedbuff-seed-1"
    command = Command(*arguments)
    wait_for_versions(first, 3, command)
    command.interrupt()
    command.ends(130, "run the same command again to resume")
    done = len(list(first.glob("checkpoints/journal-*")))
    assert done >= 1
    command = Command(*arguments)
    wait_for_versions(out / "runs" / "fedbuff-seed-2", 3, command)
    command.child("edgefl-forks").send_signal(signal.SIGKILL)
    command.ends(1, "ended early")
    command = Command(*arguments)
    assert "fedbuff" in command.finish()[1]
    undisturbed = edgefl.run(config.change(long, ["seed=2"]), tmp_path / "undisturbed")
    found = Sweep(out).runs[1].result.summary()
    assert found["model_sha256"] == undisturbed.summary()["model_sha256"]


def interrupt_finished_runs(patch: pytest.MonkeyPatch) -> None:
    """Send SIGINT to this process when the server has ended a run, before the results are written."""
    right = supervisor._Supervisor._handle

    def handle(self: Any, message: Any, sender: Any) -> None:
        if isinstance(message, control.Finished):
            signal.raise_signal(signal.SIGINT)
        right(self, message, sender)

    patch.setattr(supervisor._Supervisor, "_handle", handle)


def interrupt_results(patch: pytest.MonkeyPatch) -> None:
    """Send SIGINT twice to this process when the results of a run are being written."""

    def write_results(folder: Path, *which: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    patch.setattr(supervisor, "write_results", write_results)


def interrupt_twice(patch: pytest.MonkeyPatch) -> None:
    """Send SIGINT before the results are written, and again while they are: that ends the command at once."""
    interrupt_finished_runs(patch)
    patch.setattr(supervisor, "write_results", lambda _: signal.raise_signal(signal.SIGINT))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("interrupt", [interrupt_finished_runs, interrupt_results, interrupt_twice])
def test_a_signal_at_the_end_of_a_run_ends_the_sweep_and_not_the_run(
    interrupt: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server had ended the run before the signal, so the run is complete; the next one must not start."""
    with monkeypatch.context() as patch:
        interrupt(patch)
        with pytest.raises(KeyboardInterrupt):
            sweep(SHORT, tmp_path / "sweep", seeds=[1, 2])
    first, second = (tmp_path / "sweep" / "runs" / f"fedbuff-seed-{seed}" for seed in (1, 2))
    with Record(first) as record:
        assert record.meta.status == "done"
    assert not second.exists()
    sweep(SHORT, tmp_path / "sweep", seeds=[1, 2])
    assert summary(first)["versions"] == summary(second)["versions"] == 4


def interrupt_report(patch: pytest.MonkeyPatch) -> None:
    """Send SIGINT to this process while a report is drawn; raise another exception, as matplotlib does."""
    right = report.write_report

    def write_report(*given: Any, **more: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("Invalid affine transformation matrix") from None
        return right(*given, **more)

    patch.setattr(report, "write_report", write_report)


@pytest.mark.parametrize("interrupt", [interrupt_finished_runs, interrupt_report])
def test_a_run_that_had_ended_when_the_signal_came_is_a_finished_run(
    interrupt: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupt(monkeypatch)
    (tmp_path / "short.toml").write_text(config.dump(SHORT))
    assert cli.main(["run", str(tmp_path / "short.toml"), "--out", str(tmp_path / "run")]) == 0
    assert "interrupted" not in "".join(capsys.readouterr())


@pytest.mark.slow
def test_interrupted_concurrent_runs_have_checkpoints_and_are_resumed(tmp_path: Path) -> None:
    long, out = virtual(stop=Stop(versions=1000)), tmp_path / "sweep"
    file = Command.write(long, tmp_path / "long")
    arguments = ("sweep", str(file), "--seeds", "1..3", "--jobs", "2", "--out", str(out))
    folders = [out / "runs" / f"fedbuff-seed-{seed}" for seed in (1, 2, 3)]
    command = Command(*arguments)
    for folder in folders[:2]:
        wait_for_versions(folder, 3, command)
    command.interrupt()
    command.ends(130, "run the same command again to resume")
    assert all(list(folder.glob("checkpoints/journal-*")) for folder in folders[:2])
    assert not folders[2].exists()
    command = Command(*arguments)
    for folder in folders[:2]:
        wait_for_versions(folder, 60, command)
    command.child("edgefl-lane").send_signal(signal.SIGKILL)
    command.ends(1, "the process of a run ended early: signal 9")
    assert Command(*arguments).finish()[0] == 0
    for seed, run in enumerate(Sweep(out).runs, 1):
        undisturbed = edgefl.run(config.change(long, [f"seed={seed}"]), tmp_path / f"undisturbed {seed}")
        assert run.result.summary()["model_sha256"] == undisturbed.summary()["model_sha256"]


def test_a_process_for_concurrent_runs_gets_its_first_run_only_once_signals_can_end_it() -> None:
    """Until then it ignores SIGTERM, so after Ctrl-C it would execute the whole run."""
    ours, theirs = pair()
    theirs.close()
    process: Any = SimpleNamespace(wait=lambda: -signal.SIGKILL)
    lane = lanes.Lane(process, Channel(ours, lanes.FromLane))
    waiting = deque([(0, lanes.Job(SHORT, "run", "."))])
    with pytest.raises(RunError, match="ended early: signal 9"):
        lanes._hand_out([lane], waiting, lambda _: None)
    assert len(waiting) == 1
    lane.channel.close()


@pytest.mark.slow
def test_ctrl_c_ends_concurrent_runs_in_the_background_of_a_shell(tmp_path: Path) -> None:
    """A shell starts background processes with SIGINT ignored."""
    out = tmp_path / "sweep"
    file = Command.write(virtual(stop=Stop(versions=4000)), tmp_path / "long")
    arguments = ("sweep", str(file), "--seeds", "1..2", "--jobs", "2", "--out", str(out))
    command = Command(*arguments, before=["sh", "-c", "trap '' INT; exec \"$@\"", "sh"])
    for seed in (1, 2):
        wait_for_versions(out / "runs" / f"fedbuff-seed-{seed}", 1, command)
    command.process.send_signal(signal.SIGINT)
    command.ends(130, "run the same command again to resume")


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_outlives_a_killed_sweep(jobs: int, tmp_path: Path) -> None:
    file = Command.write(virtual(stop=Stop(versions=10_000)), tmp_path / "long")
    command = Command(
        "sweep", str(file), "--seeds", "1..2", "--jobs", str(jobs), "--out", str(tmp_path / "sweep")
    )
    wait_for_versions(tmp_path / "sweep" / "runs" / "fedbuff-seed-1", 2, command)
    family = command.family()
    assert {"edgefl-forks", "edgefl-zygote", "edgefl-server"} <= {each.name() for each in family}
    command.process.kill()
    command.process.communicate()
    psutil.wait_procs(family)  # limited by the timeout of the test


def test_an_exit_code_of_an_earlier_process_with_the_same_id_is_forgotten(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect = fork_server._expect

    def with_an_earlier_code(kind: Any) -> Any:
        forked = expect(kind)
        fork_server._exit_codes[forked.pid] = 7
        return forked

    monkeypatch.setattr(fork_server, "_expect", with_an_earlier_code)
    child, channel = fork_server.start("edgefl.run.zygote", None, {})
    assert fork_server.exit_code(child.pid, 0.0) is None
    channel.close()
    assert child.wait() != 7


def test_the_answer_to_an_interrupted_start_is_ignored() -> None:
    ours, theirs = pair()
    server: Channel[Any] = Channel(theirs, Any)
    for message in (Warm(), Forked(5), Reaped(4, 0, 0.0)):
        server.send(message)
    with ForkServer(Channel(ours, FromForkServer)) as fork_server:
        assert fork_server.exit_code(4, 10.0) == 0
    server.close()


def main(*_: str) -> None:
    """Raise the error of a process that cannot be started."""
    raise OSError(11, "no process left")


def test_an_error_in_a_forked_process_is_one_line(
    fork_server: ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    child, channel = fork_server.start(__name__, control.FromServer, dict(os.environ))
    said = channel.receive()
    channel.close()
    assert child.wait() == 1
    assert isinstance(said, Refused)
    assert said.message.startswith(f"{__name__}: BlockingIOError: [Errno 11] no process left")
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_warm_run_under_the_wall_clock_counts_its_own_time(tmp_path: Path) -> None:
    """The run's processes are not children of the supervisor, but do not count as other work on the host."""
    with ForkServer() as fork_server:
        supervisor.run(experiment(stop=Stop(versions=6)), tmp_path / "run", True, fork_server=fork_server)
        spent_s = fork_server.cpu_s()
        fork_server._process.kill()
        with pytest.raises(RunError, match="ended early"):
            fork_server.start("edgefl.run.zygote", None, {})
    with Record(tmp_path / "run") as record:
        assert record.meta.used is not None
        assert record.meta.used > 0
    assert spent_s > 0
    assert summary(tmp_path / "run")["versions"] == 6


def test_own_training_of_each_point_is_tried_before_the_first_run(tmp_path: Path) -> None:
    """The error names the file and the line, and no run is made."""
    (tmp_path / "mine.py").write_text(
        "def good(model, examples, context):\n    context.step(1)\n"
        "def bad(model, examples, context):\n    model.head.weight\n"
    )
    points = {"training.function": ['"mine:good"', '"mine:bad"']}
    with pytest.raises(ConfigError, match=r"^function=mine:bad: .*'mine:bad' \(mine.py:4\) raised Attr"):
        sweep(SHORT, tmp_path / "sweep", seeds=[1], grid=points, base=tmp_path)
    assert not (tmp_path / "sweep").exists()


def test_a_target_of_accuracy_is_refused_for_a_regression_after_its_first_run(tmp_path: Path) -> None:
    data, training = edgefl.Data(name="diabetes"), edgefl.Training(loss="mse")
    regression = msgspec.structs.replace(SHORT, data=data, training=training)
    with pytest.raises(ConfigError, match="target: accuracy is not evaluated here, only loss; leave"):
        sweep(regression, tmp_path / "sweep", seeds=[1, 2], target=0.9)
    assert [one.name for one in (tmp_path / "sweep" / "runs").iterdir()] == ["fedbuff-seed-1"]
    found = sweep(regression, tmp_path / "sweep", seeds=[1])
    assert "<svg" in str(found._repr_html_())  # curves of the loss


def test_the_traceback_of_an_error_in_python_has_two_frames(tmp_path: Path) -> None:
    """The frames are those of the caller and of the function that it called."""
    with pytest.raises(ConfigError) as caught:
        edgefl.run(config.change(SHORT, ["data.name=nowhere:data"]), tmp_path / "run")
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 2


def test_runs_without_progress_are_not_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.toml").write_text(config.dump(SHORT))
    out = tmp_path / "sweep"
    rates = ["0.1", "1e-30", "3e38"]
    command = ["sweep", str(tmp_path / "e.toml"), "--seeds", "1", "--out", str(out)]
    assert cli.main([*command, "--grid", f"training.lr={','.join(rates)}"]) == 1
    told = capsys.readouterr()
    assert told.err.splitlines()[-1] == "edgefl: no progress, so not ranked: lr=1e-30, lr=3e38"
    assert told.out.count("no progress") == 2
    found = {run.changes["training.lr"]: run.result for run in Sweep(out).runs}
    figures = {rate: found[rate].summary() for rate in rates}
    assert [figures[rate]["versions"] for rate in rates] == [4, 4, 0]
    assert [figures[rate]["no_progress"] for rate in rates] == [
        "", "the weights of version 4 equal those of version 0",
        f"{figures['3e38']['dropped_updates']} tasks in a row failed or gave a bad update",
    ]  # fmt: skip
    assert figures["3e38"]["dropped_updates"] == figures["3e38"]["client_trips"] > 100
    comparison = Sweep(out).summary()["comparison"]
    assert [row["no_progress"] for row in comparison["rows"]] == [False, True, True]
    for table in (Sweep(out).table(), Sweep(out).means()):
        assert table["no_progress"].tolist() == [0.0, 1.0, 1.0]
    assert (out / "runs.csv").read_text().splitlines()[0].endswith(",valid,no_progress")
    assert "<b>No progress</b>, so not ranked: lr=1e-30, lr=3e38." in (out / "report.html").read_text()
    for rate in rates[1:]:
        assert cli.main(["verify", str(found[rate].dir)]) == 0
        assert cli.main(["resume", str(found[rate].dir)]) == 2
        assert "<b>No progress.</b>" in (found[rate].dir / "report.html").read_text()


def test_a_model_of_which_only_running_statistics_change_makes_no_progress(tmp_path: Path) -> None:
    (tmp_path / "own_net.py").write_text(BATCH_NORMALISED)
    wanted = config.change(SHORT, ['model={name="own_net:net"}', "training.lr=1e-30"])
    found = supervisor.run(wanted, tmp_path / "run", quiet=True, base=tmp_path).summary()
    assert found["no_progress"] == "the weights of version 4 equal those of version 0"
