"""Data sets in the format of the LEAF benchmark: JSON files of examples per user.

LEAF was published by Caldas et al. 2018 (arXiv:1812.01097). Its files are:

    FOLDER/train/*.json, FOLDER/test/*.json
    {"users": [NAME, …], "num_samples": [COUNT, …], "user_data": {NAME: {"x": […], "y": […]}, …}}

The first example determines the kind of data:

=============  ====================================  ========================================  =======
first ``x``    as in                                 is converted to                           classes
=============  ====================================  ========================================  =======
784 numbers    FEMNIST                               an image of 1×28×28                       62
other numbers  the synthetic data                    a vector                                  max + 1
five strings   Sent140: id, date, query, user, text  25 words                                  2
a file's name  CelebA: pictures beside the JSON      a photo of 3 × ``data.image_size``²       2
a string       Shakespeare: 80 letters               its letters; the label is the next one    80
=============  ====================================  ========================================  =======

The user of every training example is recorded, so that ``partition = "natural"`` can assign the data of one
user to each client. All files are loaded before a run starts; if a data set does not fit in memory, sample it
with LEAF's own script.
"""

from __future__ import annotations

import contextlib
import re
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError, as_config_error
from edgefl.files import read as read_file
from edgefl.learning.dataset import Dataset, Examples, Images, Tokens
from edgefl.validation import from_json

MAX_BYTES = 4 << 30

Labels = NDArray[np.int64]

WORDS = 25
"""Number of words per tweet, as in LEAF. Shorter tweets are padded at the front, so that the last input of a
recurrent network is a word; LEAF pads them at the end."""
VOCABULARY = 10_000
"""Number of words that have a token of their own: the most frequent words in the training tweets, as in
FedBuff's appendix B.1."""
PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
MAX_LABELS = 100_000
"""Exclusive upper bound on labels if the number of classes is not known in advance."""
LETTERS = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
"""The 80 characters of LEAF's Shakespeare data."""
PHOTO = re.compile(r"[\w-]+\.(jpg|jpeg|png)", re.IGNORECASE)
_WORD = re.compile(r"[\w']+|[.,!?;]")


class Kind(ABC):
    """A kind of data set, such as images or tweets; the module's docstring lists all kinds."""

    name: str
    classes: int | None = None
    """Number of classes; None if it is one more than the largest label."""

    @abstractmethod
    def parse(self, values: list[Any], where: str) -> Any:
        """Check and convert the inputs of one user; ``where`` (file and user) is for error messages."""

    def labels(self, values: list[Any], where: str) -> Labels:
        """Check and convert the labels of one user: whole numbers, which may be written as 1.0 or "1"."""
        top = MAX_LABELS if self.classes is None else self.classes
        numbers = []
        for value in values:
            whole = isinstance(value, float) and value.is_integer()
            digits = isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value)
            number = int(value) if whole or digits else value
            if type(number) is not int or not 0 <= number < top:
                got = repr(value)[:40]
                raise ConfigError(f"{where}: a label must be a whole number from 0 to {top - 1} (got {got})")
            numbers.append(number)
        return np.array(numbers, np.int64)

    @abstractmethod
    def finish(self, train: list[Any], test: list[Any]) -> tuple[Examples, Examples]:
        """Concatenate the inputs of all users; return the training and the test inputs."""


