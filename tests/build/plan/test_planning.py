"""``ling3export plan``: the totals of a plan and their wording; nothing is compiled."""

import json
import re
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from ling3export.artifacts.program_records import Memory
from ling3export.checkpoint.synth import config_fields
from ling3export.cli import main as cli
from ling3export.cost.chips import CHIPS
from ling3export.cost.roofline import TOKENS, roofline_bound
from ling3export.foundation.errors import PlanError
from ling3export.model.config import Config
from ling3export.model.state import state_bytes
from ling3export.plan.memory import check_memory, held, weight_bytes
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from ling3export.plan.recorded import config_of, options_of, plan_of
from tests.support.refusals import refusal

FULL = Config.from_dict(config_fields("full", {}))
MEMORY = Memory(arguments=1000, outputs=300, temporaries=70, alias=250, code=5)


def compiled(**memory):
    """The fields of a compiled cell that count for its price."""
    return SimpleNamespace(memory=replace(MEMORY, **memory))


def shown(*arguments):
    done = CliRunner().invoke(cli.main, ["plan", *map(str, arguments)])
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_fields("full", {})))
    return path


def test_the_plan_of_the_full_model_on_a_slice(config):
    text = shown(config, "--target", "tpu:v6e:4x4", "--paddings", "16,512", "--wide")
    row = r"^  ((?:prefill|decode|sample|logits_processor)@\d+)( +[0-9.,]+) +(?:memory|compute)"
    cells = re.findall(row, text, re.MULTILINE)
    assert [name for name, _ in cells] == [
        cell.name for cell in make_plan(FULL, Options(paddings=(16, 512)), "tpu:v6e:4x4").cells
    ]
    for told in (
        "2048 pages of 256 tokens (striped)",
        "971.55 MiB of weights + 317.57 MiB of state = 1.26 GiB a device, 4.0% of 31.24 GiB",
    ):
        assert told in text
    low = roofline_bound(
        FULL, make_plan(FULL, Options(), "tpu:v6e:4x4").geometry, "decode", 16, CHIPS["tpu", "v6e"], TOKENS
    )
    times = [low.moved / 1640e9, low.flops / 918e12]
    assert low.seconds == times[0] > times[1]
    columns = [f"{1e3 * low.seconds:.3f}", "memory", *(f"{1e3 * time:.3f}" for time in times)]
    columns += [f"{low.moved / 1e6:,.1f}", f"{low.flops / 1e9:,.2f}"]
    assert text.split("decode@16", 1)[1].splitlines()[0].split() == columns


def test_json_has_the_same_numbers(config):
    record = json.loads(shown(config, "--target", "tpu:v6e:4x4", "--target", "cpu", "--json"))
    plan = make_plan(FULL, Options(), "tpu:v6e:4x4")
    assert list(record["targets"]) == ["tpu-v6e-4x4-tp16", "cpu-tp16"]
    device = record["targets"]["tpu-v6e-4x4-tp16"]["device"]
    assert device["weights"] == weight_bytes(FULL, plan.geometry)
    assert device["state"] == -(-state_bytes(FULL, plan.geometry) // 16)
    assert device["total"] == device["weights"] + device["state"]
    for bound in record["targets"]["tpu-v6e-4x4-tp16"]["cells"].values():
        assert bound["seconds"] == max(bound["memory_seconds"], bound["compute_seconds"]) > 0
        assert bound["memory_seconds"] == sum(bound["bytes"].values()) / 1640e9
    cpu = record["targets"]["cpu-tp16"]
    assert cpu["device"]["memory"] is None
    assert set(cpu["cells"].values()) == {None}


def test_the_table_of_cells_fits_80_columns_unless_it_may_be_wide(config):
    lines = shown(config, "--target", "tpu:v6e:4x4").splitlines()
    rows = lines[lines.index("  cell                 bound ms  bound by") :]
    assert len(rows) == 1 + 3 + 3 + 5 + 5
    assert max(map(len, rows)) <= 80
    assert "  by memory  " not in "\n".join(lines)


def test_an_artifact_gives_back_the_plan_that_it_was_built_for(artifact):
    manifest = artifact.manifest("micro-tp2")
    config = config_of(manifest)
    options = options_of(manifest, Options(tp=2))
    plan = make_plan(config, options, "cpu")
    again = plan_of(manifest, "cpu-tp2")
    assert (again.target, again.geometry, again.cells) == (plan.target, plan.geometry, plan.cells)
    assert asdict(again.geometry) == manifest.targets["cpu-tp2"].geometry


def test_a_plan_that_cannot_be_built_is_refused():
    said = refusal(cli.main, "plan", "--target", "cpu@2", "--tp", "2", "--target", "cpu")
    assert said == "error: --target: expected each target once, found cpu-tp2 twice\n"


def test_a_config_that_is_not_there_is_named(tmp_path):
    assert f"config `{tmp_path}/config.json`: there is no such file" in refusal(cli.main, "plan", tmp_path)


def test_the_memory_of_a_device():
    """Programs add up, but their temporaries count once, at the largest; outputs in donated buffers need no memory."""
    plan = make_plan(FULL, Options(), "tpu:v6e:4x4")
    device = held(FULL, plan.target, plan.geometry)
    room = device.memory - device.total
    assert MEMORY.passing == 120
    fits = {"decode@16": compiled(), "prefill@512": compiled(temporaries=room - 60)}
    check_memory(FULL, plan.target, plan.geometry, fits)
    with pytest.raises(PlanError, match="2 programs"):
        check_memory(FULL, plan.target, plan.geometry, fits | {"prefill@512": compiled(temporaries=room - 59)})


def test_a_target_whose_temporaries_do_not_fit_is_refused_with_the_sum_and_the_option():
    plan = make_plan(FULL, Options(), "tpu:v6e:4x4")
    cells = {"prefill@512": compiled(temporaries=30 << 30, code=1 << 20)}
    with pytest.raises(PlanError) as caught:
        check_memory(FULL, plan.target, plan.geometry, cells)
    assert caught.value.message == (
        "memory of `tpu:v6e:4x4`: expected room for weights (971.55 MiB) + state (317.57 MiB) + temporaries of "
        "prefill@512 (30.00 GiB) + 1 programs (1.00 MiB) = 31.26 GiB a device, found 31.24 GiB"
    )
    assert caught.value.hint == (
        "lower --memory-fraction or --pages (pools), --max-running, or the padding of prefill@512; or take a larger "
        "topology"
    )
