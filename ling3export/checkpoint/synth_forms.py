"""Quantized forms of synthetic checkpoints: the same weights in the same forms as in the public ones."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ling3export.checkpoint.forms import FP8, INT4, SHAPE, Form
from ling3export.model.config import Config

FORMS = {"bf16": None, "fp8": FP8, "int4": INT4}
LARGEST_E4M3, STEPS = 448.0, 7.5  # the code of a block's largest number; INT4's step is a fifteenth of its range

# Modules of the FP8 checkpoint that are not quantized, besides those of MLA layers.
_KEPT = "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj b_proj mlp.gate eh_proj lm_head".split()
_EXPERTS = r"re:.*\.mlp\.experts\.[0-9]+\..*"


def form_of(name: str, form: Form | None, config: Config) -> Form | None:
    """The form of a weight in a checkpoint of ``form``; None if the weight is not quantized."""
    routed = ".mlp.experts." in name
    if form is not FP8 or routed:
        return form if routed else None
    layer, module = name.removesuffix(".weight").split(".")[2:3], name.split(".")[-2]
    kda = ".attention." in name and int(layer[0]) in config.layers("kda")
    linear = module[1:] == "_proj" and module[0] in "qkvfgo" if kda else module == "dense"
    return FP8 if linear or (".mlp." in name and module in ("gate_proj", "up_proj", "down_proj")) else None


def quantization_config(form: Form, config: Config) -> dict[str, Any]:
    """The fields of config.json for a checkpoint of ``form``."""
    if form is FP8:
        last = config.num_hidden_layers + config.num_nextn_predict_layers
        others = [i for i in range(last) if i not in config.layers("kda")]
        kept = _KEPT + [f"{i}.attention.{module}" for i in others for module in ("g_proj", "q_proj")]
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": list(FP8.block),
            "activation_scheme": "dynamic",
            "modules_to_not_convert": kept,
        }
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": INT4.block[1]}
    group = {"weights": weights, "targets": [_EXPERTS], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def quantized(form: Form, name: str, values: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """The tensors that a weight ``[out, in]`` is stored as, by name, after rounding it to the form.

    FP8: the scale is the least power of two under which the block fits. INT4: it is 2/15 of the group's largest number,
    rounded to bf16.
    """
    out, width = values.shape
    rows, columns = form.block
    starts = np.arange(0, out, rows), np.arange(0, width, columns)
    largest = np.maximum.reduceat(np.maximum.reduceat(np.abs(values), starts[0], axis=0), starts[1], axis=1)
    spread = np.ix_(np.arange(out) // rows, np.arange(width) // columns)
    if form is FP8:
        power = np.ceil(np.log2(np.maximum(largest / LARGEST_E4M3, 2.0**-120))).astype(np.int64)
        codes = np.ldexp(values, -power[spread]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return {name: codes, name + FP8.scales: (power + 127).astype(np.uint8)}
    scales = (largest / STEPS).astype(ml_dtypes.bfloat16)
    step = scales.astype(np.float32)[spread]
    steps = np.divide(values, step, out=np.zeros_like(values), where=step > 0)
    q = (np.clip(np.rint(steps), -8, 7) + 8).astype(np.uint8)
    words = (q[:, 0::2] | q[:, 1::2] << 4).view("<i4")
    return {name + INT4.codes: words, name + INT4.scales: scales, name + SHAPE: np.array(values.shape, "<i8")}
