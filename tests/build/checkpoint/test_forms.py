"""Quantized checkpoints are dequantized exactly, or refused with an error that names the problem."""

import json
import re
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ling3export.checkpoint.convert import convert
from ling3export.checkpoint.forms import FP8, INT4
from ling3export.checkpoint.reader import Checkpoint, expected_tensors
from ling3export.checkpoint.synth import synthesize
from ling3export.checkpoint.synth_weights import whole
from ling3export.cli import main as cli
from ling3export.foundation.errors import CheckpointError, ConfigError
from tests.support import refusals
from tests.support.quantized import Plain, dequantized
from tests.support.shards import edit, put

KDA_Q = "model.layers.0.attention.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.0.gate_proj.weight"


def fraction_of(code: int, exponent: int, digits: int) -> Fraction:
    """The number of a floating-point code, by its definition."""
    sign, power, low = code >> exponent + digits, code >> digits & (1 << exponent) - 1, code & (1 << digits) - 1
    whole = Fraction(low + (1 << digits if power else 0))
    number = whole * Fraction(2) ** (max(power, 1) - (1 << exponent - 1) + 1 - digits)
    return -number if sign else number


@pytest.mark.parametrize("scale", [0, 1, 2, 3, 60, 127, 246, 247, 254])
def test_every_e4m3_times_e8m0_is_exact_in_bfloat16_or_has_no_entry(scale: int):
    """Includes subnormal bf16 numbers: scale bytes 3 to 246 are exact for every code, others for some codes."""
    numbers = {code: fraction_of(code, 4, 3) * Fraction(2) ** (scale - 127) for code in range(256) if code & 127 != 127}
    held = {number: bits for bits in range(1 << 16) if (number := finite(bits)) is not None}
    for code, number in numbers.items():
        found = int(FP8.table[scale, code])
        assert fraction_of(found, 8, 7) == number if number in held else found == 0x7FC0, (scale, code)
    missing = sum(number not in held for number in numbers.values())
    assert (missing == 0) == (3 <= scale <= 246)
    assert {int(FP8.table[scale, code]) for code in (127, 255)} == {0x7FC0}
    assert set(FP8.table[255].tolist()) == {0x7FC0}


def finite(bits: int) -> Fraction | None:
    return None if bits & 0x7F80 == 0x7F80 else fraction_of(bits, 8, 7)


def test_every_int4_times_its_scale_is_exact_in_float32_or_has_no_entry():
    found = INT4.table.view(np.float32)
    for bits in [0, 1, 0x7F, 0x80, 0x81, 0x3F80, 0xBF81, 0x7EFF, 0x7F00, 0x7F7F, 0x7F80, 0x7FC0]:
        for code in range(16):
            number = None if finite(bits) is None else finite(bits) * (code - 8)
            if number is None or abs(number) >= Fraction(2) ** 128:
                assert INT4.table[bits, code] == 0x7FC00000
            else:
                assert Fraction(float(found[bits, code])) == number


def test_weight_scale_inv_multiplies_whatever_its_name_says():
    codes, scales = np.array([[0x38, 0xC0]], np.uint8), np.array([[129]], np.uint8)  # 1, -2; 4
    assert FP8.decoded(codes, scales).view(ml_dtypes.bfloat16).tolist() == [[4, -8]]


