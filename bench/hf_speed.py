"""Speed of Hugging Face transformers on a checkpoint folder, as JSON on stdout.

hf_speed.py CHECKPOINT [--dtype bfloat16] [--device cpu] [--threads 2] [--prefill 512] [--batches 1,16]
    [--experts eager]

Prefill is one sequence of that many tokens with a cache, logits of its last token. Decode is one token for each of the
batch's sequences from a cache of --context tokens. Medians, after one call to warm up. Needs torch, transformers,
numpy, safetensors.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "parity"))
import hf_model


def random_tokens(vocab: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(length))


def prefill_seconds(model: torch.nn.Module, length: int, repeats: int) -> list[float]:
    tokens = random_tokens(model.config.vocab_size, 1, length).to(model.device)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        model(tokens, use_cache=True, logits_to_keep=1).logits.cpu()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def decode_seconds(model: torch.nn.Module, batch: int, context: int, steps: int) -> list[float]:
    """Seconds of each greedy step."""
    prompt = random_tokens(model.config.vocab_size, batch, context).to(model.device)
    out = model(prompt, use_cache=True, logits_to_keep=1)
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        tokens = out.logits[:, -1:].argmax(-1)
        out = model(tokens, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        out.logits.cpu()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prefilled sequence; 0 to skip")
    parser.add_argument("--batches", default="1,16", help="decode batch sizes, comma-separated; empty to skip")
    parser.add_argument("--context", type=int, default=64, help="tokens in the cache before decoding")
    parser.add_argument("--steps", type=int, default=16, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=3, help="prefills measured")
    parser.add_argument("--experts", choices=("eager", "batched_mm", "grouped_mm"), help="default: transformers' own")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    model = hf_model.load(options.checkpoint, getattr(torch, options.dtype), attention="sdpa", experts=options.experts)
    model.to(options.device)
    report = {
        "versions": hf_model.versions(),
        "dtype": options.dtype,
        "device": options.device,
        "threads": options.threads,
        "experts": options.experts or "default",
        "load_seconds": time.perf_counter() - start,
        "decode": [],
    }
    if options.prefill:
        seconds = statistics.median(prefill_seconds(model, options.prefill, options.repeats))
        report["prefill"] = {
            "tokens": options.prefill,
            "seconds": seconds,
            "tokens_per_second": options.prefill / seconds,
        }
    for batch in (int(part) for part in options.batches.split(",") if part):
        seconds = statistics.median(decode_seconds(model, batch, options.context, options.steps))
        report["decode"].append(
            {"batch": batch, "context": options.context, "seconds": seconds, "tokens_per_second": batch / seconds}
        )
    report["peak_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    json.dump(report, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
