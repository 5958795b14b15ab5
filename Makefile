# `make serve` and `make test` need nothing but Python 3.11 or 3.12; everything lands in .venv.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# A CPU build of torch where there is no NVIDIA GPU; override with TORCH=torch==2.12.0 or TORCH=torch.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH ?= $(if $(GPU),torch,torch==2.13.0)
PORT ?= 8000

.PHONY: serve test check format typing clean wheel-chat

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "epicycle needs Python 3.11 or 3.12; name one: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Two stamps: what serving needs, and what the tests need on top of it.
$(VENV)/.serve: $(BIN)/python pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install -q --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/pip install -q --disable-pip-version-check -e ".[dev,clients]"
	touch $@

serve: $(VENV)/.serve
	$(BIN)/epicycle serve --port $(PORT) $(ARGS)

# Two lanes side by side, since the suites that start servers mostly wait: they report as they go, the others at the end.
# Triton reads TRITON_INTERPRET when it is imported, so the kernels that run in its interpreter need their own process.
PYTEST = $(BIN)/python -m pytest -p no:cacheprovider
test: $(VENV)/.dev
	@log=$$(mktemp); \
	{ TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PYTEST) -q tests/interpreted $(ARGS); kernels=$$?; \
	  $(PYTEST) -q tests/unit tests/wire tests/prop tests/sim $(ARGS); parts=$$?; \
	  exit $$((kernels != 0 ? kernels : parts)); } >$$log 2>&1 & \
	others=$$!; \
	$(PYTEST) tests/e2e tests/proc tests/gpu $(ARGS); servers=$$?; \
	wait $$others; others=$$?; \
	cat $$log; rm -f $$log; \
	exit $$((servers != 0 ? servers : others))

# mypy and import-linter see the folders as the package `epicycle` through git-ignored links.
typing:
	mkdir -p .typing/epicycle
	cd .typing/epicycle && for f in __init__.py __main__.py py.typed; do ln -sfn ../../epicycle/$$f $$f; done
	cd .typing/epicycle && for d in actors engine kvstore tools transport; do ln -sfn ../../$$d $$d; done

check: $(VENV)/.dev typing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p epicycle
	cd .typing && $(abspath $(BIN))/lint-imports ../pyproject.toml

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Builds the wheel, installs it into a fresh venv and has one chat with it from another directory.
wheel-chat: $(VENV)/.dev
	$(BIN)/python tools/wheel_chat.py --python $(PYTHON) --torch "$(TORCH)"

clean:
	rm -rf $(VENV) .typing build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
