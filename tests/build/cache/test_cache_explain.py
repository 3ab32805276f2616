"""What ``build --explain`` says: the fields that differ from the nearest entry, in words."""

from typing import Any

from ling3export.cache.explain import differences, explain
from ling3export.cache.store import CacheEntry


def fields(padding: int = 16, **changes: Any) -> dict[str, Any]:
    whole = {
        "cell": {"phase": "decode", "padding": padding},
        "config": {"rope_theta": 10000.0},
        "plan": {"pages": 512, "dtype": "bfloat16"},
        "target": {"platform": "cpu", "kind": None, "tp": 4, "cpu_features": ["avx", "avx2", "fma"]},
        "sources": {"model": {"model/kda/layer.py": "a", "model/mla/layer.py": "b"}, "lowering": {"lower.py": "c"}},
        "toolchain": {"jax": "0.11.2", "jaxlib": "0.11.2"},
        "flags": {},
    }
    return whole | {name: whole[name] | change for name, change in changes.items()}


def entry(fields: dict[str, Any]) -> CacheEntry:
    return CacheEntry("cells", "0" * 64, fields, {}, {})


def why(before: dict[str, Any], now: dict[str, Any]) -> str:
    return "; ".join(differences(before, now))


def test_the_field_that_changed_is_named_with_both_values():
    now = fields()
    assert why(fields(toolchain={"jaxlib": "0.10.2"}), now) == "jaxlib: 0.10.2 → 0.11.2"
    assert why(fields(plan={"pages": 256}), now) == "plan.pages: 256 → 512"
    assert why(now, fields(target={"kind": "v6e"})) == "target.kind: none → v6e"
    assert why(now, fields(flags={"XLA_FLAGS": "--a" * 40})) == f"XLA_FLAGS: none → {'--a' * 20}…"
    assert why(now, fields(target={"cpu_features": ["avx", "bmi", "fma"]})) == "target.cpu_features: [avx2] → [bmi]"
    assert why(now, now) == ""


def test_sources_are_named_by_file():
    changed = fields(sources={"model": {"model/kda/layer.py": "z", "model/new.py": "y"}})
    assert why(fields(), changed) == "sources of model/: kda/layer.py, mla/layer.py, new.py"
    assert why(fields(), fields(sources={"lowering": {"lower.py": "d"}})) == "sources of the lowering: lower.py"


def test_several_fields_stand_side_by_side():
    before = fields(plan={"pages": 256, "dtype": "float32"}, toolchain={"jaxlib": "0.10.2"})
    assert why(before, fields()) == "plan.dtype: float32 → bfloat16; plan.pages: 256 → 512; jaxlib: 0.10.2 → 0.11.2"


def test_the_nearest_entry_is_one_of_the_same_cell_then_of_the_same_platform_then_the_most_alike():
    other_cell = fields(32)
    other_platform = fields(target={"platform": "tpu"})
    far = fields(plan={"pages": 1, "dtype": "float32"})
    near = fields(config={"rope_theta": 6e6})
    now = fields()
    known = [entry(each) for each in (other_cell, other_platform, far, near)]
    assert explain(now, known) == "config.rope_theta: 6000000.0 → 10000.0"
    assert explain(now, known[:3]) == "plan.dtype: float32 → bfloat16; plan.pages: 1 → 512"
    assert explain(now, known[:2]) == "target.platform: tpu → cpu"
    assert explain(now, known[:1]) == "cell.padding: 32 → 16"
    assert explain(now, []) == "the cache holds no cells"


def test_an_entry_that_broke_is_not_blamed_on_a_field():
    assert explain(fields(), [entry(fields())]) == "its entry was lost or broken"
