# Every target works on a fresh clone that has Python >= 3.11, git and make: it first installs what is missing into .venv.
# Nothing is installed again, and the network is not used, until a file that .venv/.installed depends on changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

PROJECTS := core/pyproject.toml $(sort $(wildcard kernels/pyproject.toml kv_managers/*/pyproject.toml testing/pyproject.toml tools/pyproject.toml train/pyproject.toml \
	proposers/*/pyproject.toml models/*/pyproject.toml integrations/*/pyproject.toml))
PACKAGES := $(PROJECTS:/pyproject.toml=)

# A process on each core, of one thread each (conftest.py). One that runs out of tests takes over the other's last ones.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.PHONY: setup demo test test-all lint bench clean

setup: $(VENV)/.installed

# torch comes first and alone: with only the packages' wider range in view, pip may fetch a build with gigabytes of CUDA.
$(VENV)/.installed: constraints.txt requirements-dev.txt $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, not " \
		+ sys.version.split()[0] + ": name one, as in make PYTHON=python3.11")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -r requirements-dev.txt \
		$(addprefix -e ,$(PACKAGES))
	touch $@

demo: setup
	$(BIN)/spec-decode demo

test: lint
	$(PYTEST)

test-all: lint
	SPECDEC_NIGHTLY=1 $(PYTEST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/ngram.py

# Keeps .venv, which is costly to fill; delete it by hand to start over.
clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis $(addsuffix /build,$(PACKAGES))
	find . -path ./$(VENV) -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) -print0 | xargs -0 rm -rf
