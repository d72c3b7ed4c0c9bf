"""Tests of the content of the live page."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
from base64 import b64decode
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from test_view import progress

from edgefl.experiment import Clock, Experiment, Fleet, Stop
from edgefl.host.capacity import TimeScale
from edgefl.results.rows import ClientRow, EvaluationRow, TripRow
from edgefl.results.store import Store
from edgefl.run import control, web_process
from edgefl.run.view import RunView
from edgefl.run.web import with_page
from edgefl.run.web_process import MAX_POINTS, LivePage

EVIL = "</script><script>alert(1)</script>"
TRIP = TripRow(
    task=0, client=2, base_version=0, trip=0, sent_s=0.0, received_s=1.0, arrived_s=4.0, staleness=3,
    fate="applied", down_s=1.0, compute_s=2.0, up_s=1.0, down_declared_s=1.0, compute_declared_s=1.6,
    up_declared_s=1.0, trip_achieved_s=4.0, trip_declared_s=3.6, loss=0.5,
)  # fmt: skip


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The folder of a run with two measured versions, two trips of phone 2, and an incident."""
    with Store(tmp_path) as store:
        store.clients(
            [ClientRow(client=client, profile="pixel-4", network="lte", examples=60, labels=(0, 7),
                       step_s=0.25, memory_mib=512.0, down_mbps=16.8) for client in range(4)]
        )  # fmt: skip
        for version, accuracy in ((0, 0.1), (1, 0.5)):
            store.evaluation(
                EvaluationRow(version=version, at_s=2.0 * version, wall_s=1.0, trips=2, accuracy=accuracy,
                              loss=2.0 - version)
            )  # fmt: skip
        store.trip(TRIP)
        store.trip(msgspec.structs.replace(TRIP, task=1, trip=1, fate="lost", reason=f"died <{EVIL}>"))
        store.incident(3.0, 2, "death", EVIL)
        store.incident(3.0, 1, "hang", "of another phone")
    return tmp_path


def page_of(folder: Path, clock: str = "wall", name: str = "trial") -> LivePage:
    fleet = Fleet(devices={"pixel-4": 3, "pi-4": 1}, network="lte")
    trial = Experiment(name=name, fleet=fleet, clock=Clock(kind=clock), stop=Stop(versions=200))
    page = LivePage(trial, folder, "/secret/")
    page.handle(control.Activity("loading data and model"))
    scale = TimeScale(2.0, 0.3, 0.1, "why", "fits")
    rows = [("pixel-4", "lte", 3), ("pi-4", "lte", 1)]
    page.handle(control.Described(rows, "digits, mlp with 4,810 parameters", scale))
    return page


def report(page: LivePage, **changes: Any) -> None:
    trial = Experiment(fleet=Fleet(devices={"pixel-4": 3, "pi-4": 1}))
    page.handle(progress(trial, states=bytes([0, 1, 3, 4]), **changes))


def picture(page: LivePage) -> Any:
    return json.loads(msgspec.json.encode(page.picture()))


def read(page: LivePage, path: str) -> tuple[str, str]:
    """Return the text and the headers of an answer."""
    reply = page.answer(f"/secret/{path}")
    return reply.body.decode(), reply.headers


def cards_of(found: Any) -> dict[str, tuple[str, str, str]]:
    """Return each headline card's value, note and tone (``good``, ``bad`` or ""), keyed by its name."""
    card = r'<p class="stat"><span[^>]*>(.*?)</span></p><p class="value (good|bad|)[^"]*">(.*?)</p>'
    card += r'<p class="note">(.*?)</p>'
    return {name: (value, note, tone) for name, tone, value, note in re.findall(card, found["cards"])}


def test_before_the_first_progress_the_activity_is_shown(tmp_path: Path) -> None:
    page = LivePage(Experiment(fleet=Fleet(devices={"pixel-4": 2})), tmp_path, "/secret/")
    page.handle(control.Activity("loading data and model"))
    found = picture(page)
    assert (found["note"], found["states"], found["fleet"]) == ("loading data and model", "", [])
    assert page.answer("/secret/phone/0") is None
    assert not {"cards", "goal", "charts"} & found.keys()


