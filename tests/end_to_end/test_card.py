"""``make card``: the order of its steps, that a second call repeats none, and a complete run on the processor."""

import json
import subprocess

import pytest

from bench import card
from bench.card import Card
from ling3export.checkpoint.synth import config_fields


@pytest.fixture
def asked(monkeypatch):
    """The commands that were run. Builds make an empty artifact; commands in ``fails``, and int8 builds, fail."""
    commands, fails = [], ["verify", "serve"]

    def run(command, timeout):
        assert 0 < timeout <= card.LONGEST
        words = [str(word) for word in command]
        commands.append(words)
        if words[1] in fails or (words[1] == "build" and "int8" in words):
            raise subprocess.CalledProcessError(1, words)
        if words[1] in ("build", "synth"):
            (command[3 if words[1] == "build" else 2] / "weights").mkdir(parents=True)
        return json.dumps({"token_ids": [1]})

    def served(folder):
        raise OSError("no server")

    monkeypatch.setattr(card, "run", run)
    monkeypatch.setattr(card, "served", served)
    return commands


def test_the_first_form_comes_first_and_what_is_done_is_not_done_again(asked, tmp_path, capsys):
    plan = Card(tmp_path, transformers=tmp_path / "none")
    card.main(plan)
    built = [words[3].rpartition("/")[2] for words in asked if words[1] == "build"]
    forms = ["12-bf16", "24-bf16", "24-int4", "24-int8", "12-int4", "12-int8"]
    assert built == [f"{name}.ling3" for name in forms]
    # Regression: the default prompt and answer were longer than the model's context, so every build was refused on a
    # card.
    contexts = {int(words[words.index("--context") + 1]) for words in asked if words[1] == "build"}
    assert max(contexts) <= config_fields("full", {})["max_position_embeddings"]
    said = capsys.readouterr()
    assert "left: 12 bf16 verify, 12 bf16 serve 1, 12 bf16 serve 16, 24 bf16 verify" in said.err
    assert "24 int8 build" in said.err and "24 int8 generate" not in said.err
    assert [line.split(" | ")[0] for line in said.out.splitlines()[4:]] == [
        f"| {name.replace('-', ', ')}" for name in forms
    ]
    asked.clear()
    card.main(plan)
    assert {words[1] for words in asked} == {"build", "verify"} and len(asked) == 7
    asked.clear()
    card.main(Card(tmp_path, minutes=0, transformers=tmp_path / "none"))
    assert asked == []


@pytest.mark.extras
@pytest.mark.build
def test_all_steps_run_on_the_processor(tmp_path, capfd):
    plan = {"target": "cpu", "preset": "micro", "layers": (4,), "weights": ("bf16", "int4"), "paddings": "16"}
    card.main(Card(tmp_path, prompt=24, answer=4, transformers=tmp_path / "none", **plan))
    said = capfd.readouterr()
    assert "left: " not in said.err, said.err
    done = json.loads((tmp_path / "card.json").read_text())
    for form in plan["weights"]:
        assert done[f"4 {form} generate"] == {"tokens": 32}
        assert done[f"4 {form} serve 16"]["tpot"] > 0 and 0 < done[f"4 {form} verify"]["median error"] < 0.15
    assert not list(tmp_path.glob("*.ling3")) and not (tmp_path / "micro-4").exists()
    assert said.out.splitlines()[-2].startswith("| 4, bf16 | 0.001 | ")
