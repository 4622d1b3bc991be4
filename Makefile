# make demo | make test need nothing but Python >= 3.10; each makes the environment it uses.
VENV   ?= .venv
PYTHON ?= $(VENV)/bin/python
JOBS   ?= 2

# With PYTHON=python3 (an environment you already have) nothing is installed.
ENVIRONMENT := $(if $(filter $(VENV)/bin/python,$(PYTHON)),$(VENV)/ready)
INTERPRETED := TRITON_INTERPRET=1 $(PYTHON) -m pytest -n $(JOBS) -m "not gpu and not compiled"
COMPILED    := env -u TRITON_INTERPRET $(PYTHON) -m pytest -n $(JOBS) -m compiled

.PHONY: demo test lint test-oldest test-gpu clean

demo: $(ENVIRONMENT)
	$(PYTHON) -m flashstate demo

test: $(ENVIRONMENT) lint
	$(INTERPRETED)
	$(COMPILED)

lint: $(ENVIRONMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# The other end of the supported Triton range; the newest is what `make test` installs.
test-oldest: .venv-oldest/ready
	TRITON_INTERPRET=1 .venv-oldest/bin/python -m pytest -n $(JOBS) -m "not gpu and not compiled"
	env -u TRITON_INTERPRET .venv-oldest/bin/python -m pytest -n $(JOBS) -m compiled

test-gpu: $(ENVIRONMENT)
	env -u TRITON_INTERPRET $(PYTHON) -m pytest -m gpu

$(VENV)/ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv-oldest/ready: pyproject.toml constraints.txt
	python3 -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' triton==3.6.0
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info
