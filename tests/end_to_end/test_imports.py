"""Imports point down: each room imports only lower rooms, without cycles, and few other packages."""

import ast
import functools
import graphlib
import itertools
import subprocess
import sys
from pathlib import Path

from tests.support.rooms import below, modules, room

# Packages that a room may import, besides the standard library.
PACKAGES = {
    "artifacts": {"cryptography", "ml_dtypes", "msgspec", "numpy", "safetensors"},
    "cache": {"msgspec"},
    "checkpoint": {"ml_dtypes", "numpy", "safetensors", "tokenizers"},
    "cli": {"click", "rich"},
    "compile": {"jax", "msgspec", "numpy"},
    "foundation": {"ml_dtypes", "msgspec", "numpy"},
    "machine": {"jax", "jaxlib", "numpy"},
    "model": {"flax", "jax", "jaxtyping", "numpy"},
    "opened": {"jax", "numpy"},
    "plan": {"msgspec", "numpy"},
    "runners.adapters": {"inspect_ai", "lm_eval"},
    "runners.bench_serving": {"h11", "numpy", "prometheus_client"},
    "runners.calibrate": {"jax", "msgspec", "numpy", "safetensors"},
    "runners.cli": {"click", "numpy"},
    "runners.endpoint": {"h11"},
    "runners.engine": {"numpy"},
    "runners.evals": {"numpy", "pydantic", "scipy", "yaml"},
    "runners.ffn": {"numpy"},
    "runners.fleet": {"pyarrow", "ray"},
    "runners.hosts": {"jax"},
    "runners.load": {"flatbuffers", "jax", "jaxlib", "ml_dtypes", "msgspec", "numpy"},
    "runners.route": {"h11", "msgspec", "prometheus_client", "starlette"},
    "runners.serve": {*"h11 msgspec numpy prometheus_client pydantic pydantic_core starlette uvicorn zmq".split()},
    "runners.state": {"numpy"},
    "runners.text": {"jinja2", "llguidance", "numpy", "tokenizers"},
    "runners.transfer": {"numpy"},
    "savedmodel": {"jax", "jaxlib", "numpy", "orbax", "tensorflow"},
    "verify": {"msgspec", "numpy", "safetensors"},
}
PRIVATE_JAX = {f"ling3export.machine.{name}" for name in ("pjrt", "portable", "service")}
NEVER_IN_RUNNER = set("flax ling3export.model optax orbax ray rich tensorflow torch transformers".split())
SERVER = {"prometheus_client", "pydantic", "starlette", "uvicorn", "zmq"}
# Rooms and modules that read files, configurations and arguments, and load no jax.
WITHOUT_JAX = tuple(
    (
        "artifacts checkpoint cli foundation model.config report.inspect runners.bench_serving.workloads runners.cli "
        "runners.evals runners.hosts.channel runners.hosts.hosts machine.environment machine.targets "
        "runners.serve.schema runners.transfer verify.reference"
    ).split()
)


@functools.cache
def imports(file: Path) -> list[tuple[str, bool]]:
    """Names that a file imports, also in functions, and whether only type checkers read the import."""
    found, unseen = [], set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            unseen |= {child for each in node.body for child in ast.walk(each)}
        elif isinstance(node, ast.Import):
            found += [(alias.name, node in unseen) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            found += [(f"{node.module}.{alias.name}", node in unseen) for alias in node.names]
    return found


def edges(*, of_types: bool) -> set[tuple[str, str]]:
    """(module, imported module of ours); ``of_types`` includes imports that only type checkers read."""
    known = modules()
    found = set()
    for name, file in known.items():
        for imported, checked in imports(file):
            whose = imported if imported in known else imported.rpartition(".")[0]
            if whose in known and (of_types or not checked):
                found.add((name, whose))
    return found


def test_rooms_import_only_lower_rooms():
    wrong = [
        (name, other)
        for name, other in sorted(edges(of_types=True))
        if room(name) != room(other) and room(other) not in below(room(name), name.removeprefix("ling3export."))
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others():
    between = {edge for edge in edges(of_types=True) if room(edge[0]) != room(edge[1])}
    everywhere = between | edges(of_types=False)
    graphlib.TopologicalSorter(
        {name: {other for _, other in group} for name, group in itertools.groupby(sorted(everywhere), lambda e: e[0])}
    ).prepare()  # raises CycleError, which names the cycle


def test_rooms_import_the_packages_of_their_list():
    wrong = []
    for name, file in modules().items():
        roots = {imported.split(".")[0] for imported, _ in imports(file)} - {"ling3export"} - sys.stdlib_module_names
        wrong += [(name, other) for other in sorted(roots - PACKAGES.get(room(name), set()))]
    assert wrong == []


def test_only_three_files_use_private_jax():
    assert {
        name for name, file in modules().items() if any(other.startswith("jax._src") for other, _ in imports(file))
    } == PRIVATE_JAX


def loaded(code: str) -> set[str]:
    """Every module that a fresh process has loaded after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_the_runner_loads_nothing_of_the_build_side():
    names = [name for name in modules() if room(name).startswith("runners.") and room(name) != "runners.adapters"]
    found = loaded(f"import {', '.join(names)}")
    assert set(names) <= found
    assert not found & NEVER_IN_RUNNER
    assert not loaded("import ling3export.runners.cli.main, ling3export.runners.engine.engine") & SERVER


def test_modules_that_only_read_load_no_jax():
    names = [name for name in modules() if name.removeprefix("ling3export.").startswith(WITHOUT_JAX)]
    assert {room(name) for name in names} >= {"artifacts", "checkpoint", "runners.evals"}
    assert "jax" not in loaded(f"import {', '.join(names)}")


def test_help_loads_no_jax():
    """Runs the help of every command of both command lines."""
    found = loaded(
        "import click\nfrom click.testing import CliRunner\n"
        "from ling3export.cli.main import main as build\nfrom ling3export.runners.cli.main import main as run\n"
        "def ask(command, *words):\n"
        "    told = CliRunner().invoke(root, [*words, '--help'])\n"
        "    assert told.exit_code == 0 and 'Usage:' in told.stdout, (words, told.output)\n"
        "    for name in getattr(command, 'commands', ()):\n"
        "        ask(command.commands[name], *words, name)\n"
        "for root in (build, run):\n"
        "    ask(root)\n"
    )
    assert "ling3export.runners.cli.serve" in found
    assert "jax" not in found
