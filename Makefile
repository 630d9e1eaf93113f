# Two commands for a new user: `make demo` and `make test`. Both need Python 3.11 or newer, g++ and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What the installed build depends on: the native sources and the metadata, not the Python files (editable install).
BUILD_INPUTS := pyproject.toml setup.py $(shell find csrc -type f)
CLANG_FORMAT_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test lint setup gpu-wheel bench-scaling clean

demo: setup
	$(BIN)/python -m natten_jax.profiler -i 8 16 24 -d 128 -w 2 4 3

test: setup
	$(BIN)/python -m pytest --numprocesses auto --slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMAT_FILES)

setup: $(VENV)/.installed

$(VENV)/.installed: $(BUILD_INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

# A wheel with the CUDA part, also on a machine without a GPU.
gpu-wheel: setup
	NATTEN_JAX_CUDA=1 $(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

# What each optimisation of attention pays at growing lengths. On an NVIDIA GPU, steps 1 to 3 need an environment that
# was set up with NATTEN_JAX_BENCH=1.
bench-scaling: setup
	$(BIN)/python bench/fmha_scaling.py --output-dir build/fmha_scaling

clean:
	rm -rf build dist *.egg-info natten_jax/*.so
