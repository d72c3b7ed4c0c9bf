"""Packages, the optional C extensions and the data folders; everything else is in pyproject.toml.

Without a C compiler edgefl installs all the same and sums with numba. EDGEFL_REQUIRE_C=1 makes a failed
build of an extension an error.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from setuptools import Extension, find_packages, setup

KERNELS = Path(__file__).parent / "kernels"


def sources_digest() -> str:
    """Stamped into the extension, so that the tests notice one that is older than its sources."""
    digest = hashlib.sha256()
    for path in sorted([*KERNELS.glob("*.c"), *KERNELS.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def extension(name: str, sources: tuple[str, ...]) -> Extension:
    return Extension(
        name,
        sources=[f"kernels/{source}.c" for source in sources],
        libraries=["m"],
        depends=["setup.py", *sorted(f"kernels/{path.name}" for path in KERNELS.glob("*.[ch]"))],
        define_macros=[("EF_SOURCES", f'"{sources_digest()}"')],
        # The last ones count: whatever CFLAGS says, no product and sum are fused, and nothing is reordered.
        extra_compile_args=[
            "-std=gnu11",
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            "-pthread",
            "-fno-fast-math",
            "-ffp-contract=off",
        ],
        extra_link_args=["-pthread"],
        py_limited_api=True,
        optional=os.environ.get("EDGEFL_REQUIRE_C") != "1",
    )


KERNEL_SOURCES = (
    *("module", "bind_sum", "bind_quantize", "bind_order", "bind_field"),
    *("delta", "cpu", "pool", "staleness"),
)

setup(
    packages=[
        *find_packages(include=["edgefl", "edgefl.*"]),
        "edgefl._kernels_src",
        "edgefl._profiles",
        "edgefl._experiments",
    ],
    package_dir={
        "edgefl._kernels_src": "kernels",
        "edgefl._profiles": "profiles",
        "edgefl._experiments": "experiments",
    },
    package_data={
        "edgefl": ["py.typed"],
        "edgefl.kernels": ["*.pyi"],
        "edgefl.host": ["*.pyi"],
        "edgefl.lab": ["*.pyi"],
        "edgefl.results": ["*.css"],
        "edgefl.run": ["*.html"],
        "edgefl._kernels_src": ["*.c", "*.cu", "*.cuh", "*.h"],
        "edgefl._profiles": ["**/*.toml", "**/*.trace", "**/*.csv"],
        "edgefl._experiments": ["**/*.toml"],
    },
    include_package_data=False,
    ext_modules=[
        extension("edgefl.kernels._c", KERNEL_SOURCES),
        extension("edgefl.lab._probe", ("probe", "pool")),
        extension("edgefl.host._code", ("code",)),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
