"""Tests of the check of a training step's memory before the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgefl.devices.fleet import fleet_of
from edgefl.errors import ConfigError
from edgefl.experiment import Fleet, Model, Training
from edgefl.run.workload import Workload
from tests.process.runs import experiment


def test_a_step_that_exceeds_the_memory_of_an_app_is_refused_with_the_largest_batch_size_that_fits(
    tmp_path: Path,
) -> None:
    """Mutants: the batch size is not limited to the client's number of examples; activations are not counted;
    memory ``off`` is ignored."""

    def needed(batch: int, memory: str = "auto", phones: int = 3) -> float:
        wanted = experiment(
            fleet=Fleet(devices={"watch-a7": phones}, network="fios", memory=memory),
            model=Model(args={"hidden": [60_000]}),
            training=Training(batch_size=batch),
        )
        return Workload(wanted, fleet_of(wanted), tmp_path).peak_mib(0)

    with pytest.raises(ConfigError) as caught:
        needed(10_000)
    found = re.fullmatch(
        r"training.batch_size: a step on (\d+) examples needs [\d.]+ MiB, but watch-a7 allows 256 "
        r"\(memory.app_limit_mib\); choose a batch size of at most (\d+), a smaller model, or "
        r"fleet.memory = 'off'",
        str(caught.value),
    )
    examples, fits = map(int, found.groups())
    assert fits < examples < 10_000
    assert needed(fits) <= 256 < needed(fits + 1, "off")
    assert needed(10_000, phones=20) <= 256
