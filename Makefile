# Every target works on a fresh clone that has Python >= 3.11, git and make: it first installs what is missing into .venv.
# Nothing is installed again, and the network is not used, until a file that .venv/.installed depends on changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Every folder, one or two levels down, that has a pyproject.toml; setup.py finds them in the same way.
PROJECTS := $(sort $(wildcard */pyproject.toml */*/pyproject.toml))
PACKAGES := $(PROJECTS:/pyproject.toml=)
# What setuptools leaves behind.
BUILT := $(foreach folder,. $(PACKAGES),$(folder)/build $(folder)/*.egg-info)
WHEELS := dist

# A process on each core, of one thread each (conftest.py). One that runs out of tests takes over the other's last ones.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.PHONY: setup demo test test-all lint bench docs wheels clean

setup: $(VENV)/.installed

# torch comes first and alone: with the packages' wider range in view, pip may pass over a CPU build that pip's own
# configuration offers, and fetch gigabytes of CUDA.
$(VENV)/.installed: constraints.txt requirements-dev.txt requirements-oldest.txt $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, not " \
		+ sys.version.split()[0] + ": name one, as in make PYTHON=python3.11")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -r requirements-dev.txt \
		$(addprefix -e ,$(PACKAGES))
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target $(VENV)/oldest \
		-r requirements-oldest.txt
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
	$(BIN)/python tests/test_words.py

bench: setup
	$(BIN)/python benchmarks/ngram.py

docs: setup
	$(BIN)/python docs/site_builder.py

# The same commit gives the same bytes: files get the time of the commit, and nothing of an earlier build is there to be packed
# again. pip builds with the setuptools of .venv, so that the network is not used.
wheels: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
wheels: setup
	rm -rf $(BUILT)
	umask 022; $(BIN)/python -m pip wheel --disable-pip-version-check \
		--no-index --no-deps --no-build-isolation --wheel-dir $(WHEELS) $(addprefix ./,$(PACKAGES))
	rm -rf $(BUILT)

# Keeps .venv, which is costly to fill; delete it by hand to start over.
clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis $(WHEELS) $(BUILT)
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf
