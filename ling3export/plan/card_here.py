"""Which NVIDIA card this machine has, as the kernel's driver says it: without jax, which would take the card."""

from pathlib import Path

from ling3export.errors import PlanError
from ling3export.plan.cards import CARDS

DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder a card, each with a file `information`
HERE = "here"  # stands where a TPU target has its topology: compiled, and autotuned, on the card itself


def kind_here(text: str, kind: str | None = None) -> str:
    """The kind of this machine's first card.

    Args:
        text: The target as the user wrote it.
        kind: The one that it must be; None takes any that is known.

    Raises:
        PlanError: There is no card, or it is another one; names both.
    """
    files = sorted(DRIVER.glob("*/information"))
    if not files:
        raise PlanError(
            f"target `{text}`: expected an NVIDIA card in this machine, found none in {DRIVER}",
            "cuda:h100 and cuda:h200 are compiled without one",
        )
    facts = dict(line.split(":", 1) for line in files[0].read_text().splitlines() if ":" in line)
    model = facts.get("Model", "").strip()
    found = next((known for known, card in CARDS.items() if card.name == model), None)
    if found is None or kind not in (None, found):
        wanted = ", ".join(card.name for known, card in CARDS.items() if kind in (None, known))
        raise PlanError(f"target `{text}`: expected a card that calls itself {wanted}, found `{model}` in {files[0]}")
    return found
