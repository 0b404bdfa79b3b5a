# Two commands do everything on a fresh machine: `make serve` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: serve test check format bench model clean

serve: $(STAMP)  ## install, start the whole mesh (two instances) on the shipped model
	$(BIN)/serve -dp 2 $(ARGS)

test: $(STAMP)  ## run all tests
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## write the format and the fixes that `check` asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## the load generator against the shipped model: table and JSON
	$(BIN)/python examples/bench_serving.py --serve "-dp 2" --ignore-eos --concurrency 1 8 32 --output-json build/bench.json $(ARGS)

model: $(STAMP)  ## train the shipped model again (about an hour)
	$(BIN)/python examples/train_model.py $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lockstep needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