def test_codes_that_are_no_numbers_are_those_of_the_published_type():
    ours = np.isnan(FP8.table[127].view(ml_dtypes.bfloat16).astype(np.float32))
    theirs = np.isnan(np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_array_equal(ours, theirs)


# Blocks of 128, whole and cut at both edges; the layers are KDA with a dense MLP, and MLA with experts.
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("small", {"num_experts": 16, "moe_intermediate_size": 160, "num_nextn_predict_layers": 0}),
    "int4": ("micro", {}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each form."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for form, (preset, overrides) in MADE.items():
        synthesize(folder / form, preset, 0, layers=2, form=form, overrides={"layer_group_size": 2} | overrides)
    return {form: folder / form for form in MADE}


@pytest.fixture(params=[*MADE])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_weight_is_the_number_that_an_independent_reader_finds(made: dict[str, Path], form: str):
    checkpoint, plain = Checkpoint.open(made[form]), dequantized(made[form])
    for name in expected_tensors(checkpoint.config):
        found = checkpoint.tensor(name)
        np.testing.assert_array_equal(found.astype(np.float64), plain[name].astype(np.float64), err_msg=name)
        its = "bfloat16" if form == "fp8" else "float32"
        assert found.dtype == (its if name in checkpoint.forms else plain[name].dtype)
        assert np.signbit(found[plain[name] == 0]).tolist() == np.signbit(plain[name][plain[name] == 0]).tolist()
    assert {*checkpoint.forms.values()} == {form} == {checkpoint.form}


def test_weights_are_quantized_as_the_public_checkpoints_have_them(made: dict[str, Path]):
    """The weights differ from the bf16 checkpoint of the same seed by no more than the form's rounding."""
    of = {form: Checkpoint.open(folder) for form, folder in made.items()}
    layers = {name.removeprefix("model.layers.") for name in of["fp8"].forms}
    kda = {f"0.attention.{each}_proj.weight" for each in "qkvfgo"}
    mlp = {f"{at}.{each}_proj.weight" for at in ("0.mlp", "1.mlp.shared_experts") for each in ("gate", "up", "down")}
    experts = {f"1.mlp.experts.{n}.{each}_proj.weight" for n in range(16) for each in ("gate", "up", "down")}
    assert layers == kda | mlp | experts | {"1.attention.dense.weight"}
    assert all(".mlp.experts." in name for name in of["int4"].forms)
    assert len(of["int4"].forms) == 3 * 16
    for form, bound in (("fp8", 0.04), ("int4", 0.11)):
        config, forms = of[form].config, of[form].forms
        for name, info in expected_tensors(config).items():
            exact = whole(name, info, config, 0, info.dtypes[0]).astype(np.float32)
            error = np.linalg.norm(of[form].tensor(name).astype(np.float32) - exact) / np.linalg.norm(exact)
            assert 0.01 < error < bound if name in forms else error == 0, name


def test_int4_is_given_as_it_is_stored(made: dict[str, Path]):
    checkpoint, plain = Checkpoint.open(made["int4"]), dequantized(made["int4"])
    for name in checkpoint.forms:
        q, scale = checkpoint.quantized(name)
        assert (q.dtype, scale.dtype) == (np.int8, ml_dtypes.bfloat16)
        assert q.shape == (scale.shape[0], 32 * scale.shape[1])
        assert -8 <= q.min() <= q.max() <= 7
        np.testing.assert_array_equal(q * np.repeat(scale.astype(np.float64), 32, axis=1), plain[name])
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(made["fp8"]).quantized(KDA_Q)
    assert str(error.value) == f"tensor `{KDA_Q}`: expected int4, found fp8"


def test_the_weights_of_an_artifact_are_those_of_the_dequantized_checkpoint(
    made: dict[str, Path], form: str, tmp_path: Path
):
    """bfloat16 from FP8, float32 from both: the digests of all tensors and TP shards are the same."""
    checkpoint, plain = Checkpoint.open(made[form]), dequantized(made[form])
    for name in checkpoint.forms:
        plain[name] = plain[name].astype(ml_dtypes.bfloat16 if form == "fp8" else np.float32)
    for dtype in ("bfloat16", "float32")[form == "int4" :]:
        ours, theirs = tmp_path / f"ours-{dtype}", tmp_path / f"theirs-{dtype}"
        assert convert(checkpoint, ours, dtype) == convert(Plain(checkpoint.config, plain), theirs, dtype)


def test_int4_is_rounded_to_bfloat16_only_where_that_is_allowed(made: dict[str, Path]):
    checkpoint = Checkpoint.open(made["int4"])
    with pytest.raises(CheckpointError) as error:
        checkpoint.check_rounding("bfloat16", allow=False)
    assert str(error.value) == (
        f"checkpoint `int4`: expected numbers that bfloat16 holds, found 48 weights in int4 (`{EXPERT}` and 47 more), "
        f"in {made['int4']}\n"
        "hint: build --weights as-stored or build --dtype float32 keep their numbers, --allow-rounding "
        "rounds them to bfloat16"
    )
    for weights in ("int4-experts", "int8", "int4", "int8-channel"):
        checkpoint.check_rounding("bfloat16", allow=False, weights=weights)
    checkpoint.check_rounding("bfloat16", allow=True)
    checkpoint.check_rounding("float32", allow=False)
    Checkpoint.open(made["fp8"]).check_rounding("bfloat16", allow=False)
    assert checkpoint.nbytes < Checkpoint.open(made["fp8"]).nbytes


def test_int4_needs_whole_groups(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"down_proj.weight_packed`: expected a multiple of 32 inputs in INT4"):
        synthesize(tmp_path / "out", "micro", 0, form="int4", overrides={"moe_intermediate_size": 48})


EMBEDDINGS = "model.word_embeddings.weight"
# Replacements of a tensor that belongs to a weight (None: removed), and the errors.
WRONG_TENSORS = [
    ("fp8", KDA_Q, "_scale_inv", None, f"hint: FP8 has its scales in `{KDA_Q}_scale_inv`"),
    ("fp8", KDA_Q, "_scale_inv", ("F32", [4, 2], 4), f"`{KDA_Q}_scale_inv`: expected dtype F8_E8M0, found F32"),
    ("fp8", KDA_Q, "_scale_inv", ("F8_E8M0", [8, 2], 1), "expected shape [4, 2], found [8, 2]"),
    ("fp8", KDA_Q, "", ("BF16", [512, 256], 2), f"`{KDA_Q}`: expected dtype F8_E4M3, found BF16"),
    ("fp8", KDA_Q, "_zero_point", ("F8_E8M0", [4, 2], 1), f"`{KDA_Q}_zero_point`: expected no such tensor"),
    ("fp8", EMBEDDINGS, "_scale_inv", ("F8_E8M0", [16, 2], 1), f"`{EMBEDDINGS}_scale_inv`: expected no such tensor"),
    ("int4", EXPERT, "_packed", None, f"`{EXPERT}`, BF16 [32, 64]: missing"),
    ("int4", EXPERT, "_packed", ("I32", [32, 16], 4), "expected shape [32, 8], found [32, 16]"),
    ("int4", EXPERT, "_scale", ("F32", [32, 2], 4), f"`{EXPERT}_scale`: expected dtype BF16, found F32"),
    ("int4", EXPERT, "_scale", ("BF16", [32, 1], 2), "expected shape [32, 2], found [32, 1]"),
    ("int4", EXPERT, "_shape", None, f"`{EXPERT}_shape`, I64 [2]: missing"),
    ("int4", EXPERT, "_zero_point", ("I32", [4, 2], 4), f"`{EXPERT}_zero_point`: expected no such tensor"),
    ("int4", EXPERT, "_g_idx", ("I32", [64], 4), f"`{EXPERT}_g_idx`: expected no such tensor"),
]


@pytest.fixture
def folder(made: dict[str, Path], form: str, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(made[form], tmp_path / form))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    return str(error.value)


@pytest.mark.parametrize(("form", "weight", "part", "tensor", "message"), WRONG_TENSORS, indirect=["form"])
def test_other_layouts_are_refused_by_name(
    folder: Path, form: str, weight: str, part: str, tensor: tuple[str, list[int], int] | None, message: str
):
    beside = weight + ("" if form == "fp8" else "_scale" if part != "_scale" else "_packed")
    if tensor is None:
        put(folder, beside, weight + part, None)
    else:
        dtype, shape, size = tensor
        put(folder, beside, weight + part, (dtype, shape, bytes(size * int(np.prod(shape)))))
    assert message in refusal(folder)


def change_bytes(folder: Path, name: str, at: int, data: bytes) -> None:
    """Overwrites the bytes of a tensor from ``at`` on."""

    def change(tensors: dict[str, Any]) -> None:
        dtype, shape, old = tensors[name]
        tensors[name] = dtype, shape, old[:at] + data + old[at + len(data) :]

    edit(folder, name, change)


WRONG_NUMBERS = [  # 512 x 256 numbers in FP8: byte 300 is row 1, column 44, under the first scale
    ([("", 300, 0x7F)], "the code 0x7f under the scale 0x.., at [1, 44]"),
    ([("_scale_inv", 1, 255)], "the code 0x.. under the scale 0xff, at [0, 128]"),
    ([("_scale_inv", 0, 2), ("", 300, 0x01)], "the code 0x.. under the scale 0x2, at ["),
    ([("_scale_inv", 0, 250), ("", 300, 0x7E)], "the code 0x.. under the scale 0xfa, at ["),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_NUMBERS)
@pytest.mark.parametrize("form", ["fp8"], indirect=True)
def test_values_that_bfloat16_cannot_represent_are_named(
    folder: Path, changes: list[tuple[str, int, int]], message: str
):
    for part, at, value in changes:
        change_bytes(folder, KDA_Q + part, at, bytes([value]))
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError) as error:
        checkpoint.tensor(KDA_Q)
    pattern = f"tensor `{KDA_Q}`: expected numbers that bfloat16 holds, found {message}"
    assert re.match(re.escape(pattern).replace(r"\.\.", "[0-9a-f]{1,2}"), str(error.value)), str(error.value)
    assert str(error.value).endswith(".safetensors")


@pytest.mark.parametrize("form", ["int4"], indirect=True)
def test_wrong_numbers_of_int4_are_named(folder: Path):
    change_bytes(folder, f"{EXPERT}_scale", 6, (0x7F80).to_bytes(2, "little"))
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=r"expected numbers that float32 holds, found the code .*, at \[1, 32\]"):
        checkpoint.tensor(EXPERT)
    with pytest.raises(
        CheckpointError, match=r"_scale`: expected finite scales, found the bits 0x7f80, at \[1, 1\], in"
    ) as error:
        checkpoint.quantized(EXPERT)
    assert error.value.message.endswith(".safetensors")
    change_bytes(folder, f"{EXPERT}_shape", 0, (33).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match=r"_shape`: expected \[32, 64\], found \[33, 64\], in .*\.safetensors"):
        Checkpoint.open(folder)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"] = fields["quantization_config"] | changes if changes else None
    path.write_text(json.dumps(fields))


