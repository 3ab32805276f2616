"""The phases: for each one record of its programs' inputs and outputs, and of the sizes that they are built for.

The model binds a function to each record (``model/program.py``). The plan, the check of manifests and the runner read
the records. They lie in this room because the model imports no other room.

A program is ``(params, state, batch) -> (state, out)``. All ``fields`` of a call travel in one int32 vector,
``batch["packed"]``, floats bit-cast. The state is donated. artifacts/FORMAT.md says what the arrays mean.

An array is written ``dtype axis axis``. An axis is a number or a word (see :meth:`ArraySpec.shape`). The axis
``vocab/tp`` is split over the devices; ``padding/striped`` is split only where each device has latent pages of its own.
A word after ``if`` is a condition: the array exists only where the word has a size.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

FLOATS = ("temperature", "top_p", "min_p")  # fields that are float32; the others are int32

Family = Literal["logits", "on logits", "state", "split"]
Sizes = Literal["prefill", "score", "decode", "rows", "slots", "pages", "pairs"]
Feature = Literal["score", "snapshots", "split"]
Part = Literal["layers", "routed", "head"]

ROUTED = ("moe.experts_gate_up_proj", "moe.experts_down_proj")
HEAD = ("embeddings.norm", "embeddings.lm_head")
TABLE = "embeddings.word_embeddings"  # read a row a token, multiplied by nothing
EVERY_PART: tuple[Part, ...] = ("layers", "routed", "head")
PAGED = "mla_latent"
SLOTTED = ("kda_conv", "kda_recurrent")
EVERY_ARRAY = ("*",)


@dataclass(frozen=True)
class ArraySpec:
    """An array of a call.

    Attributes:
        dtype: numpy's name, or a word that geometry decides: ``model``, ``token`` (what experts multiply), ``sent``
            (what travels to them).
        axes: Numbers and words.
        split: For each axis the condition under which it is split over devices: ``tp`` (always), ``striped`` or "".
        condition: The array exists only where this word has a size; "" for always.
    """

    dtype: str
    axes: tuple[int | str, ...]
    split: tuple[str, ...]
    condition: str = ""

    @classmethod
    def parsed(cls, text: str) -> "ArraySpec":
        """The record of ``float32 padding vocab/tp if int8``."""
        text, _, condition = text.partition(" if ")
        dtype, *axes = text.split()
        words = [axis.partition("/") for axis in axes]
        return cls(
            dtype,
            tuple(int(word) if word.isdecimal() else word for word, _, _ in words),
            tuple(split for _, _, split in words),
            condition,
        )

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The whole shape.

        Args:
            sizes: ``padding``; ``chunks`` of 16 padded tokens; ``max_pages`` of a sequence; ``vocab``, ``hidden``,
                ``chosen`` (experts a token), ``experts`` (of all layers together); ``ARRAY.AXIS`` of a state array …
        """
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)

    def spec(self, *, striped: bool) -> tuple[str | None, ...]:
        """The mesh axis of each leading axis, without trailing None."""
        over = ["tp" if split == "tp" or (split and striped) else None for split in self.split]
        while over and over[-1] is None:
            over.pop()
        return tuple(over)

    def exists(self, sizes: Mapping[str, int]) -> bool:
        """Whether a target with these sizes has the array."""
        return not self.condition or self.condition in sizes


@dataclass(frozen=True, kw_only=True)
class PhaseSpec:
    """The programs of one phase.

    Attributes:
        name: ``decode``.
        family: Phases that do one thing together. ``logits``: from tokens to logits that are sampled. ``on logits``:
            they take such logits. ``state``: they move one sequence's state and compute nothing. ``split``: a decode
            step cut at each layer's experts.
        sizes: The unit of its paddings: tokens at the plan's ``prefill`` or ``score`` paddings; sequences at its
            ``decode`` paddings; ``rows`` of logits, as many as programs of the family ``logits`` give; pairs of
            ``slots``; ``pages``; ``pairs`` of a token and an expert.
        needs: Options of a build; without one of them it is not built.
        fields: The packed fields, int32 or float32, in packing order.
        batch: Inputs next to the packed vector.
        out: Outputs next to the state.
        params: Parts of the parameters that it takes.
        state: State arrays that it takes and returns: names, or EVERY_ARRAY.
        kernels: Whether its executables for cpu call native kernels.
    """

    name: str
    family: Family
    sizes: Sizes
    needs: tuple[Feature, ...] = ()
    fields: Mapping[str, ArraySpec] = field(default_factory=dict)
    batch: Mapping[str, ArraySpec] = field(default_factory=dict)
    out: Mapping[str, ArraySpec] = field(default_factory=dict)
    params: tuple[Part, ...] = ()
    state: tuple[str, ...] = ()
    kernels: bool = False

    @property
    def chunked(self) -> bool:
        """Whether its padding counts tokens of chunks."""
        return self.sizes in ("prefill", "score")

    def takes_parameter(self, name: str) -> bool:
        """Whether it takes a parameter, by its name: ``moe.router``."""
        return part_of(name) in self.params

    def takes_state(self, name: str) -> bool:
        return self.state == EVERY_ARRAY or name in self.state


def part_of(parameter: str) -> Part:
    """Which part of the parameters one is, by its name; what follows the second dot does not count."""
    name = ".".join(parameter.split(".")[:2])
    return "routed" if name in ROUTED else "head" if name in HEAD else "layers"


def _fields(text: str) -> dict[str, ArraySpec]:
    """``slot, page_table[padding max_pages]``; without brackets ``[padding]``."""
    return {
        name: ArraySpec.parsed(f"{'float32' if name in FLOATS else 'int32'} {axes or 'padding'}")
        for name, axes in re.findall(r"(\w+)(?:\[([^]]*)\])?", text)
    }


