"""What a device holds while one program runs, by its compiler's memory analysis. Imports no jax."""

from collections.abc import Mapping


def passing(memory: Mapping[str, int]) -> int:
    """Bytes that a step needs beside its arguments: temporaries, and outputs that reuse no donated buffer."""
    return memory["temporaries"] + memory["outputs"] - memory["alias"]


def peak_bytes(memory: Mapping[str, int]) -> int:
    """The most that a device holds while a program runs: its arguments, its code, and what passes."""
    return memory["arguments"] + memory["code"] + passing(memory)
