"""Prompts of many calls, in fp32 against the float64 reference: after a few pages; in `extras` after 100,000."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ling3export.verify.reference import Reference
from tests.support.direct import Direct, relative
from tests.support.long_prompts import FIELDS, logits_at, prompt
from tests.support.numerics import Case, Quick
from tests.support.tolerances import FLOAT32

pytestmark = pytest.mark.jit

PAGE, PAGES = 16, 79  # a block of four pages is 64 tokens; the last block of a full table has three pages
LENGTH = PAGE * PAGES


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One layer group and an incomplete one: the first MLA layer's output at every position feeds the second."""
    return Case(
        tmp_path_factory.mktemp("case") / "checkpoint", (LENGTH,) * 2, **FIELDS | {"num_hidden_layers": 3}
    ).expect()


@pytest.fixture(scope="module", params=[(1, "loops"), (2, "tiles")], ids=["loops", "tiles"])
def compiled(case: Case, request: pytest.FixtureRequest) -> Direct:
    tp, form = request.param
    return Quick(case.config, case.read, tp=tp, form=form, slots=2, page_size=PAGE, max_pages=PAGES)


@pytest.fixture
def direct(compiled: Direct) -> Direct:
    """The model with NaN in free pages: their content must not matter."""
    compiled.reset()
    compiled.state = compiled.state | {"mla_latent": compiled.state["mla_latent"] * np.float32(np.nan)}
    return compiled


@pytest.mark.parametrize("behind", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, LENGTH - 128])
def test_a_call_after_blocks_of_pages(case: Case, direct: Direct, behind: int):
    """At the borders of pages, of blocks and of the whole table; then a token is decoded if there is room."""
    ids, expected = case.prompts[0], case.expected[0]
    direct.sequence(128, ids[:behind])
    end = behind + 128
    assert relative(direct.prefill(128, [(1, behind, ids[behind:end])])[1], expected[end - 1]) < FLOAT32
    if end < LENGTH:
        assert relative(direct.decode(1, [(1, end, ids[end])])[0], expected[end]) < FLOAT32


@pytest.mark.parametrize(
    ("behind", "tokens"),
    [
        ((200, 0), (90, 20)),  # the end of a long prompt, with the beginning of another
        ((0, 200), (20, 90)),
        ((0, 200), (90, 3)),  # too few tokens to compute keys and values for
        ((200, 300), (64, 64)),  # two long ones
        ((200,), (5,)),
    ],
)
def test_calls_that_prompts_share(case: Case, direct: Direct, behind: Sequence[int], tokens: Sequence[int]):
    parts = []
    for n, (at, size) in enumerate(zip(behind, tokens, strict=True)):
        if at:
            direct.sequence(128, case.prompts[n][:at], slot=n + 1)
        parts.append((n + 1, at, case.prompts[n][at : at + size]))
    found = direct.prefill(128, parts)
    for slot, at, ids in parts:
        assert relative(found[slot], case.expected[slot - 1][at + len(ids) - 1]) < FLOAT32


def errors(direct: Direct, ids: Sequence[int], ends: Sequence[int], expected: np.ndarray) -> list[float]:
    """Errors of a prompt, prefilled to each of ``ends`` in calls of 512 tokens, and of the next decoded token."""
    found, at = [], 0
    for end in ends:
        while at < end:
            size = min(512, end - at)
            logits = direct.prefill(512, [(1, at, ids[at : at + size])])[1]
            at += size
        found += [logits, direct.decode(1, [(1, at, ids[at])])[0]]
        at += 1
    return [relative(*pair) for pair in zip(found, expected, strict=True)]


@pytest.mark.extras
@pytest.mark.parametrize(
    ("layers", "ends"),
    [(3, (1024, 16384, 32768)), (2, (8192, 32768, 65535, 65537, 99_999))],
    ids=["32k through two MLA layers", "100k"],
)
def test_long_prompts(tmp_path: Path, layers: int, ends: Sequence[int]):
    case = Case(tmp_path / "checkpoint", (), **FIELDS | {"num_hidden_layers": layers})
    ids, places = prompt(ends[-1] + 1), [place for end in ends for place in (end - 1, end)]
    expected = logits_at(Reference(case.config, case.read), ids, places)
    direct = case.direct(slots=1, page_size=256, max_pages=-(-len(ids) // 256))
    assert max(errors(direct, ids, ends, expected)) < FLOAT32
    lost = direct.state | {"mla_latent": direct.state["mla_latent"].at[:, 7].set(0)}
    direct.state = lost
    (moved,) = direct.decode(1, [(1, ends[-1], ids[-1])])
    assert relative(moved, expected[-1]) > 10 * FLOAT32, "one page of them all counts"
