#!/bin/sh
# Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer in a temporary folder. Then runs
# the tests of the kernels and some cases of fuzz_kernels.py with it. The repository is not changed.
#
#   benchmarks/sanitize.sh [PYTHON] [FUZZ_CASES]
#
# Needs gcc or clang with both sanitizers. Three kinds of tests are left out: numba (it has no C code), CUDA
# (nvcc does not run under the sanitizers), and the leak test (AddressSanitizer keeps freed memory).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
case $python in /*) ;; */*) python=$PWD/$python ;; esac
cases=${2:-2000}
cc=${CC:-cc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -R "$root/edgefl" "$root/kernels" "$root/profiles" "$root/tests" "$root/benchmarks" \
    "$root/setup.py" "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$work"
rm -f "$work"/edgefl/*/*.so
cd "$work"

# Check with ThreadSanitizer that several threads may call the first kernel at the same time. This call
# selects the instruction set and starts the thread pool.
cat > first.c <<'END'
#include "edgefl_kernels.h"
#include <pthread.h>
static unsigned char data[1 << 21];
static void *ask(void *sum) { *(uint64_t *)sum = ef_checksum(data, sizeof data, 3); return NULL; }
int main(void)
{
    pthread_t threads[8];
    uint64_t sums[8];
    for (int i = 0; i < 8; i++) if (pthread_create(&threads[i], NULL, ask, &sums[i])) return 2;
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 8; i++) if (sums[i] != sums[0]) return 1;
    ef_pool_close();
    return 0;
}
END
$cc -fsanitize=thread -g -O1 -ffp-contract=off -pthread -Ikernels -o first first.c kernels/cpu.c kernels/pool.c -lm
TSAN_OPTIONS=halt_on_error=1 ./first

flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
CFLAGS=$flags LDFLAGS=$flags EDGEFL_REQUIRE_C=1 "$python" setup.py -q build_ext --inplace

# Python is not built with AddressSanitizer, so the run-time library must be loaded first. Leaks are not
# reported, because Python never frees some of its memory.
runtime=$($cc -print-file-name=libasan.so)
export LD_PRELOAD="$runtime" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH="$work" PYTHONMALLOC=malloc OMP_NUM_THREADS=1
"$python" -c 'from edgefl.kernels import _c; print(_c.__file__, _c.isas())'
"$python" -m pytest -q -p no:cacheprovider -k "not numba and not selection and not rounding and not cuda and not leaks" \
    tests/unit/test_kernels_*.py tests/conformance/test_backends*.py
"$python" benchmarks/fuzz_kernels.py --backends c --cases "$cases" --seconds 600 --seed 1
