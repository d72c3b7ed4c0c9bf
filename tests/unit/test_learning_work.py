"""Tests of the work of a step, against counts by hand and torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from edgefl.devices.time_model import FEMNIST_STEP
from edgefl.errors import ConfigError, TrainingError
from edgefl.experiment import Model
from edgefl.host.host_operations import sgd_step
from edgefl.learning.flat import FlatModel
from edgefl.learning.live import live_lines
from edgefl.learning.models import MODELS, make_model
from edgefl.learning.work import (
    BatchWork,
    StepWork,
    WorkMeter,
    _Step,
    batch_work,
    step_work,
    traced_work,
    usual_loss,
)

IMAGE = (3, 8, 8)


class Custom(nn.Module):
    """A module with these parameters and layers, whose forward pass is ``function(module, x)``."""

    def __init__(self, function: Callable[..., torch.Tensor], **parts: torch.Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def channel_means() -> nn.Module:
    return Custom(lambda _, x: x.mean((2, 3)))


def channel_sums(axis: int) -> nn.Module:
    return Custom(lambda _, x: x.sum(axis))


def convolution(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, groups=groups, bias=False), channel_means())


def test_a_dense_convolution_is_counted_forward_and_for_the_gradient_of_its_weight():
    work = step_work(convolution(6, 5, 3), (6, 8, 8), batch=2)
    assert work.conv_flop == work.flop == 2 * (2 * (2 * 5 * 6 * 6) * (6 * 3 * 3))  # no gradient of images
    inputs, outputs, weight = 2 * 6 * 8 * 8, 2 * 5 * 6 * 6, 5 * 6 * 3 * 3
    forward = inputs + weight + outputs
    backward = outputs + inputs + weight + weight
    assert work.conv_bytes == 4 * (forward + backward)
    assert work.parameters == weight


def test_convolutions_of_few_channels_and_pointwise_ones_are_counted_apart():
    module = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), convolution(4, 6, 1))
    work = step_work(module, IMAGE, batch=2)
    assert work.pointwise_flop == 3 * 2 * (2 * 6 * 6 * 6) * 4
    assert work.thin_flop == work.flop - work.pointwise_flop == 2 * 2 * (2 * 4 * 6 * 6) * 27


def test_a_depthwise_convolution_is_counted_by_its_weights_and_by_planes():
    module = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), convolution(4, 4, 3, groups=4))
    work = step_work(module, IMAGE, batch=2)
    assert work.depthwise_flop == 2 * (2 * 4 * 6 * 6) * 9
    assert work.depthwise_backward_flop == 2 * work.depthwise_flop
    assert work.depthwise_planes == 3 * 4 * 2  # three passes, four groups, two images
    assert work.conv_flop == 0


def test_groups_of_many_channels_are_counted_as_a_dense_convolution():
    module = convolution(16, 8, 3, groups=2)
    work = step_work(module, (16, 8, 8), batch=2)
    assert work.depthwise_flop == 0
    assert work.conv_flop == 2 * 2 * (2 * 8 * 6 * 6) * (8 * 9)


def test_a_transposed_convolution_is_counted_by_its_inputs():
    module = nn.Sequential(nn.ConvTranspose2d(3, 5, 3, bias=False), channel_means())
    assert step_work(module, IMAGE, batch=2, inference=True).flop == 2 * (2 * 3 * 8 * 8) * (5 * 3 * 3)


def test_bytes_are_counted_by_kind_of_operation():
    module = nn.Sequential(nn.MaxPool2d(2), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    work = step_work(module, IMAGE, batch=2, inference=True)
    before, after = 4 * 2 * 3 * 8 * 8, 4 * 2 * 3 * 4 * 4
    assert work.pool_bytes == before + after  # the indices of the maxima do not count
    assert work.norm_bytes == 2 * after + 4 * (2 * 3 + 2 * 2)  # weight and bias; mean and deviation
    assert work.elementwise_bytes == 2 * after
    assert work.matmul_bytes == after + 4 * (48 * 2 + 2 + 2 * 2)
    assert work.copy_bytes == work.conv_bytes == 0
    assert work.calls == 4
    assert work.parameters == 0  # no update in inference


def test_a_lookup_reads_its_rows_and_not_the_whole_table():
    rows, width, batch, length = 1000, 8, 2, 5
    words = nn.Sequential(nn.Embedding(rows, width), channel_sums(1))
    looked_up, summed = batch * length * width, batch * width
    work = step_work(words, (length,), batch, dtype=np.int64, inference=True)
    assert work.elementwise_bytes == 4 * (2 * looked_up + looked_up + summed)
    bags = nn.EmbeddingBag(rows, width)
    work = step_work(bags, (length,), batch, dtype=np.int64, inference=True)
    assert 4 * (looked_up + summed) <= work.elementwise_bytes < 4 * rows * width
    words[0].weight.requires_grad_(False)
    head = nn.Sequential(words, nn.Linear(width, 2))
    assert step_work(head, (length,), batch, dtype=np.int64).elementwise_bytes < 4 * rows * width
    with WorkMeter() as meter:
        torch.ones(rows, width)[torch.arange(3)]
        torch.ones(2, width)[torch.zeros(7, dtype=torch.int64)]  # the table is smaller than the result
    assert meter.work().copy_bytes == 4 * width * (2 * 3 + 2 + 7)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_gradient_of_an_embedding_has_only_its_rows(kind, meta):
    def work(sparse: bool) -> BatchWork:
        bags = kind is nn.EmbeddingBag
        table = kind(1000, 8, sparse=True, mode="sum") if sparse and bags else kind(1000, 8, sparse=sparse)
        module = nn.Sequential(table, *([] if bags else [channel_sums(1)]), nn.Linear(8, 3))
        return batch_work(module, (5,), dtype=np.int64, meta=meta)

    few, all_ = work(sparse=True), work(sparse=False)
    assert few.at(2).parameters == all_.at(2).parameters
    assert few.at(2).matmul_flop == all_.at(2).matmul_flop > 0
    assert few.at(2).bytes < 4 * 1000 * 8 < all_.at(2).bytes
    assert 0 < few.live_bytes(2) < all_.live_bytes(2)


@pytest.mark.parametrize(("shape", "paper_mflop"), [((1, 28, 28), 17.0), ((3, 32, 32), 31.4)])
def test_defedavgs_cnn_has_the_papers_flop(shape, paper_mflop):
    module = make_model(Model(name="cnn-defedavg"), shape, 10, 0)
    channels, side, _ = shape
    first, second = side - 4, (side - 4) // 2 - 4
    image = first**2 * 32 * 25 * channels
    forward = image + second**2 * 64 * 25 * 32 + 64 * (second // 2) ** 2 * 512 + 512 * 10
    # The backward pass has two products for each one of the forward pass, but the image needs no gradient.
    assert step_work(module, shape, 2).flop == 4 * (3 * forward - image)
    assert 4 * forward / 1e6 == pytest.approx(paper_mflop, rel=0.005)


class Tokens(nn.Module):
    def __init__(self, recurrent: type[nn.RNNBase]) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.recurrent = recurrent(8, 16, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.recurrent(self.table(x))[0][:, -1])


@pytest.mark.parametrize(("recurrent", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers_are_counted_as_recurrent(recurrent, gates):
    steps, batch = 5, 2
    work = step_work(Tokens(recurrent), (steps,), batch, dtype=np.int64)
    assert work.matmul_flop == 3 * 2 * batch * 16 * 4
    cells = 2 * batch * steps * gates * 16 * (8 + 16)
    # The first step's hidden state is a constant: no gradient flows to it.
    first = 2 * batch * gates * 16 * 16
    assert work.recurrent_flop == pytest.approx(3 * cells - first, rel=0.01)


def test_a_users_loop_over_cells_is_counted_as_recurrent():
    def loop(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in x.unbind(1):
            state = module.cell(step, state)
        return state[0]

    work = step_work(Custom(loop, cell=nn.LSTMCell(4, 8)), (3, 4), batch=2, inference=True)
    assert work.recurrent_flop == work.flop == 2 * 3 * 2 * 4 * 8 * (4 + 8)


def attention(**options: object) -> nn.Module:
    def attend(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
        heads = own.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = {"attn_mask": x.new_zeros(40, 40)} if "attn_mask" in options else {}
        mixed = scaled_dot_product_attention(*heads, **{**options, **mask})
        return own.out(mixed.transpose(1, 2).flatten(2).mean(1))

    return Custom(attend, qkv=nn.Linear(16, 48), out=nn.Linear(16, 3))


def strided() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 5, 2, 1, dilation=2), nn.ReLU(), convolution(8, 4, 1))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cnn-fedbuff", (3, 32, 32)),
        ("cnn-celeba", (3, 84, 84)),
        ("cnn-femnist", (1, 28, 28)),
        ("cnn-groupnorm", (1, 28, 28)),
        (strided, (3, 32, 32)),
        (attention, (10, 16)),
    ],
)
def test_dense_operations_are_those_of_torchs_counter(name, shape):
    with torch.device("meta"):
        module = make_model(Model(name=name), shape, 10, 0) if isinstance(name, str) else name()
        counter = FlopCounterMode(display=False)
        with counter:
            logits = module(torch.zeros((2, *shape)))
            nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.int64)).backward()
    assert step_work(module, shape, batch=2).flop == counter.get_total_flops()


def test_the_work_of_any_batch_follows_from_two():
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
    )
    work = batch_work(module, IMAGE)
    for batch in (3, 17):
        assert work.at(batch) == step_work(module, IMAGE, batch)
    assert work.per_example.calls == work.per_example.parameters == 0
    assert work.fixed.flop == 0


def test_frozen_parameters_have_no_gradients_and_no_update():
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    work = step_work(module, (4,), 5, trained=list(module[1].parameters()))
    assert work.matmul_flop == 2 * 5 * (4 * 6 + 2 * 6 * 2)
    assert work.parameters == 6 * 2 + 2
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_the_usual_loss_takes_logits_of_tokens_and_one_number_per_example() -> None:
    tokens = step_work(nn.Linear(4, 3), (5, 4), 2)
    assert tokens.matmul_flop == step_work(nn.Linear(4, 3), (4,), 10).matmul_flop == 480.0
    assert usual_loss(torch.tensor(0.5)).item() == 0.0  # a batch of one example
    assert step_work(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), (4,), 2).matmul_flop == 32.0
    sgd_step(nn.Linear(4, 3), torch.zeros(2, 5, 4), None, 0.0)()  # measured on this host, too


def test_a_users_loss_is_counted():
    work = step_work(nn.Linear(4, 2), (4,), 5, loss=lambda outputs: (outputs @ outputs.T).sum())
    assert work.matmul_flop == 2 * (2 * 5 * 4 * 2) + 3 * (2 * 5 * 5 * 2)


def test_counting_changes_neither_the_module_nor_torchs_random_state():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)).eval()
    flat = FlatModel(module)
    before, stream = flat.array.copy(), torch.get_rng_state()
    assert step_work(module, (4,), 2) == step_work(module, (4,), 2)
    np.testing.assert_array_equal(flat.array, before)
    assert not flat.grad.any()
    assert not module.training
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_meter_counts_the_operations_in_its_block():
    with WorkMeter() as meter:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert meter.flop == meter.work().matmul_flop == 2 * 2 * 3 * 4
    torch.ones(2, 3) @ torch.ones(3, 4)
    assert meter.flop == 48


def test_a_module_that_branches_on_values_is_counted_on_real_tensors():
    branches = Custom(lambda own, x: own.layer(x) if float(x.sum()) < 1 else x, layer=nn.Linear(4, 2))
    module, stream = nn.Sequential(nn.Dropout(0.5), branches), torch.get_rng_state()
    assert step_work(module, (4,), 5).flop == 2 * 2 * 5 * 4 * 2
    assert module[1].layer.weight.grad is None
    assert torch.equal(torch.get_rng_state(), stream)


def test_devices_are_compared_by_a_step_of_leafs_cnn():
    module = make_model(Model(name="cnn-femnist"), (1, 28, 28), 62, 0)
    assert step_work(module, (1, 28, 28), 10) == FEMNIST_STEP


TEXTS = {"lstm-sent140": (6,), "lstm-shakespeare": (5,)}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_built_in_models_have_the_same_work_on_meta_and_on_real_tensors(name):
    shape = TEXTS.get(name, (1, 28, 28))
    dtype = np.int64 if name in TEXTS else np.float32
    module = make_model(Model(name=name), shape, 10, 0)
    on_meta = batch_work(module, shape, dtype=dtype)
    assert on_meta == batch_work(module, shape, dtype=dtype, meta=False)
    assert on_meta.per_example.flop > 0


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": None}])
def test_attention_in_one_operation_has_the_work_of_its_products(options, inference):
    """On the CPU, torch fuses attention; on the meta device, which is used to fit time models, not."""
    module = attention(**options)
    real, meta = (
        step_work(module, (40, 16), 4, inference=inference, meta=on_meta) for on_meta in (False, True)
    )
    # The fused result is laid out so that no copy of it is needed.
    copies = {"copy_bytes": meta.copy_bytes, "calls": meta.calls}
    assert structs.replace(real, **copies) == meta
    assert 0 <= meta.calls - real.calls <= 2
    assert 0 <= meta.copy_bytes - real.copy_bytes <= 2 * 2 * 4 * (4 * 40 * 16)


def test_a_matrix_that_is_only_a_factor_of_attention_is_counted():
    def pool(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(own.queries.expand(len(x), 1, -1, -1), x[:, None], x[:, None])[
            :, 0
        ]

    module = nn.Sequential(Custom(pool, queries=torch.ones(3, 4)), nn.Flatten(), nn.Linear(12, 2))
    work = step_work(module, (7, 4), 5, inference=True, meta=False)
    assert work.matmul_flop == 2 * (2 * 5 * 3 * 7 * 4) + 2 * 5 * 12 * 2


def test_a_matrix_that_is_only_added_is_counted_in_bytes():
    def add(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x[:, None] + module.table[[3, 1, 4, 1]] + module.every.unsqueeze(0)

    positions = Custom(add, table=torch.ones(9, 3), every=torch.ones(4, 3))
    work = step_work(nn.Sequential(positions, nn.Flatten(), nn.Linear(12, 2)), (3,), 5)
    assert work.flop == 3 * 2 * 5 * 12 * 2  # of the linear layer
    assert work.elementwise_bytes > 2 * 4 * 5 * 12  # at least the two sums' results


def test_a_layer_that_cannot_be_counted_is_refused_unless_it_declares_its_flop():
    layer = Custom(lambda own, x: (x[:, :, None] * own.weight).sum(1), weight=torch.ones(4, 3))
    with pytest.raises(ConfigError, match=r"layer '1' \(Custom\) cannot be counted"):
        step_work(nn.Sequential(nn.Linear(4, 4), layer), (4,), 2)
    layer.flops_per_example = np.int64(72)
    assert step_work(layer, (4,), 2) == StepWork(matmul_flop=2 * 72, parameters=12)
    assert step_work(nn.Sequential(nn.Linear(4, 4), layer), (4,), 2).flop == 2 * (72 + 2 * 2 * 16)
    layer.flops_per_example = "many"
    with pytest.raises(ConfigError, match="flops_per_example must be a number ≥ 0"):
        step_work(layer, (4,), 2)


def test_an_inference_has_a_third_of_the_declared_operations():
    """Declared operations include the backward pass; counted ones are those of the inference itself."""
    layer = Custom(lambda own, x: (x[:, :, None] * own.weight).sum(1), weight=torch.ones(4, 3))
    layer.flops_per_example = 72
    for module, counted in ((layer, 0), (nn.Sequential(nn.Linear(4, 4), layer), 2 * 16)):
        work = step_work(module, (4,), 2, inference=True)
        assert work.matmul_flop == pytest.approx(2 * (72 / 3 + counted))


def test_an_embedding_may_declare_operations_too():
    """Mutant: the declared operations are counted only in a user's own training function."""
    module = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(20, 2))
    module[0].flops_per_example = 72

    def train(batch):
        module(torch.zeros(batch, 5, dtype=torch.int64)).sum().backward()
        return 1, batch

    built_in, own = (
        batch_work(module, (5,), dtype=np.int64, loss=torch.sum),
        traced_work(train, 8, module=module),
    )
    assert built_in.at(8).matmul_flop == own.at(8).matmul_flop == 8 * 72 + 3 * (2 * 8 * 20 * 2)


