"""Plans for this machine: TP=1, sizes that fit its memory, and the total compared with the free memory."""

import json

import pytest
from click.testing import CliRunner

from ling3export.checkpoint.synth import config_fields
from ling3export.cli import main as cli
from ling3export.foundation.tables import readable
from ling3export.model.config import Config
from ling3export.model.state import state_bytes
from ling3export.plan.here import LEAST, SHARE, fitted
from ling3export.plan.memory import OnMachine, in_words, weight_bytes
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

FULL = Config.from_dict(config_fields("full", {}))
GIB = 2**30


def planned(*arguments: object) -> str:
    done = CliRunner().invoke(cli.main, ["plan", *map(str, arguments)])
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("gib", "sequences", "snapshots", "context"),
    [(15, 16, 8, 8192), (18, 20, 10, 8192), (20, 22, 11, 8192), (24, 64, 32, 8192), (64, 64, 32, 8192)],
)
def test_sizes_follow_from_the_memory_of_the_machine(gib, sequences, snapshots, context):
    """Regression: a laptop's plan had 16 devices and 64 sequences, whatever its memory."""
    options, said = fitted(FULL, Options(), (), gib * GIB)
    assert (options.tp, options.max_running, options.snapshots, options.context) == (1, sequences, snapshots, context)
    geometry = make_plan(FULL, options, "cpu").geometry
    weights, state = weight_bytes(FULL, geometry), state_bytes(FULL, geometry)
    assert state <= max(SHARE * gib * GIB - weights, LEAST * gib * GIB)
    assert geometry.pages >= geometry.max_pages, "one sequence of the whole context fits"
    assert said == (
        f"for this machine, --tp 1 --max-running {sequences} --context {context} --snapshots {snapshots}",
        f"{readable(weights)} of weights + {readable(state)} of state = {readable(weights + state)} of the "
        f"{gib}.00 GiB that are here" + ": too much" * (weights + state > gib * GIB),
    )


def test_the_context_reaches_what_yarn_scales_to():
    """Regression: the context ended at max_position_embeddings, although `--context` allows more."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}
    options, _ = fitted(Config.from_dict(config_fields("full", {"rope_scaling": yarn})), Options(), (), 64 * GIB)
    assert options.context == 16384


def test_little_memory_gives_one_sequence_as_long_as_fits():
    options, _ = fitted(FULL, Options(), (), GIB)
    assert (options.max_running, options.snapshots) == (1, 0)
    assert 256 <= options.context < 8192
    make_plan(FULL, options, "cpu")


@pytest.mark.parametrize("given", [("max_running",), ("context", "paddings"), ("state_memory",)])
def test_one_given_size_leaves_only_tp_to_the_plan(given):
    assert fitted(FULL, Options(), given, 64 * GIB) == (Options(tp=1), None)


def test_tp_and_other_targets_stay_as_they_were_asked_for():
    assert fitted(FULL, Options(tp=4), ("tp",), 64 * GIB) == (Options(tp=4), None)
    slices = Options(targets=("tpu:v6e:4x4",))
    assert fitted(FULL, slices, (), 64 * GIB) == (slices, None)
    assert fitted(FULL, Options(), (), 0) == (Options(tp=1), None), "memory is not known"


def test_the_sum_of_a_machine_is_compared_with_what_is_free():
    """Regression: `plan` ended with "1.20 GiB a device" where 16 devices of one machine need 19 GiB."""
    parts = "15.00 GiB of weights + 4.00 GiB of state = 19.00 GiB"
    found = OnMachine(15 * GIB, 4 * GIB, 19 * GIB, 24 * GIB, 20 * GIB)
    assert in_words(found) == f"{parts} of the 24.00 GiB that are here, 20.00 GiB free"
    full = OnMachine(15 * GIB, 4 * GIB, 19 * GIB, 24 * GIB, 18 * GIB)
    assert in_words(full) == f"{parts} of the 24.00 GiB that are here, 18.00 GiB free: too much"
    assert in_words(OnMachine(15 * GIB, 4 * GIB, 19 * GIB, 0, 0)) == parts


def test_plan_shows_a_checkpoint_at_tp_1_and_the_demo_at_tp_16(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_fields("micro", {})))
    first, *_ = text = planned(tmp_path).splitlines()
    assert first == "for this machine, --tp 1 --max-running 64 --context 8192 --snapshots 32"
    assert "target cpu-tp1: 1 device on 1 host" in text
    machine = json.loads(planned(tmp_path, "--json"))["targets"]["cpu-tp1"]["machine"]
    assert machine["total"] == machine["weights"] + machine["state"]
    (told,) = (line for line in text if f" = {readable(machine['total'])}" in line)
    assert f"{readable(machine['total'])} of the " in told and told.startswith("  one machine: "), (
        "the sum stood thrice"
    )
    demo = planned()
    assert "target cpu-tp16: 16 devices on 1 host" in demo and not demo.startswith("for this machine")
    assert "  one machine: " not in planned("--target", "tpu:v6e:4x4")
