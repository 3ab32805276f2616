"""score@T in fp32 against log-softmax and argmax of the float64 reference's logits, at every token slot."""

from collections.abc import Sequence

import numpy as np
import pytest

from ling3export.model.geometry import CHUNK, Form
from ling3export.model.sampling.sample import ROWS
from ling3export.runners.calibrate.receipts import log_softmax
from ling3export.runners.engine.inputs import Span
from tests.support.direct import relative
from tests.support.numerics import Case, Quick
from tests.support.tolerances import FLOAT32

pytestmark = pytest.mark.jit

PADDING = 144  # three parts of 48 rows: logits of 144 slots never exist together
Part = tuple[int, int, Sequence[int], Sequence[int]]  # slot, position of the first token, tokens, next tokens
Found = dict[tuple[int, int], tuple[float, int]]  # (slot, position) → log-probability of the next token, best token


class Scorer(Quick):
    """Calls of score@T with slots, pages and chunks chosen by the test."""

    def score(self, parts: Sequence[Part]) -> tuple[Found, dict[int, np.ndarray]]:
        """One call: the scores at every token, and the logits at the end of each part, by slot."""
        spans = [Span(*part) for part in parts]
        out = self.call("score", PADDING, spans)
        following = np.full(PADDING, -1)
        found: Found = {}
        for span, begin in zip(spans, [0, *(out["ends"][:-1] + 1)], strict=True):
            for i, after in enumerate(span.next_tokens):
                at = begin * CHUNK + i
                following[at] = after
                if after >= 0:
                    found[span.slot, span.start + i] = float(out["logprob"][at]), int(out["best"][at])
        silent = following < 0
        assert not out["logprob"][silent].any()
        assert (out["best"][silent] == -1).all()
        return found, {span.slot: out["logits"][row] for span, row in zip(spans, out["ends"], strict=True)}


def assert_right(found: Found, prompts: Sequence[Sequence[int]], expected: Sequence[np.ndarray]) -> None:
    """Log-probabilities are within FLOAT32, together and each; best tokens are equal unless rounding may swap them."""
    tops = 0
    wanted, values = [], []
    for (slot, position), (logprob, best) in found.items():
        row = expected[slot - 1][position]
        true = log_softmax(row)
        wanted.append(true[prompts[slot - 1][position + 1]])
        values.append(logprob)
        second, first = np.sort(row)[-2:]
        if first - second > FLOAT32 * np.linalg.norm(row):
            assert best == np.argmax(row), (slot, position)
            tops += 1
    assert relative(np.array(values), np.array(wanted)) < FLOAT32
    assert np.max(np.abs(np.array(values) - wanted) / np.abs(wanted)) < FLOAT32
    assert tops >= 0.99 * len(found)


def schedule(scorer: Scorer, prompts: Sequence[Sequence[int]], seed: int) -> Found:
    """Packs and cuts sequences into calls at random, also inside chunks; every position but the last is scored."""
    rng = np.random.default_rng(seed)
    done, found = [0] * len(prompts), {}
    scorer.reset()
    while any(at < len(ids) for at, ids in zip(done, prompts, strict=True)):
        free, parts = PADDING // CHUNK, []
        for n in rng.permutation(len(prompts)).tolist():
            left = len(prompts[n]) - done[n]
            if left and free:
                size = int(rng.integers(1, min(left, free * CHUNK) + 1))
                at = done[n]
                parts.append((n + 1, at, prompts[n][at : at + size], [*prompts[n][at + 1 : at + size + 1], -1][:size]))
                done[n] += size
                free -= -(-size // CHUNK)
        found |= scorer.score(parts)[0]
    return found


def is_a_prefill_too(case: Case, scorer: Scorer) -> None:
    """Logits and state are those of prefill, so that decode can continue."""
    ids, expected = case.prompts[0], case.expected[0]
    assert PADDING > ROWS  # else one part holds all rows
    _, logits = scorer.score([(2, 0, ids[:50], [-1] * 50)])
    assert relative(logits[2], expected[49]) < FLOAT32
    for at in range(50, 54):
        assert relative(scorer.decode(4, [(2, at, ids[at])])[0], expected[at]) < FLOAT32


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("score") / "micro", (120, 90, 60), num_hidden_layers=4).expect()


@pytest.mark.parametrize(("tp", "form"), [(1, "loops"), (2, "tiles")])
def test_packed_cut_and_continued(case: Case, tp: int, form: Form):
    """Also in the form for accelerators: a striped pool, unrolled layers."""
    scorer = Scorer(case.config, case.read, tp=tp, form=form, page_size=16, max_pages=8)
    found = schedule(scorer, case.prompts, seed=tp)
    assert len(found) == sum(len(ids) - 1 for ids in case.prompts)
    assert_right(found, case.prompts, case.expected)
    if tp == 1:
        is_a_prefill_too(case, scorer)
