"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from edgefl.errors import RunError


def write_text(path: Path, text: str) -> Path:
    """`write_bytes` in UTF-8."""
    return write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> Path:
    """Write ``path`` at once (a new file, then a rename). Raises `RunError` if that cannot be done."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(content)
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise RunError(f"{path} cannot be written: {error.strerror}") from None
    return path
