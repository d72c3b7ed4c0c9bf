"""Count the work of a training step by class of operation.

The time that a device needs for a step depends on the kinds of operations, not only on the number of
floating-point operations: a depthwise convolution reaches a hundredth of the rate of a dense convolution, and
an elementwise operation takes as long as it takes to move its bytes.

step_work(module, …)     counts the work of one step on a batch of a given size
batch_work(module, …)    counts the work for any batch size: a fixed part and a part per example
traced_work(train, …)    counts the same for a user's training function, by running it
WorkMeter                counts the torch operations of any code
"""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from itertools import chain
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from edgefl.errors import ConfigError, TrainingError, described, exit_as_error
from edgefl.learning.arithmetic import torch_seed
from edgefl.learning.attention import FusedAttention
from edgefl.learning.declared import FORWARD, Layers, declared_calls, declared_number
from edgefl.learning.live import LiveTensors, live_lines, memory_of, stored
from edgefl.learning.moved import COPIES, bytes_kind, moved_bytes
from edgefl.learning.operations import BatchWork, StepWork

BATCHES = (2, 4)
"""Batch sizes for which `batch_work` counts the work; batch normalisation does not accept a batch of 1."""
FEW_CHANNELS = 4
"""Maximum number of input channels per group in a depthwise (grouped) or thin (ungrouped) convolution."""

__all__ = [
    "BatchWork",
    "StepWork",
    "WorkMeter",
    "batch_work",
    "step_work",
    "traced_work",
    "usual_loss",
]

Loss = Callable[[Tensor], Tensor]
ConvolutionKind = Literal["conv", "thin", "pointwise", "depthwise"]


def step_work(
    module: nn.Module,
    input_shape: Sequence[int],
    batch: int,
    *,
    dtype: Any = np.float32,
    inference: bool = False,
    loss: Loss | None = None,
    trained: Collection[nn.Parameter] | None = None,
    meta: bool = True,
) -> StepWork:
    """Count the work of one training step (forward, backward, update) on a batch, or of an inference step.

    ``input_shape`` and ``dtype`` describe one example. ``loss`` maps outputs to a scalar; by default it
    is the cross entropy of logits, for each token if there are several. ``trained`` contains the
    parameters that the step updates; by default these are all parameters that require a gradient. The
    module and torch's random stream are not changed. The step runs on torch's meta device, which computes no
    values, but needs modules whose import takes seconds and 80 MiB. If ``meta`` is False, or if a module
    cannot run on the meta device, the step runs on the module's device with inputs of zeros. Recurrent layers
    always run on the meta device, because on a CPU torch multiplies the inputs of all time steps at once,
    which changes the numbers of calls and bytes.

    If the module has an attribute ``flops_per_example`` (forward and backward), its value is used instead of
    a count, or a third of it for an inference step. If a layer has this attribute, its value is added to the
    count of all layers, so it must not include operations that are counted anyway. Raises `ConfigError` if
    the module does not accept such an input, or if the work of a layer with a weight matrix cannot be
    counted.

    >>> work = step_work(nn.Linear(3, 2), (3,), batch=5)  # forward, and the weight's gradient: 60 each
    >>> work.matmul_flop, work.parameters
    (120.0, 8.0)
    """
    updated = [p for p in module.parameters() if p.requires_grad] if trained is None else list(trained)
    step = _Step(tuple(input_shape), batch, dtype, inference, loss or usual_loss)
    return step.work(module, updated, meta)[0]


def batch_work(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    dtype: Any = np.float32,
    inference: bool = False,
    loss: Loss | None = None,
    meta: bool = True,
) -> BatchWork:
    """Count the work of a step as a function of the batch size, from counts at two batch sizes (`step_work`).

    >>> batch_work(nn.Linear(3, 2), (3,)).at(5) == step_work(nn.Linear(3, 2), (3,), 5)
    True
    """
    updated = [p for p in module.parameters() if p.requires_grad]
    (low, few), (high, many) = (
        _Step(tuple(input_shape), size, dtype, inference, loss or usual_loss).work(module, updated, meta)
        for size in BATCHES
    )
    slope = (high + low.scaled(-1)).scaled(1 / (BATCHES[1] - BATCHES[0]))
    lines = live_lines(few, many, BATCHES)
    return BatchWork(fixed=low + slope.scaled(-BATCHES[0]), per_example=slope, live=lines)


