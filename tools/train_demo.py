"""Trains the demo checkpoint: ``python -m tools.train_demo WORK --write ling3export/demo``.

Needs the extra ``train`` (optax). Resumes from WORK; every step's data follows from the seed and the step's number.
"""

import os

DEVICES = 2  # rows are split over these devices; the sum of gradients is the same for any number
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(DEVICES))

import json  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import click  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, Mesh, PartitionSpec  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from ling3export.model.config import Config  # noqa: E402
from ling3export.model.program import bind  # noqa: E402
from tools.demo_checkpoint import fields, first_weights, train_tokenizer, write_checkpoint  # noqa: E402
from tools.demo_data import KINDS, Batch, Rows  # noqa: E402
from tools.demo_loss import Sums, geometry, logits, sums_of  # noqa: E402

P = PartitionSpec
SEED = 0
LENGTH = 256
STEPS = 1200
WARM_UP, DECAY = 60, 0.3  # steps; share of all steps, the last ones
PEAK, CLIP, WEIGHT_DECAY = 3e-3, 1.0, 0.05
BIAS_RATE = 2e-3  # rate of the load balance's rule
# rows of drills, shots and talks in a step: before this step, and from it on
MIXES, DRILLED = ((8, 4, 4), (2, 5, 9)), 500
CHECKED, CHECK_EVERY, SAVE_SECONDS = 64, 100, 60
UNDECAYED = ("norm", "layernorm", "A_log", "dt_bias", "expert_bias", "conv1d", "word_embeddings")

Tree = dict[str, Any]


def rate(step: jax.Array, steps: int) -> jax.Array:
    """Share of the peak rate: a linear rise, a constant part, and a linear fall over the last ``DECAY`` of steps."""
    return jnp.clip(jnp.minimum((step + 1) / WARM_UP, (steps - step) / (DECAY * steps)), 0.0, 1.0)


def optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW; only matrices decay."""

    def matrices(params: Tree) -> Tree:
        return {stack: {name: not name.endswith(UNDECAYED) for name in row} for stack, row in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(lambda step: PEAK * rate(step, steps), b1=0.9, b2=0.98, weight_decay=WEIGHT_DECAY, mask=matrices),
    )


def balanced(bias: jax.Array, load: jax.Array, speed: jax.Array) -> jax.Array:
    """The router's correction after a step: up for experts with less than the mean load, down for the others.

    The rule of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): no gradient reaches the bias. ``bias, load [layers, E]``.
    """
    return bias + speed * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


class Trainer:
    """Parameters, the optimizer's state, and the compiled steps."""

    def __init__(self, work: Path, steps: int, config: Config) -> None:
        self.work, self.steps, self.config = work, steps, config
        work.mkdir(parents=True, exist_ok=True)
        self.tokenizer = work / "tokenizer.json"
        if not self.tokenizer.exists():
            train_tokenizer(self.tokenizer)
        self.rows = Rows(Tokenizer.from_file(str(self.tokenizer)), LENGTH)
        self.optimizer = optimizer(steps)
        devices = np.array(jax.devices()[:DEVICES]).reshape(-1, 1)
        self.mesh = Mesh(devices, ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
        params = jax.tree.map(jnp.asarray, first_weights(self.config, SEED))
        self.state: tuple[Tree, Any] = (params, self.optimizer.init(params))
        self.step, self.seconds = 0, 0.0
        self.update = jax.jit(self._update, donate_argnums=(0,))
        self.exact = jax.jit(self._sharded(self._exact, P("data")))

    def _sharded(self, body: Any, out: Any) -> Any:
        return jax.shard_map(body, mesh=self.mesh, in_specs=(P(), P("data")), out_specs=out, check_vma=False)

    def _gradient(self, params: Tree, batch: dict[str, jax.Array]) -> tuple[Tree, Sums]:
        def loss(params: Tree) -> tuple[jax.Array, Sums]:
            return sums_of(self.config, params, batch, geometry(self.config))

        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.lax.psum((gradient, sums), "data")

    def _exact(self, params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        """Whether the answers of each row are right, token by token, at temperature 0."""
        scores, _ = logits(bind(self.config, geometry(self.config))(params), batch["tokens"][:, :-1])
        return jnp.all((jnp.argmax(scores, axis=-1) == batch["tokens"][:, 1:]) | ~batch["answer"], axis=1)

    def _update(self, state: tuple[Tree, Any], step: jax.Array, batch: dict[str, jax.Array]) -> Any:
        params, memory = state
        gradient, sums = self._sharded(self._gradient, P())(params, batch)
        gradient = jax.tree.map(lambda g: g / sums.weight, gradient)
        change, memory = self.optimizer.update(gradient, memory, params)
        params = optax.apply_updates(params, change)
        bias = balanced(params["moe"]["expert_bias"], sums.load, BIAS_RATE * rate(step, self.steps))
        return ({**params, "moe": {**params["moe"], "expert_bias": bias}}, memory), sums

    def run(self, last: int) -> None:
        """Trains up to step ``last``, and writes progress to ``log.jsonl`` in the working folder."""
        began = saved = time.monotonic()
        before = self.seconds
        checks = {"shots": self.rows.held_out(CHECKED)}
        checks |= {kind: self.rows.held_out_talks(kind, CHECKED) for kind in KINDS}
        counted: list[Sums] = []
        while self.step < last:
            batch = self.rows.training(self.step, *MIXES[self.step >= DRILLED])
            self.state, sums = self.update(self.state, jnp.asarray(self.step), batch)
            counted.append(jax.device_get(sums))
            self.step += 1
            self.seconds = before + time.monotonic() - began
            if self.step % 20 == 0 or self.step == last:
                self._log(counted, checks)
                counted = []
            if time.monotonic() - saved > SAVE_SECONDS or self.step == last:
                self.save()
                saved = time.monotonic()

    def _log(self, counted: list[Sums], checks: dict[str, Batch]) -> None:
        total = jax.tree.map(lambda *values: sum(values), *counted)
        load = total.load / np.mean(total.load, axis=-1, keepdims=True)
        line: dict[str, Any] = {
            "step": self.step,
            "seconds": round(self.seconds),
            "loss": float(total.loss / total.weight),
            "answer_tokens": float(total.right / total.answers),
            "largest_load": float(load.max()),
            "smallest_load": float(load.min()),
        }
        if self.step % CHECK_EVERY == 0:
            exact = {name: float(np.mean(self.exact(self.state[0], check))) for name, check in checks.items()}
            line["held_out"] = exact
        with (self.work / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        click.echo(json.dumps(line), err=True)

    def save(self) -> None:
        """Writes the state, complete or not at all."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self.state)]
        part = self.work / "state.npz.part"
        with part.open("wb") as file:
            np.savez(file, *leaves, step=self.step, seconds=self.seconds)
        part.rename(self.work / "state.npz")

    def load(self) -> bool:
        """Continues from the state in the working folder; returns False if there is none."""
        if not (self.work / "state.npz").exists():
            return False
        with np.load(self.work / "state.npz") as file:
            leaves, tree = jax.tree.flatten(self.state)
            self.state = jax.tree.unflatten(tree, [jnp.asarray(file[f"arr_{i}"]) for i in range(len(leaves))])
            self.step, self.seconds = int(file["step"]), float(file["seconds"])
        return True


@click.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--steps", default=STEPS, show_default=True, help="Steps of the whole training.")
@click.option("--until", type=int, help="Stop after this step.  [default: the last]")
@click.option("--write", type=click.Path(path_type=Path), help="Write the checkpoint to this folder.")
def main(work: Path, steps: int, until: int | None, write: Path | None) -> None:
    """Train in the folder WORK, or continue there."""
    trainer = Trainer(work, steps, Config.from_dict(fields()))
    trainer.load()
    trainer.run(min(until or steps, steps))
    if write is not None:
        size = write_checkpoint(write, trainer.state[0], trainer.tokenizer)
        click.echo(f"{write}: {size:,} bytes after {trainer.step} steps, {trainer.seconds:.0f} s", err=True)


if __name__ == "__main__":
    main()
