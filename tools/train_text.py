"""Trains a small Ling3 on real text, to compare forms of weights: ``python -m tools.train_text WORK``.

The text is the documentation that CPython ships: ``pydoc_data/topics.py`` and the docstrings of the standard library
(PSF License 2.0). Every twentieth document is held out. Needs the extra ``train`` (optax) and about 2 GB of memory.
WORK gets the checkpoint with the least loss on the held-out text, and ``held_out.txt``. With
``JAX_PLATFORMS=cuda`` a card trains, for half a minute: after five readings of the text the held-out loss rises.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import ast
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ling3export.checkpoint.synth import config_fields
from ling3export.checkpoint.synth_tokenizer import write_json
from ling3export.model.config import Config
from tools.demo_checkpoint import first_weights, published
from tools.demo_loss import geometry, sums_of
from tools.train_demo import BIAS_RATE, balanced

VOCABULARY = 2048
SIZES: dict[str, Any] = {
    "num_hidden_layers": 8, "layer_group_size": 4, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64,
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "num_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64, "intermediate_size": 768, "vocab_size": VOCABULARY, "eos_token_id": [0],
    "num_nextn_predict_layers": 0,
}  # fmt: skip
END = "<|endoftext|>"
MATRICES = ("_proj", "_proj_with_mqa", "dense", "w_uk", "w_uv")
LENGTH, CHECKED = 256, 60
PEAK, WARM_UP, DECAY = 6e-3, 30, 0.5
CHECKS = 24  # evaluations on the held-out text in a training

Tree = dict[str, Any]


def documents() -> list[str]:
    """Topics and docstrings of this Python, without repetitions, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    topics = ast.parse((root / "pydoc_data" / "topics.py").read_text(encoding="utf-8")).body[-1]
    assert isinstance(topics, ast.Assign)
    pages = dict.fromkeys(ast.literal_eval(topics.value).values())
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "lib2to3"} & set(path.parts):
            continue
        texts = (
            ast.get_docstring(node)
            for node in ast.walk(ast.parse(path.read_bytes()))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        )
        pages[f"{path.stem}\n\n" + "\n\n".join(text for text in texts if text)] = None
    return list(pages)


