# Each target makes .venv and installs what it needs the first time; later calls start at once. `make` prints the targets.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
COMMA := ,
BIN := $(VENV)/bin

# The CUDA version that the driver runs; nothing without a driver.
CUDA := $(shell nvidia-smi 2>/dev/null | awk 'match($$0, /CUDA (UMD )?Version: *[0-9]+/) \
	{ split(substr($$0, RSTART, RLENGTH), part, ": *"); print part[2] + 0 }')
# The DSL's wheels for CUDA 12 (also without a driver) or 13; both compile for every GPU. PyPI's torch is of CUDA 13, which a driver of 12 does not run.
FLAVOUR := $(if $(filter-out 12,$(CUDA)),$(COMMA)cu13)
TORCH := $(if $(filter 12,$(CUDA)),--extra-index-url https://download.pytorch.org/whl/cu126)
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH)

.PHONY: help demo test test-exhaustive test-all lint format docs bench report clean

help: ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed ## with a GPU: check and time the kernels; without: compile a few, check the references
	$(BIN)/python -m cute_kernels demo

test: $(VENV)/installed ## run the tests that this machine can run: all logic, a kernel of each class
	$(BIN)/python -m pytest -n $(JOBS) -m "not exhaustive"

test-exhaustive: $(VENV)/installed ## run the tests that `make test` leaves out: the kernels compile, of the tables half for SM90, a fourth for SM100
	$(BIN)/python -m pytest -n $(JOBS) -m exhaustive

test-all: test test-exhaustive ## run all tests that this machine can run

lint: $(VENV)/installed ## lint, formatting and types, as CI checks them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed ## apply ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed-docs ## build the documentation into build/docs; warnings are errors
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs build/docs

bench: $(VENV)/installed-bench ## measure on this machine's GPU, then make the report
	$(BIN)/python -m cute_kernels bench --save
	$(BIN)/python -m bench.report

report: $(VENV)/installed ## make tables and figures from the saved measurements
	$(BIN)/python -m bench.report

clean: ## remove .venv
	rm -rf $(VENV)

# Where Debian's python3 lacks ensurepip (package python3-venv), the system's pip can still fill an environment made without it.
$(BIN)/python:
	@$(PYTHON) -m venv $(VENV) || \
	{ $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; } || \
	{ rm -rf $(VENV); echo "no virtual environment could be made: install Python >= 3.10 with its venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV), a few minutes the first time"
	$(PIP) --editable '.[test,dev$(FLAVOUR)]'
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) --editable '.[bench$(FLAVOUR)]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) --editable '.[docs$(FLAVOUR)]'
	@touch $@
