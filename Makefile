# make demo    the whole main job on real data, into out/
# make test    lint, types and every test that this machine can run, in a few minutes
# make test-all  the same with the long fuzz and soak campaigns: before a release
# make ray-test  a Ray cluster of two nodes on this machine; installs Ray
# make docs    the documentation as a site, into site/
# make coverage  the tests once more, and what they reach
# make gpu-test  what needs an NVIDIA GPU, in parts (scripts/gpu/run.py); SYSTEM=1: without venv and pip
# make gpu-session  the same in one call of ten minutes, for a machine rented for minutes (scripts/gpu/session.py)
# make containers-test  both Dockerfiles linted, built and run, arm64 under qemu: as root on Debian, slow
# make bench   the project's own speed and memory figures, into benchmarks/
# PYTHON=python3.12 picks an interpreter, TORCH_INDEX=URL an index of CPU wheels of torch.

PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
# where it is set, each of the tests' many processes would compile the package and pytest's tests anew
unexport PYTHONDONTWRITEBYTECODE
# a file's tests share a worker and its fixtures; tests/conftest.py begins with all that export, on
# one worker, and the slow files. One worker more than cores: many tests wait for a server or a
# limit. A worker that dies ends the run, and is named: pytest-xdist may wait for ever for the last
# test of one that it replaced
WORKERS = -n $$(( 1 + $$(nproc) )) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
SETUP := $(PYTHON) scripts/setup_venv.py --torch-index "$(TORCH_INDEX)"

.PHONY: demo test tests nvidia test-all ray-test docs coverage gpu-test gpu-session containers-test lint bench venv venv-lint clean

demo:
	@$(SETUP)
	$(BIN)/deploykit demo -o out

# what the linters need comes first, and the rest beside them: pip keeps one core busy
venv-lint:
	@$(SETUP) --lint

venv: venv-lint
	@$(SETUP) --dev

# every process that imports a package for the first time would compile it: one does, for all
.venv/.compiled: | venv
	@$(BIN)/python -c "import sklearn.datasets, torch._dynamo, torchvision, transformers" 2> /dev/null || true
	@$(BIN)/pytest --collect-only -qq > /dev/null || true
	@touch $@

lint: venv-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# side by side, so that no core waits; each part prints when it is done, and each can fail the whole
# DK_ZOO: the files of the zoo and of the README that the tests make and NVIDIA's builder is asked about
test:
	@zoo=$$(mktemp -d) && trap 'rm -rf "$$zoo"' EXIT && DK_ZOO=$$zoo \
		$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=target tests lint nvidia

tests: .venv/.compiled
	$(BIN)/pytest $(WORKERS)

nvidia: venv
	$(BIN)/python -m scripts.nvidia.run -- -q -n auto --dist loadgroup

test-all:
	DK_CAMPAIGN=1 $(MAKE) test
	$(BIN)/python -m benchmarks.serve.soak

docs: venv
	$(BIN)/mkdocs build --strict

# Ray, with two nodes on this machine: serves, loses a node, predicts; two minutes. protobuf: Ray takes
# any, and what other tests install takes none from 7 on
ray-test: venv
	$(BIN)/pip install -qq "ray[serve,data]>=2.44" psutil "protobuf<7"
	DK_CAMPAIGN=1 $(BIN)/pytest tests/deploying/test_ray_cluster.py

coverage: venv
	$(BIN)/pytest $(WORKERS) --cov --cov-report=term:skip-covered

# SYSTEM=1: with $(PYTHON) as it is, no venv and no pip; GPU_TEST: options of scripts.gpu.run
gpu-test:
ifdef SYSTEM
	$(PYTHON) -m scripts.gpu.run --system $(GPU_TEST)
else
	@$(SETUP) --dev --gpu
	$(BIN)/python -m scripts.gpu.run $(GPU_TEST)
endif

# ten minutes on a GPU, with this Python as it is; GPU_SESSION: options of scripts.gpu.session
gpu-session:
	$(PYTHON) -m scripts.gpu.session $(GPU_SESSION)

# writes benchmarks/results/containers_*.md; CONTAINERS: options of scripts.containers.run
containers-test: venv
	$(BIN)/python -m scripts.containers.run $(CONTAINERS)

bench: venv
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv .rig out dist build site .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
