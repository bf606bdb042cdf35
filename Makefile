.PHONY: help train test check bench torture pictures venv clean
PYTHON ?= python3
BIN := .venv/bin
EXTRAS ?= report,dev

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
	$(BIN)/python tests/torture

pictures: venv ## those of the README, from a real sweep (some 9 minutes on 2 cores)
	$(BIN)/qkablate sweep sweep=quick sweep.name=readme 'seed=range(6)'
	$(BIN)/qkablate report readme -o outputs/report.svg
	cp outputs/report-gaps.svg outputs/report-gap-curves.svg docs/

venv: .venv/ready ## the environment alone, from pinned versions

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qkablate needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

clean: ## remove the environment and caches; runs stay
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache
