"""/tokenize, /detokenize and /tokenizer_info, as vLLM's servers have them."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ling3export.foundation.errors import shown
from ling3export.runners.serve.generation import Messages, conversation, refusing
from ling3export.runners.serve.schema import ApiError, Flag, Ids, ModelBody, TemplateBody, refusal, validated

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine


class TokenizeBody(TemplateBody):
    """The body of /tokenize."""

    prompt: Annotated[str | None, Field(description="a text")] = None
    messages: Messages | None = None
    add_special_tokens: Flag = True
    tools: Annotated[list[dict[str, Any]] | None, Field(description="a list of functions")] = None


class DetokenizeBody(ModelBody):
    """The body of /detokenize."""

    tokens: Annotated[Ids, Field(max_length=1 << 20, description="a list of token ids")]


def tokenize(body: dict[str, Any], engine: "Engine", model: str) -> dict[str, Any]:
    """The answer of /tokenize: the tokens of a text, or of messages as the chat template writes them.

    Raises:
        ApiError: The body is malformed, or the model has no tokenizer or chat template.
    """
    request = validated(TokenizeBody, {"model": model, **body}, model)
    if (request.prompt is None) == (request.messages is None):
        raise refusal("prompt", "it or `messages`", "both" if request.messages is not None else "none")
    name = "messages" if request.prompt is None else "prompt"
    with refusing(name):
        text, special = request.prompt or "", request.add_special_tokens
        if request.messages is not None:
            messages = conversation(request.messages)
            text = engine.files.render_chat(messages, tools=request.tools, **request.template_options)
            special = False
        ids = engine.prompt_ids(text, name, special=special) if text else ()
    return {"tokens": list(ids), "count": len(ids), "max_model_len": engine.limits.context}


def detokenize(body: dict[str, Any], engine: "Engine", model: str) -> dict[str, Any]:
    """The answer of /detokenize: the text of tokens, without special ones.

    Raises:
        ApiError: The body is malformed, or the model has no tokenizer.
    """
    request = validated(DetokenizeBody, {"model": model, **body}, model)
    most = engine.limits.vocab_size
    if wrong := [id for id in request.tokens if not 0 <= id < most]:
        raise refusal("tokens", f"token ids from 0 to {most - 1}", shown(wrong[0]))
    with refusing("tokens"):
        return {"prompt": engine.files.tokenizer("tokens").decode(request.tokens)}


def tokenizer_info(engine: "Engine") -> dict[str, Any]:
    """The answer of /tokenizer_info: the names of special tokens, and the chat template.

    Raises:
        ApiError: The model has no tokenizer.
    """
    if not engine.files.exist:
        raise ApiError(404, "this model has no tokenizer: it takes token ids", code="no_tokenizer")
    return {"eos_token": None, **engine.files.named_tokens, "chat_template": engine.files.template_text or None}
