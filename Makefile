# Every target sets up .venv by itself; `make help` lists them.
PYTHON ?= python3
# What pip installs as torch, with any of its options. constraints.txt sets the version; the index
# sets the build. On Linux, that of PyPI brings gigabytes of CUDA along.
TORCH ?= torch
# Where the demo computes.
DEVICE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo check quick test suite lint type bench figures docs fuzz chaos soak release-check clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lab,dev,frameworks,docs,release]'
	touch $(READY)

demo: $(READY)  ## compare optimizers on embedded data: table and report.html, a few minutes
	$(BIN)/eshampoo compare digits-vit --optimizers adamw,muon,shampoo,soap,eshampoo --seeds 3 --device $(DEVICE) --out runs/demo

check: $(READY)  ## for the inner loop, about 90 seconds on two cores: lint, types and every test that is not slow
	$(MAKE) -j 2 lint type quick

quick: $(READY)  ## every test that is not slow
	$(BIN)/python -m pytest -n 2 -m "not slow"

test: $(READY)  ## everything that must hold, at most 8 minutes on two cores: lint, types and all tests
	$(MAKE) -j 2 suite lint type

suite: $(READY)  ## all tests
	$(BIN)/python -m pytest -n 2

lint: $(READY)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)  ## mypy, strict, and pyright
	$(BIN)/mypy
	$(BIN)/pyright

bench: $(READY)  ## measure against peers and the matrix-product limit; writes docs/benchmarks.md
	$(BIN)/python -m benchmarks.run

figures: $(READY)  ## draw the figures of docs/reproduction.md and docs/evidence.md again from results/
	for name in $(notdir $(basename $(wildcard docs/reproduction/*-small.md))); do $(BIN)/eshampoo reproduce $${name%-small} --stored --out docs/reproduction || exit 1; done
	$(BIN)/eshampoo study evidence --stored --out docs

docs: $(READY)  ## the site, in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

fuzz: $(READY)  ## 10,000 random cases against the oracles, seeds printed
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --cases 10000

chaos: $(READY)  ## 100 kills of the lab and of a plain loop
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos.py --kills 100

soak: $(READY)  ## an hour on one to three ranks, with kills, faults and resumes; MINUTES=60
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py --minutes $(or $(MINUTES),60)

release-check: $(READY)  ## build, look inside, install into empty environments, run the README's code and the tests of the sdist
	OMP_NUM_THREADS=1 $(BIN)/python .ci/release_check.py

clean:  ## remove what the targets made
	rm -rf $(VENV) runs build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
