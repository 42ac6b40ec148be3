# make run: environment, install, the main job on a tiny checkpoint. make test: the CPU suite.
# On a machine whose torch is to be kept or is a CUDA build: make run CONSTRAINTS= PYTHON=...
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints-cpu.txt
CONFIG ?= cpu_dp2_ep2.yaml

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test install clean

run: $(STAMP)
	$(BIN)/ep-runtime run $(CONFIG)

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy -p examples
	$(BIN)/python -m pytest -p no:cacheprovider

install: $(STAMP)

# Done again only when what is installed would change.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist runs *.egg-info
