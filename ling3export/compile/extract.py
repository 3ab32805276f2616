"""``ling3export graph extract``: some layers of an artifact as a small artifact that every other command takes.

The small artifact's model has only these layers. Each token of its vocabulary stands for one input of the first layer:
row t of its embedding is the residual stream that the vectors' token number t brings to that layer, as the numpy
reference computes it. Its sequences are the vectors of the artifact, token by token. Its head is a random projection,
so the expected logits compare directions of the layers' output, and its final norm is 1. Programs run the layers one
after the other, without the loop that the whole model may have.
"""

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from msgspec import structs

from ling3export.artifacts import schema
from ling3export.artifacts.manifest import target_of
from ling3export.artifacts.schema import Manifest, SequenceRecord
from ling3export.artifacts.signing import read_trusted
from ling3export.artifacts.staging import staged
from ling3export.artifacts.store import Store
from ling3export.cache.cells import opened
from ling3export.cache.store import DEFAULT_USE, CacheUse
from ling3export.checkpoint.convert import write_weights
from ling3export.checkpoint.synth_weights import DummyWeights
from ling3export.compile.build import Reporter, announced, compiling, complete
from ling3export.foundation.errors import ArtifactError, PlanError
from ling3export.foundation.phases import PHASES
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import Plan
from ling3export.plan.recorded import config_of, options_of, plan_of
from ling3export.verify.reference import Reference
from ling3export.verify.stored import StoredWeights, stored_reference
from ling3export.verify.vectors import put_vectors, sequences

SEED = 0  # of the head


class Slice:
    """Some layers of a model, from number ``first`` on, as a checkpoint; ``inputs`` fp32 [V, D] are its embedding."""

    def __init__(self, config: Config, whole: StoredWeights | DummyWeights, first: int, inputs: np.ndarray) -> None:
        self.config = config
        self._whole, self._first = whole, first
        head = np.random.default_rng(SEED).standard_normal(inputs.shape, np.float32) / math.sqrt(inputs.shape[1])
        self._own = {
            "model.word_embeddings.weight": inputs,
            "lm_head.weight": head,
            "model.norm.weight": np.ones(inputs.shape[1], np.float32),
        }

    def stored(self, name: str) -> None:
        """None: nothing is taken as a pair of q and scale."""

    def tensor(self, name: str) -> np.ndarray:
        """A tensor by its published name, with the numbers of layers counted from the first one."""
        if name in self._own:
            return self._own[name]
        model, layers, number, rest = name.split(".", 3)
        return self._whole.tensor(f"{model}.{layers}.{int(number) + self._first}.{rest}")


def sliced(config: Config, first: int, count: int, tokens: int) -> Config:
    """The configuration of some layers with a vocabulary of at least ``tokens`` tokens and the same TP shards."""

    def limits(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        part = None if values is None else values[first : first + count]
        return part if part and any(part) else None

    kinds = config.attention_kinds[first : first + count]
    shards, dense = config.tp_shards, config.mlp_kinds[first : first + count].count("dense")
    vocabulary = -(-tokens // shards) * shards
    while True:
        part = replace(
            config,
            vocab_size=vocabulary,
            eos_token_id=0,
            num_hidden_layers=count,
            first_k_dense_replace=dense,
            num_nextn_predict_layers=0,
            full_attn_layers=tuple(number for number, kind in enumerate(kinds) if kind == "mla"),
            expert_swiglu_limit_list=limits(config.expert_swiglu_limit_list),
            share_expert_swiglu_limit_list=limits(config.share_expert_swiglu_limit_list),
        )
        if part.tp_shards == shards:
            return part
        vocabulary += shards


class _Reached(Exception):
    """The layer's inputs are known."""


def inputs_of(
    config: Config, weights: StoredWeights | DummyWeights, chosen: tuple[SequenceRecord, ...], first: int
) -> np.ndarray:
    """The residual stream that enters a layer, fp32 [tokens of all sequences, D], by the numpy reference."""
    reference = Reference(config, weights.tensor, np.float32)
    streams: list[np.ndarray] = []

    def observe(layer: int, name: str, value: np.ndarray) -> None:
        if layer == first - 1 and name in ("embed", "mlp"):
            streams.append(value.astype(np.float32))
            raise _Reached

    reference.observer = observe
    with contextlib.suppress(_Reached):
        reference.logits_many([sequence.ids for sequence in chosen])
    return streams[0]


def layer_range(text: str, config: Config) -> tuple[int, int]:
    """``7`` or ``4-7`` as the first layer and how many.

    Raises:
        PlanError: The model has no such layers.
    """
    first, _, last = text.partition("-")
    last = last or first
    most = config.num_hidden_layers - 1
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) <= most):
        raise PlanError(f"--layers: expected a layer from 0 to {most}, or a range such as 0-{most}, found {text[:40]}")
    return int(first), int(last) - int(first) + 1


