"""Tokens/s of our engine, llama.cpp and transformers on one checkpoint, in turns within one run.

``make peers`` builds llama.cpp, ``make parity`` installs transformers. Every arm runs in a fresh process with one
thread for each core. Its file is read once before, so that it comes from memory.
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
from ling3export.cost.chips import CHIPS
from ling3export.cost.roofline import roofline_bound
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

PARITY = ROOT / ".venv-parity" / "bin" / "python"
HF = ROOT / "bench" / "hf_speed.py"
PREFILLS, COUNTS = (128, 512), (1, 4, 16)
ANSWER = 32  # tokens that llama.cpp decodes for each sequence
STEPS = [f"prefill {length}" for length in PREFILLS] + [f"decode {count}" for count in COUNTS]
READ = "plain read"  # GB/s, next to the tokens/s
Flat = dict[str, float]
# Forms of llama.cpp that are compared with each of ours; bf16 is the file that its converter writes.
THEIRS = {"bf16": ("bf16",), "int8": ("Q8_0",), "int4": ("Q4_0", "Q4_K_M"), "int4-small": ("Q4_0", "Q4_K_M")}


def read_once(*paths: Path) -> None:
    """Reads files, and files of folders, so that they are in memory."""
    for file in (entry for path in paths for entry in (path, *path.rglob("*")) if entry.is_file()):
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def gguf(source: Path, sources: Path, *options: str) -> Path:
    """The checkpoint in llama.cpp's format, in bf16; ``--vocab`` includes the tokenizer."""
    file = CACHE / f"{source.name}{''.join(options)}.gguf"
    if not file.exists():
        part = file.with_suffix(".part")
        say(f"$ {PARITY} bench/peers_gguf.py {sources} {source} {part}")
        spawn([PARITY, ROOT / "bench" / "peers_gguf.py", sources, source, part, *options], {})
        part.rename(file)
    return file


def quantized(file: Path, sources: Path, form: str) -> Path:
    """A file of :func:`gguf` in another form, by llama.cpp's own quantizer, without importances."""
    made = file if form == "bf16" else file.with_suffix(f".{form}.gguf")
    if not made.exists():
        part = made.with_suffix(".part")
        spawn([sources / "build" / "bin" / "llama-quantize", file, part, form], {})
        part.rename(made)
    return made


def llama(file: Path, sources: Path, threads: int) -> Flat | None:
    """Runs llama-bench for one sequence, llama-batched-bench for several; None if it fails.

    Its build for AMX aborts on quantized files of this model.
    """
    try:
        return _llama(file, sources, threads)
    except subprocess.CalledProcessError as error:
        say(f"llama.cpp, {file.name}: exit code {error.returncode}")
        return None


def _llama(file: Path, sources: Path, threads: int) -> Flat:
    read_once(file)
    tools = sources / "build" / "bin"
    common = ["-m", file, "-t", threads]
    lengths = ",".join(map(str, PREFILLS))
    single = spawn([tools / "llama-bench", *common, "-p", lengths, "-n", ANSWER, "-r", 3, "-o", "json"], {})
    speeds = {
        f"prefill {row['n_prompt']}" if row["n_prompt"] else "decode 1": float(row["avg_ts"])
        for row in json.loads(single)
    }
    several = ",".join(str(count) for count in COUNTS if count > 1)
    batched = spawn(
        [tools / "llama-batched-bench", *common, "-c", 4096, "-b", 512, "-ub", 512, "-npp", 16, "-ntg", ANSWER,
         "-npl", several, "--output-format", "jsonl"], {},
    )  # fmt: skip
    rows = [json.loads(line) for line in batched.splitlines() if line.startswith("{")]
    return speeds | {f"decode {row['pl']}": float(row["speed_tg"]) for row in rows}


def transformers(source: Path, threads: int) -> Flat | None:
    """With its default experts; None if it fails for lack of memory."""
    read_once(*source.glob("*.safetensors"))
    command = [PARITY, HF, source, "--threads", threads, "--prefill", PREFILLS[-1], "--steps", 8, "--repeats", 2,
               "--context", 16, "--batches", ",".join(map(str, COUNTS))]  # fmt: skip
    try:
        result = last_line(spawn(command, {"OMP_NUM_THREADS": str(threads)}).replace("\n", " "))
    except subprocess.CalledProcessError as error:
        say(f"transformers: exit code {error.returncode}")
        return None
    prefill = {f"prefill {PREFILLS[-1]}": float(result["prefill"]["tokens_per_second"])}
    return prefill | {f"decode {row['batch']}": float(row["tokens_per_second"]) for row in result["decode"]}


