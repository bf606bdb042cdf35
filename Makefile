.PHONY: help train test test-all test-slow test-exhaustive wheel check bench gpu torture pictures docs venv audit hashes clean
PYTHON ?= python3
BIN := .venv/bin
EXTRAS ?= dev
# On a terminal pip shows its progress.
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install $(if $(MAKE_TERMOUT),,--quiet)

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s%s\n", $$1, $$2}'

train: venv ## set up, then train merged_w (no download)
	$(BIN)/qkablate train variant=merged_w

# Hundreds of processes would compile the package anew where the environment forbids bytecode files.
test test-slow test-exhaustive: export PYTHONDONTWRITEBYTECODE =
# worksteal gives a worker whole files, so that it makes what their tests share once.

test: venv ## set up, then run the tests (in 10 to 20 minutes on 2 cores)
	$(BIN)/pytest -n auto --dist worksteal -m "not slow and not exhaustive"

# These wait for other processes nearly half of their time, so there are more of them than cores.
MORE_WORKERS := -n $$($(BIN)/python -c 'import os; print(os.cpu_count() * 2)') --dist worksteal

test-slow: venv ## the tests that take long: clusters, browser, kills, servers (CI runs them, too)
	$(BIN)/pytest $(MORE_WORKERS) -m slow

test-exhaustive: venv ## simulations, injected faults, all combinations (an hour on 2 cores)
	$(BIN)/pytest $(MORE_WORKERS) -m exhaustive

test-all: test test-slow test-exhaustive ## all tests, before a release

wheel: venv ## build the package and try it with every supported Python (about 4 minutes)
	PATH="$$PWD/$(BIN):$$PATH" scripts/try-wheel

check: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv ## measure speed on this machine (about 20 minutes); compare with nanoGPT: NANOGPT=FOLDER
	$(if $(NANOGPT),$(BIN)/python scripts/compare_nanogpt.py --nanogpt $(NANOGPT))
	$(BIN)/python scripts/bench.py $(if $(NANOGPT),--nanogpt $(NANOGPT))

gpu: venv ## test and measure the GPU of this machine, as a table to paste; compare with nanoGPT: NANOGPT=FOLDER
	@$(BIN)/python scripts/measure_gpu.py $(if $(NANOGPT),--nanogpt $(NANOGPT))

torture: venv ## inject hundreds of faults of each kind (under half an hour)
	$(BIN)/python -m tests.torture

# 113 runs or more choose the learning rates of four variants and the floor, 30 are compared.
pictures: venv ## train a tuned sweep and draw the figure of docs/reports.md (about half an hour of 2 idle cores)
	$(BIN)/qkablate sweep variant=standard,merged_w,no_q,shared_qk 'seed=range(6)' model.layers=2 model.d_model=64 \
		train.steps=1000 optim.lr=8e-3 precision=fp32 matmul=torch attention.kernel=math sweep.tune=true \
		sweep.name=readme
	$(BIN)/qkablate report readme -o outputs/report.svg
	cp outputs/report-gap-curves.svg docs/
	$(BIN)/python scripts/darken.py docs/report-gap-curves.svg

# .venv may lack the extra: then it is installed, from the same pins.
docs: .venv/docs ## build the documentation into site/, without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/docs: .venv/ready
	$(BIN)/python -c 'import material' 2> /dev/null || $(PIP) --no-build-isolation --editable '.[$(EXTRAS),docs]'
	@touch $@

venv: .venv/ready ## create the environment from pinned versions

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qkablate needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo "venv: create .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "venv: install the build tools"
	@$(PIP) setuptools hatchling editables
	@echo "venv: install qkablate with torch and the others of constraints.txt (minutes; some GB with CUDA)"
	@$(PIP) --no-build-isolation --editable '.[$(EXTRAS)]'
	@echo "venv: done; source .venv/bin/activate puts qkablate on your path"
	@touch $@

audit: .tools/ready ## look up known vulnerabilities of the pinned versions (asks the package index)
	.tools/bin/pip-audit --no-deps --disable-pip --requirement constraints.txt

hashes: .tools/ready ## renew .ci/hashes.txt after a change of constraints.txt
	grep -v '^torch==' constraints.txt > .tools/pins.in
	.tools/bin/pip-compile --quiet --rebuild --generate-hashes --allow-unsafe --no-header --no-annotate \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host -o .ci/hashes.txt .tools/pins.in

.tools/ready:
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet pip-tools pip-audit
	@touch $@

clean: ## remove the environment, built files and caches; keep runs
	rm -rf .venv .tools dist site .pytest_cache .ruff_cache .mypy_cache
