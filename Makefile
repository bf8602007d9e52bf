# Two commands for a newcomer, from a fresh clone with Python >= 3.11 and a network to PyPI:
#
#   make demo    fetch a real model, quantise it to INT4 (data-free and by GPTQ, with FP8 KV scales), NVFP4 and FP8,
#                verify the results with packed kernels, and measure their accuracy
#   make test    ruff, mypy and pytest
#
# Everything lands in this folder (.venv*, demo-out, caches of the tools); `make clean` removes it again.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

# the first interpreter that starts and is new enough; `make PYTHON=...` names another
is_new_enough = $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do if $(call is_new_enough,$$p); then echo $$p; break; fi; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# files and folders: a removed file changes its folder's time, so the wheel is built again then as well
SOURCES := $(shell find kernels calibrate export quantize recipes -not -path '*/__pycache__*')
PACKAGES := kernels calibrate export quantize

DEMO := demo-out
MODEL := $(DEMO)/smollm2

.PHONY: help demo test lint types unit vllm bench clean

help:
	@sed -n 's/^#   make/  make/p' Makefile
	@echo '  make vllm    the tests that run a real vLLM in a virtual environment of its own'
	@echo '  make bench   the streaming benchmark (tests/bench/stream.py; BENCH="--gb 1 --no-peer" for less)'
	@echo '  make clean   remove what the other commands made'

# ---- environment: what is tested is what ships, so the wheel is installed and never the working tree ----

$(VENV)/python.stamp:
	@test -n '$(PYTHON)' || { echo 'no Python >= 3.11 found; hint: make PYTHON=/path/to/python3.11' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt 'scikit-build-core>=0.11'
	@touch $@

$(VENV)/%.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(PIP) install --quiet --no-build-isolation -c constraints.txt '.[$*]'
	@touch $@

$(VENV)/wheel.stamp: $(VENV)/python.stamp $(SOURCES) pyproject.toml
	$(PIP) install --quiet --no-build-isolation --no-deps --force-reinstall .
	@touch $@

# ---- make test ----

test: lint types unit

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The folders have no __init__.py and are imported as quantkit.*: mypy follows them as the packages of the installed
# wheel (each has a py.typed), and the paths it prints are turned back into those of the working tree.
types: $(VENV)/dev.stamp $(VENV)/wheel.stamp
	set -o pipefail; $(BIN)/mypy $(PACKAGES:%=-p quantkit.%) | sed 's|^.*/site-packages/quantkit/||'

unit: $(VENV)/dev.stamp $(VENV)/wheel.stamp
	$(BIN)/pytest -m 'not vllm' $(PYTEST)

# ---- make demo ----

demo: $(VENV)/calibrate.stamp $(VENV)/demo.stamp $(VENV)/wheel.stamp
	$(BIN)/python tests/smollm2.py $(MODEL)
	@$(call quantize,int4,-r int4 --group 64)
	@$(call quantize,nvfp4,-r nvfp4)
	@$(call quantize,fp8,-r fp8-channel)
	@$(call calibrate,gptq,-r int4-gptq-kv-fp8 --group 64 --samples 64 --seq-len 512)
	@$(call dialect,gptq,gptq)
	@$(call dialect,gptq,awq)
	@$(call dialect,gptq,modelopt)
	@$(call evaluate,int4,int4)
	@$(call evaluate,gptq,gptq)
	@$(call evaluate,gptq,gptq-kv,--kv)
	@$(BIN)/python tests/demo_table.py 'INT4 g64, data-free=$(MODEL)-int4.json' \
	    'INT4 g64, GPTQ=$(MODEL)-gptq.json' 'INT4 g64, GPTQ, FP8 KV cache=$(MODEL)-gptq-kv.json'
	@printf '\n%s\n' 'Done, and verified against the source. The model as published and the four checkpoints to serve:'
	@du -shc --apparent-size $(MODEL) $(MODEL)-int4 $(MODEL)-nvfp4 $(MODEL)-fp8 $(MODEL)-gptq | sed '$$d'

define quantize
printf '\n==== %s ====\n' '$(1)'; rm -rf $(MODEL)-$(1); set -ex; \
$(BIN)/quantkit plan $(MODEL) $(2); \
$(BIN)/quantkit quantize $(MODEL) $(2) -o $(MODEL)-$(1) --no-verify; \
$(BIN)/quantkit verify $(MODEL)-$(1) --source $(MODEL)
endef

define calibrate
printf '\n==== %s ====\n' '$(1)'; rm -rf $(MODEL)-$(1) $(MODEL)-$(1).run; set -ex; \
$(BIN)/quantkit calibrate $(MODEL) $(2) -o $(MODEL)-$(1).run; \
$(BIN)/quantkit export $(MODEL)-$(1).run -o $(MODEL)-$(1); \
$(BIN)/quantkit verify $(MODEL)-$(1) --source $(MODEL) --run $(MODEL)-$(1).run; \
$(BIN)/quantkit verify $(MODEL)-$(1) --engine vllm --engine sglang
endef

# the same codes in another format, and what engines will do with them; exit 1 says that one refuses them
define dialect
printf '\n==== %s as %s ====\n' '$(1)' '$(2)'; rm -rf $(MODEL)-$(1)-$(2); set -ex; \
$(BIN)/quantkit export $(MODEL)-$(1).run --format $(2) -o $(MODEL)-$(1)-$(2); \
$(BIN)/quantkit verify $(MODEL)-$(1)-$(2) --engine vllm --engine sglang --engine trtllm || test $$? = 1
endef

define evaluate
printf '\n==== accuracy of %s ====\n' '$(2)'; set -ex; \
$(BIN)/quantkit evaluate $(MODEL)-$(1) --source $(MODEL) $(3) \
    --text tests/data/wikitext-2-test.txt --samples 16 --seq-len 512 --json > $(MODEL)-$(2).json
endef

# ---- for continuous integration and for measuring ----

vllm: $(VENV)/dev.stamp $(VENV)/wheel.stamp .venv-vllm/ready.stamp
	QUANTKIT_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/pytest -m vllm $(PYTEST)

.venv-vllm/ready.stamp: tests/integration/make_vllm_venv.sh
	bash $< .venv-vllm $(PYTHON)
	@touch $@

bench: $(VENV)/dev.stamp $(VENV)/wheel.stamp .venv-peer/ready.stamp
	$(BIN)/python tests/bench/stream.py --peer-python .venv-peer/bin/python $(BENCH)

.venv-peer/ready.stamp: tests/bench/make_peer_venv.sh
	bash $< .venv-peer $(PYTHON)
	@touch $@

clean:
	rm -rf .venv .venv-vllm .venv-peer $(DEMO) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