def test_each_call_of_a_layer_has_the_operations_that_it_declares():
    layer = Custom(lambda own, x: x + (x[:, :, None] * own.weight).sum(1), weight=torch.ones(4, 4))
    layer.flops_per_example = 72
    module = nn.Sequential(nn.Linear(4, 4), Custom(lambda own, x: own.part(own.part(x)), part=layer))

    def train(batch):
        module(torch.zeros(batch, 4)).sum().backward()
        return 1, batch

    built_in, own = batch_work(module, (4,), loss=torch.sum), traced_work(train, 8, module=module)
    assert built_in.at(8).matmul_flop == own.at(8).matmul_flop == 8 * 2 * 72 + 2 * (2 * 8 * 4 * 4)


def test_a_batch_size_that_makes_a_last_batch_of_one_example_is_not_traced():
    """Batch normalisation fails on one example. 13 examples leave such a last batch with batch size 4, but
    not with 8 or 16."""
    layer, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), torch.ones(13, 3)

    def train(batch):
        parts = x.split(batch)
        try:
            for part in parts:
                layer(part).sum().backward()
        except ValueError as error:
            raise TrainingError(str(error)) from error
        return len(parts), len(x)

    assert traced_work(train, 8).per_example.matmul_flop == 3 * 12


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_normed_weight_is_counted_in_the_product_of_its_layer(norm):
    module = nn.Sequential(nn.Flatten(), norm(nn.Linear(12, 5)))
    for meta in (True, False):
        assert step_work(module, (12,), 4, meta=meta).matmul_flop == 2 * (2 * 4 * 12 * 5)


