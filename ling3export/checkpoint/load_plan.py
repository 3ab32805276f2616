"""The load plan: from which checkpoint tensors each stored tensor is made, and how."""

from typing import Any

from ling3export.foundation.dtypes import BY_CODE
from ling3export.model.config import Config
from ling3export.model.parameters import EXPERT, PLAIN, Parameter, Tensor, mtp_tensors, parameters


def load_plan(config: Config, dtype: str, weights: str = PLAIN) -> dict[str, Any]:
    """What becomes of every tensor of a checkpoint, as JSON.

    Args:
        config: The checkpoint's configuration.
        dtype: ``bfloat16`` or ``float32``, of the artifact.
        weights: In which forms it has them, a key of ``model/parameters.py``'s WEIGHTS.

    Returns:
        ``stored``, for each tensor of the weight store its file, shape, dtype, shards (0: not split) and the axis that
        is split, and where it comes ``from``: keys in the order in which they are read, their shape and dtypes, and
        the steps of the conversion. ``skipped``, keys that may be there and are not read, and why.
    """
    skipped = {"keys": list(mtp_tensors(config)), "why": "layers of multi-token prediction: no program uses them"}
    return {
        "stored": [_row(row, tensor, config) for row in parameters(config, weights) for tensor in row.tensors(dtype)],
        "skipped": [skipped] if skipped["keys"] else [],
    }


def _row(row: Parameter, tensor: Tensor, config: Config) -> dict[str, Any]:
    source = row.source
    keys = []
    for layer in row.layers or (None,):
        at = "" if layer is None else f"model.layers.{layer}."
        numbers = range(source.groups) if source.by_expert else [0]
        keys += [at + name.replace(EXPERT, str(number)) for number in numbers for name in source.names]
    return {
        "tensor": tensor.name,
        "file": f"weights/{row.stack}.safetensors",
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "shards": config.tp_shards if row.split else 0,
        "split": row.split,
        "from": {
            "keys": keys,
            "shape": list(source.shape),
            "dtypes": [BY_CODE[each].name for each in source.dtypes],
            "steps": _steps(row, tensor, config),
        },
    }


def _steps(row: Parameter, tensor: Tensor, config: Config) -> list[str]:
    source, steps = row.source, []
    if tensor.part:
        each = "output" if row.form == "int8-channel" else f"group of {row.group} inputs"
        steps.append(f"round to {row.form}, a scale for each {each}: take {tensor.part}")
    if source.by_expert:
        steps.append(f"{source.groups} experts one after the other")
    elif source.groups > 1:
        steps.append(f"cut axis {1 if source.columns else 0} into {source.groups}")
    if source.rows:
        steps.append(f"take rows {source.rows[0]} to {source.rows[1]} of each part")
    if source.columns and not tensor.part:
        steps.append("transpose each part")
    if len(source.names) > 1:
        steps.append(f"put the {len(source.names)} tensors' parts side by side")
    if row.split is not None:
        steps.append(f"put {source.groups // config.tp_shards} of {source.groups} parts into each shard")
    if row.layers:
        steps.append(f"stack {len(row.layers)} layers along axis {row.stack_axis}")
    if not tensor.part and any(BY_CODE[each].name != tensor.dtype for each in source.dtypes):
        steps.append(f"convert to {tensor.dtype}")
    return steps
