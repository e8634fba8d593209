# Everything runs in .venv, which is set up on first use. PYTHON picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# bytecode is written when a module is first imported: that of all packages takes pip minutes
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-scale test-lowest test-kernels coverage lint format bench papers gpu docs links dist test-dist clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(READY)  ## set up .venv

# torch first and alone: the pinned build, so that nothing later resolves another one
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $@

demo: $(READY)  ## train candidates on digits, rank them by flatness, write out/minima.png
	$(BIN)/python examples/rank_minima.py

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-scale: $(READY)  ## run the tests on a local cluster of ray, and those that take minutes
	$(PIP) --editable '.[ray]'
	$(BIN)/python -m pytest -q -m scale -rs tests

test-lowest: $(READY)  ## run the tests of the packages with the lowest versions allowed; torch as pinned
	$(PYTHON) -m venv --clear out/lowest
	out/lowest/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python tests/lowest.py > out/lowest.txt
	out/lowest/bin/python -m pip install --quiet --requirement out/lowest.txt
	out/lowest/bin/python -m pip install --quiet --no-deps --editable .
	out/lowest/bin/python -m pytest -q -n 2 --dist worksteal \
		-W ignore::DeprecationWarning -W ignore::FutureWarning \
		tests --ignore tests/contracts --ignore tests/benchmarks --ignore tests/devices

# other kernels add the terms of a sum in another order
OLD_KERNELS := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 OPENBLAS_CORETYPE=Haswell \
	ONEDNN_MAX_CPU_ISA=SSE41
test-kernels: $(READY)  ## run the tests with the kernels of four kinds of machines
	rc=0; for kernels in "" "$(OLD_KERNELS)" ATEN_CPU_CAPABILITY=avx2 TEST_THREADS=4; do \
		echo "kernels: $$kernels"; \
		env $$kernels $(BIN)/python -m pytest -q -n 2 --dist worksteal || rc=1; \
	done; exit $$rc

coverage: $(READY)  ## run the tests and print which lines and branches they leave out
	$(PIP) pytest-cov
	$(BIN)/python -m pytest -q -n 2 --dist worksteal \
		--cov relflat_sk --cov-branch --cov-report term-missing:skip-covered

lint: $(READY)  ## check style, types, imports and dependencies
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/private_names.py
	$(BIN)/deptry relflat_sk

format: $(READY)  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## measure what flatness costs, as ratios
	rc=0; for costs in scoring training; do $(BIN)/python -m benchmarks.costs.$$costs || rc=1; done; exit $$rc

papers: $(READY)  ## quick runs of the papers' figures
	rc=0; for one in p19_appendix_e p19_figures_2_to_4 p21_figures_3_4 p21_figure_5 \
		n17_figures_1_to_4 n17_figure_5 regularised against_flatness along_attacks \
		equal_terms hundred_networks; do \
		$(BIN)/python -W ignore -m benchmarks.papers.$$one --quick || rc=1; done; exit $$rc

gpu: $(READY)  ## nine minutes of CUDA: tests and benchmarks, into benchmarks/results/; PART=heads for one
	$(BIN)/python -m benchmarks.gpu $(if $(PART),--part $(PART))

# the examples train small networks: on a busy machine, several threads would wait for each other
docs: $(READY)  ## build the site into out/site; runs the examples of the gallery
	$(PIP) --editable '.[docs]'
	rm -rf docs/api docs/gallery
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going -q docs out/site

links: $(READY)  ## check the links of the site to other sites, without running the gallery
	$(PIP) --editable '.[docs]'
	$(BIN)/python -m sphinx -b linkcheck -D plot_gallery=0 -q docs out/links

dist: $(READY)  ## build wheel and sdist into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist

test-dist: dist  ## install wheel and sdist into empty environments, and use them
	for file in dist/*.whl dist/*.tar.gz; do \
		$(PYTHON) -m venv --clear dist/venv \
		&& dist/venv/bin/python -m pip install --quiet --constraint constraints.txt torch \
		&& dist/venv/bin/python -m pip install --quiet --constraint constraints.txt $$file \
		&& (cd dist && venv/bin/python -I -m relflat_sk && venv/bin/python -I ../tests/installed.py) \
		|| exit 1; \
	done
	rm -rf dist/venv

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) out dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
