"""The first minutes with a card: what runs, how far off, how fast, in each form of the weights; one table.

Steps are remembered in FOLDER/card.json: the same command goes on where it was ended, by its minutes, by Ctrl-C or by a
step that failed, which is tried again. Checkpoints are random and made on the spot; what is done with is removed, so
that at full size 45 GB of disk suffice. Nothing is read from a network.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.inputs import last_line, run, spawn
from bench.peers import HF, PARITY
from bench.report import cell, machine, say
from bench.servers import served
from ling3export.artifacts.calibration import beside, read_calibration
from ling3export.artifacts.files import replace_file
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.program_records import RooflineBound
from ling3export.cost.chips import CARDS, CHIPS
from ling3export.foundation.errors import Ling3Error

BUILD, RUN = "ling3export.cli", "ling3export.runners.cli"
LONGEST = 600.0  # seconds of a command
COUNTS = (1, 16)
# SGLang's published milliseconds of a token: 24 layers in bf16, 8192 tokens in, 1024 out.
PUBLISHED, PUBLISHED_ON = (2.87, 5.96), "h200"
Said = dict[str, Any]


@dataclass(frozen=True)
class Card:
    """The settings of the run.

    Attributes:
        folder: Checkpoints, artifacts and results.
        target: Target of the builds; ``cuda`` is tuned on the card.
        preset: Preset of the checkpoints.
        layers: Their depths.
        weights: Forms.
        paddings: Sizes of prefill calls.
        prompt: Tokens that the server is given.
        answer: Tokens that it answers.
        minutes: After these no step is begun, and one that runs is ended.
        transformers: A Python that has it.
    """

    folder: Path
    target: str = "cuda"
    preset: str = "full"
    layers: tuple[int, ...] = (12, 24)
    weights: tuple[str, ...] = ("bf16", "int4", "int8")
    paddings: str = "16,512"
    prompt: int = 6144
    answer: int = 1024
    minutes: float = 25.0
    transformers: Path = PARITY

    @property
    def groups(self) -> list[tuple[int, str]]:
        """Depths and forms in order: every depth in the first form, then the deepest in all, then the others."""
        first = [(layers, self.weights[0]) for layers in self.layers]
        return first + [(layers, form) for layers in reversed(self.layers) for form in self.weights[1:]]


class Group:
    """One depth in one form.

    Args:
        card: The settings.
        layers: The depth.
        form: The form of the weights.
        ran: ``bench.inputs.run`` within the time that is left.
    """

    def __init__(self, card: Card, layers: int, form: str, ran: Callable[..., str]) -> None:
        self._card, self._layers, self._form, self._ran = card, layers, form, ran
        self._checkpoint = card.folder / f"{card.preset}-{layers}"
        self._artifact = card.folder / f"{layers}-{form}.ling3"

    def steps(self) -> dict[str, Callable[[], Said]]:
        """The steps by name; if the first fails, no other runs."""
        steps: dict[str, Callable[[], Said]] = {
            "build": self._build,
            "verify": self._verify,
            "generate": self._generate,
        }
        steps |= {f"serve {count}": partial(self._serve, count) for count in COUNTS}
        if self._form == self._card.weights[0] and self._card.transformers.exists():
            steps["transformers"] = self._transformers
        if self._form == self._card.weights[0] and self._layers == self._card.layers[-1]:
            steps["trace"] = self._trace
        return steps

    def remove(self) -> None:
        """Makes room, once all is done."""
        shutil.rmtree(self._artifact, ignore_errors=True)
        if self._form == self._card.weights[-1]:
            shutil.rmtree(self._checkpoint, ignore_errors=True)

    def _build(self) -> Said:
        card = self._card
        if not self._checkpoint.exists():
            self._ran([BUILD, "synth", self._checkpoint, "--preset", card.preset, "--layers", self._layers])
        context = -(-(card.prompt + card.answer + 1) // 1024) * 1024
        options: list[Any] = ["--target", card.target, "--paddings", card.paddings, "--decode-paddings", "1,16"]
        options += [
            "--max-running",
            16,
            "--context",
            context,
            *([] if self._form == "bf16" else ["--weights", self._form]),
        ]
        begun = time.monotonic()
        self._ran([BUILD, "build", self._checkpoint, self._artifact, "--force", *options])
        stored = sum(file.stat().st_size for file in (self._artifact / "weights").iterdir())
        return {"seconds": time.monotonic() - begun, "gigabytes": stored / 1e9}

    def _verify(self) -> Said:
        self._ran([BUILD, "verify", self._artifact, "--time"])
        times = read_calibration(beside(self._artifact))
        floors = {name: cell.floor for name, cell in read_manifest(self._artifact).targets[times.target].cells.items()}
        ms = {name: [1e3 * cell.median, _milliseconds(floors[name])] for name, cell in times.cells.items()}
        error = max(receipt.median for receipt in times.receipts.cells.values())
        return {"kind": times.machine.kind, "median error": error, "ms": ms}

    def _trace(self) -> Said:
        """Traces of every cell, for `ling3export graph summary --profile`; the program's text stays with them."""
        folder = self._card.folder / "traces"
        self._ran([BUILD, "verify", self._artifact, "--time", "--trace", folder])
        (cells,) = (target.cells for target in read_manifest(self._artifact).targets.values())
        summaries = {
            name: self._ran([BUILD, "graph", "summary", self._artifact, name, "--json", "--profile", folder])
            for name in cells
        }
        replace_file(folder / "summaries.json", json.dumps(summaries).encode())
        return {"cells": len(cells)}

    def _generate(self) -> Said:
        options = ["--prompt-ids", "1,2,3", "--max-tokens", 32, "--ignore-eos", "--json"]
        output = self._ran([RUN, "generate", self._artifact, *options])
        return {"tokens": len(last_line(output)["token_ids"])}

    def _serve(self, count: int) -> Said:
        card, file = self._card, self._artifact.with_suffix(f".{count}.jsonl")
        file.unlink(missing_ok=True)
        options = ["--input-len", card.prompt, "--output-len", card.answer, "--range-ratio", 1]
        options += ["--max-concurrency", count, "--num-prompts", 2 * count, "--output", file]
        with served(self._artifact) as url:
            self._ran([RUN, "bench", "serve", self._artifact, "--url", url, *options])
        figures = last_line(file.read_text())["figures"]
        return {
            "tpot": figures["tpot"]["mean"],
            "ttft": figures["ttft"]["mean"],
            "tokens/s": figures["output_throughput"],
        }

    def _transformers(self) -> Said:
        """Steps of a batch on the same checkpoint, its default experts, without a server."""
        device = "cuda" if self._card.target.startswith("cuda") else "cpu"
        command = [self._card.transformers, HF, self._checkpoint, "--device", device, "--prefill", 0, "--context", 512]
        report = json.loads(spawn([*command, "--batches", ",".join(map(str, COUNTS))], {}, LONGEST))
        return {str(row["batch"]): 1e3 * row["seconds"] for row in report["decode"]}


