# Every target works in .venv, made on first use and brought up to date when pyproject.toml or constraints.txt changed.
# `make PYTHON=python3.12 test` takes another interpreter for a new .venv.
PYTHON ?= python3
RUN := .venv/bin/python -m
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test docs lint format clean

help:
	@echo "make demo    train on digits with several ranks in this machine and show what travelled"
	@echo "make test    lint, types, documentation and the test suite: what CI runs"
	@echo "make docs    build the documentation into site/"
	@echo "make lint    ruff and mypy, nothing changed"
	@echo "make format  let ruff fix and format the code"
	@echo "make clean   remove .venv and everything built"

demo: $(INSTALLED)
	.venv/bin/python examples/digits_demo.py

test: lint docs
	$(RUN) pytest

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet

lint: $(INSTALLED)
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

format: $(INSTALLED)
	$(RUN) ruff check --fix
	$(RUN) ruff format

clean:
	rm -rf .venv site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) are respected. The pin is plain
# torch==2.13.0, so the CPU build is taken wherever one of those indexes offers it; nothing here needs a GPU.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("ptcollect needs Python 3.10 or newer; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12" % v[:2])'
	test -x .venv/bin/python || $(PYTHON) -m venv --clear .venv
	$(RUN) pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
