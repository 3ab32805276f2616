"""The demo checkpoint's files: its configuration, its tokenizer, its first weights, and the published layout.

Weights are trained in the program's own layout (``model/parameters.py``). The build cuts
published tensors into that layout. The way back cuts arrays of element numbers in the same way, so it cannot differ.
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ling3export.checkpoint.convert import pieces
from ling3export.checkpoint.synth import config_fields
from ling3export.checkpoint.synth_tokenizer import CHAT_TEMPLATE, write_json
from ling3export.model.config import Config
from ling3export.model.parameters import TensorInfo, expected_tensors, weight_table
from tools.demo_data import ANSWER, SMALL_ANSWER, SYSTEM_TEXTS, TOOL
from tools.demo_problems import SEED, Problems, text

VOCABULARY = 512
END, TURN_END = "<|endoftext|>", "<|role_end|>"
SPECIALS = (END, "<|startoftext|>", TURN_END, "<role>", "</role>")
MARKS = tuple(
    f"<{slash}{name}>"
    for name in ("think", "tools", "tool_call", "arg_key", "arg_value", "tool_response")
    for slash in ("", "/")
)
TOKENIZER_PROBLEMS, TOKENIZER_SPOKEN = 20_000, 1000
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}

Tree = dict[str, dict[str, Any]]

SIZES = {
    "num_hidden_layers": 6, "layer_group_size": 3, "hidden_size": 128, "num_attention_heads": 16, "head_dim": 8,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 32, "intermediate_size": 192, "vocab_size": VOCABULARY,
    "eos_token_id": [0, SPECIALS.index(TURN_END)],
    "num_nextn_predict_layers": 0,
}  # fmt: skip


def fields() -> dict[str, Any]:
    """config.json."""
    return config_fields("micro", SIZES)


def train_tokenizer(path: Path) -> None:
    """Trains byte-level BPE on training problems, with single digits, and writes ``path``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    problems = Problems(f"{SEED} tokenizer", kept=False)
    texts = (text(problems.next()) + "\n\n" for _ in range(TOKENIZER_PROBLEMS))
    roles = " ".join(
        ("SYSTEM", "HUMAN", "ASSISTANT", "OBSERVATION", *SYSTEM_TEXTS, SMALL_ANSWER, ANSWER, "I calculate.")
    )
    spoken = (f"{json.dumps(TOOL)}\ndetailed thinking on off\n{roles}" for _ in range(TOKENIZER_SPOKEN))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIALS, *MARKS],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(itertools.chain(texts, spoken), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"tokenizer: expected {VOCABULARY} tokens, found {tokenizer.get_vocab_size()}")
    written = json.loads(tokenizer.to_str())
    # marks that a server searches in answers are text, as in the published tokenizer
    for token in written["added_tokens"]:
        token["special"] = token["content"] in SPECIALS
    path.write_text(json.dumps(written, indent=2, ensure_ascii=False), encoding="utf-8")


def element_numbers(config: Config) -> tuple[dict[str, TensorInfo], dict[str, int], Tree]:
    """Published tensors, the number of each one's first element, and the program's layout filled with such numbers."""
    tensors = expected_tensors(config)
    first, total = {}, 0
    for name, info in tensors.items():
        first[name] = total
        total += int(np.prod(info.shape))
    tree: Tree = {}
    for row in weight_table(config):
        flat: dict[int | None, list[np.ndarray]] = {}
        for layer in row.layers or (None,):
            for shard, (piece,) in pieces(row, layer, config, lambda name: _numbers(first[name], tensors[name].shape)):
                flat.setdefault(shard, []).append(piece.reshape(-1))
        stack, _, name = row.name.partition(".")
        keys = [None] if row.split is None else list(range(config.tp_shards))
        value = np.concatenate([part for key in keys for part in flat[key]]).reshape(row.shape)
        tree.setdefault(stack, {})[name] = value
    return tensors, first, tree


def _numbers(start: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.int64).reshape(shape)


def first_weights(config: Config, seed: int) -> Tree:
    """Random weights in the program's layout, fp32."""
    tensors, _, numbers = element_numbers(config)
    random = np.random.default_rng(seed)
    flat = np.concatenate([_first(name, info.shape, config, random).reshape(-1) for name, info in tensors.items()])
    return {stack: {name: flat[index] for name, index in row.items()} for stack, row in numbers.items()}


def _first(name: str, shape: tuple[int, ...], config: Config, random: np.random.Generator) -> np.ndarray:
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if module.endswith("norm"):
        value = np.ones(shape)
    elif module == "expert_bias":
        value = np.zeros(shape)
    elif module == "A_log":
        value = random.uniform(-0.5, 0.5, shape)
    elif module == "dt_bias":  # memories of one to hundreds of tokens
        value = random.uniform(-6.5, 0.0, shape)
    elif module.endswith("conv1d"):
        value = random.normal(0, 0.15, shape) + (np.arange(shape[-1]) == shape[-1] - 1)
    elif module == "word_embeddings":
        value = random.normal(0, 0.5, shape)
    else:
        gain = 0.5 / config.num_hidden_layers**0.5 if module in ("o_proj", "dense", "down_proj") else 1.0
        value = random.normal(0, gain * shape[-1] ** -0.5, shape)
    return value.astype(np.float32)


def published(config: Config, tree: Tree) -> dict[str, np.ndarray]:
    """The tensors of the published layout, in their stored dtypes."""
    tensors, first, numbers = element_numbers(config)
    flat = np.full(sum(int(np.prod(info.shape)) for info in tensors.values()), np.nan, np.float32)
    for stack, row in numbers.items():
        for name, index in row.items():
            flat[index] = np.asarray(tree[stack][name], np.float32)
    if not np.isfinite(flat).all():
        raise SystemExit("weights: expected finite numbers, found others")
    arrays = {}
    for name, info in tensors.items():
        part = flat[first[name] : first[name] + int(np.prod(info.shape))].reshape(info.shape)
        arrays[name] = np.ascontiguousarray(part.astype(DTYPES[info.dtypes[0]]))
    return arrays


def write_checkpoint(folder: Path, tree: Tree, tokenizer: Path) -> int:
    """Replaces ``folder``: config, tokenizer files, two shards and their index. Returns the bytes of all files."""
    config_json = fields()
    tensors = published(Config.from_dict(config_json), tree)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    shutil.copyfile(CHAT_TEMPLATE, folder / CHAT_TEMPLATE.name)
    ids = {"eos_token_id": config_json["eos_token_id"], "pad_token_id": config_json["pad_token_id"]}
    write_json(folder / "config.json", config_json)
    write_json(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 0.1})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[1],
            "eos_token": END,
            "pad_token": END,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
        },
    )
    names = list(tensors)
    half = sum(value.nbytes for value in tensors.values()) / 2
    shards: list[dict[str, np.ndarray]] = [{}, {}]
    for name in names:
        shards[sum(value.nbytes for value in shards[0].values()) >= half][name] = tensors[name]
    files = [f"model-{place + 1:05}-of-{len(shards):05}.safetensors" for place in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors makes files that only their owner can read
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in sorted(shard)}
    total = sum(value.nbytes for value in tensors.values())
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
    return sum(path.stat().st_size for path in folder.iterdir())
