"""Tokenizer files with a chat template that adds little to the messages, for contexts of a few tokens."""

import json
from pathlib import Path

from ling3export.checkpoint.synth_tokenizer import CHAT_TEMPLATE, write_tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<role>' + ('HUMAN' if message['role'] == 'user' else message['role'] | upper) + '</role>' }}"
    "{{ message['content'] + '<|role_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)


def write_short(folder: Path, eos_token_id: int) -> None:
    """Writes tokenizer.json, and tokenizer_config.json with the template; the ids are those of ``write_tokenizer``."""
    write_tokenizer(folder, eos_token_id)
    (folder / CHAT_TEMPLATE.name).unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}, indent=2) + "\n")
