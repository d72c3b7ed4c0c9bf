"""``edgefl predict --code``: predict the speed of code that does not use torch on a device's cores."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeGuard

from edgefl.errors import ConfigError, EdgeflError, unknown
from edgefl.terminal import say

if TYPE_CHECKING:
    from edgefl.devices.code import CodeClass, CodeCluster, Rate

CLASSES: tuple[CodeClass, ...] = (
    "integer", "memory", "copy", "crypto", "division", "float", "simd", "interpreter",
)  # fmt: skip
FIGURES: dict[str, dict[CodeClass, str]] = {
    "integer": {"memory": "mips_compress", "integer": "mips_decompress"},
    "memory": {"memory": "mips_compress", "integer": "mips_decompress"},
    "crypto": {"crypto": "aes256cbc_mb_s"},
    "copy": {"copy": "memcpy_mb_s"},
    "division": {"division": "prime_searches_s"},
    "simd": {"simd": "mobilenet_gflops"},
    "float": {"float": "nbody_steps_s"},
    "interpreter": {"interpreter": "python_nbody_steps_s"},
}
"""For each class of code that can be requested, the classes to predict and the name of each rate in JSON."""
WORDS = {
    "mips_compress": "7-zip compression, MIPS",
    "mips_decompress": "7-zip decompression, MIPS",
    "aes256cbc_mb_s": "AES-256-CBC, MB/s",
    "memcpy_mb_s": "memcpy, MB/s",
    "prime_searches_s": "primes up to 10,000, searches/s",
    "mobilenet_gflops": "MobileNet-v1 in fp32, GFLOPS",
    "nbody_steps_s": "five bodies in C, steps/s",
    "python_nbody_steps_s": "five bodies in CPython, steps/s",
}


def predict_code(
    code: str,
    model: str | None,
    devices: list[str],
    cores: str | None,
    threads: int,
    as_json: bool,
    without_aes: bool,
) -> None:
    """Print the rates at which a device or given cores run code of class ``code``, with 90% intervals."""
    if not is_class(code):
        raise ConfigError(unknown("code class", code, CLASSES))
    if model is not None:
        raise ConfigError(f"--code {code}: cannot be combined with a MODEL (got {model!r})")
    if (cores is None) == (not devices) or len(devices) > 1:
        raise ConfigError(f"--code {code}: give one --device NAME, or --cores CORE@MHZxN,…")
    if without_aes and cores is None:
        raise ConfigError("--without-aes: allowed only with --cores; with --device the profile's SoC decides")
    from edgefl.devices.code import throughput

    clusters = _clusters(devices, cores, aes=not without_aes)
    figures = {name: throughput(clusters, of, threads) for of, name in FIGURES[code].items()}
    question: dict[str, Any] = {"code": code, "device": devices[0] if devices else None, "threads": threads}
    question["cores"] = [f"{each.core}@{each.mhz:g}x{each.cores}" for each in clusters]
    speed = _relative(clusters, code, threads)
    if as_json:
        value, low, high = speed or (None, None, None)
        compared = {"relative": value, "low": low, "high": high}
        say(json.dumps({**question, **compared, **_flat(figures)}, indent=2))
    else:
        _show(question, figures, speed)


def _relative(clusters: tuple[CodeCluster, ...], code: CodeClass, threads: int) -> Rate | None:
    """Return the speed relative to one thread of this host, or print why it is unknown and return None."""
    from edgefl.devices.code import relative
    from edgefl.host import calibration

    try:
        return relative(clusters, code, threads, calibration.calibrate_code(code))
    except EdgeflError as error:
        say(f"edgefl: no comparison with this host: {error}", err=True)
        return None


def is_class(code: str) -> TypeGuard[CodeClass]:
    """Return True if ``code`` is in `CLASSES`, the classes of code for which rates are known."""
    return code in CLASSES


def _clusters(devices: list[str], cores: str | None, aes: bool) -> tuple[CodeCluster, ...]:
    from edgefl.devices import load_device
    from edgefl.devices.code import clusters_of, read_clusters

    return read_clusters(cores, aes) if cores is not None else clusters_of(load_device(devices[0]))


def _flat(figures: dict[str, Rate]) -> dict[str, float]:
    return {
        f"{name}{ending}": round(value, 6)
        for name, rate in figures.items()
        for ending, value in zip(("", "_low", "_high"), rate, strict=True)
    }


def _show(question: dict[str, Any], figures: dict[str, Rate], speed: Rate | None) -> None:
    from edgefl.results.tables import many, show, table

    named = [(WORDS[name], rate) for name, rate in figures.items()]
    named += [] if speed is None else [("speed relative to one thread of this host", speed)]
    rows = [(name, *(f"{value:.4g}" for value in rate)) for name, rate in named]
    title = (
        f"{question['code']} code, {many(question['threads'], 'thread')} on {', '.join(question['cores'])}"
    )
    show(table(("figure", ">predicted", ">90% from", ">to"), rows, title=title))
