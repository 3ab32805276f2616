"""What a client may ask for: the bodies of the endpoints, each with one model that checks it whole.

A field's description is what the message about a wrong value says that it expected.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ling3export.foundation.strict_json import DoubledKeyError, parse_json
from ling3export.runners.engine.validation import BIAS, BIASES, BOUNDS, TOP_LOGPROBS

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Prompt

STOPS, STOP_LENGTH = 16, 1000
SHOWN = 60  # characters of a wrong value that a message repeats
LEVELS = 128  # of objects and lists within each other
ELEMENTS = (
    1 << 16
)  # objects and lists of a body, and elements in a row; as many as the context has tokens if those are more
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

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
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "include": ([],),
    "service_tier": ("auto", "default"),
    "min_p": (0, 0.0),
    "min_tokens": (0, 1),
    "priority": (0,),
    "chat_template_kwargs": ({},),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    # What vllm-router adds to every request.
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "continue_final_message": (False,),
    "return_hidden_states": (False,),
    "include_reasoning": (True, False),
    "separate_reasoning": (True, False),
    "stream_reasoning": (True, False),
}
# Fields that only label a request.
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})


class ApiError(Exception):
    """A request that is refused or that failed: the error object of OpenAI's API, with a status of HTTP.

    Args:
        status: The status.
        message: What was expected and what was found.
        param: The body's field that is wrong.
        code: A word that programs can look for.
        headers: Headers of the response.
    """

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
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error object."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = KINDS.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal(param: str, wanted: str, found: str, code: str = "invalid_value", status: int = 400) -> ApiError:
    """The refusal of a field of the body."""
    return ApiError(status, f"`{param}`: expected {wanted}, found {found}", param=param, code=code)


def shown(value: object) -> str:
    """A wrong value in a message: a short one itself, else what kind it is."""
    if value and isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


class _Object(BaseModel):
    """A JSON object whose fields are all known. A field that is null counts as one that is not there."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: each for name, each in value.items() if each is not None}
        for name in [name for name in given if name not in cls.model_fields]:
            cls._refuse_unless_neutral(name, given.pop(name))
        return given

    @classmethod
    def _refuse_unless_neutral(cls, name: str, value: Any) -> None:
        raise refusal(name[:SHOWN], "fields that this server knows", "another", "unsupported_parameter")


def _setting(name: str) -> Any:
    """The bounds of a sampling setting."""
    bounds = BOUNDS[name]
    least = (bounds.low, None) if bounds.above else (None, bounds.low)
    return Field(gt=least[0], ge=least[1], le=bounds.high, description=str(bounds))


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompt_kind(value: Any) -> str:
    """Which of the forms of a prompt a value has to have, by its first item."""
    if isinstance(value, str):
        return "TEXT"
    first = value[0] if isinstance(value, list) and value else None
    return "IDS" if type(first) is int else "IDS_LISTS" if isinstance(first, list) else "TEXTS"


def joined(content: Any, kinds: Sequence[str] = ("text",)) -> Any:
    """A message's content in one piece: its parts are joined if all of them are text, of one of these types."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = shown(part.get("type") if isinstance(part, dict) else part)
            found = {"wanted": "content of text alone", "found": f"a part of type {kind}"}
            raise PydanticCustomError("part", "a part that is no text", found)
    return "".join(part["text"] for part in content)


def _biases(value: Any) -> Any:
    """An object of token ids as pairs: JSON has texts for names."""
    if not isinstance(value, dict):
        return value
    return [(int(name) if re.fullmatch(r"[0-9]{1,10}", name) else name, bias) for name, bias in value.items()]


MOST = (1 << 31) - 1
CHOICES = 128  # of one prompt
Text = Annotated[str, Field(description="a text")]
Flag = Annotated[bool, Field(description="true or false")]
Count = Annotated[int | None, Field(ge=1, le=MOST, description=f"a whole number from 1 to {MOST}")]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]],
    Field(
        fail_fast=True,
        max_length=STOPS,
        description=f"a text or a list of at most {STOPS} texts of 1 to {STOP_LENGTH} characters",
    ),
    BeforeValidator(_one_or_many),
]
Ids = Annotated[list[int], Field(fail_fast=True)]
FORMS = {"TEXT", "TEXTS", "IDS", "IDS_LISTS", "str", "dict[str,any]"}
ITEMS = {"message": "MESSAGE", "function_call": "CALL", "function_call_output": "OUTPUT", "reasoning": "REASONING"}
FORMS |= {"ITEMS", *ITEMS.values()}


class Inner(_Object):
    """An object in a list of a body: a message about it says where in the list it stands."""

    @classmethod
    def _refuse_unless_neutral(cls, name: str, value: Any) -> None:
        # Escaped like a value: a name may hold half a character, which pydantic cannot take into an error.
        raise PydanticCustomError("unknown", "an unknown field", {"found": f"`{shown(name)[1:-1]}` {shown(value)}"})


class Message(Inner):
    """A message of a conversation, its content joined from its parts. A message with tool calls needs no content."""

    role: str
    content: Annotated[str, BeforeValidator(joined)]
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _spoken(cls, value: Any) -> Any:
        silent = isinstance(value, dict) and value.get("tool_calls") and value.get("content") is None
        return {**value, "content": ""} if silent else value

    @field_validator("role")
    @classmethod
    def _developer(cls, role: str) -> str:
        return "system" if role == "developer" else role


class StreamOptions(_Object):
    """What a stream has beside the pieces of the answer."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Any = None


class _Served(_Object):
    """A body that may name the model."""

    model: Text

    @field_validator("model")
    @classmethod
    def _served(cls, name: str, info: ValidationInfo) -> str:
        if name != info.context:
            raise refusal("model", shown(info.context), shown(name), "model_not_found", 404)
        return name


class Sampled(_Served):
    """What all endpoints take: how tokens are taken, and when they end. Temperature, top_k and top_p have the defaults
    of OpenAI's API.
    """

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = NEUTRAL

    temperature: Annotated[float, _setting("temperature")] = 1.0
    top_p: Annotated[float, _setting("top_p")] = 1.0
    top_k: Annotated[int, _setting("top_k")] = 0
    presence_penalty: Annotated[float, _setting("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, _setting("frequency_penalty")] = 0.0
    repetition_penalty: Annotated[float, _setting("repetition_penalty")] = 1.0
    logit_bias: Annotated[
        list[tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=BIAS.low, le=BIAS.high)]]],
        Field(max_length=BIASES, description=f"an object of at most {BIASES} token ids with {BIAS}"),
        BeforeValidator(_biases),
    ] = []
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64, description="a whole number of 64 bits")] = None
    guided_regex: Annotated[str | None, Field(description="a regex")] = None
    guided_grammar: Annotated[str | None, Field(description="a grammar in Lark's form")] = None
    stop: Stops = []
    stream: Flag = False
    ignore_eos: Flag = False
    cache_salt: Text = ""

    @classmethod
    def _refuse_unless_neutral(cls, name: str, value: Any) -> None:
        if name in LABELS:
            return
        if name not in cls.neutral:
            super()._refuse_unless_neutral(name, value)
        if repr(value) not in map(repr, cls.neutral[name]):  # by repr, since 1 equals True
            wanted = " or ".join(json.dumps(each) for each in cls.neutral[name])
            found = f"{shown(value)}: not supported here"
            raise refusal(name, f"it left out or {wanted}", found, "unsupported_parameter")


class Body(Sampled):
    """The fields that both /v1/completions and /v1/chat/completions take."""

    max_tokens: Count = None
    max_completion_tokens: Count = None
    n: Annotated[int, Field(ge=1, le=CHOICES, description=f"a whole number from 1 to {CHOICES}")] = 1
    response_format: Annotated[
        dict[str, Any] | None, Field(description="an object with a type: text, json_object or json_schema")
    ] = None
    stream_options: Annotated[StreamOptions | None, Field(description="it with `stream` only, and an object")] = None
    return_token_ids: Flag = False
    kv_transfer_params: Annotated[dict[str, Any] | None, Field(description="an object, as vLLM's servers take it")] = (
        None
    )


class CompletionsBody(Body):
    """The body of /v1/completions."""

    max_tokens: Annotated[int | None, Field(ge=0, le=MOST, description=f"a whole number from 1 to {MOST}")] = None
    echo: Flag = False
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=TOP_LOGPROBS.high, description=str(TOP_LOGPROBS)),
        BeforeValidator(lambda value: None if value is False else value),
    ] = None
    prompt: Annotated[
        Annotated[str, Tag("TEXT")]
        | Annotated[list[str], Field(fail_fast=True, min_length=1), Tag("TEXTS")]
        | Annotated[Ids, Tag("IDS")]
        | Annotated[list[Ids], Field(fail_fast=True), Tag("IDS_LISTS")],
        Discriminator(_prompt_kind),
        Field(description="a text, a list of texts, a list of token ids or a list of lists of token ids"),
    ]

    @property
    def prompts(self) -> "list[Prompt]":
        """The prompts, each a text or a list of token ids."""
        one = _prompt_kind(self.prompt) in ("TEXT", "IDS")
        return cast("list[Prompt]", [self.prompt] if one else self.prompt)


