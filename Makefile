# `make demo` and `make test` are all a new machine needs; both prepare .venv first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PYTORCH := .venv-pytorch
SEEDS ?= 500
RUNS ?= 500
NODES ?= 2
GPUS ?= 4
BIN := $(VENV)/bin
ROLES := .penstock/roles
ADMINISTRATOR ?= postgresql://penstock:penstock@127.0.0.1:5432/penstock
# The locked uv installs the other packages in a third of pip's time; both refuse a package whose hash is not in the lock.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
# Six test processes for two cores, each with servers of its own; the tests of one module stay together, longest first.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder

LIVE := $(addprefix tests/e2e/scheduling/test_,cores.py turns.py contention.py prelaunch.py)
LIVE_SLOW := tests/e2e/local/test_ends_in_time.py tests/unit/sdk/turns/test_sdk_chief.py \
  tests/integration/node_reporter/measure/test_node_contention.py

# A shell that forbids bytecode would have hundreds of processes compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv lock demo test pytest-command lint compiled schemas docs client sbom audit bench \
  restore-drill papers golden faults wheels deploy-check upgrade-check chaos liveness mutants long live \
  images-check pytorch up kafka jaeger kube roles clean

pytest-command:
	@echo $(PYTEST)

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

venv: $(VENV)/.ready ## Prepare .venv with the locked packages and `penstock` itself

$(VENV)/.ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)  # another interpreter than the one before, or its packages, would be mixed with it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r <(awk '/^[a-z]/ {uv = /^uv==/} uv' requirements.lock)
	$(UV) --require-hashes -r requirements.lock
	$(UV) --no-deps --no-build-isolation --editable .
	touch $@

lock: ## Resolve the dependencies again into requirements.lock
	$(BIN)/uv pip compile pyproject.toml --all-extras --generate-hashes --no-emit-index-url --python-version 3.11 --quiet --upgrade -o requirements.lock

demo: venv ## Watch a dozen real training jobs being scheduled on this machine (under 2 minutes)
	@$(BIN)/penstock demo

test: venv ## Lint, then every test of the CI run
	@$(MAKE) --no-print-directory -j 2 lint compiled
	$(PYTEST)

compiled: venv  # one process compiles the test modules beside lint, else each of six would compile all of them
	-@$(BIN)/python -m pytest --collect-only -qq -n 0 >/dev/null

lint: venv ## ruff, mypy strict, import contracts, clocks, words, decisions, budgets, unused parts, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto >/dev/null 2>&1 || $(BIN)/mypy  # its workers must answer within 3 s, which they do not on a busy machine
	$(BIN)/lint-imports
	$(BIN)/python -m infra.lints.clocks
	$(BIN)/python -m infra.lints.words
	$(BIN)/python -m infra.lints.decisions
	$(BIN)/python -m infra.lints.budgets >/dev/null
	$(BIN)/python -m infra.lints.unused
	$(BIN)/python -m infra.codegen.schemas --check
	$(BIN)/python -m infra.codegen.docs --check
	$(BIN)/python -m infra.codegen.blocking_client --check

sbom: venv ## Write sbom.json, a CycloneDX bill of materials of the locked packages (offline)
	@$(BIN)/python -m infra.supply_chain sbom sbom.json

audit: venv ## Audit the locked packages for known vulnerabilities; says so where no advisory service answers
	@$(BIN)/python -m infra.supply_chain audit

schemas: venv ## Generate schemas/ from the event models
	$(BIN)/python -m infra.codegen.schemas

client: venv ## Generate the blocking client from the asynchronous one
	$(BIN)/python -m infra.codegen.blocking_client

bench: venv ## Measure, write bench.json, print it as a table
	$(BIN)/python -m tests.bench

restore-drill: venv ## Lose the volumes of Kafka and Postgres and restore a copy; then measure backup and RTO with a million records (20 minutes)
	$(BIN)/python -m pytest tests/integration/backup/test_restore_drill.py -m "" -v
	$(BIN)/python -m tests.bench.services.restore

papers: venv ## Every table and figure of the five papers beside what comes out here, as papers.html and papers.json (15 to 35 minutes on two cores; needs PENSTOCK_DATA)
	$(BIN)/python -m tests.papers --json papers.json --page papers.html

golden: venv ## Compare decisions and answers with golden hashes; ARGUMENTS: tests/replay/README.md (5 to 15 minutes)
	$(BIN)/python -m tests.replay.behaviour $(ARGUMENTS)

faults: venv ## The long fault runs: more kills, more seeds than CI
	$(PYTEST) tests/faults -m "" --faults-scale 30 --deadline 28800

