# Two commands on a fresh machine: `make demo` and `make test`. Everything else is for developers.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Empty means written: hundreds of processes read what the first one has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check proof same lock newest compatibility release pictures architectures gpu interop docs clean

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
	$(BIN)/pytest -n 3 --dist worksteal -m 'not proof' --fast

test: $(STAMP)  ## everything but the long proofs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 3 --dist worksteal -m 'not proof'

proof: $(STAMP)  ## thousands of kills, long fuzzing
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fuzz]' -c constraints.txt
	$(BIN)/pytest -n 2 -m proof -o faulthandler_timeout=3600

BASE ?= HEAD

same: $(STAMP)  ## losses, weights, exports and token cache equal to those of commit BASE, to the bit
	$(BIN)/python tests/same_as.py $(BASE)

# One known torch, so that figures and bits can be compared; everything else is the newest that fits.
TORCH ?= 2.13.0
COMPILE = $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
	--no-annotate --custom-compile-command 'make lock'

lock: $(STAMP)  ## write the versions that `make` installs, here and for the benchmarks
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	echo 'torch==$(TORCH)' | $(COMPILE) - pyproject.toml --extra dev --extra fuzz -o constraints.txt
	$(COMPILE) benchmarks/gpu/requirements.txt pyproject.toml --extra dev -c constraints.txt \
		-o benchmarks/gpu/constraints.txt
	$(COMPILE) benchmarks/requirements.txt -o benchmarks/constraints.txt
	$(COMPILE) benchmarks/requirements-mindspore.txt -o benchmarks/constraints-mindspore.txt
	$(COMPILE) benchmarks/requirements-transformers-4.txt -o benchmarks/constraints-transformers-4.txt

NEWEST := .venv-newest

newest:  ## the tests with the newest version of everything; says what differs from the lock
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[dev]'
	@echo 'Versions that differ from constraints.txt:'
	@$(NEWEST)/bin/pip freeze --exclude-editable | sed -E ':a; s/^([^=]*)[._]/\1-/; ta' \
		| grep -vixF "$$(sed 's/ .*//' constraints.txt)" || echo '  none'
	$(NEWEST)/bin/pytest -n 3 --dist worksteal -m 'not proof'

compatibility: $(STAMP)  ## the tests with other versions of Python and libraries; ENV=oldest for some; writes docs/compatibility.md
	$(BIN)/python tests/compatibility.py $(ENV)

release: $(STAMP)  ## build what a release uploads into dist/, and prove it; uploads nothing
	@test -z "$$(git status --porcelain)" || { echo 'release: commit first, so that what is built has a commit'; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	DIST=$(CURDIR)/dist $(BIN)/pytest -m 'proof or not proof' -o faulthandler_timeout=3600 tests/test_package.py
	@echo 'Nothing was uploaded: on PyPI, the name surefoot is another project. To an index of your own: $(BIN)/twine upload -r NAME dist/*'

pictures: $(STAMP)  ## take the pictures and recorded commands of README and docs anew; needs chromium and a Chinese font
	$(BIN)/python tests/docs/record.py
	PICTURES=docs/img $(BIN)/pytest -m proof -o faulthandler_timeout=3600 tests/plugins/board/test_pictures.py
	cd benchmarks && ../$(BIN)/python learning.py --stages rm,dpo,kto,ppo --draw ../docs/img/learning.svg
	cd benchmarks && ../$(BIN)/python loss_curves.py

architectures: $(STAMP)  ## try every architecture, and write the table in docs/architectures.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/zoo/page.py

gpu: $(STAMP)  ## prove and measure everything on one GPU; PART=correct, suite, speed, save or profile
	$(BIN)/pip install --quiet --disable-pip-version-check -r benchmarks/gpu/requirements.txt -c benchmarks/gpu/constraints.txt
	$(BIN)/python benchmarks/gpu/kit.py $(PART)

MINDSPORE := benchmarks/.venv-mindspore
TRANSFORMERS_4 := benchmarks/.venv-transformers-4

interop: $(STAMP)  ## let MindSpore and transformers 4 read what we wrote, in environments of their own
	$(PYTHON) -m venv $(MINDSPORE)
	$(MINDSPORE)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements-mindspore.txt \
		-c benchmarks/constraints-mindspore.txt
	$(PYTHON) -m venv $(TRANSFORMERS_4)
	$(TRANSFORMERS_4)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements-transformers-4.txt \
		-c benchmarks/constraints-transformers-4.txt
	MINDSPORE_PYTHON=$(CURDIR)/$(MINDSPORE)/bin/python \
		TRANSFORMERS_4_PYTHON=$(CURDIR)/$(TRANSFORMERS_4)/bin/python $(BIN)/pytest -n 2 tests/interop

docs: $(STAMP)  ## regenerate the reference pages and the picture of the house from the code
	$(BIN)/python tests/reference_pages.py docs/reference
	$(BIN)/python tests/house.py
	$(BIN)/python tests/tour.py

clean:
	rm -rf $(VENV) $(NEWEST) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
