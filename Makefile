# Everything runs in .venv, which the first target that needs it makes. PIP_ARGS is passed on to pip:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON   ?= python3
VENV     ?= .venv
PIP_ARGS ?=
ARGS     ?=
ROOMS    ?= tests/agent tests/store
BIN      := $(VENV)/bin
PROVING  := build/proving/.venv

.PHONY: demo test test-long test-python test-gpu test-te test-stacks stacks healthy families lint docs serve bench bench-gpu trainings-gpu bench-detect prove prove-forecasts screenshots clean
.DEFAULT_GOAL := help

# Two processes, a file of tests in one of them; torch's own threads would fight over the same cores.
WORKERS ?= 2
# Files keep their order: sorted by how many tests they have, the longest ones would run last, and alone.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

help:
	@grep -B1 -E '^[a-z-]+:' Makefile | grep -E '^# ' | sed 's/^# /  /'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.demo

# make demo         train a small model in FP8, break it, see it named (ARGS="--fault lr --exit")
demo: $(VENV)/.demo
	$(BIN)/fp8watch demo $(ARGS)

# make test         all tests of every change; a quarter of an hour on two fast cores, three quarters on slow ones
test: $(VENV)/.dev
	$(PYTEST) -m "not long" $(ARGS)

# make test-long    the full counts: every fault of the demo, 600 healthy steps, every promise broken on purpose
test-long: $(VENV)/.dev
	$(PYTEST) -m long $(ARGS)

# make test-python  agent, wire and store on another Python, without torch (PYTHON=python3.13 ROOMS=tests/agent)
test-python:
	$(PYTHON) -m venv $(VENV)-$(notdir $(PYTHON))
	$(VENV)-$(notdir $(PYTHON))/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[test]'
	$(VENV)-$(notdir $(PYTHON))/bin/python -c 'import fp8watch, fp8watch_agent.sync, fp8watch_server.app'
	OMP_NUM_THREADS=1 $(VENV)-$(notdir $(PYTHON))/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not long" $(ROOMS) $(ARGS)

# make test-gpu     what only a GPU can show; fails where there is none
test-gpu: $(VENV)/.dev
	PYTHON=$(abspath $(BIN)/python) tests/gpu/run.sh check

# make test-te      Transformer Engine of six versions over a stand-in for its C++ extension; asks the package registry
test-te: $(VENV)/.dev
	PYTHON=$(abspath $(BIN)/python) PIP_ARGS="$(PIP_ARGS)" WORKERS=$(WORKERS) tests/te/real/run.sh $(ARGS)

# make test-stacks  Hugging Face, Lightning, accelerate, DeepSpeed, Megatron, wandb ...: real packages from the registry (ARGS="lightning")
test-stacks: $(VENV)/.dev
	PYTHON=$(abspath $(BIN)/python) PIP_ARGS="$(PIP_ARGS)" WORKERS=$(WORKERS) tests/stacks/run.sh $(ARGS)

# make stacks       the same trainers, watched and not, an Inf told to a collector; writes docs/integrations.md (ARGS="--print hugging")
stacks: $(VENV)/.dev
	PYTHON=$(abspath $(BIN)/python) PIP_ARGS="$(PIP_ARGS)" tests/stacks/run.sh --table $(ARGS)

# make healthy      2,000 steps of each recipe and backend, torchao and Transformer Engine among them, in which nothing may be raised
healthy: $(VENV)/.dev
	$(PYTEST) -m "" -k long_healthy tests/canary tests/ao
	FP8WATCH_HEALTHY_STEPS=2000 PYTEST_ADDOPTS="-k healthy_run" \
	  PYTHON=$(abspath $(BIN)/python) PIP_ARGS="$(PIP_ARGS)" WORKERS=$(WORKERS) tests/te/real/run.sh 2.20.2

# make families     tiny models of transformers' and diffusers' families, observed; writes docs/integrations.md (ARGS="--print gpt")
families: $(VENV)/.dev
	PYTHON=$(abspath $(BIN)/python) PIP_ARGS="$(PIP_ARGS)" tests/stacks/families.sh $(ARGS)

# make lint         ruff, mypy --strict, and the order of the rooms
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# make docs         the docs site, in build/site; a warning is an error
docs: $(VENV)-docs/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

$(VENV)-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	@touch $@

# make serve        the collector on http://127.0.0.1:8420 (ARGS="--port 9000")
serve: $(VENV)/.demo
	$(BIN)/fp8watch serve $(ARGS)

# make bench        measure, and write docs/benchmarks.md with machine and versions
bench: $(VENV)/.dev
	$(BIN)/python tests/benchmarks/run.py $(ARGS)

# make bench-detect the engine and the public rules on made-up and recorded traces, printed: for a change of it (no torch; ARGS="--seeds 1")
bench-detect: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m benchmarks.detection.score $(ARGS)

# make prove        faults and healthy events in real trainings, at attach's defaults; hours, resumable (ARGS="--part 1/4 --jobs 2")
prove: $(PROVING)/.ready
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PROVING)/bin/python -m proving.run $(ARGS)
	$(if $(ARGS),,PYTHONPATH=tests $(PROVING)/bin/python -m proving.score)

# make prove-forecasts slow trends in real trainings: how often a forecast holds; half an hour, resumable (ARGS="--only gpt --again")
prove-forecasts: $(PROVING)/.ready
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PROVING)/bin/python -m proving.forecasts $(ARGS)

# Beside .venv, whose packages it sees: what else families need is not needed by anything else.
$(PROVING)/.ready: $(VENV)/.demo tests/proving/requirements.txt
	$(BIN)/python -m venv --without-pip $(PROVING)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(\"" + sysconfig.get_path("purelib") + "\")")' \
	  > $$($(PROVING)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(PROVING)/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt -r tests/proving/requirements.txt
	@touch $@

# make bench-gpu    the GPU's part of docs/benchmarks.md; fails where there is none
bench-gpu: $(VENV)/.dev
	PYTHON=$(abspath $(BIN)/python) ARGS="$(ARGS)" tests/gpu/run.sh bench

# make trainings-gpu small trainings on a GPU, watched and not, and Transformer Engine's where it is installed; fails where there is no GPU
trainings-gpu: $(VENV)/.dev
	PYTHON=$(abspath $(BIN)/python) ARGS="$(ARGS)" tests/gpu/run.sh trainings

# make screenshots  docs/images from real runs of the demo (ARGS="--collector URL": where they are already)
screenshots: $(VENV)/.dev
	$(BIN)/python docs/screenshots.py $(ARGS)

# make clean        forget the virtual environments and the caches
clean:
	rm -rf $(VENV) $(VENV)-* .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist
