from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgefl.errors import ConfigError
from edgefl.learning.flat import FlatModel
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Trainer


class Tied(nn.Module):
    """An encoder and a decoder that use one weight."""

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


def test_parameters_become_views_and_keep_their_values():
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


def test_layout_covers_the_vector_without_gaps_trainable_first():
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
    assert module.weight.grad is not None
    assert module.weight.grad.data_ptr() == flat.grad.data_ptr()
    assert flat.grad.abs().sum() > 0


def test_tied_parameters_are_there_once():
    flat = FlatModel(Tied())
    assert flat.size == 16 + 4
    assert [entry.name for entry in flat.layout] == ["encode.weight", "decode.bias"]
    flat.vector.fill_(2.0)
    assert flat.module.decode.weight is flat.module.encode.weight
    assert flat.module.decode.weight.unique().tolist() == [2.0]


def test_frozen_parameters_are_in_the_vector_and_do_not_move():
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    module[0].weight.requires_grad_(False)
    flat = FlatModel(module)
    frozen = module[0].weight.clone()
    train(flat, steps=3, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.1, prox_mu=0.1)
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
def test_load_refuses_what_does_not_fit(source, error, message):
    with pytest.raises(error, match=message):
        FlatModel(nn.Linear(4, 3)).load(source)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(2, 2).double(), "'weight' is float64; every parameter must be float32"),
        (nn.Linear(2, 2).half(), "'weight' is float16"),
        (nn.LazyLinear(2), "'weight' is a lazy parameter"),
        (nn.ReLU(), "ReLU has no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "Linear has no trainable parameters"),
        (nn.Linear(2, 2, device="meta"), "on meta; parameters must be dense and on the CPU"),
    ],
)
def test_modules_that_cannot_be_flat_are_refused(module, message):
    with pytest.raises(ConfigError, match=message):
        FlatModel(module)


def test_two_parameters_over_one_memory_are_refused():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = nn.Parameter(module[0].weight.data)
    with pytest.raises(ConfigError, match=r"'0.weight' and '1.weight' share memory"):
        FlatModel(module)


def test_integer_buffers_stay_outside_and_do_not_leak_between_trips():
    # With momentum=None the running mean depends on how many batches were seen, an integer buffer.
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


def test_running_statistics_move_with_training():
    flat = FlatModel(normed())
    before = flat.array[flat.trainable :].copy()
    train(flat, batch_size=12)
    assert (flat.array[flat.trainable :] != before).any()


class Replacing(nn.Module):
    """Keeps its running mean by making a new tensor, which leaves the vector."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.inner(x - self.mean)


def test_a_module_that_replaces_its_buffer_is_told_so():
    flat = FlatModel(Replacing())
    with pytest.raises(ConfigError, match="tensor 'mean' was replaced in training"):
        train(flat)


def test_gradients_taken_away_are_put_back():
    flat = FlatModel(nn.Linear(4, 3))
    flat.module.zero_grad(set_to_none=True)
    before = flat.array.copy()
    train(flat)
    assert (flat.array != before).any()
