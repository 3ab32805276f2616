"""Programs with quantized weights, in every form, against the plain model with the dequantized weights."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from ling3export.artifacts.parameters import WEIGHTS
from ling3export.checkpoint.convert import WeightSource
from ling3export.checkpoint.reader import Checkpoint
from ling3export.foundation.errors import PlanError
from ling3export.model.parameters import LAYERED, parameters, weight_table
from ling3export.verify.dequantized import Dequantized
from ling3export.verify.reference import Reference
from tests.support.direct import relative
from tests.support.numerics import Case, Quick
from tests.support.tolerances import BFLOAT16_MEDIAN, FLOAT32, MARGIN

pytestmark = pytest.mark.jit

FORMS = [name for name in WEIGHTS if name != "bf16"]
LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized") / "checkpoint"


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return Case(folder, (LENGTH,), num_hidden_layers=2, layer_group_size=2)


@pytest.fixture(scope="module")
def source(case: Case, folder: Path) -> WeightSource:
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def expected(case: Case, source: WeightSource) -> dict[str, np.ndarray]:
    """The logits of every position, by the form of the weights."""
    found = {}
    for weights in FORMS:
        reference = Reference(case.config, Dequantized(source, weights).tensor)
        found[weights] = reference.logits(case.prompts[0])
        assert min(reference.margins) > MARGIN
    return found


def errors(case: Case, expected: np.ndarray, **options) -> list[float]:
    """Errors of a prompt that is prefilled to its middle and then decoded."""
    ids, direct = case.prompts[0], Quick(case.config, case.read, **options)
    middle = LENGTH // 2
    found = [relative(direct.sequence(16, ids[:middle]), expected[middle - 1])]
    for position in range(middle, LENGTH):
        found.append(relative(direct.decode(4, [(1, position, ids[position])])[0], expected[position]))
    return found


@pytest.mark.parametrize(
    ("weights", "tp"),
    [("int8", 1), ("int8", 4), ("int4", 4), ("int4-small", 1), ("int4-small", 4), ("int8-channel", 1)],
)
def test_programs_for_cpu_compute_with_what_the_weights_stand_for(case, expected, weights: str, tp: int):
    assert max(errors(case, expected[weights], weights=weights, tp=tp)) < FLOAT32


@pytest.mark.parametrize(
    ("weights", "form", "tp"),
    [
        ("int8-channel", "tiles", 4),
        ("int8-channel", "tiles", 1),
        ("int4", "tiles", 4),
        ("int4", "card", 1),
        ("int4-small", "tiles", 4),
    ],
)
def test_programs_for_accelerators_do_so_too(case, expected, weights: str, form: str, tp: int):
    assert max(errors(case, expected[weights], weights=weights, form=form, tp=tp)) < FLOAT32


@pytest.mark.parametrize(
    ("weights", "form"), [("int8", "loops"), ("int8-channel", "loops"), ("int4", "tiles"), ("int4-small", "loops")]
)
def test_bf16_activations_stay_within_the_bound_of_bf16(case, expected, weights: str, form: str):
    found = errors(case, expected[weights], weights=weights, form=form, dtype="bfloat16")
    assert np.median(found) < BFLOAT16_MEDIAN


def test_forms_differ_by_as_much_as_their_bits_say(case, source, expected):
    plain = Reference(case.config, source.tensor).logits(case.prompts[0])
    distance = {weights: relative(expected[weights][-1], plain[-1]) for weights in FORMS}
    assert FLOAT32 < distance["int8"] < distance["int4"] < distance["int4-small"] < 1
    assert distance["int8"] < 0.1


def test_activations_of_8_bits_are_another_rounding(case, expected):
    found = errors(case, expected["int8"], weights="int8", activations="int8")
    assert FLOAT32 < np.median(found) < BFLOAT16_MEDIAN


def test_a_matrix_without_groups_is_refused_with_the_sum(case):
    odd = dataclasses.replace(case.config, intermediate_size=164)
    with pytest.raises(PlanError, match=r"dense.down_proj .*found 164 = 5 \* 32 \+ 4"):
        weight_table(odd, "int8")
    assert weight_table(odd, "int8-channel")


def test_one_chip_takes_8_bit_matrices_a_layer_at_a_time(case):
    """Slicing a stack would copy it; on several chips, separate scales would be laid out anew in every step."""

    def by_layer(tp: int, weights: str) -> set[str]:
        geometry = Quick(case.config, case.read, tp=tp, form="tiles", weights=weights).geometry
        return {".".join(row.path[:2]) for row in parameters(case.config, geometry) if row.layer is not None}

    always = {*LAYERED, "mla.w_uk", "mla.w_uv"}
    matrices = {row.name for row in weight_table(case.config, "int8-channel") if row.form != "bf16" and row.layers}
    assert by_layer(1, "int8-channel") == by_layer(1, "bf16") == by_layer(4, "bf16") == matrices | always > always
    assert by_layer(4, "int8-channel") == always


def test_only_the_current_layer_is_widened(case):
    """XLA must not widen a stack: temporaries stay far below the stack's values in fp32."""
    direct = Quick(case.config, case.read, weights="int4")
    step, call = direct.step("decode", 4)
    batch = {"packed": jax.ShapeDtypeStruct(step.arguments[2]["packed"].shape, np.int32)}
    held = call.lower(direct.params, direct.state, batch).compile().memory_analysis().temp_size_in_bytes
    stack = next(row for row in weight_table(case.config, "int4") if row.name == "moe.experts_gate_up_proj")
    assert held < 4 * np.prod(stack.shape)
