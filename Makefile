# Every target builds .venv when it is missing or older than what it is built from.
#   make demo       24 phones, FedStaleWeight beside FedBuff, three seeds each, into runs/demo (3 minutes)
#   make test       every test that is not marked slow
#   make check      lint, types and the fast tests
#   make bench      what sums, arriving updates and clients cost, beside the limits, into runs/bench
#   make reproduce  the papers' claims in small, into runs/reproduce-*
#   make docs       the documentation as pages, into build/docs
#   make soak       the long proofs: thousands of trips, hundreds of processes; some 200 tests of seconds to minutes each,
#                   some three hours on two cores that others use, too (docs/reliability.md)
#   make flower     the tests of edgefl.flower, in a .venv-flower of Flower's own versions
#   make measure-device CC=aarch64-linux-gnu-gcc
#                   the kit for devices without Python, into build (docs/measure.md)
#   make wheels     wheels for x86-64 and, if there is a cross compiler (AARCH64_CC), aarch64, into dist; tests/aarch64.sh
#                   runs the kernels' tests on the second one under qemu
#   make clean      remove what was built and run here

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
FLOWER := .venv-flower/bin
STAMP  := $(VENV)/.edgefl-stamp
UNIT   := --ignore=tests/process --ignore=tests/fault -m "not process and not slow"
NATIVE := $(wildcard kernels/*.*)
MEASURE_DEVICE := build/measure-device
AARCH64_CC ?= aarch64-linux-gnu-gcc
WHEEL := EDGEFL_REQUIRE_C=1 $(BIN)/python -m build --wheel --no-isolation --outdir build/wheels

# Written bytecode, whatever the environment says: hundreds of processes import the same modules. pip compiles
# none, since most modules of torch and its like are never imported.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench docs reproduce soak flower clean measure-device wheels

help:
	@sed -n 's/^#   //p' Makefile

$(STAMP): pyproject.toml setup.py constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "edgefl: needs Python 3.11 or newer; '$(PYTHON)' is" \
	       "$$($(PYTHON) -V 2>/dev/null || echo 'not there')." \
	       "Name another: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) # without python3-venv, Debian makes one without pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	rm -rf runs/demo
	$(BIN)/edgefl sweep experiments/demo.toml --grid strategy.name=fedstaleweight,fedbuff --accept-invalid \
	  --out runs/demo/sweep >/dev/null
	$(BIN)/edgefl compare runs/demo/sweep/runs/* --target 0.7 --out runs/demo

# The tests of processes often wait, so they have more workers than most small machines have cores.
test: $(STAMP)
	$(BIN)/python -m pytest -q -n auto --dist worksteal $(UNIT)
	$(BIN)/python -m pytest -q -n 4 --dist loadscope -m "process and not slow" tests/process tests/fault tests/golden

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto --dist worksteal $(UNIT)

bench: $(STAMP)
	mkdir -p runs/bench
	$(BIN)/edgefl bench aggregate --json runs/bench/aggregate.json
	$(BIN)/edgefl bench ingest --json runs/bench/ingest.json
	$(BIN)/edgefl bench spawn --json runs/bench/spawn.json

reproduce: $(STAMP)
	for paper in theory fedstaleweight fedbuff defedavg ablations-fedbuff ablations-defedavg; do \
	  $(BIN)/edgefl reproduce $$paper --quick || exit; \
	done

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo build/docs/index.html

soak: $(STAMP)
	$(BIN)/python -m pytest -m slow

# Flower asks for rich below 15 and typer below 0.21, so it has no place beside what constraints.txt pins.
flower:
	test -x $(FLOWER)/pip || $(PYTHON) -m venv .venv-flower
	grep -vE '^(rich|typer)==' constraints.txt > .venv-flower/constraints.txt
	$(FLOWER)/python -m pip install --quiet --disable-pip-version-check -c .venv-flower/constraints.txt \
	  -e '.[dev,flower]'
	$(FLOWER)/python -m pytest -q tests/unit/test_flower_*.py tests/process/test_flower_*.py

measure-device:
	mkdir -p $(dir $(MEASURE_DEVICE))
	$(CC) -std=c11 -O3 -ffast-math -fopenmp -Wall -Wextra $(CFLAGS) -static -s -o $(MEASURE_DEVICE) \
	  kernels/device/measure.c

wheels: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[wheels]'
	rm -rf build/wheels
	$(WHEEL)
	if command -v $(AARCH64_CC); then \
	  CC=$(AARCH64_CC) LDSHARED="$(AARCH64_CC) -shared" _PYTHON_HOST_PLATFORM=linux-aarch64 $(WHEEL); \
	else echo "no $(AARCH64_CC): no wheel for aarch64" >&2; fi
	for wheel in build/wheels/*.whl; do \
	  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist $$wheel || exit; \
	done

clean:
	rm -rf $(VENV) .venv-flower build dist runs *.egg-info edgefl/*/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find edgefl tests -name __pycache__ -type d -exec rm -rf {} +
