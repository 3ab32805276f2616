"""Which target runs, and the ladder's three verdicts, without jax and without an artifact."""

import os
from types import SimpleNamespace

import pytest

from ling3export.artifacts import schema
from ling3export.foundation.errors import ArtifactError
from ling3export.machine import targets
from ling3export.machine.targets import choose_target, platforms_here
from ling3export.machine.verdict import Machine, Status, enforce, judge


def target(platform="cpu", devices=2, processes=1, tiers=("stablehlo", "exec")):
    """What a verdict looks at, and no more."""
    file = schema.FileRecord("x", 0, "0" * 64)
    cells = {name: SimpleNamespace(exec=file if "exec" in tiers else None) for name in ("prefill@16", "decode@16")}
    mesh = schema.Mesh("tp", tuple(range(devices)), tuple(place % processes for place in range(devices)))
    return SimpleNamespace(
        text=platform, platform=platform, processes=mesh.processes, tp=devices, mesh=mesh, requires=None, cells=cells
    )


HERE = Machine("cpu", 2, 1)


def fits(requires, mesh):
    return None


def other_jaxlib(requires, mesh):
    return "jaxlib: built for 0.10.0, found 0.11.2"


@pytest.mark.parametrize(
    ("record", "here", "misfit", "status", "reason"),
    [
        (target(), HERE, fits, Status.OPTIMAL, ""),
        (target(devices=1), HERE, fits, Status.OPTIMAL, ""),
        (target(), HERE, other_jaxlib, Status.RECOMPILE, "jaxlib: built for 0.10.0, found 0.11.2"),
        (
            target(tiers=("stablehlo",)),
            HERE,
            fits,
            Status.RECOMPILE,
            "executable: built for cpu, found none in the artifact",
        ),
        (target("tpu"), HERE, fits, Status.UNSUPPORTED, "platform: built for tpu, found cpu"),
        (target(devices=4), HERE, fits, Status.UNSUPPORTED, "devices: built for 4, found 2"),
        (
            target(devices=4, processes=4),
            Machine("cpu", 4, 1),
            fits,
            Status.UNSUPPORTED,
            "hosts: built for 4 (a process on each), found 1",
        ),
    ],
)
def test_verdicts(record, here, misfit, status, reason):
    verdicts = judge(record, here, misfit)
    assert {(v.status, v.reason) for v in verdicts.values()} == {(status, reason)}
    assert list(verdicts) == list(record.cells)


def test_an_executable_is_not_even_compared_where_nothing_can_run():
    judge(target("tpu"), HERE, lambda requires, mesh: pytest.fail("compared"))


def test_optimal_programs_need_no_compiling():
    assert enforce(judge(target(), HERE, fits), "prebuilt-only", "cpu-tp2", "a.ling3") == []


def test_recompile_is_an_error_under_prebuilt_only():
    with pytest.raises(ArtifactError) as caught:
        enforce(judge(target(), HERE, other_jaxlib), "prebuilt-only", "cpu-tp2", "a.ling3")
    assert caught.value.message == (
        "target `cpu-tp2`: expected compiled programs that fit, found RECOMPILE prefill@16, decode@16 "
        "(jaxlib: built for 0.10.0, found 0.11.2), in a.ling3"
    )
    assert "--programs allow-compile" in (caught.value.hint or "")


def test_recompile_is_allowed_where_the_policy_says_so():
    verdicts = judge(target(), HERE, other_jaxlib)
    assert enforce(verdicts, "allow-compile", "cpu-tp2", "a.ling3") == list(verdicts.values())


@pytest.mark.parametrize("policy", ["prebuilt-only", "allow-compile"])
def test_unsupported_is_an_error_under_every_policy(policy):
    with pytest.raises(
        ArtifactError, match=r"found UNSUPPORTED prefill@16, decode@16 \(devices: built for 4, found 2\)"
    ):
        enforce(judge(target(devices=4), HERE, fits), policy, "cpu-tp4", "a.ling3")


