# Sets up an environment in .venv and runs the main jobs in it. Needs Python >= 3.11, a C++17
# compiler and make.

PYTHON ?= python3
# A torch that $(PYTHON) can import already is used; otherwise this one is installed.
TORCH ?= torch==2.13.0
BASE_TORCH := $(shell $(PYTHON) -c "import torch" 2>/dev/null && echo yes)

VENV := .venv
BIN := $(VENV)/bin
# The tools in .venv before those of the system, so that all builds have one CMake.
WITH_TOOLS := PATH="$(abspath $(BIN)):$$PATH"
# One process for each core, with two threads that do not spin while they wait for each other.
THREADS := OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
PYTEST := $(THREADS) $(BIN)/python -m pytest --durations=25
PARALLEL := --numprocesses auto --maxprocesses 8 --dist worksteal

# Modules are compiled when they are imported, as most never are. Python keeps what it compiled, which
# the environment may forbid: then each process compiles torch, PyG and the tests anew.
INSTALL := install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
# $(call tools,EXTRA...): install what extras list and what builds the package, but not the package.
tools = $(BIN)/python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
  extras = project["project"]["optional-dependencies"]; \
  print(*sum((extras[name] for name in sys.argv[1:]), project["build-system"]["requires"]), sep="\n")' $(1) \
  >$(VENV)/$(firstword $(1)).txt && $(BIN)/pip $(INSTALL) --requirement $(VENV)/$(firstword $(1)).txt
# $(call cuda,VALUE): FASTGRAPH_CUDA if it is set, or else this; CMake would keep that of the last time.
cuda = --config-settings=cmake.define.FASTGRAPH_CUDA=$(or $(FASTGRAPH_CUDA),$(1))

# The instruction sets for which CPU kernels are compiled: that of this machine (native), all, or all
# with that alone optimised (tested). A wheel has all of them, unless it is for a test.
LEVELS ?= native
WHEEL_LEVELS ?= all

# Not empty: leave nothing out of what takes long, as `make test-all` does.
ALL ?=
EXHAUSTIVE := $(if $(ALL),--exhaustive)
REPEATS := $(if $(ALL),--repeats)
MORE_RANKS := --ranks 2,3,4 --steps 20 --kills 50

.PHONY: help install extras demo demo-dist test test-long test-both test-all emulator scatter scatter-of-tests test-scatter test-dgl emulate wheel test-wheel parity sanitize aarch64 cuda gpu-kit docs lint format bench clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

install: $(VENV)/installed ## set up .venv with fastgraph, PyG and the test tools

# In an environment of its own, each time another, pip would compile everything again. The wheel is
# built in one nevertheless, as users build it.
$(VENV)/installed: pyproject.toml CMakeLists.txt $(shell find fastgraph/csrc -type f)
	test -x $(BIN)/python || $(PYTHON) -m venv $(if $(BASE_TORCH),--system-site-packages) $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip $(INSTALL) "$(TORCH)"
	$(call tools,native)
	$(BIN)/pip $(INSTALL) --no-build-isolation $(call cuda,auto) \
	  --config-settings=cmake.define.FASTGRAPH_CPU_LEVELS=$(LEVELS) --editable ".[test]"
	touch $@

demo: install ## train five models with and without fastgraph; leaves build/demo.html
	$(BIN)/python examples/demo.py --html build/demo.html $(DEMO_ARGS)

demo-dist: install ## train an unmodified script on one process and on two; shows both losses
	$(BIN)/python examples/dist/compare.py --ranks 2 examples/gcn.py --epochs 5 $(DEMO_ARGS)

extras: install # at once what other targets install
	$(call tools,lint docs wheel $(if $(NVCC),cuda))

# What a newcomer need not wait for: programs and ranks that are started, the code of pages and
# examples, training on real graphs, and the rehearsal of measurements on a GPU.
LONG := $(addprefix tests/,cli comparison dist docs examples pyg/test_training.py test_scripting.py \
  $(addprefix cuda/test_,benchmark.py configuration.py one_shot.py))

test: install ## run the tests of the package on the CPU
	$(PYTEST) $(PARALLEL) $(EXHAUSTIVE) $(LONG:%=--ignore=%) tests

test-long: install ## run the tests of programs, ranks, pages, examples and benchmarks
	$(PYTEST) $(PARALLEL) $(EXHAUSTIVE) $(if $(ALL),$(MORE_RANKS)) $(LONG)

