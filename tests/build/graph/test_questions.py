"""Questions of a newcomer about a compiled program: each has a command on docs/graphs.md whose output answers it."""

import re

import pytest
from click.testing import CliRunner

from ling3export.cli.main import main
from tests.support.artifacts_fixture import ROOT

NAME = "micro-tp2"
# The words after `ling3export`, A for the artifact; patterns that the answer has.
ANSWERS = {
    "which operations, how many of each": (
        "graph summary A decode@8",
        [r"\n  kda +\d+ ", r"\n +matrix products +\d+ "],
    ),
    "to which layer an operation belongs": (
        "graph show A decode@8 kda.o_proj",
        [r"layer kind  kda, layers 0-2", r"scope +\S*kda/output"],
    ),
    "what each part costs": ("graph summary A decode@8 --by part", [r"\n +q_proj +\d+ +\d\.\d+ "]),
    "what is fused with what": ("graph show A decode@8 kda.o_proj", [r"fused +\S+", r"read by +\S+"]),
    "where copies are": ("graph show A decode@8 copies", [r"copies and layout"]),
    "which buffers make the peak": ("graph memory A decode@8", [r"params\.moe\.experts_gate_up_proj +\d"]),
    "what changed between two paddings": ("graph diff A A decode@8 prefill@128", [r"GFLOP +\d", r"kda +\w.* \d"]),
    "why bytes differ": ("graph diff A A decode@8 prefill@128", [r"the executables have other bytes"]),
    "bound by memory or compute": ("graph show A decode@8 kda.o_proj", [r"bound by memory"]),
    "the optimized HLO": ("graph show A decode@8 --text", [r"\AHloModule ", r"ENTRY "]),
    "a picture": ("graph view A decode@8", [r"<!doctype html>", r'"kind":"router"']),
    "which collectives in which layer": (
        "graph show A decode@8 collectives",
        [r"all-reduce", r"layers 0-2", r"moves between devices \d"],
    ),
    "a step at another context": ("plan --target tpu:v6e:2x2 --tokens 8000 --context 8192", [r"at 8000 tokens"]),
}


@pytest.mark.parametrize("question", ANSWERS)
def test_a_command_answers(question, artifact):
    words, patterns = ANSWERS[question]
    folder = str(artifact(NAME))
    run = CliRunner().invoke(main, [folder if word == "A" else word for word in words.split()])
    assert run.exit_code in (0, 3), run.output
    for pattern in patterns:
        assert re.search(pattern, run.stdout), f"{pattern}\n{run.stdout[:3000]}"
    command = " ".join(words.split()[: 2 if words.startswith("graph") else 1])
    assert f"ling3export {command} " in (ROOT / "docs/graphs.md").read_text()
