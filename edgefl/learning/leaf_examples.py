"""What LEAF's examples are: images of numbers, tweets, lines of plays, names of photos.

=============  ====================================  ========================================  =======
first ``x``    as in                                 becomes                                   classes
=============  ====================================  ========================================  =======
784 numbers    FEMNIST                               an image of 1×28×28                       62
other numbers  the synthetic data                    a vector                                  as seen
five strings   Sent140: id, date, query, user, text  25 words                                  2
a file's name  CelebA                                a photo of 3 × ``data.image_size``²       2
a string       Shakespeare: 80 letters               as many letters; the label is the next    80
=============  ====================================  ========================================  =======
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.learning.dataset import Examples, Images, Tokens

Labels = NDArray[np.int64]
Finished = tuple[Examples, Examples, tuple[int, ...]]
"""Training inputs, test inputs, and the shape of one."""

WORDS = 25
"""Words of a tweet: LEAF's models see so many. Shorter ones are filled up in front, so that the last thing
that a recurrent network sees is a word; LEAF fills up at the end, where it forgets much of what it saw."""
VOCABULARY = 10_000
"""Most frequent words of the training tweets that have a number of their own; FedBuff's B.1 has as many."""
PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
MOST_LABELS = 100_000
"""Labels of data whose classes are not known."""
LETTERS = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
"""The 80 letters of LEAF's Shakespeare."""
PHOTO = re.compile(r"[\w-]+\.(jpg|jpeg|png)", re.IGNORECASE)
_WORD = re.compile(r"[\w']+|[.,!?;]")


class Kind(Protocol):
    """One of the kinds of the table above."""

    @property
    def name(self) -> str: ...
    @property
    def classes(self) -> int | None:
        """None: as many as labels were seen."""

    def take(self, values: list[Any], where: str) -> Any:
        """One user's inputs, checked."""

    def labels(self, values: list[Any], where: str) -> Labels:
        """One user's labels, checked."""

    def finish(self, train: list[Any], test: list[Any]) -> Finished:
        """All users' inputs together."""


def whole_labels(values: Sequence[Any], classes: int | None, where: str) -> Labels:
    """Labels as LEAF writes them: whole numbers, also as 1.0 or "1"."""
    top = MOST_LABELS if classes is None else classes
    numbers = []
    for value in values:
        number = value
        if (isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value)) or (
            isinstance(value, float) and value.is_integer()
        ):
            number = int(value)
        if type(number) is not int or not 0 <= number < top:
            got = repr(value)[:40]
            raise ConfigError(f"{where}: a label must be a whole number from 0 to {top - 1} (got {got})")
        numbers.append(number)
    return np.array(numbers, np.int64)


class Numbers:
    """Vectors; 784 numbers are an image, as FEMNIST's."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.name = "femnist" if width == 784 else "numbers"
        self.classes = 62 if width == 784 else None

    def take(self, values: list[Any], where: str) -> NDArray[np.float32]:
        try:
            found = np.array(values)
            numbers = found.dtype.kind in "iuf"  # numpy would also read "1.5" as a number
            with np.errstate(over="ignore"):
                rows = found.astype(np.float32) if numbers else np.empty(0, np.float32)
        except (TypeError, ValueError, OverflowError):
            rows = np.empty(0, np.float32)
        if rows.shape != (len(values), self._width) or not np.isfinite(rows).all():
            raise ConfigError(f"{where}: each x must be {self._width} finite numbers")
        return rows

    def labels(self, values: list[Any], where: str) -> Labels:
        return whole_labels(values, self.classes, where)

    def finish(self, train: list[Any], test: list[Any]) -> Finished:
        if self._width != 784:
            return np.concatenate(train), np.concatenate(test), (self._width,)
        return _images(train), _images(test), (1, 28, 28)


def _images(parts: list[NDArray[np.float32]]) -> Examples:
    """As bytes where that loses nothing: LEAF writes k/255."""
    rows = np.concatenate(parts).reshape(-1, 1, 28, 28)
    levels = np.rint(rows * np.float32(255.0))
    if rows.min() >= 0.0 and rows.max() <= 1.0 and float(np.abs(rows * 255.0 - levels).max()) < 1e-3:
        return Images(levels.astype(np.uint8), top=255, mean=(0.0,), std=(1.0,))
    return rows


class Tweets:
    """The words of each tweet by number: the training part's most frequent, in the order of frequency."""

    name: ClassVar[str] = "sent140"
    classes: ClassVar[int] = 2

    def take(self, values: list[Any], where: str) -> list[list[str]]:
        texts = [value[4] if isinstance(value, list) and len(value) == 5 else None for value in values]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{where}: each x must be five strings, the last one the tweet")
        return [_WORD.findall(str(text).lower())[:WORDS] for text in texts]

    def labels(self, values: list[Any], where: str) -> Labels:
        return whole_labels(values, self.classes, where)

    def finish(self, train: list[Any], test: list[Any]) -> Finished:
        counts = Counter(word for user in train for tweet in user for word in tweet)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:VOCABULARY]
        numbers = {word: number for number, (word, _) in enumerate(ranked, FIRST_WORD)}

        def tokens(users: list[list[list[str]]]) -> Tokens:
            tweets = [tweet for user in users for tweet in user]
            out = np.full((len(tweets), WORDS), PADDING, np.uint16)
            for row, tweet in enumerate(tweets):
                out[row, WORDS - len(tweet) :] = [numbers.get(word, UNKNOWN) for word in tweet]
            return Tokens(out)

        return tokens(train), tokens(test), (WORDS,)


class Lines:
    """Letters by number; the label is the letter that comes next."""

    name: ClassVar[str] = "shakespeare"
    classes: ClassVar[int] = len(LETTERS)

    def __init__(self, length: int) -> None:
        self._length = length
        self._numbers = {letter: number for number, letter in enumerate(LETTERS)}

    def take(self, values: list[Any], where: str) -> NDArray[np.uint8]:
        out = np.empty((len(values), self._length), np.uint8)
        for row, value in enumerate(values):
            if not isinstance(value, str) or len(value) != self._length:
                raise ConfigError(f"{where}: each x must be {self._length} letters (got {repr(value)[:40]})")
            out[row] = [self._number(letter, "a letter of x", where) for letter in value]
        return out

    def labels(self, values: list[Any], where: str) -> Labels:
        return np.array([self._number(value, "a label", where) for value in values], np.int64)

    def finish(self, train: list[Any], test: list[Any]) -> Finished:
        return Tokens(np.concatenate(train)), Tokens(np.concatenate(test)), (self._length,)

    def _number(self, letter: Any, what: str, where: str) -> int:
        number = self._numbers.get(letter) if isinstance(letter, str) else None
        if number is None:
            raise ConfigError(
                f"{where}: {what} must be one of LEAF's {len(LETTERS)} (got {repr(letter)[:40]})"
            )
        return number
