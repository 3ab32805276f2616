"""Checkpoints and artifacts to measure, kept in ``.cache/bench``, and processes in which they are measured."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.report import say
from ling3export.artifacts.records import sha256_of
from ling3export.cache.keys import sources
from ling3export.checkpoint.synth import synthesize
from ling3export.plan.kernels import LEVELS, ending

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "bench"
SPAWNED = "BENCH_SPAWNED"  # time.monotonic() at which the parent started a process; all processes share this clock


def checkpoint(chosen: Path | None, preset: str = "small", layers: int = 24, context: int = 0) -> Path:
    """``chosen``, or a random checkpoint of ``preset``; with ``context`` 0, it has the preset's context."""
    if chosen is not None:
        return chosen.resolve()
    folder = CACHE / f"{preset}-{layers}{f'-{context}' * bool(context)}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        longer = {"max_position_embeddings": context} if context else {}
        synthesize(folder, preset, 0, layers=layers, overrides=longer)
    return folder


def artifact(source: Path, name: str, options: Sequence[Any]) -> Path:
    """The artifact of ``source`` with ``options``; built again if they or the model's sources have changed."""
    folder = CACHE / f"{source.name}-{name}.ling3"
    stamp = folder.with_suffix(".json")
    wanted = {
        "source": str(source),
        "options": [str(option) for option in options],
        "sources": sha256_of([sources().model, sources().lowering, [ending(level) for level in LEVELS]]),
        "toolchain": {name: metadata.version(name) for name in ("jax", "jaxlib")},
    }
    if not (folder.exists() and stamp.exists() and json.loads(stamp.read_text()) == wanted):
        CACHE.mkdir(parents=True, exist_ok=True)
        run(["ling3export.cli", "build", source, folder, "--force", *options])
        stamp.write_text(json.dumps(wanted))
    return folder


def run(command: Sequence[Any], timeout: float | None = None, **environment: str) -> str:
    """Runs ``python -m COMMAND`` with this interpreter; returns its stdout.

    Raises:
        subprocess.CalledProcessError: It failed; its stderr was passed on.
        subprocess.TimeoutExpired: It took longer than ``timeout`` seconds, and was ended.
    """
    say(f"$ python -m {' '.join(_quoted(str(part)) for part in command)}")
    return spawn([sys.executable, "-m", *command], environment, timeout)


def _quoted(word: str) -> str:
    """``word`` quoted for bash, on one line."""
    return shlex.quote(word) if word.isprintable() else f"${word!r}"


def spawn(command: Sequence[Any], environment: dict[str, str], timeout: float | None = None) -> str:
    """Runs a command at the checkout's root and returns its stdout. jax's compilation cache is off by default."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    variables = {SPAWNED: str(time.monotonic()), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=inherited | variables | environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
    )
    done.check_returncode()
    return done.stdout


def last_line(output: str) -> dict[str, Any]:
    """The JSON object on the last line."""
    return dict(json.loads(output.splitlines()[-1]))


def numbers(text: str) -> list[int]:
    """``1,16`` as integers."""
    return [int(part) for part in text.split(",") if part]