def test_the_picture_has_states_figures_and_curves(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_process, "EVERY_S", 0.0)
    page = page_of(record)
    for second in range(1, 6):
        report(page, wall_s=10.0 * second, emulated_s=5.0 * second, trips=100 * second, version=20 * second)
    found = picture(page)
    assert found["states"] == "0134"
    assert [name for name, state in zip(found["names"], "01234", strict=True) if state in "0134"] == [
        "absent", "idle", "training", "uploading"
    ]  # fmt: skip
    assert found["sub"] == "wall clock, time scale 2, 4 phones, digits, mlp with 4,810 parameters"
    cards = cards_of(found)
    assert cards["Accuracy"] == ("81.2%", "loss 0.75", "")
    assert cards["Throughput"][0] == "10/s"
    assert cards["Fidelity"] == ("VALID", "error median 0.20%, p95 1.00%", "good")
    assert found["goal"] == {"share": 0.5, "text": "versions 100 of 200", "left": "50 s left"}
    charts = {chart["title"]: chart["lines"] for chart in found["charts"]}
    assert charts["Accuracy"] == [["accuracy", [0.0, 2.0], [0.1, 0.5]]]
    assert charts["Loss"] == [["loss", [0.0, 2.0], [2.0, 1.0]]]
    assert charts["Throughput"] == [["trips/s", [10.0, 15.0, 20.0, 25.0], [10.0] * 4]]
    assert charts["Staleness"] == [["staleness", [5.0, 10.0, 15.0, 20.0, 25.0], [3.0] * 5]]
    assert [name for name, _, _ in charts["Enforcement error"]] == ["median", "95th percentile"]
    monkeypatch.setattr(web_process, "MAX_POINTS", 1)  # thinned curves of evaluations keep the last one
    assert picture(page)["charts"][0]["lines"] == charts["Accuracy"]


def test_a_picture_does_not_read_the_whole_record(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.results.seal.check", Mock(side_effect=AssertionError))
    page = page_of(record)
    report(page)
    assert picture(page)["charts"][0]["lines"][0][1] == [0.0, 2.0]
    assert "No trip has ended yet." not in read(page, "phone/2")[0]


def test_an_invalid_run_shows_its_reason_and_an_unknown_figure_a_dash(tmp_path: Path) -> None:
    page = page_of(tmp_path, clock="virtual")
    report(page, accuracy=None, loss=None, fidelity_median=None, fidelity_p95=None)
    found = picture(page)
    cards = cards_of(found)
    assert (cards["Accuracy"][0], cards["Fidelity"][0]) == ("–", "times computed")
    assert "time scale" not in found["sub"]
    assert all(not x for chart in found["charts"] for _, x, _ in chart["lines"])
    page = page_of(tmp_path)
    report(page, fidelity_median=0.5, invalid="median error 50.0%, at most 5% is allowed")
    invalid = ("INVALID", "median error 50.0%, at most 5% is allowed", "bad")
    assert cards_of(picture(page))["Fidelity"] == invalid


def test_an_ended_run_shows_its_final_verdict(tmp_path: Path) -> None:
    final = control.Verdict("INVALID", "training took 5.9% longer, at most 5% is allowed")
    page = page_of(tmp_path)
    report(page)
    assert cards_of(picture(page))["Fidelity"][0] == "VALID"
    page.handle(control.Ended("done", final))
    page.end("ended")
    assert cards_of(picture(page))["Fidelity"] == (*final, "bad")
    killed = page_of(tmp_path)
    report(killed)
    killed.end("ended")
    assert cards_of(picture(killed))["Fidelity"] == ("–", "", "")


def test_a_restart_is_shown_until_clients_are_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, trial = page_of(tmp_path), Experiment(fleet=Fleet(devices={"pixel-4": 3, "pi-4": 1}))
    inner = RunView(trial)
    view = with_page(inner, cast(socket.socket, Mock()), tmp_path)
    monkeypatch.setattr(view, "_send", page.handle)
    notes = []
    for trips in (10, 20):
        view.update(progress(trial, trips=trips))
        notes.append((inner.note, picture(page)["note"]))
        view.restarted("the server was killed: starting it again")
        notes.append((inner.note, picture(page)["note"]))
    assert notes == 2 * [("", ""), 2 * ("the server was killed: starting it again",)]


def test_curves_have_a_point_a_second_and_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def instants() -> Any:
        (lines,) = [c["lines"] for c in picture(page)["charts"] if c["title"] == "Enforcement error"]
        return lines[0][1]

    page = page_of(tmp_path)
    for second in range(50):
        report(page, wall_s=float(second), emulated_s=float(second))
    assert instants() == []  # all reports came within a second
    monkeypatch.setattr(web_process, "EVERY_S", 0.0)
    for second in range(3 * MAX_POINTS):
        report(page, wall_s=float(second), emulated_s=float(second))
    found = instants()
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0.0, 3 * MAX_POINTS - 1)
    assert MAX_POINTS / 3 < len(found) <= MAX_POINTS


