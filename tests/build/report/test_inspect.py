"""``ling3export inspect``: its tables and their footnotes."""

import re
from pathlib import Path

from msgspec.structs import replace

from ling3export.artifacts.manifest import read_manifest
from ling3export.report.inspect import describe, estimated
from tests.support import toy_artifact

TARGET = "tpu-v6e-2x2-tp4"
GOLDEN = Path(__file__).parents[2] / "data"


def test_inspect_keeps_one_unit_a_table_and_footnotes_within_80_columns():
    """Regression: footnotes had 240 characters, bytes were whole MB, and sums of collectives were wrong."""
    manifest = read_manifest(GOLDEN)
    text = describe(manifest)
    below = text[text.index("target cpu-2x1-tp2") :].splitlines()
    assert [line for line in below if len(line) > 80 and not line.startswith("target ")] == []
    (header,) = (line for line in below if line.startswith("  estimates "))
    assert header.split() == "estimates ms bound ms moved MB bound MB collectives".split()
    cells = {
        cell.name: (cell, estimate, bound)
        for cell, estimate, bound in estimated(manifest.targets[TARGET].cells.values())
    }
    for line in below[below.index(header) + 1 :][: len(cells)]:
        name, *_, moved, least, collectives = line.split()
        cell, _, bound = cells[name]
        assert moved == f"{cell.bytes_accessed / 1e6:,.2f}" and least == f"{bound.moved / 1e6:,.2f}"
        assert int(collectives) == sum(each.count for each in cell.collectives.values())
    assert "The column has all of a program; the 8 that the layers of a step" in " ".join(text.split())


def test_an_estimate_without_the_time_of_custom_calls_says_at_least():
    """Everywhere that the estimate is shown.

    The artifact has a slice's estimates, made by an earlier version, and no programs are compiled.
    """
    manifest = read_manifest(GOLDEN)
    target = manifest.targets[TARGET]
    cell = target.cells["decode@2"]
    ms = f"{cell.estimate.seconds * 1e3:.3f}"
    opaque = replace(cell, estimate=replace(cell.estimate, unseen=12))
    changed = replace(manifest, targets={TARGET: replace(target, cells=target.cells | {"decode@2": opaque})})
    note = " at least: up to 12 custom calls a call, whose time the compiler does not estimate"
    for shown, said in ((replace(manifest, targets={TARGET: target}), ""), (changed, "at least ")):
        lines = describe(shown).splitlines()
        (line,) = (line for line in lines if re.match(rf"  decode@2 +(at least )?{ms} ", line))
        assert re.match(r"  decode@2 +(at least )?", line)[1] == (said or None)
        assert (note in " ".join(" ".join(lines).split())) == bool(said)


def test_a_generation_config_alone_is_no_tokenizer(tmp_path):
    """Regression: `inspect` printed `tokenizer yes`, and `generate` refused a text."""
    manifest = toy_artifact.build_toy(tmp_path / "toy.ling3")
    assert "tokenizer   yes" in describe(manifest)
    record = replace(manifest.tokenizer[0], path="tokenizer/generation_config.json")
    assert "tokenizer   none: token ids only" in describe(replace(manifest, tokenizer=(record,)))
