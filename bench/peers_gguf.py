"""A checkpoint in the published layout as a GGUF file: ``python peers_gguf.py LLAMA_CPP CHECKPOINT FILE [--vocab]``.

llama.cpp's own converter writes it, from LLAMA_CPP's sources. It reads config.json through transformers, which drops
``norm_topk_prob`` and gives another width of a KDA head: both are restored from the file, or from the published model.
The tokenizer is left out, since most benchmarks draw random tokens. ``--vocab`` includes it as GPT-2's, the only one of
its form that llama.cpp has. Needs torch and transformers.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    sources, checkpoint, file = (Path(argument).resolve() for argument in sys.argv[1:4])
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    from conversion import bailingmoe3  # type: ignore[import-not-found]

    fields = json.loads((checkpoint / "config.json").read_text())
    model = bailingmoe3.BailingMoeV3Model
    parameters = model.set_gguf_parameters

    def as_published(self: Any) -> None:
        self.hparams |= {"norm_topk_prob": fields.get("norm_topk_prob", True), "head_dim": fields["head_dim"]}
        parameters(self)

    model.set_gguf_parameters = as_published
    if sys.argv[4:] == ["--vocab"]:
        model.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    else:
        model.set_vocab = model._set_vocab_none
    sys.argv[1:] = [str(checkpoint), "--outfile", str(file), "--outtype", "bf16", "--no-mtp"]
    import convert_hf_to_gguf  # type: ignore[import-not-found]

    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
