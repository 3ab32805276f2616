"""The scheduler on the fake model, whose answers an oracle knows."""

from ling3export.artifacts.paddings import Shapes
from ling3export.runners.engine.block_manager import BlockManager
from ling3export.runners.engine.request import Limits, Request, Sampling
from ling3export.runners.engine.scheduler import Scheduler
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.state.prefix_cache import PrefixCache
from tests.support.fake_backend import VOCAB, FakeBackend, answer

CHUNK = 4


class Rig:
    """A scheduler on a fake backend."""

    def __init__(
        self,
        slots=4,
        pages=40,
        page_size=4,
        prefill=(4, 16),
        decode=(2, 4),
        context=80,
        ahead=1,
        stripes=1,
        snapshots=0,
        cache=True,
        every=16,
        evict="lru",
        cost=None,
        tell=None,
    ):
        self.backend = FakeBackend(slots, pages, page_size, CHUNK, snapshots)
        self.blocks = BlockManager(slots, pages, page_size, -(-context // page_size), stripes, snapshots)
        shared = snapshots and cache
        self.cache = PrefixCache(self.blocks, page_size, "root", every, evict, cost, tell) if shared else None
        self.limits = Limits(context, VOCAB, pages, page_size)
        shapes = Shapes(prefill, decode, CHUNK)
        self.scheduler = Scheduler(
            self.backend, shapes, self.blocks, VOCAB, ahead=ahead, cache=self.cache, supports_state_copy=snapshots > 0
        )
        self.sequences: list[Sequence] = []
        self.size = slots, pages
        self.snapshots = snapshots

    def submit(self, prompt, max_tokens, eos=frozenset(), logits=False, salt="", **sampling):
        request = Request(tuple(prompt), max_tokens, Sampling(**sampling), logits=logits, cache_salt=salt)
        self.limits.check(request)
        sequence = Sequence(request, len(self.sequences), self.limits.answer(request), eos)
        self.sequences.append(sequence)
        self.scheduler.submit(sequence)
        return sequence

    def run(self, steps=100_000):
        emitted = []
        while self.scheduler.busy and steps:
            emitted += self.scheduler.step()
            steps -= 1
        return emitted

    def check(self):
        """Every answer is the oracle's, and everything came back."""
        for sequence in self.sequences:
            prompt, how = list(sequence.request.prompt_ids), sequence.request.sampling
            expected = answer(prompt, sequence.limit, sequence.eos, how.seed, how.temperature)
            if sequence.stop_reason == "cancelled":
                expected = expected[: len(sequence.generated)]
            assert sequence.generated == expected
        if self.cache is not None:
            kept = self.cache.record()
            assert self.blocks.free_pages + kept["pages"] == self.size[1]
            assert self.blocks.free_snapshots + kept["snapshots"] == self.snapshots
            while self.cache.evict():
                pass
            assert self.cache.record() | {"pages": 0, "snapshots": 0} == self.cache.record()
        assert (self.blocks.free_slots, self.blocks.free_pages, self.blocks.free_snapshots) == (
            *self.size,
            self.snapshots,
        )


def prompt(rng, length):
    return [rng.randrange(VOCAB) for _ in range(length)]
