"""A server's events, as a router follows them: the first blocks are asked for, and all again when one was missed.

Messages are numbered. Where a number is missing, comes twice or goes back, where a message cannot be read, or where the
server says that it is further than what came, what is known of its blocks counts for nothing until it was asked again.
"""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import zmq
import zmq.asyncio
from msgspec import Meta

from ling3export.runners.route.blocks import Blocks, MalformedError, Tokens, events_of
from ling3export.runners.serve.kv_events import END

MESSAGE = 1 << 20  # bytes of a message
WAITING = 64  # messages that wait to be taken
ANSWER = 256 << 20  # bytes of an answer to the question for all
DEADLINE = 30.0  # seconds of it
PAUSE = 1.0  # seconds between two questions; doubled while answers fail
LONGEST = 30.0
BLOCK = 1 << 16  # tokens of a block, and more
TEXT = 256  # characters of a topic


class EventSource(msgspec.Struct, frozen=True):
    """Where a server tells its events, as its ``/health`` says; both ports are at the server's own address.

    Attributes:
        port: The port of the events.
        replay_port: The port where missed events are asked for.
        topic: What messages begin with.
        block_size: Tokens a block.
        instance: Another one after each start of the server.
    """

    port: Annotated[int, Meta(ge=1, lt=1 << 16)]
    replay_port: Annotated[int, Meta(ge=1, lt=1 << 16)]
    topic: Annotated[str, Meta(max_length=TEXT)]
    block_size: Annotated[int, Meta(ge=1, lt=BLOCK)]
    instance: Annotated[str, Meta(max_length=TEXT)]


def source_of(said: Any) -> tuple[EventSource, int] | None:
    """What the JSON of ``/health`` says of events, and the number of the last message; None where it says nothing."""
    try:
        found = said["kv_events"]
        return msgspec.convert(found, EventSource), msgspec.convert(found["sequence"], Annotated[int, Meta(ge=-1)])
    except (LookupError, TypeError, UnicodeEncodeError, msgspec.ValidationError):
        return None


class KVEventSubscriber:
    """The events of one server. Everything happens in one event loop.

    Args:
        host: The server's, as its address has it.
        pause: Seconds between two questions.

    Attributes:
        counts: What happened how often, by name.
        last: The number of the last message that was taken; -1 before the first.
    """

    def __init__(self, host: str, pause: float = PAUSE) -> None:
        self._host = f"[{host}]" if ":" in host else host
        self._pause = pause
        self.counts: Counter[str] = Counter()
        self._source: EventSource | None = None
        self._task: asyncio.Task[None] | None = None
        self._blocks: Blocks | None = None  # None while nothing is known
        self.last = self._said = -1  # the latter: the number that the server spoke of

    @property
    def live(self) -> bool:
        """Whether all blocks of the server are known."""
        return self._blocks is not None

    @property
    def blocks(self) -> int:
        """How many blocks are known."""
        return 0 if self._blocks is None else len(self._blocks)

    def hit(self, prompt: Tokens) -> int:
        """How many tokens of a prompt the server need not compute; only while it is live."""
        assert self._blocks is not None
        return self._blocks.hit(prompt)

    def told(self, said: Any) -> None:
        """Takes what ``/health`` says: begins with another source anew, and asks again where messages were lost."""
        found = source_of(said)
        if found is None:
            return self.end()
        source, number = found
        if source != self._source:
            if self._source is not None:
                self.counts["restarts"] += 1
            self.end()
            self._begin(source)
        elif self._blocks is not None and self.last < self._said:  # its number was higher a second ago
            self.counts["gaps"] += 1
            self.end()
            self._begin(source)
        self._said = number

    def end(self) -> None:
        """Forgets everything, and stops listening."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._source = self._blocks = None
        self.last = self._said = -1

    def _begin(self, source: EventSource) -> None:
        self._source = source
        self._task = asyncio.create_task(self._follow(source))

    async def _follow(self, source: EventSource) -> None:
        context = zmq.asyncio.Context()
        try:
            with _opened(context, zmq.SUB, f"tcp://{self._host}:{source.port}") as heard:
                heard.setsockopt(zmq.SUBSCRIBE, source.topic.encode("utf-8", "replace"))
                await self._ask_and_hear(context, heard, source)
        except zmq.ZMQError:  # an invalid address
            self.counts["failed"] += 1
        finally:
            context.destroy(linger=0)

    async def _ask_and_hear(self, context: zmq.asyncio.Context, heard: zmq.asyncio.Socket, source: EventSource) -> None:
        pause = self._pause
        while True:
            blocks = None
            with suppress(MalformedError, TimeoutError):
                async with asyncio.timeout(DEADLINE):
                    blocks = await self._asked(context, source)
            if blocks is None:
                self.counts["failed"] += 1
                pause = min(2 * pause, LONGEST)
            else:
                pause = self._pause
                self._blocks = blocks
                self.counts[await self._heard(heard, blocks)] += 1
                self._blocks = None
            await asyncio.sleep(pause)

    async def _asked(self, context: zmq.asyncio.Context, source: EventSource) -> Blocks:
        """Asks the server for all of its blocks.

        Raises:
            MalformedError: The answer is none.
        """
        blocks, last, size = Blocks(source.block_size), -1, 0
        with _opened(context, zmq.DEALER, f"tcp://{self._host}:{source.replay_port}") as asking:
            await asking.send_multipart((b"", bytes(8)))
            while True:
                frames = await asking.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8:
                    raise MalformedError("events: expected a number and a batch, found other frames")
                if frames[1] == END:
                    break
                number, size = int.from_bytes(frames[1], "big"), size + len(frames[2])
                if number <= last or size > ANSWER:
                    raise MalformedError("events: expected an answer in order and of bounded size, found another")
                blocks.take(events_of(frames[2]))
                last = number
                await asyncio.sleep(0)  # others have a turn, however fast messages come
        self.counts["replays"] += 1
        self.last = last
        return blocks

    async def _heard(self, heard: zmq.asyncio.Socket, blocks: Blocks) -> str:
        """Takes messages until one is not the next; returns why it is not."""
        before = -1
        while True:
            frames = await heard.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != 8:
                return "malformed"
            number = int.from_bytes(frames[1], "big")
            if number <= before:
                return "restarts"
            if number > self.last + 1:
                return "gaps"
            before = number
            if number == self.last + 1:  # else the answer had it
                try:
                    blocks.take(events_of(frames[2]))
                except MalformedError:
                    return "malformed"
                self.last = number
                self.counts["received"] += 1
            await asyncio.sleep(0)


def _opened(context: zmq.asyncio.Context, kind: int, address: str) -> zmq.asyncio.Socket:
    made = context.socket(kind)
    for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, MESSAGE), (zmq.RCVHWM, WAITING), (zmq.IPV6, 1)):
        made.setsockopt(option, value)
    made.connect(address)
    return made
