"""Finds the shared library of the CUDA kernels, or builds it with nvcc."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgefl.errors import ConfigError
from edgefl.files import cache_folder

DEVICE_NODES = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of the driver. Checking them creates no CUDA context, which would not survive a fork."""
FLAGS = ("-O3", "--fmad=false", "-std=c++17", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden")


def driver_present() -> bool:
    """Return True if this machine has a GPU driver, without initialising CUDA."""
    return any(os.path.exists(node) for node in DEVICE_NODES)


def sources() -> Path | None:
    """Return the folder with cuda.cu, in the repository or the installed package; None if it is missing."""
    spec = importlib.util.find_spec("edgefl._kernels_src")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in (*map(Path, folders), Path(__file__).parents[2] / "kernels"):
        if (folder / "cuda.cu").is_file():
            return folder
    return None


def problem() -> str | None:
    """Return the reason why the CUDA back end cannot run here; None if no reason is known.

    This does not initialise CUDA.
    """
    if not driver_present():
        return "no CUDA device (no NVIDIA driver on this machine)"
    try:
        built = existing() is not None
    except ConfigError as error:
        return f"{error}; or set EDGEFL_CUDA_LIBRARY to the library's path"
    if not built and shutil.which("nvcc") is None:
        return "its library is not built and nvcc is not on PATH; EDGEFL_CUDA_LIBRARY can set its path"
    return None


def existing() -> Path | None:
    """Return the path in EDGEFL_CUDA_LIBRARY, else the library built from these sources, else None.

    Raises `ConfigError` if EDGEFL_CUDA_LIBRARY is not set and the user has no home folder.
    """
    if named := os.environ.get("EDGEFL_CUDA_LIBRARY"):
        return Path(named)
    target = _target()
    return target if target is not None and target.is_file() else None


def build(target: Path, arch: str = "native") -> None:
    """Compile kernels/cuda.cu to ``target``, in about 30 s. Raises `ConfigError` with nvcc's errors.

    ``arch`` is nvcc's -arch option: ``native`` for this machine's GPUs, ``sm_90`` for an H100, and so on.
    """
    folder, nvcc = sources(), shutil.which("nvcc")
    if folder is None or nvcc is None:
        raise ConfigError(f"the CUDA kernels cannot be built: {'nvcc' if folder else 'cuda.cu'} not found")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "made.so"
        command: Sequence[str] = [nvcc, *FLAGS, f"-arch={arch}", "-o", str(made), str(folder / "cuda.cu")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"the CUDA kernels do not build: {(done.stderr or done.stdout).strip()[-400:]}")
        made.replace(target)  # this is atomic, so another process never sees a partial file


def load(abi: int) -> ctypes.CDLL:
    """Load the library, after building it if necessary. Raises `ConfigError` if it cannot be used."""
    path = existing()
    if path is None:
        path = _target()
        if path is None:
            raise ConfigError("the CUDA kernels' source kernels/cuda.cu does not exist")
        build(path)
    try:
        library = ctypes.CDLL(str(path))
        built = library.efc_abi()
    except (OSError, AttributeError) as error:
        raise ConfigError(f"the CUDA kernels' library {path} does not load: {error}") from None
    if built != abi:
        raise ConfigError(f"the CUDA kernels' library {path} has ABI {built}, this edgefl needs {abi}")
    return library


def _target() -> Path | None:
    """Return the path for the library built from these sources, whose digest is part of its name."""
    if (folder := sources()) is None:
        return None
    digest = hashlib.sha256()
    for name in ("cuda.cu", "cuda_kernels.cuh", "edgefl_kernels.h"):
        digest.update((folder / name).read_bytes())
    return cache_folder() / f"libedgefl_cuda-{digest.hexdigest()[:16]}.so"