def ours(folder: Path) -> Flat:
    """Tokens/s of our ``Engine``."""
    read_once(folder)
    return dict(last_line(run(["bench.peers_ours", folder, ",".join(map(str, PREFILLS)), ",".join(map(str, COUNTS))])))


def measure(
    chosen: Path | None,
    layers: int,
    rounds: int,
    sources: Path,
    kernels: Sequence[str],
    hf: bool,
    weights: Sequence[str] = ("bf16",),
) -> dict[str, Any]:
    """Medians and spread of ``rounds``; every arm runs in each round."""
    source, threads = checkpoint(chosen, "full", layers), len(os.sched_getaffinity(0))
    arms: dict[str, Callable[[], Flat | None]] = {}
    sizes: dict[str, float] = {}
    config, moved = Config.from_path(source), dict[str, float]()
    like: dict[str, list[str]] = {}  # for each of our arms, the arms that it is compared with
    for form in weights:
        whole = "" if form == "bf16" else f"-{form}"
        theirs = [f"llama.cpp {name}" for name in THEIRS[form]] + ["transformers"] * (hf and form == "bf16")
        for kernel in kernels:
            options = ["--tp", 1, "--kernels", kernel, *(["--weights", form] if whole else [])]
            built = artifact(source, f"peers-{kernel}{whole}", options)
            arm = f"ling3export {form}, kernels {kernel}"
            arms[arm], sizes[arm] = partial(ours, built), _bytes(*(built / "weights").iterdir())
            moved[arm] = _step_bytes(config, form)
            first = f"ling3export {weights[0]}, kernels {kernel}"
            like[arm] = [*theirs, *([] if arm == first else [first])]
        for name in THEIRS[form]:
            file = quantized(gguf(source, sources), sources, name)
            arm = f"llama.cpp {name}"
            arms[arm], sizes[arm] = partial(llama, file, sources, threads), _bytes(file)
    if hf:
        arms["transformers"] = partial(transformers, source, threads)
    runs: dict[str, list[Flat]] = {}
    for _ in range(rounds):
        for arm, work in arms.items():
            started = time.monotonic()
            if (result := work()) is None:
                continue
            runs.setdefault(arm, []).append(result)
            say(f"{arm}: {time.monotonic() - started:.0f} s: {json.dumps(result)}")
    return {
        "benchmark": "peers",
        "machine": machine(),
        "checkpoint": source.name,
        "rounds": rounds,
        "threads": threads,
        "gigabytes": sizes,
        "gigabytes_of_a_step": moved,
        "like": like,
        "tokens_per_second": {arm: medians(result) for arm, result in runs.items()},
        "spread": {
            arm: {step: [min(run[step] for run in result), max(run[step] for run in result)] for step in result[0]}
            for arm, result in runs.items()
        },
    }


def _bytes(*files: Path) -> float:
    """Total size of files in GB."""
    return sum(file.stat().st_size for file in files) / 1e9


def _step_bytes(config: Config, form: str) -> float:
    """GB of weights that a decode step of one sequence reads."""
    geometry = make_plan(config, Options(tp=1, weights=form), "cpu").geometry
    any_chip = next(iter(CHIPS.values()))
    return roofline_bound(config, geometry, "decode", 1, any_chip, 0).bytes["weights"] / 1e9


def report(result: dict[str, Any]) -> dict[str, Any]:
    """Prints the result of :func:`measure`, and returns it."""
    speeds: dict[str, Flat] = result["tokens_per_second"]
    pairs = [(arm, peer) for arm, peers in result["like"].items() for peer in peers if {arm, peer} <= speeds.keys()]

    def ratio(arm: str, peer: str, step: str) -> float | None:
        return speeds[arm][step] / speeds[peer][step] if step in speeds[peer] else None

    sizes = ["GB", *(result["gigabytes"].get(arm) for arm in speeds)]
    rates = {
        arm: size * speeds[arm]["decode 1"] for arm, size in result["gigabytes_of_a_step"].items() if arm in speeds
    }
    reads = ["decode 1 reads, GB/s", *(rates.get(arm) for arm in speeds)]
    shares = ["of a plain read", *(rates[arm] / speeds[arm][READ] if arm in rates else None for arm in speeds)]
    show(
        f"{result['checkpoint']}, {result['threads']} threads, through each product, medians of "
        f"{result['rounds']}, load average {result['machine']['load_average'][0]}",
        [
            table(
                ["tokens/s", *speeds],
                [[step, *(flat.get(step) for flat in speeds.values())] for step in STEPS] + [sizes, reads, shares],
            ),
            table(
                ["ratio", *(f"{arm} / {peer}" for arm, peer in pairs)],
                [[step, *(ratio(arm, peer, step) for arm, peer in pairs)] for step in STEPS],
            ),
        ],
        result,
    )
    return result
