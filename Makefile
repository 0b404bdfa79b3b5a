# Two commands do everything on a fresh machine: `make serve` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: serve test check format bench bench-serving bench-wake soak chaos kills joins simulate model clean

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

bench: $(STAMP)  ## experts spread over two instances against not: throughput, step times (about a quarter of an hour)
	$(BIN)/python examples/bench_lockstep.py --output-json build/bench.json $(ARGS)

bench-serving: $(STAMP)  ## the load generator against the shipped model: table and JSON
	$(BIN)/python examples/bench_serving.py --serve "-dp 2" --ignore-eos --concurrency 1 8 32 --output-json build/bench-serving.json $(ARGS)

bench-wake: $(STAMP)  ## what the first token after a sleep costs
	$(BIN)/python examples/bench_wake.py --output-json build/bench-wake.json $(ARGS)

soak: $(STAMP)  ## ten minutes of bursts and gaps on a mesh in lockstep; fails if anything is lost
	$(BIN)/python examples/soak.py --minutes 10 --output-json build/soak.json $(ARGS)

chaos: $(STAMP)  ## two minutes (--seconds) of deaths, stops, joins and leaves under load, checked token for token
	$(BIN)/python -m tests.mesh.chaos $(ARGS)

kills: $(STAMP)  ## 20 kills each of MoE, two of four, tp and dense instances under 32 streams: what is lost (nothing), and how long it takes
	$(BIN)/python -m tests.mesh.kills --output-json build/kills.json $(ARGS)

joins: $(STAMP)  ## two instances join and two leave under 32 streams: pauses, and throughput in a plot
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m tests.mesh.joins --output-json build/joins.json --plot build/joins.svg $(ARGS)

simulate: $(STAMP)  ## 50,000 schedules of the protocol with deaths, stops, joins, leaves and coordinator restarts
	$(BIN)/python -m tests.simulator.elastic --schedules 50000 --jobs 2 $(ARGS)

model: $(STAMP)  ## train the shipped model again (about an hour)
	$(BIN)/python examples/train_model.py $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lockstep needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
