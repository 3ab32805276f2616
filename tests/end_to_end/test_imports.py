"""Imports point down: cli → build side and runners → model | artifacts → errors."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ling3export"

# What each layer may import of ours, and of others. The build side is every other module in ling3export/.
RUNNER_NEEDS = {
    "click",
    "flatbuffers",
    "jax",
    "jaxlib",
    "jinja2",
    "ml_dtypes",
    "numpy",
    "prometheus_client",
    "safetensors",
    "starlette",
    "tokenizers",
    "uvicorn",
    "yaml",
}
LAYERS = {
    "errors": (set(), set()),
    "artifacts": ({"errors", "artifacts"}, {"ml_dtypes", "numpy", "safetensors"}),
    "model": ({"errors", "model"}, {"flax", "jax", "ml_dtypes", "numpy"}),
    "runners": ({"errors", "artifacts", "runners"}, RUNNER_NEEDS),
    "build": (
        {"errors", "artifacts", "model", "runners", "build"},
        {*RUNNER_NEEDS, "flax", "orbax", "rich", "tensorflow"},
    ),
    "cli": ({"errors", "artifacts", "model", "runners", "build"}, {"click", "rich"}),
    "__main__": ({"cli"}, set()),
}

# No jax beside the errors and the artifact format: `--help`, and what only reads configurations and checkpoints.
WITHOUT_JAX = [
    "ling3export.checkpoint.checkpoint",
    "ling3export.cli",
    "ling3export.model.config",
    "ling3export.verify.reference",
    "ling3export.report.page",
    "ling3export.runners.cli",
    "ling3export.runners.load.environment",
    "ling3export.runners.cli.eval",
    "ling3export.runners.evals.run",
    "ling3export.runners.hosts.channel",
    "ling3export.runners.hosts.hosts",
    "ling3export.runners.cli.serve",
    "ling3export.runners.serve.schema",
    "ling3export.checkpoint.synth",
]
# Models for evaluation libraries, which load these: extras, and what they bring.
ADAPTERS = {
    "ling3export.runners.adapters.inspect_ai": {"inspect_ai"},
    "ling3export.runners.adapters.lm_eval": {"lm_eval"},
}
NEVER_IN_RUNNER = ["flax", "ling3export.model", "optax", "orbax", "rich", "tensorflow", "torch", "transformers"]


def modules() -> dict[str, Path]:
    """Dotted name of every module of the package, and its file. There is one level of rooms."""
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py"), *PACKAGE.glob("*/*/*.py")]
    return {".".join(("ling3export", *f.relative_to(PACKAGE).with_suffix("").parts)): f for f in sorted(files)}


def layer_of(module: str) -> str:
    part = module.split(".")[1] if "." in module else "build"
    return part if part in LAYERS else "build"


def imported(path: Path) -> set[str]:
    """Full names that a file imports, inside functions too; ``from a import b`` counts as ``a.b``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("module", modules())
def test_imports_stay_within_the_table_of_layers(module):
    path = modules()[module]
    ours, others = LAYERS[layer_of(module)]
    for name in imported(path):
        root = name.split(".")[0]
        if root == "ling3export":
            assert layer_of(name) in ours, f"{module} ({layer_of(module)}) imports {name}"
        elif root not in sys.stdlib_module_names:
            assert root in others | ADAPTERS.get(module, set()), f"{module} ({layer_of(module)}) imports {name}"


def test_two_files_alone_use_private_jax():
    private = {name for name, path in modules().items() if any(i.startswith("jax._src") for i in imported(path))}
    assert private <= {"ling3export.runners.load.pjrt", "ling3export.runners.hosts.service"}


def test_runner_loads_none_of_the_build_side():
    names = [name for name in modules() if layer_of(name) == "runners" and name not in ADAPTERS]
    done = run_python(f"import sys, {', '.join(names)}\nprint(*sorted(set({NEVER_IN_RUNNER}) & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_only_serving_loads_the_server():
    done = run_python(
        "import sys\nimport ling3export.runners.cli.main, ling3export.runners.engine.engine\n"
        "print(*sorted({'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules)))"
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_nothing_imports_the_models_for_other_libraries():
    names = set(ADAPTERS)
    assert [module for module, path in modules().items() if names & imported(path)] == []


def test_code_that_only_reads_files_loads_no_jax():
    names = [name for name in modules() if layer_of(name) in ("errors", "artifacts")] + WITHOUT_JAX
    done = run_python(
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'jax' not in sys.modules, name\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("ling3export.cli", ["--help"]),
        ("ling3export.cli", ["build", "--help"]),
        ("ling3export.runners.cli", ["--help"]),
        ("ling3export.runners.cli", ["generate", "--help"]),
        ("ling3export.runners.cli", ["eval", "run", "--help"]),
        ("ling3export.runners.cli", ["serve", "--help"]),
    ],
)
def test_help_loads_no_jax(module, arguments):
    done = run_python(
        f"import sys\nfrom {module} import main\nsys.argv[1:] = {arguments}\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'jax' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