# In one run, whose processes import torch and collect tests once.
test-both: install ## what test and test-long run
	$(PYTEST) $(PARALLEL) $(EXHAUSTIVE) $(if $(ALL),$(MORE_RANKS)) tests

test-all: ## run everything that there is, with nothing left out: about an hour
	ALL=yes .ci/run

# Built against the torch in .venv, and by the tools there; its extensions side by side. pip would
# keep what it built for this torch, and give it to another.
SCATTER := $(WITH_TOOLS) DIST_EXTRA_CONFIG=$(abspath $(VENV))/scatter.cfg
parallel = printf '[build_ext]\nparallel = %s\n' "$$(nproc)" >$(VENV)/scatter.cfg
scatter = $(BIN)/pip $(INSTALL) --no-build-isolation --no-cache-dir torch_scatter

scatter: install ## build torch_scatter for this torch, for benchmarks (minutes)
	$(parallel)
	$(BIN)/python -c "import torch_scatter" 2>/dev/null || $(SCATTER) $(scatter)

# Beside .venv, so that no benchmark meets it: tests do not ask how fast it is, and to optimise it
# takes longer than all that they do with it.
scatter-of-tests: install
	$(parallel)
	printf '#!/bin/sh\nexec %s "$$@" -O0 -g0\n' "$(CMAKE_CXX_COMPILER_LAUNCHER) $(CXX)" >$(VENV)/c++-O0
	chmod +x $(VENV)/c++-O0
	PYTHONPATH=build/scatter $(BIN)/python -c "import torch_scatter" 2>/dev/null || { rm -rf build/scatter; \
	  $(SCATTER) CXX=$(abspath $(VENV))/c++-O0 $(scatter) --no-deps --target build/scatter; }

# Of PyG's tests those that no kernel and no torch_scatter decides: loaders and samplers, what is left
# to upstream, as too small for one, what is said of it, and how often one is called by compiled code.
WITHOUT_KERNELS := $(patsubst %,--ignore=tests/pyg/test_%.py,batch_filtering collating collecting compiled_work loader_options \
  message_cells prefetching sampling sizes small_layers stores token_graph token_loader unrouted)

# The backend that calls it, and upstream's layers, which then take other paths. The other backends
# and the switch do not know of it, so that `test` has shown what they do; that layers which agree
# with upstream's train as upstream's do, what becomes of graphs that are edited, why calls are refused,
# what is remembered of them, and special values in other element types, of layers with other options
# or by overflow, it has, too.
WITHOUT_SCATTER := $(patsubst %,--ignore=tests/pyg/test_%.py,biased_gps_conv constant_features dual_gps_conv \
  gcn_norm gps_conv refusals repeated set_attention sorted_once stale_graphs switching training)
# On the CPU upstream computes by torch_scatter in two places alone: segments that are given by `ptr`, as
# matrices and sorted edges have them, and the latest message of each node of TGN (`utils/_scatter.py`
# asks `is_cuda` before it is called). No test in these files has either, which was counted, too: they
# show the same without it, but for the backend that calls it, with which they do run.
OF_PLAIN_EDGES := $(patsubst %,test_%.py,compiled_edits compiled_graphs edge_projection nested other_memory \
  own_aggregates traced traced_aggregations traced_channels traced_direct traced_dropout traced_dtypes \
  traced_edits traced_guards traced_kept traced_maps traced_memory traced_products traced_projections \
  traced_types traced_wanted_gradients usual usual_edits wanted_gradients)
either = $(subst $() $(), or ,$(strip $(1)))
test-scatter: scatter-of-tests ## run the tests whose outcome depends on torch_scatter with it present
	PYTHONPATH=$(abspath build/scatter) $(PYTEST) $(PARALLEL) $(EXHAUSTIVE) tests/ops tests/pyg \
	  $(if $(ALL),,$(WITHOUT_KERNELS) $(WITHOUT_SCATTER) -k "(scatter or (pyg and not ($(call either,$(OF_PLAIN_EDGES))))) \
	  and not special_values_of and not overflow and not (special_values and (edges or loops or slope))")

