# SPDX-License-Identifier: Apache-2.0
# Needs make and Python >= 3.11 alone; each command sets up the rest in .venv, and reuses it.
#   make demo    an image and a clip from a tiny checkpoint with random weights
#   make test    linters, documentation, tests
#   make docs    the documentation alone; make clean removes what the others made
# PYTHON chooses the interpreter (another one than before makes .venv anew), WORKERS the number of
# test processes.

PYTHON ?= python3
WORKERS ?= 2
DEMO_STEPS ?= 10

VENV := .venv
BIN := $(VENV)/bin
# The stamps carry the checkout's path: a copied checkout must not go on using the original's code.
ID := $(shell printf '%s' '$(CURDIR)' | cksum | cut -d ' ' -f 1)
BASE := $(VENV)/installed-$(ID)
FULL := $(VENV)/installed-test-docs-$(ID)
SETUP := pyproject.toml setup.py constraints.txt tensorrt_llm/version.py
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt
EXAMPLE := $(BIN)/python examples/visual_gen/models/cosmos3/cosmos3.py

# The interpreter below any virtual environment. Asked for only where PYTHON is given: without it,
# an environment that was made with a PYTHON of its own stays.
IDENTITY := -c 'import os, sys; print(os.path.realpath(sys._base_executable), sys.version.split()[0])'
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard $(BIN)/python),)
ifneq ($(shell $(PYTHON) $(IDENTITY)),$(shell $(BIN)/python $(IDENTITY)))
REBUILD := FORCE
endif
endif
endif

.PHONY: help demo test lint docs clean FORCE
.DELETE_ON_ERROR:

help:
	@sed -n '2,7s/^# \{0,1\}//p' Makefile

demo: $(BASE)
	@mkdir -p demo_output
	@echo "== image =="
	@$(EXAMPLE) --prompt "A robot arm folds a towel in a bright kitchen." --output_type image \
	  --height 256 --width 256 --num_inference_steps $(DEMO_STEPS) --seed 42 \
	  --output_path demo_output/image.png
	@echo "== clip =="
	@$(EXAMPLE) --prompt "A robot arm folds a towel in a bright kitchen." --output_type video \
	  --height 192 --width 320 --num_frames 17 --num_inference_steps $(DEMO_STEPS) --seed 42 \
	  --output_path demo_output/clip.mp4
	@echo "== read back =="
	@$(BIN)/python scripts/describe_media.py demo_output/image.png demo_output/clip.mp4

test: lint docs
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

lint: $(FULL)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

docs: $(FULL)
	@$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs/source docs/build/html
	@echo "documentation: docs/build/html/index.html"

clean:
	rm -rf $(VENV) demo_output build docs/build *.egg-info

$(BIN)/python: $(REBUILD)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Python >= 3.11 is needed, found " + sys.version.split()[0] + "; set PYTHON, as in: make PYTHON=python3.12 test")'
	@echo "creating $(VENV) with $(PYTHON) (the first time takes some minutes)"
	@$(PYTHON) -m venv --clear $(VENV)

$(BASE): $(SETUP) $(REBUILD) | $(BIN)/python
	@$(INSTALL) -e '.[serve]'
	@touch $@

$(FULL): $(SETUP) $(REBUILD) | $(BIN)/python
	@$(INSTALL) -e '.[test,docs]'
	@touch $@ $(BASE)
