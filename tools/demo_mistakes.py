"""The demo suite's score under each planted mistake: ``python -m tools.demo_mistakes [CHECKPOINT]``.

The mistakes are those of tests/support/mistakes.py, planted in the same way while the steps are traced; the suite's
first problems are then answered by those steps under plain jit,
in fp32 (as those tests) at TP=1. A line a mistake on stdout.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import click
import numpy as np
import pytest
from tokenizers import Tokenizer

from ling3export.checkpoint.reader import Checkpoint
from ling3export.compile.build import DEMO
from ling3export.model.geometry import CHUNK
from ling3export.runners.evals.graders import extract_answer, gold_answer, same_number
from ling3export.runners.evals.suites import load_suite
from tests.support.direct import Direct
from tests.support.mistakes import MISTAKES

PREFILL, PAGE = 512, 512  # token slots of a call; a page holds a whole sequence
STOP = "\n\n"


def generate(direct: Direct, prompts: Sequence[list[int]], tokenizer: Tokenizer, limit: int) -> list[str]:
    """Greedy answers: prompts packed into prefills, then all sequences decoded together; slots are prompts' places."""
    ids: dict[int, list[int]] = {}
    waiting = [(slot, 0, prompt) for slot, prompt in enumerate(prompts, 1)]
    while waiting:
        parts: list[tuple[int, int, list[int]]] = []
        room = PREFILL // CHUNK
        while waiting and -(-len(waiting[0][2]) // CHUNK) <= room:
            parts.append(waiting.pop(0))
            room -= -(-len(parts[-1][2]) // CHUNK)
        ids |= {slot: [int(np.argmax(row))] for slot, row in direct.prefill(PREFILL, parts).items()}
    ends = set(direct.config.eos_token_ids)
    for _ in range(limit - 1):
        going = [slot for slot, found in ids.items() if found[-1] not in ends and STOP not in tokenizer.decode(found)]
        if not going:
            break
        rows = [(slot, len(prompts[slot - 1]) + len(ids[slot]) - 1, ids[slot][-1]) for slot in going]
        for slot, row in zip(going, direct.decode(len(prompts), rows), strict=True):
            ids[slot].append(int(np.argmax(row)))
    return [tokenizer.decode(ids[slot]).partition(STOP)[0] for slot in sorted(ids)]


def score(checkpoint: Path, count: int) -> int:
    """How many of the suite's first ``count`` problems are solved by steps that are traced now."""
    suite = load_suite("demo", limit=count)
    source, tokenizer = Checkpoint.open(checkpoint), Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    direct = Direct(source.config, source.tensor, slots=count, page_size=PAGE, max_pages=1)
    prompts = [tokenizer.encode(task.prompt).ids for task in suite.tasks]
    texts = generate(direct, prompts, tokenizer, suite.settings["max_tokens"])
    pairs = zip(texts, suite.tasks, strict=True)
    return sum(same_number(extract_answer(text), gold_answer(task.target)) for text, task in pairs)


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True), default=DEMO)
@click.option("--count", default=100, show_default=True, help="Problems.")
@click.option("--only", multiple=True, help="Only these mistakes; may be repeated.")
def main(checkpoint: Path, count: int, only: tuple[str, ...]) -> None:
    """Score the demo suite under each planted mistake."""
    click.echo(f"none: {score(checkpoint, count)}/{count}")
    for name in only or MISTAKES:
        began = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            MISTAKES[name](patch)
            click.echo(f"{name}: {score(checkpoint, count)}/{count}")
        click.echo(f"{name}: {time.monotonic() - began:.0f} s", err=True)


if __name__ == "__main__":
    main()
