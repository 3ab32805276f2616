"""The load plan: the checkpoint tensors of each stored tensor, and the steps from one to the other."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ling3export.artifacts.parameters import FORMS, PLAIN, Tensor
from ling3export.foundation.dtypes import BY_CODE
from ling3export.model.config import Config
from ling3export.model.parameters import Weight, mtp_tensors, weight_table

# The first step for a weight KEY, by its form in the checkpoint.
WIDENED = {
    "fp8": "widen float8_e4m3fn by KEY_scale_inv, a scale for each block of 128 by 128, to bfloat16",
    "int4": "widen int4, KEY_packed by KEY_scale, a scale for each group of 32 inputs, to float32",
}
DECODED = {"fp8": "bfloat16", "int4": "float32"}
TAKEN = "take int4 as it is stored: q of KEY_packed, its scale KEY_scale"


def load_plan(
    config: Config,
    dtype: str,
    weights: str = PLAIN,
    form: str | None = None,
    quantized: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """The use of every tensor of a checkpoint, as JSON.

    Args:
        dtype: ``bfloat16`` or ``float32``, of the artifact.
        weights: The artifact's forms, a key of ``artifacts/parameters.py``'s WEIGHTS.
        form: The checkpoint's quantized form, ``fp8`` or ``int4``; None if it has none.
        quantized: The number of tensors in that form, by parameter.

    Returns:
        ``stored``: for each tensor of the weight store its file, shape, dtype, shards (0: not split), the axis that is
        split, and ``from``: keys in the order in which they are read, their shape and dtypes, and the steps of the
        conversion. ``skipped``: keys that may exist and are not read, and why.
    """
    skipped = {"keys": list(mtp_tensors(config)), "why": "layers of multi-token prediction: no program uses them"}
    return {
        "stored": [
            _row(row, name, tensor, config, form, quantized.get(row.name, 0))
            for row in weight_table(config, weights)
            for name, tensor in row.tensors(dtype).items()
        ],
        "skipped": [skipped] if skipped["keys"] else [],
    }


def _row(row: Weight, name: str, tensor: Tensor, config: Config, form: str | None, quantized: int) -> dict[str, Any]:
    source, keys = row.source, row.keys
    forms = [form] if form and quantized else []
    forms += [BY_CODE[code].name for code in source.dtypes if quantized < len(keys)]
    return {
        "tensor": name,
        "file": f"weights/{row.stack}.safetensors",
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "shards": tensor.shards,
        "split": row.split,
        "from": {
            "keys": keys,
            "shape": list(source.shape),
            "dtypes": forms,
            "steps": _steps(row, name.removeprefix(row.name)[1:], tensor.dtype, config, forms),
        },
    }


def _steps(row: Weight, part: str, dtype: str, config: Config, forms: Sequence[str]) -> list[str]:
    source, steps = row.source, []
    for form in WIDENED.keys() & {*forms}:
        where = "" if len(forms) == 1 else f", where it is {form}"
        steps.append((TAKEN if form == row.form else WIDENED[form]) + where)
    if part and [row.form] != [*forms]:
        block = "output" if FORMS[row.form].group is None else f"group of {row.group} inputs"
        steps.append(f"round to {row.form}, a scale for each {block}: take {part}")
    if source.by_expert:
        steps.append(f"{source.groups} experts one after the other")
    elif source.groups > 1:
        steps.append(f"cut axis {1 if source.columns else 0} into {source.groups}")
    if source.rows:
        steps.append(f"take rows {source.rows[0]} to {source.rows[1]} of each part")
    if source.columns and not part:
        steps.append("transpose each part")
    if len(source.names) > 1:
        steps.append(f"put the {len(source.names)} tensors' parts side by side")
    if row.split is not None:
        steps.append(f"put {source.groups // config.tp_shards} of {source.groups} parts into each shard")
    if row.layers:
        steps.append(f"stack {len(row.layers)} layers along axis {row.stack_axis}")
    if not part and any(DECODED.get(form, form) != dtype for form in forms):
        steps.append(f"convert to {dtype}")
    return steps
