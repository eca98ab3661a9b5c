# Everything happens in .venv, which is made with the first of these that is Python 3.11 or newer.
PYTHONS = $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python
PIP = .venv/bin/python -m pip --disable-pip-version-check
TEST_PACKAGES = gcc libc6-dev strace openssh-server openssh-client iproute2 util-linux procps e2fsprogs slurmctld slurmd slurm-client munge openmpi-bin mpich zsh fish chromium

# what the tests start a thousand times is compiled once
unexport PYTHONDONTWRITEBYTECODE

# most of what is installed is never imported: the large packages that are, are compiled before several workers would do it,
# and so are the tests
COMPILED = torch._dynamo,sklearn.datasets accelerate,lightning.pytorch,transformers.trainer

# the tests of a file share hosts and clusters; the order of the files is that of tests/conftest.py. There are more workers
# than the 2 cores of CI: about half of the tests wait more than they compute
XDIST = --dist loadfile --no-loadscope-reorder

# on a terminal pip's own lines and bars are the progress of the first minutes
PROGRESS = $(shell test -t 2 || echo -q)
INSTALLING = "installing into .venv: torch for NVIDIA GPUs is 5 GB unless it is there, minutes; without GPUs type first" \
	"\`export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu\`"

PYTEST_ARGS ?=
GPU_PYTHON ?= .venv/bin/python

# what touches torch, but for pages: another version of torch, or of Python, is judged by it
TORCH_TESTS = tests/torch tests/process/test_bootstrap.py tests/process/test_bootstrap_errors.py \
	tests/process/test_bootstrap_group.py tests/process/test_bootstrap_torch.py tests/process/test_functions.py \
	tests/process/test_functions_ends.py tests/process/test_fork_server.py tests/process/test_pytest_plugin.py
TORCH_ENV = .venv-torch/$(TORCH)$(if $(PYTHON),-$(subst /,_,$(PYTHON:/%=%)))

.PHONY: help demo test test-quick test-slow test-gpu soak simulate breaks test-torch check lint docs format bench bench-check dist test-deps clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-14s %s\n' "$$name" "$$text"; done

demo: .venv/demo ## train a small network on real digits with 4 workers
	@echo "four workers import torch, then train: some 20 s on two cores"
	.venv/bin/ddplaunch --nproc-per-node 4 examples/train_ddp.py
	@echo
	@echo "next:  . .venv/bin/activate    # then, with a script of yours:"
	@echo "       ddplaunch --nproc-per-node 4 train.py"
	@echo "       ddplaunch --help"

test: .venv/test ## run the tests
	@echo "7 to 13 minutes on two cores; \`make test-quick\` takes one or two, and runs those that need no job"
	.venv/bin/python -m pytest $(XDIST) -n 6 $(PYTEST_ARGS)
	@echo "next: \`make check\` runs all that CI runs"

test-quick: .venv/test ## run those that need no job: tests/unit and tests/cli
	.venv/bin/python -m pytest $(XDIST) -n 2 tests/unit tests/cli $(PYTEST_ARGS)

test-slow: .venv/test ## run the tests that `make test` leaves out for their time
	.venv/bin/python -m pytest -m slow $(PYTEST_ARGS)

test-gpu: $(if $(filter .venv/%,$(GPU_PYTHON)),.venv/test) ## run the tests that need a GPU; GPU_PYTHON=... names a python with its torch
	$(GPU_PYTHON) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

soak: .venv/test ## train under random faults for MINUTES=30, each training with the exact result; SEED=N runs one again
	.venv/bin/python -m tests.soak $(if $(SEED),--seed $(SEED),--minutes $(or $(MINUTES),30))

simulate: .venv/test ## run the decisions of all nodes under random faults, without processes: SEEDS=1000; SEED=N shows one history
	.venv/bin/python -m tests.simulator $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),1000))

breaks: .venv/test ## break the code in many places, one after the other: the tests must catch each; 3 minutes
	.venv/bin/python -m tests.breaks

test-torch: ## run the tests that touch torch with another one: TORCH=2.4.1 PYTHON=python3.11; in an environment of its own
	@test -n "$(TORCH)" || { echo "error: no version; for example: make test-torch TORCH=2.4.1" >&2; exit 2; }
	@test -x $(TORCH_ENV)/bin/python || $(or $(PYTHON),python3) -m venv $(TORCH_ENV)
	grep -v '^torch==' constraints.txt > $(TORCH_ENV)/constraints.txt
	$(TORCH_ENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile -c $(TORCH_ENV)/constraints.txt \
		'torch==$(TORCH)' -e '.[test]'
	$(TORCH_ENV)/bin/python -m pytest $(XDIST) -n 2 $(TORCH_TESTS) $(PYTEST_ARGS)

check: lint docs test ## all that CI runs: lint, docs and test

lint: .venv/test ## check format, style, types and which module imports which
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo --no-cache

docs: .venv/test ## build the documentation into site/, without a warning or not at all, and check its prose
	.venv/bin/python docs/voice.py
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet

format: .venv/test ## put the code into its format
	.venv/bin/ruff check --fix --select I .
	.venv/bin/ruff format .

bench: .venv/test ## measure against torchrun and a plain shell loop
	.venv/bin/python benchmarks/run.py

bench-check: .venv/test ## the same, and fail if a target is missed by more than the noise
	.venv/bin/python benchmarks/run.py --check

dist: .venv/bin/python ## build wheel and sdist of the commit into dist/, check them, and run the wheel in a fresh environment
	.venv/bin/python -m release.dist

test-deps: ## install the Debian packages that the tests use (root)
	@missing=; for package in $(TEST_PACKAGES); do \
		dpkg-query -W -f '$${Status}' "$$package" 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; \
	done; \
	if [ -z "$$missing" ]; then \
		echo "all there: $(TEST_PACKAGES)"; \
	elif ! command -v apt-get >/dev/null; then \
		echo "no apt-get here; install what gives you:$$missing"; \
	elif [ "$$(id -u)" != 0 ]; then \
		echo "only root can install packages; ask for: apt-get install$$missing"; \
	else \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $$missing; \
	fi

clean: ## remove the environment and what the tools left
	rm -rf .venv .venv-torch build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# a stamp is newer than what it was installed from, so a second `make` installs nothing
.venv/demo: pyproject.toml constraints.txt | .venv/bin/python
	@echo $(INSTALLING)
	$(PIP) install $(PROGRESS) -c constraints.txt -e '.[example]'
	@touch $@

.venv/test: pyproject.toml constraints.txt | .venv/bin/python
	@echo $(INSTALLING)
	$(PIP) install $(PROGRESS) --no-compile -c constraints.txt -e '.[test]'
	@echo "compiling what the tests import: a minute or two"
	@$(foreach modules,$(COMPILED),.venv/bin/python -c 'import $(modules)' &) \
		.venv/bin/python -m pytest --collect-only -q >/dev/null & wait
	@touch $@ .venv/demo

.venv/bin/python:
	@for python in $(PYTHONS); do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
		if "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
			echo "making .venv with $$("$$python" --version)"; \
			exec "$$python" -m venv .venv; \
		fi; \
		bare="$${bare:-$$python}"; \
	done; \
	if [ -n "$$bare" ]; then \
		echo "error: $$bare cannot make environments; on Debian: apt-get install python3-venv" >&2; \
	else \
		echo "error: no Python 3.11 or newer found; if you have one: make PYTHON=/path/to/python3" >&2; \
	fi; \
	exit 1
