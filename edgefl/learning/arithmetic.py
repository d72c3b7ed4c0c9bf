"""The device, precision and memory layout of training, and torch's random stream."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from edgefl.errors import ConfigError
from edgefl.experiment import Training
from edgefl.kernels.cuda_library import driver_present
from edgefl.learning.flat import FlatModel

CPU = torch.device("cpu")


@contextmanager
def torch_seed(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed torch's random streams for the CPU and the device, and restore their previous state on exit.

    >>> with torch_seed(1):
    ...     first = torch.rand(1)
    >>> with torch_seed(1):
    ...     bool(torch.rand(1) == first)
    True
    """
    before, there = torch.get_rng_state(), None
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        there = torch.cuda.get_rng_state(device)
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if there is not None:
            torch.cuda.set_rng_state(there, device)


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Device, precision and memory layout of training.

    Different choices lead to slightly different results, each of which is reproducible bit for bit.

    >>> import numpy as np
    >>> Arithmetic(memory_format="channels_last").batch(np.zeros((2, 1, 4, 4), np.float32)).stride()
    (16, 1, 4, 1)
    """

    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"

    @classmethod
    def of(cls, training: Training) -> Arithmetic:
        return cls(device=training.device, precision=training.precision, memory_format=training.memory_format)

    def check(self) -> None:
        """Raise `ConfigError` if the device is missing.

        The method does not call ``torch.cuda``, which may initialise CUDA: processes that are forked after
        the initialisation cannot use CUDA.
        """
        if self.device == "cuda" and (torch.version.cuda is None or not driver_present()):
            built = "this torch is built for the CPU" if torch.version.cuda is None else "no device found"
            raise ConfigError(f"training.device: must be 'cpu' here ({built}), got 'cuda'")

    def move(self, flat: FlatModel) -> None:
        """Move a model to this device. Call this method in the process that trains or evaluates the model."""
        if self.device == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False  # True would choose algorithms by run time, which varies
            torch.use_deterministic_algorithms(True, warn_only=True)
            flat.move(torch.device("cuda"))

    def batch(self, inputs: NDArray[Any], device: torch.device | None = None) -> Tensor:
        """Convert a batch to a tensor with the memory layout that the model uses."""
        batch = torch.from_numpy(inputs)
        if self.memory_format == "channels_last" and batch.dim() == 4:
            _, channels, height, width = batch.shape
            strides = (height * width * channels, 1, width * channels, channels)
            # With one channel, both layouts have the same bytes; convolutions tell them apart by the strides.
            batch = batch.contiguous(memory_format=torch.channels_last).as_strided(batch.shape, strides)
        return batch if device is None else batch.to(device)

    def cast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context manager for a forward pass.

        If the precision is bfloat16, torch computes suitable layers in bfloat16 within this context.
        """
        lower = self.precision == "bfloat16"
        return torch.autocast(device.type, dtype=torch.bfloat16) if lower else nullcontext()
