"""The choice of the target, and the three verdicts for a program, without jax and without an artifact."""

import os
from types import SimpleNamespace

import pytest

from ling3export.artifacts import schema
from ling3export.foundation.errors import ArtifactError
from ling3export.machine import targets
from ling3export.machine.targets import choose_target, platforms_here
from ling3export.machine.verdict import JaxRuntime, VerdictStatus, enforce, judge

REQUIRES = {
    name: schema.Requirements("0.11.2", {"cuda": "gpu"}.get(name, name), "cpu") for name in ("cpu", "tpu", "cuda")
}


def target(platform="cpu", devices=2, processes=1, tiers=("stablehlo", "exec")):
    """A target with only the fields that a verdict reads."""
    file = schema.FileRecord("x", 0, "0" * 64)
    cells = {name: SimpleNamespace(exec=file if "exec" in tiers else None) for name in ("prefill@16", "decode@16")}
    mesh = schema.Mesh("tp", tuple(range(devices)), tuple(place % processes for place in range(devices)))
    return SimpleNamespace(
        text=platform,
        platform=platform,
        processes=mesh.processes,
        tp=devices,
        mesh=mesh,
        requires=REQUIRES[platform],
        cells=cells,
        portable="1.18.0",
    )


def here(platform="cpu", devices=2, jaxlib="0.11.2"):
    return JaxRuntime(platform, jaxlib, {}, "cpu", "linux-x86_64", 1, [], range(devices))


OTHER = here(jaxlib="0.12.0")
UNFIT = "jaxlib: built for 0.11.2, found 0.12.0"


@pytest.mark.parametrize(
    ("record", "machine", "status", "reason"),
    [
        (target(), here(), VerdictStatus.OPTIMAL, ""),
        (target(devices=1), here(), VerdictStatus.OPTIMAL, ""),
        (target(), OTHER, VerdictStatus.RECOMPILE, UNFIT),
        (target(tiers=("stablehlo",)), here(), VerdictStatus.RECOMPILE, "the artifact has no executable for cpu"),
        (target("tpu"), OTHER, VerdictStatus.UNSUPPORTED, "platform: built for tpu, found cpu"),
        (target("cuda"), here("gpu"), VerdictStatus.OPTIMAL, ""),
        (target(devices=4), here(), VerdictStatus.UNSUPPORTED, "devices: built for 4, found 2"),
        (
            target(devices=4, processes=4),
            here(devices=4),
            VerdictStatus.UNSUPPORTED,
            "hosts: built for 4 (a process on each), found 1",
        ),
    ],
)
def test_verdicts(record, machine, status, reason):
    verdicts = judge(record, machine)
    assert {(v.status, v.reason) for v in verdicts.values()} == {(status, reason)}
    assert list(verdicts) == list(record.cells)


def test_optimal_programs_need_no_compiling():
    assert enforce(judge(target(), here()), "prebuilt-only", "cpu-tp2", "a.ling3") == []


@pytest.mark.parametrize(
    ("record", "machine", "found", "hint"),
    [
        (target(), OTHER, f"RECOMPILE prefill@16, decode@16 ({UNFIT})", "--programs allow-compile"),
        (target(devices=4), here(), "UNSUPPORTED prefill@16, decode@16 (devices: built for 4, found 2)", "--into"),
        (
            target(devices=16, processes=4),
            here(devices=16),
            "UNSUPPORTED prefill@16, decode@16 (hosts: built for 4 (a process on each), found 1)",
            "start the command on each of its 4 hosts: DIST_INIT_ADDR=HOST:PORT NNODES=4 NODE_RANK=I",
        ),
    ],
)
def test_a_target_for_another_machine_is_refused_with_a_hint(record, machine, found, hint):
    verdicts = judge(record, machine)
    with pytest.raises(ArtifactError) as caught:
        enforce(verdicts, "prebuilt-only", "cpu-tp2", "a.ling3")
    assert f", found {found}, in a.ling3" in caught.value.message
    assert hint in (caught.value.hint or "")
    if "UNSUPPORTED" in found:
        with pytest.raises(ArtifactError, match="found UNSUPPORTED"):
            enforce(verdicts, "allow-compile", "cpu-tp2", "a.ling3")
    else:
        assert enforce(verdicts, "allow-compile", "cpu-tp2", "a.ling3") == list(verdicts.values())


def test_the_hint_for_another_platform_is_a_command_to_copy(monkeypatch):
    """Regression: the hint ended with `--target TARGET`, and the reader had to guess this machine's name."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(ArtifactError) as caught:
        enforce(judge(target("tpu"), here()), "prebuilt-only", "tpu-v6e-2x1-tp2", "a.ling3")
    assert caught.value.hint == "add a target for this machine: ling3export build --into a.ling3 --target cpu"


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


ON_EACH = "start the command on each of its 4 hosts: DIST_INIT_ADDR=HOST:PORT NNODES=4 NODE_RANK=I"


@pytest.mark.parametrize(
    ("targets", "wanted", "said", "hint"),
    [
        (
            {"cpu-tp2": target(), "cpu-tp1": target()},
            None,
            "target: expected one that fits this machine (cpu), found 2: cpu-tp1, cpu-tp2",
            "choose one: --target cpu-tp1",
        ),
        (
            {"tpu-v6e-4x4-tp16": target("tpu", 16, 4)},
            None,
            "target: expected one for cpu on one host, found tpu-v6e-4x4-tp16 (4 hosts), in the manifest",
            "add one for this machine: ling3export build --into ARTIFACT --target cpu",
        ),
        (
            {"cpu-4x4-tp16": target("cpu", 16, 4)},
            None,
            "target: expected one for cpu on one host, found cpu-4x4-tp16 (4 hosts), in the manifest",
            ON_EACH,
        ),
        ({"cpu-tp2": target()}, "cpu@8", "target `cpu@8`: the artifact has only cpu-tp2", ""),
    ],
)
def test_no_target_that_fits_or_more_than_one_is_a_question(targets, wanted, said, hint):
    with pytest.raises(ArtifactError) as caught:
        choose_target(targets, wanted, ["cpu"])
    assert caught.value.message.startswith(said)
    assert hint in (caught.value.hint or "")


def test_libtpu_looks_for_no_tpu_where_there_is_no_device(monkeypatch):
    """Regression: libtpu printed a page of messages before the verdict. A user's JAX_PLATFORMS is not changed."""
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