def test_layers_without_products_or_use_are_not_counted():
    module = nn.Sequential(nn.LayerNorm([2, 3]), nn.Flatten(), nn.Linear(6, 2))
    module[1].register_module("spare", nn.Linear(3, 3))
    assert step_work(module, (2, 3), 2).flop == 2 * 2 * 3 * 12


def test_a_scale_per_channel_is_not_counted_as_a_product():
    scale = Custom(lambda own, x: x * own.gamma, gamma=torch.ones(5, 1, 1))
    module = nn.Sequential(nn.Conv2d(3, 5, 3), scale, channel_means())
    assert step_work(module, IMAGE, 2).flop == step_work(convolution(3, 5, 3), IMAGE, 2).flop


def test_a_model_that_does_not_take_the_data_is_refused():
    with pytest.raises(ConfigError, match=r"model: cannot train on inputs of shape \(5,\): RuntimeError"):
        step_work(nn.Linear(4, 2), (5,), 2)


def test_counting_a_large_module_on_meta_allocates_no_memory_for_it():
    with torch.device("meta"):
        module = nn.Linear(20_000, 20_000, bias=False)  # 1.6 GB
    before_kib = getrusage(RUSAGE_SELF).ru_maxrss
    work = batch_work(module, (20_000,))
    assert getrusage(RUSAGE_SELF).ru_maxrss - before_kib < 200 * 1024
    assert work.per_example.flop == 2 * 2 * 20_000**2


