"""The tokenizer of a synthetic checkpoint: byte-level BPE whose merges spell a fixed list of common words.

No training, so the same files come out on any machine and any version of the library.
"""

import json
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import write_new

WORDS = (
    "the of and to in is that it for was on with as be at by this have from or had not but what all were when we "
    "there can an your which their said if do will each about how up out them then she many some so these would "
    "other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know get through back "
    "much before go good new write our used me man too any day same right look think also around another came come "
    "work three word must because does part even place well such here take why things help put years different away "
    "again off went old number great tell men say small every found still between name should home big give air "
    "line set own under read last never us left end along while might next sound below saw something thought both "
    "few those always show large often together asked house world going want school important until form food keep "
    "children feet land side without boy once animals life enough took sometimes four head above kind began almost "
    "live page got earth need far hand high year mother light parts country father let night following picture "
    "being study second eyes soon times story answer question money price total half twice dozen apples hours "
    "minutes week month cost dollars per cent"
).split()

# Written for this project, in the conversation format of the published models.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

# Ids relative to that of the end-of-text token, as in the published tokenizer.
SPECIALS = {"<|startoftext|>": -1, "<|endoftext|>": 0, "<|role_end|>": 1, "<role>": 2, "</role>": 3}


def write_tokenizer(folder: Path, eos_token_id: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template.

    Ids 0 to 255 are bytes; merged words follow, then the specials. ``eos_token_id`` is at least 257.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab, merges = _vocabulary(eos_token_id - 1)
    vocab.update({token: eos_token_id + offset for token, offset in SPECIALS.items()})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_new(folder / CHAT_TEMPLATE.name, CHAT_TEMPLATE.read_bytes())


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_new(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _vocabulary(limit: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes, then each word's growing prefixes (with the space before it), as far as ``limit`` ids reach."""
    vocab = {symbol: i for i, symbol in enumerate(_byte_symbols())}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        prefix = "Ġ"  # the byte-level symbol of a space
        for letter in word:
            if prefix + letter not in vocab:
                if len(vocab) >= limit:
                    return vocab, merges
                vocab[prefix + letter] = len(vocab)
                merges.append((prefix, letter))
            prefix += letter
    return vocab, merges


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte value, in order: itself where printable, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
