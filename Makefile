# Each target does all it needs on a fresh machine: Python, pip, a C++ compiler and make are enough.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup test test-long lint bench clean

setup: .venv/.built

.venv/.dependencies: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) scikit-build-core nanobind cmake ninja
	$(PIP) $$($(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	    print(*p['dependencies'], *p['optional-dependencies']['test'])" | tr -d "'")
	touch $@

.venv/.built: .venv/.dependencies CMakeLists.txt $(wildcard csrc/*)
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

test: setup lint
	$(BIN)/python -m pytest

test-long: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks.ops

clean:
	rm -rf .venv build
