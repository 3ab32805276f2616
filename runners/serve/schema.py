"""Fields that bodies of all endpoints share, each with its check, and the error objects that refuse them.

A field's description is what the message about a wrong value says that it expected.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from ling3export.foundation.errors import shown
from ling3export.foundation.strict_json import DoubledKeyError, parse_json
from ling3export.runners.engine.validation import BIAS, BIASES, BOUNDS, PRIORITY, TOP_LOGPROBS

STOPS, STOP_LENGTH = 16, 1000
LEVELS = 128  # of objects and lists within each other
ELEMENTS = 1 << 16  # elements in a row of a body; as many as the context has tokens if more
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MESSAGES = "/v1/messages"  # of Anthropic's API, whose errors have another form and more kinds
ANTHROPIC_KINDS = KINDS | {413: "request_too_large", 503: "overloaded_error"}

# Fields of OpenAI's API that this server does not implement, and the values under which they ask for nothing.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True, False),  # where there are no tools
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False, True),  # nothing is stored
    "truncation": ("disabled",),
    "include": ([],),
    "service_tier": ("auto", "default"),
    "chat_template_kwargs": ({},),
    "length_penalty": (1, 1.0),
    **dict.fromkeys(("background", "use_beam_search"), (False,)),
    # vllm-router adds these to every request.
    **dict.fromkeys(("no_stop_trim", "early_stopping", "continue_final_message", "return_hidden_states"), (False,)),
    **dict.fromkeys(("spaces_between_special_tokens", "add_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (True, False)),
}
RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"}
# Fields that only label a request.
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})


class ApiError(Exception):
    """A request that is refused or that failed: the error object of OpenAI's API, with a status of HTTP."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self, path: str = "") -> dict[str, Any]:
        """The error object, in the form of the API that ``path`` belongs to."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        if path.startswith(MESSAGES):
            kind = ANTHROPIC_KINDS.get(self.status, other.replace("server", "api"))
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = KINDS.get(self.status, other)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(error: ApiError, path: str = "") -> Response:
    """The response that refuses a request for ``path``."""
    return json_response(error.body(path), error.status, error.headers)


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response in ASCII: what it repeats of the client may hold half a character, which has no UTF-8 form."""
    return Response(json.dumps(body), status, headers, "application/json")


def refusal(param: str, wanted: str, actual: str, code: str = "invalid_value", status: int = 400) -> ApiError:
    """The refusal of a field of the body."""
    return ApiError(status, f"`{param}`: expected {wanted}, found {actual}", param=param, code=code)


class JsonObject(BaseModel):
    """A JSON object whose fields are all known. A field that is null counts as one that is not there."""

    model_config = ConfigDict(strict=True)
    passed: ClassVar[frozenset[str]] = frozenset()  # names of fields that are kept and checked elsewhere
    labels: ClassVar[frozenset[str]] = frozenset()  # names of fields that change nothing
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}  # as NEUTRAL

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = {name: item for name, item in value.items() if item is not None}
        for name in [name for name in fields if name not in cls.model_fields and name not in cls.passed]:
            cls._refuse_unless_neutral(name, fields.pop(name))
        return fields

    @classmethod
    def _refuse_unless_neutral(cls, name: str, value: Any) -> None:
        if name in cls.labels:
            return
        if name not in cls.neutral:
            known = sorted({*cls.model_fields, *cls.passed})
            near = difflib.get_close_matches(name[:60], known, 3) or known
            raise refusal(name[:60], f"one of the fields {', '.join(near)}", "another", "unsupported_parameter")
        if repr(value) not in map(repr, cls.neutral[name]):  # by repr, since 1 equals True
            wanted = " or ".join(map(json.dumps, cls.neutral[name]))
            actual = f"{shown(value)}: not supported here"
            raise refusal(name, f"it left out or {wanted}", actual, "unsupported_parameter")


class ListedObject(JsonObject):
    """An object in a list of a body: a message about it says where in the list it stands."""

    @classmethod
    def _refuse_unless_neutral(cls, name: str, value: Any) -> None:
        # Escaped like a value: a name may hold half a character, which pydantic cannot take into an error.
        raise PydanticCustomError("unknown", "an unknown field", {"found": f"`{shown(name)[1:-1]}` {shown(value)}"})


