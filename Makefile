# One command for each job; `make` alone lists them. `make demo` and `make test` need nothing before them.
#   PYTHON=/path/to/python3.11   the interpreter of a new .venv
#   ARGS="..."                   more arguments for the demo, a benchmark or pytest

SHELL := bash
BIN := .venv/bin
INSTALLED := .venv/.installed
# Two processes share the tests: the longest group, those on a Ray cluster, comes first and keeps one of them busy.
WORKERS := -n 2 --no-loadscope-reorder
PROTO := $(sort $(wildcard proto/paceline/v1/*.proto))
BENCHMARKS := $(sort $(wildcard benchmarks/[!_]*.py))

.PHONY: help demo demo-ray test test-all fuzz check check-style check-types check-imports check-proto format proto bench clean

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: $(INSTALLED) ## answer the same prompts plain, sequential and pipelined with the default model
	@$(BIN)/paceline demo $(ARGS)

demo-ray: $(INSTALLED) ## the same through Ray Serve: a minute or two on two cores
	@$(BIN)/paceline demo --ray $(ARGS)

test: $(INSTALLED) ## run all tests but the slow ones
	@$(BIN)/pytest $(WORKERS) $(ARGS)

test-all: $(INSTALLED) ## run all tests
	@$(BIN)/pytest $(WORKERS) -m '' $(ARGS)

fuzz: $(INSTALLED) ## throw 50,000 requests of any kind at the services; CASES=... SEED=...
	@PACELINE_FUZZ_CASES='$(CASES)' PACELINE_FUZZ_SEED='$(SEED)' $(BIN)/pytest -s -m slow tests/fuzz $(ARGS)

check: check-style check-types check-imports check-proto ## everything that can be checked without running a service

check-style: $(INSTALLED)
	@echo 'check: style'
	@$(BIN)/ruff check --quiet --output-format concise
	@$(BIN)/ruff format --check --quiet

check-types: $(INSTALLED)
	@echo 'check: types'
	@$(BIN)/mypy

check-imports: $(INSTALLED)
	@echo 'check: who imports what'
	@$(BIN)/lint-imports --no-logo

check-proto: $(INSTALLED)
	@echo 'check: protocol, and the code generated from it'
	@$(BIN)/buf lint
	@$(BIN)/pytest tests/unit/test_generated_code.py

format: $(INSTALLED) ## put all Python code into the project's form
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format

proto: $(INSTALLED) ## generate services/paceline/v1 from proto/
	@rm -f services/paceline/v1/*_pb2*.py*
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=services --pyi_out=services \
	  --grpc_python_out=services $(PROTO)

bench: $(INSTALLED) ## list the benchmarks; NAME=... runs one
ifdef NAME
	@$(BIN)/python -m benchmarks.$(NAME) $(ARGS)
else
	@$(foreach path,$(BENCHMARKS),printf '  make bench NAME=%-24s%s\n' $(basename $(notdir $(path))) \
	  "$$(sed -n '1s/^"*\([^"]*\).*/\1/p' $(path))";)
endif

clean: ## remove the virtual environment and all caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt tools/install
	@PYTHON='$(PYTHON)' MAKECMDGOALS='$(MAKECMDGOALS)' tools/install .venv
	@touch $@
