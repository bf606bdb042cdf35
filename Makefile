.PHONY: help train test check bench torture pictures venv audit hashes clean
PYTHON ?= python3
BIN := .venv/bin
EXTRAS ?= report,dev
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet

help: ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s%s\n", $$1, $$2}'

train: venv ## set up, then train merged_w on the embedded default
	$(BIN)/qkablate train variant=merged_w

test: venv ## set up, then run all tests
	$(BIN)/pytest -n auto

check: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv ## how fast it is here (some 20 minutes); beside nanoGPT with NANOGPT=FOLDER
	$(if $(NANOGPT),$(BIN)/python scripts/compare_nanogpt.py --nanogpt $(NANOGPT))
	$(BIN)/python scripts/bench.py $(if $(NANOGPT),--nanogpt $(NANOGPT))

torture: venv ## faults of all kinds, hundreds of each (under half an hour)
	$(BIN)/python -m tests.torture

pictures: venv ## those of the README, from a real sweep (some 9 minutes on 2 cores)
	$(BIN)/qkablate sweep sweep=quick sweep.name=readme 'seed=range(6)'
	$(BIN)/qkablate report readme -o outputs/report.svg
	cp outputs/report-gaps.svg outputs/report-gap-curves.svg docs/

venv: .venv/ready ## the environment alone, from pinned versions

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qkablate needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PIP) setuptools hatchling editables
	$(PIP) --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@

audit: .tools/ready ## known vulnerabilities of what constraints.txt pins (asks the package index)
	.tools/bin/pip-audit --no-deps --disable-pip --requirement constraints.txt

hashes: .tools/ready ## those that CI installs by: after every change of constraints.txt
	grep -v '^torch==' constraints.txt > .tools/pins.in
	.tools/bin/pip-compile --quiet --rebuild --generate-hashes --allow-unsafe --no-header --no-annotate \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host -o .ci/hashes.txt .tools/pins.in

.tools/ready:
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet pip-tools pip-audit
	@touch $@

clean: ## remove the environment and caches; runs stay
	rm -rf .venv .tools .pytest_cache .ruff_cache .mypy_cache
