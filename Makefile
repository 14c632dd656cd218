# Every target sets up .venv by itself; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo check quick test lint type bench figures fuzz chaos clean

help:  ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# constraints.txt pins torch to its CPU build: resolving it freely would pull gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lab,dev,frameworks]'
	touch $(READY)

demo: $(READY)  ## compare optimizers on embedded data: table and report.html, a few minutes
	$(BIN)/eshampoo compare digits-vit --optimizers adamw,shampoo,soap,eshampoo --seeds 3 --out runs/demo

check: $(READY)  ## for the inner loop, 90 seconds: lint, types, every test that is not slow
	$(MAKE) -j 2 lint type quick

quick: $(READY)  ## every test that is not slow
	$(BIN)/python -m pytest -n 2 -m "not slow"

test: $(READY) lint type  ## everything that must hold, under ten minutes: lint, types, all tests
	$(BIN)/python -m pytest -n 2

lint: $(READY)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)  ## mypy, strict, and pyright
	$(BIN)/mypy
	$(BIN)/pyright

bench: $(READY)  ## measure against peers and the matrix-product limit; writes docs/benchmarks.md
	$(BIN)/python -m benchmarks.run

figures: $(READY)  ## draw the figures of docs/reproduction.md and docs/defaults.md again from results/
	for name in time fig1 fig2 fig3 fig4 fig5 partial; do $(BIN)/eshampoo reproduce $$name --out docs/reproduction || exit 1; done
	$(BIN)/eshampoo study defaults --out docs

fuzz: $(READY)  ## 10,000 random cases against the oracles, seeds printed
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --cases 10000

chaos: $(READY)  ## runs killed with SIGKILL at 50 random points resume bit for bit
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos.py --kills 50

clean:  ## remove what the targets made
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
