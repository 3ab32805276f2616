"""``ling3-runner chat``: a conversation in a terminal, or through a pipe, one line a turn."""

import asyncio
import json
import secrets
import sys
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ling3export.foundation.errors import Ling3Error, RequestError, printable
from ling3export.runners.cli.command import Command, given, section
from ling3export.runners.cli.options import engine_options, sampling_options, switch
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.engine.config import EngineConfig

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine
    from ling3export.runners.engine.handle import RequestHandle
    from ling3export.runners.engine.request import Completion

TAKEN = ("temperature", "top_k", "top_p", "min_p", "seed")  # settings of sampling
HELP = """\
/think on|off   think before the answer, or do not
/system TEXT    replace the system text; no TEXT removes it
/save FILE      write the conversation, as `generate --prompt-file` takes it
/help           show this
A line that ends with \\ goes on in the next one. A blank before / makes it text.
Ctrl-C ends an answer, Ctrl-D the conversation."""


class Conversation:
    """The messages so far, and an engine that answers the next one.

    Args:
        seeded: Whether each answer has the seed of the settings; else each has one of its own.
        max_tokens: Most tokens of an answer, which has no more than the context leaves; None for these.
        think: Whether to think first; None for what the template does by itself.

    Attributes:
        messages: The form that chat templates take.
    """

    def __init__(
        self,
        engine: "Engine",
        *,
        seeded: bool = True,
        max_tokens: int | None = None,
        think: bool | None = None,
        **settings: Any,
    ) -> None:
        self._engine, self._seeded, self._max_tokens, self._settings = engine, seeded, max_tokens, settings
        self.think = think
        self.messages: list[dict[str, Any]] = []

    @property
    def stopped(self) -> bool:
        """Whether the engine answers no more."""
        return self._engine.stopped is not None

    def system(self, text: str) -> None:
        """Replaces the system text, which an empty one removes."""
        rest = self.messages[1:] if self.messages and self.messages[0]["role"] == "system" else self.messages
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def save(self, path: Path) -> None:
        """Writes the messages as one line of JSON.

        Raises:
            Ling3Error: The file is there already, or cannot be written.
        """
        from ling3export.artifacts.files import replacing

        if path.exists():
            raise RequestError(f"/save `{path}`: expected no such file, found one")
        with replacing(path) as file:
            file.write(json.dumps({"messages": self.messages}, ensure_ascii=False).encode() + b"\n")

    def answer(self, text: str, say: "Say") -> "Completion":
        """The answer to ``text``, which is said as it comes. Ctrl-C ends it; what was said until then counts.

        Raises:
            Ling3Error: There is none; then the conversation is as it was before.
        """
        from ling3export.runners.engine.validation import SEEDS
        from ling3export.runners.text.answer import REASONING, TEXT, AnswerFormat, AnswerParser

        messages, files = [*self.messages, {"role": "user", "content": text}], self._engine.files
        variables = {} if self.think is None else {"enable_thinking": self.think}
        prompt = files.render_chat(messages, variables=variables)
        ids = self._engine.prompt_ids(prompt, "messages", special=False)
        settings = self._settings if self._seeded else self._settings | {"seed": secrets.randbelow(SEEDS)}
        left = max(1, self._engine.limits.room(len(ids)))
        room = min(left, self._max_tokens or left)
        (handle,) = self._engine.submit(self._engine.request(ids, room, name="messages", **settings))
        parser = AnswerParser(AnswerFormat.of(files.template_text, prompt, {}) or AnswerFormat(False, False))
        parts = {TEXT: "", REASONING: ""}

        def take(piece: str, *, last: bool = False) -> None:
            for kind, part in parser.push(piece, last=last):
                parts[kind] += part
                say(kind == REASONING, part)

        with suppress(KeyboardInterrupt):
            asyncio.run(_pieces(handle, take))
        handle.cancel()  # Ctrl-C again, while the first one was heeded, left it running
        done = handle.result()
        if done.stop_reason == "cancelled":
            take("", last=True)
        thought = {REASONING: parts[REASONING]} if parts[REASONING] else {}
        self.messages = [*messages, {"role": "assistant", "content": parts[TEXT], **thought}]
        return done


async def _pieces(handle: "RequestHandle", take: Any) -> None:
    """Gives the text of an answer as it comes; cancels the request where that is interrupted."""
    async with aclosing(handle.pieces()) as pieces:
        async for piece in pieces:
            take(piece.text, last=piece.completion is not None)


