"""What a command says on stderr at a start."""

import re


def unpromised(text: str) -> str:
    """Without the line that says until when portable programs are read: it holds today's date."""
    return re.sub(r"^portable programs: .*\n", "", text, flags=re.M)
