# Each target does all it needs on a fresh machine: Python, pip, a C++ compiler and make are enough.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

# The requirements of pyproject.toml's project `p` that an expression lists
requirements = $$($(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*$(1))" | tr -d "'")

.PHONY: setup demo test test-long test-asan lint bench clean

setup: .venv/.built

.venv/.dependencies: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) scikit-build-core nanobind cmake ninja
	$(PIP) $(call requirements,p['dependencies'] + p['optional-dependencies']['test'])
	touch $@

.venv/.built: .venv/.dependencies CMakeLists.txt $(wildcard csrc/*)
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

test: setup lint
	$(BIN)/python -m pytest

test-long: setup
	$(BIN)/python -m pytest -m slow

# The kernel tests against a build with AddressSanitizer; -PS keeps the ordinary build out of the way.
test-asan: setup
	$(BIN)/cmake -S . -B build/asan -G Ninja -DINFINICORE_ASAN=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(BIN)/cmake --build build/asan
	mkdir -p build/asan/tree && rm -rf build/asan/tree/* && cp -r infinicore infinilm build/asan/tree/
	cp build/asan/_native*.so build/asan/tree/infinicore/
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	    PYTHONPATH=build/asan/tree:$$(echo .venv/lib/python*/site-packages) $(BIN)/python -PS -m pytest \
	    -p no:cacheprovider tests/test_ops.py tests/test_functional.py tests/test_rope.py tests/test_layers.py \
	    tests/test_attention.py tests/test_graph.py tests/test_matmul.py tests/test_quantized_layers.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Fetches the built-in model (98 MB, once) and lets it answer.
demo: setup
	$(BIN)/infinilm generate "Why is the sky blue?" --max-tokens 100 --stats

# llama.cpp finds its own flags, but what it builds for AMX crashes: with AMX it is built for AVX-512 alone, and pip may
# not take another build from its cache.
LLAMA_FLAGS := $(if $(shell grep -s amx_tile /proc/cpuinfo),-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON \
    -DGGML_AVX512_VBMI=ON -DGGML_AVX512_BF16=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON)

# A peer that cannot be installed is left out of the comparison.
.venv/.peers: .venv/.dependencies
	$(PIP) $(call requirements,[r for r in p['optional-dependencies']['bench'] if 'llama' not in r])
	@echo "llama-cpp-python takes minutes to compile; its flags: $(or $(LLAMA_FLAGS),its own choice)"
	CMAKE_ARGS="$(LLAMA_FLAGS)" $(PIP) --no-build-isolation $(if $(LLAMA_FLAGS),--no-cache-dir) llama-cpp-python \
	    || echo "llama-cpp-python could not be built; rm .venv/.peers tries again at the next make bench"
	touch $@

# About half an hour on two cores; benchmarks/results/ gets the tables and charts.
bench: setup .venv/.peers
	$(BIN)/python -m benchmarks.ops
	$(BIN)/python -m benchmarks.side_by_side
	$(BIN)/python -m benchmarks.scaling

clean:
	rm -rf .venv build
