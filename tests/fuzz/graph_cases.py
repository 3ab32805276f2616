"""Damaged programs for the readers of graphs: optimized HLO, StableHLO, packed texts, summaries and budgets."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
from jax import export
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo  # noqa: F401

from ling3export.foundation.errors import ArtifactError
from ling3export.graph import audit, diff, hlo, memory, optimized, portable, saved, summary
from ling3export.graph.context import Context
from ling3export.graph.record import Graph
from ling3export.machine.portable import module
from ling3export.machine.portable import text as stablehlo_text
from ling3export.model.scopes import LAYER_KINDS
from ling3export.report.cells import known_form
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes

INPUTS = ("params.kda.q", "state.kda_conv", "batch.packed")
CONTEXT = Context(inputs=INPUTS, kinds=frozenset(LAYER_KINDS), bandwidth=1e9, peak=1e12)
NUMBERS = ("0", "1", "2", "-1", "999999999999", "9" * 400, "")
BUDGETS = """
[rules]
large-copy = 2_000_000
extra-flops = false

[cells."decode@16"]
seconds = 0.1
collectives = 61
"""


def step(weight: jax.Array, state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A program with a product, a loop, a branch, a sort, a gather and an update in place."""
    with jax.named_scope("kda"):
        y = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ weight), x)
    with jax.named_scope("experts"):
        y = jax.lax.cond(y[0, 0] > 0, lambda y: jnp.sort(y), lambda y: y[jnp.argsort(y[:, 0])], y)
    return state.at[3].set(y[0]), y


def lowered() -> jax.stages.Lowered:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (9, 64), (16, 64))]
    return jax.jit(step, donate_argnums=(1,)).lower(*shapes)


def damaged(rng: Random, text: str) -> str:
    """A text with changed numbers and names, and with removed, doubled or moved lines."""
    names = re.findall(r"%[\w.\-]+", text)
    for _ in range(rng.randint(1, 4)):
        lines = text.splitlines(keepends=True)
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        match rng.randrange(7):
            case 0:
                del lines[at]
            case 1:
                lines.insert(other, lines[at])
            case 2:
                lines[at], lines[other] = lines[other], lines[at]
            case 3:
                lines[at] = re.sub(r"\d+", lambda _: rng.choice(NUMBERS), lines[at], count=rng.randint(1, 3))
            case 4:
                lines[at] = re.sub(r"%[\w.\-]+", lambda _: rng.choice(names), lines[at], count=rng.randint(1, 2))
            case 5:
                called = re.findall(r"=%[\w.\-]+", text)
                text = text.replace(rng.choice(called), "=%gone", 1) if called else text
                continue
            case 6:
                return mutated_bytes(rng, "".join(lines).encode()).decode(errors="replace")
        text = "".join(lines) or "\n"
    return text


def use(graph: Graph) -> None:
    """Does with a graph everything that the commands do."""
    document = json.dumps(summary.document([graph]), allow_nan=False).encode()
    summary.table(graph)
    summary.folded(graph)
    audit.audit(graph, audit.Expected(), audit.Budgets())
    if not diff.compare(graph, graph).equal:
        raise WrongResultError("a program differs from itself")
    (before,) = saved.read(document, "a summary").values()
    if not diff.compare(before, saved.rolled(graph)).equal:
        raise WrongResultError("a program differs from its own summary")


@contextmanager
def optimized_programs(folder: Path) -> Iterator[Case]:
    """Optimized HLO is read as a graph, and as memory over program order."""
    text = lowered().compile().as_text() or ""

    def case(rng: Random) -> None:
        changed = damaged(rng, text)
        try:
            hlo.parse(changed)
        except ValueError as error:  # no other: what reads a text without an artifact has no `known_form`
            raise ArtifactError(str(error)) from None
        with known_form("a cell"):
            use(optimized.read(changed, "decode@16", "toy", CONTEXT))
            memory.table(memory.timeline(changed, INPUTS, frozenset(LAYER_KINDS), None))

    use(optimized.read(text, "decode@16", "toy", CONTEXT))
    yield case


@contextmanager
def portable_programs(folder: Path) -> Iterator[Case]:
    """StableHLO that its verifier accepts; an artifact's digests keep other bytes away from the reader."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (9, 64), (16, 64))]
    whole = bytes(export.export(jax.jit(step))(*shapes).mlir_module_serialized)
    text = stablehlo_text(whole)

    def case(rng: Random) -> None:
        changed = damaged(rng, text) if rng.random() < 0.95 else text
        with module(whole) as parsed:
            try:
                module_changed = ir.Module.parse(changed, parsed.context)
            except (ir.MLIRError, ValueError):
                raise ArtifactError("not StableHLO") from None
            blob = stablehlo.serialize_portable_artifact(module_changed, stablehlo.get_current_version())
        with known_form("a cell"):
            use(portable.read(blob, "decode@16", "toy", CONTEXT))

    yield case


@contextmanager
def packed_texts(folder: Path) -> Iterator[Case]:
    """Compressed texts, some larger than the limit, which is small for this target."""
    hlo.LARGEST = 1 << 22
    text, large = hlo.packed("HloModule a\n" * 1000), hlo.packed("y" * (hlo.LARGEST + 2**20))

    def case(rng: Random) -> None:
        with known_form("a cell"):
            hlo.unpacked(large if rng.random() < 0.02 else mutated_bytes(rng, text))

    hlo.unpacked(text)
    yield case


@contextmanager
def summaries(folder: Path) -> Iterator[Case]:
    """Damaged files of an earlier summary are compared with a program."""
    graph = optimized.read(lowered().compile().as_text() or "", "decode@16", "toy", CONTEXT)
    original = json.loads(json.dumps(summary.document([graph])))

    def case(rng: Random) -> None:
        data = json_text(mutated(rng, original))
        graphs = saved.read(data if rng.random() < 0.8 else mutated_bytes(rng, data), "main.json")
        for before in graphs.values():
            difference = diff.compare(before, saved.rolled(graph))
            lines = diff.table(difference, markdown=True)
            if not all(line.isprintable() for line in lines):
                raise WrongResultError(f"a summary shows control characters: {lines!r}")
            json.dumps(diff.document({"decode@16": difference}, {"decode@16": ()}))

    yield case


@contextmanager
def budgets(folder: Path) -> Iterator[Case]:
    def case(rng: Random) -> None:
        audit.budgets(mutated_bytes(rng, BUDGETS.encode()).decode(errors="replace"), "budgets.toml")

    yield case
