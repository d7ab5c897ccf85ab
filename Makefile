# Two commands do everything: `make demo` and `make test`. Both set up the project's own virtual environment first, once.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3.15 python3,$(shell command -v $(name) 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/pip --disable-pip-version-check
TYPES := build/types
ARGS ?=
# Each worker of the tests takes a core and up to 2 GB (nproc gives OMP_NUM_THREADS, where that is set). WORKERS=0 runs them in one process, for --pdb.
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))
# With bytecode: else each worker compiles the tests, and each of the hundreds of processes that they start all our sources.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test zoo trainers mutate matrix fuzz steps small state golden samples suites torches optimizers semantics exports sanitize lint links site setup clean
.DELETE_ON_ERROR:

demo: $(STAMP)  ## trains a small Mixtral with and without capture; ARGS="--steps 20 --ranks 2" go to the script
	$(BIN)/python examples/train_mixtral.py $(ARGS)

test: $(STAMP)  ## the whole test suite; ARGS="-k report -x" go to pytest
	@# The interpreter's tests have a process of their own: they compare with plain Python when objects die and how deep calls
	@# go, and a frame hook that another test's torch.compile left behind changes both. (5: ARGS choose none of them.)
	$(PYTEST) tests/interpreter $(ARGS) || test $$? -eq 5
	$(PYTEST) tests --ignore=tests/interpreter $(ARGS) || test $$? -eq 5

zoo: $(STAMP)  ## trains every MoE family of transformers, tiny, and writes docs/zoo.md; ARGS="--peer --resume mixtral"
	PYTHONPATH=bench OMP_NUM_THREADS=1 $(BIN)/python -m zoo $(ARGS)

trainers: $(STAMP)  ## trains a gallery of scripts in the structure of public ones, writes docs/trainers.md; ARGS="minimind --backend eager"
	PYTHONPATH=bench OMP_NUM_THREADS=1 $(BIN)/python -m trainers $(ARGS)

mutate: $(STAMP)  ## changes one thing at a time between two calls, thousands of times; writes docs/guards.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation/fuzzer.py --docs docs/guards.md $(ARGS)

matrix: $(STAMP)  ## a graph break in each construct of Python's inside each other one; ARGS="-k generator"
	MOEBIUS_MATRIX=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/capture/test_break_matrix.py $(ARGS)

fuzz: $(STAMP)  ## 20,000 generated programs, plain and interpreted; PYTHONS="python3.12 …", ARGS="--captured" or "--faults"
	@for python in $(or $(PYTHONS),$(BIN)/python); do OMP_NUM_THREADS=1 $$python tests/interpreter/fuzz/run.py $(ARGS) || exit 1; done

steps: $(STAMP)  ## 1,000 generated training steps of five calls, plain and captured; ARGS="--count 200 --seed 7"
	OMP_NUM_THREADS=1 $(BIN)/python tests/capture/steps/run.py $(ARGS)

small: $(STAMP)  ## 500 small programs each of breaks in handlers and loops, and of names given anew, and of what values decide; ARGS="--kind breaks"
	OMP_NUM_THREADS=1 $(BIN)/python tests/capture/small/run.py $(ARGS)

state: $(STAMP)  ## each kind of state with each question about it, plain and captured; ARGS="--kind slot --question layers", ARGS=--mutate
	OMP_NUM_THREADS=1 $(BIN)/python tests/capture/state/run.py $(ARGS)

golden: $(STAMP)  ## what some 180 captured programs became, against what is kept; ARGS="--keep", ARGS="--out build/golden"
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python tests/golden/golden.py $(ARGS)

optimizers: $(STAMP)  ## optimizers of other packages, plain and captured; ARGS="torch.optim pytorch_optimizer"
	OMP_NUM_THREADS=1 $(BIN)/python tests/suites/optimizers.py $(ARGS)

exports: $(STAMP)  ## exported steps, between this torch and others; PYTHONS="/other/env/bin/python", ARGS="--families mixtral"
	OMP_NUM_THREADS=1 $(BIN)/python tests/capture/export/across.py $(PYTHONS) $(ARGS)

samples: $(STAMP)  ## torch's own samples of its operators and modules, plain and captured; ARGS="--only linalg"
	OMP_NUM_THREADS=1 $(BIN)/python tests/suites/torchs_samples.py $(ARGS)

