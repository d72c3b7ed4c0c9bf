"""The parameters of a module as views of one flat vector, so that one operation copies a whole model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import chain, pairwise
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from edgefl.errors import ConfigError
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import blocks


class Entry(NamedTuple):
    """One tensor of a model, stored in C order in elements ``offset`` to ``offset + size`` of the vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def leaf(self) -> str:
        """Name of the tensor within its layer."""
        return self.name.rpartition(".")[2]

    @property
    def part(self) -> slice:
        return slice(self.offset, self.offset + self.size)


class _Attributes:
    """A snapshot of the classes, attributes, parameters, buffers and hooks of a module and its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._kinds = [(part, type(part)) for part in module.modules()]
        own = [vars(part) for part, _ in self._kinds]
        self._dicts = [*own, *(value for each in own for value in each.values() if isinstance(value, dict))]
        self._first = [each.copy() for each in self._dicts]
        # Flat lists make the comparison fast; after most trips, nothing differs.
        self._sizes = [*map(len, self._dicts)]
        self._full = [each for each in self._dicts if each]
        self._keys = [*chain.from_iterable(self._full)]
        self._values = [*chain.from_iterable(map(dict.values, self._full))]

    def restore(self) -> None:
        if (
            [*map(len, self._dicts)] == self._sizes
            and all(map(is_, chain.from_iterable(self._full), self._keys))
            and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._values))
        ):
            return
        for part, kind in self._kinds:
            part.__class__ = kind
        for held, first in zip(self._dicts, self._first, strict=True):
            held.clear()
            held.update(first)


class FlatModel:
    """All parameters and persistent float buffers of ``module``, as views of one flat float32 vector.

    The memory after the vector has room for ``vectors`` more vectors of the same size, at the offsets that
    `edgefl.parameters.buffer.blocks` defines.

    The module works as before; only the memory of its tensors changes. The vector contains the trainable
    parameters first (in the module's order), then the frozen parameters, then float buffers such as the
    running statistics of batch normalisation. A parameter that is used twice is stored once. Integer buffers
    are not in the vector; they are reset at the start of each training, so that no trip sees another trip's
    values.

    Raises `ConfigError` if the module is a TorchScript module or has no trainable parameters, or if any of
    its tensors is not dense, not float32, not on the CPU or not finite.

    >>> flat = FlatModel(nn.Linear(3, 2))
    >>> flat.size, [(entry.name, entry.shape, entry.offset) for entry in flat.layout]
    (8, [('weight', (2, 3), 0), ('bias', (2,), 6)])
    >>> flat.load(np.arange(8, dtype=np.float32))
    >>> flat.module.bias.tolist()
    [6.0, 7.0]
    """

    module: nn.Module
    vector: Tensor
    """The parameters, as a float32 tensor of shape (size,)."""
    array: Floats
    """The memory of ``vector`` as a numpy array; after `move` to another device, a copy in host memory."""
    whole: Floats
    """``array``, followed by the memory for the additional vectors."""
    grad: Tensor
    """The gradients of the trainable parameters, as a float32 tensor of shape (trainable,)."""
    weights: Tensor
    """The trainable part of the vector, as a float32 tensor of shape (trainable,)."""
    layout: tuple[Entry, ...]
    buffers: int
    """Number of elements in the module's float buffers, which are at the end of the vector."""

    def __init__(self, module: nn.Module, vectors: int = 0) -> None:
        trainable, frozen, buffers, fixed = _tensors(module)
        tensors = trainable | frozen | buffers
        self.module, self._modules = module, list(module.modules())
        self.size = sum(tensor.numel() for tensor in tensors.values())
        self.trainable = sum(tensor.numel() for tensor in trainable.values())
        self.buffers = sum(tensor.numel() for tensor in buffers.values())
        room = torch.zeros(blocks(self.size, vectors)[-1].stop, dtype=torch.float32)
        self.vector, self.whole = room[: self.size], room.numpy()
        self.array = self.whole[: self.size]
        self._apart = False
        layout, offset = [], 0
        for name, tensor in tensors.items():
            layout.append(Entry(name, tuple(tensor.shape), offset))
            offset += tensor.numel()
            self.vector[layout[-1].part].view(tensor.shape).copy_(tensor.detach())
        self.layout = tuple(layout)
        self._fixed = [(name, tensor.clone()) for name, tensor in fixed.items()]
        self._bind(set(trainable))

    def _bind(self, trainable: Collection[str]) -> None:
        """Turn the module's tensors into views of the vector, and their gradients into views of ``grad``."""
        self.weights = self.vector[: self.trainable]
        self.grad = torch.zeros_like(self.weights)
        self._places: list[tuple[nn.Module, Entry, Tensor, Tensor, bool]] = []
        self._hooks: list[tuple[dict[int, Any], ...]] = []
        """For each entry of ``layout``, the gradient hooks that its tensor had when it became a view."""
        self._gradients: list[tuple[str, Tensor, Tensor]] = []
        self._trained: list[Tensor] = []
        """For each trainable parameter, its view of the vector."""
        for entry in self.layout:
            tensor = _tensor(self.module, entry.name)
            tensor.data = view = self.vector[entry.part].view(entry.shape)
            owner = self.module.get_submodule(entry.name.rpartition(".")[0])
            self._places.append((owner, entry, tensor, view, tensor.requires_grad))
            self._hooks.append(tuple(dict(hooks or {}) for hooks in _gradient_hooks(tensor)))
            if entry.name in trainable:
                tensor.grad = None  # the old gradient may be on another device
                self._trained.append(view)
                self._gradients.append((entry.name, tensor, self.grad[entry.part].view(entry.shape)))
        self.prepare()
        self._attributes = _Attributes(self.module)

    def load(self, source: Floats) -> None:
        """Copy ``source``, float32 of shape (size,), into the model."""
        if source.dtype != np.float32:
            raise TypeError(f"source must be float32 (got {source.dtype})")
        if source.shape != (self.size,):
            raise ValueError(f"source must have shape ({self.size},) (got {source.shape})")
        np.copyto(self.array, source)

    def move(self, device: torch.device) -> None:
        """Move the model to ``device``; `push` and `pull` copy the parameters from and to ``array``."""
        self._apart = True
        self.vector = self.vector.to(device, copy=True)
        self._fixed = [(name, first.to(device)) for name, first in self._fixed]
        self.module.to(device)  # this also moves tensors that are not in the vector
        self._bind([name for name, _, _ in self._gradients])

    def push(self) -> None:
        """Copy ``array`` to the device."""
        if self._apart:
            self.vector.copy_(torch.from_numpy(self.array))

    def pull(self) -> None:
        """Copy the parameters from the device to ``array``."""
        if self._apart:
            torch.from_numpy(self.array).copy_(self.vector)

    def prepare(self) -> None:
        """Use ``grad`` as the parameters' gradients, and reset the buffers that are not in the vector."""
        for _, parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        with torch.no_grad():
            for name, first in self._fixed:
                self.module.get_buffer(name).copy_(first)

    def begin_training(self) -> None:
        """Call `prepare` and `push`, and put all submodules in training mode."""
        self.prepare()
        if not all(module.training for module in self._modules):  # faster than `nn.Module.train`
            self.module.train()
        self.push()

    def clear_gradients(self) -> None:
        """Set ``grad`` to zeros, even if the user's code has made it part of torch's autograd graph."""
        if self._apart:
            self.grad.detach().zero_()
        else:  # not an operation of torch, which would be counted as work of the training
            self.grad.detach().numpy().fill(0.0)

    def discard_gradients(self) -> None:
        """Let the next backward pass allocate the gradients, which is faster than adding them to zeros."""
        for _, parameter, _ in self._gradients:
            parameter.grad = None

    def gather_gradients(self) -> None:
        """Copy the gradients of the last backward pass to ``grad``, with zeros for unused parameters."""
        used = [(own, parameter.grad) for _, parameter, own in self._gradients if parameter.grad is not None]
        if len(used) < len(self._gradients):
            self.grad.zero_()
        torch._foreach_copy_(*_columns(used))

    def descend(self, rate: float) -> None:
        """Subtract ``rate`` times the gradients of the last backward pass from the weights."""
        used = [
            (view, parameter.grad)
            for (_, parameter, _), view in zip(self._gradients, self._trained, strict=True)
            if parameter.grad is not None
        ]
        torch._foreach_add_(*_columns(used), alpha=-rate)

    @property
    def gradients(self) -> int:
        """Number of gradient elements that are still views of ``grad``."""
        return sum(own.numel() for _, parameter, own in self._gradients if parameter.grad is own)

    def restore(self) -> None:
        """Restore the attributes that the module and its submodules had when this object was created.

        This restores tensors that were removed, replaced or frozen, layers and hooks that were added or
        removed, and training flags that were changed. It does not undo changes inside an object to which an
        attribute refers, such as a list.
        """
        self._attributes.restore()
        for (_, _, tensor, view, trains), own in zip(self._places, self._hooks, strict=True):
            if tensor.data_ptr() != view.data_ptr() or not _same_layout(tensor, view):
                tensor.data = view
            if tensor.requires_grad != trains:
                tensor.requires_grad_(trains)
            for hooks, first in zip(_gradient_hooks(tensor), own, strict=True):
                if hooks is not None and hooks != first:
                    hooks.clear()
                    hooks.update(first)

    def check_bound(self) -> None:
        """Raise `ConfigError` if the module replaced one of its tensors instead of writing into it."""
        for entry, _, _ in self._unbound():
            raise ConfigError(
                f"model: tensor {entry.name!r} was replaced during training; write to it in place"
            )

    def gather(self) -> None:
        """Copy back into the vector the tensors that the training moved to other memory.

        `torch.nn.utils.vector_to_parameters`, an assignment to ``parameter.data`` or a new `nn.Parameter`
        moves a tensor. Raises `ConfigError` if a tensor is missing, has another shape, or is not of a
        floating-point type.
        """
        moved = []
        for entry, tensor, view in self._unbound():
            if tensor is None or tensor.shape != view.shape or not tensor.is_floating_point():
                got = "none" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                raise ConfigError(
                    f"left no floating-point tensor of shape {entry.shape} in {entry.name!r} "
                    f"(got {got.removeprefix('torch.')})"
                )
            moved.append((view, tensor.detach().clone()))  # copied, since it may overlap another view
        for view, values in moved:
            view.copy_(values)

    def _unbound(self) -> Iterator[tuple[Entry, Tensor | None, Tensor]]:
        """Yield each entry whose tensor is not the expected view of the vector.

        Each item is the entry, the tensor (None if it is missing) and the expected view.
        """
        for owner, entry, _, view, _ in self._places:
            tensor = getattr(owner, entry.leaf, None)
            if not isinstance(tensor, Tensor):
                yield entry, None, view
            elif tensor.data_ptr() != view.data_ptr() or not _same_layout(tensor, view):
                yield entry, tensor, view


def _gradient_hooks(tensor: Any) -> tuple[dict[int, Any] | None, ...]:
    """Return the two tables of hooks on a tensor's gradient; None for a table that never held a hook."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Split pairs of targets and gradients into two lists; the gradients become dense tensors."""
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for _, gradient in pairs]
    return [target for target, _ in pairs], dense


