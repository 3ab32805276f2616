"""Settings of every test: 16 virtual CPU devices, strict dtype promotion, shapes of the model's functions checked.

pyproject.toml makes warnings errors.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

# Before anything imports the model: every call of its functions, while a step is traced, has the shapes and dtypes that
# its annotations say. Only tests pay for it.
install_import_hook("ling3export.model", "beartype.beartype")

from ling3export.machine.environment import prepare_cpu  # noqa: E402
from tests.support.artifacts_fixture import artifact, kept_folder, kept_programs, remove_old, tpu_artifact  # noqa: E402, F401
from tests.support.builds import QUICKLY, UNOPTIMIZED  # noqa: E402
from tests.support.seconds import Seconds  # noqa: E402

# Never the user's cache. What one test builds serves others, and the next run. A test that counts what is compiled or
# taken names another. With ``-n`` there is one for all: the processes that run tests inherit it.
os.environ["LING3_CACHE"] = str(kept_programs(kept_folder()))
if "PYTEST_XDIST_WORKER" not in os.environ:
    remove_old(kept_folder())

# Before any test module imports jax. Child processes inherit the environment; scripts among them find `tests`, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
prepare_cpu(16)
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"  # a bf16 array that meets an fp32 one by accident is an error

# What this process compiles it calls a few times, so that compiling is what takes the time. jax reads this once, below;
# processes that tests start are not told: their programs are as a user has them, unless a test says otherwise.
FLAGS = os.environ["XLA_FLAGS"]
os.environ["XLA_FLAGS"] = f"{FLAGS} {QUICKLY}"

import jax  # noqa: E402

# What a test compiles in this process under plain jit is kept between runs, by jax, under a digest of the program and
# the toolchain. Builds and engines turn it off, and processes that tests start know nothing of it.
jax.config.update("jax_compilation_cache_dir", str(kept_folder() / "jit"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # by default it keeps what took a second or more
jax.devices()  # started here: a test that changes the environment must not be the one that starts it
os.environ["XLA_FLAGS"] = FLAGS


@pytest.fixture
def unoptimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """What processes of a test compile costs less, and small artifacts' programs are in the cache."""
    for name, value in UNOPTIMIZED.items():
        monkeypatch.setenv(name, value)


# A test that takes one of these fixtures gets the marker. Two modules have an `artifact` of their own, a toy.
MARKED = {"artifact": "build", "tpu_artifact": "tpu"}


# The tests of these files share no fixture but built artifacts: they need not run in one process.
SPREAD = ("tests/end_to_end/test_documents.py",)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With ``-n`` a file's tests run in one process, so that fixtures of a module are made once.

    The files that took longest begin first, so that no process waits for the other at the end; unknown ones in order.
    """
    from xdist.scheduler import LoadFileScheduling

    seconds = Seconds(kept_folder() / "seconds.json")
    config.pluginmanager.register(seconds)

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(SPREAD) else super()._split_scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(seconds.longest(self.workqueue), last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # by size: many small tests are no longer than a few large ones
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        for fixture in MARKED.keys() & set(item.fixturenames):
            if not hasattr(item.module, fixture):
                item.add_marker(MARKED[fixture])