def test_an_artifact_for_another_number_of_hosts_is_refused_with_both_numbers():
    with pytest.raises(ArtifactError) as caught:
        enforce(judge(target(devices=16, processes=4), Machine("cpu", 16, 1), fits), "prebuilt-only", "cpu-tp16", "a")
    assert str(caught.value) == (
        "target `cpu-tp16`: expected programs that run here, found UNSUPPORTED prefill@16, decode@16 (hosts: built for "
        "4 (a process on each), found 1), in a\n"
        "hint: start the command on each of its 4 hosts: --coordinator HOST:PORT --num-hosts 4 --host-id I"
    )


def test_one_process_is_told_how_to_start_what_was_built_for_several_hosts():
    with pytest.raises(ArtifactError) as caught:
        choose_target({"cpu-4x4-tp16": target("cpu", 16, 4)}, None, ["cpu"])
    assert str(caught.value) == (
        "target: expected one for cpu on one host, found cpu-4x4-tp16 (4 hosts), in the manifest\n"
        "hint: start the command on each of its 4 hosts: --coordinator HOST:PORT --num-hosts 4 --host-id I"
    )


def test_unknown_policy_is_refused():
    with pytest.raises(ArtifactError, match="program policy: expected prebuilt-only or allow-compile, found maybe"):
        enforce({}, "maybe", "cpu-tp2", "a.ling3")


TARGETS = {"cpu-tp2": target(), "tpu-v6e-4x4-tp16": target("tpu", 16, 4), "cpu-4x4-tp16": target("cpu", 16, 4)}


@pytest.mark.parametrize("wanted", [None, "cpu-tp2", "cpu@2", "cpu"])
def test_the_only_target_that_fits_is_taken(wanted):
    assert choose_target(TARGETS, wanted, ["cpu"]) == "cpu-tp2"


@pytest.mark.parametrize("wanted", ["tpu:v6e:4x4@16", "tpu:v6e:4x4", "tpu-v6e-4x4-tp16"])
def test_a_target_is_found_as_a_build_spells_it(wanted):
    assert choose_target(TARGETS, wanted, ["cpu"]) == "tpu-v6e-4x4-tp16"


def test_an_accelerator_that_is_here_goes_before_the_cpu():
    assert (
        choose_target({"cpu-tp1": target(), "cuda-h200-tp1": target("cuda")}, None, ["cuda", "cpu"]) == "cuda-h200-tp1"
    )


def test_two_targets_that_fit_are_a_question():
    with pytest.raises(ArtifactError, match=r"fits this machine \(cpu\), found 2: cpu-tp1, cpu-tp2") as caught:
        choose_target({"cpu-tp2": target(), "cpu-tp1": target()}, None, ["cpu"])
    assert caught.value.hint == "choose one: --target cpu-tp1"


def test_no_target_that_fits_names_those_that_are_there():
    with pytest.raises(
        ArtifactError, match=r"expected one for cpu on one host, found tpu-v6e-4x4-tp16 \(4 hosts\), in the manifest"
    ):
        choose_target({"tpu-v6e-4x4-tp16": target("tpu", 16, 4)}, None, ["cpu"])


def test_an_unknown_target_names_those_that_are_there():
    with pytest.raises(ArtifactError, match="target `cpu@8`: expected one of cpu-tp2, found none of that name"):
        choose_target({"cpu-tp2": target()}, "cpu@8", ["cpu"])


def test_libtpu_looks_for_no_tpu_where_there_is_no_device(monkeypatch):
    """It once printed a page of messages before the verdict; a user's JAX_PLATFORMS is left alone."""
    monkeypatch.setattr(targets, "TPU_DEVICES", ("no such device",))
    for given, found in ((None, "cpu"), ("tpu", "tpu")):
        monkeypatch.setenv("JAX_PLATFORMS", given or "")
        if not given:
            monkeypatch.delenv("JAX_PLATFORMS")
        targets.prepare(target("tpu", 16, 4))
        assert os.environ["JAX_PLATFORMS"] == found
    monkeypatch.setattr(targets, "TPU_DEVICES", ("null",))
    monkeypatch.delenv("JAX_PLATFORMS")
    targets.prepare(target("tpu", 16, 4))
    assert "JAX_PLATFORMS" not in os.environ


def test_jax_platforms_narrows_what_is_here(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert platforms_here() == ["cpu"]
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert "cpu" not in platforms_here()
