"""Hugging Face transformers as a peer, in an interpreter of its own (`make parity`)."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def parity_python() -> Path:
    """The interpreter that has torch and transformers. Fails the test where there is none: parity is never skipped."""
    named = os.environ.get("LING3_PARITY_PYTHON")
    path = Path(named) if named else ROOT / ".venv-parity" / "bin" / "python"
    if not path.is_file():
        source = "LING3_PARITY_PYTHON" if named else "the parity environment"
        pytest.fail(
            f"no interpreter with torch and transformers: {source} is {path}, which does not exist\nhint: make parity",
            pytrace=False,
        )
    return path


def transformers_logits(checkpoint: Path, prompts: list[list[int]], scratch: Path) -> list[np.ndarray]:
    """Float64 logits of every position of each prompt."""
    (scratch / "prompts.json").write_text(json.dumps(prompts))
    script = ROOT / "tests" / "support" / "parity" / "hf_logits.py"
    command = [parity_python(), script, checkpoint, scratch / "prompts.json", scratch / "logits.npz"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(scratch / "logits.npz") as arrays:
        print(arrays["versions"])
        return [arrays[str(i)] for i in range(len(prompts))]
