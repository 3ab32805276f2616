"""A model that writes a script token by token, served by the product's own engine and server.

Only the programs are replaced: the loader returns a runner without jax, and its "logits" select one token. So prompts,
pieces, grammars, endpoints and limits are the ones that users have.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import tokenizers
from msgspec.structs import replace

from ling3export.artifacts.manifest import file_record, read_manifest
from ling3export.checkpoint.synth_tokenizer import SPECIALS, write_tokenizer
from ling3export.runners.engine.engine import Engine
from ling3export.runners.load.loader import Loaded, Timings
from ling3export.runners.serve.app import Policy, application
from tests.support import toy_artifact
from tests.support.conversations import MARKS, TEMPLATE
from tests.support.fake_backend import FakeBackend
from tests.support.serving import serving

MODEL, CHAT, RESPONSES = "scripted", "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
EOS, VOCAB = 900, 928
SLOTS, PAGES, PAGE, CONTEXT, PREFILL = 4, 4096, 16, 16384, 2048
Script = Callable[[str], "str | Sequence[int]"]


class ScriptedRunner(FakeBackend):
    """Replaces a ``ModelRunner``. A row of logits holds the earlier tokens and the mask of the grammar.

    Args:
        script: Maps a prompt to the answer: text, written as one token for each byte, or token ids.
        tokenizer: Tokenizer of the prompts; their text has special tokens.

    Attributes:
        prompts: The prompt of each answer, as the model received it.
        refused: Tokens of the script that a grammar did not allow, as text, in order.
    """

    def __init__(self, script: Script, tokenizer: tokenizers.Tokenizer, chunk: int) -> None:
        super().__init__(SLOTS, PAGES, PAGE, chunk)
        self.script, self._tokenizer = script, tokenizer
        self.prompts: list[str] = []
        self.refused: list[str] = []
        self._left: dict[int, list[int]] = {}  # rest of the answer in each slot; no entry before its first token

    def step(self, phase: str, padding: int, fields: Mapping[str, np.ndarray]) -> list[Any]:
        rows = super().step(phase, padding, fields)
        if phase == "prefill":
            for slot in fields["chunk_slot"]:
                self._left.pop(int(slot), None)
        return rows

    def adjust(
        self,
        logits: list[Any],
        rows: int,
        fields: Mapping[str, np.ndarray],
        edits: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        token: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """Applies masks; log-probabilities are those of a model that is certain."""
        if token is not None:
            tops = np.tile(np.arange(20, dtype=np.int32), (rows, 1))
            tops[:, 0] = token
            return {"logprob": np.zeros(rows, np.float32), "top_token": tops, "top_logprob": np.zeros((rows, 20))}
        assert mask is not None
        masks = [np.unpackbits(row.view(np.uint8), bitorder="little") for row in mask]
        masked = [
            (row, allowed) if on else row for row, allowed, on in zip(logits, masks, fields["masked"], strict=True)
        ]
        return {"logits": masked}

    def sample(self, logits: list[Any], rows: int, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        tokens = np.zeros(rows, np.int32)
        for place, row in enumerate(logits):
            slot = int(fields["slot"][place])
            if slot:
                state, allowed = row if isinstance(row, tuple) else (row, None)
                tokens[place] = self.last_token[slot] = self._next(slot, state, allowed)
        return tokens

    def read(self, handle: Any) -> np.ndarray:
        return np.asarray(handle)

    def _next(self, slot: int, state: list[int], allowed: np.ndarray | None) -> int:
        if slot not in self._left:
            prompt = str(self._tokenizer.decode(state, skip_special_tokens=False))
            self.prompts.append(prompt)
            said = self.script(prompt)
            self._left[slot] = list(said.encode() if isinstance(said, str) else said)  # the id of a byte is its value
        left = self._left[slot]
        token = left[0] if left else EOS
        if allowed is not None and not allowed[token]:
            # Like a model, take the most likely token that the mask allows: the one that the script has a little later.
            self.refused.append(str(self._tokenizer.decode([token], skip_special_tokens=False)))
            skipped = next((at for at, later in enumerate(left[:8]) if allowed[later]), None)
            if skipped is None:
                return int(np.flatnonzero(allowed)[0])
            del left[:skipped]
            token = left[0]
        if left:
            del left[0]
        return token


def write_files(folder: Path, template: str = TEMPLATE, marks: str = "bytes") -> None:
    """Writes a tokenizer and a chat template.

    Args:
        folder: Output folder.
        template: The chat template.
        marks: ``bytes`` if the dialect's marks are spelled in bytes, ``added`` or ``special`` if each is a token.
    """
    write_tokenizer(folder, EOS)
    (folder / "chat_template.jinja").write_text(template)
    if marks != "bytes":
        file = str(folder / "tokenizer.json")
        tokenizer = tokenizers.Tokenizer.from_file(file)
        added = [tokenizers.AddedToken(mark, special=marks == "special", normalized=False) for mark in MARKS]
        tokenizer.add_tokens(added)
        tokenizer.save(file)


@contextmanager
def scripted(
    folder: Path, script: Script, *, template: str = TEMPLATE, marks: str = "bytes"
) -> Iterator[tuple[Engine, ScriptedRunner]]:
    """An engine whose model writes the answers of ``script``, and the model.

    The arguments are those of ``write_files``.
    """
    (folder / "tokenizer").mkdir()
    write_files(folder / "tokenizer", template, marks)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    records = tuple(file_record(folder, f"tokenizer/{file.name}") for file in sorted((folder / "tokenizer").iterdir()))
    manifest = read_manifest(toy_artifact.shared())
    (name,) = manifest.targets
    target = manifest.targets[name]
    state = replace(target.state, slots=SLOTS, pages=PAGES, page_size=PAGE, max_pages=CONTEXT // PAGE)
    cells = dict(target.cells)
    for rows in (PREFILL, PREFILL // state.chunk):
        for phase in ("prefill", "sample", "logits_processor"):
            like = cells["prefill@16" if phase == "prefill" else f"{phase}@1"]
            cells[f"{phase}@{rows}"] = replace(like, padding=rows)
    manifest = replace(
        manifest,
        plan=replace(manifest.plan, context=CONTEXT),
        config={"vocab_size": VOCAB, "eos_token_id": (EOS, EOS + SPECIALS["<|role_end|>"])},
        targets={name: replace(target, state=state, cells=cells)},
        tokenizer=records,
    )
    runner = ScriptedRunner(script, tokenizer, state.chunk)
    programs = SimpleNamespace(close=lambda: None, settle=lambda: None)
    compiles = SimpleNamespace(count=0)
    loaded: Any = Loaded(folder, manifest, name, runner, programs, {}, Timings(), compiles, 0)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ling3export.runners.engine.assembly.load", lambda *_, **__: loaded)
        engine = Engine(folder, report=lambda text: None)
    with engine:
        yield engine, runner


@contextmanager
def listening(engine: Engine, key: str | None = None, **policy: Any) -> Iterator[str]:
    """Serves an engine on loopback for third-party clients; returns the address.

    Args:
        engine: The engine.
        key: The API key that clients have to send.
        policy: Other fields of ``Policy``.
    """
    app = application(engine, Policy(MODEL, key, 64, 1 << 24, **policy))
    with serving(app) as (host, port):
        yield f"http://{host}:{port}"


def answers(engine: Engine, path: str, bodies: Sequence[dict[str, Any]]) -> list[httpx2.Response]:
    """Sends bodies to the application in this process, a few at once, and returns the answers."""

    async def all_of_them() -> list[httpx2.Response]:
        transport, few = (
            httpx2.ASGITransport(application(engine, Policy(MODEL, None, 64, 1 << 24))),
            asyncio.Semaphore(8),
        )
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:

            async def ask(body: dict[str, Any]) -> httpx2.Response:
                async with few:
                    return await client.post(path, json={"model": MODEL} | body)

            return await asyncio.gather(*map(ask, bodies))

    return asyncio.run(all_of_them())


class Lines:
    """A script that writes the queued texts in turn, or the text that the prompt names: ``answer 7``."""

    def __init__(self) -> None:
        self.texts: list[Any] = []

    def __call__(self, prompt: str) -> Any:
        named = re.findall(r"<role>HUMAN</role>answer (\d+)<", prompt)
        return self.texts[int(named[-1])] if named else self.texts.pop(0)


@dataclass
class Talk:
    """An engine whose model writes the text of each ``said`` call."""

    engine: Engine
    runner: ScriptedRunner
    lines: Lines

    def ask(self, text: Any, path: str = CHAT, **body: Any) -> Any:
        """Sends a request to a model that writes ``text``; returns the object, or the text of a stream."""
        self.lines.texts = [text]
        (found,) = answers(self.engine, path, [({"messages": HI} if path == CHAT else {"input": "Hi"}) | body])
        assert found.status_code == 200, found.text
        return found.text if body.get("stream") else found.json()

    def said(self, text: Any, **body: Any) -> dict[str, Any]:
        """The message in a chat's answer."""
        return dict(self.ask(text, **body)["choices"][0]["message"])

    def prompt(self, **body: Any) -> str:
        """The prompt that a request body becomes."""
        self.ask("", max_tokens=1, **body)
        return self.runner.prompts[-1]


@contextmanager
def talking(folder: Path, **how: str) -> Iterator[Talk]:
    """Starts a ``Talk``; the arguments are those of ``scripted``."""
    lines = Lines()
    with scripted(folder, lines, **how) as (engine, runner):
        yield Talk(engine, runner, lines)


def function_calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of a message's calls."""
    functions = [each["function"] for each in message.get("tool_calls") or []]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def streamed(text: str) -> tuple[dict[str, Any], str]:
    """The message that a stream's deltas add up to, and the finish reason. Each call must arrive once, complete."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[-1] is not None and not any(reasons[:-1])
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        for kind in ("content", "reasoning_content"):
            message[kind] += delta.get(kind) or ""
        for call in delta.get("tool_calls") or []:
            assert call["index"] == len(message["tool_calls"]) and call["type"] == "function" and call["id"]
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            message["tool_calls"].append(call)
    return message, reasons[-1]
