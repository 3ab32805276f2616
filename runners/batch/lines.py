"""One line of a batch: OpenAI's batch format or a plain prompt on its way in, OpenAI's output format on its way out."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ling3export.foundation.errors import shown
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.engine.request import Completion
from ling3export.runners.engine.validation import SEEDS
from ling3export.runners.serve.app import GENERATING
from ling3export.runners.serve.generation import GenerationCall
from ling3export.runners.serve.schema import ApiError, refusal

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine

LONGEST = 8 << 20  # bytes of a line
COMPLETIONS, CHAT, RESPONSES, *_ = GENERATING
REQUEST = ("custom_id", "method", "url", "body")
PLAIN = {"prompt": COMPLETIONS, "prompt_ids": COMPLETIONS, "messages": CHAT}
MOST_PROMPTS = 256  # of one line
WANTED = "a request with custom_id, method, url and body, or one of prompt, prompt_ids and messages"


def is_answer(text: bytes, number: int, run: str) -> bool:
    """Whether a line of an output is the answer of the run with this id to the input's line with this number."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("id") == f"{run}_{number}"


class Line:
    """A line of the input, and the requests that it makes.

    Args:
        defaults: Fields that the line's body need not set.

    Attributes:
        refusal: The reason of a refusal.
        custom_id: The line's own name; ``line-7`` if it has none.
    """

    def __init__(self, number: int, text: bytes, engine: "Engine", model: str, defaults: Mapping[str, Any]) -> None:
        self.number, self._model = number, model
        self.custom_id = f"line-{number}"
        self.call: GenerationCall | None = None
        self.refusal: ApiError | None = None
        try:
            url, body = self._read(text)
            seed = {"seed": (defaults["seed"] + number) % SEEDS}  # not a random one: a run can be repeated
            fields = {"model": model, **defaults, **seed}
            if url == RESPONSES:
                fields["max_output_tokens"] = fields.pop("max_tokens")
            elif "max_completion_tokens" in body and "max_tokens" not in body:  # the newer name of max_tokens
                del fields["max_tokens"]
            self.call = self._checked(url, fields | body, engine, model)
        except ApiError as error:
            self.refusal = error

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
            return PLAIN[plain[0]], {"messages" if plain[0] == "messages" else "prompt": value[plain[0]]}
        if value.keys() != set(REQUEST) or not isinstance(value["body"], dict):
            fields = ", ".join(sorted(value)[:8]) or "no field"
            raise ApiError(400, f"line: expected {WANTED}, found {fields[:200]}", code="invalid_line")
        if value["method"] != "POST" or value["url"] not in [*GENERATING]:  # it may be a list
            target = f"{shown(value['method'])} {shown(value['url'])}"
            raise refusal("url", f'"POST" to one of {", ".join(GENERATING)}', target, "invalid_url")
        return value["url"], value["body"]

    def _checked(self, url: str, body: dict[str, Any], engine: "Engine", model: str) -> GenerationCall:
        read, self._form = GENERATING[url]
        call = read(body, engine, model, MOST_PROMPTS)
        if call.body.stream:
            raise refusal("stream", "false in a batch", "true")
        return call

    def answer(self, completions: Sequence[Completion], run: str) -> bytes:
        """The line of the output, with its line break: a completion for each request of ``call``."""
        name = f"{run}_{self.number}"
        if self.refusal is not None:
            status, body = self.refusal.status, self.refusal.body()
        else:
            assert self.call is not None
            status, body = 200, self._form(self.call, self._model).whole(completions) | {"id": name}
        response = {"status_code": status, "request_id": name, "body": body}
        record = {"id": name, "custom_id": self.custom_id, "response": response, "error": None}
        return json.dumps(record, ensure_ascii=True).encode() + b"\n"