Messages = Annotated[
    list[Message],
    Field(fail_fast=True, min_length=1, description='a list of messages, [{"role": TEXT, "content": TEXT}, ...]'),
]


ToolChoice = Annotated[
    str | dict[str, Any], Field(description='"auto", "none", "required" or the name of a function of `tools`')
]


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS.high, description=str(TOP_LOGPROBS))] = 0
    tools: Annotated[
        list[dict[str, Any]], Field(max_length=CHOICES, description=f"a list of at most {CHOICES} functions")
    ] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: Flag = True
    messages: Messages


class TokenizeBody(_Served):
    """The body of /tokenize."""

    prompt: Annotated[str | None, Field(description="a text")] = None
    messages: Messages | None = None
    add_special_tokens: Flag = True
    add_generation_prompt: Flag = True


class DetokenizeBody(_Served):
    """The body of /detokenize."""

    tokens: Annotated[Ids, Field(max_length=1 << 20, description="a list of token ids")]


def parse(data: bytes, most: int = ELEMENTS) -> dict[str, Any]:
    """The JSON object of a body.

    Args:
        data: The body.
        most: Lists and objects that it may have, and elements in a row.

    Raises:
        ApiError: The body is no JSON object.
    """
    try:
        # Half a character is refused where it stands, by the field's name.
        body = parse_json(data, len(data), depth=LEVELS, most=most, halves=True)
    except DoubledKeyError as error:
        raise ApiError(
            400, f"body: expected each key once, found {shown(error.key)} twice", code="invalid_json"
        ) from None
    except ValueError as error:  # also for bytes that are no UTF-8, and for numbers of thousands of digits
        raise ApiError(400, f"body: expected JSON, found {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"body: expected an object, found {shown(body)}", code="invalid_json")
    return body


AnyObject = TypeVar("AnyObject", bound=_Object)
AnyBody = TypeVar("AnyBody", bound=Body)


def validated(kind: type[AnyObject], body: dict[str, Any], model: str) -> AnyObject:
    """A body that has the fields of ``kind``.

    Raises:
        ApiError: A field is unknown, missing or wrong.
    """
    try:
        return kind.model_validate(body, context=model)
    except ValidationError as error:
        raise _named(error, kind, body) from None


def checked(kind: type[AnyBody], body: dict[str, Any], model: str) -> AnyBody:
    """A body that has the fields of ``kind``, and whose fields fit together."""
    asked = validated(kind, body, model)
    if asked.stream_options is not None and not asked.stream:
        wanted = kind.model_fields["stream_options"].description
        raise refusal("stream_options", str(wanted), shown(body["stream_options"]))
    if asked.max_tokens == 0 and not getattr(asked, "echo", False):
        raise refusal("max_tokens", str(Body.model_fields["max_tokens"].description), "0")
    one, other = asked.max_tokens, asked.max_completion_tokens
    if one is not None and other is not None and one != other:
        raise refusal("max_tokens", f"the same as `max_completion_tokens`, {other}", str(one))
    return asked


def _named(error: ValidationError, kind: type[BaseModel], body: dict[str, Any]) -> ApiError:
    """The refusal for a body's first wrong field: what its description expects, what was found, at which place."""
    first = error.errors(include_url=False)[0]
    param, *inner = (part for part in first["loc"] if part not in FORMS)
    info, given = kind.model_fields[str(param)], body.get(str(param))
    missing = first["type"] == "missing"
    found, place = "none" if missing else shown(first["input"]), ""
    if inner and param == "stream_options":
        param, info = inner[0], StreamOptions.model_fields[str(inner[0])]
    elif inner and isinstance(given, list):
        number, *field = inner
        place = f" at place {number}"
        if field and isinstance(field[0], str):  # a message's
            found = f"no `{field[0]}`" if missing else f"`{field[0]}` {found}"
        elif field:
            found = shown(given[int(number)])
    context = first.get("ctx", {})
    return refusal(str(param), str(context.get("wanted", info.description)), f"{context.get('found', found)}{place}")