def main(card: Card) -> None:
    """Does what is left to do, and prints the table of all that is known."""
    card.folder.mkdir(parents=True, exist_ok=True)
    state, end = card.folder / "card.json", time.monotonic() + 60 * card.minutes
    done: Said = json.loads(state.read_text()) if state.exists() else {}
    left = list[str]()

    def ran(command: list[Any]) -> str:
        return run(command, timeout=max(1.0, min(LONGEST, end - time.monotonic())))

    def step(name: str, work: Callable[[], Said]) -> bool:
        if name in done:
            return True
        begun = time.monotonic()
        try:
            if begun > end:
                raise TimeoutError("no time is left for it")
            done[name] = work()
        except (Ling3Error, OSError, LookupError, ValueError, subprocess.SubprocessError) as error:
            say(f"{name}: {error}")
            left.append(name)
            return False
        replace_file(state, json.dumps(done, indent=1).encode())
        say(f"{name}: {time.monotonic() - begun:.0f} s")
        return True

    if step("doctor", lambda: {**machine(), **last_line(ran([RUN, "doctor", "--json"]))}):
        for layers, form in card.groups:
            group = Group(card, layers, form, ran)
            build, *others = (partial(step, f"{layers} {form} {name}", work) for name, work in group.steps().items())
            if build() and not sum(not other() for other in others):
                group.remove()
    print(*table(card, done), sep="\n")
    if left:
        say(f"left: {', '.join(left)}; the same command goes on")


def _milliseconds(bound: RooflineBound | None) -> float | None:
    return None if bound is None else 1e3 * bound.seconds


def table(card: Card, done: Said) -> list[str]:
    """What is known, in Markdown."""
    kinds = {step["kind"] for name, step in done.items() if name.endswith(" verify")}
    shape = f"{card.preset}, {card.prompt} tokens in, {card.answer} out"
    lines = [f"Milliseconds on {', '.join(sorted(kinds)) or 'no card'}; {shape}:", ""]
    head = ["layers, weights", "GB", "build, s", "verified: median error", "decode@1", "@16", "bounds", "a token at 1"]
    head += ["16", "first token at 1", "16", "transformers at 1", "16"]
    rows = [head, ["---"] * len(head)]
    for layers, form in card.groups:
        of = {name.removeprefix(f"{layers} {form} "): step for name, step in done.items()}
        ms = [of.get("verify", {}).get("ms", {}).get(f"decode@{count}", (None, None)) for count in COUNTS]
        at = [of.get(f"serve {count}", {}) for count in COUNTS]
        row = [f"{layers}, {form}", *(of.get("build", {}).get(name) for name in ("gigabytes", "seconds"))]
        row += [of["verify"]["median error"] if "verify" in of else "no"]
        row += [*(time for time, _ in ms), " ".join(cell(bound) for _, bound in ms)]
        row += [step.get(name) for name in ("tpot", "ttft") for step in at]
        rows.append([*row, *(of.get("transformers", {}).get(str(count)) for count in COUNTS)])
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
    card_kind = next((kind for kind, name in CARDS.items() if name in kinds), None)
    if card_kind is not None:
        ratio = CHIPS["cuda", PUBLISHED_ON].bandwidth / CHIPS["cuda", card_kind].bandwidth
        theirs = " and ".join(f"{ms} ({ratio * ms:.2f} by this card's bandwidth)" for ms in PUBLISHED)
        lines += ["", f"SGLang published {theirs} ms a token for 24 layers in bf16 on an H200."]
    return lines
