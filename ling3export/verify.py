"""Runs an artifact's vectors through its cells and compares with the stored expectations.

``python -m ling3export.verify ARTIFACT TARGET < MANIFEST`` measures one target in a process of its own (the number of
devices is fixed when jax starts) and prints one JSON object; ``ling3export verify`` and the build read it.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ling3export.artifacts.manifest import read_checked, read_manifest
from ling3export.artifacts.store import Store
from ling3export.errors import ArtifactError, Ling3Error, listed
from ling3export.peers import HOST, TIMEOUT, free_port
from ling3export.processes import command, ending, environment
from ling3export.runners.hosts import Hosts
from ling3export.runners.targets import platforms_here
from ling3export.score_receipts import Scored, score_receipt

if TYPE_CHECKING:
    from ling3export.runners.device import Device

# Relative L2 of the logits at a position (MODEL.md section 5). fp32: every position. bf16: the median over positions,
# since a single routing flip alone moves one by up to 0.3.
TOLERANCES = {"float32": ("largest", 1e-5), "bfloat16": ("median", 0.15)}

REFUSED = 3  # how the measuring process ends with a message for the user; 1 is a traceback

Found = dict[tuple[int, int], np.ndarray]  # (sequence, position) → logits [V]


@dataclass(frozen=True)
class Result:
    """What ``ling3export verify`` found.

    Attributes:
        record: As JSON: by target either its receipts or why it could not run here.
        passed: Every digest agreed and every cell that runs here is within its tolerance.
    """

    record: dict[str, Any]
    passed: bool

    def table(self) -> str:
        """A line a cell, the worst error first."""
        lines = [f"digests: {self.record['files']} files and {self.record['slabs']} weight slabs agree"]
        for name, target in self.record["targets"].items():
            if "reason" in target:
                lines.append(f"{name}: not run here: {target['reason']}")
                continue
            lines.append(
                f"{name}: {target['tolerance']['measure']} relative error at most {target['tolerance']['bound']:g}"
            )
            for cell, row in sorted(target["cells"].items(), key=lambda item: -item[1]["relative"]):
                lines.append(
                    f"  {cell:14} {row['status']:7} largest relative {row['relative']:.2e}, "
                    f"median {row['median']:.2e}, largest absolute {row['absolute']:.2e}, {row['positions']} positions"
                )
            for what, value in target["agreement"].items():
                lines.append(f"  {what.replace('_', ' ')}: {value:.2e}")
        return "\n".join(lines)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance of one position's logits, in float64; infinite where a value is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))


class Prober:
    """Feeds the vectors to one loaded target, with slots and pages handed out by hand.

    Args:
        device: The loaded programs.
        target: The manifest's record of the target.
        sequences: The manifest's vectors.
    """

    def __init__(self, device: "Device", target: dict[str, Any], sequences: list[dict[str, Any]]) -> None:
        self._device, self._state, self._sequences = device, target["state"], sequences
        self._chunk = target["state"]["chunk"]

    @property
    def _pages(self) -> int:
        """Pages of a sequence; they are few, and every sequence gets the same number."""
        longest = max(len(sequence["ids"]) for sequence in self._sequences)
        return int(-(-longest // self._state["page_size"]))

    def _table(self, slot: int) -> np.ndarray:
        pages = self._pages
        table = np.zeros(self._state["max_pages"], np.int32)
        if slot and slot * pages <= self._state["pages"]:
            table[:pages] = np.arange((slot - 1) * pages, slot * pages, dtype=np.int32) + 1
        elif slot:
            raise ArtifactError(f"vectors: expected {slot * pages} latent pages, found {self._state['pages']}")
        return table

    def prefill(self, padding: int, sequence: int, slot: int) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Prefills one prompt in calls of ``padding``; yields the logits at every chunk's end."""
        entry = self._sequences[sequence]
        prompt = entry["ids"][: entry["prompt"]]
        for at in range(0, len(prompt), padding):
            fields, ends = self._prefill_fields(padding, prompt[at : at + padding], at, slot)
            logits = self._device.read(self._device.step("prefill", padding, fields))
            for row, end in enumerate(ends):
                yield (sequence, end), logits[row]

    def score(self, padding: int, sequence: int) -> Scored:
        """Scores each token of one sequence behind those before it, in calls of ``padding``."""
        ids = self._sequences[sequence]["ids"]
        logits: dict[int, np.ndarray] = {}
        logprob, best = [np.zeros(0, np.float32)], [np.zeros(0, np.int32)]
        for at in range(0, len(ids) - 1, padding):
            fields, ends = self._prefill_fields(padding, ids[at : min(at + padding, len(ids) - 1)], at, 1)
            after = ids[at + 1 : at + 1 + padding]
            fields["next_token"] = np.pad(np.array(after, np.int32), (0, padding - len(after)), constant_values=-1)
            out = {name: self._device.read(value) for name, value in self._device.score(padding, fields).items()}
            logits |= dict(zip(ends, out["logits"], strict=False))
            logprob.append(out["logprob"][: len(after)])
            best.append(out["best"][: len(after)])
        return Scored(logits, np.concatenate(logprob), np.concatenate(best))

    def _prefill_fields(
        self, padding: int, tokens: list[int], start: int, slot: int
    ) -> tuple[dict[str, np.ndarray], list[int]]:
        count, size = padding // self._chunk, self._chunk
        fields = {
            "tokens": np.zeros(padding, np.int32),
            "chunk_slot": np.zeros(count, np.int32),
            "chunk_start": np.zeros(count, np.int32),
            "chunk_len": np.zeros(count, np.int32),
            "fresh": np.zeros(count, np.int32),
            "page_table": np.zeros((count, self._state["max_pages"]), np.int32),
        }
        fields["tokens"][: len(tokens)] = tokens
        ends = []
        for n, at in enumerate(range(0, len(tokens), size)):
            length = min(size, len(tokens) - at)
            fields["chunk_slot"][n], fields["chunk_start"][n], fields["chunk_len"][n] = slot, start + at, length
            fields["fresh"][n] = start + at == 0
            fields["page_table"][n] = self._table(slot)
            ends.append(start + at + length - 1)
        return fields, ends

    def decode(self, padding: int, prefill: int) -> Found:
        """Prefills every prompt at ``prefill``, then decodes the given tokens, as many sequences a step as fit."""
        found: Found = {}
        together = min(padding, self._state["slots"], self._state["pages"] // self._pages, len(self._sequences))
        for first in range(0, len(self._sequences), together):
            group = list(range(first, min(first + together, len(self._sequences))))
            for slot, sequence in enumerate(group, 1):
                for _ in self.prefill(prefill, sequence, slot):
                    pass
            found |= self._decode_group(padding, group)
        return found

    def _decode_group(self, padding: int, group: list[int]) -> Found:
        found: Found = {}
        steps = max(len(self._sequences[s]["ids"]) - self._sequences[s]["prompt"] for s in group)
        for step in range(steps):
            fields = {name: np.zeros(padding, np.int32) for name in ("slot", "position", "token")}
            fields["page_table"] = np.zeros((padding, self._state["max_pages"]), np.int32)
            live = []
            for row, sequence in enumerate(group):
                entry = self._sequences[sequence]
                position = entry["prompt"] + step
                if position < len(entry["ids"]):
                    fields["slot"][row], fields["position"][row] = row + 1, position
                    fields["token"][row] = entry["ids"][position]
                    fields["page_table"][row] = self._table(row + 1)
                    live.append((row, (sequence, position)))
            logits = self._device.read(self._device.step("decode", padding, fields))
            found |= {key: logits[row] for row, key in live}
        return found

    def sample(self, phase: str, padding: int, rows: int) -> tuple[int, int]:
        """Greedy tokens of one call through ``sample``: (how many were compared, how many were wrong)."""
        if phase in ("prefill", "score"):
            fields, _ = self._prefill_fields(padding, self._sequences[0]["ids"][:padding], 0, 1)
            fields |= {"next_token": np.full(padding, -1, np.int32)} if phase == "score" else {}
        else:
            fields = {name: np.zeros(padding, np.int32) for name in ("slot", "position", "token")}
            fields["page_table"] = np.zeros((padding, self._state["max_pages"]), np.int32)
        handle = self._device.step(phase, padding, fields)
        logits = self._device.read(handle)
        zeros = {name: np.zeros(rows, np.int32) for name in ("slot", "position", "top_k", "seed")}
        floats = {"temperature": np.zeros(rows, np.float32), "top_p": np.ones(rows, np.float32)}
        tokens = self._device.read(self._device.sample(handle, rows, zeros | floats))
        return rows, int(np.sum(tokens != np.argmax(logits, axis=1)))


def measure_target(artifact: Path, name: str, manifest: dict[str, Any], hosts: Hosts | None = None) -> dict[str, Any]:
    """Loads one target and runs every vector through each of its cells. Of several hosts all call it, and the first
    one's result counts.

    Returns:
        ``cells``: by name the errors and a status; ``agreement``: the largest relative distance between cells;
        ``passed``.
    """
    from safetensors.numpy import load

    from ling3export.runners.loader import load as load_artifact

    loaded = load_artifact(
        artifact, target=name, check="programs", report=lambda _: None, manifest=manifest, hosts=hosts
    )
    target = loaded.record
    vectors = manifest["vectors"]
    stored = load(read_checked(artifact, vectors["expected"]))
    expected: Found = {
        (index, position): stored[sequence["logits"]][row]
        for index, sequence in enumerate(vectors["sequences"])
        for row, position in enumerate(sequence["positions"])
    }
    prober = Prober(loaded.device, target, vectors["sequences"])
    found = _probe(prober, target, len(vectors["sequences"]))
    dtype = manifest["plan"]["dtype"]
    cells = {cell: _receipt(values, expected, dtype) for cell, values in found.items()}
    for cell, record in target["cells"].items():
        if record["phase"] == "sample":
            cells[cell] = _sample_receipt(prober, target, record)
        if record["phase"] == "score":
            cells[cell] = _score_receipt(prober, record["padding"], vectors["sequences"], expected, dtype)
    measure, bound = TOLERANCES[dtype]
    if loaded.channel is not None:
        loaded.channel.finish()
    return {
        "tolerance": {"measure": measure, "bound": bound},
        "cells": cells,
        "agreement": _agreement(found),
        "passed": all(row["status"] == "passed" for row in cells.values()),
    }


def _probe(prober: Prober, target: dict[str, Any], count: int) -> dict[str, Found]:
    found: dict[str, Found] = {}
    paddings = sorted(record["padding"] for record in target["cells"].values() if record["phase"] == "prefill")
    for padding in paddings:
        values = found.setdefault(f"prefill@{padding}", {})
        for sequence in range(count):
            values |= dict(prober.prefill(padding, sequence, 1))
    for cell, record in target["cells"].items():
        if record["phase"] == "decode":
            found[cell] = prober.decode(record["padding"], paddings[0])
    return found


def _receipt(found: Found, expected: Found, dtype: str) -> dict[str, Any]:
    errors = [relative_error(value, expected[key]) for key, value in found.items() if key in expected]
    absolute = max(float(np.max(np.abs(value - expected[key]))) for key, value in found.items() if key in expected)
    measure, bound = TOLERANCES[dtype]
    judged = max(errors) if measure == "largest" else float(np.median(errors))
    return {
        "status": "passed" if judged <= bound else "failed",
        "relative": max(errors),
        "median": float(np.median(errors)),
        "absolute": absolute,
        "positions": len(errors),
    }


def _sample_receipt(prober: Prober, target: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Greedy sampling is exact: any token that is not the first of the largest logits is an error."""
    rows = record["padding"]
    giver = next(cell for cell in target["cells"].values() if cell["phase"] != "sample" and cell["rows"] == rows)
    count, wrong = prober.sample(giver["phase"], giver["padding"], rows)
    share = wrong / count
    status = "passed" if wrong == 0 else "failed"
    return {"status": status, "relative": share, "median": share, "absolute": float(wrong), "positions": count}


def _score_receipt(
    prober: Prober, padding: int, sequences: list[dict[str, Any]], expected: Found, dtype: str
) -> dict[str, Any]:
    scored = [prober.score(padding, number) for number in range(len(sequences))]
    found = {(number, at): row for number, said in enumerate(scored) for at, row in said.logits.items()}
    return score_receipt(_receipt(found, expected, dtype), scored, sequences, expected, *TOLERANCES[dtype])


def _agreement(found: dict[str, Found]) -> dict[str, float]:
    """Largest relative distance: padding against padding, and decode's paddings against each other."""
    agreement = {}
    for phase in ("prefill", "decode"):
        cells = [values for cell, values in found.items() if cell.startswith(phase)]
        distances = [
            relative_error(other[key], cells[0][key]) for other in cells[1:] for key in other if key in cells[0]
        ]
        if distances:
            agreement[f"{phase}_padding_against_padding"] = max(distances)
    return agreement


def measure_apart(artifact: Path, target: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """:func:`measure_target` in a fresh process.

    The manifest goes through its stdin: a build has none in the folder before its receipts are in it.

    Raises:
        ArtifactError: It ended without a result; with what it said.
    """
    started = command("ling3export.verify", str(artifact), target)
    with contextlib.ExitStack() as stack:
        count = manifest["targets"].get(target, {"processes": 1})["processes"]
        if count > 1:
            started += [f"{HOST}:{free_port()}", str(count)]
            for number in range(1, count):
                stack.enter_context(_other(started, number, manifest))
        done = subprocess.run(
            [*started, *(["0"] if count > 1 else [])], input=json.dumps(manifest), capture_output=True, text=True,
            errors="replace", env=environment(), check=False,
        )  # fmt: skip
    if done.returncode or not done.stdout.strip():
        said = done.stderr.strip()[-1500:] or "nothing was printed"
        if done.returncode != REFUSED:
            said = f"a process that {ending(done.returncode)}: {said}"
        raise ArtifactError(f"vectors of `{target}`: expected to run, found: {said}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextlib.contextmanager
def _other(started: list[str], number: int, manifest: dict[str, Any]) -> Iterator[None]:
    """Another host's process within the block; the first one tells what went wrong with it."""
    process = subprocess.Popen(
        [*started, str(number)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        env=environment(),
    )  # fmt: skip
    try:
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(json.dumps(manifest))
        yield
    finally:
        process.kill()
        process.wait()


def check_digests(artifact: Path, manifest: dict[str, Any]) -> tuple[int, int]:
    """Compares every file and every weight slab with the manifest; returns how many there are of each.

    Raises:
        ArtifactError: One is missing or damaged.
    """
    cells = [cell for target in manifest["targets"].values() for cell in target["cells"].values()]
    files = [cell[tier] for cell in cells for tier in ("stablehlo", "exec") if tier in cell]
    files += [*manifest["tokenizer"], manifest["vectors"]["expected"]]
    for record in files:
        read_checked(artifact, record)
    index = manifest["weights"]["index"]
    store = Store(artifact / "weights", index)
    store.check_layout()
    store.check_many((name, 0, None) for name in index)
    return len(files), sum(len(entry["sha256"]) for entry in index.values())


def _not_here(target: dict[str, Any]) -> str | None:
    """Why a target cannot be measured on this machine; None if it can."""
    hosts, here = target["processes"], platforms_here()
    if target["platform"] in here and (hosts == 1 or target["platform"] == "cpu"):
        return None
    statuses = sorted({cell["status"] for cell in target["cells"].values()})
    wanted = f"{target['tp']} devices of {target['target']} on {hosts} host{'s' * (hosts > 1)}"
    return f"{' and '.join(statuses)}; it needs {wanted}, found {' and '.join(here)} in one process"


def verify_artifact(artifact: Path, target: str | None) -> Result:
    """Checks every digest, then measures every target that runs here.

    Args:
        artifact: The folder.
        target: Only this one; None for all.

    Raises:
        ArtifactError: A file is damaged, or there is no such target.
    """
    manifest = read_manifest(artifact)
    names = list(manifest["targets"]) if target is None else [target]
    if unknown := [name for name in names if name not in manifest["targets"]]:
        there = listed(list(manifest["targets"]))
        raise ArtifactError(f"target `{unknown[0]}`: expected one of {there}, found none of that name, in {artifact}")
    files, slabs = check_digests(artifact, manifest)
    targets: dict[str, Any] = {}
    for name in names:
        reason = _not_here(manifest["targets"][name])
        targets[name] = measure_apart(artifact, name, manifest) if reason is None else {"reason": reason}
    passed = all(row.get("passed", True) for row in targets.values())
    return Result({"files": files, "slabs": slabs, "targets": targets, "passed": passed}, passed)


def main() -> None:
    """Prints the receipts of one target as JSON."""
    try:
        hosts = Hosts(sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), TIMEOUT) if len(sys.argv) > 3 else None
        print(json.dumps(measure_target(Path(sys.argv[1]), sys.argv[2], json.load(sys.stdin), hosts)))
    except Ling3Error as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
