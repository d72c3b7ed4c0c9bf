"""Predicts the time of a network's training or inference step on a real device from the device's profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgefl.devices.phones import TFLITE
from edgefl.devices.profiles import load_device, phone_table
from edgefl.devices.schema import Device
from edgefl.devices.time_model import Prediction, TimeModel
from edgefl.errors import ConfigError, ProfileError

if TYPE_CHECKING:
    from torch import nn

    from edgefl.learning.operations import BatchWork


def predict(
    module: nn.Module,
    batch: int,
    *,
    device: str | Device,
    input_shape: Sequence[int],
    runtime: str | None = None,
    inference: bool = False,
    dtype: Any = None,
) -> Prediction:
    """Predict a step's time in emulated seconds, with a 90% interval and the time of each part of the step.

    A step is a forward pass, a backward pass and an update on ``batch`` examples; with ``inference``, it is
    only a forward pass. ``device`` is a profile or its name. ``runtime`` is one of the profile's libraries
    (by default, the library that clients use). ``input_shape`` and ``dtype`` are those of one example; the
    default dtype is chosen by `example_dtype`. The module is traced without computing anything, and is not
    changed. Raises `ConfigError` if the module cannot be traced, if ``batch`` is below 1, or if the device or
    the runtime is unknown.

    >>> from torch import nn
    >>> found = predict(nn.Linear(1000, 1000), 16, device="pi-4", input_shape=(1000,))
    >>> found.low_s < found.seconds < found.high_s, round(sum(found.parts.values()) / found.seconds, 6)
    (True, 1.0)
    """
    if batch < 1:
        raise ConfigError(f"batch: must be at least 1 example, got {batch}")
    profile = device if isinstance(device, Device) else load_device(device)
    model, library = time_model(profile, runtime), runtime or profile.runtime_name
    work = traced(module, input_shape, inference=inference, dtype=dtype, runtime=library)
    return predicted(model, work, batch, library)


def predicted(model: TimeModel, work: BatchWork, batch: int, runtime: str | None) -> Prediction:
    """Predict the time of a step on ``batch`` examples; TFLite makes one inference for each of them."""
    times = batch if runtime == TFLITE else 1
    one = model.predict(work.at(batch // times))
    parts = {name: times * seconds for name, seconds in one.parts.items()}
    return Prediction(times * one.seconds, times * one.low_s, times * one.high_s, parts, one.unsure)


def time_model(device: Device, runtime: str | None = None) -> TimeModel:
    """Return the time model of ``runtime``, or of the device's default runtime.

    If the profile has a ``slowdown``, the model is that of the median device, and its interval includes the
    differences between devices. Raises `ProfileError` if there is no such model.
    """
    model = device.median().time_model(runtime)
    if model is None:
        raise ProfileError(
            f"device {device.id!r} has no computing rates; its delay model sets the whole trip's time"
        )
    return model


def traced(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    inference: bool = False,
    dtype: Any = None,
    runtime: str | None = None,
) -> BatchWork:
    """Count the work of a step of the module for any batch size, as ``runtime`` executes it.

    TFLite only runs inference, one example at a time. Raises `ConfigError` for a training step in TFLite.
    """
    dtype = dtype or example_dtype(module, input_shape)
    if runtime == TFLITE:
        return _tflite_work(module, input_shape, inference, dtype)
    from edgefl.learning.work import batch_work

    return batch_work(module, input_shape, dtype=dtype, inference=inference)


def _tflite_work(module: nn.Module, input_shape: Sequence[int], inference: bool, dtype: Any) -> BatchWork:
    from edgefl.devices.phone_layers import inference_layers
    from edgefl.learning.operations import BatchWork, StepWork

    if not inference:
        raise ConfigError(f"runtime {TFLITE!r} has only inference times; add --inference")
    layers = inference_layers(module, input_shape, dtype)
    return BatchWork(fixed=StepWork(), per_example=phone_table().work(layers))


def example_dtype(module: nn.Module, input_shape: Sequence[int]) -> Any:
    """Return int64 for one-dimensional input (tokens) to a module with an embedding; otherwise float32."""
    import numpy as np
    from torch import nn

    embeds = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules())
    return np.int64 if embeds and len(input_shape) == 1 else np.float32