DISAGREEING: list[tuple[str, dict[str, Any], str]] = [
    ("fp8", {}, f"tensor `{KDA_Q}`: expected bf16, as there is no quantization_config, found fp8"),
    ("int4", {}, f"tensor `{EXPERT}`: expected bf16, as there is no quantization_config, found int4"),
    (
        "fp8",  # no tensor has these names: a list like this once excluded nothing, and nobody noticed
        {"modules_to_not_convert": ["linear_attn.b_proj", "self_attn.kv_b_proj"]},
        "tensor `model.layers.0.attention.b_proj.weight`: expected fp8, as quantization_config says, found bf16",
    ),
    (
        "fp8",
        {"modules_to_not_convert": ["q_proj"]},
        f"tensor `{KDA_Q}`: expected bf16, as quantization_config says, found fp8",
    ),
    ("int4", {"ignore": ["experts.0.gate_proj"]}, f"tensor `{EXPERT}`: expected bf16"),
    (
        "int4",
        {"ignore": [r"re:.*\.experts\.[0-9]+\."]},
        f"tensor `{EXPERT}`: expected bf16, as quantization_config says",
    ),
]


@pytest.mark.parametrize(("form", "changes", "message"), DISAGREEING, indirect=["form"])
def test_a_config_that_disagrees_with_the_tensors_is_refused(folder: Path, changes: dict[str, Any], message: str):
    change_config(folder, **changes)
    assert message in refusal(folder)