# DGL has wheels for some versions of Python only, and two versions cannot share an environment: each
# gets one beside .venv, with these sources and the packages of .venv behind its own. What DGL imports
# is in .venv, but for pandas, torchdata, pydantic and what these need. Ranks, random calls and graphs of every kind are for
# the newest: what the versions differ in is how a call says what it wants, not of which graph.
DGL := 1.1.3 2.1.0
newest_dgl = .venv-dgl-$(lastword $(DGL))
left_out = $(addprefix --ignore=tests/dgl/test_,distributed.py distributed_device.py device_scripts.py fuzz.py user_scripts.py) -k "not (isolated or duplicates or one_edge or hub)"
of_older_dgl = $(if $(ALL),,$(if $(filter $(lastword $(DGL)),$(1)),,$(left_out)))

test-dgl: install $(DGL:%=test-dgl-%) ## run the tests of DGL's routes with each supported DGL

test-dgl-%: install
	@test -x .venv-dgl-$*/bin/python || $(BIN)/python -m venv --without-pip .venv-dgl-$*
	@$(BIN)/python -c 'import os, sys; print(os.getcwd(), *[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
	  >"$$(.venv-dgl-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@if .venv-dgl-$*/bin/python -c 'from importlib.metadata import version; version("dgl"), version("pydantic")' 2>/dev/null || \
	  { $(BIN)/pip --python .venv-dgl-$*/bin/python $(INSTALL) --no-deps --only-binary :all: \
	    dgl==$* pandas python-dateutil six tzdata "torchdata<0.10" && \
	    $(BIN)/pip --python .venv-dgl-$*/bin/python $(INSTALL) --only-binary :all: pydantic; } 2>.venv-dgl-$*/why; \
	then DGLBACKEND=pytorch $(THREADS) .venv-dgl-$*/bin/python -m pytest --durations=25 $(PARALLEL) $(EXHAUSTIVE) tests/dgl $(call of_older_dgl,$*); \
	else echo "skipped: DGL $* cannot be installed for $$($(BIN)/python -V):"; tail -n 1 .venv-dgl-$*/why; \
	fi

# Float has all layouts of attention's kernels, which differ in their numbers, and the other element
# types one of each kind; `test-all` compiles all.
EMULATED := $(if $(ALL),SIMT_EVERY_LAYOUT=yes)

emulator: install # for the tests, whose time is limited
	$(EMULATED) $(BIN)/python -m tests.simt.library

NVCC := $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
# Not every CUDA toolkit has cuSPARSE's header.
cusparse = $(if $(NVCC),$(call tools,cuda))

# Switching is the same for every backend, and its tests start processes that do not know this one.
# GPSConv and Set Transformers are routed on CPUs alone.
# Training on real graphs would take the emulator hours. What never calls a kernel is `test`'s.
# Tests marked as repeats, which show kernels nothing that others do not, are left to `test-all`.
emulate: install emulator ## run the kernels for GPUs on the emulator, and count which lines of them run
	$(cusparse)
	$(EMULATED) $(THREADS) $(BIN)/python -m tests.simt.coverage --durations=25 $(PARALLEL) $(EXHAUSTIVE) $(REPEATS)
	$(EMULATED) FASTGRAPH_DATA= FASTGRAPH_BACKEND=simt $(PYTEST) --emulate $(PARALLEL) $(EXHAUSTIVE) $(REPEATS) \
	  tests/ops tests/cuda tests/pyg $(WITHOUT_KERNELS) -k "simt or cuda or pyg" \
	  $(addprefix --ignore=,tests/cuda/test_operators.py tests/cuda/test_configuration.py \
	  $(addprefix tests/pyg/test_traced,.py _aggregations.py _guards.py _kept.py _refusals.py _softmax.py) \
	  $(addprefix tests/cuda/test_,benchmark.py model.py one_shot.py) \
	  $(addprefix tests/pyg/test_,switching.py gps_conv.py biased_gps_conv.py dual_gps_conv.py set_attention.py))
	@if $(newest_dgl)/bin/python -c 'from importlib.metadata import version; version("dgl")' 2>/dev/null; \
	then $(EMULATED) DGLBACKEND=pytorch $(THREADS) $(newest_dgl)/bin/python -m pytest --emulate tests/dgl/test_devices.py; \
	else echo "skipped: DGL's graphs beside emulated features, as 'make test-dgl' has installed no DGL"; \
	fi

# Where a wheel is built there is no torch to tell what this machine has.
CAPABILITY := $(BIN)/python -c "import torch; print(torch.backends.cpu.get_cpu_capability().lower())"

