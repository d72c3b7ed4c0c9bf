"""Tests of partitioners from Flower Datasets. They divide the rows once, in a separate process."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl import config
from edgefl.errors import ConfigError
from edgefl.experiment import Data
from edgefl.learning import flower_partition
from edgefl.learning.partition import Parts, partition
from edgefl.loading import own_code

LABELS = np.arange(600) % 10
REASON = "needs flwr-datasets: pip install 'edgefl[partitioners]'"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "edgefl" / "data" / "flwr"


def split(name: str, seed: int = 0, clients: int = 6, **arguments: Any) -> Parts:
    spec = Data(partition=f"flwr:{name}", partition_args=arguments)
    return partition(spec, LABELS, ["pi-4"] * clients, classes=10, seed=seed)


def test_the_partitioner_divides_the_rows_and_the_result_is_kept(cache: Path) -> None:
    pytest.importorskip("flwr_datasets", reason=REASON)
    drawn = split("DirichletPartitioner", alpha=0.3)
    assert sorted(np.concatenate([*drawn]).tolist()) == list(range(600))
    (file,) = cache.iterdir()
    written = file.stat().st_mtime_ns
    again = split("DirichletPartitioner", alpha=0.3)
    assert all(map(np.array_equal, drawn, again))
    assert file.stat().st_mtime_ns == written
    for seed, alpha in ((0, 30.0), (1, 0.3)):
        assert not all(map(np.array_equal, drawn, split("DirichletPartitioner", seed, alpha=alpha)))
    two = split("PathologicalPartitioner", num_classes_per_partition=2)
    assert [len(set(LABELS[rows])) for rows in two] == [2] * 6
    even = split("IidPartitioner")
    assert even.sizes.tolist() == [100] * 6
    assert len(set(LABELS[even[0]].tolist())) == 10, "the package's own takes rows as they come"
    growing = split("LinearPartitioner", clients=3)
    assert growing.sizes.tolist() == [100, 200, 300], "in the order of the fleet, as docs/models.md warns"


def test_errors_of_a_partitioner_are_one_line(cache: Path) -> None:
    pytest.importorskip("flwr_datasets", reason=REASON)
    for name, arguments, words in (
        ("DirichletPartitionr", {}, "not found; did you mean 'DirichletPartitioner'"),
        ("DirichletPartitioner", {"alpha": -1.0}, "ValueError: "),
        ("DirichletPartitioner", {"alhpa": 1.0}, "TypeError: .*alhpa"),
        ("DirichletPartitioner", {"alpha": date(2026, 11, 27)}, ""),
        (
            "SizePartitioner",
            {"partition_sizes": [300, 300]},
            "makes 2 partitions, but the fleet has 6 clients",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^data.partition 'flwr:{name}': .*{words}") as caught:
            split(name, **arguments)
        assert "\n" not in str(caught.value)
    assert not list(cache.glob("*"))


def test_the_error_names_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "flwr_datasets"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no', name='{name}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    said = r"needs the package datasets: pip install 'edgefl\[partitioners\]'$"
    with pytest.raises(ConfigError, match=said):
        split("IidPartitioner")


def test_only_a_partitioner_takes_arguments_and_is_not_code_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    text = "[fleet]\ndevices = { pi-4 = 2 }\n[stop]\ntrips = 1\n"
    text += '[data]\npartition = "PART"\npartition_args = { alpha = 1 }'
    file.write_text(text.replace("PART", "iid"))
    with pytest.raises(ConfigError, match=r"data\.partition_args: only partitions 'flwr:…' take arguments"):
        config.load(file)
    file.write_text(text.replace("PART", "flwr:IidPartitioner"))
    assert config.load(file).data.partition_args == {"alpha": 1}
    assert own_code({"data": {"partition": "flwr:IidPartitioner"}}) == []


class Made:
    """A partitioner with the interface of the partitioners in Flower Datasets."""

    def __init__(self, num_partitions: int, seed: int = 0) -> None:
        self.num_partitions, self.seed, self.dataset = num_partitions, seed, {}

    def load_partition(self, index: int) -> dict[str, list[int]]:
        return {"row": self.dataset["row"][index :: self.num_partitions]}


def test_a_partitioner_gets_only_the_arguments_that_it_takes() -> None:
    class Every(Made):
        pass

    partitioners = type("partitioner", (), {"Partitioner": Made, "Every": Every})
    request = {"name": "Every", "arguments": {}, "clients": 3, "seed": 7}
    text = flower_partition.divide(request, partitioners, {"row": list(range(8))})
    size = int.from_bytes(text[:8], "little")
    assert json.loads(text[8 : 8 + size])["rows"]["shape"] == [8]
    assert np.frombuffer(text[8 + size :], np.int64).tolist() == [0, 3, 6, 1, 4, 7, 2, 5, 3, 3, 2]