@pytest.mark.parametrize("form", ["fp8"], indirect=True)
def test_lm_head_may_be_left_out_without_being_named(folder: Path):
    kept = json.loads((folder / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "lm_head" in kept
    change_config(folder, modules_to_not_convert=[each for each in kept if each != "lm_head"])
    assert "lm_head.weight" not in Checkpoint.open(folder).forms


def test_a_gguf_file_is_refused_with_what_to_take_instead(tmp_path: Path):
    file = tmp_path / "ling3-q4_k_m.gguf"
    file.write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    for path in (file, tmp_path):
        with pytest.raises(ConfigError, match=r"found GGUF \(ling3-q4_k_m.gguf\)\nhint: take the bf16, FP8 or INT4"):
            Checkpoint.open(path)
        for command in (["plan"], ["build"], ["build", "--no-weights"]):
            assert "found GGUF (ling3-q4_k_m.gguf)" in refusals.refusal(cli.main, *command, path)


def test_a_command_refuses_to_round_int4_before_it_compiles(made: dict[str, Path], tmp_path: Path):
    said = refusals.refusal(cli.main, "build", made["int4"], tmp_path / "x.ling3", "--weights", "bf16")
    assert "expected numbers that bfloat16 holds, found 48 weights in int4" in said
    assert [*tmp_path.iterdir()] == []
