"""cuda targets: the card's data that the compiler gets, and errors where jax's plugin is missing.

CI does not install the plugin (413 MB); docs/log/programs-cuda.md has the results of compiling with it.
"""

from importlib import metadata

import jax
import pytest

from ling3export.checkpoint.synth import config_fields
from ling3export.compile import accelerators
from ling3export.cost import chips
from ling3export.cost.chips import CARDS, CHIPS, target_config
from ling3export.foundation.errors import PlanError
from ling3export.model.config import Config
from ling3export.plan import targets
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from ling3export.plan.targets import TargetSpec, check_toolchain, compiler_environment, parse_target

FULL = Config.from_dict(config_fields("full", {}))


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        (
            "h100",
            ("device_memory_size: 80000000000 ", "memory_bandwidth: 3350000000000 ", 'name: "NVIDIA H100 80GB HBM3"'),
        ),
        ("h200", ("device_memory_size: 141000000000 ", "memory_bandwidth: 4800000000000 ", 'name: "NVIDIA H200"')),
    ],
)
def test_the_compiler_gets_the_card_of_the_target(kind, facts):
    text = target_config(CHIPS["cuda", kind])
    for fact in facts:
        assert fact in text
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in text
    assert "shared_memory_per_block_optin: 232448 " in text
    assert text.count("{") == text.count("}") == 2
    assert text.startswith("gpu_device_info { threads_per_warp: 32 ")
    assert f'}} platform_name: "CUDA" device_description_str: "{CARDS[kind]}"' in text


@pytest.mark.parametrize(
    ("plugin", "pjrt", "wanted", "shown"),
    [
        (None, None, "jax-cuda13-plugin", "none"),
        ("0.1.2", "0.1.3", "jax-cuda13-pjrt", "jax-cuda13-pjrt 0.1.3"),
        ("0.1.20", "0.1.2", "jax-cuda13-plugin", "jax-cuda13-plugin 0.1.20"),
        ("0.1.2", None, "jax-cuda13-pjrt", "none"),
    ],
)
def test_a_missing_or_foreign_plugin_is_refused_by_both_names(monkeypatch, plugin, pjrt, wanted, shown):
    versions = {"jax": "0.1.2", "jax-cuda13-plugin": plugin, "jax-cuda13-pjrt": pjrt}

    def version(name):
        if versions[name] is None:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(targets.metadata, "version", version)
    with pytest.raises(PlanError) as caught:
        check_toolchain(parse_target("cuda:h200", None, FULL))
    assert caught.value.message == (
        f"target `cuda:h200`: expected {wanted} 0.1.2 (of the version of jax), found {shown}"
    )
    assert caught.value.hint == "in the checkout: pip install '.[cuda]'"


def test_a_card_holds_the_whole_model_and_a_full_pool():
    plan = make_plan(FULL, Options(), "cuda:h200")
    assert (plan.geometry.tp, plan.geometry.pages, plan.geometry.latent_row) == (1, 2048, 576)
    assert (plan.geometry.placement, plan.geometry.form) == ("replicated", "card")
    with pytest.raises(PlanError, match=r"--memory-fraction of `cuda:h100`: expected room .* found 7\.45 GiB"):
        make_plan(FULL, Options(memory_fraction=0.1), "cuda:h100")


def put_card(monkeypatch, folder, model):
    """Pretends that the driver reports one card."""
    (folder / "0000:01:00.0").mkdir()
    text = f"Model: \t\t {model}\nIRQ:   \t\t 16\nDevice Minor: \t 0\n"
    (folder / "0000:01:00.0" / "information").write_text(text)
    monkeypatch.setattr(chips, "DRIVER", folder)


@pytest.mark.parametrize("text", ["cuda", "cuda@1", "cuda:h200:here"])
def test_cuda_alone_is_the_card_that_is_here(monkeypatch, tmp_path, text):
    put_card(monkeypatch, tmp_path, "NVIDIA H200")
    target = parse_target(text, 16, FULL)
    assert (target.text, target.name, target.autotuned) == ("cuda:h200:here", "cuda-h200-here-tp1", True)
    assert target.chip == CHIPS["cuda", "h200"]
    assert compiler_environment(target) == {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert not parse_target("cuda:h200", None, FULL).autotuned


@pytest.mark.parametrize(
    ("target", "card", "message"),
    [
        ("cuda:h200:here", "NVIDIA H100 80GB HBM3", "expected a card that calls itself NVIDIA H200, found `{}` in "),
        ("cuda", "Tesla T4", "expected a card that calls itself NVIDIA H100 80GB HBM3, NVIDIA H200, found `{}` in "),
        ("cuda", None, "this machine has no NVIDIA card: nothing is in "),
    ],
)
def test_another_card_or_none_is_refused(monkeypatch, tmp_path, target, card, message):
    monkeypatch.setattr(chips, "DRIVER", tmp_path)
    if card:
        put_card(monkeypatch, tmp_path, card)
    with pytest.raises(PlanError) as caught:
        parse_target(target, None, FULL)
    assert caught.value.message.startswith(f"target `{target}`: {message.format(card)}{tmp_path}")


def test_an_autotuned_program_is_compiled_on_the_device_that_is_here(monkeypatch):
    """A virtual CPU device replaces the card; all but the card's own compiler runs."""
    device = jax.devices("cpu")[0]
    target = TargetSpec("cuda", "h200", "here", 1)
    monkeypatch.setattr(accelerators.jax, "devices", lambda platform: [device])
    with pytest.raises(PlanError) as caught:
        accelerators.topology_mesh(target)
    assert caught.value.message == "target `cuda:h200:here`: expected jax's first card to be NVIDIA H200, found cpu"
    monkeypatch.setitem(CARDS, "h200", "cpu")
    config = Config.from_dict(config_fields("micro", {}))
    geometry = make_plan(config, Options(max_running=2, context=512, pages=4), "cuda:h200").geometry
    direct = accelerators.lower_for(config, geometry, "sample", 2, target)
    raw, record, _ = accelerators.compile_for(direct, config, geometry, "sample", 2, target)
    assert list(direct.mesh.devices.flat) == [device]
    mesh = record.executable.mesh
    assert (mesh.devices, mesh.hosts, len(raw) > 0, record.collectives) == ((0,), (0,), True, {})


@pytest.mark.parametrize(
    ("text", "weights", "options"),
    [
        ("tpu:v6e:1x1", "int8-channel", accelerators.LARGE_TILES),
        ("tpu:v6e:1x1", "bf16", {}),
        ("tpu:v6e:2x2", "int8-channel", {}),
    ],
)
def test_one_v6e_chip_multiplies_8_bits_in_large_tiles(text: str, weights: str, options: dict[str, str]):
    """By the compiler's estimate, decode@16 of Ling3-Tiny falls from 9.74 ms to 8.98; on a slice it would rise."""
    config, told = Config.from_dict(config_fields("micro", {})), []

    class Lowered:
        def compile(self, compiler_options: dict[str, str]) -> None:
            told.append(compiler_options)
            raise jax.errors.JaxRuntimeError("enough")

    plan = make_plan(config, Options(max_running=2, context=512, pages=4, weights=weights), text)
    direct = accelerators.Direct(Lowered(), None, 0.0, accelerators.compiler_options(plan.target, plan.geometry))
    with pytest.raises(jax.errors.JaxRuntimeError, match="enough"):
        accelerators.compiled_for(direct, "decode@16", plan.target)
    assert told == [options]
