"""Tests of the choice of a back end, and of back ends that are absent or stale."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import edgefl
from edgefl import kernels
from edgefl.errors import ConfigError
from edgefl.kernels import selection

ROOT = Path(edgefl.__file__).parent.parent


def _run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "EDGEFL_BACKEND"}
    env |= {"PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_environment_chooses_a_back_end_and_only_numbas_imports_numba() -> None:
    names = [name for name in ("c", "reference", "numba") if kernels.backends()[name] == "ok"]
    code = f"""
import os, sys, threading, numpy
from edgefl import kernels
print(threading.active_count(), sorted({{"numba", "torch", "zmq"}} & set(sys.modules)))
for os.environ["EDGEFL_BACKEND"] in {names}:
    out = numpy.empty(1, numpy.float32)
    kernels.weighted_sum(out, None, [numpy.ones(1, numpy.float32)], [2.0])
    print(kernels.backend(), out[0], "numba" in sys.modules)
"""
    done = _run(code)
    expected = [f"{name} 2.0 {name == 'numba'}" for name in names]
    assert done.stdout.splitlines() == ["1 []", *expected], done.stderr


def test_a_back_end_that_is_absent_or_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [
        ("fast", "^kernel back end 'fast' not found; available: c, cuda, numba, reference"),
        ("cc", r"^kernel back end 'cc' not found; did you mean 'c'\? available: c, "),
    ]
    if kernels.backends()["cuda"] != "ok":
        wrong.append(("cuda", "^kernel back end 'cuda' is not available: "))
    for name, message in wrong:
        monkeypatch.setenv("EDGEFL_BACKEND", name)
        for call in (lambda name=name: kernels.backend(name), lambda: kernels.checksum(b"1234")):
            with pytest.raises(ConfigError, match=message):
                call()


def test_the_environment_is_read_at_each_call_without_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_BACKEND", "reference")
    assert kernels.backend() == "reference"
    monkeypatch.setenv("EDGEFL_BACKEND", "cuda")
    assert kernels.backend("reference") == "reference"
    monkeypatch.setenv("EDGEFL_BACKEND", "")
    assert kernels.backend() == next(n for n in ("c", "numba", "reference") if kernels.backends()[n] == "ok")


def test_a_stale_extension_is_refused_and_without_one_numba_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a stale extension were ignored, edgefl would silently be slow."""
    monkeypatch.delenv("EDGEFL_BACKEND", raising=False)
    monkeypatch.setattr(selection, "_loaded", {})
    monkeypatch.setitem(sys.modules, "edgefl.kernels._c", SimpleNamespace(ABI=0))
    why = f"stale: its ABI is 0, this edgefl needs {selection.ABI}; build it again (`make`, or pip install)"
    assert kernels.backends()["c"] == why
    for name, state in ((None, why), ("c", f"not available: {why}")):
        with pytest.raises(ConfigError) as caught:
            kernels.backend(name)
        assert str(caught.value) == f"kernel back end 'c' is {state}"
    monkeypatch.setitem(sys.modules, "edgefl.kernels._c", None)
    assert kernels.backend() == "numba"
    code = "import sys; sys.modules['edgefl.kernels._c'] = None; from edgefl import kernels; "
    done = _run(f"{code}print(kernels.backends()['c'])")
    folder = Path(kernels.__file__).parent
    why = f"not built in {folder}: perhaps no C compiler; EDGEFL_REQUIRE_C=1 shows the error"
    assert done.stdout == f"{why}\n", done.stderr


def test_the_extension_was_built_from_the_present_sources() -> None:
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
def test_numba_converts_float16_without_the_processors_instruction(tmp_path: Path) -> None:
    """Numba compiles for SSE2 only. Without AVX, LLVM splits vectors of eight elements."""
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
