"""Why trials failed: each failure in one group, the most telling first."""

from collections.abc import Sequence
from typing import Any

GROUPS = {
    "infra": "ended in an infrastructure error",
    "loop": "repeated itself: 3 times the same 20 tokens or more",
    "truncated": "ended at max_tokens or at the context's end",
    "early_eos": "ended by itself within 16 tokens, without an answer",
    "no_answer": "no answer found in the text",
    "wrong_answer": "an answer, but not the right one",
}
SHORTEST = 20  # tokens of a repeated piece
REPEATS = 3
EARLY = 16  # tokens
# A base model that is shown problems goes on with the next one: the last number then comes from that.
STOP_CANDIDATES = ("\nQuestion:", "</s>", "<|im_end|>")


def diagnose(records: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The failures of a run by group, as ``task_id`` or ``task_id#trial``; groups without any are left out."""
    groups: dict[str, list[str]] = {name: [] for name in GROUPS}
    for record in records:
        if not record["passed"]:
            groups[_group(record)].append(label(record))
    return {name: found for name, found in groups.items() if found}


def label(record: dict[str, Any]) -> str:
    """What reports call a trial."""
    return f"{record['task_id']}#{record['trial']}" if record["trial"] else str(record["task_id"])


def loops(ids: Sequence[int]) -> bool:
    """Whether a piece of SHORTEST tokens or more stands REPEATS times in a row."""
    import numpy as np  # on demand: the command line loads without it

    tokens = np.asarray(ids)
    for period in range(SHORTEST, len(ids) // REPEATS + 1):
        same = np.cumsum(tokens[period:] == tokens[:-period], dtype=np.int64)
        length = (REPEATS - 1) * period
        if (same[length - 1 :] - np.concatenate(([0], same[:-length])) == length).any():
            return True
    return False


def goes_on(text: str) -> bool:
    """Whether text stands behind a stop candidate."""
    places = [(text.find(stop), len(stop)) for stop in STOP_CANDIDATES]
    return any(place >= 0 and text[place + size :].strip() for place, size in places)


def _group(record: dict[str, Any]) -> str:
    if record["passed"] is None:
        return "infra"
    if loops(record["output_token_ids"]):
        return "loop"
    if record["stop_reason"] == "length":
        return "truncated"
    if record["answer"] is None:
        return "early_eos" if record["stop_reason"] == "eos" and record["n_output"] <= EARLY else "no_answer"
    return "wrong_answer"
