"""One line of a batch: OpenAI's batch format or a plain prompt on its way in, OpenAI's output format on its way out."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ling3export.foundation.strict_json import parse_json
from ling3export.runners.engine.request import Completion
from ling3export.runners.engine.validation import SEEDS
from ling3export.runners.serve.app import GENERATING
from ling3export.runners.serve.completions import GenerationCall
from ling3export.runners.serve.schema import ApiError, refusal, shown

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine

LONGEST = 8 << 20  # bytes of a line
COMPLETIONS, CHAT, RESPONSES = GENERATING
REQUEST = ("custom_id", "method", "url", "body")
PLAIN = {"prompt": COMPLETIONS, "prompt_ids": COMPLETIONS, "messages": CHAT}
MOST_PROMPTS = 256  # of one line
WANTED = "a request with custom_id, method, url and body, or one of prompt, prompt_ids and messages"


def answer_id(run: str, number: int) -> str:
    """The id of the answer to the line with this number, of the run that begins so."""
    return f"batch_req_{run}_{number}"


def is_answer(text: bytes, number: int, run: str) -> bool:
    """Whether a line of the output is this run's answer to the line of the input with this number."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("id") == answer_id(run, number)


class Line:
    """A line that was read, and what the engine is asked for it.

    Args:
        number: Its place in the input, from 0.
        text: Its bytes.
        engine: What is to answer.
        model: The name of the model, which a body may leave out.
        defaults: Fields of a body that the line does not say.

    Attributes:
        call: What the engine is asked; None where the line is refused.
        refused: Why, and None where it is not.
        custom_id: The line's own name; ``line-7`` where it has none.
    """

    def __init__(self, number: int, text: bytes, engine: "Engine", model: str, defaults: Mapping[str, Any]) -> None:
        self.number, self._model = number, model
        self.custom_id = f"line-{number}"
        self.call: GenerationCall | None = None
        self.refused: ApiError | None = None
        try:
            url, body = self._read(text)
            seed = {"seed": (defaults["seed"] + number) % SEEDS}  # not a random one: a run can be repeated
            given = {"model": model, **defaults, **seed}
            if url == RESPONSES:
                given["max_output_tokens"] = given.pop("max_tokens")
            elif "max_completion_tokens" in body and "max_tokens" not in body:  # a newer name of the same
                del given["max_tokens"]
            given |= body
            self.call = self._checked(url, given, engine, model)
        except ApiError as error:
            self.refused = error

    def _read(self, text: bytes) -> tuple[str, dict[str, Any]]:
        try:
            value = parse_json(text, LONGEST)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"line: expected JSON, found {error}", code="invalid_json") from None
        if not isinstance(value, dict):
            raise ApiError(400, f"line: expected {WANTED}, found {shown(value)}", code="invalid_line")
        if isinstance(value.get("custom_id"), str):
            self.custom_id = value["custom_id"]
        plain = [field for field in PLAIN if field in value]
        if len(plain) == 1 and value.keys() <= {plain[0], "custom_id"}:
            asked = value[plain[0]]
            return PLAIN[plain[0]], {"messages" if plain[0] == "messages" else "prompt": asked}
        if value.keys() != set(REQUEST) or not isinstance(value["body"], dict):
            fields = ", ".join(sorted(value)[:8]) or "no field"
            raise ApiError(400, f"line: expected {WANTED}, found {fields[:200]}", code="invalid_line")
        if value["method"] != "POST" or value["url"] not in [*GENERATING]:  # it may be a list
            found = f"{shown(value['method'])} {shown(value['url'])}"
            raise refusal("url", f'"POST" to one of {", ".join(GENERATING)}', found, "invalid_url")
        return value["url"], value["body"]

    def _checked(self, url: str, body: dict[str, Any], engine: "Engine", model: str) -> GenerationCall:
        read, self._form = GENERATING[url]
        call = read(body, engine, model, MOST_PROMPTS)
        if call.body.stream:
            raise refusal("stream", "false in a batch", "true")
        return call

    def answer(self, completions: Sequence[Completion], run: str) -> bytes:
        """The line of the output, with its line break.

        Args:
            completions: One for each request of ``call``.
            run: Names the run; with the line's number it is the answer's id.
        """
        name = answer_id(run, self.number)
        if self.refused is not None:
            status, body = self.refused.status, self.refused.body()
        else:
            assert self.call is not None
            status, body = 200, self._form(self.call, self._model).whole(completions) | {"id": name}
        response = {"status_code": status, "request_id": name, "body": body}
        record = {"id": name, "custom_id": self.custom_id, "response": response, "error": None}
        return json.dumps(record, ensure_ascii=True).encode() + b"\n"
