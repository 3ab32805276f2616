"""Tokens/s of Hugging Face transformers' generate on a checkpoint folder, by batch size, as JSON on stdout.

hf_generate.py CHECKPOINT [--dtype bfloat16] [--threads 2] [--prompt 64] [--answer 64] [--batches 1,16,64]

Greedy, every answer of full length, the better of two calls. Needs torch, transformers, numpy, safetensors.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import hf_model  # beside this script
import torch


def seconds(model: torch.nn.Module, tokens: torch.Tensor, answer: int) -> float:
    """Of one call, all of whose answers have ``answer`` tokens."""
    start = time.perf_counter()
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=answer,
        min_new_tokens=answer,
        do_sample=False,
        pad_token_id=0,
    )
    if out.shape[1] != tokens.shape[1] + answer:
        raise SystemExit(f"generate: expected {answer} new tokens, found {out.shape[1] - tokens.shape[1]}")
    return time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--batches", default="1,16,64")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = hf_model.load(options.checkpoint, getattr(torch, options.dtype), attention="sdpa", experts=None)
    found = {}
    for batch in map(int, options.batches.split(",")):
        generator = torch.Generator().manual_seed(batch)
        tokens = torch.randint(model.config.vocab_size, (batch, options.prompt), generator=generator)
        best = min(seconds(model, tokens, options.answer) for _ in range(2))
        found[batch] = batch * options.answer / best
    print(json.dumps(found))


if __name__ == "__main__":
    main()