def test_curves_lose_what_a_new_server_repeats_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_process, "EVERY_S", 0.0)
    page = page_of(tmp_path, clock="virtual")
    for second in (10, 20, 30, 15, 25):
        report(page, wall_s=float(second), emulated_s=float(second), trips=10 * second)
    (lines,) = [chart["lines"] for chart in picture(page)["charts"] if chart["title"] == "Throughput"]
    assert lines == [["trips/s", [15.0, 25.0], [10.0, 10.0]]]


def test_the_page_of_a_phone_shows_device_link_trips_and_incidents_as_text(record: Path) -> None:
    page = page_of(record)
    report(page)
    html, _ = read(page, "phone/2")
    for text in ("Phone 2: training", "Google Pixel 4", "16.8 Mbit/s down, no limit up", "512 MiB", "0, 7",
                 "2 of 1.6", "1 of 1", "+11.11%", "applied", "lost: died", "death"):  # fmt: skip
        assert text in html
    assert html.index("lost: died") < html.index("applied"), "the newest trip is not the first"
    assert "hang" not in html
    assert "<script" not in html
    assert "No trip has ended yet." in read(page, "phone/3")[0]
    for number in ("4", "-1", "1e3", "²", "", "1/1", "9" * 10):
        assert page.answer(f"/secret/phone/{number}") is None


def test_only_the_secret_path_is_answered(record: Path) -> None:
    page = page_of(record)
    report(page)
    assert page.answer("/secret/phone/2") is not None
    for path in ("/", "/phone/2", "/events", "/secret", "/secreT/", "/secre/t/", "//secret/", "/é" * 20, "*"):
        assert page.answer(path) is None


def test_names_are_text_and_only_the_pages_own_script_may_run(record: Path) -> None:
    page = page_of(record, name=EVIL)
    text, headers = read(page, "")
    assert "alert(1)</script>" not in text
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", text, flags=re.DOTALL)
    assert [kind for kind, _ in scripts] == [' type="application/json" id="first"', ""]
    assert json.loads(scripts[0][1])["title"] == f"{EVIL}: {page._experiment.strategy['name']}"
    (digest,) = re.findall(r"script-src 'sha256-([^']+)'", headers)
    assert b64decode(digest) == hashlib.sha256(scripts[1][1].encode()).digest()
    assert "default-src 'none'" in headers
    elsewhere = set(re.findall(r"https?://[^\"' ]+", text)) - {"http://www.w3.org/2000/svg"}
    assert elsewhere == set()


def test_the_stream_sends_a_picture_for_each_change_and_the_end(record: Path) -> None:
    async def main() -> list[Any]:
        page = page_of(record)
        reply = page.answer("/secret/events")
        parts = reply.body
        found = [await anext(parts)]
        waiting = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0)
        assert not waiting.done()
        page.handle(control.Activity("starting the clients"))
        found.append(await waiting)
        page.handle(control.Ended("done", control.NO_VERDICT))
        found += [part async for part in parts]
        return found

    events = asyncio.run(main())
    assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in events)
    ends = [json.loads(event[6:])["ended"] for event in events]
    assert ends == ["", "", "done"]