class Numbers(Kind):
    """Vectors of numbers; a vector of 784 numbers is a FEMNIST image."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.name = "femnist" if width == 784 else "numbers"
        self.classes = 62 if width == 784 else None

    def parse(self, values: list[Any], where: str) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = np.empty(0, np.float32)
        with contextlib.suppress(TypeError, ValueError, OverflowError), np.errstate(over="ignore"):
            found = np.array(values)
            if found.dtype.kind in "iuf":  # astype() would also parse strings such as "1.5"
                rows = found.astype(np.float32)
        if rows.shape != (len(values), self._width) or not np.isfinite(rows).all():
            raise ConfigError(f"{where}: each x must be {self._width} finite numbers")
        return rows

    def finish(self, train: list[Any], test: list[Any]) -> tuple[Examples, Examples]:
        together = _images if self._width == 784 else np.concatenate
        return together(train), together(test)


def _images(parts: list[NDArray[np.float32]]) -> Examples:
    """Join images, and convert them to bytes if this is lossless: LEAF writes a byte k as k/255."""
    rows = np.concatenate(parts).reshape(-1, 1, 28, 28)
    levels = np.rint(rows * np.float32(255.0))
    if rows.min() >= 0.0 and rows.max() <= 1.0 and float(np.abs(rows * 255.0 - levels).max()) < 1e-3:
        return Images(levels.astype(np.uint8), top=255, mean=(0.0,), std=(1.0,))
    return rows


class Tweets(Kind):
    """Tweets as tokens: the most frequent words of the training tweets, numbered in order of frequency."""

    name = "sent140"
    classes = 2

    def parse(self, values: list[Any], where: str) -> list[list[str]]:
        texts = [value[4] if isinstance(value, list) and len(value) == 5 else None for value in values]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{where}: each x must be five strings, the last one the tweet")
        return [_WORD.findall(str(text).lower())[:WORDS] for text in texts]

    def finish(self, train: list[Any], test: list[Any]) -> tuple[Examples, Examples]:
        counts = Counter(word for user in train for tweet in user for word in tweet)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:VOCABULARY]
        numbers = {word: number for number, (word, _) in enumerate(ranked, FIRST_WORD)}

        def tokens(users: list[list[list[str]]]) -> Tokens:
            tweets = [tweet for user in users for tweet in user]
            out = np.full((len(tweets), WORDS), PADDING, np.uint16)
            for row, tweet in enumerate(tweets):
                out[row, WORDS - len(tweet) :] = [numbers.get(word, UNKNOWN) for word in tweet]
            return Tokens(out)

        return tokens(train), tokens(test)


class Lines(Kind):
    """Lines of text as tokens, one token per character; the label is the next character."""

    name = "shakespeare"
    classes = len(LETTERS)

    def __init__(self, length: int) -> None:
        self._length = length
        self._numbers = {letter: number for number, letter in enumerate(LETTERS)}

    def parse(self, values: list[Any], where: str) -> NDArray[np.uint8]:
        out = np.empty((len(values), self._length), np.uint8)
        for row, value in enumerate(values):
            if not isinstance(value, str) or len(value) != self._length:
                raise ConfigError(f"{where}: each x must be {self._length} letters (got {repr(value)[:40]})")
            out[row] = [self._number(letter, "a letter of x", where) for letter in value]
        return out

    def labels(self, values: list[Any], where: str) -> Labels:
        return np.array([self._number(value, "a label", where) for value in values], np.int64)

    def finish(self, train: list[Any], test: list[Any]) -> tuple[Examples, Examples]:
        return Tokens(np.concatenate(train)), Tokens(np.concatenate(test))

    def _number(self, letter: Any, what: str, where: str) -> int:
        number = self._numbers.get(letter) if isinstance(letter, str) else None
        if number is None:
            raise ConfigError(
                f"{where}: {what} must be one of LEAF's {len(LETTERS)} letters (got {repr(letter)[:40]})"
            )
        return number


PHOTO_FOLDERS = ("raw/img_align_celeba", "img_align_celeba", "images")
"""Possible names of the folder with the pictures, beside ``train`` and ``test``; LEAF uses the first one."""
HALF = (0.5, 0.5, 0.5)


class Photos(Kind):
    """Square photos of ``size`` × ``size`` pixels.

    The shorter side of a photo is scaled to ``size`` pixels, and the longer side is then cropped. Pixel
    values are normalised with a mean and a standard deviation of 0.5. FedBuff (B.1) uses a size of 32, and
    LEAF uses 84.
    """

    name = "celeba"
    classes = 2

    def __init__(self, folder: Path, size: int) -> None:
        self._size = size
        found = [folder / name for name in PHOTO_FOLDERS if (folder / name).is_dir()]
        if not found:
            raise ConfigError(f"{folder}: CelebA's pictures not found; searched {', '.join(PHOTO_FOLDERS)}")
        self._pictures = found[0]

    def parse(self, values: list[Any], where: str) -> NDArray[np.uint8]:
        out = np.empty((len(values), 3, self._size, self._size), np.uint8)
        for row, value in enumerate(values):
            if not isinstance(value, str) or not PHOTO.fullmatch(value):
                raise ConfigError(f"{where}: each x must be the name of a picture (got {repr(value)[:40]})")
            out[row] = self._picture(self._pictures / value, where)
        return out

    def finish(self, train: list[Any], test: list[Any]) -> tuple[Examples, Examples]:
        pictures = map(np.concatenate, (train, test))
        first, second = (Images(part, top=255, mean=HALF, std=HALF) for part in pictures)
        return first, second

    def _picture(self, file: Path, where: str) -> NDArray[np.uint8]:
        from PIL import Image  # imported only for photos, because every forked client inherits the modules

        faults = OSError, ValueError, SyntaxError, Image.DecompressionBombError
        with as_config_error(f"{where}: {file.name} cannot be read", *faults), Image.open(file) as photo:
            whole = photo.convert("RGB")
        scale = self._size / min(whole.size)
        width, height = (max(self._size, round(side * scale)) for side in whole.size)
        left, top = (width - self._size) // 2, (height - self._size) // 2
        square = whole.resize((width, height), Image.Resampling.BILINEAR)
        square = square.crop((left, top, left + self._size, top + self._size))
        return np.asarray(square, np.uint8).transpose(2, 0, 1)


SPLITS = ("train", "test")


class _File(msgspec.Struct):
    users: list[str]
    num_samples: list[int]
    user_data: dict[str, msgspec.Raw]


class _User(msgspec.Struct):
    x: list[Any]
    y: list[Any]


def find_leaf(folder: Path) -> list[Path] | None:
    """Return [``folder``] if it contains LEAF's two folders, each with at least one JSON file; else None."""
    return [folder] if all(any((folder / split).glob("*.json")) for split in SPLITS) else None


