"""Small data sets in LEAF's format: folders for training and test, each with files of some users."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

from PIL import Image


def femnist(rng: random.Random, user: int) -> tuple[Any, Any]:
    return [rng.randrange(256) / 255 for _ in range(784)], rng.randrange(62)


def numbers(rng: random.Random, user: int) -> tuple[Any, Any]:
    return [rng.gauss(0, 1) for _ in range(60)], rng.randrange(5)


def sent140(rng: random.Random, user: int) -> tuple[Any, Any]:
    label = rng.randrange(2)
    words = rng.choices(["good", "great", "yay"] if label else ["bad", "sad", "boo"], k=3)
    text = " ".join([f"@user{user}", *words, "today!", rng.choice(["Really?", "...", ""])])
    return ["1467810672", "Mon Apr 06 22:19:49 PDT 2009", "NO_QUERY", f"user{user}", text], label


def shakespeare(rng: random.Random, user: int) -> tuple[Any, Any]:
    start = rng.randrange(26)
    letters = (string.ascii_lowercase * 5)[start : start + 81]
    return letters[:80], letters[80]


def celeba(rng: random.Random, user: int) -> tuple[Any, Any]:
    return f"{rng.randrange(40):06d}.png", float(rng.randrange(2))


KINDS = {each.__name__: each for each in (femnist, numbers, sent140, shakespeare, celeba)}


def write_leaf(folder: Path, kind: str, users: int = 6, files: int = 2) -> Path:
    """Write ``users/files`` users per file; user i has 4 + i training examples and 2 test examples."""
    rng = random.Random(0)
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for file in range(files):
            data = {}
            for user in range(file, users, files):
                count = 4 + user if split == "train" else 2
                examples = [KINDS[kind](rng, user) for _ in range(count)]
                data[f"user-{user}"] = {"x": [x for x, _ in examples], "y": [y for _, y in examples]}
            write(folder, split, file, data)
    if kind == "celeba":
        pictures = folder / "raw" / "img_align_celeba"
        pictures.mkdir(parents=True)
        for number in range(40):
            Image.new("RGB", (178, 218), (number, 2 * number, 100)).save(pictures / f"{number:06d}.png")
    return folder


def write(folder: Path, split: str, file: int, data: dict[str, Any], **changes: Any) -> Path:
    counts = [len(held["y"]) for held in data.values()]
    content = {"users": list(data), "num_samples": counts, "user_data": data, **changes}
    path = folder / split / f"all_data_{file}_niid_0_keep_0_{split}_9.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
