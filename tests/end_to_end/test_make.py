"""The Makefile: its targets, and that a second run does no setup again. Nothing is installed."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = "setup parity fmt lint types docs check test extras fuzz bench peers witness card budgets demo".split()
TARGETS += ["demo-pd", "runner"]
ENVIRONMENTS = [".venv", ".venv-parity"]


def planned(target: str, folder: Path) -> str:
    """The commands that ``make TARGET`` would run in ``folder``."""
    # An outer `make test` passes its flags in MAKEFLAGS.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "-n", target], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The files of a fresh checkout that the Makefile checks."""
    (tmp_path / ".ci").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/venv"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_sets_up_what_it_needs_once(target, checkout):
    both = target in ("extras", "peers", "witness")
    needs = ENVIRONMENTS if both else [".venv-parity"] if target == "parity" else [".venv"]
    first = planned(target, checkout)
    assert [name for name in ENVIRONMENTS if f".ci/venv {name} " in first] == needs

    for name in ENVIRONMENTS:
        (checkout / name).mkdir()
        (checkout / name / "installed").touch()
    assert ".ci/venv" not in planned(target, checkout)

    later = (checkout / ".venv/installed").stat().st_mtime + 10
    os.utime(checkout / "constraints.txt", (later, later))
    assert ".ci/venv" in planned(target, checkout)


def test_a_demo_makes_the_folder_that_its_checkpoint_goes_to(checkout):
    """Regression: a fresh clone has no such folder, and `make demo-pd` failed."""
    lines = planned("demo-pd", checkout).splitlines()
    assert lines.index("mkdir -p build") < min(n for n, line in enumerate(lines) if "build/demo-pd" in line)


def test_check_leaves_out_what_is_marked(checkout):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = [marker.partition(":")[0] for marker in settings["markers"]]
    assert f'python -m pytest -m "not ({" or ".join(markers)})"' in planned("check", checkout)


def test_packages_for_tests_only_are_installed_once_for_tests(checkout):
    extras = "'.[savedmodel,inspect,lm-eval,ray,deploy]'"
    install = f"pip install -qq --no-input --disable-pip-version-check -c constraints.txt -e {extras}"
    assert [target for target in TARGETS if install in planned(target, checkout)] == ["extras"]
    for name in ("installed", "tests"):
        (checkout / ".venv").mkdir(exist_ok=True)
        (checkout / ".venv" / name).touch()
    assert install not in planned("extras", checkout)
