"""Tokens/s after long prompts, through ``Engine``: ``python -m bench.long_ours ARTIFACT LENGTHS``; as JSON.

Every prompt begins with the one before, so the prefix cache has all but about SPAN of its tokens. Prefill is the time
until its first token, decode the time of the tokens after that.
"""

import json
import sys
from pathlib import Path

import numpy as np

from bench.inputs import numbers

SPAN, ANSWER = 1024, 33


def main() -> None:
    from ling3export.runners.engine.engine import Engine

    folder, lengths = Path(sys.argv[1]), numbers(sys.argv[2])
    dice = np.random.default_rng(0)
    seconds: dict[str, float] = {}
    with Engine(folder, report=lambda text: None) as engine:
        engine.settle()
        dropped, ids = (dice.integers(0, engine.manifest.vocab_size, n).tolist() for n in (SPAN, lengths[-1] + SPAN))
        engine.generate([dropped], max_tokens=ANSWER, ignore_eos=True)
        for length in lengths:
            engine.generate([ids[:length]], max_tokens=1)
            (behind,) = engine.generate([ids[: length + SPAN]], max_tokens=1)
            seconds[f"prefill {length}"] = 1e3 * (length + SPAN - behind.cached_tokens) / behind.ttft_ms
            (done,) = engine.generate([ids[:length]], max_tokens=ANSWER, ignore_eos=True)
            seconds[f"decode {length}"] = 1e3 * (ANSWER - 1) / (done.e2e_ms - done.ttft_ms)
        assert engine.stats()["compile_events"] == 0
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
