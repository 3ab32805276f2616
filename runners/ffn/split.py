"""Decode steps through the programs that are cut at the experts: several micro batches in flight, any exchange."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.dtypes import BY_NAME, MASK
from ling3export.foundation.errors import ArtifactError
from ling3export.runners.ffn.connector import AttentionConnector, Phases

if TYPE_CHECKING:
    from ling3export.runners.load.model_runner import ModelRunner


class Sizes:
    """What the split programs of a target are made for.

    Args:
        manifest: An artifact's.
        target: One of its targets.

    Attributes:
        layers: How many there are.
        dense: How many of them, the first ones, have no experts.
        experts: Experts of a layer.
        chosen: Experts of a token.
        there: The numbers that a pair of a token and an expert takes to the experts: a dtype with a shape.
        back: What they make of it.

    Raises:
        ArtifactError: It was built without ``--afd``.
    """

    def __init__(self, manifest: Manifest, target: Target) -> None:
        attend = next((cell for cell in target.cells.values() if cell.phase == "attend"), None)
        if attend is None:
            raise ArtifactError(
                "split: expected the programs of `build --afd`, found none, in the manifest",
                "build the artifact again with --afd and the number of attention processes",
            )
        numbers = {name: value for name, value in manifest.config.items() if isinstance(value, int)}
        leaves = (*attend.outputs, *target.cells[f"combine@{attend.padding}"].inputs)
        shapes = {leaf.name: np.dtype((BY_NAME[leaf.dtype].numpy, leaf.shape[-1:])) for leaf in leaves}
        self.there, self.back = shapes["tokens"], shapes["results"]
        self.layers, self.dense = numbers["num_hidden_layers"], numbers["first_k_dense_replace"]
        self.experts, self.chosen = numbers["num_experts"], numbers["num_experts_per_tok"]


class ExpertPrograms:
    """``dispatch`` and ``experts`` of one process.

    Args:
        runner: The loaded programs.
        sizes: Those of the target.
        paddings: Pairs that they take, ascending.
        phases: Where their times go.
    """

    def __init__(self, runner: "ModelRunner", sizes: Sizes, paddings: tuple[int, ...], phases: Phases) -> None:
        self._runner, self._sizes, self.paddings, self.phases = runner, sizes, paddings, phases

    def __call__(self, data: np.ndarray, expert_ids: np.ndarray, layer_ids: np.ndarray) -> np.ndarray:
        """What each pair's expert makes of it.

        Args:
            data: ``[n, width]`` there, copied.
            expert_ids: int32 ``[n]``, MASK for none.
            layer_ids: int32 ``[n]``, among the layers that have experts.

        Returns:
            ``[n, width]`` back; zeros for pairs without an expert.
        """
        count = len(data)
        padding = next((each for each in self.paddings if each >= count), None)
        if padding is None:
            raise ArtifactError(
                f"experts: expected programs for {count} pairs of a token and an expert, found at most "
                f"{self.paddings[-1]}",
                "build with more --afd or larger --decode-paddings, or start the worker with fewer --sessions",
            )
        rows, fields = np.zeros((padding, data.shape[1]), data.dtype), {}
        rows[:count] = data
        for name, values, rest in (("expert_ids", expert_ids, MASK), ("layer_ids", layer_ids, 0)):
            fields[name] = np.full(padding, rest, np.int32)
            fields[name][:count] = values
        fields["out_num"] = np.array([count], np.int32)
        with self.phases.timed("dispatch"):
            found = self._runner.call(f"dispatch@{padding}", fields, {"token_data": rows})
            place, live = self._runner.read(found["gather_idx"]), int(self._runner.read(found["actual_token_num"])[0])
        with self.phases.timed("experts"):
            batch = {name: value for name, value in found.items() if name in ("y", "group_list", "dynamic_scale")}
            done = self._runner.read(self._runner.call(f"experts@{padding}", {}, batch)["results"])
        results = np.zeros(padding, self._sizes.back)
        results[place[:live]] = done[:live]
        return results[:count]


class LocalExperts:
    """An exchange that travels nowhere: for receipts, and to compare with.

    Args:
        programs: What computes the experts.
        tokens: The most tokens of a micro batch.
    """

    micro_batches, synchronous = 1, False

    def __init__(self, programs: ExpertPrograms, tokens: int) -> None:
        self._programs, self.tokens, self.phases = programs, tokens, programs.phases
        self._done: dict[int, np.ndarray] = {}

    def send_attn_output(self, micro_batch: int, layer: int, tokens: np.ndarray, expert_ids: np.ndarray) -> None:
        """Computes the experts at once."""
        chosen = expert_ids.shape[1]
        layers = np.full(expert_ids.size, layer, np.int32)
        done = self._programs(np.repeat(tokens, chosen, axis=0), expert_ids.reshape(-1), layers)
        self._done[micro_batch] = done.reshape(*expert_ids.shape, -1)

    def recv_ffn_output(self, micro_batch: int) -> np.ndarray:
        """What was computed."""
        return self._done.pop(micro_batch)


Exchange = AttentionConnector | LocalExperts  # where routed experts are computed


def decode(runner: "ModelRunner", sizes: Sizes, exchange: Exchange, fields: Mapping[str, np.ndarray]) -> np.ndarray:
    """A decode step as micro batches, of which some wait for their experts while others are computed.

    Its sequences are divided evenly among those, so that there is one to compute while another is away.

    Args:
        runner: The loaded programs.
        sizes: Those of the target.
        exchange: Where experts are computed, and how many micro batches may wait for it.
        fields: Those of ``decode``.

    Returns:
        Logits, fp32 ``[rows, vocab]``.
    """
    tokens, in_flight = exchange.tokens, exchange.micro_batches
    used = int(np.max(np.flatnonzero(fields["slot"]), initial=0)) + 1
    size = min(tokens, -(-used // in_flight))
    parts = -(-used // size)
    parts += -parts % in_flight if exchange.synchronous else 0
    starts, free = deque(range(0, parts * size, size)), deque(range(in_flight))
    out: dict[int, np.ndarray] = {}
    running: deque[tuple[int, int, Iterator[Any]]] = deque()
    while starts or running:
        while starts and free:
            start, number = starts.popleft(), free.popleft()
            part = {name: _part(value[start : start + size], tokens) for name, value in fields.items()}
            running.append((start, number, _micro_batch(runner, sizes, exchange, part, number)))
        start, number, work = running.popleft()
        logits = next(work)  # until its tokens are sent, or to the end
        if logits is None:
            running.append((start, number, work))
        else:
            out[start] = runner.read(logits)[:size]
            free.append(number)
    return _part(np.concatenate([out[start] for start in sorted(out)])[:used], len(fields["slot"]))


def _part(values: np.ndarray, count: int) -> np.ndarray:
    """``count`` rows: those of ``values``, and zeros behind the last."""
    part = np.zeros((count, *values.shape[1:]), values.dtype)
    part[: len(values)] = values
    return part


def _micro_batch(
    runner: "ModelRunner", sizes: Sizes, exchange: Exchange, fields: dict[str, np.ndarray], number: int
) -> Iterator[Any]:
    """One micro batch through all layers: None whenever its tokens are away, in the end its logits."""
    count = len(fields["slot"])
    hidden: Any = np.zeros((count, *sizes.back.shape), np.float32)
    for layer in range(sizes.layers):
        with exchange.phases.timed("attend"):
            at = fields | {"layer": np.array([layer], np.int32)}
            out = runner.call(f"attend@{count}", at, {"hidden": hidden})
            tokens, chosen = runner.read(out["tokens"]), runner.read(out["expert_ids"])
        hidden = out["residual"]
        if layer < sizes.dense:
            continue
        exchange.send_attn_output(number, layer - sizes.dense, tokens, chosen)
        yield None
        results = exchange.recv_ffn_output(number)
        with exchange.phases.timed("combine"):
            batch = {name: out[name] for name in ("residual", "expert_ids", "weights")} | {"results": results}
            hidden = runner.call(f"combine@{count}", {}, batch)["hidden"]
    yield runner.call(f"head@{count}", {}, {"hidden": hidden})["logits"]


def connected(
    runner: "ModelRunner", manifest: Manifest, target: Target, names: tuple[str, ...], wait: float
) -> tuple[Callable[[Mapping[str, np.ndarray]], np.ndarray], Callable[[], None]]:
    """What runs a decode step through the workers, and what leaves them.

    Raises:
        ArtifactError: The artifact has no split programs, or none for the workers' micro batches.
        FfnGone, ContextError: The workers are not there, or are others.
    """
    sizes = Sizes(manifest, target)
    link = AttentionConnector(
        names, artifact=manifest.sha256 or "", experts=sizes.experts, there=sizes.there, back=sizes.back, wait=wait
    )
    if link.tokens not in target.paddings("attend"):
        link.close()
        raise ArtifactError(
            f"--ffn: expected micro batches of {list(target.paddings('attend'))} tokens, found {link.tokens}"
        )
    return partial(decode, runner, sizes, link), link.close
