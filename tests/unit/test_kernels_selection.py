"""Which back end runs, and what happens where one is absent or older than its Python half."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import edgefl
from edgefl import kernels
from edgefl.errors import ConfigError
from edgefl.kernels import selection

ROOT = Path(edgefl.__file__).parent.parent


def _run(code: str, backend: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "EDGEFL_BACKEND"} | {
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    if backend is not None:
        env["EDGEFL_BACKEND"] = backend
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


_SUM = """
import sys, numpy
from edgefl import kernels
out = numpy.empty(1, numpy.float32)
kernels.weighted_sum(out, None, [numpy.ones(1, numpy.float32)], [2.0])
print(kernels.backend(), out[0], "numba" in sys.modules)
"""


@pytest.mark.parametrize("name", ["c", "numba", "reference"])
def test_the_environment_chooses(name: str) -> None:
    if kernels.backends()[name] != "ok":
        pytest.skip(kernels.backends()[name])
    done = _run(_SUM, name)
    assert done.stdout.split() == [name, "2.0", str(name == "numba")], done.stderr


def test_a_back_end_that_is_absent_or_unknown_fails_loudly() -> None:
    done = _run(_SUM, "fast")
    assert (
        "ConfigError: kernel back end 'fast' not found; available: c, cuda, numba, reference" in done.stderr
    )
    with pytest.raises(
        ConfigError, match=r"^kernel back end 'cc' not found; did you mean 'c'\? available: c, "
    ):
        kernels.backend("cc")
    if kernels.backends()["cuda"] == "ok":
        pytest.skip("CUDA is here")
    done = _run(_SUM, "cuda")
    assert done.returncode == 1
    assert "ConfigError: kernel back end 'cuda' is not available: " in done.stderr
    with pytest.raises(ConfigError, match=r"^kernel back end 'cuda' is not available: "):
        kernels.backend("cuda")


def test_the_environment_is_read_at_each_call_and_beaten_by_the_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGEFL_BACKEND", "reference")
    assert kernels.backend() == "reference"
    monkeypatch.setenv("EDGEFL_BACKEND", "cuda")
    assert kernels.backend("reference") == "reference"
    monkeypatch.setenv("EDGEFL_BACKEND", "")
    assert kernels.backend() == next(n for n in ("c", "numba", "reference") if kernels.backends()[n] == "ok")


def test_importing_starts_nothing_heavy() -> None:
    code = """
import sys, threading, edgefl.kernels
print(threading.active_count(), sorted({"numba", "torch", "zmq"} & set(sys.modules)))
"""
    assert _run(code).stdout.split("\n")[0] == "1 []"


_OTHER = """
import sys, types
sys.modules["edgefl.kernels._c"] = {module}
from edgefl import kernels
print(kernels.backends()["c"])
try:
    print(kernels.backend())
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_stale_extension_is_refused_and_without_a_compiler_numba_runs() -> None:
    """Never passed over in silence: without it everything would still run, only slower."""
    code = _OTHER.format(module="types.SimpleNamespace(ABI=0)")
    why = f"stale: its ABI is 0, this edgefl needs {selection.ABI}; build it again (`make`, or pip install)"
    done = _run(code)
    assert done.stdout.splitlines() == [why, f"ConfigError kernel back end 'c' is {why}"], done.stderr
    assert f"kernel back end 'c' is not available: {why}" in _run(code, "c").stdout
    done = _run(_OTHER.format(module="None"))
    folder = Path(kernels.__file__).parent
    why = f"not built in {folder}: perhaps there was no C compiler; EDGEFL_REQUIRE_C=1 says why"
    assert done.stdout.splitlines() == [why, "numba"], done.stderr


def test_the_extension_is_of_these_sources() -> None:
    """Tests that ran on an older build would prove nothing."""
    if kernels.backends()["c"] != "ok":
        assert os.environ.get("EDGEFL_REQUIRE_C") != "1"
        pytest.skip(kernels.backends()["c"])
    from edgefl.kernels import _c

    sources = ROOT / "kernels"
    if not sources.is_dir():
        pytest.skip("installed without its repository")
    digest = hashlib.sha256()
    for path in sorted([*sources.glob("*.c"), *sources.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    assert digest.hexdigest()[:16] == _c.SOURCES, "build it again: python setup.py build_ext --inplace"
    assert (_c.TILE, _c.SCALE_BLOCK) == (kernels.TILE, kernels.SCALE_BLOCK)


@pytest.mark.slow
def test_numba_converts_halves_without_the_processors_instruction(tmp_path: Path) -> None:
    """Also without AVX: LLVM makes shorter vectors of the eight elements."""
    code = """
import numpy as np
from edgefl import kernels
np.seterr(all='ignore')
bits = np.arange(1 << 16, dtype=np.uint16)
made = []
for backend in ("reference", "numba"):
    out = np.empty(bits.size, np.float32)
    norms = kernels.weighted_sum(out, None, [bits.view(np.float16), bits], [1.0, 0.5], backend)
    made.append((np.where(np.isnan(out), 0, out).tobytes(), np.isnan(out).tobytes(), str(norms)))
print(made[0] == made[1])
"""
    done = _run(code, NUMBA_CPU_FEATURES="+sse2", NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == "True\n", done.stderr
