"""The engine's loop on the fake model, which a test can hold where the loop waits for the devices."""

import threading
import time

import tokenizers

from ling3export.runners.engine.loop import Loop
from ling3export.runners.engine.request import Request
from ling3export.runners.load.loader import Timings
from ling3export.runners.text.vocabulary import TextStream
from tests.support.fake_backend import VOCAB, FakeBackend, answer
from tests.support.scheduler_rig import Rig as CoreRig

SLOTS, PAGES, PAGE, CONTEXT = 4, 24, 4, 64
LETTERS = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(65 + i): i for i in range(VOCAB)}, "A"))
LETTERS.decoder = tokenizers.decoders.Fuse()
WAIT = 30  # seconds, for operations of milliseconds


class GatedBackend(FakeBackend):
    """A backend that a test can hold where the loop waits for the devices, and that fails where a test chooses."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.failure: Exception | None = None
        self._changed = threading.Condition()
        self._shut = self._standing = False
        self._allowed = 0

    def hold(self):
        """Stops the loop at each wait from now on."""
        with self._changed:
            self._shut = True

    def let_go(self):
        """Lets the loop run freely again."""
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    def reach(self):
        """Waits until the loop is held."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._standing and not self._allowed, WAIT)

    def let_one(self):
        """Lets the loop pass one wait, and returns when it is held at the next one."""
        with self._changed:
            self._allowed += 1
            self._changed.notify_all()
        self.reach()

    def _pass(self):
        with self._changed:
            self._standing = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._shut or self._allowed, WAIT)
            self._allowed, self._standing = 0, False
        if self.failure is not None:
            raise self.failure

    def read(self, handle):
        self._pass()
        return super().read(handle)

    def wait(self, handle):
        self._pass()


class Rig(CoreRig):
    """An engine's loop on a fake backend; the text of a token is a letter."""

    def __init__(self, ahead=1, max_requests=None, step_timeout=None):
        super().__init__(SLOTS, PAGES, PAGE, context=CONTEXT, ahead=ahead, backend=GatedBackend)
        self.timings = Timings()
        self.loop = Loop(self.core, self.timings, max_requests, step_timeout=step_timeout)

    def prepare(self, sequence):
        request = sequence.request
        return sequence.prepare(self.limits.answer(request), frozenset(), TextStream(LETTERS, request.stop))

    def submit(self, *requests):
        return self.loop.submit(requests)

    def until_ended(self):
        """Waits until the loop's thread has ended."""
        end = time.monotonic() + WAIT
        while any(thread.name == "ling3-engine" for thread in threading.enumerate()):
            assert time.monotonic() < end
            time.sleep(0.001)

    def free(self):
        return self.blocks.free_slots, self.blocks.free_pages

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.backend.let_go()
        self.loop.close()
        assert self.free() == (SLOTS, PAGES)
        assert not any(thread.name == "ling3-engine" for thread in threading.enumerate())


def request(prompt, max_tokens, **options):
    return Request(tuple(prompt), max_tokens, **options)


def expected(asked):
    return answer(
        list(asked.prompt_ids), asked.max_tokens, seed=asked.sampling.seed, temperature=asked.sampling.temperature
    )
