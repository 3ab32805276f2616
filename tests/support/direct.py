"""Runs the steps under plain jit, without an artifact, a store or a runner, for tests of the numerics only.

The tests assign slots, pages and chunks themselves, so that they can cut and pack calls freely.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from ling3export.checkpoint.convert import pieces
from ling3export.foundation.dtypes import BY_NAME
from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, CHUNK, Form, Geometry
from ling3export.model.inputs import packed_size
from ling3export.model.parameters import parameters, weight_table
from ling3export.model.program import StepProgram, build_step, put, state_tree
from ling3export.runners.engine.inputs import Span, decode_fields, prefill_fields


def assemble(
    config: Config, read: Callable[[str], np.ndarray], dtype: str, geometry: Geometry | None = None
) -> dict[str, dict[str, np.ndarray]]:
    """All parameters in memory, made by the functions that also write the store."""
    whole: dict[str, np.ndarray] = {}
    table = weight_table(config) if geometry is None else weight_table(config, geometry.weights)
    for row in table:
        flat: dict[tuple[str, int | None], list[np.ndarray]] = {}
        for layer in row.layers or (None,):
            for shard, parts in pieces(row, layer, config, read):
                for (name, tensor), part in zip(row.tensors(dtype).items(), parts, strict=True):
                    values = np.ascontiguousarray(part).astype(BY_NAME[tensor.dtype].numpy)
                    flat.setdefault((name, shard), []).append(values.reshape(-1))
        keys = [None] if row.split is None else list(range(config.tp_shards))
        for name, tensor in row.tensors(dtype).items():
            values = np.concatenate([part for key in keys for part in flat[name, key]])
            whole[name] = values.reshape(tensor.shape)
    tree: dict[str, dict[str, np.ndarray]] = {}
    if geometry is None:
        for name, value in whole.items():
            put(tree, tuple(name.split(".")), value)
    for parameter in () if geometry is None else parameters(config, geometry):
        put(tree, parameter.path, np.ascontiguousarray(parameter.of(whole[parameter.tensor])))
    return tree


def pack(fields: Any, **values: Any) -> np.ndarray:
    """Packs named fields at the manifest's offsets; fields that are not given are zero."""
    packed = np.zeros(packed_size(fields), np.int32)
    for field in fields:
        if field.name in values:
            value = np.asarray(values[field.name], field.dtype).reshape(-1).view(np.int32)
            packed[field.offset : field.offset + field.size] = value
    return packed


class Direct:
    """One model, its state and its compiled steps."""

    def __init__(
        self,
        config: Config,
        read: Callable[[str], np.ndarray],
        *,
        tp: int = 1,
        dtype: str = "float32",
        slots: int = 4,
        page_size: int = 32,
        max_pages: int = 32,
        form: Form = "loops",
        weights: str = "bf16",
        activations: str = "bf16",
    ) -> None:
        self.config = config
        self.geometry = Geometry(
            tp=tp,
            dtype=dtype,
            slots=slots,
            pages=slots * max_pages,
            page_size=page_size,
            max_pages=max_pages,
            latent_row=config.latent_dim,
            form=form,
            weights=weights,
            activations=activations,
        )
        self.mesh = Mesh(np.array(jax.devices()[:tp]), (AXIS,), axis_types=(AxisType.Auto,))
        self.steps: dict[tuple[str, int], tuple[StepProgram, Any]] = {}
        specs = self.step("decode", 1)[0].specs[0]
        self.params = self._put(assemble(config, read, dtype, self.geometry), specs)
        self.reset()

    def _put(self, tree: Any, specs: Any) -> Any:
        return jax.tree.map(lambda value, spec: jax.device_put(value, NamedSharding(self.mesh, spec)), tree, specs)

    def reset(self) -> None:
        """Makes new pools filled with ones: results must not depend on old contents of a slot or page."""
        values, specs = state_tree(self.config, self.geometry)
        self.state = self._put(jax.tree.map(lambda v: np.ones(v.shape, v.dtype), values), specs)

    def step(self, phase: str, padding: int) -> tuple[StepProgram, Any]:
        if (phase, padding) not in self.steps:
            step = build_step(self.config, self.geometry, phase, padding, self.mesh)
            self.steps[phase, padding] = step, jax.jit(step.call, donate_argnums=(1,))
        return self.steps[phase, padding]

    @property
    def tables(self) -> np.ndarray:
        """Block table of each slot, with pages in a shuffled order; slot 0 has no pages."""
        shape = self.geometry.slots, self.geometry.max_pages
        tables = np.arange(1, shape[0] * shape[1] + 1, dtype=np.int32).reshape(shape)[:, ::-1]
        return np.concatenate([np.zeros((1, shape[1]), np.int32), tables])

    def call(self, phase: str, padding: int, spans: Sequence[Span]) -> dict[str, np.ndarray]:
        """Runs one call of prefill or score. Adds ``ends``: the row of ``logits`` of each span."""
        step, call = self.step(phase, padding)
        fields = prefill_fields(padding, spans, CHUNK, self.tables, score=phase == "score")
        inside = np.arange(CHUNK) < fields["chunk_len"][:, None]
        fields["tokens"] = np.where(inside.reshape(-1), fields["tokens"], self.config.vocab_size - 1)
        self.state, out = call(self.params, self.state, {"packed": pack(step.fields, **fields)})
        ends = np.cumsum([-(-len(span.tokens) // CHUNK) for span in spans]) - 1
        return {name: np.asarray(value) for name, value in out.items()} | {"ends": ends}

    def prefill(self, padding: int, parts: Sequence[tuple[int, int, Sequence[int]]]) -> dict[int, np.ndarray]:
        """Runs one call.

        ``parts`` are (slot, start position, tokens). Returns the logits of each part's last token by slot.
        """
        out = self.call("prefill", padding, [Span(*part) for part in parts])
        return {slot: out["logits"][row] for (slot, _, _), row in zip(parts, out["ends"], strict=True)}

    def decode(self, padding: int, rows: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """Runs one step. ``rows`` are (slot, position, token)."""
        step, call = self.step("decode", padding)
        slots, positions, tokens = zip(*rows, strict=True)
        packed = pack(step.fields, **decode_fields(padding, slots, positions, self.tables, tokens))
        self.state, out = call(self.params, self.state, {"packed": packed})
        return list(np.asarray(out["logits"])[: len(rows)])

    def sequence(self, padding: int, ids: Sequence[int], *, cut: int | None = None, slot: int = 1) -> np.ndarray:
        """Logits after the last of ``ids``, prefilled in calls of at most ``cut`` tokens (default: the padding)."""
        size = cut or padding
        for at in range(0, len(ids), size):
            logits = self.prefill(padding, [(slot, at, ids[at : at + size])])[slot]
        return logits


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance, the largest over positions."""
    found, expected = np.atleast_2d(found).astype(np.float64), np.atleast_2d(expected).astype(np.float64)
    return float(np.max(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))


def agreed(tokens: Sequence[int], expected: np.ndarray, tolerance: float) -> int:
    """Number of tokens compared with the reference's best ones, up to the first near-tie that rounding may flip."""
    for step, (token, logits) in enumerate(zip(tokens, expected, strict=True)):
        second, first = np.sort(logits)[-2:]
        if first - second < tolerance * np.linalg.norm(logits):
            return step
        assert token == np.argmax(logits), step
    return len(tokens)