def _same_layout(tensor: Tensor, view: Tensor) -> bool:
    return tensor.shape == view.shape and tensor.stride() == view.stride() and tensor.dtype == view.dtype


def _tensors(module: nn.Module) -> tuple[dict[str, Tensor], ...]:
    """Return four groups of tensors, keyed by name.

    They are the trainable parameters, the frozen parameters, the persistent float buffers and all other
    buffers of ``module``.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError("model: the module is a TorchScript module; pass it without torch.jit")
    persistent = module.state_dict(keep_vars=True).keys()
    trainable: dict[str, Tensor] = {}
    frozen: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    fixed: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        _refuse(name, parameter)
        (trainable if parameter.requires_grad else frozen)[name] = parameter
    for name, buffer in module.named_buffers():
        if name in persistent and buffer.is_floating_point():
            _refuse(name, buffer)
            buffers[name] = buffer
        else:
            fixed[name] = buffer
    if not trainable:
        raise ConfigError(f"model: {type(module).__name__} has no trainable parameters (need at least one)")
    _refuse_overlap(trainable | frozen | buffers)
    return trainable, frozen, buffers, fixed


def _refuse(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ConfigError(f"model: {name!r} is a lazy parameter; give every layer its input size")
    if tensor.dtype != torch.float32:
        got = str(tensor.dtype).removeprefix("torch.")
        raise ConfigError(f"model: {name!r} is {got}; every parameter must be float32")
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ConfigError(
            f"model: {name!r} is {tensor.layout} on {tensor.device}; parameters must be dense and on the CPU"
        )
    if not bool(torch.isfinite(tensor).all()):  # its change would be NaN: the server would drop each update
        raise ConfigError(
            f"model: {name!r} holds NaN or infinity; a constant, such as a mask of -inf, belongs in a buffer "
            "with persistent=False"
        )


def _refuse_overlap(tensors: dict[str, Tensor]) -> None:
    """Raise `ConfigError` if two parameters share memory, because the vector would store them separately."""
    ranges = []
    for name, tensor in tensors.items():
        if tensor.numel():
            reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + 4 * (reach + 1), name))
    for (_, end, first), (start, _, second) in pairwise(sorted(ranges)):
        if start < end:
            raise ConfigError(
                f"model: {first!r} and {second!r} share memory; tie them by using one parameter twice"
            )


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    tensor = getattr(module.get_submodule(path), leaf)
    assert isinstance(tensor, Tensor)
    return tensor
