"""Partitioners of Flower Datasets: ``data.partition = "flwr:NAME"``, with ``data.partition_args``.

The partitioner runs in a separate process, because the threads of Flower Datasets would not survive the fork
of clients. The process writes the row numbers of all clients to a file in the cache folder. Later processes
and runs with the same examples, clients, seed and arguments read this file.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from edgefl.errors import ConfigError, unknown
from edgefl.files import cache_folder, write_bytes
from edgefl.learning.dataset import Targets
from edgefl.learning.own_process import end, run_module

PREFIX = "flwr:"
LABEL, ROW = "label", "row"
"""Names of the columns in the table to partition: the class, if each example has one, and the row number."""
Rows = NDArray[np.int64]


def flower_rows(
    name: str, arguments: Mapping[str, Any], targets: Targets, clients: int, rng: np.random.Generator
) -> list[Rows]:
    """Return the row numbers of each client: client i gets partition i of the Flower partitioner ``name``.

    Clients are in the order of the fleet's device profiles, so if partitions grow with i, the last profiles
    get the most examples (docs/models.md). The partitioner divides the rows in an order drawn from ``rng``.
    Unless ``arguments`` contains them, this function sets the partitioner's number of partitions, its column
    of classes and its seed. Raises `ConfigError` if the package is not installed, if the partitioner rejects
    its arguments, or if it does not make one partition per client.
    """
    order = rng.permutation(len(targets))
    request = {
        "name": name.removeprefix(PREFIX),
        "arguments": dict(arguments),
        "clients": clients,
        "seed": int(rng.integers(2**31)),
        "labels": targets[order].tolist() if targets.ndim == 1 and targets.dtype.kind in "iu" else None,
        "rows": order.tolist(),
    }
    text = json.dumps(request, sort_keys=True, default=str).encode()
    file = cache_folder() / "data" / "flwr" / f"{hashlib.sha256(text).hexdigest()[:24]}.safetensors"
    if not file.is_file():
        run_module(__name__, str(file), about=f"data.partition {name!r}", text=text)
    found = load_file(file)
    return np.split(found["rows"], np.cumsum(found["sizes"])[:-1])


def divide(request: Mapping[str, Any], partitioners: Any, table: Any) -> bytes:
    """Return the content of the cache file: the rows and the size of each partition of ``table``.

    Raises `ConfigError` if Flower Datasets has no partitioner of the requested name, or if the partitioner
    does not make one partition per client.
    """
    base, name, clients = partitioners.Partitioner, request["name"], request["clients"]
    kinds = {
        key: value
        for key, value in vars(partitioners).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }
    if name not in kinds:
        raise ConfigError(unknown("partitioner", name, kinds))
    given = {"num_partitions": clients, "partition_by": LABEL, "seed": request["seed"]}
    takes = inspect.signature(kinds[name]).parameters
    made: Any = kinds[name](**{key: given[key] for key in given if key in takes} | request["arguments"])
    made.dataset = table
    if made.num_partitions != clients:
        raise ConfigError(f"makes {made.num_partitions} partitions, but the fleet has {clients} clients")
    parts = [np.asarray(made.load_partition(client)[ROW], np.int64) for client in range(clients)]
    sizes = np.array([len(part) for part in parts], np.int64)
    return save({"rows": np.concatenate(parts), "sizes": sizes})


def write(file: Path) -> None:
    """Read a request from standard input, partition its rows, and write the result to ``file``.

    Raises `ConfigError`, and any errors that the package itself raises.
    """
    try:
        import datasets
        from flwr_datasets import partitioner
    except ModuleNotFoundError as error:
        why = f"needs the package {error.name}: pip install 'edgefl[partitioners]'"
        raise ConfigError(why) from None
    request = json.load(sys.stdin)
    columns = {ROW: request["rows"]} | ({} if request["labels"] is None else {LABEL: request["labels"]})
    write_bytes(file, divide(request, partitioner, datasets.Dataset.from_dict(columns)))


if __name__ == "__main__":
    sys.exit(end(lambda: write(Path(sys.argv[1]))))
