"""The five image networks whose training with the library MNN was measured on phones.

They are AlexNet (Krizhevsky et al. 2012), GoogLeNet (Szegedy et al. 2015), LeNet-5 (LeCun et al. 1998),
MobileNetV2 (Sandler et al. 2018) and SqueezeNet 1.0 (Iandola et al. 2016). MobileNetV2 has 1,000 classes, the
others have ten. The networks follow the papers and the parameter counts that were published with the
measurements (UbiquitousLearning, Benchmark-On-Device-Training @752659f). Only GoogLeNet differs: it has 6.0
million parameters here, and 6.8 million in the publication.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Branches(nn.Module):
    """Applies several submodules to one input and concatenates their outputs along the channels."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


class Residual(nn.Sequential):
    """A sequence of layers whose input is added to its output."""

    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
        return input + made


def _same(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)


def _halve(padding: int = 1) -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, padding)


def lenet() -> nn.Module:
    """Create LeNet-5 for images of 28 × 28 × 1.

    >>> sum(p.numel() for p in lenet().parameters())
    349980
    """
    features = (nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*features, nn.Linear(800, 400), nn.ReLU(), nn.Dropout(), nn.Linear(400, 10))


def alexnet() -> nn.Module:
    """Create AlexNet for images of 224 × 224 × 3, without the original's split into two halves.

    It has one fully connected hidden layer; the original has two.

    >>> round(sum(p.numel() for p in alexnet().parameters()) / 1e6)
    30
    """
    features = (
        *(nn.Conv2d(3, 96, 11, 4), nn.ReLU(), _halve(0)),
        *(_same(96, 256, 5), nn.ReLU(), _halve(0)),
        *(_same(256, 384, 3), nn.ReLU(), _same(384, 384, 3), nn.ReLU(), _same(384, 256, 3), _halve(0)),
    )
    head = (nn.Flatten(), nn.Linear(6400, 4096), nn.ReLU(), nn.Dropout(), nn.ReLU(), nn.Dropout())
    return nn.Sequential(*features, *head, nn.Linear(4096, 10))


def _inception(inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> nn.Module:
    return Branches(
        _same(inputs, one, 1),
        nn.Sequential(_same(inputs, three[0], 1), _same(*three, 3)),
        nn.Sequential(_same(inputs, five[0], 1), _same(*five, 5)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), _same(inputs, pool, 1)),
    )


def googlenet() -> nn.Module:
    """Create GoogLeNet for images of 224 × 224 × 3, without auxiliary classifiers.

    >>> round(sum(p.numel() for p in googlenet().parameters()) / 1e6, 2)
    5.98
    """
    return nn.Sequential(
        *(_same(3, 64, 7, 2), _halve(), _same(64, 192, 3), _halve()),
        _inception(192, 64, (96, 128), (16, 32), 32),
        _inception(256, 128, (128, 192), (32, 96), 64),
        _halve(),
        _inception(480, 192, (96, 208), (16, 48), 64),
        _inception(512, 160, (112, 224), (24, 64), 64),
        _inception(512, 128, (128, 256), (24, 64), 64),
        _inception(512, 112, (144, 288), (32, 64), 64),
        _inception(528, 256, (160, 320), (32, 128), 128),
        _halve(),
        _inception(832, 256, (160, 320), (32, 128), 128),
        _inception(832, 384, (192, 384), (48, 128), 128),
        *(nn.AvgPool2d(7), nn.Conv2d(1024, 10, 1), nn.Flatten()),
    )


def _fire(inputs: int, squeezed: int, expanded: int) -> nn.Module:
    return nn.Sequential(
        _same(inputs, squeezed, 1), Branches(_same(squeezed, expanded, 1), _same(squeezed, expanded, 3))
    )


def squeezenet() -> nn.Module:
    """Create SqueezeNet 1.0 for images of 224 × 224 × 3.

    >>> round(sum(p.numel() for p in squeezenet().parameters()) / 1e6, 2)
    0.74
    """
    return nn.Sequential(
        *(_same(3, 96, 7, 2), _halve()),
        *(_fire(96, 16, 64), _fire(128, 16, 64), _fire(128, 32, 128), _halve()),
        *(_fire(256, 32, 128), _fire(256, 48, 192), _fire(384, 48, 192), _fire(384, 64, 256), _halve()),
        *(_fire(512, 64, 256), nn.Conv2d(512, 10, 1), nn.AvgPool2d(14), nn.Flatten()),
    )


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU6()]


def _inverted(inputs: int, outputs: int, stride: int, expansion: int) -> nn.Module:
    wide = inputs * expansion
    widen = _normed(inputs, wide, 1) if expansion > 1 else []
    layers = [*widen, *_normed(wide, wide, 3, stride, groups=wide), *_normed(wide, outputs, 1)[:2]]
    return (Residual if stride == 1 and inputs == outputs else nn.Sequential)(*layers)


def mobilenet_v2() -> nn.Module:
    """Create MobileNetV2 for images of 224 × 224 × 3.

    >>> sum(p.numel() for p in mobilenet_v2().parameters())
    3504872
    """
    layers, before = _normed(3, 32, 3, 2), 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2))
    for expansion, channels, blocks, first_stride in (*stages, (6, 320, 1, 1)):
        for block in range(blocks):
            layers.append(_inverted(before, channels, first_stride if block == 0 else 1, expansion))
            before = channels
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000))
    return nn.Sequential(*layers, *_normed(320, 1280, 1), *head)


MNN: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "Lenet": (lenet, (1, 28, 28)),
    "Alexnet": (alexnet, (3, 224, 224)),
    "Mobilenet": (mobilenet_v2, (3, 224, 224)),
    "Squeezenet": (squeezenet, (3, 224, 224)),
    "GoogLenet": (googlenet, (3, 224, 224)),
}
"""Networks and the shapes of their images, keyed by the names used in the measurements."""

NAMED = {make.__name__: (make, shape) for make, shape in MNN.values()}
"""The networks in `MNN`, keyed by the names of the functions that create them."""
