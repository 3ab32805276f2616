"""An artifact as a model of inspect-ai (extra ``inspect``): ``--model ling3/PATH``.

inspect finds this file through an entry point and imports it with any of its commands, so nothing heavy is imported
before a model is made. The engine batches the prompts of samples that run at the same time.
"""

import secrets
import time
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Completion, Sampling
from ling3export.runners.load.references import folder_of
from ling3export.runners.text.answer import REASONING, split_thought

NAME = "ling3"
MAX_TOKENS = 2000  # of an answer, if the task does not set it
ROLES = ("system", "user", "assistant")
# Settings that would change the answer; this model does not have them.
REFUSED = (
    "best_of",
    "extra_body",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "presence_penalty",
    "prompt_logprobs",
    "response_schema",
    "top_logprobs",
)


@modelapi(name=NAME)
class Ling3API(ModelAPI):
    """Greedy unless a temperature is set; an answer is at most 2,000 tokens unless ``max_tokens`` is set.

    Messages go through the checkpoint's chat template, and thoughts stand apart from answers, as in the server. If
    there is no template, a single user message is the text to complete. ``model_name``, or ``-M artifact=PATH``, is the
    artifact's folder or a reference of the catalogue.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        artifact: str | None = None,
        target: str | None = None,
        programs: str = "prebuilt-only",
        check: str = "all",
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        self.engine = Engine(folder_of(artifact or model_name), target=target, programs=programs, check=check)
        running = self.engine.manifest.targets[self.engine.target]
        self._rows = min(max(running.paddings("decode")), running.state.slots)

    def max_connections(self) -> int:
        """Number of sequences of one decode call."""
        return self._rows

    def connection_key(self) -> str:
        """The name by which inspect shares connections: each artifact has an engine of its own."""
        return self.model_name

    def max_tokens(self) -> int:
        """Most tokens of an answer, if the task does not set it."""
        return MAX_TOKENS

    async def count_text_tokens(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(await self.tokenize(text))

    async def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        return self.engine.files.tokenizer("inspect: text in").encode(text, special=False)

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Answers a conversation; RequestError for a setting that this model does not have."""
        if tools:
            raise RequestError(f"tools: `{tools[0].name}` cannot be called", "this model calls no tools")
        for name in REFUSED:
            if getattr(config, name, None):
                raise RequestError(f"setting `{name}`: expected it unset, found {getattr(config, name)!r}")
        if config.num_choices not in (None, 1):
            raise RequestError(f"setting `num_choices`: expected 1, found {config.num_choices}", "use epochs")
        temperature = config.temperature or 0.0
        seed = config.seed if config.seed is not None else secrets.randbits(32)
        sampling = Sampling(temperature, config.top_k or 0, 1.0 if config.top_p is None else config.top_p, seed)
        prompt, files = self._prompt(input), self.engine.files
        ids = self.engine.prompt_ids(prompt, "messages", special=not files.chats)
        request = self.engine.request(
            ids, config.max_tokens or MAX_TOKENS, sampling, stop=config.stop_seqs or (), name="messages"
        )
        started = time.monotonic()
        (handle,) = self.engine.submit(request)
        done = await handle.wait()
        parts = split_thought(done.text or "", files.template_text, prompt)
        return self._output(done, *parts, time.monotonic() - started)

    def _prompt(self, messages: list[ChatMessage]) -> str:
        for message in messages:
            if message.role not in ROLES or (
                not isinstance(message.content, str)
                and any(part.type not in ("text", "reasoning") for part in message.content)
            ):
                raise RequestError(
                    f"messages: expected text of {', '.join(ROLES)}, found other content, of {message.role}"
                )
        if self.engine.files.chats:
            return self.engine.files.render_chat([_spoken(message) for message in messages])
        if [message.role for message in messages] != ["user"]:
            raise RequestError(
                f"messages: expected a single user message, for the artifact has no chat template, "
                f"found {', '.join(message.role for message in messages)}",
                "build from a checkpoint that has a chat template",
            )
        return messages[0].text

    def _output(self, done: Completion, thought: str, text: str, seconds: float) -> ModelOutput:
        content = [ContentReasoning(reasoning=thought), ContentText(text=text)] if thought else text
        message: Any = ChatMessageAssistant(content=content, model=self.model_name, source="generate")
        whole = len(done.prompt_ids) + len(done.token_ids)
        cut = "model_length" if whole >= self.engine.limits.context else "max_tokens"
        reason: Any = cut if done.stop_reason == "length" else "stop"
        return ModelOutput(
            model=self.model_name,
            choices=[ChatCompletionChoice(message=message, stop_reason=reason)],
            usage=ModelUsage(input_tokens=len(done.prompt_ids), output_tokens=len(done.token_ids), total_tokens=whole),
            time=seconds,
        )


def _spoken(message: ChatMessage) -> dict[str, str]:
    """A message as chat templates take it."""
    parts = [] if isinstance(message.content, str) else message.content
    thought = "".join(part.reasoning for part in parts if isinstance(part, ContentReasoning))
    return {"role": message.role, "content": message.text} | ({REASONING: thought} if thought else {})
