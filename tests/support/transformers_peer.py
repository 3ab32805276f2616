"""Runs Hugging Face transformers for comparison, in an interpreter of its own (`make parity`)."""

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from ling3export.machine.environment import cpu_features
from tests.support.artifacts_fixture import Artifacts, digest_of, files_below, kept_folder, run

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "support" / "parity"


def parity_python() -> Path:
    """The interpreter that has torch and transformers. The test fails where there is none: parity is never skipped."""
    named = os.environ.get("LING3_PARITY_PYTHON")
    path = Path(named) if named else ROOT / ".venv-parity" / "bin" / "python"
    if not path.is_file():
        source = "LING3_PARITY_PYTHON" if named else "the parity environment"
        pytest.fail(
            f"no interpreter with torch and transformers: {source} is {path}, which does not exist\nhint: make parity",
            pytrace=False,
        )
    return path


def transformers_logits(checkpoint: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """Float64 logits of every position of each prompt; results of an earlier equal run are reused."""
    python = parity_python()

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "prompts.json").write_text(json.dumps(prompts))
        run(python, SCRIPTS / "hf_logits.py", checkpoint, folder / "prompts.json", folder / "logits.npz")

    scripts = {name: SCRIPTS / name for name in ("hf_logits.py", "hf_model.py")}
    made_of = [digest_of(files_below(checkpoint)), digest_of(scripts), installed(python), cpu_features(), prompts]
    with np.load(Artifacts(kept_folder()).kept("transformers", made_of, write) / "logits.npz") as arrays:
        print(arrays["versions"])
        return [arrays[str(i)] for i in range(len(prompts))]


@functools.cache
def installed(python: Path) -> str:
    """Versions of an interpreter's packages that decide the logits."""
    code = "import sys; from importlib.metadata import version as v; print(sys.version, *map(v, sys.argv[1:]))"
    return run(python, "-c", code, "torch", "transformers", "numpy", "safetensors").stdout
