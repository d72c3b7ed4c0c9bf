"""The recurrent networks of LEAF's text tasks. Inputs are tokens: int64 of shape (batch, length)."""

from __future__ import annotations

from torch import Tensor, nn

from edgefl.errors import ConfigError
from edgefl.learning.leaf_examples import FIRST_WORD, VOCABULARY

Shape = tuple[int, ...]


class _LastOutput(nn.Module):
    """Embedding and stacked LSTM; gives the last layer's output after the last token."""

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
    """FedBuff's classifier of tweets (Nguyen et al. 2022, B.1), LEAF's with more words and dropout.

    An embedding of 10,000 words (and two more numbers, for padding and for all others) in 300 dimensions,
    two LSTM layers of 100, dropout 0.1 between and after them, linear layers to 128 and to the classes. The
    paper's embedding is GloVe's and fixed; here it is learned with the rest, since no vectors come with the
    data.

    >>> sum(p.numel() for p in lstm_sent140((25,), 2).parameters())
    3255386
    """
    _check(input_shape, vocabulary=vocabulary, embedding=embedding, hidden=hidden, linear=linear)
    _rate(dropout)
    return nn.Sequential(
        _LastOutput(vocabulary, embedding, hidden, dropout),
        nn.Dropout(dropout),
        nn.Linear(hidden, linear),
        nn.Linear(linear, classes),
    )


def lstm_shakespeare(input_shape: Shape, classes: int, *, embedding: int = 8, hidden: int = 256) -> nn.Module:
    """LEAF's next-letter model (Caldas et al. 2018): an embedding of 8, two LSTM layers of 256, one linear.

    >>> sum(p.numel() for p in lstm_shakespeare((80,), 80).parameters())
    819920
    """
    _check(input_shape, embedding=embedding, hidden=hidden)
    return nn.Sequential(_LastOutput(classes, embedding, hidden, 0.0), nn.Linear(hidden, classes))


def _check(input_shape: Shape, **sizes: object) -> None:
    if len(input_shape) != 1:
        raise ConfigError(f"model: a text model needs tokens of shape (length,) (got {input_shape})")
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"model.args.{name} must be a positive whole number (got {size})")


def _rate(dropout: object) -> None:
    if not (isinstance(dropout, int | float) and 0.0 <= dropout < 1.0):
        raise ConfigError(f"model.args.dropout must be in [0, 1) (got {dropout})")
