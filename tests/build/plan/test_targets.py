"""Targets as a user writes them, their compilers, and pools sized for a chip's memory."""

from importlib import metadata

import pytest

from ling3export.checkpoint.synth import config_fields
from ling3export.cost.chips import CHIPS
from ling3export.foundation.errors import PlanError
from ling3export.model.config import Config
from ling3export.plan import targets
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from ling3export.plan.targets import check_toolchain, compiler_environment, known_targets, parse_target

FULL = Config.from_dict(config_fields("full", {}))
MICRO = Config.from_dict(config_fields("micro", {}))


@pytest.mark.parametrize(
    ("text", "tp", "name", "devices", "processes"),
    [
        ("cpu", None, "cpu-tp16", 16, 1),
        ("cpu", 4, "cpu-tp4", 4, 1),
        ("cpu@8", 4, "cpu-tp8", 8, 1),
        ("cpu@tp2", None, "cpu-tp2", 2, 1),
        ("tpu:v6e:4x4", None, "tpu-v6e-4x4-tp16", 16, 4),
        ("tpu:v6e:4x4@16", 4, "tpu-v6e-4x4-tp16", 16, 4),
        ("tpu:v6e:2x2", 16, "tpu-v6e-2x2-tp4", 4, 1),
        ("tpu:v5p:2x2x4", None, "tpu-v5p-2x2x4-tp16", 16, 4),
        ("tpu:tpu7x:2x2x2", None, "tpu-tpu7x-2x2x2-tp16", 16, 2),
        ("cuda:h200", None, "cuda-h200-tp1", 1, 1),
        ("cuda:h100@1", 16, "cuda-h100-tp1", 1, 1),
    ],
)
def test_a_target_says_its_devices_and_hosts(text, tp, name, devices, processes):
    target = parse_target(text, tp, FULL)
    assert (target.name, target.tp, target.processes) == (name, devices, processes)


TPUS = (
    "tpu:v6e:1x1, tpu:v6e:2x2, tpu:v6e:2x4, tpu:v6e:4x4, tpu:v5e:1x1, tpu:v5e:2x2, tpu:v5e:2x4, tpu:v5e:4x4, "
    "tpu:v5p:1x1x1, tpu:v5p:2x2x1, tpu:v5p:2x2x2, tpu:v5p:2x2x4, tpu:tpu7x:1x1x1, tpu:tpu7x:2x2x1, tpu:tpu7x:2x2x2"
)
KNOWN = f"known targets: cpu, cpu:4x4, {TPUS}, cuda:h100, cuda:h200, cuda"
OF_TPU, OF_CUDA = f"known targets: {TPUS}", "known targets: cuda:h100, cuda:h200, cuda"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "target ``: expected PLATFORM[:KIND][:TOPOLOGY][@TP], found another form", "e.g. tpu:v6e:4x4 or cpu@4"),
        ("gpu", "target `gpu`: expected a platform of cpu, tpu, cuda, found `gpu`", KNOWN),
        ("cuda:a100", "target `cuda:a100`: expected a kind of h100, h200, found `a100`", OF_CUDA),
        ("cuda:h200:8", "target `cuda:h200:8`: expected no topology for cuda, found `8`", "write cuda:h200"),
        ("cuda:h200@8", "target `cuda:h200@8`: expected TP to be 1 (one card), found 8", "write cuda:h200"),
        ("tpu", "target `tpu`: expected a kind of v6e, v5e, v5p, tpu7x, found none", OF_TPU),
        ("tpu:v7x:4x4", "target `tpu:v7x:4x4`: expected a kind of v6e, v5e, v5p, tpu7x, found `v7x`", OF_TPU),
        ("tpu:v6e", "target `tpu:v6e`: expected a topology of 1x1, 2x2, 2x4, 4x4 for v6e, found none", OF_TPU),
        ("tpu:v6e:3x3", "target `tpu:v6e:3x3`: expected a topology of 1x1, 2x2, 2x4, 4x4 for v6e, found `3x3`", OF_TPU),
        ("tpu:v6e:4x4@8", "target `tpu:v6e:4x4@8`: expected TP to be its 16 devices, found 8", "tpu:v6e:2x4 has 8"),
        ("cpu:4", "target `cpu:4`: expected HOSTSxDEVICES behind cpu, from two hosts on, found `4`", "e.g. cpu:4x4"),
        (
            "cpu@3",
            "TP of target `cpu@3`: expected a divisor of 16 (the common divisor of heads 16, experts 128, "
            "vocabulary 157184 and widths), found 3",
            "this model splits over 1, 2, 4, 8, 16",
        ),
    ],
)
def test_a_target_that_is_not_known_is_refused_with_those_that_are(text, message, hint):
    with pytest.raises(PlanError) as caught:
        parse_target(text, None, FULL)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_a_topology_with_more_devices_than_shards_is_refused():
    with pytest.raises(PlanError, match=r"devices of `tpu:v6e:4x4`: expected a divisor of 4 .*, found 16"):
        parse_target("tpu:v6e:4x4", None, MICRO)


