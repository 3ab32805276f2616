# Each target does its own set-up. A second run finds the stamp of the first and does none again.
.PHONY: setup parity fmt lint types docs check test extras fuzz bench peers witness card budgets demo demo-pd smoke runner
.NOTPARALLEL:
# Tests start a thousand processes: each would compile our sources again if none may keep their bytecode.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin

setup: .venv/installed
parity: .venv-parity/installed

.venv/installed: pyproject.toml constraints.txt .ci/venv
	.ci/venv .venv build,tpu,eval,serve,sign,train,test,dev 3.13 3.12 3.11

# Python 3.11 first: the oldest supported, so this environment also tests the oldest jax.
.venv-parity/installed: pyproject.toml constraints.txt .ci/venv
	.ci/venv .venv-parity parity,build,serve,test 3.11 3.12 3.13

# What only `make extras` needs, 1.3 GB of TensorFlow in it: not part of `setup`. The same environment, so that jax is installed
# once; neither TensorFlow nor the two evaluation libraries that can drive an artifact change jax or numpy.
.venv/tests: .venv/installed
	$(BIN)/python -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt -e '.[savedmodel,inspect,lm-eval,ray,deploy]'
	touch $@

.venv/docs: .venv/installed
	$(BIN)/python -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

fmt: setup
	$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format .

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# The site in build/site. Strict: a dead link or anchor fails.
docs: setup .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# What takes minutes or more than `setup` is marked: pyproject.toml says what the markers mean.
check: lint types
	$(BIN)/python -m pytest -m "not (build or jit or tpu or hosts or install or extras or fuzz)" -n 3 $(ARGS)

# In processes that take whole files (tests/conftest.py says why): tracing uses one core alone. One more than two cores,
# for some tests wait without computing.
test: setup
	$(BIN)/python -m pytest -m "not (extras or tpu)" -n 3 $(ARGS)

# What needs TensorFlow, Ray, lm-eval, inspect-ai, torch and transformers, Chromium, routers or schemas of others, what
# compiles for a TPU, or what takes minutes for a rare property.
extras: setup parity .venv/tests
	$(BIN)/python -m pytest -m "extras or tpu" -n 3 $(ARGS)

# Damaged input, more of it than the tests have: ARGS="--times 25 --seed 1", or a case that failed; --help says more.
fuzz: setup
	$(BIN)/python -m tests.fuzz $(ARGS)

bench: setup
	$(BIN)/python -m bench $(ARGS)

# llama.cpp, outside of the checkout; prints the folder that `python -m bench peers --llama-cpp` takes.
PEERS ?= $(HOME)/.cache/ling3export-peers
peers: setup parity
	.ci/peers $(PEERS)

# Our server by our own client and by aiperf, and llama.cpp's and transformers' servers beside it. Nothing of these comes
# into an environment of this project.
WITNESS ?= $(HOME)/.cache/ling3export-witness
witness: setup parity
	witness=$$(.ci/witness $(WITNESS)) && peers=$$(.ci/peers $(PEERS)) && \
		$(BIN)/python -m bench witness "$$witness" --llama-cpp "$$peers" $(ARGS)

# The first minutes with a card. Steps that were done are not done again: ARGS="--minutes 9" does a part.
card: setup
	$(BIN)/python -m bench card $(ARGS)

budgets: setup
	$(BIN)/python -m tests.support.golden_programs

demo: setup
	$(BIN)/ling3export build --paddings 16,128,512 --tp 16 --force
	$(BIN)/python -m bench demo demo.ling3

# Prefill and decode apart: two servers of a random model and a router on loopback, stopped at the end.
demo-pd: setup
	mkdir -p build
	$(BIN)/ling3export synth build/demo-pd --preset micro --seed 1 --force
	$(BIN)/ling3export build build/demo-pd demo-pd.ling3 --dtype float32 --paddings 64 --tp 1 --decode-paddings 4 \
		--max-running 4 --context 256 --page-size 16 --pages 28 --snapshots 6 --force
	$(BIN)/python -m bench pd demo-pd.ling3 $(ARGS)

# Twice: the second run compiles nothing, or fails.
smoke: setup
	$(BIN)/python -m tests.support.smoke $(ARGS)

# One file that needs this machine's version of Python and nothing else.
runner: setup
	.ci/runner dist/ling3-runner
