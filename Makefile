# Two commands do all the set-up: `make demo` and `make test`. Each creates .venv first where it is missing or stale.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The editable install links modules one by one, so it is made anew when there are others than before.
MODULES := $(shell find proto kernels engine prm search experiments -name '*.py' | sort | cksum | cut -d' ' -f1)
STAMP  := $(VENV)/.installed-$(MODULES)

.PHONY: help demo test test-slow test-gpu test-browser test-tools lint proto install clean
.DEFAULT_GOAL := demo
# Modules are compiled as they are first imported: most of what is installed never is, and would take a minute.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile
# Tests start many processes, which would each compile all modules again where bytecode is not written.
unexport PYTHONDONTWRITEBYTECODE

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(STAMP)  ## make .venv with all that is needed

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Espalier needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -r requirements.txt
	rm -rf build/__editable__*
	$(PIP_INSTALL) --no-deps --no-build-isolation \
		--editable . --config-settings editable_mode=strict
	rm -f $(VENV)/.installed-*
	touch $(STAMP)

$(VENV)/.tests: tests/requirements.txt $(STAMP)
	$(PIP_INSTALL) -r tests/requirements.txt
	touch $@

demo: $(STAMP)  ## solve one problem by beam search with the bundled models, on CPU
	$(BIN)/espalier solve

# One process more than cores, as many tests wait for processes of their own.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')
# A test that hangs prints the stacks of its threads, then ends its process and fails by name.
HANGS := -o faulthandler_timeout=240 --timeout 300 --timeout-method thread

MARKERS := not slow and not browser and not tools

test: $(VENV)/.tests  ## the suite but the markers slow, browser and tools, on up to four cores; ROOM=search/voting for one room
	$(BIN)/python -m pytest $(ROOM:%=tests/%) -m "$(MARKERS)" $(HANGS) --numprocesses $(WORKERS) --dist worksteal $(OPTIONS)

test-slow: $(VENV)/.tests  ## the minutes-long checks
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest -m "hypothesis and not slow" --hypothesis-profile thorough

test-gpu:  ## what needs a GPU: tests and figures, with the machine's own Python
	tests/gpu/all.sh

$(VENV)/.browser: tests/search/service/page/requirements.txt $(VENV)/.tests
	$(PIP_INSTALL) -r tests/search/service/page/requirements.txt
	touch $@

test-browser: $(VENV)/.browser  ## the page, in a headless Chromium (Debian: chromium, chromium-driver)
	$(BIN)/python -m pytest -m browser $(HANGS)

# Environments of their own, which also see the packages of $(VENV), so that torch is there once.
TOOLS := build/tools
$(TOOLS)/%/.installed: $(VENV)/.tests
	$(PYTHON) -m venv $(TOOLS)/$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(TOOLS)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_shared.pth
	$(TOOLS)/$*/bin/python -m pip install --disable-pip-version-check --quiet $(TOOL_PACKAGES)
	touch $@
$(TOOLS)/lm_eval/.installed: TOOL_PACKAGES := 'lm_eval[api]==0.4.13' accelerate
$(TOOLS)/inspect_ai/.installed: TOOL_PACKAGES := inspect_ai==0.3.285
$(TOOLS)/its_hub/.installed: TOOL_PACKAGES := 'its_hub[iaas,lm]==1.2.0' openai
$(TOOLS)/kubernetes/.installed: TOOL_PACKAGES := kubernetes-validate==1.37.0
$(TOOLS)/trl/.installed: TOOL_PACKAGES := trl==1.16.0
$(TOOLS)/clients/.installed: TOOL_PACKAGES := openai==3.57.0 anthropic==2.14.0 langchain-openai==1.7.4 \
	'pydantic-ai-slim[openai]==2.68.0' openai-agents==0.24.0 'smolagents[openai]==1.26.0' litellm==1.110.2
$(TOOLS)/triton/.installed: TOOL_PACKAGES := 'tritonclient[grpc,http]==2.73.0' 'protobuf<7'

test-tools: $(foreach tool,lm_eval inspect_ai its_hub trl clients triton kubernetes,$(TOOLS)/$(tool)/.installed)  ## tools of others that call the server, such as lm_eval, or check its files
	$(BIN)/python -m pytest -m tools $(HANGS)

lint: $(VENV)/.tests  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# A venv of its own: stubs refuse a grpcio older than the tools that made them, so the oldest supported tools make them.
PROTO_TOOLS := grpcio-tools==1.71.2

proto:  ## regenerate the stubs after an edit of proto/espalier/*/*.proto
	$(PYTHON) -m venv build/protoc
	build/protoc/bin/python -m pip install --disable-pip-version-check --quiet $(PROTO_TOOLS)
	build/protoc/bin/python -m grpc_tools.protoc --proto_path=proto \
		--python_out=proto --pyi_out=proto --grpc_python_out=proto proto/espalier/*/*.proto

clean:  ## remove .venv and what was built
	rm -rf $(VENV) build/protoc build/__editable__* dist *.egg-info
