"""Windows, churn and their intersection: exact instants, declared lengths, the same at every call."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from scipy import stats

from edgefl.devices.presence import AlternatingRenewal, LateJoin, Presence, Windows, read_availability
from edgefl.errors import ProfileError
from edgefl.seeds import stream


def churn(client: int = 0, on_s: float = 60.0, off_s: float = 20.0) -> AlternatingRenewal:
    return AlternatingRenewal(on_s, off_s, stream(7, "churn", client))


def test_windows_repeat() -> None:
    day = Windows([(9.0, 12.0), (13.0, 17.0)], period_s=24.0)
    changes = [0.0]
    while len(changes) < 9:
        changes.append(day.changes_s(changes[-1]))
    assert changes == [0, 9, 12, 13, 17, 33, 36, 37, 41]
    assert [day.on(at_s) for at_s in changes] == [False, True, False, True, False, True, False, True, False]


def test_windows_that_touch_are_one() -> None:
    night = Windows([(0.0, 6.0), (22.0, 24.0)], period_s=24.0)
    assert night.on(0.0)
    assert [night.changes_s(at_s) for at_s in (0.0, 6.0, 22.0)] == [6, 22, 30]
    assert Windows([(1.0, 2.0), (2.0, 3.0)], period_s=4.0).changes_s(1.0) == 3.0
    always = Windows([(0.0, 5.0)], period_s=5.0)
    assert (always.on(1e6 + 4.999), always.changes_s(1.0)) == (True, math.inf)


def test_windows_are_right_at_and_around_every_change() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        period_s = float(rng.uniform(1, 100))
        edges = np.sort(rng.uniform(0, period_s, 2 * rng.integers(1, 5)))
        edges[0] *= rng.random() < 0.7
        intervals = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        shift_s, at_s = float(rng.uniform(0, period_s)), float(rng.uniform(0, 1e6))
        windows = Windows(intervals, period_s, shift_s)
        for _ in range(20):
            change_s = windows.changes_s(at_s)
            middle_s = (at_s + change_s) / 2
            phase_s = (middle_s + shift_s) % period_s
            assert change_s > at_s
            assert windows.on(change_s) != windows.on(at_s) == windows.on(middle_s)
            assert windows.on(middle_s) == any(start <= phase_s < end for start, end in intervals)
            at_s = change_s


def test_churn_takes_turns_of_the_declared_lengths() -> None:
    client, at_s = churn(), 0.0
    changes = [at_s := client.changes_s(at_s) for _ in range(4001)]
    first_on = client.on(changes[0])
    lengths = np.diff(changes)
    on, off = lengths[0 if first_on else 1 :: 2], lengths[1 if first_on else 0 :: 2]
    assert stats.kstest(on, stats.expon(0, 60.0).cdf).pvalue > 0.01
    assert stats.kstest(off, stats.expon(0, 20.0).cdf).pvalue > 0.01


def test_a_fleet_is_online_as_much_at_its_start_as_later() -> None:
    fleet = [churn(client) for client in range(2000)]
    for at_s in (0.0, 13.0, 500.0):
        share = sum(client.on(at_s) for client in fleet) / len(fleet)
        assert abs(share - 0.75) < 2.576 * math.sqrt(0.75 * 0.25 / len(fleet))


def test_churn_is_the_same_in_whatever_order_it_is_asked() -> None:
    instants = np.linspace(0.0, 5000.0, 300)
    forward, backward = churn(), churn()
    onward = [(forward.on(at), forward.changes_s(at)) for at in instants]
    assert onward == [(backward.on(at), backward.changes_s(at)) for at in instants[::-1]][::-1]
    assert churn(1).changes_s(0.0) != churn(0).changes_s(0.0)


def test_presence_is_the_intersection() -> None:
    sources = [LateJoin(50.0), Windows([(0.0, 30.0), (40.0, 60.0)], 70.0, 3.0), churn(3)]
    client, at_s = Presence(sources), 0.0
    for _ in range(50):
        comes_s = client.comes_s(at_s)
        goes_s = client.goes_s(comes_s)
        assert at_s <= comes_s < goes_s
        for between in np.linspace(at_s, comes_s, 7)[:-1]:
            assert comes_s == at_s or not all(source.on(between) for source in sources)
        for between in np.linspace(comes_s, goes_s, 7)[:-1]:
            assert all(source.on(between) for source in sources)
        assert not client.online(goes_s)
        at_s = goes_s


def test_windows_that_never_overlap_are_never() -> None:
    apart = Presence([Windows([(0.0, 1.0)], 4.0), Windows([(2.0, 3.0)], 4.0)])
    assert apart.comes_s(0.0) == math.inf
    assert Presence([]).goes_s(0.0) == math.inf


def written(tmp_path: object, content: object) -> str:
    path = f"{tmp_path}/a.json"
    with open(path, "wb") as file:
        file.write(content if isinstance(content, bytes) else msgspec.json.encode(content))
    return path


def test_a_client_that_never_comes_back_draws_nothing() -> None:
    churn = AlternatingRenewal(60.0, 20.0, np.random.default_rng(0))
    assert Presence([churn]).comes_s(math.inf) == math.inf


def test_an_availability_file_is_read(tmp_path: object) -> None:
    path = written(tmp_path, [{"intervals_s": [[0, 5], [7, 9]], "period_s": 10}])
    (entry,) = read_availability(path)
    assert (entry.intervals_s, entry.period_s) == (((0.0, 5.0), (7.0, 9.0)), 10.0)
    with pytest.raises(ProfileError, match="No such file"):
        read_availability("/nowhere/a.json")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "at least one"),
        (b"nonsense", "malformed"),
        ([{"intervals_s": [[0, 5]]}], "period_s"),
        ([{"intervals_s": [[0, 5]], "period_s": 0}], "> 0.0"),
        ([{"intervals_s": [[0, 5]], "period_s": 4}], "entry 0: period_s: must be at least"),
        ([{"intervals_s": [[0, 5]], "period_s": 9}, {"intervals_s": [[5, 5]], "period_s": 9}], "entry 1"),
        ([{"intervals_s": [[0, 5], [4, 6]], "period_s": 9}], "a start of at least 5"),
        ([{"intervals_s": [[0, 5]], "period_s": 9, "zone": 3}], "zone"),
    ],
)
def test_an_availability_file_that_is_wrong_is_one_line(content: object, says: str, tmp_path: object) -> None:
    with pytest.raises(ProfileError) as error:
        read_availability(written(tmp_path, content))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