class Say:
    """Writes an answer on stdout. Thoughts are dim in a terminal; without one, they go to stderr."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._thought = False

    def __call__(self, thought: bool, text: str) -> None:
        """Writes a part of a thought, or of the answer."""
        if self._thought and not thought:
            click.echo(err=not self._terminal)
        self._thought = thought
        shown = printable(text.replace("\t", "    ")) if self._terminal else text
        click.echo(click.style(shown, dim=True) if self._terminal and thought else shown, nl=False, err=self._err)

    def end(self, done: "Completion") -> None:
        """Ends the line, and says how fast the answer came."""
        click.echo(err=self._err)
        self._thought = False
        seconds = (done.e2e_ms - done.ttft_ms) / 1000
        speed = f"{(len(done.token_ids) - 1) / seconds:.1f} tokens/s, " if seconds > 0 else ""
        cached = f", {done.cached_tokens} of {len(done.prompt_ids)} prompt tokens cached"
        ended = "" if done.stop_reason in ("eos", "stop") else f", ended by {done.stop_reason}"
        line = f"[{len(done.token_ids)} tokens, {speed}first after {done.ttft_ms / 1000:.2f} s{cached}{ended}]"
        click.echo(click.style(line, dim=True) if self._terminal else line, err=True)

    @property
    def _err(self) -> bool:
        return self._thought and not self._terminal


def talk(conversation: Conversation) -> None:
    """Answers lines until there are no more. In a terminal, what goes wrong with one ends nothing.

    Raises:
        Ling3Error: Without a terminal: a line has no answer.
    """
    asking, say = sys.stdin.isatty() and sys.stdout.isatty(), Say(sys.stdout.isatty())
    if asking:
        import readline  # noqa: F401 - gives input() its editing and its history

        click.echo("/help shows the commands.", err=True)
    while True:
        try:
            line = _line(asking)
            if line.startswith("/"):
                _obey(conversation, line)
            elif line.strip():
                done = conversation.answer(line, say)
                say.end(done)
                if done.stop_reason == "cancelled" and not asking:
                    raise KeyboardInterrupt
        except EOFError:
            click.echo(err=True, nl=asking)
            return
        except KeyboardInterrupt:
            if not asking:
                raise
            click.echo()
        except Ling3Error as error:
            if not asking or conversation.stopped:
                raise
            click.echo(f"error: {error}", err=True)


def _line(asking: bool) -> str:
    line = input("> " if asking else "")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("… " if asking else "")
    return line


def _obey(conversation: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/think" and rest in ("on", "off"):
        conversation.think = switch(rest)
    elif name == "/system":
        conversation.system(rest)
    elif name == "/save" and rest:
        conversation.save(Path(rest))
    elif name == "/help":
        click.echo(HELP, err=True)
    else:
        raise RequestError(f"command: expected /think on|off, /system TEXT, /save FILE or /help, found {line[:60]}")


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT)
@section(
    "Conversation",
    click.option("--system", default="", metavar="TEXT", help="System text, before the first turn."),
    click.option(
        "--think", type=switch, metavar="[on|off]", help="Think before an answer.  [default: as the chat template does]"
    ),
)
@section(
    "Answers",
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        help="Most tokens of one.  [default: what generation_config.json says, else what the context leaves]",
    ),
    *sampling_options(*TAKEN, seed="Seed of each answer's sampling.  [default: another each time]"),
)
@engine_options("target", "programs", "prefix_cache")
def chat(
    artifact: Path, engine: EngineConfig, system: str, think: bool | None, max_tokens: int | None, **settings: Any
) -> None:
    """Talk with ARTIFACT.

    In a terminal, /help shows the commands. Through a pipe, each line of stdin is a turn: stdout has the answers,
    stderr the thoughts and how fast each answer came.
    """
    named = given(click.get_current_context())
    from ling3export.runners.engine.engine import Engine
    from ling3export.runners.engine.validation import generation_defaults

    with Engine(artifact, engine) as running:
        if not running.files.chats:
            running.files.render_chat([])
        running.settle()
        defaults = generation_defaults(running.files.generation_config())
        limit = defaults.pop("max_new_tokens", None)
        settings |= {name: value for name, value in defaults.items() if name not in named}
        conversation = Conversation(
            running, seeded="seed" in named, max_tokens=max_tokens or limit, think=think, **settings
        )
        conversation.system(system)
        talk(conversation)
