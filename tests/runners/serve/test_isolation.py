"""A fault or delay at any place while a call is read, checked, built, parsed, streamed or ended affects only that call.

The places are found by watching calls, not listed: every function of the server and of its text modules that handles a
call. So new functions are tested, too.
"""

import asyncio
import inspect
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import httpx2
import pytest

from ling3export.runners.engine.engine import Engine
from ling3export.runners.serve.app import Policy, application
from tests.support.rooms import PACKAGE
from tests.support.scripted import CHAT, HI, MODEL, RESPONSES, scripted

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="functions are found by sys.monitoring")
ROOMS = tuple(str((PACKAGE / "runners" / name).resolve()) + "/" for name in ("serve", "text"))
PLACES = {  # places that must be among those found
    "parse", "validated", "completions", "chat", "TranslatedBody.call", "generation", "Grammars.check",
    "Tokenizer.encode", "TokenizerFiles.render_chat", "TextStream.push", "AnswerParser.push", "ChoicesAnswer.piece",
    "ChoicesAnswer.whole", "event", "events",
}  # fmt: skip
OWN = ("ChoicesAnswer", "ResponsesAnswer", "AnswerParser", "TextStream")  # objects that belong to one call
MINE = "Z"  # part of all data of the failing call, and of no other data
WEATHER = {"type": "function", "function": {"name": "Zf", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = "<tool_call>Zf\n<arg_key>a</arg_key>\n<arg_value>Z</arg_value>\n</tool_call>"
SAYING = {"messages": [{"role": "user", "content": "Z"}], "max_tokens": 90}
COMPLETIONS = "/v1/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Z", "echo": True, "logprobs": 1, "max_tokens": 9, "stop": ["Zq"]}),
    (COMPLETIONS, {"prompt": "Z", "stream": True, "max_tokens": 9, "n": 2, "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"prompt": "Z", "max_tokens": 9, "structured_outputs": {"regex": "Z{3}"}}),
    (CHAT, SAYING | {"tools": [WEATHER]}),
    (CHAT, SAYING | {"tools": [WEATHER], "stream": True, "logprobs": True, "top_logprobs": 2}),
    (CHAT, SAYING | {"response_format": {"type": "json_schema", "json_schema": {"name": "Z", "schema": {}}}}),
    (RESPONSES, {"input": "Z", "max_output_tokens": 90, "stream": True}),
    (RESPONSES, {"input": "Z", "max_output_tokens": 90}),
    ("/tokenize", {"prompt": "Z"}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "one", "max_tokens": 12}),
    (CHAT, {"messages": HI, "max_tokens": 12, "stream": True}),
]


def script(prompt: str) -> str:
    return f"ZZ</think>Z {CALL} Z" if MINE in prompt else "the same text as ever"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with scripted(tmp_path_factory.mktemp("isolated"), script) as (engine, _):
        yield engine


class Watch:
    """Calls back when a function of ROOMS begins with MINE in one of its arguments.

    Args:
        told: Called with the function's code, in any thread; its exception is raised in the function.
        code: The only function to watch; None for all.
    """

    def __init__(self, told: Callable[[CodeType], None], code: CodeType | None = None) -> None:
        self._told, self._code = told, code

    def __enter__(self) -> None:
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.DEBUGGER_ID, "isolation")
        monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.PY_START, self._begins)
        if self._code is None:
            monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.PY_START)
        else:
            monitoring.set_local_events(monitoring.DEBUGGER_ID, self._code, monitoring.events.PY_START)

    def __exit__(self, *_: object) -> None:
        monitoring = sys.monitoring
        monitoring.set_events(monitoring.DEBUGGER_ID, 0)
        if self._code is not None:
            monitoring.set_local_events(monitoring.DEBUGGER_ID, self._code, 0)
        monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.PY_START, None)
        monitoring.free_tool_id(monitoring.DEBUGGER_ID)

    def _begins(self, code: CodeType, offset: int) -> Any:
        if self._code is None and not str(Path(code.co_filename).resolve()).startswith(ROOMS):
            return sys.monitoring.DISABLE
        here = inspect.currentframe()
        assert here is not None and here.f_back is not None
        if any(map(is_mine, here.f_back.f_locals.values())):
            self._told(code)
        return None


