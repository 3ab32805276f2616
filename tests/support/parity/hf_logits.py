"""Logits of Hugging Face transformers for a checkpoint folder.

hf_logits.py CHECKPOINT PROMPTS.json OUT.npz [--dtype float64]

PROMPTS.json holds a list of lists of token ids. OUT.npz gets `0`, `1`, …: logits [T, vocab] of each prompt's every
position, and `versions`: the library versions as JSON. Needs torch, transformers, numpy, safetensors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import hf_model  # in this script's folder
import numpy as np
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float64")
    options = parser.parse_args()

    if options.dtype == "float64":
        hf_model.compute_in_double()
    model = hf_model.load(options.checkpoint, getattr(torch, options.dtype))
    prompts = json.loads(options.prompts.read_text())
    with torch.no_grad():
        logits = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]
    keep = torch.float64 if options.dtype == "float64" else torch.float32
    arrays = {str(i): rows.to(keep).numpy() for i, rows in enumerate(logits)}
    np.savez(options.out, versions=np.array(json.dumps(hf_model.versions())), **arrays)


if __name__ == "__main__":
    main()
