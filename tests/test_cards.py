"""cuda targets: what the compiler is told of a card, and refusals where jax's plugin is missing.

CI does not install the plugin (413 MB): docs/log.md says what compiling with it gave.
"""

from importlib import metadata

import pytest

from ling3export import targets
from ling3export.cards import CARDS, target_config
from ling3export.errors import PlanError
from ling3export.model.config import Config
from ling3export.plan import Options, make_plan
from ling3export.synth import config_fields
from ling3export.targets import CHIPS, check_toolchain, compiler_environment, parse_target

FULL = Config.from_dict(config_fields("full", {}))


def test_every_card_with_facts_can_be_described():
    assert {kind for platform, kind in CHIPS if platform == "cuda"} == set(CARDS)


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
def test_the_compiler_is_told_of_the_card_of_the_target(kind, facts):
    text = target_config(parse_target(f"cuda:{kind}", None, FULL))
    for fact in facts:
        assert fact in text
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in text
    assert "shared_memory_per_block_optin: 232448 " in text
    assert text.count("{") == text.count("}") == 2
    assert text.startswith("gpu_device_info { threads_per_warp: 32 ")
    assert f'}} platform_name: "CUDA" device_description_str: "{CARDS[kind].name}"' in text


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
    assert caught.value.hint == 'pip install "ling3export[cuda]"'


def test_the_plugin_of_the_version_of_jax_is_accepted(monkeypatch):
    monkeypatch.setattr(targets.metadata, "version", lambda name: "0.1.2")
    check_toolchain(parse_target("cuda:h100", None, FULL))


def test_compiling_for_a_card_needs_no_card():
    assert compiler_environment(parse_target("cuda:h200", None, FULL)) == {"JAX_PLATFORMS": "cpu"}


def test_a_card_holds_the_whole_model_and_a_full_pool():
    plan = make_plan(FULL, Options(), "cuda:h200")
    assert (plan.geometry.tp, plan.geometry.pages, plan.geometry.latent_row) == (1, 2048, 576)
    assert (plan.geometry.placement, plan.geometry.experts) == ("replicated", "local")
    with pytest.raises(PlanError, match=r"--memory-fraction of `cuda:h100`: expected room .* found 7\.45 GiB"):
        make_plan(FULL, Options(memory_fraction=0.1), "cuda:h100")