wheels: venv ## Build the wheel and download what it needs into deploy/wheels (infra/deploy/README.md)
	rm -rf deploy/wheels
	$(BIN)/python -m hatchling build -t wheel -d deploy/wheels
	sed -n 's/^\([a-z0-9][^ ;]*==[^ ;]*\).*/\1/p' requirements.lock > deploy/wheels/constraints.txt
	$(BIN)/python -m pip download --quiet --only-binary :all: -d deploy/wheels -c deploy/wheels/constraints.txt $(WHEELS_FOR) \
	  "$$(echo deploy/wheels/penstock-*.whl)[placer,estimator,batcher,migrator,contention-guard,projector,gateway,node-reporter,cli,s3]"

deploy-check: venv ## Follow infra/deploy/README.md, block by block, on six machines made of namespaces (root, systemd; some minutes)
	$(BIN)/python -m pytest tests/e2e/operation/test_deploy.py -m "" -v -s

images-check: venv ## Build the images, run the whole product by docker-compose.yml on podman, take it down and up again (root, podman; 6 minutes)
	$(BIN)/python -m pytest tests/e2e/operation/test_images.py -m "" -v -s

upgrade-check: venv ## Replace each service and node by the next version under load, and back; FORMER=COMMIT: from that commit to this tree (4 minutes)
	PENSTOCK_FORMER=$(FORMER) $(BIN)/python -m pytest tests/e2e/operation/test_upgrade.py -m "" -v -s

chaos: venv ## The fault laboratory: SEEDS runs of the real services (SEEDS=500), and as many whose services die for good; failures print their replay
	$(BIN)/python -m tests.faults.laboratory --seeds $(SEEDS)
	$(BIN)/python -m tests.faults.laboratory --seeds $(SEEDS) --lost random

liveness: venv ## RUNS random cells (RUNS=500): nobody waits beside free resources, and every reader reads numbers at the ends of their ranges
	$(BIN)/python -m tests.faults.random_cells --runs $(RUNS)

mutants: venv ## Break the product line by line against what it promises: who notices, random judges alone, and with tests (two minutes of processor time)
	$(BIN)/python -m tests.faults.promises

long: venv ## The tests that the CI run leaves out, without faults, deploy-check and live (half an hour and more)
	$(PYTEST) tests/papers tests/unit tests/simulation tests/replay tests/integration tests/e2e -m slow \
	  --deadline 14400 $(foreach file,$(addprefix tests/e2e/operation/test_,deploy.py images.py) $(LIVE) $(LIVE_SLOW),--deselect $(file))

live: venv ## Promised figures of real processes: steps follow cores, turns, contention, idle GPUs, ends (9 minutes)
	$(BIN)/python -m pytest $(LIVE) -m "" -v
	$(BIN)/python -m pytest $(LIVE_SLOW) -m slow -v

pytorch: venv ## Install PyTorch (3.2 GB) into .venv-pytorch; run libs/penstock/sdk/PYTORCH.md line by line
	$(PYTHON) -m venv $(PYTORCH)
	$(BIN)/uv pip install --python $(PYTORCH)/bin/python --require-hashes --no-deps -r tilt/pytorch.lock
	rm -rf $(PYTORCH)/wheels
	$(BIN)/python -m hatchling build -t wheel -d $(PYTORCH)/wheels
	$(BIN)/uv pip install --python $(PYTORCH)/bin/python --no-index --no-deps --reinstall $(PYTORCH)/wheels/*.whl
	$(BIN)/python -m pytest tests/e2e/trainings/test_pytorch.py -v

up: venv ## Run everything on this machine until Ctrl-C
	@$(BIN)/penstock up

kafka: venv ## Start a real Kafka broker on loopback until Ctrl-C
	@$(BIN)/python -m infra.devservers.kafka

jaeger: venv ## Start a real Jaeger on loopback until Ctrl-C
	@$(BIN)/python -m infra.devservers.jaeger

kube: venv ## Start a real Kubernetes cluster without containers until Ctrl-C (NODES=2 GPUS=4 ARGUMENTS=--scheduler)
	@$(BIN)/python -m infra.devservers.kubernetes --nodes $(NODES) --gpus $(GPUS) $(ARGUMENTS)

roles: venv ## Make a role for each service and two nodes in docker-compose.yml's Postgres (ADMINISTRATOR=URL: in another)
	@mkdir -p -m 700 $(ROLES)
	@test -e $(ROLES)/operator.key || (umask 077; head -c 32 /dev/urandom > $(ROLES)/operator.key)
	@PENSTOCK_LOG= PENSTOCK_DSN='$(ADMINISTRATOR)' $(BIN)/python -m penstock.local.postgres_setup \
	  --rights infra/kafka/acls.yaml --urls $(ROLES) --node node-0 --node node-1

docs: venv ## Generate the diagrams and tables in the docs from the code
	$(BIN)/python -m infra.codegen.docs

clean: ## Remove what the targets made
	rm -rf $(VENV) $(PYTORCH) .penstock bench.json papers.json papers.html sbom.json
