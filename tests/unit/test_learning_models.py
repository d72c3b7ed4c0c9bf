"""Tests of the papers' models, of users' models, and of models whose parameters are stored in one vector."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest
import torch
from torch import nn

from edgefl.errors import ConfigError
from edgefl.experiment import Model
from edgefl.learning.flat import FlatModel
from edgefl.learning.models import MODELS, make_model
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Trainer
from edgefl.learning.work import step_work
from edgefl.strategies.base import LocalTerms

MNIST, CIFAR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)


@pytest.fixture
def user_module(tmp_path):
    """A function that writes ``my_module.py`` and returns a list with its folder."""

    def write(text: str) -> list:
        (tmp_path / "my_module.py").write_text("from torch import nn\n" + text)
        return [tmp_path]

    sys.modules.pop("my_module", None)
    yield write
    sys.modules.pop("my_module", None)


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("mlp", DIGITS, 64 * 64 + 64 + 64 * 10 + 10),
        # FedBuff: conv 3→32 and three of 32→32, four GroupNorms, and 32·3·3 → 10.
        ("cnn-fedbuff", CIFAR, 896 + 3 * 9248 + 4 * 64 + 2890),
        ("cnn-defedavg", MNIST, 832 + 51264 + 1024 * 512 + 512 + 5130),
        # DeFedAvg: the latent width before the two linear layers is the paper's 1,600.
        ("cnn-defedavg", CIFAR, 2432 + 51264 + 1600 * 512 + 512 + 5130),
        ("cnn-groupnorm", MNIST, 468_458),
        # LEAF: conv 3→32 and three of 32→32, four norms, and 32·6·6 → 10.
        ("cnn-celeba", (3, 84, 84), 896 + 3 * 9248 + 4 * 64 + 11530),
        ("cnn-femnist", MNIST, 832 + 51264 + 3136 * 2048 + 2048 + 20490),
        # FedBuff: 10,000 words and two more in 300 dimensions, two LSTM layers of 100, dense 128 and 10.
        ("lstm-sent140", (25,), 3_000_600 + 400 * 402 + 400 * 202 + 12_928 + 1290),
        ("lstm-shakespeare", (80,), 80 + 1024 * 266 + 1024 * 514 + 2570),
    ],
)
def test_models_have_as_many_parameters_as_the_papers(name, shape, parameters):
    flat = FlatModel(make_model(Model(name=name), shape, 10, seed=0))
    assert flat.size == flat.trainable == parameters


def test_fedstaleweights_bench_has_six_convolutions_for_cifar():
    """Three stages of two 3×3 convolutions have 32, 64 and 128 channels; they take 2.1 times the FLOP of the
    model for FashionMNIST."""
    module = make_model(Model(name="cnn-groupnorm", args={"stages": 3}), CIFAR, 10, seed=0)
    widths = [layer.out_channels for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    groups = [layer.num_groups for layer in module.modules() if isinstance(layer, nn.GroupNorm)]
    rates = [layer.p for layer in module.modules() if isinstance(layer, nn.Dropout | nn.Dropout2d)]
    assert (widths, groups) == ([32, 32, 64, 64, 128, 128], [8, 8, 16, 16, 32, 32, 32])
    assert rates == [0.3, 0.5, 0.5, 0.5]
    linear = 2048 * 128 + 128 + 1290
    assert sum(each.numel() for each in module.parameters()) == 287_008 + linear + 2 * (448 + 128)
    fashion = make_model(Model(name="cnn-groupnorm"), MNIST, 10, seed=0)
    flops = step_work(module, CIFAR, 1).flop / step_work(fashion, MNIST, 1).flop
    assert round(flops, 1) == 2.1


TEXTS = ("lstm-sent140", "lstm-shakespeare")


@pytest.mark.parametrize(
    ("name", "shape"), [(name, s) for name in MODELS for s in ([(9,)] if name in TEXTS else [MNIST, CIFAR])]
)
def test_every_model_returns_logits_and_every_parameter_has_a_gradient(name, shape):
    module = make_model(Model(name=name), shape, 7, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    make = torch.randn if name not in TEXTS else functools.partial(torch.randint, 0, 7)
    logits = module(make((3, *shape), generator=generator))
    assert logits.shape == (3, 7)
    logits.logsumexp(1).sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in module.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_weights_depend_on_the_seed_alone(name):
    vectors = []
    for seed, disturbance in ((1, 10), (1, 20), (2, 10)):
        torch.manual_seed(disturbance)
        before = torch.get_rng_state()
        shape = (9,) if name in TEXTS else MNIST
        vectors.append(FlatModel(make_model(Model(name=name), shape, 10, seed)).array)
        assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert (vectors[0] != vectors[2]).any()


def test_arguments_reach_the_model():
    wide = make_model(Model(name="mlp", args={"hidden": [5, 4, 3]}), DIGITS, 10, 0)
    assert [layer.out_features for layer in wide if isinstance(layer, nn.Linear)] == [5, 4, 3, 10]
    assert FlatModel(make_model(Model(args={"hidden": []}), DIGITS, 10, 0)).size == 650
    cnn = make_model(Model(name="cnn-fedbuff", args={"dropout": 0.0}), CIFAR, 10, 0)
    assert [layer.p for layer in cnn.modules() if isinstance(layer, nn.Dropout)] == [0.0]


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (Model(name="mpl"), DIGITS, "model.name: model 'mpl' not found; did you mean 'mlp'"),
        (Model(args={"hiden": [3]}), DIGITS, "argument of 'mlp' 'hiden' not found; did you mean 'hidden'"),
        (Model(args={"hidden": [0]}), DIGITS, r"hidden must be a list of .* numbers \(got \[0\]\)"),
        (Model(args={"hidden": 5}), DIGITS, r"hidden must be a list of .* numbers \(got 5\)"),
        (Model(args={"classes": 5}), DIGITS, "must not include input_shape or classes"),
        (Model(name="cnn-defedavg"), DIGITS, r"images of shape \(1, 8, 8\) are too small"),
        (Model(name="cnn-defedavg"), (64,), r"a CNN needs images of shape .* \(got \(64,\)\)"),
        (Model(name="cnn-defedavg", args={"channels": [3]}), MNIST, "channels must be two numbers"),
        (Model(name="cnn-defedavg", args={"hidden": 0}), MNIST, "hidden must be a positive whole number"),
        (Model(name="cnn-groupnorm", args={"dropout": [0.3, 1.0]}), MNIST, r"dropout must be in \[0, 1\)"),
        (Model(name="cnn-groupnorm", args={"dropout": [0.3]}), MNIST, "dropout must be two rates"),
        (Model(name="cnn-groupnorm", args={"hidden": 40}), MNIST, "multiple of 32"),
        (Model(name="cnn-fedbuff", args={"dropout": "no"}), MNIST, "dropout must be in"),
        (Model(name="cnn-fedbuff", args={"width": 1.5}), MNIST, "width must be a positive whole number"),
        (Model(name="cnn-celeba", args={"width": 0}), MNIST, "width must be a positive whole number"),
        (Model(name="lstm-sent140"), MNIST, r"a text model needs tokens of shape \(length,\)"),
        (Model(name="lstm-sent140", args={"dropout": 1.0}), (25,), r"dropout must be in \[0, 1\)"),
        (Model(name="lstm-shakespeare", args={"hidden": 0}), (80,), "hidden must be a positive whole"),
    ],
)
def test_a_model_that_cannot_be_made_is_one_line(model, shape, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_model(model, shape, 10, seed=0)
    assert "\n" not in str(caught.value)


def test_a_users_model_is_found_beside_the_experiment(user_module):
    folders = user_module(
        "def make(input_shape, classes, width=4):\n"
        "    pixels = input_shape[1] * input_shape[2]\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.Linear(width, classes))\n"
    )
    path = list(sys.path)
    model = make_model(Model(name="my_module:make", args={"width": 6}), DIGITS, 3, 0, folders)
    assert (model[1].out_features, model[2].out_features) == (6, 3)
    assert sys.path == path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("make = 3", r"must be a function or class \(got int\)"),
        ("def make():\n    pass", "'my_module:make' raised TypeError: make"),
        ("def make(**kw):\n    return 3", r"must return a torch.nn.Module \(got int\)"),
        ("def make(**kw):\n    raise OSError('a\\nb')", "raised OSError: a b"),
    ],
)
def test_a_users_model_that_fails_is_one_line(user_module, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_model(Model(name="my_module:make"), DIGITS, 10, 0, user_module(text))
    assert "\n" not in str(caught.value)


class Tied(nn.Module):
    """An encoder and a decoder that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.relu(self.encode(x)))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def examples(rows: int = 12, width: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.standard_normal((rows, width)).astype(np.float32), np.arange(rows) % 3


def train(flat: FlatModel, seed: int = 0, **rule: float) -> None:
    Trainer(flat).run(*examples(), LocalRule(**{"steps": 1, **rule}), np.random.default_rng(seed))


def test_parameters_become_views_of_one_vector_and_keep_their_values():
    module = normed()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flat = FlatModel(module)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    memory = range(flat.array.ctypes.data, flat.array.ctypes.data + flat.array.nbytes)
    for entry in flat.layout:
        tensor = module.state_dict(keep_vars=True)[entry.name]
        assert tensor.data_ptr() in memory
        part = flat.array[entry.offset : entry.offset + entry.size].reshape(entry.shape)
        np.testing.assert_array_equal(part, tensor.detach().numpy())
    assert flat.array.dtype == np.float32
    assert flat.vector.data_ptr() == flat.array.ctypes.data


def test_the_layout_has_no_gaps_and_trainable_parameters_come_first():
    module = normed()
    module[0].weight.requires_grad_(False)
    flat = FlatModel(module)
    offset = 0
    for entry in flat.layout:
        assert entry.offset == offset
        offset += entry.size
    assert offset == flat.size == 24 + 6 + 12 + 18 + 3 + 12
    assert flat.trainable == flat.size - 24 - 12 == flat.grad.numel()
    assert [entry.name for entry in flat.layout[-3:]] == ["0.weight", "1.running_mean", "1.running_var"]


def test_gradients_are_views_of_one_vector():
    module = nn.Linear(4, 3)
    flat = FlatModel(module)
    x, y = (torch.from_numpy(part) for part in examples())
    nn.functional.cross_entropy(module(x), y).backward()
    assert module.weight.grad.data_ptr() == flat.grad.data_ptr()
    assert flat.grad.abs().sum() > 0


def test_tied_parameters_are_in_the_vector_once():
    flat = FlatModel(Tied())
    assert flat.size == 16 + 4
    assert [entry.name for entry in flat.layout] == ["encode.weight", "decode.bias"]
    flat.vector.fill_(2.0)
    assert flat.module.decode.weight is flat.module.encode.weight
    assert flat.module.decode.weight.unique().tolist() == [2.0]


def test_frozen_parameters_are_in_the_vector_and_do_not_change():
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    module[0].weight.requires_grad_(False)
    flat = FlatModel(module)
    frozen = module[0].weight.clone()
    train(flat, steps=3, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.1, terms=LocalTerms(prox_mu=0.1))
    assert torch.equal(module[0].weight, frozen)
    assert flat.size == 20 + 5 + 15 + 3


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (np.zeros(7, np.float32), ValueError, r"source must have shape \(15,\) \(got \(7,\)\)"),
        (np.zeros((3, 5), np.float32), ValueError, r"got \(3, 5\)"),
        (np.zeros(15), TypeError, "source must be float32 .got float64."),
    ],
)
def test_load_refuses_a_wrong_shape_or_type(source, error, message):
    with pytest.raises(error, match=message):
        FlatModel(nn.Linear(4, 3)).load(source)


