"""Networks that were published in papers.

Their inputs are images of shape (batch, channels, height, width), or int64 tokens of shape (batch, length).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor, nn

from edgefl.errors import ConfigError
from edgefl.learning.leaf import FIRST_WORD, VOCABULARY

Shape = tuple[int, ...]


def cnn_fedbuff(input_shape: Shape, classes: int, *, width: int = 32, dropout: float = 0.1) -> nn.Module:
    """Create FedBuff's CNN for CIFAR-10 and CelebA (Nguyen et al. 2022, B.1): LEAF's CNN with GroupNorm.

    The network consists of four blocks, a dropout and one linear layer. Each block is a 3×3 convolution with
    ``width`` channels (stride 1, padding 2), a GroupNorm with one channel per group, a ReLU and a 2×2 max
    pool. The paper does not state the width, the kernel size or the number of groups; the values here are
    taken from its simulator, FLSim. FLSim uses one GroupNorm for all four blocks, whereas each block has its
    own here. The network has 31,786 parameters for 32×32×3 images and ten classes.

    >>> sum(p.numel() for p in cnn_fedbuff((3, 32, 32), 10).parameters())
    31786
    """
    _positive("width", width)
    _rate("dropout", dropout)
    layers: list[nn.Module] = []
    for before in (_image(input_shape), width, width, width):
        layers += [nn.Conv2d(before, width, 3, padding=2), nn.GroupNorm(width, width)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    latent = _latent(input_shape, width, lambda side: (side + 2) // 2, 4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(latent, classes))


def cnn_defedavg(
    input_shape: Shape, classes: int, *, channels: tuple[int, int] = (32, 64), hidden: int = 512
) -> nn.Module:
    """Create DeFedAvg's CNN: two 5×5 convolutions with 2×2 max pools, and two linear layers.

    It is described in section 4.1.1 of Wang et al. 2024. The convolutions are unpadded, because only then do
    the linear layers have 1,024 inputs for 28×28×1 and 1,600 inputs for 32×32×3 images, as in the paper.
    The 582,026 parameters for 28×28×1 images need 2.33 MB = 2.22 MiB (2.2 MB in the paper), and the 878,538
    parameters for 32×32×3 images need 3.51 MB = 3.35 MiB (3.53 MB in the paper). The cost of a step in the
    paper, 17.0 and 31.4 MFLOP, is the cost of one example with four operations per multiply-add (4.27 and
    7.83 million multiply-adds), not the cost of a batch of ten examples.

    >>> [sum(p.numel() for p in cnn_defedavg(s, 10).parameters()) for s in ((1, 28, 28), (3, 32, 32))]
    [582026, 878538]
    """
    if len(channels) != 2:
        raise ConfigError(f"model.args.channels must be two numbers (got {list(channels)})")
    for number in channels:
        _positive("channels", number)
    _positive("hidden", hidden)
    latent = _latent(input_shape, channels[1], lambda side: (side - 4) // 2, 2)
    return _two_and_two(_image(input_shape), channels, latent, hidden, classes)


def cnn_celeba(input_shape: Shape, classes: int, *, width: int = 32) -> nn.Module:
    """Create LEAF's CNN for CelebA (Caldas et al. 2018), with GroupNorm instead of BatchNorm as in FedBuff.

    The network consists of four blocks and one linear layer. Each block is a 3×3 convolution with ``width``
    channels (``same`` padding), a GroupNorm with one channel per group, a 2×2 max pool that rounds odd sizes
    up, and a ReLU. The network has 31,202 parameters for 84×84×3 images and two classes.

    >>> sum(p.numel() for p in cnn_celeba((3, 84, 84), 2).parameters())
    31202
    """
    _positive("width", width)
    layers: list[nn.Module] = []
    for before in (_image(input_shape), width, width, width):
        layers += [nn.Conv2d(before, width, 3, padding="same"), nn.GroupNorm(width, width)]
        layers += [nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()]
    latent = _latent(input_shape, width, lambda side: (side + 1) // 2, 4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(latent, classes))


def cnn_femnist(input_shape: Shape, classes: int, *, hidden: int = 2048) -> nn.Module:
    """Create LEAF's CNN for FEMNIST (Caldas et al. 2018): two convolutions with max pools, two linear layers.

    The convolutions are 5×5 with ``same`` padding and have 32 and 64 channels; the max pools are 2×2. The
    network has 6,603,710 parameters for 28×28 images and 62 classes.

    >>> sum(p.numel() for p in cnn_femnist((1, 28, 28), 62).parameters())
    6603710
    """
    _positive("hidden", hidden)
    latent = _latent(input_shape, 64, lambda side: side // 2, 2)
    return _two_and_two(_image(input_shape), (32, 64), latent, hidden, classes, padding="same")


def _two_and_two(
    before: int, channels: tuple[int, int], latent: int, hidden: int, classes: int, padding: int | str = 0
) -> nn.Module:
    """Create a CNN of two 5×5 convolutions, each with a ReLU and a 2×2 max pool, and two linear layers."""
    layers: list[nn.Module] = []
    for one, after in pairwise((before, *channels)):
        layers += [nn.Conv2d(one, after, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
    head = (nn.Flatten(), nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    return nn.Sequential(*layers, *head)


def cnn_groupnorm(
    input_shape: Shape,
    classes: int,
    *,
    dropout: tuple[float, float] = (0.3, 0.5),
    hidden: int = 128,
    stages: int = 2,
) -> nn.Module:
    """Create a CNN from FedStaleWeight's experiments (Ma 2024, §6.2), as in the paper's published benchmark.

    A stage consists of two 3×3 convolutions (``same`` padding), each followed by a ReLU and a GroupNorm with
    four channels per group, then a 2×2 max pool and channel dropout (0.3 in the first stage, 0.5 in the
    others). The convolutions have 32, 64 and 128 channels in stages 1, 2 and 3. The stages are followed by a
    linear layer with 128 outputs, a ReLU, a GroupNorm with 32 groups, a dropout of 0.5, and a linear layer
    with one output per class. The benchmark uses two stages for FashionMNIST (468,458 parameters for 28×28×1
    images) and three stages for CIFAR-10 (551,722 parameters for 32×32×3 images).

    >>> sum(p.numel() for p in cnn_groupnorm((1, 28, 28), 10).parameters())
    468458
    >>> sum(p.numel() for p in cnn_groupnorm((3, 32, 32), 10, stages=3).parameters())
    551722
    """
    if len(dropout) != 2:
        raise ConfigError(f"model.args.dropout must be two rates (got {list(dropout)})")
    for rate in dropout:
        _rate("dropout", rate)
    if hidden < 32 or hidden % 32:
        raise ConfigError(
            f"model.args.hidden must be a multiple of 32, the number of GroupNorm's groups (got {hidden})"
        )
    if stages not in (1, 2, 3):
        raise ConfigError(f"model.args.stages must be 1, 2 or 3 (got {stages})")
    layers: list[nn.Module] = []
    widths = [_image(input_shape), *(32 << stage for stage in range(stages))]
    for image, channels in pairwise(widths):
        rate = dropout[0] if channels == 32 else dropout[1]
        for before in (image, channels):
            conv = nn.Conv2d(before, channels, 3, padding="same")
            layers += [conv, nn.ReLU(), nn.GroupNorm(channels // 4, channels)]
        layers += [nn.MaxPool2d(2), nn.Dropout2d(rate)]
    latent = _latent(input_shape, widths[-1], lambda side: side // 2, stages)
    layers += [nn.Flatten(), nn.Linear(latent, hidden), nn.ReLU(), nn.GroupNorm(32, hidden)]
    return nn.Sequential(*layers, nn.Dropout(dropout[1]), nn.Linear(hidden, classes))


def _image(input_shape: Shape) -> int:
    """Return the number of channels in an image of this shape."""
    if len(input_shape) != 3:
        raise ConfigError(f"model: a CNN needs images of shape (channels, height, width) (got {input_shape})")
    return input_shape[0]


def _latent(input_shape: Shape, channels: int, shrink: Callable[[int], int], times: int) -> int:
    """Return the number of elements in the feature map of an image, over all ``channels``.

    The image's height and width are reduced ``times`` times with the function ``shrink``.
    """
    _image(input_shape)
    sides = input_shape[1:]
    for _ in range(times):
        sides = tuple(shrink(side) for side in sides)
    if min(sides) < 1:
        raise ConfigError(f"model: images of shape {input_shape} are too small for this CNN")
    return channels * sides[0] * sides[1]


class _LastOutput(nn.Module):
    """An embedding and a stacked LSTM. It returns the output of the last layer after the last token."""

    def __init__(self, tokens: int, embedding: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True, dropout=dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(self.embedding(tokens))[0]
        return outputs[:, -1]


def lstm_sent140(
    input_shape: Shape,
    classes: int,
    *,
    vocabulary: int = FIRST_WORD + VOCABULARY,
    embedding: int = 300,
    hidden: int = 100,
    linear: int = 128,
    dropout: float = 0.1,
) -> nn.Module:
    """Create FedBuff's tweet classifier (Nguyen et al. 2022, B.1): LEAF's model with more words and dropout.

    The layers are an embedding of 10,000 words (and two more tokens, for padding and unknown words) in 300
    dimensions, two LSTM layers of width 100 with a dropout of 0.1 between and after them, a linear layer with
    128 outputs, and a linear layer with one output per class. The paper uses fixed GloVe embeddings; here the
    embedding is trained, because the data do not include GloVe's vectors.

    >>> sum(p.numel() for p in lstm_sent140((25,), 2).parameters())
    3255386
    """
    _text(input_shape, vocabulary=vocabulary, embedding=embedding, hidden=hidden, linear=linear)
    _rate("dropout", dropout)
    return nn.Sequential(
        _LastOutput(vocabulary, embedding, hidden, dropout),
        nn.Dropout(dropout),
        nn.Linear(hidden, linear),
        nn.Linear(linear, classes),
    )


def lstm_shakespeare(input_shape: Shape, classes: int, *, embedding: int = 8, hidden: int = 256) -> nn.Module:
    """Create LEAF's next-character model (Caldas et al. 2018).

    It consists of an 8-dimensional embedding, two LSTM layers of width 256 and a linear layer.

    >>> sum(p.numel() for p in lstm_shakespeare((80,), 80).parameters())
    819920
    """
    _text(input_shape, embedding=embedding, hidden=hidden)
    return nn.Sequential(_LastOutput(classes, embedding, hidden, 0.0), nn.Linear(hidden, classes))


def _text(input_shape: Shape, **sizes: object) -> None:
    if len(input_shape) != 1:
        raise ConfigError(f"model: a text model needs tokens of shape (length,) (got {input_shape})")
    for name, size in sizes.items():
        _positive(name, size)


def _positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"model.args.{name} must be a positive whole number (got {value})")


def _rate(name: str, value: object) -> None:
    if not (isinstance(value, int | float) and 0.0 <= value < 1.0):
        raise ConfigError(f"model.args.{name} must be in [0, 1) (got {value})")
