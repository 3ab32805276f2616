"""Tokens/s through our engine beside llama.cpp's and transformers', on one checkpoint, turn by turn in one run.

``make peers`` builds llama.cpp, ``make parity`` installs transformers. Every arm runs in a fresh process with as many
threads as there are cores, after its file was read once, so that it comes from memory.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.inputs import CACHE, ROOT, artifact, checkpoint, last_line, run, spawn
from bench.report import machine, medians, say, show, table

PARITY = ROOT / ".venv-parity" / "bin" / "python"
HF = ROOT / "bench" / "hf_speed.py"
PREFILLS, COUNTS = (128, 512), (1, 4, 16)
ANSWER = 32  # tokens that llama.cpp decodes for each sequence
STEPS = [f"prefill {length}" for length in PREFILLS] + [f"decode {count}" for count in COUNTS]
Flat = dict[str, float]


def read_once(*files: Path) -> None:
    """Brings files into memory."""
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def gguf(source: Path, sources: Path, *options: str) -> Path:
    """The checkpoint as llama.cpp reads it, in bf16; ``--vocab`` takes the tokenizer along."""
    file = CACHE / f"{source.name}{''.join(options)}.gguf"
    if not file.exists():
        part = file.with_suffix(".part")
        say(f"$ {PARITY} bench/peers_gguf.py {sources} {source} {part}")
        spawn([PARITY, ROOT / "bench" / "peers_gguf.py", sources, source, part, *options], {})
        part.rename(file)
    return file


def llama(file: Path, sources: Path, threads: int) -> Flat:
    """llama-bench for one sequence, llama-batched-bench for several."""
    read_once(file)
    tools = sources / "build" / "bin"
    common = ["-m", file, "-t", threads]
    lengths = ",".join(map(str, PREFILLS))
    single = spawn([tools / "llama-bench", *common, "-p", lengths, "-n", ANSWER, "-r", 3, "-o", "json"], {})
    found = {
        f"prefill {row['n_prompt']}" if row["n_prompt"] else "decode 1": float(row["avg_ts"])
        for row in json.loads(single)
    }
    several = ",".join(str(count) for count in COUNTS if count > 1)
    batched = spawn(
        [tools / "llama-batched-bench", *common, "-c", 4096, "-b", 512, "-ub", 512, "-npp", 16, "-ntg", ANSWER,
         "-npl", several, "--output-format", "jsonl"], {},
    )  # fmt: skip
    rows = [json.loads(line) for line in batched.splitlines() if line.startswith("{")]
    return found | {f"decode {row['pl']}": float(row["speed_tg"]) for row in rows}


def transformers(source: Path, threads: int) -> Flat | None:
    """Its default experts; None where it fails, for want of memory."""
    read_once(*source.glob("*.safetensors"))
    command = [PARITY, HF, source, "--threads", threads, "--prefill", PREFILLS[-1], "--steps", 8, "--repeats", 2,
               "--context", 16, "--batches", ",".join(map(str, COUNTS))]  # fmt: skip
    try:
        found = last_line(spawn(command, {"OMP_NUM_THREADS": str(threads)}).replace("\n", " "))
    except subprocess.CalledProcessError as error:
        say(f"transformers: exit code {error.returncode}")
        return None
    prefill = {f"prefill {PREFILLS[-1]}": float(found["prefill"]["tokens_per_second"])}
    return prefill | {f"decode {row['batch']}": float(row["tokens_per_second"]) for row in found["decode"]}


def ours(folder: Path) -> Flat:
    """Through Engine."""
    read_once(*(file for file in folder.rglob("*") if file.is_file()))
    return dict(last_line(run(["bench.peers_ours", folder, ",".join(map(str, PREFILLS)), ",".join(map(str, COUNTS))])))


def measure(
    given: Path | None, layers: int, rounds: int, sources: Path, kernels: Sequence[str], hf: bool
) -> dict[str, Any]:
    """Medians and spread of ``rounds``, in each of which every arm has its turn."""
    source, threads = checkpoint(given, "full", layers), len(os.sched_getaffinity(0))
    arms: dict[str, Callable[[], Flat | None]] = {}
    for each in kernels:
        built = artifact(source, f"peers-{each}", ["--tp", 1, "--kernels", each])
        arms[f"ling3export, kernels {each}"] = partial(ours, built)
    arms["llama.cpp"] = partial(llama, gguf(source, sources), sources, threads)
    if hf:
        arms["transformers"] = partial(transformers, source, threads)
    runs: dict[str, list[Flat]] = {}
    for _ in range(rounds):
        for arm, work in arms.items():
            started = time.monotonic()
            if (found := work()) is None:
                continue
            runs.setdefault(arm, []).append(found)
            say(f"{arm}: {time.monotonic() - started:.0f} s: {json.dumps(found)}")
    return {
        "benchmark": "peers",
        "machine": machine(),
        "checkpoint": source.name,
        "rounds": rounds,
        "threads": threads,
        "tokens_per_second": {arm: medians(found) for arm, found in runs.items()},
        "spread": {
            arm: {step: [min(each[step] for each in found), max(each[step] for each in found)] for step in found[0]}
            for arm, found in runs.items()
        },
    }


def main(
    given: Path | None, layers: int, rounds: int, sources: Path, kernels: Sequence[str], hf: bool
) -> dict[str, Any]:
    """Measures and prints."""
    result = measure(given, layers, rounds, sources, kernels, hf)
    speeds: dict[str, Flat] = result["tokens_per_second"]
    peers = [arm for arm in speeds if not arm.startswith("ling3export")]
    mine = [arm for arm in speeds if arm.startswith("ling3export")]

    def ratio(arm: str, peer: str, step: str) -> float | None:
        return speeds[arm][step] / speeds[peer][step] if step in speeds[peer] else None

    show(
        f"{result['checkpoint']}, bf16, {result['threads']} threads, through each product, medians of "
        f"{result['rounds']}, load average {result['machine']['load_average'][0]}",
        [
            table(["tokens/s", *speeds], [[step, *(flat.get(step) for flat in speeds.values())] for step in STEPS]),
            table(
                ["ratio", *(f"{arm} / {peer}" for arm in mine for peer in peers)],
                [[step, *(ratio(arm, peer, step) for arm in mine for peer in peers)] for step in STEPS],
            ),
        ],
        result,
    )
    return result
