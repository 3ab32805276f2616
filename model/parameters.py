"""The table of parameters: which checkpoint tensors each weight is made from, how it is stored, and what programs take.

A row goes the whole way. Its :class:`Source` names the tensors of the published checkpoint, their shapes and dtypes;
the checkpoint's reader, the writer of synthetic checkpoints and the conversion go by it. From the row follow the
tensors of the store and the parameters of programs (artifacts/parameters.py); from these follow abstract values,
shardings and the manifest.

Layers of one kind are stacked in the store. A program for cpu takes whole stacks, so it has some thirty weight
arguments whatever its depth, and a loop over layers slices what it needs. Programs for accelerators take matrices by
layer. A split parameter has a leading axis of TP shards (``Config.tp_shards``): a device at tensor parallelism TP owns
``tp_shards / TP`` neighbouring ones, one contiguous range of the store.

Matrices are kept ``[..., out, in]`` where the output is split and ``[..., in, out]`` where the input is split, so that
merging TP shards is a reshape at every TP. On CPU the first form is also the faster one (docs/log/kernels-cpu.md).

A matrix may be quantized (docs/decisions/0015-quantized-weights.md): two tensors, ``q`` and ``scale``, each an argument
of its own. It always lies ``[..., out, in]``, because groups of values that share a scale run along the input.

Axis letters: s TP shards, n stacked layers, h heads of one TP shard.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from ling3export.artifacts.parameters import FORMS, PLAIN, WEIGHTS, Parameter, Tensor
from ling3export.foundation.errors import PlanError
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry

Shape = tuple[int, ...]

BF16, F32 = ("BF16",), ("F32",)
ROUTER = ("F32", "BF16")  # the public release stores the router's weight in bf16
EXPERT = "{expert}"  # stands in a tensor's name for the number of an expert

# The weights that may be quantized. Not MLA's w_uk, which is contracted over its outputs, too, nor what is small.
MATRICES = frozenset(
    "embeddings.word_embeddings embeddings.lm_head kda.qkvfg_proj kda.o_proj mla.q_proj mla.q_a_proj mla.q_b_proj "
    "mla.kv_a_proj_with_mqa mla.dense dense.gate_up_proj dense.down_proj moe.experts_gate_up_proj "
    "moe.experts_down_proj moe.shared_gate_up_proj moe.shared_down_proj".split()
)
SMALLEST_GROUP = 8  # where an input is no multiple of a form's group: below, the scales would take what q saves


@dataclass(frozen=True)
class Source:
    """The checkpoint tensors of one layer of a parameter, and how a layer of the store is cut from them.

    Every tensor is cut into ``groups`` equal parts along its output axis. The parts lie group after group, within a
    group in the order of ``names``, and every TP shard takes as many neighbouring groups as any other.
    """

    # Published names, below ``model.layers.N.`` for a stacked parameter; torch's order, ``[out, in]``.
    names: tuple[str, ...]
    shape: Shape  # the shape of each of them
    # Heads, experts or TP shards. With experts each group is a tensor of its own, whose name has its number.
    groups: int = 1
    columns: bool = False  # the input axis is cut instead, and every part transposed to ``[in, out]``
    rows: tuple[int, int] | None = None  # which rows of each part are taken, ``(start, stop)``; None for all
    # Names of the stored dtype in safetensors; the first one is what a synthetic checkpoint gets.
    dtypes: tuple[str, ...] = BF16

    @property
    def by_expert(self) -> bool:
        """Whether each group is a checkpoint tensor of its own."""
        return EXPERT in self.names[0]


@dataclass(frozen=True)
class Weight:
    """One stacked weight, as the store holds it."""

    name: str  # ``stack.name``, the checkpoint's module name where one exists
    shape: Shape  # the whole shape, ``[tp_shards, ...]`` when split
    split: str | None  # the logical axis that is cut over devices, or None for a replicated parameter
    # For each row of the stack axis, the layer it belongs to; empty when the parameter is not stacked.
    layers: tuple[int, ...]
    source: Source  # where it comes from. Only fp32 islands of docs/model.md may be fp32 there
    form: str = PLAIN  # or a key of FORMS: a matrix ``[..., out, in]`` of q and scale

    @property
    def stack(self) -> str:
        """The part of the name before the first dot: embeddings, kda, mla, dense, moe or layers."""
        return self.name.split(".", 1)[0]

    @property
    def keys(self) -> list[str]:
        """The checkpoint tensors that it is made from, in the order in which they are read."""
        numbers = range(self.source.groups) if self.source.by_expert else [0]
        names = [name.replace(EXPERT, str(number)) for number in numbers for name in self.source.names]
        return [f"model.layers.{layer}.{name}" for layer in self.layers for name in names] if self.layers else names

    @property
    def stack_axis(self) -> int:
        """Where the layers are stacked."""
        return 0 if self.split is None else 1

    def stored_dtype(self, dtype: str) -> str:
        """``bfloat16`` or ``float32``: what the store of an artifact of ``dtype`` holds."""
        return "float32" if "F32" in self.source.dtypes else dtype

    @property
    def group(self) -> int:
        """How many values share a scale: the form's group, or a divisor of an input that is no multiple of it."""
        return math.gcd(self.source.shape[-1], FORMS[self.form].group or 0)

    def tensors(self, dtype: str) -> dict[str, Tensor]:
        """The tensors in the store of an artifact of ``dtype`` by name: the weight itself, or ``q`` and ``scale``.

        A TP shard whose input cuts through groups has a scale for each part of one, the same for all parts.
        """
        shards = 0 if self.split is None else self.shape[0]
        if self.form == PLAIN:
            return {self.name: Tensor(self.shape, self.stored_dtype(dtype), shards)}
        form, (*out, width) = FORMS[self.form], self.shape
        groups = () if form.group is None else (width // math.gcd(width, self.group),)
        return {
            f"{self.name}.q": Tensor((*out, width * form.bits // 8), form.q, shards),
            f"{self.name}.scale": Tensor((*out, *groups), form.scale, shards),
        }

    def nbytes(self, dtype: str) -> int:
        """Bytes of all of it in the store of an artifact of ``dtype``."""
        return sum(tensor.nbytes for tensor in self.tensors(dtype).values())

    def quantized(self, form: str) -> "Weight":
        """This matrix in another form.

        Raises:
            PlanError: Its input does not divide into groups.
        """
        *outer, first, last = self.shape
        row = replace(self, form=form, shape=(*outer, last, first) if self.source.columns else self.shape)
        inputs, group = self.source.shape[-1], FORMS[form].group
        if group is not None and row.group < SMALLEST_GROUP:
            raise PlanError(
                f"--weights: expected inputs of {self.name} that divide into groups of {group}, found {inputs} = "
                f"{inputs // group} * {group} + {inputs % group}, whose common divisor with {group} is {row.group}",
                f"less than {SMALLEST_GROUP} values a scale save nothing: build it with --weights bf16 or int8-channel",
            )
        return row


def _kda(c: Config, layers: tuple[int, ...]) -> list[Weight]:
    s, heads, key, dim, taps = c.tp_shards, c.num_attention_heads, c.head_dim, c.hidden_size, c.short_conv_kernel_size
    n, h, width = len(layers), heads // s, heads * key
    wide = Source(tuple(f"attention.{letter}_proj.weight" for letter in "qkvfg"), (width, dim), heads)
    conv = Source(tuple(f"attention.{letter}_conv1d.weight" for letter in "qkv"), (width, 1, taps), heads)
    a_log, dt_bias = (
        Source((f"attention.{name}",), shape, s, dtypes=F32)
        for name, shape in (("A_log", (heads,)), ("dt_bias", (width,)))
    )
    return [
        # q, k, v, decay and output gate of one head side by side: one matmul a layer.
        Weight("kda.qkvfg_proj", (s, n, h, 5, key, dim), "heads", layers, wide),
        Weight("kda.conv1d", (s, n, h, 3, key, taps), "heads", layers, conv),
        Weight("kda.b_proj", (s, n, h, dim), "heads", layers, _attention("b_proj", (heads, dim), s)),
        Weight("kda.A_log", (s, n, h), "heads", layers, a_log),
        Weight("kda.dt_bias", (s, n, h, key), "heads", layers, dt_bias),
        Weight("kda.o_norm", (n, key), None, layers, _attention("o_norm", (key,))),
        Weight(
            "kda.o_proj", (s, n, h * key, dim), "heads", layers, _attention("o_proj", (dim, width), s, columns=True)
        ),
    ]


def _mla(c: Config, layers: tuple[int, ...]) -> list[Weight]:
    s, heads, dim, rank, q_rank = c.tp_shards, c.num_attention_heads, c.hidden_size, c.kv_lora_rank, c.q_lora_rank
    n, h, nope, value, query = len(layers), heads // s, c.qk_nope_head_dim, c.v_head_dim, c.qk_head_dim
    # Rows of a head in one tensor: first what makes its keys, then what makes its values.
    up = _attention("kv_b_proj", (heads * (nope + value), rank), heads)
    if q_rank is None:
        rows = [
            Weight("mla.q_proj", (s, n, h, query, dim), "heads", layers, _attention("q_proj", (heads * query, dim), s))
        ]
    else:
        rows = [
            Weight("mla.q_a_proj", (n, q_rank, dim), None, layers, _attention("q_a_proj", (q_rank, dim))),
            Weight("mla.q_a_layernorm", (n, q_rank), None, layers, _attention("q_a_layernorm", (q_rank,))),
            Weight(
                "mla.q_b_proj",
                (s, n, h, query, q_rank),
                "heads",
                layers,
                _attention("q_b_proj", (heads * query, q_rank), s),
            ),
        ]
    return [
        *rows,
        Weight(
            "mla.kv_a_proj_with_mqa",
            (n, c.latent_dim, dim),
            None,
            layers,
            _attention("kv_a_proj_with_mqa", (c.latent_dim, dim)),
        ),
        Weight("mla.kv_a_layernorm", (n, rank), None, layers, _attention("kv_a_layernorm", (rank,))),
        Weight("mla.w_uk", (s, n, h, nope, rank), "heads", layers, replace(up, rows=(0, nope))),
        Weight("mla.w_uv", (s, n, h, value, rank), "heads", layers, replace(up, rows=(nope, nope + value))),
        Weight("mla.g_proj", (s, n, h, dim), "heads", layers, _attention("g_proj", (heads, dim), s)),
        Weight(
            "mla.dense",
            (s, n, h * value, dim),
            "heads",
            layers,
            _attention("dense", (dim, heads * value), s, columns=True),
        ),
    ]


def _dense(c: Config, layers: tuple[int, ...]) -> list[Weight]:
    s, dim, n, width = c.tp_shards, c.hidden_size, len(layers), c.intermediate_size
    gate_up, down = _gated("mlp", dim, width, s)
    return [
        Weight("dense.gate_up_proj", (s, n, 2, width // s, dim), "width", layers, gate_up),
        Weight("dense.down_proj", (s, n, width // s, dim), "width", layers, down),
    ]


def _moe(c: Config, layers: tuple[int, ...]) -> list[Weight]:
    s, dim, n, experts = c.tp_shards, c.hidden_size, len(layers), c.num_experts
    width, shared = c.moe_intermediate_size, c.shared_intermediate_size
    expert = f"mlp.experts.{EXPERT}."
    routed_up = Source((f"{expert}gate_proj.weight", f"{expert}up_proj.weight"), (width, dim), experts)
    routed_down = Source((f"{expert}down_proj.weight",), (dim, width), experts)
    shared_up, shared_down = _gated("mlp.shared_experts", dim, shared, s)
    router = Source(("mlp.gate.weight",), (experts, dim), dtypes=ROUTER)
    bias = Source(("mlp.gate.expert_bias",), (experts,), dtypes=F32)
    return [
        Weight("moe.gate", (n, experts, dim), None, layers, router),
        Weight("moe.expert_bias", (n, experts), None, layers, bias),
        Weight("moe.experts_gate_up_proj", (s, n, experts // s, 2, width, dim), "experts", layers, routed_up),
        Weight("moe.experts_down_proj", (s, n, experts // s, dim, width), "experts", layers, routed_down),
        Weight("moe.shared_gate_up_proj", (s, n, 2, shared // s, dim), "width", layers, shared_up),
        Weight("moe.shared_down_proj", (s, n, shared // s, dim), "width", layers, shared_down),
    ]


def _norms(c: Config, layers: tuple[int, ...]) -> list[Weight]:
    return [
        Weight(
            f"layers.{name}", (len(layers), c.hidden_size), None, layers, Source((f"{name}.weight",), (c.hidden_size,))
        )
        for name in ("input_layernorm", "post_attention_layernorm")
    ]


def _attention(name: str, shape: Shape, groups: int = 1, *, columns: bool = False) -> Source:
    return Source((f"attention.{name}.weight",), shape, groups, columns)


def _gated(module: str, dim: int, width: int, shards: int) -> tuple[Source, Source]:
    """Gate and up side by side in every TP shard; down, whose input is cut alike."""
    gate_up = Source((f"{module}.gate_proj.weight", f"{module}.up_proj.weight"), (width, dim), shards)
    return gate_up, Source((f"{module}.down_proj.weight",), (dim, width), shards, columns=True)


def _forward(config: Config) -> list[Weight]:
    """Every parameter, in the order in which a forward pass meets the kinds of them."""
    c, dim = config, config.hidden_size
    table = (c.tp_shards, c.vocab_size // c.tp_shards, dim)
    rows = Source(("model.word_embeddings.weight",), (c.vocab_size, dim), c.tp_shards)
    head = Source(("lm_head.weight",), (c.vocab_size, dim), c.tp_shards)
    stacked = [
        *_norms(c, tuple(range(c.num_hidden_layers))),
        *_kda(c, c.layers("kda")),
        *_mla(c, c.layers("mla")),
        *_dense(c, c.layers("dense")),
        *_moe(c, c.layers("moe")),
    ]
    return [
        Weight("embeddings.word_embeddings", table, "vocab", (), rows),
        *(row for row in stacked if row.layers),
        Weight("embeddings.norm", (dim,), None, (), Source(("model.norm.weight",), (dim,))),
        Weight("embeddings.lm_head", table, "vocab", (), head),
    ]


def weight_table(config: Config, weights: str = PLAIN) -> list[Weight]:
    """Every weight of the model in the forms of ``weights``, a key of WEIGHTS, in a fixed order (sorted by name).

    Raises:
        PlanError: A matrix cannot have its form.
    """
    forms, rows = WEIGHTS[weights], []
    for row in sorted(_forward(config), key=lambda row: row.name):
        form = {"experts": forms.experts, "vocab": forms.tables}.get(row.split or "", forms.others)
        rows.append(row if form == PLAIN or row.name not in MATRICES else row.quantized(form))
    return rows


class TensorInfo(NamedTuple):
    """A checkpoint tensor: its shape, and the safetensors dtypes it may have (the first is what we write)."""

    shape: Shape
    dtypes: tuple[str, ...] = BF16


def expected_tensors(config: Config) -> dict[str, TensorInfo]:
    """Every checkpoint tensor that the model needs, by its published name, in the order of a forward pass."""
    embedding, *stacked, norm, head = _forward(config)
    tensors = _tensors([embedding], "")
    for layer in range(config.num_hidden_layers):
        tensors |= _tensors([row for row in stacked if layer in row.layers], f"model.layers.{layer}.")
    return tensors | _tensors([norm, head], "")


def mtp_tensors(config: Config) -> dict[str, TensorInfo]:
    """The multi-token-prediction layers after the last layer, as published: MLA, MoE, and the merge of two inputs."""
    tensors: dict[str, TensorInfo] = {}
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        at, width = f"model.layers.{layer}.", config.hidden_size
        tensors[f"{at}eh_proj.weight"] = TensorInfo((width, 2 * width))
        for name in ("enorm", "hnorm", "final_layernorm"):
            tensors[f"{at}{name}.weight"] = TensorInfo((width,))
        own = (layer,)
        tensors |= _tensors([*_norms(config, own), *_mla(config, own), *_moe(config, own)], at)
    return tensors


_MTP_NAME = re.compile(
    r"model\.layers\.(0|[1-9][0-9]*)\."
    r"(attention|input_layernorm|post_attention_layernorm|mlp|eh_proj|enorm|hnorm|final_layernorm)\..+"
)


def is_mtp(name: str, config: Config) -> bool:
    """Whether a tensor belongs to a multi-token-prediction layer, which we skip."""
    match = _MTP_NAME.fullmatch(name)
    return match is not None and 0 <= int(match[1]) - config.num_hidden_layers < config.num_nextn_predict_layers


def _tensors(rows: list[Weight], at: str) -> dict[str, TensorInfo]:
    """The tensors of one layer's parameters, by name; all of an expert's together."""
    tensors: dict[str, TensorInfo] = {}
    routed = [row.source for row in rows if row.source.by_expert]
    for source in (row.source for row in rows):
        if not source.by_expert:
            tensors |= {at + name: TensorInfo(source.shape, source.dtypes) for name in source.names}
        elif source is routed[0]:
            tensors |= {
                at + name.replace(EXPERT, str(expert)): TensorInfo(expert_source.shape, expert_source.dtypes)
                for expert in range(source.groups)
                for expert_source in routed
                for name in expert_source.names
            }
    return tensors


# Arguments by layer in every form of the weights: XLA:TPU would copy the first three out of their stacks in each step
# where layers are unrolled (docs/log/programs-tpu.md). The others are never quantized.
LAYERED = ("moe.experts_gate_up_proj", "moe.experts_down_proj", "kda.qkvfg_proj", "moe.gate", "mla.w_uk", "mla.w_uv")


def is_by_layer(row: Weight, geometry: Geometry) -> bool:
    """Whether each layer of a weight is an argument of a target's programs, and not the stack of all.

    XLA:TPU brings a stack to its fast memory as a whole, or not at all. XLA:GPU copies each layer of a stack whose
    layers lie between those of other TP shards.
    """
    if not geometry.tiled or not row.layers:
        return False
    if row.name in LAYERED:
        return True
    # On one chip 8-bit matrices are worth it, too; on a slice a scale of its own would be laid out anew.
    alike = row.form == PLAIN or (row.form == "int8-channel" and geometry.tp == 1) or geometry.form == "card"
    return row.name in MATRICES and alike


def parameters(config: Config, geometry: Geometry) -> list[Parameter]:
    """The parameters of a target's programs, in flattening order."""
    rows = []
    for row in weight_table(config, geometry.weights):
        axis = row.stack_axis
        for layer in range(len(row.layers)) if is_by_layer(row, geometry) else (None,):
            for name, tensor in row.tensors(geometry.dtype).items():
                part, key = name.removeprefix(row.name), "" if layer is None else f".{layer:03}"  # so that names sort
                shape = tensor.shape if layer is None else (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
                rows.append(Parameter(f"{row.name}{key}{part}", name, shape, tensor.dtype, row.split, layer))
    return rows
