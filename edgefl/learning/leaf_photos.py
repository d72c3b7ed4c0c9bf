"""CelebA's photos: LEAF's JSON holds their names, the pictures are files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgefl.errors import ConfigError
from edgefl.learning.dataset import Images
from edgefl.learning.leaf_examples import PHOTO, Finished, Labels, whole_labels

FOLDERS = ("raw/img_align_celeba", "img_align_celeba", "images")
"""Where the pictures are looked for, beside ``train`` and ``test``; the first is where LEAF has them."""
HALF = (0.5, 0.5, 0.5)


class Photos:
    """Squares of ``size`` pixels: the shorter side is scaled to that, the middle of the other is kept.

    Normalised with mean and deviation 0.5 (FedBuff, B.1, which has 32 pixels; LEAF squeezes to 84 × 84).
    """

    name: ClassVar[str] = "celeba"
    classes: ClassVar[int] = 2

    def __init__(self, folder: Path, size: int) -> None:
        self._size = size
        found = [folder / name for name in FOLDERS if (folder / name).is_dir()]
        if not found:
            raise ConfigError(f"{folder}: CelebA's pictures not found; looked for {', '.join(FOLDERS)}")
        self._pictures = found[0]

    def take(self, values: list[Any], where: str) -> NDArray[np.uint8]:
        out = np.empty((len(values), 3, self._size, self._size), np.uint8)
        for row, value in enumerate(values):
            if not isinstance(value, str) or not PHOTO.fullmatch(value):
                raise ConfigError(f"{where}: each x must be the name of a picture (got {repr(value)[:40]})")
            out[row] = self._picture(self._pictures / value, where)
        return out

    def labels(self, values: list[Any], where: str) -> Labels:
        return whole_labels(values, self.classes, where)

    def finish(self, train: list[Any], test: list[Any]) -> Finished:
        def images(parts: list[NDArray[np.uint8]]) -> Images:
            return Images(np.concatenate(parts), top=255, mean=HALF, std=HALF)

        return images(train), images(test), (3, self._size, self._size)

    def _picture(self, file: Path, where: str) -> NDArray[np.uint8]:
        try:
            with Image.open(file) as photo:
                whole = photo.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ConfigError(f"{where}: {file.name} cannot be read: {error}") from None
        scale = self._size / min(whole.size)
        width, height = (max(self._size, round(side * scale)) for side in whole.size)
        left, top = (width - self._size) // 2, (height - self._size) // 2
        square = whole.resize((width, height), Image.Resampling.BILINEAR)
        square = square.crop((left, top, left + self._size, top + self._size))
        return np.asarray(square, np.uint8).transpose(2, 0, 1)