def test_live_bytes_of_any_batch_are_those_of_its_trace():
    """Mutants: gradients are counted until the end of the step; activations are counted after they are freed;
    only the peaks of the traced batches are extrapolated."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 500))
    found = batch_work(module, (3, 8, 8))
    for batch in (1, 7, 64):
        step = _Step((3, 8, 8), batch, np.float32, False, usual_loss)
        assert found.live_bytes(batch) == max(step.work(module, list(module.parameters()), True)[1])
    # For small batches the gradient of the last layer makes the peak, for large batches the activations do.
    assert len(found.live) > 1
    layers = [nn.Linear(50, 50, bias=False) for _ in range(8)]
    gradient, activation = 4 * 50 * 50, 4 * 50
    assert gradient < batch_work(nn.Sequential(*layers), (50,)).live_bytes(1) < gradient + 8 * 4 * activation


def test_live_bytes_of_a_layer_are_its_tensors():
    """The tensors are x, the logits, the log softmax, the gradients of these two (never both at once), the
    labels, and the weight's gradient."""
    batch, inputs, outputs = 6, 50, 7
    found = batch_work(nn.Linear(inputs, outputs, bias=False), (inputs,)).live_bytes(batch)
    floats = batch * inputs + 2 * batch * outputs + inputs * outputs
    assert 4 * floats <= found <= 4 * (floats + batch * outputs) + 8 * batch + 16


def test_lines_of_live_bytes_may_cross_where_the_crossing_is_rounded():
    """Mutants: the search never gets past a rounded crossing; the result contains a line several times."""
    low, high = [3208184716, 1355891552], [3993803404, 2141510280]
    found = live_lines(low, high, (2, 4))
    assert found == ((2422566028.0, 392809344.0), (570272824.0, 392809364.0))
