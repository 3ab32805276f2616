"""A complete artifact of a toy model, made in seconds, for tests of loading and running rather than numerics.

The toy sums a sequence's tokens in its state; the logits are row ``sum % 320`` of a table that two devices share.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from msgspec import structs
from safetensors.numpy import save_file

from ling3export.artifacts import schema
from ling3export.artifacts.manifest import file_record, write_manifest
from ling3export.artifacts.parameters import Parameter, Tensor
from ling3export.artifacts.schema import Manifest
from ling3export.artifacts.store import StoreWriter
from ling3export.compile import lower
from ling3export.model import program as steps
from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.model.inputs import batch_fields, packed_size, unpack
from ling3export.model.state import StateArray
from ling3export.runners.engine.engine import Engine
from tests.support.artifacts_fixture import Artifacts, digest_of, kept_folder, sources_of, versions
from tests.support.short_chats import write_short
from tests.support.tiny import tiny_fields

VOCAB, EOS, TP = 320, 316, 2
SLOTS, PAGES, PAGE, CONTEXT = 3, 10, 16, 64
TARGET = "cpu-tp2"
GEOMETRY = Geometry(TP, "float32", SLOTS, PAGES, PAGE, CONTEXT // PAGE, 1)
CELLS = {"prefill@16": ("prefill", 16), "decode@2": ("decode", 2), "decode@4": ("decode", 4)}
CELLS |= {f"{phase}@{rows}": (phase, rows) for phase in ("sample", "logits_processor") for rows in (1, 2, 4)}
STATE = tuple(StateArray(name, (SLOTS + 1,), "int32", ("slots",), None) for name in ("last_token", "seen"))
P = PartitionSpec
PROMPTS = [[1, 2, 3], [5] * 20, [7] * 40, [300], [100, 200, 4]]


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)).astype(np.float32)


TABLE = table()


def logits(tokens: Sequence[int]) -> np.ndarray:
    """fp32 ``[320]`` after these tokens, from the table of seed 0."""
    return TABLE[sum(tokens) % VOCAB]


def answer(prompt: Sequence[int], count: int, seed: int = 0) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and the logits from which they are taken, computed by numpy."""
    rows, total, tokens = table(seed), sum(prompt), []
    logits = []
    for _ in range(count):
        logits.append(rows[total % VOCAB])
        tokens.append(int(np.argmax(logits[-1])))
        total += tokens[-1]
    return tokens, np.stack(logits)


def check_tokens(engine: Engine) -> None:
    """Checks that an engine gives the right answers to PROMPTS."""
    completions = engine.generate(PROMPTS, max_tokens=12, ignore_eos=True, logits=True)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens, logits = answer(prompt, 12)
        assert completion.token_ids == tokens
        assert (completion.logits == logits).all()


def build_step(config: Any, geometry: Geometry, phase: str, padding: int, mesh: Any) -> steps.StepProgram:
    """The toy's program of one cell; replaces the model's."""
    if phase in ("sample", "logits_processor"):
        return steps.build_step(config, geometry, phase, padding, mesh)
    fields = batch_fields(phase, padding, geometry.max_pages)
    packed = jax.ShapeDtypeStruct((packed_size(fields),), jnp.int32)

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
    return steps.StepProgram(steps.sharded(body, mesh, specs, out_specs), values, specs, out_specs, fields)


def build_toy(folder: Path, *, seed: int = 0) -> Manifest:
    """Writes the artifact into ``folder``, which must not exist; returns its manifest."""
    programs, mesh = folder / "programs" / TARGET, lower.device_mesh(TP)
    programs.mkdir(parents=True)
    cells, needs = {}, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "build_step", build_step)
        for name, (phase, padding) in CELLS.items():
            lowered = lower.lower_cell(Config.from_dict(tiny_fields(vocab_size=VOCAB)), GEOMETRY, phase, padding, "cpu")
            raw, compiled, _ = lower.compile_cell(lowered, mesh)
            needs = compiled.executable
            (programs / f"{name}.stablehlo").write_bytes(lowered.blob)
            (programs / f"{name}.exec").write_bytes(raw)
            stablehlo, executable = (
                file_record(folder, f"programs/{TARGET}/{name}.{tier}") for tier in ("stablehlo", "exec")
            )
            program = structs.asdict(lowered.program(compiled))
            cells[name] = schema.Cell(**program, status="compiled", stablehlo=stablehlo, exec=executable)
    (programs / schema.STATE).write_bytes(lower.compile_state(STATE, mesh))
    state_program = file_record(folder, f"programs/{TARGET}/{schema.STATE}")
    file, shape = "weights/toy.safetensors", (TP, VOCAB, VOCAB // TP)
    with StoreWriter(folder, {file: {"toy.table": Tensor(shape, "float32", TP)}}) as writer:
        for shard, part in enumerate(np.split(table(seed), TP, axis=1)):
            writer.write("toy.table", part, shard=shard)
        weights = schema.WeightsRecord({file: 0}, writer.finish())
    weights.files[file] = (folder / file).stat().st_size
    (folder / "vectors").mkdir()
    (token, _), logits = answer([1, 2], 2, seed)
    save_file({"logits.0": logits}, folder / "vectors" / "expected.safetensors")
    vectors = schema.Vectors(
        "the table",
        0,
        schema.MarginsRecord(),
        (schema.SequenceRecord((1, 2, token), 2, (1, 2), "logits.0"),),
        file_record(folder, "vectors/expected.safetensors"),
    )
    (folder / "tokenizer").mkdir()
    write_short(folder / "tokenizer", EOS)
    records = tuple(file_record(folder, f"tokenizer/{name}") for name in ("tokenizer.json", "tokenizer_config.json"))
    assert needs is not None
    manifest = Manifest(
        producer={"ling3export": "0"},
        source=schema.SourceRecord("toy", {}),
        config={"vocab_size": VOCAB, "eos_token_id": (EOS,)},
        plan=schema.PlanRecord((16,), (2, 4), SLOTS, PAGE, CONTEXT, "float32", 0.6, 1 << 30),
        targets={TARGET: _target(cells, needs, state_program)},
        weights=weights,
        vectors=vectors,
        tokenizer=records,
        notes=(),
    )
    return write_manifest(folder, manifest)


def shared() -> Path:
    """An artifact that all tests share and that is kept between runs; tests must not change it."""
    made_of = [sources_of("ling3export.compile.lower"), digest_of({"toy": Path(__file__)}), versions()]
    return Artifacts(kept_folder()).kept("toy.ling3", made_of, build_toy)


def _target(cells: dict[str, schema.Cell], needs: schema.Executable, state_program: schema.FileRecord) -> schema.Target:
    arrays = tuple(schema.StateArrayRecord(row.name, row.shape, row.dtype, row.spec, row.axes) for row in STATE)
    return schema.Target(
        platform="cpu",
        mesh=needs.mesh,
        requires=needs.requires,
        toolchain={},
        fingerprint="0" * 64,
        state_abi="0" * 64,
        geometry=asdict(GEOMETRY),
        parameters=(Parameter("toy.table", "toy.table", (TP, VOCAB, VOCAB // TP), "float32", "vocab"),),
        state=schema.State("replicated", SLOTS, PAGES, PAGE, CONTEXT // PAGE, CHUNK, arrays),
        cells=cells,
        state_program=state_program,
        portable="1.18.0",
    )
