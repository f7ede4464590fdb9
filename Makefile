# Everything sets itself up: on a fresh machine `make quickstart` and `make test` are the only commands needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup lock quickstart test tests test-all test-parts test-waiting lint unit bench bench-accept fuzz \
	smoke reproduce clean

help:
	@echo "make setup       create $(VENV) and install Headway with all extras"
	@echo "make quickstart  text in, trained model out: runs/quickstart; installs the core only"
	@echo "make test        lint, types, layers and all tests but the slow ones"
	@echo "make test-all    those too"
	@echo "make test-parts  tests with real servers and schedulers; installs what it can, system packages among it, and"
	@echo "                 tells what was tested and what was skipped"
	@echo "make test-waiting  the tests that wait, time and kill, ROUNDS times (3) beside BUSY busy processes (4)"
	@echo "make lint        ruff, mypy, import-linter"
	@echo "make lock        write bazel/requirements.txt by uv"
	@echo "make bench       small comparisons with others, held against benchmarks/ratios.json (12 to 25 minutes)"
	@echo "make bench-accept  take what is measured now as the ratios to keep"
	@echo "make fuzz        edit files that others may have written, and read them (FUZZ_SECONDS each, 300)"
	@echo "make smoke       100 steps of configs/smoke.yaml, and its checkpoint verified"
	@echo "make reproduce   the same bits twice, and after a kill"
	@echo "make pipeline    the steps of CI in their order; more of them in pipeline.mk: build, image, scan, pin, chaos"
	@echo "make clean       remove what the commands above made, except runs and data"

setup: $(VENV)/.ready

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# pip would do it on one core. Some environments keep Python from it later, and files of templates cannot be compiled.
COMPILE := $(BIN)/python -m compileall -qq -j 0 src $(VENV)/lib || true

# torch is installed first and within its range, so that no other package pulls in a newer one.
$(VENV)/.core: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) "torch>=2.11,<2.14"
	$(PIP) --editable .
	$(COMPILE)
	@touch $@

$(VENV)/.ready: $(VENV)/.core
	$(PIP) --editable ".[dev]"
	$(COMPILE)
	@touch $@

quickstart: $(VENV)/.core
	$(BIN)/headway quickstart
	@echo "headway is in $(BIN); for commands without the folder: source $(BIN)/activate"

# For Bazel: what the package requires, and what its tests do. pip and uv need no lock of this repository.
lock:
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--output-file bazel/requirements.txt pyproject.toml bazel/tests.in

lint: setup
	$(BIN)/ruff check src tests examples benchmarks tools
	$(BIN)/ruff check --preview --select PLR0917 src  # at most five positional parameters; a preview rule of ruff
	$(BIN)/ruff format --check src tests examples benchmarks tools
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests run beside each other; one thread each, since threads of several processes on one core hold each other up, and
# two more than there are processors, since many wait for processes, disks and clocks.
TESTERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? n + 2 : 4)))

# Types and layers are checked beside the tests: alone they would leave all processors but one idle.
test: setup
	@$(MAKE) --no-print-directory --jobs 2 lint tests

tests: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TESTERS) --dist worksteal --durations 40 -m "not slow and not parts"

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TESTERS) --dist worksteal -m "not parts"

# The only target that may install system packages (tests/parts/install.sh).
test-parts: setup
	$(PIP) --editable ".[parts]"
	tests/parts/install.sh
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TESTERS) --dist worksteal --durations 10 -m parts

# What waits for processes, signals, faults and clocks must be right on a machine that has no time for it.
ROUNDS ?= 3
BUSY ?= 4
WAITING ?= tests/faults tests/distributed/test_distributed_elastic.py tests/distributed/test_distributed_own.py \
	tests/distributed/test_distributed_replay.py tests/distributed/test_distributed_trainer.py \
	tests/e2e/test_e2e_preemption.py tests/e2e/test_e2e_verify.py tests/unit/lab/chaos tests/unit/clouds/launchers \
	tests/unit/run/notices tests/unit/run/session tests/unit/run/supervisor \
	tests/unit/lab/bench/test_bench_matrix.py tests/unit/lab/bench/test_bench_runner.py \
	$(wildcard tests/unit/checkpoint/test_checkpoint_*writer*.py) tests/unit/checkpoint/test_checkpoint_several_machines.py \
	$(addprefix tests/unit/core/test_core_,alerts.py faults.py files.py process_exit.py scratch.py signals.py \
	storage_client.py timeout_writer.py) \
	tests/unit/data/feeding/test_data_prefetch.py tests/unit/text/preparing/test_data_in_use.py \
	tests/unit/text/tokenizing/test_text_waiting.py \
	$(addprefix tests/unit/run/directory/test_runs_,cancel.py fetch_records.py run_directory.py) \
	tests/unit/tracking/test_tracking_exporter.py tests/unit/tracking/test_tracking_follower.py \
	tests/unit/training/test_training_conditions.py tests/unit/training/test_training_loop.py

test-waiting: setup
	@trap 'kill $$busy' EXIT; trap 'exit 1' HUP INT TERM; \
	for n in $$(seq $(BUSY)); do $(BIN)/python -S -c "while True: pass" & busy="$$busy $$!"; done; \
	for round in $$(seq $(ROUNDS)); do \
		OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TESTERS) --dist worksteal --durations 10 -m "not slow and not parts" \
			$(WAITING) || exit 1; \
	done

bench: setup
	$(BIN)/python benchmarks/gate.py --output build/bench.json

bench-accept: setup
	$(BIN)/python benchmarks/gate.py --output build/bench.json --accept

# make fuzz TARGETS="arrow csv" for some of them.
FUZZ_SECONDS ?= 300
fuzz: setup
	cd tests && ../$(BIN)/python -m fuzz $(TARGETS) --seconds $(FUZZ_SECONDS)

# The first steps of CI (pipeline.mk): 100 steps with a checkpoint that verifies, and equal bits twice and after a kill.
smoke: setup
	rm -rf runs/smoke
	$(HEADWAY) train $(SMOKE)
	$(HEADWAY) checkpoints verify runs/smoke

reproduce: setup
	$(HEADWAY) verify $(SMOKE)

include pipeline.mk

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
