"""Both ends of a link, as threads of one process: rows that travel, and the end of one side when the other ends."""

import os
import re
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest

from ling3export.foundation.dtypes import BY_NAME, MASK
from ling3export.foundation.errors import Ling3Error
from ling3export.runners.ffn import link as links
from ling3export.runners.ffn.context import ContextError, ScheduleContext
from ling3export.runners.ffn.link import AttentionLink, FfnGone, FfnLink, ScheduleTimeout, address_of, layout

TOKENS, CHOSEN, EXPERTS, LAYERS, WIDTH = 3, 2, 8, 2, 6
DIGEST, SOON = "d" * 64, 0.4  # seconds for a wait that has to end by itself
IDS = np.array([[0, 5], [7, 2], [MASK, MASK]], np.int32)


class Worker:
    """A worker whose expert e of layer l adds ``100 l + e`` to every number."""

    def __init__(self, name: str, dtype: str = "float32") -> None:
        self.row = np.dtype((BY_NAME[dtype].numpy, (WIDTH,)))
        context = layout(TOKENS, CHOSEN, EXPERTS, self.row, self.row)
        self.link = FfnLink(name, context, artifact=DIGEST, layers=LAYERS, sent=self.row, returned=self.row)
        self.error: Ling3Error | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.link.accept()
            while (published := self.link.recv_attn_output()) is not None:
                added = 100 * published.layer + np.where(published.expert_ids < MASK, published.expert_ids, 0)
                self.link.send_ffn_output(published, (published.data + added[..., None]).astype(self.row.base))
            self.link.close()
        except Ling3Error as error:
            self.error = error
            self.link.close(f"it ended: {error.message}")

    def joined(self) -> Ling3Error | None:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.error


def attention(name: str, worker: Worker | None = None, wait: float = 20) -> AttentionLink:
    row = worker.row if worker else np.dtype((np.float32, (WIDTH,)))
    return AttentionLink(name, artifact=DIGEST, sent=row, returned=row, wait=wait)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"


@pytest.fixture
def worker(name: str) -> Worker:
    made = Worker(name)
    made.thread.start()
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_pair_comes_back_from_its_expert(name: str, dtype: str):
    """Micro batches of different layers are in flight at once."""
    worker = Worker(name, dtype)
    worker.thread.start()
    link = attention(name, worker)
    assert (link.tokens, link.micro_batches) == (TOKENS, 2)
    for turn in range(5):
        tokens = np.arange(TOKENS * WIDTH).reshape(TOKENS, WIDTH).astype(worker.row.base) + turn
        for number in (0, 1):
            link.send_attn_output(number, (number + turn) % LAYERS, tokens, IDS)
        for number in (0, 1):
            added = 100 * ((number + turn) % LAYERS) + np.where(IDS < MASK, IDS, 0)
            wanted = np.where((IDS < MASK)[..., None], tokens[:, None] + added[..., None], 0)
            assert (link.recv_ffn_output(number).astype(np.float32) == wanted.astype(np.float32)).all()
    link.close()
    link.close()
    assert worker.joined() is None


def test_a_worker_that_ends_says_why(name: str, worker: Worker):
    link = attention(name)
    link.send_attn_output(0, LAYERS, np.zeros((TOKENS, WIDTH), np.float32), IDS)
    with pytest.raises(FfnGone, match="found it ended: layer: expected one below 2, found 2"):
        link.recv_ffn_output(0)
    assert isinstance(worker.joined(), ContextError)
    link.send_attn_output(1, 0, np.zeros((TOKENS, WIDTH), np.float32), IDS)
    with pytest.raises(FfnGone, match="found its process gone"):
        link.recv_ffn_output(1)
    link.close()


@pytest.mark.parametrize("expert", [EXPERTS, -1])
def test_an_expert_that_does_not_exist_ends_the_worker(name: str, worker: Worker, expert: int):
    link = attention(name)
    ids = IDS.copy()
    ids[0, 0] = expert
    link.send_attn_output(0, 0, np.zeros((TOKENS, WIDTH), np.float32), ids)
    with pytest.raises(FfnGone, match=f"expert ids: expected them below 8, found {expert}"):
        link.recv_ffn_output(0)
    link.close()
    assert worker.joined() is not None


def test_a_worker_that_lives_and_does_not_answer_is_a_timeout(name: str):
    worker = Worker(name)
    accepts = threading.Thread(target=worker.link.accept)
    accepts.start()
    link = attention(name, wait=SOON)
    accepts.join()
    link.send_attn_output(0, 0, np.zeros((TOKENS, WIDTH), np.float32), IDS)
    with pytest.raises(ScheduleTimeout, match=r"no answer within 0\.4 s"):
        link.recv_ffn_output(0)
    link.close()
    assert worker.link.recv_attn_output() is not None and worker.link.recv_attn_output() is None
    worker.link.close()


def test_an_attention_process_that_dies_ends_the_worker(name: str, worker: Worker):
    """Its socket closes without a message."""
    link = attention(name)
    peers = [each for each in vars(link).values() if isinstance(each, socket.socket)]
    peers[0].close()
    assert isinstance(worker.joined(), FfnGone)


def test_a_process_of_another_artifact_is_refused_and_the_worker_waits_on(name: str, worker: Worker):
    with pytest.raises(ContextError, match="expected a worker of this artifact, found one of another"):
        AttentionLink(name, artifact="e" * 64, sent=worker.row, returned=worker.row)
    attention(name).close()
    assert worker.joined() is None


def test_a_name_is_one_workers_until_it_ends(name: str):
    first = Worker(name)
    with pytest.raises(ContextError, match=f"the name `{name}` is taken"):
        Worker(name)
    first.link.close()
    Worker(name).link.close()


def test_no_worker_is_said_with_the_command_that_starts_one(name: str):
    with pytest.raises(FfnGone, match=r"no FFN worker within 0.4 s") as caught:
        attention(name, wait=SOON)
    assert caught.value.hint == f"start it: ling3-runner ffn-worker ARTIFACT --context {name}"


@pytest.mark.parametrize("wrong", ["", ".", "../up", "a/b", "a b", "-a", "a" * 65, "a\nb"])
def test_names_of_other_forms_are_refused(wrong: str):
    with pytest.raises(ContextError, match="expected a name of letters, digits"):
        address_of(wrong)


def test_another_users_process_is_refused(name: str, worker: Worker, monkeypatch: pytest.MonkeyPatch):
    own = os.geteuid()
    address = address_of(name)
    monkeypatch.setattr(links, "address_of", lambda _: address)
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ContextError, match=re.escape(f"expected a process of user {own + 1}, found user {own}")):
        attention(name)
    monkeypatch.undo()
    attention(name).close()
    assert worker.joined() is None


def test_the_context_of_a_segment_is_one_of_the_published_layout():
    row = np.dtype((np.float32, (WIDTH,)))
    context = layout(TOKENS, CHOSEN, EXPERTS, row, row)
    assert ScheduleContext.parse(context.build()) == context
    assert (context.data_shape, context.info_shape) == ((1, 2, TOKENS, CHOSEN, 512), (1, 2, 2 + TOKENS * CHOSEN))
    end = context.attention_token_data_buf + context.attention_token_data_size
    context.check(row.itemsize, end)
    with pytest.raises(ContextError, match="`ffn_token_data_buf`: expected a place within"):
        replace(context, ffn_token_data_buf=end).check(row.itemsize, end)
