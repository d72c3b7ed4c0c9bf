"""Measures the time per update, and the mean size of the clients that contribute, in rounds and in FedBuff.

The size n_i of client i is its number of examples. The measurements test appendices C.2 and C.3 and figures 6
and 7 of Nguyen 2022. The clients have the device profile ``paper-stragglers``: the duration of a trip of
client i is exponentially distributed with mean λ·n_i, where λ is 1 s. Another λ would only change the unit of
time. Clients do not train.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from edgefl.devices.profiles import load_device
from edgefl.experiment import Stop
from edgefl.lab.convergence import judged, worst
from edgefl.lab.quadratic import play
from edgefl.lab.study import Finding
from edgefl.seeds import stream
from edgefl.strategies.base import Strategy
from edgefl.strategies.fedavg import FedAvg
from edgefl.strategies.fedbuff import FedBuff

SIZES = ((1, 120), (4, 60), (16, 20))
"""Pairs (number of examples per client, number of such clients). Most clients are small."""
CLIENTS = sum(count for _, count in SIZES)
MEAN = sum(size * count for size, count in SIZES) / CLIENTS
STRAGGLER = 1.0
"""λ: the mean duration of a trip per example of the client, in emulated seconds."""
OVER_SELECTION = 1.3
CONCURRENCY = (10, 30)
"""Numbers of clients that train simultaneously. In rounds, this is the size of the cohort, including the
clients that over-selection adds."""
STEPS_OF_TIME = 500

Values = npt.NDArray[np.float64]


class Rates(NamedTuple):
    """The pace of an algorithm, and the mean number of examples of the clients whose updates it uses."""

    seconds: float
    """Emulated seconds per used update; discarded updates are not counted."""
    examples: float
    """Mean number of examples of the clients whose updates are used."""


def rounds(needed: int, selected: int) -> Rates:
    """Return the expected `Rates` of rounds that use the first ``needed`` of ``selected`` clients.

    The clients of a round are drawn without replacement. Given the number of clients in the fleet that would
    have finished by time t (a sum of binomials), the number of clients in the round that have finished is
    therefore hypergeometric.
    """
    longest_s = STRAGGLER * max(size for size, _ in SIZES) * 25.0
    edges = longest_s * np.linspace(0.0, 1.0, STEPS_OF_TIME + 1) ** 3  # finer at early times
    times, widths = (edges[1:] + edges[:-1]) / 2.0, np.diff(edges)
    done = [1.0 - np.exp(-times / (STRAGGLER * size)) for size, _ in SIZES]
    counts = [count for _, count in SIZES]
    seconds = float(_below(done, counts, needed, selected) @ widths)
    chances = []
    for at, (size, _) in enumerate(SIZES):
        others = [count - (place == at) for place, count in enumerate(counts)]
        early = _below(done, others, needed, selected - 1)
        density = (1.0 - done[at]) / (STRAGGLER * size)
        chances.append(float((early * density) @ widths))
    return Rates(seconds / needed, _mean_examples(chances))


def _below(done: Sequence[Values], counts: Sequence[int], needed: int, selected: int) -> Values:
    """Return, for each time, the probability that fewer than ``needed`` clients of a round have finished.

    ``selected`` is the number of clients in the round.
    """
    total = sum(counts)
    fewer = stats.hypergeom.cdf(needed - 1, total, np.arange(total + 1), selected)
    out = np.empty(len(done[0]))
    for at in range(len(out)):
        finished = np.ones(1)
        for chance, count in zip(done, counts, strict=True):
            finished = np.convolve(finished, stats.binom.pmf(np.arange(count + 1), count, chance[at]))
        out[at] = finished @ fewer
    return out


def buffered(concurrency: int) -> Rates:
    """Return the expected `Rates` if a constant number of clients trains simultaneously, as in FedBuff.

    There are N clients; client i has n_i examples, and its trips take λ·n_i on average. M of the clients
    train (``concurrency``). Whenever one of them finishes, another is drawn uniformly from the idle clients.
    The probability that a given set of M clients is training is then proportional to the product of their
    n_i. The number of updates per second is therefore (N − M + 1)·e_{M−1}/(λ·e_M), where e_k is the
    elementary symmetric polynomial of degree k in all n_i.
    """
    whole = _symmetric([count for _, count in SIZES])
    chances = []
    for at in range(len(SIZES)):
        others = [count - (place == at) for place, (_, count) in enumerate(SIZES)]
        chances.append(_symmetric(others)[concurrency - 1])
    ratio = whole[concurrency - 1] / whole[concurrency]
    return Rates(STRAGGLER / ((CLIENTS - concurrency + 1) * ratio), _mean_examples(chances))


def _symmetric(counts: Sequence[int]) -> Values:
    found = np.ones(1)
    for (size, _), count in zip(SIZES, counts, strict=True):
        found = np.convolve(found, [math.comb(count, k) * float(size) ** k for k in range(count + 1)])
    return found


def _mean_examples(chances: Sequence[float]) -> float:
    used = [count * chance for (_, count), chance in zip(SIZES, chances, strict=True)]
    return sum(size * share for (size, _), share in zip(SIZES, used, strict=True)) / sum(used)


def measured(strategy: Strategy, updates: int, seed: int) -> Rates:
    """Run ``strategy`` on the fleet, without training, until it has used ``updates`` updates."""
    examples = np.repeat(*np.array(SIZES).T).tolist()
    size, delay = strategy.max_held(CLIENTS), load_device("paper-stragglers").delay_model
    assert delay is not None
    run, now_s = play(
        strategy,
        CLIENTS,
        Stop(versions=updates // size),
        lambda client, trip: delay.draw(stream(seed, "trip", client, trip), examples[client]),
        seed,
        train=lambda client, model, trip: model,
    )
    used = [update.client for _, updates in run.sums for update in updates]
    return Rates(now_s / len(used), fmean(examples[client] for client in used))


def times(quick: bool = False) -> Finding:
    """Compare the measured `Rates` of rounds, over-selected rounds and FedBuff with the expected `Rates`."""
    updates, seeds = (5_000, range(1, 2)) if quick else (15_000, range(1, 9))
    seconds, examples = [], []
    arms = [arm for concurrency in CONCURRENCY for arm in _arms(concurrency)]
    for seed in seeds:
        found = [measured(strategy, updates, seed) for strategy, _ in arms]
        pairs = list(zip(found, (expected for _, expected in arms), strict=True))
        seconds.append([one.seconds / expected.seconds for one, expected in pairs])
        examples.append([one.examples / expected.examples for one, expected in pairs])
    (ten, ten_selected, ten_fedbuff), (many, selected, fedbuff) = (
        [expected for _, expected in arms[at : at + 3]] for at in (0, 3)
    )
    few_at_once, many_at_once = CONCURRENCY
    return judged(
        "a round takes T_(C), FedBuff takes as long as expected, and over-selection drops large clients",
        "Nguyen 2022, appendices C.2 and C.3, figures 6 and 7",
        "FedBuff is faster than rounds, even with over-selection, and uses larger clients",
        [worst("seconds per update", seconds, 0.08), worst("examples of a used client", examples, 0.08)],
        f"rounds take {ten.seconds / ten_fedbuff.seconds:.1f} times as long as FedBuff with {few_at_once} at "
        f"once, {many.seconds / fedbuff.seconds:.1f} times with {many_at_once}, and if over-selected "
        f"{ten_selected.seconds / ten_fedbuff.seconds:.1f} and {selected.seconds / fedbuff.seconds:.1f}; "
        f"mean examples {MEAN:.2f}, of used clients {selected.examples:.2f} over-selected and "
        f"{fedbuff.examples:.2f} with FedBuff ({many_at_once} at once)",
        selected.seconds > fedbuff.seconds and selected.examples < fedbuff.examples,
    )


def _arms(concurrency: int) -> list[tuple[Strategy, Rates]]:
    """Return the strategies to compare (rounds, over-selected rounds and FedBuff), with the expected `Rates`.

    With each strategy, ``concurrency`` clients train simultaneously.
    """
    needed = math.floor(concurrency / OVER_SELECTION)
    selecting = FedAvg(cohort=needed, over_selection=OVER_SELECTION)
    return [
        (FedAvg(cohort=concurrency), rounds(concurrency, concurrency)),
        (selecting, rounds(needed, selecting.members(CLIENTS))),
        (FedBuff(buffer_size=10, concurrency=concurrency), buffered(concurrency)),
    ]