def tokenizer_of(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of the model's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, first = sorted(pre_tokenizers.ByteLevel.alphabet()), [END]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=first, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokens_of(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """One line of token ids, each text after an end token."""
    return np.array([i for row in tokenizer.encode_batch(texts) for i in (0, *row.ids)], np.int32)


def ngram_loss(train: np.ndarray, held: np.ndarray, order: int = 3) -> float:
    """Nats a token of an n-gram with absolute discounting (0.75) that backs off by interpolation to uniform."""
    shares = np.full(len(held), 1 / VOCABULARY)
    for n in range(order):
        counts = Counter(zip(*(train[i : len(train) - n + i].tolist() for i in range(n + 1)), strict=True))
        totals: Counter[tuple[int, ...]] = Counter()
        kinds: Counter[tuple[int, ...]] = Counter()
        for gram, count in counts.items():
            totals[gram[:-1]] += count
            kinds[gram[:-1]] += 1
        for at in range(n, len(held)):
            gram = tuple(held[at - n : at + 1].tolist())
            if total := totals[gram[:-1]]:
                own = max(counts[gram] - 0.75, 0) / total
                shares[at] = own + 0.75 * kinds[gram[:-1]] / total * shares[at]
    return float(-np.mean(np.log(shares[order:])))


class Training:
    """The state of a training in a folder."""

    def __init__(self, work: Path, batch: int) -> None:
        work.mkdir(parents=True)
        self.work, self.batch = work, batch
        self.best = float("inf")
        fields = config_fields("micro", SIZES)
        self.config = Config.from_dict(fields)
        texts = documents()
        held = texts[10::20]
        kept = [text for text in texts if text not in set(held)]
        tokenizer = tokenizer_of(kept)
        self.train, self.held = tokens_of(tokenizer, kept), tokens_of(tokenizer, held)
        tokenizer.save(str(work / "tokenizer.json"))
        (work / "held_out.txt").write_text("\n\n".join(held), encoding="utf-8")
        write_json(work / "config.json", fields)
        muon = optax.contrib.muon(
            1.0, weight_decay=0.05, adam_b2=0.98, consistent_rms=0.2, muon_weight_dimension_numbers=_matrices
        )
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon)
        params = jax.tree.map(jnp.asarray, first_weights(self.config, 0))
        self.state: tuple[Tree, Any] = (params, self.optimizer.init(params))
        mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec()
        self._sums = jax.shard_map(self._loss, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        self.update = jax.jit(self._update, donate_argnums=0)
        self.loss = jax.jit(lambda params, tokens: self._sums(params, tokens)[0] / tokens[:, 1:].size)

    def _loss(self, params: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        ones = jnp.ones(tokens[:, 1:].shape)
        batch = {"tokens": tokens, "weight": ones, "answer": ones == 0}
        loss, sums = sums_of(self.config, params, batch, geometry(self.config))
        return loss, sums.load

    def _update(self, state: tuple[Tree, Any], rate: float, tokens: jax.Array) -> tuple[tuple[Tree, Any], jax.Array]:
        params, memory = state
        (loss, load), gradient = jax.value_and_grad(self._sums, has_aux=True)(params, tokens)
        gradient = jax.tree.map(lambda g: g / tokens[:, 1:].size, gradient)
        change, memory = self.optimizer.update(gradient, memory, params)
        params = jax.tree.map(lambda p, c: p + rate * c, params, change)
        bias = balanced(params["moe"]["expert_bias"], load, jnp.asarray(BIAS_RATE))
        return ({**params, "moe": {**params["moe"], "expert_bias": bias}}, memory), loss / tokens[:, 1:].size

    def rows(self, step: int) -> np.ndarray:
        """Rows of a step; the text is shuffled again after each reading."""
        count = (len(self.train) - LENGTH - 1) // LENGTH
        epoch, at = divmod(step * self.batch, count // self.batch * self.batch)
        random = np.random.default_rng(epoch)
        starts = random.permutation(count)[at : at + self.batch] * LENGTH + random.integers(LENGTH)
        return np.stack([self.train[start : start + LENGTH + 1] for start in starts])

    def held_out_loss(self) -> float:
        """Nats a token of the first windows of the held-out text."""
        windows = np.stack([self.held[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(CHECKED)])
        return float(np.mean([self.loss(self.state[0], part) for part in np.split(windows, CHECKED // 6)]))

    def save(self) -> float:
        """Writes the weights, complete or not at all, if they are the best so far. Returns the held-out loss."""
        loss = self.held_out_loss()
        if loss >= self.best:
            return loss
        self.best = loss
        tensors = published(self.config, self.state[0])
        save_file(tensors, self.work / "part.safetensors", metadata={"format": "pt"})
        (self.work / "part.safetensors").rename(self.work / "model.safetensors")
        return loss


def _matrices(params: Tree) -> Tree:
    """The parameters that Muon trains, each matrix of a stack by itself. Adam trains all others."""
    matrix, narrow = optax.contrib.MuonDimensionNumbers(-1, -2), ("b_proj", "g_proj")
    wanted = {
        stack: [name for name in row if name.endswith(MATRICES) and name not in narrow] for stack, row in params.items()
    }
    return {stack: {name: matrix if name in wanted[stack] else None for name in row} for stack, row in params.items()}


@click.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--minutes", default=60.0, show_default=True, help="Time of the whole training.")
@click.option("--batch", default=6, show_default=True, help="Sequences of 256 tokens in a step.")
def main(work: Path, minutes: float, batch: int) -> None:
    """Train, and write the best checkpoint so far to the new folder WORK. The learning rate follows the time."""
    training = Training(work, batch)
    size = sum(leaf.size for leaf in jax.tree.leaves(training.state[0]))
    click.echo(f"{size:,} parameters, {len(training.train):,} tokens, {len(training.held):,} held out")
    click.echo(f"trigram: {ngram_loss(training.train, training.held[: CHECKED * LENGTH + 1]):.4f} nats a token")
    began = time.monotonic()
    step, passed, checked = 0, 0.0, 0.0  # passed: share of the total time
    while passed < 1:
        rate = PEAK * min((step + 1) / WARM_UP, (1 - passed) / DECAY, 1.0)
        training.state, loss = training.update(training.state, rate, training.rows(step))
        step += 1
        passed = (time.monotonic() - began) / 60 / minutes
        if step % 10 == 0:
            click.echo(f"step {step}, {60 * minutes * passed:.0f} s, loss {float(loss):.4f}")
        if passed >= min(checked + 1 / CHECKS, 1):
            checked = passed
            click.echo(f"step {step}, held out {training.save():.4f}")


if __name__ == "__main__":
    main()