def traced_work(
    train: Callable[[int], tuple[int, int]],
    batch: int,
    known: Iterable[Tensor] = (),
    module: nn.Module | None = None,
) -> BatchWork:
    """Count the work of a training step by running it, for code such as the user's own function.

    ``train(batch)`` runs a client's whole training on real tensors with this batch size, and returns the
    numbers of steps and of examples in them. Runs with two batch sizes separate the work per step from the
    work per example; if the second size does not change the batches, all work is attributed to the step. Work
    that is done once per training is divided among its steps. The operations of an optimiser are counted like
    any others, except that one that changes a parameter is counted as the parameter's update. The memory of
    the tensors in ``known``, which belong to the model, is not part of `BatchWork.live_bytes`. If a layer of
    ``module`` declares ``flops_per_example``, each of its calls adds this number for each example; a call
    without gradients adds a third of it. If ``module`` itself declares it, the operations are not counted.

    >>> layer, x = nn.Linear(3, 2), torch.zeros(8, 3)
    >>> def train(batch):
    ...     layer(x[:batch]).sum().backward()
    ...     return 1, batch
    >>> traced_work(train, 8).per_example.matmul_flop
    24.0
    """

    def trip(size: int) -> tuple[StepWork, float, int]:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            declared = stack.enter_context(declared_calls(module))
            meter = stack.enter_context(WorkMeter(known, parameters=parameters))
            steps, examples = train(size)
        counted = StepWork(parameters=float(steps * meter.updated_parameters)) if whole else meter.work()
        work = counted + StepWork(matmul_flop=math.fsum(declared))
        return work.scaled(1 / steps), examples / steps, max(meter.live.line, default=0)

    whole = getattr(module, "flops_per_example", None) is not None
    parameters = [] if module is None else [one for one in module.parameters() if one.requires_grad]
    found = work, mean, peak = trip(batch)
    second, (other, mean2, peak2) = 2 * batch, found  # if no other batch size is possible
    for size in (batch // 2, 2 * batch) if batch >= 4 else (2 * batch,):
        # Try half the batch size first: with twice the size, a function that uses its own batch size makes
        # more steps than the trip has. But half the size may leave one example for the last batch, which
        # BatchNorm rejects; then try twice the size.
        with suppress(TrainingError):
            second, (other, mean2, peak2) = size, trip(size)
            break
    lines = live_lines([peak], [peak2], (batch, second))
    if mean == mean2:
        return BatchWork(fixed=work, per_example=StepWork(), live=lines)
    slope = (work + other.scaled(-1)).scaled(1 / (mean - mean2))
    return BatchWork(fixed=work + slope.scaled(-mean), per_example=slope, live=lines)


class _Step(msgspec.Struct, frozen=True):
    """One training or inference step whose work is counted."""

    input_shape: tuple[int, ...]
    batch: int
    dtype: Any
    inference: bool
    loss: Loss

    @property
    def declared_share(self) -> float:
        """Share of a layer's declared operations (forward and backward) that this step executes."""
        return FORWARD if self.inference else 1.0

    def work(
        self, module: nn.Module, updated: Sequence[nn.Parameter], meta: bool
    ) -> tuple[StepWork, list[int]]:
        """Return the step's work, declared or counted, and the live bytes at each traced operation."""
        line: list[int] = []
        declared = getattr(module, "flops_per_example", None)
        if declared is not None:
            counted = StepWork(matmul_flop=self.batch * declared_number(declared) * self.declared_share)
        else:
            counted, line = self.on_meta_or_real(module, updated, meta)
        if not self.inference:
            counted += StepWork(parameters=float(sum(p.numel() for p in updated)))
        return counted, line

    def on_meta_or_real(
        self, module: nn.Module, updated: Sequence[nn.Parameter], meta: bool
    ) -> tuple[StepWork, list[int]]:
        """Return the step's work and live bytes, from a run on the meta device or on the module's device.

        Raises `ConfigError` if the step cannot run.
        """
        try:
            if meta or any(isinstance(part, nn.RNNBase) for part in module.modules()):
                with exit_as_error():
                    return self.count(*_copied(module, updated, meta=True))
        except ConfigError:
            raise
        except Exception:
            pass  # e.g. data-dependent control flow, numpy, an unregistered tensor, a custom kernel
        try:
            with exit_as_error():
                return self.count(*_copied(module, updated, meta=False))
        except ConfigError:
            raise
        except Exception as error:
            what = f"cannot {'run' if self.inference else 'train'} on inputs of shape {self.input_shape}"
            raise ConfigError(f"model: {what}: {described(error)}") from error

    def count(self, module: nn.Module, device: str) -> tuple[StepWork, list[int]]:
        """Return the step's work, and the number of live bytes after each operation.

        The gradient of a parameter counts as live until it is complete; complete gradients are counted
        separately. This method may modify ``module``.
        """
        module.train(not self.inference)
        meter = WorkMeter(chain(module.parameters(), module.buffers()))
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook: Any = parameter.register_post_accumulate_grad_hook
                hook(meter.gradient_done)
        layers = Layers(module, meter)
        inputs = torch.zeros((self.batch, *self.input_shape), dtype=_torch_dtype(self.dtype), device=device)
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(torch_seed(0))
            # In oneDNN a recurrent layer is one opaque operation; without oneDNN it runs as matrix products.
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(torch.set_grad_enabled(not self.inference))
            stack.enter_context(meter)
            outputs = module(inputs)
            if not self.inference:
                self.loss(outputs).backward()  # type: ignore[no-untyped-call]
        declared = self.batch * layers.declared_flop() * self.declared_share
        return meter.work() + StepWork(matmul_flop=declared), meter.live.line


def usual_loss(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the cross entropy of a model's logits, with class 0 as the target everywhere."""
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    if logits.dim() != 2:  # logits of each token, or one number per example
        logits = logits.flatten(0, -2) if logits.dim() > 2 else logits.reshape(-1, 1)
    return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


def _torch_dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.zeros(0, dtype)).dtype


def _copied(module: nn.Module, updated: Sequence[nn.Parameter], *, meta: bool) -> tuple[nn.Module, str]:
    """Copy the module, and let the copy train only ``updated``; return the copy and its device.

    With ``meta``, the copy is on the meta device and contains no data.
    """
    memo: dict[int, Any] = {}
    if meta:
        memo = {id(t): _hollow(t) for t in chain(module.parameters(), module.buffers())}
    own = copy.deepcopy(module, memo)
    trained = {id(parameter) for parameter in updated}
    for old, new in zip(module.parameters(), own.parameters(), strict=True):
        new.requires_grad_(id(old) in trained)
    return own, "meta" if meta else str(next(module.parameters(), torch.empty(0)).device)


def _hollow(tensor: Tensor) -> Tensor:
    hollow = torch.empty_like(tensor, device="meta")
    return nn.Parameter(hollow, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else hollow


# ---- operations ----------------------------------------------------------------------------------

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.convolution, _aten.convolution_backward)
_UNCOUNTED = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "_local_scalar_dense")
_MOVES = (*COPIES, "add", "add_", "sub", "sub_")
"""Operations that may use a weight matrix without a matrix product; only their bytes are counted."""
_CELLS = frozenset(
    f"{cell}{suffix}" for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu") for suffix in ("", "_cell")
)


class WorkMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of the torch operations that run within its context.

    It uses the formulas of `torch.utils.flop_counter` for matrix products, but not its `FlopCounterMode`,
    whose imports take a second and 60 MiB, and which counts the gradient of a grouped convolution as if the
    convolution were dense.

    >>> with WorkMeter() as meter:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> meter.flop, meter.work().matmul_bytes
    (48.0, 104.0)
    """

    def __init__(self, known: Iterable[Tensor] = (), *, parameters: Iterable[Tensor] | None = None) -> None:
        """Create a meter; the tensors in ``known`` are not counted as live memory.

        Unless ``parameters`` is None, an operation that changes parameters in place is counted as their
        update, and not by the bytes that it moves. The ``parameters`` are recognised even if they are changed
        through another tensor, such as ``parameter.data``.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = LiveTensors(known)
        self._updates = parameters is not None
        self._parameters = {_place(parameter) for parameter in parameters or ()}
        self._amounts: Counter[str] = Counter()
        self._attention: Counter[FusedAttention] = Counter()
        """Number of calls of fused attention; ``_amounts`` contains their floating-point operations only."""
        self._cells = _Cells()
        self._shapes = _ShapeCache()
        self._moved: set[int] = set()
        """Storages of the tensors that were used in an addition or a copy."""
        self._updated: dict[tuple[int, int], int] = {}
        """Number of elements in each parameter that was updated, keyed by the result of `_place`."""

    def gradient_done(self, parameter: Tensor) -> None:
        """Record that a parameter's gradient is complete."""
        assert parameter.grad is not None
        self.live.release(parameter.grad)

    def moves(self, tensor: Tensor) -> bool:
        """Return True if an addition or a copy has read the tensor, for example a positional embedding."""
        return memory_of(tensor)._cdata in self._moved

    @property
    def flop(self) -> float:
        """Number of floating-point operations so far."""
        return float(sum(amount for name, amount in self._amounts.items() if name.endswith("_flop")))

    @property
    def updated_parameters(self) -> int:
        """Number of parameters updated so far."""
        return sum(self._updated.values())

    def work(self) -> StepWork:
        """Return the work counted so far. Call this outside the meter's context."""
        amounts = Counter(self._amounts)
        for call, times in self._attention.items():
            more = {name: times * amount for name, amount in _separate(call).items()}
            amounts.update(more | {"matmul_flop": 0})
        return StepWork(**{name: float(amount) for name, amount in amounts.items()})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and True would import the compiler

    def __enter__(self) -> WorkMeter:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._cells.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._cells.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self._shapes.result(func, args, kwargs)
        packet = func._overloadpacket
        leaves = tree_leaves((args, kwargs, out))
        self.live.note(packet, args, leaves)
        changed = [tensor for tensor in _written(func, args) if self._is_parameter(tensor)]
        for tensor in changed:
            self._updated[_place(tensor)] = tensor.numel()
        if (fused := FusedAttention.of(packet, args, kwargs)) is not None:
            self._attention[fused] += 1
            self._amounts["matmul_flop"] += fused.flop
        elif self._updates and changed and packet.__name__ not in COPIES:
            self._amounts["calls"] += 1
            self._amounts["parameters"] += sum(tensor.numel() for tensor in changed)
        elif not _is_view(func) and packet.__name__ not in _UNCOUNTED:
            self._amounts["calls"] += 1
            self._count(packet, args, kwargs, out, moved_bytes(packet, args, leaves, out))
        return out

    def _is_parameter(self, tensor: Tensor) -> bool:
        return (tensor.requires_grad and tensor.is_leaf) or _place(tensor) in self._parameters

    def _count(
        self, packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, moved: int
    ) -> None:
        if packet.__name__ in _MOVES:
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self._moved.update(memory_of(tensor)._cdata for tensor in tensors)
        formula = flop_registry.get(packet)
        if packet in _CONVOLUTIONS:
            self._amounts.update(_convolution(packet, args, out))
            self._amounts["conv_bytes"] += moved
        elif formula is not None:
            kind = "recurrent_flop" if self._cells.compute() else "matmul_flop"
            amount = formula(*args, **kwargs, out_val=out)  # another thread may count meanwhile
            self._amounts[kind] += amount
            self._amounts["matmul_bytes"] += moved
        else:
            self._amounts[bytes_kind(packet.__name__)] += moved


