"""Decode steps through the programs that are cut at the experts: two micro batches in flight."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.dtypes import BY_NAME, MASK
from ling3export.foundation.errors import ArtifactError
from ling3export.runners.ffn.link import AttentionLink

if TYPE_CHECKING:
    from ling3export.runners.load.model_runner import ModelRunner


class Sizes:
    """Sizes of a target's split programs; the first ``dense`` of the ``layers`` have no experts.

    Attributes:
        sent: The row of a pair of a token and an expert on its way to the experts: a dtype with a shape.
        returned: A row on its way back.

    Raises:
        ArtifactError: The artifact was built without ``--afd``.
    """

    def __init__(self, manifest: Manifest, target: Target) -> None:
        attend = next((cell for cell in target.cells.values() if cell.phase == "attend"), None)
        if attend is None:
            raise ArtifactError(
                "split: the artifact has none of the programs of `build --afd`", "build the artifact again with --afd"
            )
        numbers = {name: value for name, value in manifest.config.items() if isinstance(value, int)}
        leaves = (*attend.outputs, *target.cells[f"combine@{attend.padding}"].inputs)
        shapes = {leaf.name: np.dtype((BY_NAME[leaf.dtype].numpy, leaf.shape[-1:])) for leaf in leaves}
        self.sent, self.returned = shapes["tokens"], shapes["results"]
        self.layers, self.dense = numbers["num_hidden_layers"], numbers["first_k_dense_replace"]
        self.experts, self.chosen = numbers["num_experts"], numbers["num_experts_per_tok"]


class ExpertPrograms:
    """``dispatch`` and ``experts`` of one process, for the numbers of pairs in ``paddings``, ascending."""

    def __init__(self, runner: "ModelRunner", sizes: Sizes, paddings: tuple[int, ...]) -> None:
        self._runner, self._sizes, self._paddings = runner, sizes, paddings

    def __call__(self, data: np.ndarray, expert_ids: np.ndarray, layer: int) -> np.ndarray:
        """The experts' results of ``n`` pairs; zeros for pairs without an expert.

        Args:
            data: ``[n, width]`` rows as sent.
            expert_ids: int32 ``[n]``, MASK for none.
            layer: Among the layers that have experts.
        """
        count = len(data)
        padding = next((padding for padding in self._paddings if padding >= count), None)
        if padding is None:
            raise ArtifactError(
                f"experts: expected programs for {count} pairs of a token and an expert, found at most "
                f"{self._paddings[-1]}",
                "build with --afd and larger --decode-paddings",
            )
        rows, ids = np.zeros((padding, data.shape[1]), data.dtype), np.full(padding, MASK, np.int32)
        rows[:count], ids[:count] = data, expert_ids
        fields = {"expert_ids": ids, "layer_ids": np.full(padding, layer, np.int32), "out_num": np.array([count], "i4")}
        batch = self._runner.call(f"dispatch@{padding}", fields, {"token_data": rows})
        place, live = self._runner.read(batch["gather_idx"]), int(self._runner.read(batch["actual_token_num"])[0])
        taken = {name: value for name, value in batch.items() if name in ("y", "group_list", "dynamic_scale")}
        computed = self._runner.read(self._runner.call(f"experts@{padding}", {}, taken)["results"])
        results = np.zeros(padding, self._sizes.returned)
        results[place[:live]] = computed[:live]
        return results[:count]


class LocalExperts:
    """The link of receipts: computes the experts in this process, for at most ``tokens`` a micro batch."""

    micro_batches = 1

    def __init__(self, programs: ExpertPrograms, tokens: int) -> None:
        self._programs, self.tokens = programs, tokens
        self._results: dict[int, np.ndarray] = {}

    def send_attn_output(self, micro_batch: int, layer: int, tokens: np.ndarray, expert_ids: np.ndarray) -> None:
        results = self._programs(np.repeat(tokens, expert_ids.shape[1], axis=0), expert_ids.reshape(-1), layer)
        self._results[micro_batch] = results.reshape(*expert_ids.shape, -1)

    def recv_ffn_output(self, micro_batch: int) -> np.ndarray:
        return self._results.pop(micro_batch)


def decode(
    runner: "ModelRunner", sizes: Sizes, link: AttentionLink | LocalExperts, fields: Mapping[str, np.ndarray]
) -> np.ndarray:
    """A decode step as micro batches: one is computed while another's tokens are at the experts.

    The sequences are divided evenly among the micro batches in flight. Returns the logits, fp32 ``[rows, vocab]``.
    """
    tokens, in_flight = link.tokens, link.micro_batches
    used = int(np.max(np.flatnonzero(fields["slot"]), initial=0)) + 1
    size, logits = min(tokens, -(-used // in_flight)), list[np.ndarray]()
    for first in range(0, used, size * in_flight):
        parts = [
            {name: _padded(value[start : start + size], tokens) for name, value in fields.items()}
            for start in range(first, min(used, first + size * in_flight), size)
        ]
        works = [_micro_batch(runner, sizes, link, part, number) for number, part in enumerate(parts)]
        while (outputs := [next(work) for work in works])[0] is None:  # until their tokens are sent
            pass
        logits += [runner.read(output)[:size] for output in outputs]
    return _padded(np.concatenate(logits)[:used], len(fields["slot"]))


def _padded(values: np.ndarray, count: int) -> np.ndarray:
    rows = np.zeros((count, *values.shape[1:]), values.dtype)
    rows[: len(values)] = values
    return rows


def _micro_batch(
    runner: "ModelRunner", sizes: Sizes, link: AttentionLink | LocalExperts, fields: dict[str, np.ndarray], number: int
) -> Iterator[Any]:
    """One micro batch through all layers: yields None whenever its tokens are sent, in the end its logits."""
    count = len(fields["slot"])
    hidden: Any = np.zeros((count, *sizes.returned.shape), np.float32)
    for layer in range(sizes.layers):
        layer_fields = fields | {"layer": np.array([layer], np.int32)}
        output = runner.call(f"attend@{count}", layer_fields, {"hidden": hidden})
        hidden = output["residual"]
        if layer < sizes.dense:
            continue
        link.send_attn_output(
            number, layer - sizes.dense, runner.read(output["tokens"]), runner.read(output["expert_ids"])
        )
        yield None
        batch = {name: output[name] for name in ("residual", "expert_ids", "weights")}
        results = link.recv_ffn_output(number)
        hidden = runner.call(f"combine@{count}", {}, batch | {"results": results})["hidden"]
    yield runner.call(f"head@{count}", {}, {"hidden": hidden})["logits"]


def connected(
    runner: "ModelRunner", manifest: Manifest, target: Target, name: str, wait: float
) -> tuple[Callable[[Mapping[str, np.ndarray]], np.ndarray], Callable[[], None]]:
    """Connects to an FFN worker: a function that runs a decode step through it, and one that leaves it."""
    sizes = Sizes(manifest, target)
    link = AttentionLink(name, artifact=manifest.sha256 or "", sent=sizes.sent, returned=sizes.returned, wait=wait)
    if link.tokens not in target.paddings("attend"):
        link.close()
        raise ArtifactError(
            f"--ffn: expected micro batches of {list(target.paddings('attend'))} tokens, found {link.tokens}"
        )
    return partial(decode, runner, sizes, link), link.close
