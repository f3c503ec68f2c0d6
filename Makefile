PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: setup train check test test-long test-all coverage fuzz faults attack soak bench docs site clean

PYTEST := pytest -n 2 --dist loadfile --no-loadscope-reorder

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $@

train: setup
	$(BIN)/vpipe train configs/demo.yml

check: setup
	$(BIN)/ruff check vpipe tests benchmarks examples docs
	$(BIN)/ruff format --check vpipe tests benchmarks examples docs
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup
	$(BIN)/python -m $(PYTEST) -m "not long"

test-long: setup
	$(BIN)/python -m $(PYTEST) -m long

test-all: test test-long

faults: setup
	$(BIN)/python -m tests.faults.matrix --docs docs/reliability.md  # every rank x every point: some minutes

attack: setup
	$(BIN)/python -m tests.faults.attack --rounds 200 --docs docs/reliability.md  # signals from outside: half an hour

soak: setup
	$(BIN)/python -m tests.faults.soak --faults 200

coverage: export COVERAGE_FILE = $(CURDIR)/.coverage
coverage: setup  # of the lines of vpipe/ by `make test`, in all of its processes
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m $(PYTEST) -m "not long"
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered --sort=miss

fuzz: setup
	VPIPE_FUZZ=10000 $(BIN)/python -m $(PYTEST) -m hypothesis --timeout 0 tests/unit  # new examples of every property test
	VPIPE_FUZZ=10000 $(BIN)/python -m pytest tests/fuzz  # a minute or two of a processor for each format

bench: setup
	$(BIN)/python benchmarks/peers.py

docs: setup
	$(BIN)/python -m vpipe.config.docs > docs/config.md

site: setup  # the documentation in build/site, without a network; fails for a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .coverage* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
