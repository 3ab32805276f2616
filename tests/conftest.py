"""Settings for all tests: 16 virtual CPU devices, strict dtype promotion, checked shapes of the model's functions.

pyproject.toml turns warnings into errors.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

# Installed before any module imports the model: while a step is traced, each call of a model function is checked
# against the shapes and dtypes in its annotations. Only tests pay for the checks.
install_import_hook("ling3export.model", "beartype.beartype")

from ling3export.machine.environment import prepare_cpu  # noqa: E402
from tests.support.artifacts_fixture import artifact, kept_folder, kept_programs, remove_old, tpu_artifact  # noqa: E402, F401
from tests.support.builds import QUICKLY, UNOPTIMIZED  # noqa: E402
from tests.support.seconds import Seconds  # noqa: E402

# Tests never use the user's build cache. They share one of their own, which is kept between runs. A test that counts
# compilations or cache hits sets another one. With ``-n`` all test processes inherit this one.
os.environ["LING3_CACHE"] = str(kept_programs(kept_folder()))
if "PYTEST_XDIST_WORKER" not in os.environ:
    remove_old(kept_folder())

# Set before any test module imports jax. Child processes inherit the environment, and their scripts can import `tests`.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
prepare_cpu(16)
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"  # an operation on bf16 and fp32 arrays is an error

# Programs that this process compiles run only a few times, so compile time dominates: turn optimization off. jax reads
# the setting once, below. Processes that tests start do not inherit it: they compile as a user's would, unless a test
# sets UNOPTIMIZED.
FLAGS = os.environ["XLA_FLAGS"]
os.environ["XLA_FLAGS"] = f"{FLAGS} {QUICKLY}"

import jax  # noqa: E402

# jax keeps what this process compiles under plain jit between runs, under a digest of the program and the toolchain.
# Builds and engines turn this off, and processes that tests start do not inherit it.
jax.config.update("jax_compilation_cache_dir", str(kept_folder() / "jit"))
# jax's default keeps only what took a second or more
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.devices()  # start the backend now, so that no test starts it with a changed environment
os.environ["XLA_FLAGS"] = FLAGS


@pytest.fixture
def unoptimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts compile without optimization, and find small artifacts' programs in the cache."""
    for name, value in UNOPTIMIZED.items():
        monkeypatch.setenv(name, value)


# Fixtures and the marker that a test gets when it uses one. Two modules define their own `artifact`, a toy.
MARKED = {"artifact": "build", "tpu_artifact": "tpu"}


# The tests of these files share no fixtures except built artifacts, so several processes may run them.
SPREAD = ("tests/end_to_end/test_documents.py",)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With ``-n``, one process runs all tests of a file, so that module fixtures are made once.

    The files that took longest in earlier runs begin first, so that no process waits at the end. Files without a known
    time keep their order.
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

    config.option.loadscopereorder = False  # keep our order: xdist would sort by the number of tests
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        for fixture in MARKED.keys() & set(item.fixturenames):
            if not hasattr(item.module, fixture):
                item.add_marker(MARKED[fixture])
