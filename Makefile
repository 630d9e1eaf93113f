# Two commands for a new user: `make demo` and `make test`. Both need Python 3.11 or newer, g++ and make.
# `make test-all` runs every test; `make test-host` and `make test-gpu` are its halves. With `VENV=`, the targets use
# PYTHON's own packages instead of a virtual environment and install only natten_jax, without a network. The packages
# that pyproject.toml names must be installed then.
PYTHON ?= python3
VENV ?= .venv
BIN := $(if $(VENV),$(VENV)/bin,)
RUN := $(if $(VENV),$(BIN)/python,$(PYTHON))
# More test processes than this mostly wait for each other's compilations.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 12 ? n : 12)))
PYTEST := $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadgroup --durations 20
# JAX version to install. Default: the newest.
JAX ?=
# Stamp file of an up-to-date installation.
INSTALLED := $(if $(VENV),$(VENV)/.installed,build/.installed)
INSTALL := $(RUN) -m pip install --quiet --no-compile --disable-pip-version-check $(if $(VENV),--editable '.[test]' $(if $(JAX),'jax==$(JAX)'),--no-index --no-build-isolation --no-deps --editable .)
# Inputs of the installed build: native sources and metadata. Python files are not (editable install).
BUILD_INPUTS := pyproject.toml setup.py $(shell find csrc -type f)
# Pages whose code blocks are formatted to the width of a page of the site.
PAGES = README.md CONTRIBUTING.md $(wildcard docs/*.md docs/notebooks/*.ipynb examples/*.md)
CLANG_FORMAT_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: board demo test test-all test-core test-host test-gpu test-tpu fuzz sanitize-gpu sanitize-host lint setup wheels bench-scaling docs pictures notebooks tables clean

# The demo installs only natten_jax, JAX and rich, unless everything is already installed.
DEMO := $(or $(wildcard $(INSTALLED)),$(if $(VENV),$(VENV)/.demo,$(INSTALLED)))
DEMO_INSTALL := $(RUN) -m pip install --quiet --no-compile --disable-pip-version-check
demo: $(DEMO)
	@echo "[3/3] 3-D neighborhood attention, compared with dense attention of the same layout in XLA"
	$(RUN) -m natten_jax.profiler -i 8 16 24 -d 64 -w 2 4 3 --dtype fp32 --compare xla --iterations 10 --warmup-steps 3
	@echo
	@echo "next: $(RUN) -m natten_jax.doctor          what runs on this machine, and why the rest does not"
	@echo "      $(RUN) -m natten_jax.profiler --help"
	@echo "      $(RUN) -m pip install '.[bench]'     for the tutorial (docs/tutorial.md) and the examples"

$(VENV)/.demo: $(BUILD_INPUTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[1/3] JAX and rich"
	@$(DEMO_INSTALL) 'jax>=0.10' rich
	@echo "[2/3] natten_jax with its kernels: half a minute on two cores, several minutes with an NVIDIA GPU"
	@$(DEMO_INSTALL) --no-deps --editable .
	@touch $@

# A pytest run uses one platform: the host or the GPU.
SEES_GPU = $(RUN) -c "import jax; jax.devices('cuda')" >/dev/null
test: test-core
test-all: test-host
test test-all:
	@if $(SEES_GPU) 2>&1; then $(MAKE) --no-print-directory test-gpu; \
	else echo "JAX sees no NVIDIA GPU: no test of its kernels ran"; fi

# A sample of the host tests of the package: no wheels, examples, pages, benchmarks, fuzzer or tooling.
test-core: setup
	$(PYTEST) --core --no-loadscope-reorder -m 'not gpu' $(addprefix --ignore tests/,bench fuzz repository support tpu)

# All host tests, slow tests first.
test-host: setup
	$(PYTEST) --no-loadscope-reorder --slow -m 'not gpu'

# Tests that need an NVIDIA GPU: every kernel, feature, element type and error path of the GPU backends, and some of
# plain JAX.
test-gpu: setup
	@$(SEES_GPU) || { echo "make test-gpu: JAX sees no NVIDIA GPU" >&2; exit 1; }
	$(PYTEST) -m gpu

# Compile the TPU kernels for every chip. This needs no TPU. The gate compiles some of them.
test-tpu: setup
	.ci/tpu build/libtpu $(RUN) --all-compiled --numprocesses $(WORKERS) --dist loadgroup --durations 20 tests/tpu

# Random problems on each host backend, in parallel, and on the TPU kernels in Pallas's interpreter.
fuzz: setup
	$(MAKE) --no-print-directory --jobs 2 --output-sync fuzz/cpu fuzz/flex fuzz/interpreted

fuzz/interpreted:
	JAX_PLATFORMS=cpu $(RUN) -m tests.fuzz.interpreted --minutes 1

fuzz/%:
	$(RUN) -m tests.fuzz --backend $* --minutes 1 --workers 1

# Every form of every GPU kernel under each compute-sanitizer tool, four runs in parallel. The tools crash if XLA
# compiles on several threads or launches CUDA graphs. initcheck does not see TMA writes, so it must not check copies of
# such data to the host. synccheck reports barriers as missing if its barrier table is full.
SANITIZERS := memcheck racecheck initcheck synccheck
SANITIZED := $(foreach tool,$(SANITIZERS),$(foreach family,hopper cutlass biased,$(foreach part,0 1 2 3 4 5 6 7 8 9,$(tool)/$(family)/$(part))))
OPTIONS_OF_initcheck := --check-api-memory-access no
OPTIONS_OF_synccheck := --num-cuda-barriers 4096
OPTIONS_OF_memcheck := --report-api-errors no
sanitize-gpu: setup
	$(MAKE) --no-print-directory --jobs 4 --keep-going $(addprefix sanitize/,$(SANITIZED)) RUN="$(RUN)"

sanitize/%: export XLA_FLAGS = --xla_gpu_force_compilation_parallelism=1 --xla_gpu_enable_command_buffer=
sanitize/%:
	XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=$(CURDIR) compute-sanitizer --tool $(word 1,$(subst /, ,$*)) \
		$(OPTIONS_OF_$(word 1,$(subst /, ,$*))) --show-backtrace no --kernel-name kns=natten_jax --error-exitcode 1 --print-limit 5 \
		$(RUN) -m tests.support.kernel_forms $(word 2,$(subst /, ,$*)) --part $(word 3,$(subst /, ,$*)) 10

# Host kernels and handlers under g++'s sanitizers. Any report aborts the process, so that the test fails. This builds
# in place, without CUDA; the next target rebuilds the normal library.
UNDER_SANITIZERS = LD_PRELOAD="$(foreach name,asan ubsan,$(shell g++ -print-file-name=lib$(name).so))"
sanitize-host: export ASAN_OPTIONS = detect_leaks=0,abort_on_error=1,log_path=$(CURDIR)/build/sanitizer
sanitize-host: export UBSAN_OPTIONS = halt_on_error=1,print_stacktrace=1,log_path=$(CURDIR)/build/sanitizer
sanitize-host: export JAX_PLATFORMS = cpu
sanitize-host: setup
	rm -f $(INSTALLED) build/sanitizer.*
	NATTEN_JAX_SANITIZE=address,undefined NATTEN_JAX_CUDA=0 $(INSTALL)
	$(UNDER_SANITIZERS) $(PYTEST) -k 'cpu or handlers or parts' \
		tests/native/test_ffi_handlers.py tests/sharding/test_parts.py tests/native/test_limits.py tests/ops/test_extremes.py tests/ops/test_operators.py
	$(UNDER_SANITIZERS) $(RUN) -m tests.fuzz --backend cpu --minutes 5 --workers $(WORKERS)
	$(UNDER_SANITIZERS) $(RUN) -m tests.fuzz --backend cpu --direct --minutes 5 --workers $(WORKERS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 88 $(PAGES)
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMAT_FILES)
	$(BIN)/hadolint Dockerfile

setup: $(INSTALLED)

build/.installed: $(BUILD_INPUTS)
	$(INSTALL)
	mkdir -p build && touch $@

$(VENV)/.installed: $(BUILD_INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL)
	touch $@

# Release wheels, for every interpreter in PYTHONS. KINDS: pure Python; CPU kernels for this machine's architecture; CPU
# kernels for 64-bit ARM, if there is a cross compiler; CPU and GPU kernels for a version of CUDA. NATTEN_JAX_CUDA_ARCHS
# in the environment overrides the architectures of a release. OUT: output directory, by default dist. SDIST: existing
# source distribution to build from, instead of a new one.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
CROSS := $(if $(shell command -v aarch64-linux-gnu-g++),aarch64)
KINDS ?= python cpu $(CROSS) cuda12 cuda13
OUT ?= dist
SDIST ?=
wheels:
	$(PYTHON) release/wheels.py --pythons $(PYTHONS) --kinds $(KINDS) --out $(OUT) $(if $(SDIST),--sdist $(SDIST))

# Gain of each attention optimisation by sequence length. If there is an NVIDIA GPU, the kernels that only this
# benchmark uses are built first.
bench-scaling: export NATTEN_JAX_BENCH = 1
bench-scaling: setup
	@$(RUN) bench/fmha_ladder.py || $(INSTALL)
	$(RUN) bench/run.py fmha_scaling --output-dir build/fmha_scaling

# Time a fixed list of problems on the current device against the other installed implementations, and write a page with
# these and all earlier records: build/board/index.html.
board: setup
	$(RUN) bench/run.py board

# The documentation site; warnings are errors. The second command installs Sphinx's requirements and does not change
# natten_jax.
docs: setup
	rm -rf docs/api  # pages of removed names
	$(if $(VENV),$(RUN) -m pip install --quiet 'natten_jax[docs]')
	JAX_PLATFORMS=cpu $(RUN) -m sphinx --fail-on-warning --keep-going --quiet --jobs auto docs build/docs

# Pictures of windows and kernels, and charts of speeds, for README and documentation, from natten_jax.windows and
# bench/results.
pictures: H200 := bench/results/h200
pictures: BESIDE := $(firstword $(foreach device,h200 h100,$(wildcard bench/results/$(device)/beside_cudnn.json)))
pictures: setup
	PYTHONPATH=bench $(RUN) docs/pictures.py
	PYTHONPATH=bench $(RUN) docs/kernel_pictures.py
	PYTHONPATH=bench $(RUN) docs/tutorial_pictures.py
	$(RUN) bench/plot.py peers $(H200)/peers.json docs/images/speed.svg
	$(RUN) bench/plot.py small $(H200)/small.json docs/images/small_windows.svg
	$(RUN) bench/plot.py speedups $(H200)/forward.json docs/images/forward_speedups.svg
	$(RUN) bench/plot.py speedups $(H200)/backward.json docs/images/backward_speedups.svg
	$(RUN) bench/plot.py speedups $(H200)/causal_forward.json docs/images/causal_speedups.svg
	$(if $(BESIDE),$(RUN) bench/plot.py sliding $(BESIDE) docs/images/sliding.svg)
	$(if $(BESIDE),$(RUN) bench/plot.py video $(BESIDE) docs/images/frame_causal.svg)
	$(RUN) bench/plot.py halos bench/results/h200x2/timeline.json docs/images/halo_trace.svg
	$(RUN) bench/plot.py cpu bench/results/cpu/kernels.json docs/images/cpu.svg
	$(RUN) bench/plot.py fp8 bench/results/cpu/fp8_accuracy.json docs/images/fp8.svg
	$(RUN) bench/run.py fmha_report bench/results/h100/fmha_scaling/fmha_scaling_results.json \
		--plot docs/images/fmha_scaling.svg

# Stored results of the notebooks. The site runs them again.
notebooks: docs
	JAX_PLATFORMS=cpu $(BIN)/jupyter execute --inplace docs/notebooks/*.ipynb
	rm -f docs/notebooks/tuned.json  # written by a notebook

# Tables of flags and backends, and outputs of commands in pages, generated from the program.
tables:
	$(RUN) docs/generated.py

clean:
	rm -rf build dist *.egg-info natten_jax/*.so
