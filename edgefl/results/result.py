"""What a run leaves behind, for programs."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.results.record import Record
from edgefl.results.run_folder import SUMMARY_FILE

FINAL_MODEL = Path("checkpoints") / "final.safetensors"


class Result:
    """A finished run's folder. Raises `ConfigError` if there is no run in it."""

    def __init__(self, folder: str | Path) -> None:
        self.dir = Path(folder)
        if not self.dir.is_dir():
            raise ConfigError(f"run folder {self.dir} not found")

    def __repr__(self) -> str:
        return f"Result({str(self.dir)!r})"

    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` holds."""
        path = self.dir / SUMMARY_FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{self.dir} has no {SUMMARY_FILE}: the run did not end") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{path} does not hold a summary")
        return found

    @cached_property
    def record(self) -> Record:
        """Everything that was recorded, by trip, version and evaluation."""
        return Record(self.dir)

    def model(self) -> dict[str, NDArray[np.float32]]:
        """The final global model: a float32 array for each of its tensors, by name."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self.dir / FINAL_MODEL
        if not path.is_file():
            raise ConfigError(f"{self.dir} has no {FINAL_MODEL}: the run did not end")
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