# A wheel for a test is compiled with the headers in .venv, whose names a cache of the compiler knows.
headers = $(if $(filter all,$(WHEEL_LEVELS)),, \
  --config-settings=cmake.define.tvm_ffi_ROOT=$$($(BIN)/python -m tvm_ffi.config --cmakedir))

# With the CUDA kernels where they can be compiled; for all architectures that takes minutes.
wheel: install ## build a wheel for many Linux distributions into dist/
	$(call tools,wheel)
	$(cusparse)
	rm -rf dist
	$(WITH_TOOLS) $(BIN)/pip wheel --quiet --no-deps --config-settings=build-dir=build/wheel \
	  --config-settings=cmake.define.FASTGRAPH_LIBRARY_DIR=$(abspath build/wheel/lib) \
	  --config-settings=cmake.define.FASTGRAPH_CPU_LEVELS=$(WHEEL_LEVELS) \
	  --config-settings=cmake.define.FASTGRAPH_CPU_CAPABILITY=$$($(CAPABILITY)) $(headers) \
	  $(call cuda,$(if $(NVCC),on,off)) --wheel-dir dist/raw .
	$(WITH_TOOLS) $(BIN)/auditwheel repair --exclude libtvm_ffi.so \
	  --wheel-dir dist dist/raw/*.whl
	rm -r dist/raw

test-wheel: wheel ## install the wheel where there is no compiler, and run the quickstart
	$(PYTEST) tests/packaging --wheel dist/*manylinux*.whl

# The level that the tests use, as all are compiled from the same files, and differ in their vectors
# alone; `test-all` takes the others, too.
sanitize: install ## fuzz the native boundary under AddressSanitizer and UBSan
	$(THREADS) $(BIN)/python tests/native/sanitize.py $(if $(ALL),--all-levels)

# Not optimised: whether it compiles is all that is asked.
aarch64: install ## compile the portable kernels for 64-bit Arm
	$(BIN)/cmake -S . -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_CXX_FLAGS_RELEASE="-O0 -DNDEBUG" \
	  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DFASTGRAPH_LIBRARY_DIR=$(abspath build/aarch64/lib)
	$(BIN)/cmake --build build/aarch64

# The architectures of most GPUs for computing, which keep other kernels in memory than each other: of
# 1,064, 118 differ. The others assemble the same PTX, so that it compiles for them, too. Where one of
# them alone keeps more (now 28 kernels of sm_120, 8 of sm_86 and sm_89, 5 of sm_100) `test-all` tells.
# So it does of attention in other types than float, of which one layout of each kind is compiled here.
cuda: install ## compile the CUDA kernels, and compare their registers with those known
	$(cusparse)
	$(WITH_TOOLS) $(BIN)/python -m tests.cuda.registers $(if $(ALL),,--architectures 90 --few-layouts)

# For the architecture of H100 and H200. KIT_ARGS says more: where turbo-gnn can be built, for one.
gpu-kit: install ## pack all that a GPU machine without a network needs, into build/gpu-kit
	$(call tools,native)
	$(WITH_TOOLS) $(BIN)/python benchmarks/gpu_kit.py build/gpu-kit $(KIT_ARGS)

# Not quietly: it would not count warnings.
docs: install ## build the documentation into build/docs; a warning is an error
	$(call tools,docs)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: install ## ruff, mypy and clang-format
	$(call tools,lint)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fastgraph
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

format: install ## apply ruff and clang-format
	$(call tools,lint)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

# Sources are git directories, or clones where none is given; PARITY_ARGS chooses parts and examples.
parity_source = $(if $(1),--source $(1))
parity: install ## run PyG's and DGL's own tests without and with fastgraph; PYG_SOURCE, DGL_SOURCE
	$(BIN)/python -m tests.parity run pyg $(call parity_source,$(PYG_SOURCE)) $(PARITY_ARGS)
	@if $(newest_dgl)/bin/python -c 'from importlib.metadata import version; version("dgl")' 2>/dev/null; \
	then $(newest_dgl)/bin/python -m tests.parity run dgl $(call parity_source,$(DGL_SOURCE)) $(PARITY_DGL_ARGS); \
	else echo "skipped: DGL's own tests, as 'make test-dgl' has installed no DGL"; \
	fi
	$(BIN)/python -m tests.parity page

bench: install ## measure against upstream; FASTGRAPH_DATA names a folder with the real graphs
	$(call tools,bench)
	$(BIN)/python benchmarks/pyg_cpu.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(DGL:%=.venv-dgl-%) build dist fastgraph/lib
