"""The weights of an artifact by the names of a checkpoint: ``checkpoint/convert.py`` read backwards.

``pieces`` of a checkpoint's tensors are views. Given empty tensors, it gives the views in which each piece of the store
belongs. Quantized pieces become fp32.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from ling3export.artifacts.parameters import FORMS, PLAIN
from ling3export.artifacts.schema import PlanRecord, WeightsRecord
from ling3export.artifacts.store import Store
from ling3export.checkpoint.convert import pieces
from ling3export.checkpoint.quantize import dequantized, unpacked
from ling3export.foundation.errors import ArtifactError
from ling3export.model.config import Config
from ling3export.model.parameters import EXPERT, Weight, expected_tensors, weight_table
from ling3export.verify.dequantized import exact_type
from ling3export.verify.reference import Reference

_NUMBERS = re.compile(r"(?:model\.layers\.(\d+)\.)?(.*)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class StoredWeights:
    """A store as a checkpoint: each tensor in torch's order.

    Args:
        weights: The forms of the store, a key of ``artifacts/parameters.py``'s WEIGHTS.
    """

    def __init__(self, store: Store, config: Config, weights: str) -> None:
        self.config = config
        self._store, self._shapes = store, expected_tensors(config)
        self._rows: dict[str, list[Weight]] = {}
        for row in weight_table(config, weights):
            for name in row.source.names:
                self._rows.setdefault(name, []).append(row)

    def tensor(self, name: str) -> np.ndarray:
        """A tensor by its published name, in the store's dtype, or in fp32 if it is quantized.

        Raises:
            ArtifactError: The model has no such tensor.
        """
        if name not in self._shapes:
            raise ArtifactError(f"the model has no tensor `{name}`")
        match = _NUMBERS.fullmatch(name)
        assert match is not None
        layer = None if match[1] is None else int(match[1])
        expert = _EXPERT.search(match[2])
        rows = [
            row
            for row in self._rows[_EXPERT.sub(f".experts.{EXPERT}.", match[2])]
            if not row.layers or layer in row.layers
        ]
        if expert is not None:
            return self._expert(rows[0], layer, match[2], int(expert[1]))
        value = np.empty(self._shapes[name].shape, np.float32 if rows[0].form != PLAIN else self._dtype(rows[0]))
        for row in rows:
            self._fill(row, layer, name, value)
        return value

    def _dtype(self, row: Weight) -> np.dtype:
        return self._store.view(row.name).dtype

    def _streams(self, row: Weight, layer: int | None, shard: int | None) -> list[np.ndarray]:
        """The stored values of one layer and shard, flat: the weight, or q and scale."""
        names = [row.name] if row.form == PLAIN else [f"{row.name}.q", f"{row.name}.scale"]
        at = (() if shard is None else (shard,)) + (() if layer is None else (row.layers.index(layer),))
        return [self._store.view(name)[at].reshape(-1) for name in names]

    def _fill(self, row: Weight, layer: int | None, name: str, value: np.ndarray) -> None:
        """Writes the part of ``value`` that a weight holds."""
        plain = replace(row, form=PLAIN)
        others: dict[str, np.ndarray] = {}

        def read(wanted: str) -> np.ndarray:
            if wanted == name:
                return value
            return others.setdefault(wanted, np.empty(self._shapes[wanted].shape, value.dtype))

        taken: dict[int | None, list[int]] = {}
        for shard, (part,) in pieces(plain, layer, self.config, read):
            streams = self._streams(row, layer, shard)
            places = taken.setdefault(shard, [0] * len(streams))
            matrix = part.T if row.form != PLAIN and row.source.columns else part
            matrix[...] = _piece(row, streams, places, matrix.shape)

    def _expert(self, row: Weight, layer: int | None, name: str, expert: int) -> np.ndarray:
        """One expert's matrix, without a look at the others."""
        names = [pattern.replace(EXPERT, str(expert)) for pattern in row.source.names]
        groups = row.source.groups // row.shape[0]
        streams = self._streams(row, layer, expert // groups)
        number = (expert % groups) * len(names) + names.index(name)
        places = [number * (stream.size // (groups * len(names))) for stream in streams]
        return _piece(row, streams, places, row.source.shape)


def stored_reference(folder: Path, weights: WeightsRecord, config: Config, plan: PlanRecord) -> Reference:
    """The numpy reference with the weights of an artifact.

    Args:
        plan: The dtype and the forms of its weights.
    """
    read = StoredWeights(Store(folder, weights.index), config, plan.forms).tensor
    return Reference(config, read, exact_type(plan.dtype, plan.forms))


def _piece(row: Weight, streams: list[np.ndarray], places: list[int], shape: tuple[int, ...]) -> np.ndarray:
    """The next values of a stream ``[out, in]``; ``places`` go on."""

    def take(which: int, count: int) -> np.ndarray:
        start = places[which]
        places[which] = start + count
        return streams[which][start : start + count]

    size = math.prod(shape)
    if row.form == PLAIN:
        return take(0, size).reshape(shape)
    form, (out, width) = FORMS[row.form], shape
    q = take(0, size * form.bits // 8).reshape(out, -1)
    group = width if form.group is None else math.gcd(width, row.group)
    scale = take(1, out * (width // group)).reshape(out, -1)
    return dequantized((unpacked(q, row.form, group), scale))
