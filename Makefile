# Two commands on a fresh machine: `make demo` and `make test`. Everything else is for developers.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Empty means written: hundreds of processes read what the first one has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check proof architectures gpu interop docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

demo: $(STAMP)  ## train the bundled model on the bundled data and show what it learned
	$(BIN)/python examples/demo.py

check: $(STAMP)  ## format, lint, types and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 3 --dist worksteal --ignore tests/journey --ignore tests/crash

test: $(STAMP)  ## everything but the long proofs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 3 --dist worksteal -m 'not proof'

proof: $(STAMP)  ## thousands of kills, long fuzzing
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fuzz]' -c constraints.txt
	$(BIN)/pytest -n 2 -m proof

architectures: $(STAMP)  ## try every architecture, and write the table in docs/architectures.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/zoo/page.py

gpu: $(STAMP)  ## prove and measure everything on one GPU; PART=correct, speed, save or profile
	$(BIN)/pip install --quiet --disable-pip-version-check -r benchmarks/gpu/requirements.txt -c constraints.txt
	$(BIN)/python benchmarks/gpu/kit.py $(PART)

MINDSPORE := benchmarks/.venv-mindspore

interop: $(STAMP)  ## let MindSpore read what we wrote, in an environment of its own
	$(PYTHON) -m venv $(MINDSPORE)
	$(MINDSPORE)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements-mindspore.txt
	MINDSPORE_PYTHON=$(CURDIR)/$(MINDSPORE)/bin/python $(BIN)/pytest -n 2 tests/interop

docs: $(STAMP)  ## regenerate the reference pages and the picture of the house from the code
	$(BIN)/python -m surefoot.cli.docs_pages docs/reference
	$(BIN)/python tests/house.py

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
