# make demo | test | lint | bench: each makes .venv and installs what it needs the first time; later calls start at once.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# The DSL's wheels for CUDA 13 where the driver runs it; else, and without a driver, those for CUDA 12. Both compile for every GPU.
FLAVOUR := $(shell nvidia-smi 2>/dev/null | awk 'match($$0, /CUDA (UMD )?Version: *[0-9]+/) \
	{ split(substr($$0, RSTART, RLENGTH), part, ": *"); if (part[2] + 0 >= 13) print ",cu13" }')

.PHONY: demo test lint format bench report clean

demo: $(VENV)/installed
	$(BIN)/python -m cute_kernels demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed-bench
	$(BIN)/python -m cute_kernels bench --save
	$(BIN)/python -m bench.report

report: $(VENV)/installed
	$(BIN)/python -m bench.report

clean:
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
