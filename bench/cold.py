"""The first token of a cold process beside reading what it touched: nothing of the artifact is in memory before.

Pages that are in memory afterwards are what the start touched, and what the system read ahead of it. They are read
again in the order in which they lie, once cold and once from memory.
"""

import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.inputs import ROOT
from bench.report import machine, say, show, table

PROMPT = ",".join(map(str, range(40, 57)))  # 17 tokens
PIECE = 1 << 24
CHECKS = ("programs", "all")


def forget(files: list[Path]) -> None:
    """Takes the files' pages out of memory; those that a process has mapped stay."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def present(file: Path) -> np.ndarray:
    """Which pages of a file are in memory."""
    if not (size := file.stat().st_size):
        return np.zeros(0, bool)
    mapped = np.memmap(file, np.uint8, "r")
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address, out = (ctypes.c_void_p(each.ctypes.data) for each in (mapped, found))
    if libc.mincore(address, ctypes.c_size_t(size), out):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    return (found & 1).astype(bool)


def runs(pages: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of bytes, first and end, of pages that follow each other."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], pages.astype(np.int8), [0]]))) * mmap.PAGESIZE
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def read(touched: dict[Path, np.ndarray]) -> float:
    """Seconds to read these pages in their order."""
    started, into = time.perf_counter(), bytearray(PIECE)
    for file, pages in touched.items():
        with file.open("rb", buffering=0) as opened:
            for first, end in runs(pages):
                for at in range(first, end, PIECE):
                    os.preadv(opened.fileno(), [memoryview(into)[: min(PIECE, end - at)]], at)
    return time.perf_counter() - started


def start(folder: Path, check: str) -> float:
    """Seconds from the start of the command until it prints its first token."""
    command = [
        sys.executable,
        "-m",
        "ling3export.runners.cli",
        "generate",
        folder,
        "--prompt-ids",
        PROMPT,
        "--max-tokens",
        "1",
        "--check",
        check,
        "--json",
    ]
    started = time.perf_counter()
    with subprocess.Popen([str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
    if process.returncode or not line:
        raise SystemExit(f"cold: `{command[2]}` ended with {process.returncode}")
    return seconds


def main(folder: Path, rounds: int) -> None:
    """Prints seconds to the first token, gigabytes in memory then, and seconds to read these."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    result: dict[str, list[list[float]]] = {check: [] for check in CHECKS}
    for _ in range(rounds):
        for check, found in result.items():
            forget(files)
            token = start(folder, check)
            touched = {file: present(file) for file in files}
            forget(files)
            cold, warm = read(touched), read(touched)
            size = sum(int(pages.sum()) for pages in touched.values()) * mmap.PAGESIZE / 1e9
            found.append([token, size, cold, warm])
            say(f"--check {check}: first token {token:.1f} s, {size:.1f} GB, read {cold:.1f} s cold, {warm:.1f} s warm")
    rows: list[list[Any]] = [
        [f"--check {check}", *(statistics.median(column) for column in zip(*found, strict=True))]
        for check, found in result.items()
    ]
    head = ["", "s to the first token", "GB in memory then", "s to read them, cold", "again, from memory"]
    show(f"a cold start of {folder}, medians of {rounds}", [table(head, rows)], {"machine": machine(), **result})
