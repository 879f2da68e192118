# make demo   fresh environment, everything installed, demo run     make lint    ruff
# make test   all that needs no engine and no GPU                   make types   mypy
# make live   tests against real engines (nox)                      make docs    the site, in docs/_build
# make clean  removes what make made
#
#   PYTHON=python3.12     the interpreter to build the environment from
#   DEMO_ARGS="..."       options of `weightlane demo`
#   WORKERS=2             how many processes share the tests
#   SYSTEM_TORCH=1        keep the torch that PYTHON already has, instead of installing one

PYTHON ?= python3
DEMO_ARGS ?=
WORKERS ?= 2
TORCH := torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
# The build backend is installed once instead of in five isolated build environments: a minute less.
BACKEND := hatchling editables
DISTRIBUTIONS := --no-build-isolation -e "core[demo,examples,dev]" -e plugins/fsdp -e plugins/megatron -e plugins/vllm -e plugins/sglang
PYPROJECTS := core/pyproject.toml $(wildcard plugins/*/pyproject.toml)

# One stamp per kind of environment. It stays the kind it is until `make clean`, or until the other
# kind is asked for, so that `make test` after `make demo SYSTEM_TORCH=1` uses the same one.
OWN := $(VENV)/installed
SYSTEM := $(VENV)/installed-beside-system-torch
ifneq ($(or $(SYSTEM_TORCH),$(wildcard $(SYSTEM))),)
STAMP := $(SYSTEM)
else
STAMP := $(OWN)
# A torch in the user's own site folder is not ours either.
export PYTHONNOUSERSITE := 1
endif
unexport PYTHONPATH PYTHONHOME

.DELETE_ON_ERROR:
.PHONY: demo test lint types live docs clean

demo: $(STAMP)
	$(BIN)/weightlane demo $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not live and not gpu and not fsdp" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(STAMP)
	$(BIN)/python -m mypy

live: $(STAMP)
	$(BIN)/python -m nox -s live_reference live_vllm live_sglang

# A warning or a broken link is an error. The site is made anew each time: nothing of a page that is gone
# stays behind.
docs: $(VENV)/docs-installed
	rm -rf docs/_build docs/_generated
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs docs/_build
	$(BIN)/python docs/check_site.py docs/_build

clean:
	rm -rf $(VENV) .nox .models .tmp .cache dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf docs/_build docs/_generated

# torch comes first and by name: what pip finds (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) decides
# which build of it. A local version such as 2.13.0+cpu satisfies the pin and is preferred to 2.13.0.
$(OWN): $(PYPROJECTS)
	$(PYTHON) -c 'import sys; sys.exit("weightlane needs Python >= 3.10" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install $(TORCH) $(BACKEND)
	$(BIN)/python -m pip install --quiet $(DISTRIBUTIONS)
	@touch $@

$(SYSTEM): $(PYPROJECTS)
	$(PYTHON) -c 'import sys; sys.exit("weightlane needs Python >= 3.10" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv --clear --system-site-packages $(VENV)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
		> $(VENV)/system-torch.txt 2>/dev/null \
		|| { echo "SYSTEM_TORCH=1, but $(PYTHON) has no torch of its own (that of a virtual environment is not seen from another). Install one there, or run make demo without SYSTEM_TORCH." >&2; exit 1; }
	@echo "keeping $$(cat $(VENV)/system-torch.txt)"
	$(BIN)/python -m pip install --quiet $(BACKEND)
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/system-torch.txt $(DISTRIBUTIONS)
	@touch $@

# In the same environment, since the site is written from what is installed there.
$(VENV)/docs-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-build-isolation -e "core[docs]"
	@touch $@
