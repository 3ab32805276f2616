"""The table of parameters: every weight the programs take, its shape, dtype and split.

Layers of one kind are stacked, so a program has some forty weight arguments whatever its depth, and a loop over layers
slices what it needs. A split parameter has a leading axis of slabs (``Config.slabs``): a device at tensor parallelism
TP owns ``slabs / TP`` neighbouring slabs, one contiguous range of the store.

Matrices are kept ``[..., out, in]`` where the output is split and ``[..., in, out]`` where the input is split, so that
merging slabs is a reshape at every TP. On CPU the first form is also the faster one (docs/log.md, 2026-11-21).

Axis letters: s slabs, n stacked layers, h heads of one slab.
"""

from dataclasses import dataclass

from ling3export.model.config import Config
from ling3export.model.geometry import Geometry


@dataclass(frozen=True)
class Parameter:
    """One stacked weight.

    Attributes:
        name: ``stack.name``, the checkpoint's module name where one exists.
        shape: The whole shape, ``[slabs, ...]`` when split.
        dtype: ``"model"`` (the artifact's dtype) or ``"float32"`` (an fp32 island of MODEL.md).
        split: The logical axis that is cut over devices, or None for a replicated parameter.
        layers: For each row of the stack axis, the layer it belongs to; empty when the parameter is not stacked.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: str | None
    layers: tuple[int, ...]

    @property
    def stack(self) -> str:
        """The part of the name before the first dot: embeddings, kda, mla, dense, moe or layers."""
        return self.name.split(".", 1)[0]


def _attention(config: Config) -> list[Parameter]:
    s, dim, heads = config.slabs, config.hidden_size, config.num_attention_heads
    h = heads // s
    kda, mla = config.kda_layers, config.mla_layers
    key = config.head_dim
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    rank, q_rank = config.kv_lora_rank, config.q_lora_rank
    n, m = len(kda), len(mla)
    rows = [
        # q, k, v, decay and output gate of one head side by side: one matmul a layer.
        Parameter("kda.qkvfg_proj", (s, n, h, 5, key, dim), "model", "heads", kda),
        Parameter("kda.b_proj", (s, n, h, dim), "model", "heads", kda),
        Parameter("kda.conv1d", (s, n, h, 3, key, config.short_conv_kernel_size), "model", "heads", kda),
        Parameter("kda.A_log", (s, n, h), "float32", "heads", kda),
        Parameter("kda.dt_bias", (s, n, h, key), "float32", "heads", kda),
        Parameter("kda.o_norm", (n, key), "model", None, kda),
        Parameter("kda.o_proj", (s, n, h * key, dim), "model", "heads", kda),
        Parameter("mla.kv_a_proj_with_mqa", (m, rank + rope, dim), "model", None, mla),
        Parameter("mla.kv_a_layernorm", (m, rank), "model", None, mla),
        Parameter("mla.w_uk", (s, m, h, nope, rank), "model", "heads", mla),
        Parameter("mla.w_uv", (s, m, h, value, rank), "model", "heads", mla),
        Parameter("mla.g_proj", (s, m, h, dim), "model", "heads", mla),
        Parameter("mla.dense", (s, m, h * value, dim), "model", "heads", mla),
    ]
    if q_rank is None:
        rows.append(Parameter("mla.q_proj", (s, m, h, nope + rope, dim), "model", "heads", mla))
    else:
        rows += [
            Parameter("mla.q_a_proj", (m, q_rank, dim), "model", None, mla),
            Parameter("mla.q_a_layernorm", (m, q_rank), "model", None, mla),
            Parameter("mla.q_b_proj", (s, m, h, nope + rope, q_rank), "model", "heads", mla),
        ]
    return rows if kda else [row for row in rows if row.stack != "kda"]


def _mlp(config: Config) -> list[Parameter]:
    s, dim = config.slabs, config.hidden_size
    dense, moe = config.dense_layers, config.moe_layers
    width, expert, shared = config.intermediate_size, config.moe_intermediate_size, config.shared_intermediate_size
    n, m, experts = len(dense), len(moe), config.num_experts
    rows = []
    if dense:
        rows += [
            Parameter("dense.gate_up_proj", (s, n, 2, width // s, dim), "model", "width", dense),
            Parameter("dense.down_proj", (s, n, width // s, dim), "model", "width", dense),
        ]
    if moe:
        rows += [
            Parameter("moe.gate", (m, experts, dim), "float32", None, moe),
            Parameter("moe.expert_bias", (m, experts), "float32", None, moe),
            Parameter("moe.experts_gate_up_proj", (s, m, experts // s, 2, expert, dim), "model", "experts", moe),
            Parameter("moe.experts_down_proj", (s, m, experts // s, dim, expert), "model", "experts", moe),
            Parameter("moe.shared_gate_up_proj", (s, m, 2, shared // s, dim), "model", "width", moe),
            Parameter("moe.shared_down_proj", (s, m, shared // s, dim), "model", "width", moe),
        ]
    return rows


def parameters(config: Config) -> list[Parameter]:
    """Every parameter of the model, in a fixed order (sorted by name)."""
    s, dim, every = config.slabs, config.hidden_size, tuple(range(config.num_hidden_layers))
    rows = [
        Parameter("embeddings.word_embeddings", (s, config.vocab_size // s, dim), "model", "vocab", ()),
        Parameter("embeddings.lm_head", (s, config.vocab_size // s, dim), "model", "vocab", ()),
        Parameter("embeddings.norm", (dim,), "model", None, ()),
        Parameter("layers.input_layernorm", (len(every), dim), "model", None, every),
        Parameter("layers.post_attention_layernorm", (len(every), dim), "model", None, every),
        *_attention(config),
        *_mlp(config),
    ]
    return sorted(rows, key=lambda row: row.name)


# What XLA:TPU would copy out of its stack in each step where layers are unrolled (docs/log.md).
LAYERED = ("moe.experts_gate_up_proj", "moe.experts_down_proj", "kda.qkvfg_proj")


@dataclass(frozen=True)
class Argument:
    """One weight argument of a program: a parameter, or one layer of it.

    Attributes:
        parameter: The row of the table.
        layer: Index along the stack axis; None for the whole stack.
        whole: Every device takes all slabs of a parameter that has some.
    """

    parameter: Parameter
    layer: int | None = None
    whole: bool = False

    @property
    def split(self) -> str | None:
        """The logical axis that is cut over the devices of this target, or None."""
        return None if self.whole else self.parameter.split

    @property
    def path(self) -> tuple[str, ...]:
        """Keys in the parameter tree; layers are written so that they sort."""
        stack, _, attribute = self.parameter.name.partition(".")
        return (stack, attribute) if self.layer is None else (stack, attribute, f"{self.layer:03}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's, without the stack axis where it is one layer's."""
        shape, axis = self.parameter.shape, self.stack_axis
        return shape if self.layer is None else (*shape[:axis], *shape[axis + 1 :])

    @property
    def stack_axis(self) -> int:
        """Where the parameter's layers are stacked."""
        return 0 if self.parameter.split is None else 1


def arguments(config: Config, geometry: Geometry) -> list[Argument]:
    """The weight arguments of a target's programs, in flattening order."""
    rows = []
    for row in parameters(config):
        if geometry.layered_weights and row.name in LAYERED:
            rows += [Argument(row, index) for index in range(len(row.layers))]
        else:
            rows.append(Argument(row, whole=row.stack == "mla" and geometry.placement == "by_sequence"))
    return rows
