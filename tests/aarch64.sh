#!/usr/bin/env bash
# Runs the kernels' tests of dist/*aarch64.whl on an emulated aarch64 processor: bash tests/aarch64.sh [TEST…]
#
# Needs Debian's apt (no root), qemu-user and the wheel of `make wheels`. Debian's Python for arm64, numpy, numba and
# the other packages go to build/aarch64. Everything is interpreted, some 20 times slower than on the processor itself.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/build/aarch64
suite=${SUITE:-bookworm}
wheel=$(ls "$PWD"/dist/*aarch64.whl)
tests=("$@")
if [ $# = 0 ]; then
  tests=(tests/conformance/test_backends*.py tests/unit/test_kernels_{arguments,results,selection,staleness,threads}.py)
fi

if [ ! -x "$root/usr/bin/python3" ]; then
  mkdir -p "$root/apt/state/lists/partial" "$root/apt/cache/archives/partial"
  touch "$root/apt/status"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" \
    > "$root/apt/sources.list"
  cat > "$root/apt/apt.conf" <<CONF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$root/apt/state";
Dir::State::status "$root/apt/status";
Dir::Cache "$root/apt/cache";
Dir::Etc::sourcelist "$root/apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Debug::NoLocking "true";
CONF
  APT_CONFIG=$root/apt/apt.conf apt-get update -qq
  APT_CONFIG=$root/apt/apt.conf apt-get install -qq --download-only --no-install-recommends \
    python3 libstdc++6 libgomp1
  for package in "$root"/apt/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$root"
  done
fi

# Tests start sys.executable, which is this script.
cat > "$root/usr/bin/python" <<SCRIPT
#!/bin/sh
exec qemu-aarch64 -L "$root" -0 "$root/usr/bin/python" "$root/usr/bin/python3" "\$@"
SCRIPT
chmod +x "$root/usr/bin/python"
python() { PYTHONPATH=$root/site "$root/usr/bin/python" "$@"; }
version=$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ ! -d "$root/site/numpy" ]; then
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --target "$root/site" \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 --python-version "$version" --only-binary=:all: -c constraints.txt \
    cryptography hypothesis msgspec numba numpy psutil pytest pytest-timeout pyzmq rich safetensors typer
fi
rm -rf "$root"/site/edgefl* "$root/run"
.venv/bin/python -m zipfile -e "$wheel" "$root/site"
mkdir "$root/run"
cp -r tests kernels pyproject.toml "$root/run"  # beside no edgefl/, so that the wheel's is imported
cd "$root/run"
python -c 'import platform; from edgefl import kernels; print(platform.machine(), kernels.backends())'
# qemu cannot fork a process that has threads.
python -m pytest -q -p no:cacheprovider -o timeout=3600 -k "not fork_after_use" "${tests[@]}"