@cache
def _separate(call: FusedAttention) -> Counter[str]:
    """Return the work of a call of fused attention, forward or backward, if its operations ran separately."""
    with torch.enable_grad(), WorkMeter() as forward:
        result, operands = call.attend()
    if not call.backward:
        return forward._amounts
    with WorkMeter() as backward:
        torch.autograd.grad(result, operands, torch.empty_like(result))
    return backward._amounts


class _ShapeCache:
    """Runs operations. For tensors without data, it caches each result's shape instead of recomputing it.

    torch computes many of these results in Python, which takes a millisecond; a recurrent layer repeats the
    same dozen operations at each step of a sequence.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[Any] | None] = {}
        """For each call, the arguments with which ``torch.empty_strided`` creates its result; None if the
        result is not a new tensor."""

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return ``func(*args, **kwargs)``, or a new tensor without data that has the same shape and type."""
        if not _all_meta(args):
            return func(*args, **kwargs)
        key = func, _described(args), _described([*kwargs.items()])
        if (known := self._known.get(key)) is not None:
            size, strides, dtype = known
            return torch.empty_strided(size, strides, dtype=dtype, device="meta")
        out = func(*args, **kwargs)
        if key not in self._known:
            self._known[key] = _new_tensor(func, args, out)
        return out


def _all_meta(args: Sequence[Any]) -> bool:
    """Return True if the first tensor among the arguments of an operation contains no data."""
    first = next((value for value in args if isinstance(value, Tensor)), None)
    return first is not None and first.is_meta


