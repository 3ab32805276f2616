"""Damaged traces of jax's profiler are joined to a program, which gives measured times or an error."""

import gzip
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from ling3export.graph.profile import events, joined
from ling3export.graph.record import Graph, Operation
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes

NAMES = ("copy.1", "while.2", "dot.3")
KERNELS = ("copy_1", "memset", "dot_3")


@contextmanager
def traces(folder: Path) -> Iterator[Case]:
    """A trace as the profiler writes it, with changed values, text or compressed bytes."""
    rows = [
        {
            "ph": "X",
            "pid": 701,
            "tid": device,
            "ts": 100.5 * call + 10 * number,
            "dur": 40.25 if name == "while.2" else 5.5,
            "name": name,
            "args": {"hlo_module": "jit_body", "hlo_op": name, "run_id": str(call), "device_ordinal": str(device)},
        }
        for call in range(3)
        for device in range(2)
        for number, name in enumerate(NAMES)
    ]
    card = [
        row
        | {"name": KERNELS[number % 3], "args": {"hlo_op": "command_buffer_1", "cuda_graph_node_id": str(number % 3)}}
        for number, row in enumerate(rows)
    ]
    names = [{"ph": "M", "pid": 701, "name": "process_name", "args": {"name": "/host:CPU"}}]
    originals = [{"displayTimeUnit": "ns", "metadata": {}, "traceEvents": names + some} for some in (rows, card)]
    operations = (
        Operation(name="copy.1", opcode="copy", kind="copies"),
        Operation(name="while.2/dot.3", opcode="dot", kind="products", times=2.0),
    )
    graph = Graph(cell="decode@1", target="cpu-tp1", form="optimized", operations=operations)

    def case(rng: Random) -> None:
        original = rng.choice(originals)
        text = json_text(mutated(rng, original), 1) if rng.random() < 0.7 else json.dumps(original).encode()
        data = gzip.compress(text) if rng.random() < 0.5 else text
        data = mutated_bytes(rng, data) if rng.random() < 0.5 else data
        result = joined(graph, events(data, "trace"), "trace")
        seconds = [one.seconds for one in result.graph.operations if one.seconds is not None]
        if not all(math.isfinite(value) and value >= 0 for value in seconds) or not 0 <= result.unmatched <= 1 + 1e-9:
            raise WrongResultError(f"seconds {seconds}, {result.unmatched} of no operation")

    yield case
