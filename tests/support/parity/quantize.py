"""Quantizes a bf16 checkpoint with other projects' code: torch's FP8 types, or the package compressed-tensors.

quantize.py CHECKPOINT OUT FORM WEIGHT…

OUT gets the checkpoint with these weights in the form (fp8 or int4), the quantization_config that the package or
transformers writes, and `numbers.safetensors`: the stored tensors as torch or the package dequantizes them. In FP8, the
first weight has random codes and scales instead, drawn from all values that bf16 holds. Needs torch, transformers,
compressed-tensors, safetensors.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128


def fp8(name: str, weight: torch.Tensor, first: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = (torch.arange(size) // BLOCK for size in weight.shape)
    shape = (int(rows[-1]) + 1, int(columns[-1]) + 1)
    if first:
        random = torch.Generator().manual_seed(0)
        codes = torch.randint(0, 127, weight.shape, generator=random) + 128 * torch.randint(0, 2, weight.shape)
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn)
        scale = torch.randint(3, 247, shape, generator=random).to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        padded = torch.zeros(shape[0] * BLOCK, shape[1] * BLOCK)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        largest = padded.abs().reshape(shape[0], BLOCK, shape[1], BLOCK).amax((1, 3))
        scale = torch.exp2(torch.ceil(torch.log2(largest / 448))).to(torch.float8_e8m0fnu)
        values = (weight.float() / scale.float()[rows][:, columns]).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scale}, values.double() * scale.double()[rows][:, columns]


def int4(name: str, weight: torch.Tensor, first: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = _scheme()
    groups = weight.reshape(len(weight), -1, 32).float()
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    given = {"weight": weight, "weight_scale": scale.to(torch.bfloat16)}
    packed = PackedQuantizationCompressor.compress(given, scheme)
    exact = PackedQuantizationCompressor.decompress(packed | {"weight_scale": packed["weight_scale"].float()}, scheme)
    at = name.removesuffix("weight")
    return {at + part: tensor for part, tensor in packed.items()}, exact["weight"].double()


def _scheme() -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def config(form: str, others: list[str]) -> dict[str, Any]:
    """The quantization_config that the packages write; ``others`` are the modules that are not quantized."""
    if form == "fp8":
        from transformers import FineGrainedFP8Config

        said = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), modules_to_not_convert=others, scale_fmt="ue8m0")
        return dict(said.to_dict())
    from compressed_tensors.quantization import QuantizationConfig

    kinds = {"format": "pack-quantized", "quantization_status": "compressed"}
    return dict(QuantizationConfig(config_groups={"group_0": _scheme()}, ignore=others, **kinds).to_dict())


def main(folder: Path, out: Path, form: str, names: list[str]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    others = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight") and name not in names]
    numbers = {}
    for name in names:
        parts, numbers[name] = {"fp8": fp8, "int4": int4}[form](name, tensors.pop(name), name == names[0])
        tensors |= parts
    out.mkdir()
    for path in folder.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, out)
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = config(form, others)
    (out / "config.json").write_text(json.dumps(fields, default=lambda value: value.value))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    save_file(numbers, out / "numbers.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
