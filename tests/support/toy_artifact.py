"""A whole artifact around a toy model, made in seconds: for tests of loading and running, not of the numerics.

The toy sums the tokens of a sequence in its state; the logits are row ``sum % 320`` of a table cut over two devices.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from artifacts_fixture import Artifacts, digest_of, kept_folder, sources_of, versions
from ling3export.artifacts.manifest import file_record, sha256_of, write_manifest
from ling3export.artifacts.store import StoreWriter, TensorSpec
from ling3export.checkpoint.synth_tokenizer import write_tokenizer
from ling3export.compile import lower
from ling3export.model import program as steps
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.model.inputs import batch_fields, packed_size, unpack
from ling3export.runners.engine.engine import Engine

VOCAB, EOS, TP = 320, 316, 2
SLOTS, PAGES, PAGE, CONTEXT = 3, 10, 16, 64
TARGET = "cpu-tp2"
GEOMETRY = Geometry(TP, "float32", SLOTS, PAGES, PAGE, CONTEXT // PAGE, 1)
CELLS = {"prefill@16": ("prefill", 16), "decode@2": ("decode", 2), "decode@4": ("decode", 4)}
CELLS |= {f"sample@{rows}": ("sample", rows) for rows in (1, 2, 4)}
P = PartitionSpec
PROMPTS = [[1, 2, 3], [5] * 20, [7] * 40, [300], [100, 200, 4]]


def table(seed: int = 0) -> np.ndarray:
    """fp32 ``[320, 320]``."""
    return np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)).astype(np.float32)


def answer(prompt: Sequence[int], count: int, seed: int = 0) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and the logits that they are taken from, by numpy."""
    rows, total, tokens = table(seed), sum(prompt), []
    logits = []
    for _ in range(count):
        logits.append(rows[total % VOCAB])
        tokens.append(int(np.argmax(logits[-1])))
        total += tokens[-1]
    return tokens, np.stack(logits)


def check_tokens(engine: Engine) -> None:
    """An engine on it answers PROMPTS as it has to."""
    completions = engine.generate(PROMPTS, max_tokens=12, ignore_eos=True, logits=True)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens, logits = answer(prompt, 12)
        assert completion.token_ids == tokens
        assert (completion.logits == logits).all()


def build_step(config: Any, geometry: Geometry, phase: str, padding: int, mesh: Any) -> steps.Step:
    """The toy's program of one cell, in place of the model's."""
    fields = batch_fields(phase, padding, geometry.max_pages)
    packed = jax.ShapeDtypeStruct((packed_size(fields),), jnp.int32)
    if phase == "sample":
        return steps._sample_step(config, geometry, padding, mesh, fields, packed)

    def body(params, state, batch):
        f = unpack(batch["packed"], fields)
        if phase == "prefill":
            slot, valid = f["chunk_slot"], jnp.arange(CHUNK) < f["chunk_len"][:, None]
            new = jnp.sum(jnp.where(valid, f["tokens"].reshape(-1, CHUNK), 0), axis=1)
            old = jnp.where(f["fresh"] != 0, 0, state["seen"][slot])
        else:
            slot, old = f["slot"], state["seen"][f["slot"]]
            new = jnp.where(f["token"] < 0, state["last_token"][slot], f["token"])
        seen = old + new
        state = {**state, "seen": state["seen"].at[slot].set(seen)}
        return state, {"logits": params["toy"]["table"][0][seen % VOCAB]}

    state = {"last_token": jax.ShapeDtypeStruct((SLOTS + 1,), jnp.int32)}
    state["seen"] = state["last_token"]
    values = (
        {"toy": {"table": jax.ShapeDtypeStruct((TP, VOCAB, VOCAB // TP), jnp.float32)}},
        state,
        {"packed": packed},
    )
    specs = ({"toy": {"table": P("tp")}}, {"last_token": P(), "seen": P()}, {"packed": P()})
    out_specs = (specs[1], {"logits": P(None, "tp")})
    return steps.Step(steps._sharded(body, mesh, specs, out_specs), values, specs, out_specs, fields)


def build_toy(folder: Path, *, seed: int = 0, tokenizer: bool = True) -> dict[str, Any]:
    """Writes the artifact into ``folder``, which must not exist; returns its manifest."""
    programs, target = folder / "programs" / TARGET, lower.device_mesh(TP)
    programs.mkdir(parents=True)
    cells = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "build_step", build_step)
        for name, (phase, padding) in CELLS.items():
            lowered = lower.lower_cell(SimpleNamespace(vocab_size=VOCAB), GEOMETRY, phase, padding, "cpu")
            raw, record = lower.compile_cell(lowered, target)
            (programs / f"{name}.stablehlo").write_bytes(lowered.blob)
            (programs / f"{name}.exec").write_bytes(raw)
            files = {tier: file_record(folder, f"programs/{TARGET}/{name}.{tier}") for tier in ("stablehlo", "exec")}
            cells[name] = {"status": "compiled", **files, **lowered.record, **record}
    (folder / "weights").mkdir()
    with StoreWriter(
        folder / "weights", {"toy.safetensors": [TensorSpec("toy.table", (TP, VOCAB, VOCAB // TP), "F32", TP)]}
    ) as writer:
        for slab, part in enumerate(np.split(table(seed), TP, axis=1)):
            writer.write("toy.table", part, slab=slab)
        index = writer.finish()
    records = []
    if tokenizer:
        (folder / "tokenizer").mkdir()
        write_tokenizer(folder / "tokenizer", EOS)
        records = [file_record(folder, f"tokenizer/{name}") for name in ("tokenizer.json", "tokenizer_config.json")]
    return write_manifest(folder, _body(cells, index, records))


def shared() -> Path:
    """An artifact for every test, kept between runs; nobody may change it."""
    made_of = [sources_of("ling3export.compile.lower"), digest_of({"toy": Path(__file__)}), versions()]
    return Artifacts(kept_folder()).kept("toy.ling3", made_of, build_toy)


def _body(cells: dict[str, Any], index: dict[str, Any], tokenizer: list[dict[str, Any]]) -> dict[str, Any]:
    arrays = [{"name": name, "shape": [SLOTS + 1], "dtype": "int32", "axes": ["slots"], "spec": []}
              for name in ("last_token", "seen")]  # fmt: skip
    target = {
        "target": "cpu", "platform": "cpu", "tp": TP, "processes": 1,
        "mesh": {"axis": "tp", "devices": list(range(TP))},
        "requires": cells["prefill@16"]["call"]["requires"],
        "parameters": [{"argument": "toy.table", "tensor": "toy.table", "shape": [TP, VOCAB, VOCAB // TP],
                        "dtype": "float32", "spec": ["tp"]}],
        "state": {"placement": "replicated", "slots": SLOTS, "pages": PAGES, "page_size": PAGE,
                  "max_pages": CONTEXT // PAGE, "chunk": CHUNK, "arrays": arrays},
        "cells": cells,
    }  # fmt: skip
    return {
        "producer": {}, "source": {}, "config": {"vocab_size": VOCAB, "eos_token_id": [EOS]},
        "plan": {"context": CONTEXT, "dtype": "float32"}, "targets": {TARGET: target},
        "weights": {"files": {}, "index": index, "digest": sha256_of(index), "bytes": 0},
        "vectors": {}, "tokenizer": tokenizer, "notes": [],
    }  # fmt: skip
