"""Tests of the page of a run with ``--web``, read by a program and shown in a browser."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgefl import Clock, Experiment, Stop
from edgefl.results import headline, page
from tests.process.browser import browser
from tests.process.runs import MINUTE_S, Command, experiment, summary


class LiveRun:
    """A run with its live page."""

    def __init__(self, wanted: Experiment, folder: Path) -> None:
        file = str(Command.write(wanted, folder))
        self.command = Command("run", file, "--web", "--out", str(folder), "--accept-invalid")
        assert self.command.process.stderr is not None
        lines = iter(self.command.process.stderr.readline, "")
        self.port, self.path = next(
            (int(found[1]), found[2])
            for line in lines
            if (found := re.search(r"127\.0\.0\.1:(\d+)(/.*/)$", line))
        )

    def ask(self, path: str = "", method: str = "GET") -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=MINUTE_S)) as connection:
            connection.request(method, self.path + path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def states(self) -> Iterator[Any]:
        """Yield the states that the page receives until the run is over."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=MINUTE_S)) as connection:
            connection.request("GET", f"{self.path}events")
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])


def until(states: Iterator[Any], reached: Callable[[Any], bool]) -> Any:
    return next(state for state in states if reached(state))


def test_a_program_reads_the_state_of_every_phone_and_the_verdict_of_the_summary(tmp_path: Path) -> None:
    run = LiveRun(experiment(stop=Stop(versions=100_000)), tmp_path / "run")
    states = run.states()
    found = until(states, lambda one: any(state > "1" for state in one["states"]))
    assert found["fleet"] == [["pi-zero-2w", "fios", 4], ["watch-a7", "fios", 2]]
    assert re.fullmatch("[01234]{6}", found["states"])
    assert re.match(r"versions [\d,]+ of 100,000", found["goal"]["text"])
    until(states, lambda _: "applied" in run.ask("phone/5")[1])
    assert "Cortex-A7" in run.ask("phone/5")[1]
    until(states, lambda one: len(one["charts"][0]["lines"][0][1]) > 1)
    assert [run.ask(path, method)[0] for path, method in (("phone/6", "GET"), ("", "POST"))] == [404, 405]
    whole, run.path = run.path, "/"
    assert len(whole) > 16
    assert [run.ask(path)[0] for path in ("", "events", "phone/5")] == [404] * 3, "the path is no secret"
    run.path = whole
    server = run.command.child("edgefl-web")
    assert server.nice() == min(19, psutil.Process(run.command.process.pid).nice() + 10)
    assert {address.laddr.ip for address in server.net_connections()} == {"127.0.0.1"}
    run.command.interrupt()
    last = until(states, lambda one: one["ended"] != "")
    assert last["ended"] == "interrupted"
    found = summary(tmp_path / "run")  # written before the page ends
    stat = headline.fidelity(found["fidelity"], found["clock"])
    note = next(iter(found["fidelity"]["reasons"]), stat.note)
    assert page.stat("Fidelity", stat.value, note, stat.tone) in last["cards"]
    assert list(states) == []
    run.command.ends(130)
    with pytest.raises(ConnectionRefusedError):
        run.ask()


def test_a_browser_shows_the_page_and_requests_nothing_else(tmp_path: Path) -> None:
    wanted = experiment(clock=Clock(kind="wall"), stop=Stop(wall_s=600.0))
    with browser(tmp_path / "browser") as tab:
        run = LiveRun(wanted, tmp_path / "run")
        here = f"http://127.0.0.1:{run.port}{run.path}"
        tab.open(here)
        tab.until("document.querySelector('#keys b') && now.states.length === 6 && groups.length === 2")
        assert tab.value("document.querySelector('h1').textContent") == "experiment: fedbuff"
        # Click on the second phone of the second profile, which is phone 5.
        click = "new MouseEvent('click', {clientX: box.left + 1.5 * group.cell, clientY: box.top + 5})"
        group = "const group = groups[1], box = group.canvas.getBoundingClientRect()"
        tab.value(f"{{{group}; group.canvas.dispatchEvent({click})}}")
        tab.until("document.querySelector('#phone h3').textContent.startsWith('Phone 5: ')")
        tab.until("document.querySelectorAll('#phone tbody tr').length > 1")
        tab.until("document.querySelectorAll('#charts svg').length >= 3")
        assert tab.value("location.hash") == "#5"
        light = tab.value("getComputedStyle(document.body).backgroundColor")
        tab.open("about:blank")
        tab.open(f"{here}#1", 400, dark=True)
        tab.until("document.querySelector('#phone h3').textContent.startsWith('Phone 1: ')")
        assert tab.value("getComputedStyle(document.body).backgroundColor") != light
        assert tab.value("document.documentElement.scrollWidth <= 400")
        run.command.child("edgefl-web").kill()  # the run goes on without it
        tab.until("document.querySelector('#notice').textContent.startsWith('The run does not answer')")
        run.command.interrupt()
        run.command.ends(130)
        asked = {url.split("#")[0] for url in tab.requests if not url.startswith(("data:", "about:"))}
        assert asked == {here, *(here + path for path in ("events", "phone/5", "phone/1"))}
        assert [error for error in tab.errors if "ERR_" not in error] == []
