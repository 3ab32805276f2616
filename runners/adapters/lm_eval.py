"""An artifact as a model of lm-evaluation-harness (extra ``lm-eval``), under the name ``ling3``.

lm-eval finds no models of other packages by itself: ``ling3-runner lm-eval`` is its command line with this model added.
All requests of a task go to the engine at once, which packs them, so lm-eval's batch size has no effect.
"""

import hashlib
import logging
from typing import Any

import lm_eval.models  # first: lm-eval adds its own models only while there are none
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.load.references import folder_of
from ling3export.runners.text.answer import split_thought

NAME = "ling3"
MAX_GEN_TOKS = 256  # lm-eval's own default
SETTINGS = {"do_sample", "max_gen_toks", "temperature", "top_k", "top_p", "until"}

logger = logging.getLogger(__name__)
assert lm_eval.models.MODEL_MAPPING


@register_model(NAME)
class Ling3Model(TemplateLM):
    """``--model ling3 --model_args artifact=PATH``; scoring needs an artifact that was built with score programs.

    A text that is longer than the artifact's context loses its beginning, with a warning, like in lm-eval's own models.

    Args:
        artifact: The artifact's folder, or a reference of the catalogue, which is pulled into LING3_STORE.
        max_gen_toks: Most tokens of an answer, if a task does not set it.
        seed: For tasks that sample; the seed of each request of a call follows from it.
        batch_size, max_batch_size, device: Unused; lm-eval always passes them.
    """

    def __init__(
        self,
        artifact: str,
        target: str | None = None,
        programs: str = "prebuilt-only",
        check: str = "all",
        max_gen_toks: int = MAX_GEN_TOKS,
        seed: int = 0,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
    ) -> None:
        super().__init__()
        self.engine = Engine(folder_of(artifact), target=target, programs=programs, check=check)
        self.max_gen_toks, self._seed, self._chats = max_gen_toks, seed, False
        self._encode = self.engine.files.tokenizer("lm-eval: text in").encode
        limits = self.engine.limits
        self.max_length = min(limits.context, limits.pages * limits.page_size)

    @property
    def eot_token_id(self) -> int:
        """The first end-of-text id of the checkpoint's configuration. Rolling scores begin after it."""
        return self.engine.manifest.eos_token_ids[0]

    @property
    def tokenizer_name(self) -> str:
        """The name by which lm-eval's caches tell tokenizers apart."""
        return f"{NAME}-{(self.engine.manifest.sha256 or '')[:16]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """The token ids of a text, with the tokenizer's own special tokens unless they are declined."""
        return self._encode(string, special=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """A name of the chat template for lm-eval's records, if there is one; ``apply_chat_template`` renders it."""
        return self.tokenizer_name if chat_template and self.engine.files.chats else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text that the checkpoint's chat template makes of a conversation."""
        self._chats = True
        return self.engine.files.render_chat(
            chat_history, add_generation_prompt=add_generation_prompt, name="lm-eval: chat"
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text of each answer, without the string that ended it, and without a thought if messages are the prompt.

        Raises:
            RequestError: A task has a setting that is none of SETTINGS.
        """
        texts = []
        for request, done in zip(requests, self.engine.complete(self._requests(requests)), strict=True):
            text, template = done.text or "", self.engine.files.template_text
            texts.append(split_thought(text, template, request.args[0])[1] if self._chats else text)
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, each after an end-of-text token; long ones in windows of the context."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1):
                pairs.append(make_disjoint_window(window))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, score in zip(owners, self.engine.score(pairs), strict=True):
            sums[number] += score.logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        pairs = []
        for (context, continuation), first, second in requests:
            if not second or len(second) >= self.max_length:
                raise RequestError(
                    f"continuation {continuation[:60]!r}: expected 1 to {self.max_length - 1} tokens, "
                    f"found {len(second)}, after {context[-60:]!r}"
                )
            pairs.append((self._cut(first, self.max_length - len(second)), second))
        answers = [(score.logprob, score.is_greedy) for score in self.engine.score(pairs)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def _requests(self, requests: list[Any]) -> list[Request]:
        made = []
        for number, request in enumerate(requests):
            context, arguments = request.args
            settings: dict[str, Any] = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
            if unknown := sorted(set(settings) - SETTINGS):
                raise RequestError(
                    f"generation setting `{unknown[0]}`: expected one of {', '.join(sorted(SETTINGS))}, "
                    f"found {settings[unknown[0]]!r}, in task {request.task_name}",
                    "leave it out of the task's generation_kwargs, or override them with --gen_kwargs",
                )
            if not 0 < settings["max_gen_toks"] < self.max_length:
                raise RequestError(
                    f"max_gen_toks: expected 1 to {self.max_length - 1}, so that a context fits with the answer, "
                    f"found {settings['max_gen_toks']}, in task {request.task_name}",
                    "override it: --gen_kwargs max_gen_toks=N, or build the artifact with a larger --context",
                )
            seed = hashlib.sha256(f"{self._seed}|{number}".encode()).digest()[:4]
            temperature = settings.get("temperature", 1.0 if settings["do_sample"] else 0.0)
            sampling = Sampling(
                temperature, settings.get("top_k", 0), settings.get("top_p", 1.0), int.from_bytes(seed, "little")
            )
            ids = self._cut(self.tok_encode(context), self.max_length - settings["max_gen_toks"])
            stops = tuple(settings["until"])
            made.append(Request(tuple(ids), settings["max_gen_toks"], sampling, stops, name=f"request {number}"))
        return made

    def _cut(self, ids: list[int], room: int) -> list[int]:
        if len(ids) > room:
            logger.warning("a context of %d tokens is cut to its last %d", len(ids), room)
        return ids[-room:]


def main() -> None:
    """Runs lm-eval's command line, which now has the model ``ling3``."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