def _described(value: Any) -> Any:
    """Return the properties of an argument on which the shape, strides and type of a result depend."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value


def _new_tensor(func: Any, args: Sequence[Any], out: Any) -> list[Any] | None:
    """Return the size, strides and type of ``out`` if it is one new, dense tensor; otherwise None."""
    if not isinstance(out, Tensor) or any(one.alias_info for one in func._schema.arguments):
        return None
    if out.layout != torch.strided:
        return None
    storage = out.untyped_storage()
    if storage.nbytes() != out.numel() * out.element_size():
        return None
    given = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    if any(storage._cdata == memory_of(tensor)._cdata for tensor in given):
        return None
    return [out.shape, out.stride(), out.dtype]


class _Cells(TorchFunctionMode):
    """Tracks whether torch is computing a recurrent layer, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()
        self._nodes: list[range] = []
        """Ranges of autograd sequence numbers of the operations in recurrent layers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _CELLS:
            return func(*args, **(kwargs or {}))
        self._here.inside, first = True, _next_node()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._here.inside = False
            self._nodes.append(range(first, _next_node()))

    def compute(self) -> bool:
        """Return True if the current operation belongs to a recurrent layer."""
        inside: bool = getattr(self._here, "inside", False)
        if inside or not self._nodes:
            return inside
        node: Any = torch._C._current_autograd_node()
        return node is not None and any(node._sequence_nr() in numbers for numbers in self._nodes)


def _next_node() -> int:
    """Return the autograd sequence number of the next operation in the forward pass."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def _is_view(func: Any) -> bool:
    """Return True for an operation that writes nothing and whose results share memory with its arguments."""
    results = func._schema.returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in results)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return the id of a tensor's storage, and the offset of the tensor's first element in the storage.

    All parameters of a run's model are in the same storage.
    """
    return memory_of(tensor)._cdata, int(stored(tensor).storage_offset())


def _written(func: Any, args: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes in place."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _convolution(packet: Any, args: Sequence[Any], out: Any) -> dict[str, float]:
    """Return the number of floating-point operations of a convolution, forward or backward.

    For a depthwise convolution, also return its planes (groups times images). Each of the three results (the
    output, the gradient of the input, the gradient of the weight) needs one multiply-add for each pair of an
    output element and a weight that contributes to it.
    """
    backward = packet is _aten.convolution_backward
    results, inputs, weight = args[:3] if backward else (out, *args[:2])
    transposed, groups = (args[7], args[9]) if backward else (args[6], args[8])
    times = sum(map(bool, args[10][:2])) if backward else 1
    swept = inputs if transposed else results
    flop = 2.0 * swept.numel() * (weight.numel() // weight.shape[0]) * times
    kind = _convolution_kind(weight, groups)
    if kind != "depthwise":
        return {f"{kind}_flop": flop}
    name = "depthwise_backward_flop" if backward else "depthwise_flop"
    return {name: flop, "depthwise_planes": float(groups * len(results) * times)}


def _convolution_kind(weight: Tensor, groups: int) -> ConvolutionKind:
    few = weight.shape[1] <= FEW_CHANNELS
    if few and groups > 1:
        return "depthwise"
    if math.prod(weight.shape[2:]) == 1:
        return "pointwise"
    return "thin" if few else "conv"
