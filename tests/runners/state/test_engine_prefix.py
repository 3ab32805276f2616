"""The engine on a real artifact with snapshots: equal tokens, fewer computed tokens, and everything is given back."""

import numpy as np
import pytest

from ling3export.foundation.errors import ArtifactError
from ling3export.runners.engine.engine import Engine
from tests.support import toy_artifact
from tests.support.prefix_campaign import campaign
from tests.support.tolerances import FLOAT32


def test_random_families_give_the_same_tokens_with_the_cache_on_and_off(artifact):
    """A part of the campaign of 2,000 requests in docs/log/state.md."""
    found = campaign(artifact("micro-tp1-snapshots"), 24, 5)
    assert found["hits"] > 0 and found["evicted_pages"] > 0 and found["evicted_snapshots"] > 0


def test_a_preempted_sequence_has_the_tokens_of_a_single_run(artifact):
    """Four sequences of 10 pages each, in a pool of 28; states come back bit for bit from host memory."""
    prompts = [[*range(n, n + 60)] for n in range(4)]
    told = {"check": "programs", "report": lambda text: None}
    with Engine(artifact("micro-tp1-snapshots"), prefix_cache=False, **told) as engine:
        alone = [engine.generate([ids], max_tokens=90, ignore_eos=True)[0].token_ids for ids in prompts]
        together = engine.generate(prompts, max_tokens=90, ignore_eos=True)
        stats = engine.stats()
    assert [done.token_ids for done in together] == alone
    assert stats["preempted"] > 0 and stats["tokens_in"] == 480, "no token of a prompt was computed twice"
    assert stats["free"] == stats["pools"]


def test_tokens_after_a_cache_hit_have_the_logits_of_a_whole_prefill(artifact):
    prompt = list(range(20, 90))
    with Engine(artifact("micro-tp1-snapshots"), check="programs", report=lambda text: None) as engine:
        one, two, three = (
            engine.generate([ids], max_tokens=3, ignore_eos=True, logits=True)[0]
            for ids in (prompt, prompt, [*prompt[:50], *range(9)])
        )
        assert [each.cached_tokens for each in (one, two, three)] == [0, 64, 0]
        (fourth,) = engine.generate([[*prompt[:50], *range(9)]], max_tokens=3, ignore_eos=True, logits=True)
        assert fourth.cached_tokens == 48, "where the third left the path it kept a state"
        counted = engine.stats()["prefix_cache"]
    for cached, whole in ((two, one), (fourth, three)):
        assert cached.token_ids == whole.token_ids
        error = np.linalg.norm(cached.logits - whole.logits, axis=1) / np.linalg.norm(whole.logits, axis=1)
        assert error.max() < FLOAT32
    assert counted["hits"] == 2 and counted["cached_tokens"] == 112
    assert counted["misses"] == {"no_match": 1, "no_snapshot": 1}


def test_an_artifact_without_snapshots_is_refused_by_name():
    with pytest.raises(ArtifactError) as raised:
        Engine(toy_artifact.shared(), prefix_cache=True, report=lambda text: None)
    assert raised.value.message.startswith("prefix cache: target `cpu-tp2` has no snapshots, in ")
    assert raised.value.hint == "build the artifact again with --snapshots N, or leave the prefix cache off"
