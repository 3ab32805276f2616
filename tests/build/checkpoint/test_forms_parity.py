"""Quantized checkpoints written by other projects are read as their own code reads them (`make parity`)."""

import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ling3export.checkpoint.forms import FP8, INT4
from ling3export.checkpoint.reader import Checkpoint, expected_tensors
from ling3export.checkpoint.synth import synthesize
from tests.support.artifacts_fixture import ROOT, run
from tests.support.transformers_peer import SCRIPTS, parity_python

pytestmark = pytest.mark.extras
OVERRIDES = {"layer_group_size": 2, "num_experts": 16, "moe_intermediate_size": 160}


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_checkpoints_of_torch_and_compressed_tensors_are_read_as_they_read_them(form: str, tmp_path: Path):
    """FP8 includes random codes and scales; transformers and the package write config.json."""
    synthesize(tmp_path / "bf16", "small", 0, layers=2, overrides=OVERRIDES)
    synthesize(tmp_path / "ours", "small", 0, layers=2, overrides=OVERRIDES, form=form)
    names = [*Checkpoint.open(tmp_path / "ours").forms]
    run(parity_python(), SCRIPTS / "quantize.py", tmp_path / "bf16", tmp_path / "theirs", form, *names)
    theirs, original = Checkpoint.open(tmp_path / "theirs"), Checkpoint.open(tmp_path / "bf16")
    numbers = load_file(tmp_path / "theirs" / "numbers.safetensors")
    assert theirs.forms == dict.fromkeys(names, form)
    for name in expected_tensors(theirs.config):
        wanted = numbers[name] if name in numbers else original.tensor(name).astype(np.float64)
        np.testing.assert_array_equal(theirs.tensor(name).astype(np.float64), wanted, err_msg=name)


def test_the_numbers_do_not_depend_on_what_the_processor_does_with_subnormal_ones():
    code = (
        "import torch, sys, zlib; assert torch.set_flush_denormal(True); "
        "assert float(torch.tensor(1e-39) * 1) == 0; "
        "from ling3export.checkpoint.forms import FP8, INT4; "
        "sys.stdout.write(str([zlib.crc32(each.table) for each in (FP8, INT4)]))"
    )
    flushing = run(parity_python(), "-c", code, folder=ROOT).stdout
    assert flushing == str([zlib.crc32(each.table) for each in (FP8, INT4)])