def load_leaf(folder: Path, image_size: int) -> Dataset:
    """Load the data set from the folder that `find_leaf` returned.

    Photos are converted to squares of ``image_size`` pixels per side.
    If a file is not in LEAF's format, raises a `ConfigError` of one line that names the file and the user.
    """
    kind: Kind | None = None
    examples: dict[str, list[Any]] = {split: [] for split in SPLITS}
    labels: dict[str, list[Labels]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        for where, user in _users(folder / split):
            kind = kind or kind_of(user.x[0], where, folder, image_size)
            examples[split].append(kind.parse(user.x, where))
            labels[split].append(kind.labels(user.y, where))
        if not labels[split]:
            raise ConfigError(f"{folder / split}: no user has an example")
    assert kind is not None
    train_x, test_x = kind.finish(examples["train"], examples["test"])
    train_y, test_y = (np.concatenate(labels[split]) for split in SPLITS)
    counts = [len(part) for part in labels["train"]]
    classes = kind.classes or 1 + int(max(train_y.max(), test_y.max()))
    owners = np.repeat(np.arange(len(counts)), counts)
    return Dataset.of(f"leaf-{kind.name}", ((train_x, train_y), (test_x, test_y)), classes, owners)


def _users(folder: Path) -> Iterator[tuple[str, _User]]:
    """Yield the users who have examples, in the order of the files.

    Each item is a text with the file and the user's name, for error messages, and the user's data.
    """
    seen: set[str] = set()
    for file in sorted(folder.glob("*.json")):
        found = _read(file)
        for user, count in zip(found.users, found.num_samples, strict=True):
            where = f"{file}: user {user!r}"
            if user in seen:
                raise ConfigError(f"{where} is listed twice in {folder.name}")
            seen.add(user)
            if user not in found.user_data:
                raise ConfigError(f"{where} is listed in users, but not in user_data")
            data: _User = from_json(found.user_data[user], f"{where}: must hold lists x and y", _User)
            if not len(data.x) == len(data.y) == count:
                got = f"{len(data.x)} and {len(data.y)}"
                raise ConfigError(f"{where}: num_samples is {count}, but x and y have {got} entries")
            if count:
                yield where, data


def _read(file: Path) -> _File:
    what = f"{file} is not in LEAF's format"
    with as_config_error(what, OSError):
        found: _File = from_json(read_file(file, MAX_BYTES), what, _File)
    if len(found.users) != len(found.num_samples):
        got = f"{len(found.users)} users and {len(found.num_samples)} counts"
        raise ConfigError(f"{file}: users and num_samples must have the same length (got {got})")
    return found


def kind_of(first: Any, where: str, folder: Path, image_size: int) -> Kind:
    """Return the kind of the data set, which its first example determines."""
    if isinstance(first, list) and first and all(type(item) in (int, float) for item in first):
        return Numbers(len(first))
    if isinstance(first, list) and len(first) == 5 and all(isinstance(item, str) for item in first):
        return Tweets()
    if isinstance(first, str) and first:
        return Photos(folder, image_size) if PHOTO.fullmatch(first) else Lines(len(first))
    raise ConfigError(
        f"{where}: x must hold numbers, tweets of five strings, names of photos or lines of letters "
        f"(got {repr(first)[:60]})"
    )