def plan_for(manifest: Manifest, target: str, cell: str) -> Plan:
    """The plan of a target with one cell, and the prefill or decode that an artifact cannot do without.

    Raises:
        ArtifactError: The target has no such cell, or it runs no layers.
    """
    record, plan = manifest.targets[target], plan_of(manifest, target)
    phases = [name for name, phase in PHASES.items() if phase.family == "logits"]
    names = sorted(name for name, program in record.cells.items() if program.phase in phases)
    if cell not in names:
        raise ArtifactError(f"{target} has no cell {cell} with layers; it has {', '.join(names)}")
    phase, padding = record.cells[cell].phase, record.cells[cell].padding
    return replace(
        plan,
        geometry=replace(plan.geometry, snapshots=0),
        paddings=(padding if phase == "prefill" else plan.paddings[0],),
        decode_paddings=(padding if phase == "decode" else plan.decode_paddings[0],),
        score_paddings=(padding,) if phase == "score" else (),
        ffn_paddings=(),
    )


def extract(
    artifact: Path,
    target: str | None,
    cell: str,
    layers: str,
    out: Path,
    report: Reporter,
    *,
    dummy: int | None = None,
    force: bool = False,
    cache: CacheUse = DEFAULT_USE,
) -> Manifest:
    """Builds ``out`` from some layers of ``artifact``, such as ``7`` or ``4-7``.

    ``dummy`` is the seed of random weights, for an artifact of programs only.

    Raises:
        Ling3Error: There is no such target, cell or layer, or nothing could be built; ``out`` is then as before.
    """
    manifest = read_trusted(artifact, report.note)
    whole, plan = config_of(manifest), plan_for(manifest, target_of(manifest, target)[0], cell)
    first, count = layer_range(layers, whole)
    if not manifest.has_weights and dummy is None:
        raise ArtifactError(f"{artifact.name}: the artifact has no weights", "take random ones: --dummy-weights 1")
    dtype, forms = manifest.plan.dtype, manifest.plan.forms
    weights: StoredWeights | DummyWeights
    if manifest.has_weights:
        weights = StoredWeights(Store(artifact, manifest.weights.index), whole, forms)
    else:
        weights = DummyWeights(whole, dummy or 0)
    chosen = manifest.vectors.sequences or sequences(whole, plan.context, 0)
    streams = inputs_of(whole, weights, chosen, first)
    config = sliced(whole, first, count, len(streams))
    rows = np.resize(streams, (config.vocab_size, whole.hidden_size))  # repeated: every token is an input
    source = Slice(config, weights, first, rows)
    cells = opened(cache, report.note)
    plans = announced([plan], report)
    with staged(out, force=force) as folder:
        body = _described(manifest, artifact, config, plan, layers)
        with compiling(config, options_of(manifest, Options()), plans, folder, cells, report) as compiled:
            stored = write_weights(folder, source, dtype, report, forms)
            vectors = _vectors(folder, config, stored, manifest, chosen)
            body = structs.replace(body, weights=stored, vectors=vectors)
            outcomes = compiled()
        return complete(folder, body, outcomes, report, cells)


def _described(manifest: Manifest, artifact: Path, config: Config, plan: Plan, layers: str) -> Manifest:
    """The manifest without targets, weights and vectors."""
    record = structs.replace(manifest.plan, paddings=plan.paddings, decode_paddings=plan.decode_paddings)
    digests = {"manifest.json": schema.SourceFile(sha256=manifest.sha256)}
    return Manifest(
        producer={name: manifest.producer[name] for name in ("ling3export", "python")},
        source=schema.SourceRecord(f"layers {layers} of {artifact.resolve().name}", digests),
        config=config.semantic() | {"eos_token_id": config.eos_token_ids},
        plan=record,
        targets={},
        weights=schema.WeightsRecord({}, {}),
        vectors=schema.Vectors("none: there are no weights", 0, schema.MarginsRecord(), ()),
        tokenizer=(),
        notes=(),
    )


def _vectors(
    folder: Path, config: Config, stored: schema.WeightsRecord, manifest: Manifest, whole: tuple[SequenceRecord, ...]
) -> schema.Vectors:
    """The sequences of the whole artifact, whose tokens are now rows of the embedding, and their logits."""
    reference = stored_reference(folder, stored, config, manifest.plan)
    chosen, start = [], 0
    for number, sequence in enumerate(whole):
        ids = tuple(range(start, start + len(sequence.ids)))
        chosen.append(SequenceRecord(ids, sequence.prompt, sequence.positions, f"logits.{number}"))
        start += len(ids)
    logits = reference.logits_many([vector.ids for vector in chosen], [vector.positions for vector in chosen])
    return put_vectors(folder, tuple(chosen), logits, reference, manifest.vectors.seed, "the inputs of the layers")
