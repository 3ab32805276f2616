"""``ling3export.open``: programs as graphs, as text, and as functions with the engine's results."""

import subprocess
import sys

import numpy as np
import pytest

import ling3export
from ling3export.foundation.errors import ArtifactError
from ling3export.runners.engine import Engine

NAME = "micro-tp2"
PROMPT = [5, 9, 2]


def decoded(folder) -> int:
    """The most likely token after PROMPT, by single decode steps."""
    program = ling3export.open(folder).program("decode@8")
    with program.load() as step:
        state = step.state()
        for position, token in enumerate(PROMPT):
            batch = step.batch(slot=[1], token=[token], position=[position], page_table=[[1]])
            state, out = step(step.params, state, batch)
        return int(np.argmax(np.asarray(out["logits"])[0]))


def test_steps_by_hand_give_the_token_of_the_engine(artifact):
    folder = artifact(NAME)
    with Engine(folder) as engine:
        (done,) = engine.generate([PROMPT], max_tokens=1)
    assert decoded(folder) == done.token_ids[0]


def test_programs_are_graphs_and_text_without_a_device(artifact):
    opened = ling3export.open(artifact(NAME))
    program = opened.program("decode@8")
    assert program.cell in opened.cells() and [program.target] == opened.targets
    assert program.text().startswith("HloModule")
    assert "stablehlo.dot_general" in program.text(portable=True)
    assert program.graph().totals().flops == pytest.approx(program.graph(portable=True).totals().flops, rel=0.5)
    assert {"kda", "experts"} <= {row.layer_kind for row in program.graph().rows()}
    with pytest.raises(ArtifactError, match="the target has no cell decode@3"):
        opened.program("decode@3")
    with pytest.raises(ArtifactError):
        ling3export.open("nowhere")


def test_wrong_inputs_are_named(artifact):
    with ling3export.open(artifact(NAME)).program("decode@8").load() as step:
        with pytest.raises(ValueError, match=r"speed: the program has no such input; it has .*token"):
            step.batch(speed=[1])
        with pytest.raises(ValueError, match=r"token: shape \[9\] does not fit into \[8\]"):
            step.batch(token=range(9))


def test_importing_the_package_loads_no_other_package():
    code = "import ling3export, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "ling3export" in loaded and not loaded & {"click", "jax", "msgspec", "numpy", "ling3export.opened"}


def test_a_program_is_read_and_run_without_the_extra_for_builds(artifact):
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["flax", "orbax", "rich", "tensorflow", "torch"]))
import ling3export
program = ling3export.open({str(artifact(NAME))!r}).program("decode@8")
assert program.text().startswith("HloModule")
with program.load() as step:
    print(len(step.params))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