def text_of_parts(content: Any, kinds: Sequence[str] = ("text",)) -> Any:
    """A message's content in one piece: its parts are joined if all of them are text, of one of these types."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = shown(part.get("type") if isinstance(part, dict) else part)
            context = {"wanted": "content of text alone", "found": f"a part of type {kind}"}
            raise PydanticCustomError("part", "a part that is no text", context)
    return "".join(part["text"] for part in content)


def _setting(name: str) -> Any:
    bounds = BOUNDS[name]
    above, least = (bounds.low, None) if bounds.above else (None, bounds.low)
    return Field(gt=above, ge=least, le=bounds.high, description=str(bounds))


def _biases(value: Any) -> Any:
    """An object of token ids as pairs: JSON has texts for names."""
    if not isinstance(value, dict):
        return value
    return [(int(name) if re.fullmatch(r"[0-9]{1,10}", name) else name, bias) for name, bias in value.items()]


MOST = (1 << 31) - 1
CHOICES = 128  # of one prompt
COUNT = f"a whole number from 1 to {MOST}"
Text = Annotated[str, Field(description="a text")]
Flag = Annotated[bool, Field(description="true or false")]
Count = Annotated[int | None, Field(ge=1, le=MOST, description=COUNT)]
TopLogprobs = Annotated[int, Field(ge=0, le=TOP_LOGPROBS.high, description=str(TOP_LOGPROBS))]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    Field(description='"none", "minimal", "low", "medium", "high", "xhigh" or "max"'),
]
Ids = Annotated[list[int], Field(fail_fast=True)]
TOOL_CHOICE = '"auto", "none", "required" or the name of a function of `tools`'
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]],
    Field(
        fail_fast=True,
        max_length=STOPS,
        description=f"a text or a list of at most {STOPS} texts of 1 to {STOP_LENGTH} characters",
    ),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class StreamOptions(JsonObject):
    """Additions to the pieces of a streamed answer."""

    include_usage: Flag = False
    include_obfuscation: Any = None


class ModelBody(JsonObject):
    """A body that names the model."""

    model: Text

    @field_validator("model")
    @classmethod
    def _served(cls, name: str, info: ValidationInfo) -> str:
        if name != info.context:
            raise refusal("model", shown(info.context), shown(name), "model_not_found", 404)
        return name


class GenerationBody(ModelBody):
    """The fields of /v1/completions and of chats: how tokens are sampled, and when answers end.

    Temperature, top_k and top_p have the defaults of OpenAI's API; ``prompt_name`` is the field that has the prompt.
    """

    labels, neutral = LABELS, NEUTRAL
    prompt_name: ClassVar[str]

    temperature: Annotated[float, _setting("temperature")] = 1.0
    top_p: Annotated[float, _setting("top_p")] = 1.0
    min_p: Annotated[float, _setting("min_p")] = 0.0
    top_k: Annotated[int, _setting("top_k"), BeforeValidator(lambda k: 0 if k == -1 else k)] = 0  # -1 as vLLM has it
    presence_penalty: Annotated[float, _setting("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, _setting("frequency_penalty")] = 0.0
    repetition_penalty: Annotated[float, _setting("repetition_penalty")] = 1.0
    logit_bias: Annotated[
        list[tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=BIAS.low, le=BIAS.high)]]],
        Field(max_length=BIASES, description=f"an object of at most {BIASES} token ids with {BIAS}"),
        BeforeValidator(_biases),
    ] = []
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64, description="a whole number of 64 bits")] = None
    structured_outputs: Any = None
    stop: Stops = []
    stop_token_ids: Annotated[list[int], Field(max_length=STOPS, description=f"at most {STOPS} token ids")] = []
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    min_tokens: Annotated[int, Field(ge=0, le=MOST, description=f"a whole number from 0 to {MOST}")] = 0
    priority: Annotated[int, Field(ge=PRIORITY.low, le=PRIORITY.high, description=str(PRIORITY))] = 0
    stream: Flag = False
    ignore_eos: Flag = False
    cache_salt: Text = ""
    max_tokens: Count = None
    max_completion_tokens: Count = None
    n: Annotated[int, Field(ge=1, le=CHOICES, description=f"a whole number from 1 to {CHOICES}")] = 1
    response_format: Annotated[
        dict[str, Any] | None, Field(description="an object with a type: text, json_object or json_schema")
    ] = None
    stream_options: Annotated[StreamOptions | None, Field(description="an object")] = None
    return_token_ids: Flag = False
    kv_transfer_params: Annotated[dict[str, Any] | None, Field(description="an object, as vLLM takes it")] = None

    top: ClassVar[Any]  # most likely tokens that are returned with each token; None without log-probabilities

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of an answer; None where the body does not say."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "it with `stream: true` only", "it without")
        if self.max_tokens == 0 and not getattr(self, "echo", False):
            raise refusal("max_tokens", COUNT, "0")
        one, other = self.max_tokens, self.max_completion_tokens
        if one is not None and other is not None and one != other:
            raise refusal("max_tokens", f"the same as `max_completion_tokens`, {other}", str(one))
        return self


class TemplateBody(ModelBody):
    """The fields of bodies that go through a chat template; vLLM's chats have them, too."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(description="an object")] = {}
    reasoning_effort: Effort = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_the_template(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(variables.keys() & RESERVED):
            raise refusal("chat_template_kwargs", "variables of the chat template's own", f"`{reserved[0]}`")
        return variables

    @property
    def template_options(self) -> dict[str, Any]:
        """The arguments of ``ChatTemplate.render``; variables of the body's own go first."""
        effort: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        effort |= {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return {
            "variables": effort | self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        both = self.continue_final_message and self.add_generation_prompt
        if both and "add_generation_prompt" in self.model_fields_set:
            raise refusal("add_generation_prompt", "false with `continue_final_message`", "true")
        return self


def parse(data: bytes, most: int = ELEMENTS) -> dict[str, Any]:
    """The JSON object of a body, with at most ``most`` elements in a row.

    Raises:
        ApiError: The body is no JSON object.
    """
    try:
        # Half a character is refused where it stands, by the field's name.
        body = parse_json(data, len(data), depth=LEVELS, most=most, halves=True)
    except DoubledKeyError as error:
        message = f"expected each key once, found {shown(error.key)} twice"
        raise ApiError(400, f"body: {message}", code="invalid_json") from None
    except ValueError as error:  # also for bytes that are no UTF-8, and for numbers of thousands of digits
        raise ApiError(400, f"body: expected JSON, found {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"body: expected an object, found {shown(body)}", code="invalid_json")
    return body


AnyBody = TypeVar("AnyBody", bound=ModelBody)
# Parts of the place of a wrong value that pydantic adds for the members of unions: they are no fields.
MEMBERS = frozenset("TEXT TEXTS IDS IDS_LISTS ITEMS str dict[str,any]".split())


def validated(kind: type[AnyBody], body: dict[str, Any], model: str) -> AnyBody:
    """A body that has the fields of ``kind``, which fit together.

    Raises:
        ApiError: A field is unknown, missing or wrong: what its description expects, what was found, at which place.
    """
    try:
        return kind.model_validate(body, context=model)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    param, *inner = (part for part in first["loc"] if part not in MEMBERS)
    info, value = kind.model_fields[str(param)], body.get(str(param))
    missing = first["type"] == "missing"
    actual, place = "none" if missing else shown(first["input"]), ""
    if inner and param == "stream_options":
        param, info = inner[0], StreamOptions.model_fields[str(inner[0])]
    elif inner and isinstance(value, list):
        number, *field = inner
        place = f" at place {number}"
        if field and isinstance(field[0], str):  # a message's
            actual = f"no `{field[0]}`" if missing else f"`{field[0]}` {actual}"
        elif field:
            actual = shown(value[int(number)])
    context = first.get("ctx", {})
    raise refusal(str(param), str(context.get("wanted", info.description)), f"{context.get('found', actual)}{place}")