def masked(*, persistent):
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1), persistent=persistent)
    return module


def test_a_mask_of_infinity_is_no_part_of_the_vector():
    assert FlatModel(masked(persistent=False)).size == 6


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (masked(persistent=True), "'mask' holds NaN or infinity; .* in a buffer with persistent=False"),
        (nn.Linear(2, 2).double(), "'weight' is float64; every parameter must be float32"),
        (nn.Linear(2, 2).half(), "'weight' is float16"),
        (nn.LazyLinear(2), "'weight' is a lazy parameter"),
        (torch.jit.ScriptModule(), "TorchScript module; pass it without torch.jit"),
        (nn.ReLU(), "ReLU has no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "Linear has no trainable parameters"),
        (nn.Linear(2, 2, device="meta"), "on meta; parameters must be dense and on the CPU"),
    ],
)
def test_modules_that_cannot_become_one_vector_are_refused(module, message):
    with pytest.raises(ConfigError, match=message):
        FlatModel(module)


def test_two_parameters_that_share_memory_are_refused():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = nn.Parameter(module[0].weight.data)
    with pytest.raises(ConfigError, match=r"'0.weight' and '1.weight' share memory"):
        FlatModel(module)


def test_integer_buffers_are_reset_between_trips():
    # With momentum=None the running mean depends on the number of batches, an integer buffer.
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))
    flat = FlatModel(module)
    start = flat.array.copy()
    trips = []
    for _ in range(2):
        flat.load(start)
        train(flat, 1, steps=4, batch_size=6)
        trips.append(flat.array.copy())
    np.testing.assert_array_equal(*trips)
    assert module[1].num_batches_tracked.item() == 4


def test_training_changes_running_statistics_and_restores_removed_gradients():
    flat = FlatModel(normed())
    flat.module.zero_grad(set_to_none=True)
    before = flat.array.copy()
    train(flat, batch_size=12)
    assert (flat.array[flat.trainable :] != before[flat.trainable :]).any()
    assert (flat.array[: flat.trainable] != before[: flat.trainable]).any()


class Replacing(nn.Module):
    """A layer that replaces its running mean by a new tensor, which is not part of the model's vector."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.inner(x - self.mean)


def test_a_module_that_replaces_its_buffer_is_refused():
    flat = FlatModel(Replacing())
    with pytest.raises(ConfigError, match="tensor 'mean' was replaced during training"):
        train(flat)