def test_every_known_target_parses_and_has_facts_with_a_source():
    *known, last = known_targets()
    assert last == "cuda"  # whatever card this machine has; see test_cards.py
    assert [parse_target(text, None, FULL).text for text in known] == known
    for chip in CHIPS.values():
        assert chip.sources
        assert all(source.startswith("https://") for source in chip.sources)
        assert 1e9 < chip.memory < chip.bandwidth < chip.flops


@pytest.mark.parametrize(
    ("found", "shown"), [(None, "none"), ("0.0.51", "libtpu 0.0.51"), ("0.0.480", "libtpu 0.0.480")]
)
def test_a_missing_or_foreign_libtpu_is_refused_by_both_names(monkeypatch, found, shown):
    real = metadata.version

    def version(name):
        if name != "libtpu":
            return real(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(targets.metadata, "version", version)
    monkeypatch.setattr(targets, "wanted_libtpu", lambda: "0.0.48")
    with pytest.raises(PlanError) as caught:
        check_toolchain(parse_target("tpu:v6e:4x4", None, FULL))
    assert caught.value.message == (
        f"target `tpu:v6e:4x4`: expected libtpu 0.0.48 (the compiler that belongs to jax {real('jax')}), found {shown}"
    )
    assert caught.value.hint == "in the checkout: pip install '.[tpu]'"
    check_toolchain(parse_target("cpu", None, FULL))


def test_the_libtpu_that_belongs_to_jax_is_installed():
    check_toolchain(parse_target("tpu:v6e:4x4", None, FULL))
    assert targets.metadata.version("libtpu").startswith(f"{targets.wanted_libtpu()}.")


def test_compiling_for_a_tpu_needs_no_tpu_in_the_environment():
    environment = compiler_environment(parse_target("tpu:v6e:4x4", None, FULL))
    assert environment["TPU_ACCELERATOR_TYPE"] == "v6e-16"
    assert environment["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("text", "pages", "note"),
    [
        (
            "tpu:v6e:4x4",
            2048,
            "latent pool: 2048 pages of 256 tokens (striped), all that 64 full sequences need; "
            "971.55 MiB of weights and 317.57 MiB of state a device",
        ),
        (
            "tpu:v6e:1x1",
            1555,
            "latent pool: 1555 pages of 256 tokens (replicated), what fits 18.74 GiB, which is "
            "0.6 of 31.24 GiB a device; 14.71 GiB of weights and 4.03 GiB of state a device",
        ),
    ],
)
def test_pages_fill_what_weights_and_slots_leave_of_a_chip(text, pages, note):
    plan = make_plan(FULL, Options(), text)
    assert plan.geometry.pages == pages
    assert plan.geometry.latent_row == 640  # whole lanes; with 576, every step would copy the pool
    assert plan.notes[-1] == note


def test_striped_pages_are_the_same_number_on_every_device():
    assert make_plan(FULL, Options(pages=48), "tpu:v6e:4x4").geometry.pages == 48
    with pytest.raises(PlanError) as caught:
        make_plan(FULL, Options(pages=33), "tpu:v6e:4x4")
    assert caught.value.message == "--pages: expected a multiple of 16 (striped over as many devices), found 33"


def test_a_plan_that_a_chip_cannot_hold_is_refused_with_the_sum():
    with pytest.raises(PlanError) as caught:
        make_plan(FULL, Options(), "tpu:v5e:1x1")
    assert caught.value.message == (
        "--memory-fraction of `tpu:v5e:1x1`: expected room for weights (14.71 GiB) + 65 slots and one page (1.18 GiB) "
        "+ 32 pages of 256 tokens (1.88 MiB each) = 15.95 GiB a device, found 9.45 GiB, which is 0.6 of 15.75 GiB"
    )
    assert caught.value.hint == (
        "lower --max-running, --context or --pages, raise --memory-fraction, or take a larger topology"
    )