def is_mine(value: Any) -> bool:
    """Whether an argument contains MINE, directly or in an answer or parser that belongs to one call."""
    if not type(value).__module__.startswith(("builtins", "ling3export")):  # a tokenizer prints its vocabulary
        return False
    if type(value).__name__ in OWN:
        return any(map(is_mine, vars(value).values()))
    return MINE in repr(value)


async def asked(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, str]:
    found = await client.post(path, json={"model": MODEL} | body)
    return found.status_code, found.text


NAMES = r'"(id|created|created_at|item_id|call_id|completed_at)": ?("[^"]*"|[\d.]+)'


def essence(text: str) -> dict[Any, str]:
    """The content of an answer, independent of the chunks of its stream, of ids and of times."""
    if not text.startswith(("data: ", "event: ")):
        return {"whole": re.sub(NAMES, "", text)}
    said: dict[Any, str] = defaultdict(str)
    for line in re.findall(r"^data: (\{.*)$", text, re.MULTILINE):
        found = json.loads(line)
        if isinstance(found.get("delta"), str):
            said[found["type"]] += found["delta"]
        for choice in found.get("choices", ()):
            parts = {"text": choice.get("text")} | choice.get("delta", {}) | {"reason": choice["finish_reason"]}
            for kind, part in parts.items():
                said[choice["index"], kind] += (
                    re.sub(NAMES, "", json.dumps(part)) if part and kind == "tool_calls" else part or ""
                )
        said["error"] += str(found.get("error") or "")
    return dict(said)


def with_clients(engine: Engine, use: Callable[[httpx2.AsyncClient], Any]) -> Any:
    async def main() -> Any:
        app = application(engine, Policy(MODEL, None, 64, 1 << 24))
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await use(client)

    return asyncio.run(main())


async def found_places(client: httpx2.AsyncClient) -> dict[CodeType, int]:
    """Every place that a call reaches, and the first of BODIES that reaches it."""
    places: dict[CodeType, int] = {}
    for number, (path, body) in enumerate(BODIES):
        with Watch(lambda code, number=number: places.setdefault(code, number)):  # type: ignore[misc]
            status, text = await asked(client, path, body)
        assert status == 200, text
    return places


def fail(code: CodeType) -> None:
    raise IndexError(f"mine: {code.co_qualname}")


def delay(code: CodeType) -> None:
    time.sleep(0.003)


@pytest.mark.parametrize("fault", [fail, delay])
def test_a_fault_at_any_place_of_one_call_leaves_the_others_as_they_are(engine, fault):
    async def main(client: httpx2.AsyncClient) -> None:
        before = [await asked(client, *each) for each in OTHERS]
        whole = [await asked(client, *each) for each in BODIES]
        places = await found_places(client)
        names = {code.co_qualname for code in places}
        assert names >= PLACES, sorted(PLACES - names)
        failed = 0
        for code, number in places.items():
            with Watch(fault, code):
                (status, text), *others = await asyncio.gather(
                    *(asked(client, *each) for each in (BODIES[number], *OTHERS))
                )
            where = f"{code.co_qualname} at {BODIES[number]}"
            for (old, was), (new, text_of_other) in zip(before, others, strict=True):
                assert (new, essence(text_of_other)) == (old, essence(was)), where
            same = status == 200 and essence(text) == essence(whole[number][1])
            assert fault is fail or same, where
            failed += not same
            assert engine.stopped is None, where
            for _ in range(200):  # a failed call is cancelled in the engine's next step
                if not engine.stats()["live"]:
                    break
                await asyncio.sleep(0.01)
            stats = engine.stats()
            assert (stats["live"], stats["free"]) == (0, stats["pools"]), where
        assert failed == 0 if fault is delay else failed > len(places) / 2

    with_clients(engine, main)
