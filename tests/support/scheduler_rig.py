"""The engine's core on the fake model; an oracle computes the right answers."""

from contextlib import nullcontext
from types import SimpleNamespace

from ling3export.artifacts.paddings import Shapes
from ling3export.runners.engine.core import EngineCore, SharedCore, StepInputs
from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.executor import ModelExecutor
from ling3export.runners.engine.request import Limits, Request, Sampling
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.state.block_manager import BlockManager
from ling3export.runners.state.prefix_cache import PrefixCache
from tests.support.fake_backend import VOCAB, FakeBackend, answer

CHUNK = 4


class Rig:
    """A core on a fake backend. ``ended`` are the sequences that ended without being cancelled, in order."""

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
        cost=None,
        tell=None,
        score=(),
        chunk=CHUNK,
        backend=FakeBackend,
        store=None,
        channel=None,
    ):
        self.backend = backend(slots, pages, page_size, chunk, snapshots)
        self.blocks = BlockManager(slots, pages, page_size, -(-context // page_size), stripes, snapshots)
        shared = snapshots and cache
        self.cache = PrefixCache(self.blocks, page_size, "root", every, cost, tell) if shared else None
        self.limits = Limits(context, VOCAB, pages, page_size)
        self.counters, self._channel = Counters(), channel
        shapes = Shapes(prefill, decode, chunk, score=score)
        executor = ModelExecutor(self.backend, chunk, self.blocks, VOCAB, self.counters)
        self._parts = executor, shapes, self.blocks, VOCAB, self.prepare
        copies = snapshots > 0
        self._options = {"ahead": ahead, "cache": self.cache, "supports_state_copy": copies, "store": store}
        self.core = self.make_core()
        self.sequences: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.size = slots, pages
        self.snapshots = snapshots

    def make_core(self):
        options = {"counters": self.counters, **self._options}
        return (
            SharedCore(self._channel, *self._parts, **options) if self._channel else EngineCore(*self._parts, **options)
        )

    def prepare(self, sequence):
        """Prepares a sequence as the core does for an arrival. Tests that add sequences call ``add``."""
        return sequence.prepare(self.limits.answer(sequence.request), frozenset())

    def submit(self, prompt, max_tokens, eos=frozenset(), sampling=None, **options):
        request = Request(tuple(prompt), max_tokens, sampling or Sampling(), **options)
        self.limits.check(request)
        return self.add(Sequence(request, len(self.sequences)).prepare(self.limits.answer(request), eos))

    def add(self, sequence):
        self.sequences.append(sequence)
        self.core.submit(sequence)
        return sequence

    def step(self):
        outputs = self.core.step(StepInputs())
        self.ended += outputs.ended
        return outputs.emitted

    def cancel(self, sequence):
        self.core.cancel(sequence.number)

    def run(self, steps=100_000):
        emitted = []
        while self.core.busy and steps:
            emitted += self.step()
            steps -= 1
        return emitted

    def check(self):
        """Checks that every answer is the oracle's, and that all slots and pages were given back."""
        for sequence in self.sequences:
            prompt, how = list(sequence.request.prompt_ids), sequence.request.sampling
            expected = answer(prompt, sequence.max_new_tokens, sequence.eos, how.seed, how.temperature)
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


class Wire:
    """A channel between hosts. The test is its other end; with ``shared`` also a second host in this process.

    Attributes:
        sent: Messages for the other hosts.
        failed: The reasons for which all hosts end.
    """

    def __init__(self, number, shared=None):
        self.hosts, self.leads, self._shared = SimpleNamespace(number=number), number == 0, shared
        self.sent: list[bytes] = []
        self.failed: list[str] = []

    def together(self):
        return nullcontext()

    def send(self, kind, payload=b""):
        self.sent.append(payload)

    def fail(self, text, kind=b""):
        self.failed.append(text)

    def shared(self, payload=b""):
        if self.leads:
            self._shared.append(payload)
            return payload
        return self._shared.pop(0)
