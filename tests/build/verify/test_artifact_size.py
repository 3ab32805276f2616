"""What built artifacts hold: programs that do not grow with the weights, and one store for every TP."""

import math
import re
from pathlib import Path

import pytest
from jax import export

from ling3export.artifacts.schema import FileRecord, Manifest
from tests.support.artifacts_fixture import Artifacts

CONSTANT_BYTES = 4096  # tables of frequencies and masks of a chunk stay far below
LITERAL = re.compile(r"constant dense(?:_resource)?<.*?> : tensor<(.*?)>")
BITS = re.compile(r"\d+$")


def programs(manifest: Manifest, tier: str) -> dict[str, FileRecord]:
    """The file records of the only target, by cell."""
    (target,) = manifest.targets.values()
    return {name: getattr(cell, tier) for name, cell in target.cells.items()}


def total(manifest: Manifest, tier: str) -> int:
    return sum(record.bytes for record in programs(manifest, tier).values())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def constant_bytes(kind: str) -> int:
    """Of a tensor type, such as ``16x4xf32``; repeated values count too: a splat would be one when it is executed."""
    *shape, element = kind.split("x")
    bits = BITS.search(element)
    assert bits is not None
    return math.prod(map(int, shape)) * -(-int(bits[0]) // 8)


def test_two_seeds_have_the_same_programs(artifact: Artifacts):
    one, other = artifact.manifest("micro-tp1"), artifact.manifest("micro-tp1-seed2")
    assert one.weights_digest != other.weights_digest
    assert len(programs(one, "stablehlo")) == 4
    assert programs(one, "stablehlo") == programs(other, "stablehlo")
    assert total(one, "exec") == pytest.approx(total(other, "exec"), rel=0.001)


def test_programs_do_not_grow_with_the_experts(artifact: Artifacts):
    one, twice = artifact.manifest("micro-tp1"), artifact.manifest("micro-tp1-experts")
    assert twice.weights.nbytes > 1.5 * one.weights.nbytes
    for tier in ("stablehlo", "exec"):
        assert total(twice, tier) == pytest.approx(total(one, tier), rel=0.02), tier


def test_stored_programs_hold_no_table_of_weights(artifact: Artifacts):
    """The smallest matrix of ``small`` that a program takes has 8 KiB in bfloat16, the smallest stack of them more."""
    files = sorted((artifact("small-tp16") / "programs").rglob("*.stablehlo"))
    assert len(files) == 10
    for file in files:
        module = export.deserialize(bytearray(file.read_bytes())).mlir_module()
        kinds = LITERAL.findall(module)
        assert len(kinds) == module.count(" constant dense") + module.count(".constant dense")
        assert max(map(constant_bytes, kinds)) <= CONSTANT_BYTES, (file.name, max(kinds, key=constant_bytes))


@pytest.mark.parametrize(("name", "same"), [("small-tp16", "small-tp1"), ("micro-tp4", "micro-tp2")])
def test_the_store_is_the_same_for_every_tp(name: str, same: str, artifact: Artifacts):
    stored = contents(artifact(name) / "weights")
    assert contents(artifact(same) / "weights") == stored
    one, other = (artifact.manifest(each).weights for each in (name, same))
    assert one == other
    assert sum(map(len, stored.values())) == one.nbytes