def _arrays(**arrays: str) -> dict[str, ArraySpec]:
    return {name: ArraySpec.parsed(text) for name, text in arrays.items()}


_PREFILL = (
    "tokens, chunk_slot[chunks], chunk_start[chunks], chunk_len[chunks], fresh[chunks], page_table[chunks max_pages]"
)
_DECODE = "slot, position, page_table[padding max_pages], token"
_CHUNK_LOGITS = "float32 chunks vocab/tp"
_ROW_LOGITS = "float32 padding vocab/tp"
_HIDDEN = "float32 padding hidden"
_ROUTING = {"expert_ids": "int32 padding chosen", "weights": "float32 padding chosen"}
_SEQUENCE = {
    "kda_conv": "model kda_conv.layers kda_conv.heads/tp kda_conv.taps if kda_conv.layers",
    "kda_recurrent": "float32 kda_recurrent.layers kda_recurrent.heads/tp kda_recurrent.key kda_recurrent.value"
    " if kda_recurrent.layers",
    "mla_latent": "model mla_latent.layers padding/striped mla_latent.page latent",
}

_RECORDS = (
    PhaseSpec(
        name="prefill", family="logits", sizes="prefill", kernels=True, params=EVERY_PART, state=EVERY_ARRAY,
        fields=_fields(_PREFILL),
        out=_arrays(logits=_CHUNK_LOGITS),
    ),
    PhaseSpec(
        name="score", family="logits", sizes="score", needs=("score",), kernels=True, params=EVERY_PART,
        state=EVERY_ARRAY,
        fields=_fields(f"{_PREFILL}, next_token"),
        out=_arrays(
            logits=_CHUNK_LOGITS, logprob="float32 padding", best="int32 padding", best_logprob="float32 padding"
        ),
    ),
    PhaseSpec(
        name="decode", family="logits", sizes="decode", kernels=True, params=EVERY_PART, state=EVERY_ARRAY,
        fields=_fields(_DECODE),
        out=_arrays(logits=_ROW_LOGITS),
    ),
    PhaseSpec(
        name="sample", family="on logits", sizes="rows", kernels=True, state=("last_token",),
        fields=_fields("slot, position, temperature, top_k, top_p, min_p, seed"),
        batch=_arrays(logits=_ROW_LOGITS),
        out=_arrays(token="int32 padding", logprob="float32 padding"),
    ),
    PhaseSpec(
        name="logits_processor", family="on logits", sizes="rows",
        fields=_fields("edited, masked, top"),
        batch=_arrays(
            logits=_ROW_LOGITS, edits="int32 3 padding edits", mask="int32 padding mask_words", token="int32 padding"
        ),
        out=_arrays(
            logits=_ROW_LOGITS, logprob="float32 padding",
            top_token="int32 padding top", top_logprob="float32 padding top",
        ),
    ),
    PhaseSpec(
        name="copy", family="state", sizes="slots", needs=("snapshots",), state=SLOTTED,
        fields=_fields("source, target"),
    ),
    PhaseSpec(
        name="offload", family="state", sizes="pages", needs=("snapshots",), state=(*SLOTTED, PAGED),
        fields=_fields("slot[1], page"),
        out=_arrays(**_SEQUENCE),
    ),
    PhaseSpec(
        name="onload", family="state", sizes="pages", needs=("snapshots",), state=(*SLOTTED, PAGED),
        fields=_fields("slot[1], page"),
        batch=_arrays(**_SEQUENCE),
    ),
    PhaseSpec(
        name="attend", family="split", sizes="decode", needs=("split",), params=("layers",), state=EVERY_ARRAY,
        fields=_fields(f"{_DECODE}, layer[1]"),
        batch=_arrays(hidden=_HIDDEN),
        out=_arrays(residual=_HIDDEN, tokens="sent padding sent", **_ROUTING),
    ),
    PhaseSpec(
        name="combine", family="split", sizes="decode", needs=("split",),
        batch=_arrays(residual=_HIDDEN, results="model padding chosen hidden", **_ROUTING),
        out=_arrays(hidden=_HIDDEN),
    ),
    PhaseSpec(
        name="head", family="split", sizes="decode", needs=("split",), params=("head",),
        batch=_arrays(hidden=_HIDDEN),
        out=_arrays(logits=_ROW_LOGITS),
    ),
    PhaseSpec(
        name="dispatch", family="split", sizes="pairs", needs=("split",),
        fields=_fields("expert_ids, layer_ids, out_num[1]"),
        batch=_arrays(token_data="sent padding sent"),
        out=_arrays(
            y="token padding hidden", group_list="int32 experts 2", gather_idx="int32 padding",
            actual_token_num="int32 1", dropped="int32 1", dynamic_scale="float32 padding if int8",
        ),
    ),
    PhaseSpec(
        name="experts", family="split", sizes="pairs", needs=("split",), params=("routed",),
        batch=_arrays(
            y="token padding hidden", group_list="int32 experts 2", dynamic_scale="float32 padding if int8"
        ),
        out=_arrays(results="model padding hidden"),
    ),
)  # fmt: skip

PHASES: Mapping[str, PhaseSpec] = MappingProxyType({record.name: record for record in _RECORDS})


def _family(name: Family) -> tuple[str, ...]:
    return tuple(record.name for record in _RECORDS if record.family == name)


GIVERS = _family("logits")
ON_LOGITS = _family("on logits")
MOVING = _family("state")
SPLIT = _family("split")
