# Two commands do everything on a machine with Python >= 3.10, pip, make and g++: `make demo` and `make test`.
# They work in .venv, and a second run is quick. Another Python: make PYTHON=python3.12 demo

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py ktlib/__init__.py $(shell find csrc -type f; find tuning_db -name '*.h5')
PYTHON_FILES := ktlib generator tests benchmarks tools setup.py
CXX_FILES = $(shell git ls-files --cached --others --exclude-standard 'csrc/*.cpp' 'csrc/*.hpp' 'csrc/*.cu' 'csrc/*.cuh' | grep -v third_party)

.PHONY: help demo test lint format wheel clean

help:
	@echo "make demo    tune, verify, pack and call, end to end (under 3 minutes)"
	@echo "make test    the whole test suite that needs no GPU (GPU tests run where there is one)"
	@echo "make lint    ruff, mypy, clang-format, nothing changed"
	@echo "make format  ruff and clang-format, files changed"
	@echo "make wheel   dist/*.whl"
	@echo "make clean   remove the environment and everything built"

demo: $(VENV)/.built
	$(BIN)/python benchmarks/demo.py
	@echo "To use the commands ktlib and ktlib-build: . $(BIN)/activate"

test: $(VENV)/.tools
	$(BIN)/python -m pytest -q

lint: $(VENV)/.tools
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.tools
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

wheel: $(VENV)/.built
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist demo_out *.egg-info ktlib/_core*.so ktlib/databases

# Stamps: the environment; ktlib built and installed in it with what the generator needs; the test tools.
$(VENV)/.created: tools/environment.py
	$(PYTHON) tools/environment.py create $(VENV)
	@touch $@

$(VENV)/.built: $(VENV)/.created $(SOURCES)
	@echo "building ktlib into $(VENV) (about a minute)"
	$(BIN)/python tools/environment.py install build
	@touch $@

# ktlib is installed by now, so this adds only what its extra names.
$(VENV)/.tools: $(VENV)/.built
	@echo "installing the test tools into $(VENV)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'ktlib[test]'
	@touch $@