suites: $(STAMP)  ## other projects' tests, plain and captured; ARGS="pytorch/test/test_optim.py --how whole"
	OMP_NUM_THREADS=1 $(BIN)/python tests/suites/run.py $(ARGS)

TORCHES ?=
torches: $(STAMP)  ## an environment for each torch, one after another; writes docs/versions.md; TORCHES="2.14 2.15", ARGS="--every 3"
	$(BIN)/python tests/suites/versions.py --python $(PYTHON) $(if $(TORCHES),--torches $(TORCHES)) $(ARGS)

# A second build of the package, found before the first. Python's own allocator would hide objects that are used after
# their end.
SANITIZERS := -fsanitize=address,undefined -fno-omit-frame-pointer -g
LOG := $(CURDIR)/build/sanitize.log
sanitize: $(STAMP)  ## tests with the C code under the address and undefined-behaviour sanitizers; ARGS="tests/kernels"
	rm -rf build/sanitized build/lib* build/temp* $(LOG)*
	CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" $(PIP) install -q --no-deps --no-build-isolation --target build/sanitized .
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" PYTHONMALLOC=malloc \
	  ASAN_OPTIONS=detect_leaks=0:use_sigaltstack=0:log_path=$(LOG) UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:log_path=$(LOG) \
	  PYTHONPATH=build/sanitized $(BIN)/python -m pytest $(or $(ARGS),tests/kernels/test_native_rows.py tests/kernels/test_chains.py tests/capture/hook) \
	  || { cat $(LOG)* 2>/dev/null; false; }

# Needs no torch: an environment with the C extension for each Python. The table of all of them goes to docs/semantics.md.
TESTED = $(or $(PYTHONS),$(foreach v,3.11 3.12 3.13 3.14 3.15,$(if $(shell command -v python$(v) 2>/dev/null),$(v))))
semantics:  ## CPython's own tests through the interpreter; PYTHONS="3.11 3.14", ARGS="--modules test_with --resume"
	@set -e; for v in $(TESTED); do \
	  test -x build/semantics/$$v/bin/python || python$$v -m venv build/semantics/$$v; \
	  build/semantics/$$v/bin/pip --disable-pip-version-check install -q -c constraints.txt setuptools; \
	  build/semantics/$$v/bin/python setup.py -q build_ext --inplace; \
	  build/semantics/$$v/bin/python tests/interpreter/semantics/run.py --results build/semantics/$$v.json $(ARGS) || true; \
	done
	build/semantics/$(firstword $(TESTED))/bin/python tests/interpreter/semantics/run.py --docs docs/semantics.md \
	  $(foreach v,$(TESTED),build/semantics/$(v).json)

# mypy and mkdocstrings know no import hooks: they see the installed layout as links.
links:
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/moebius
	@for path in capture/*; do ln -s "$(CURDIR)/$$path" $(TYPES)/moebius/; done
	@for name in interpreter lowering kernels; do ln -s "$(CURDIR)/$$name" $(TYPES)/moebius/$$name; done

lint: $(STAMP) links
	$(BIN)/ruff check .
	MYPYPATH=$(TYPES) $(BIN)/mypy -p moebius
	MYPYPATH=$(TYPES) $(BIN)/mypy examples bench tests/packaging/typed_use.py

site: $(STAMP) links  ## the pages of docs/ as a site in build/site, opened without a server; a broken link is an error
	$(PIP) install -q -c constraints.txt -e ".[docs]" --no-build-isolation
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo build/site/index.html

setup: $(STAMP)

# torch comes first and with its exact pin: with a range pip walks through several gigabytes of CUDA builds.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard capture/hook/*.[ch] interpreter/native/*.[ch] kernels/native/*.[ch])
	@test -n "$(PYTHON)" || { echo "moebius needs Python 3.11 to 3.15 on PATH (or PYTHON=/path/to/python)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: apt install python3-venv"; exit 1; }
	$(PIP) install -q -c constraints.txt setuptools
	$(PIP) install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[triton,examples,dev]"
	@touch $@

clean:
	rm -rf $(VENV) build out *.egg-info capture/hook/*.so interpreter/native/*.so kernels/native/*.so
