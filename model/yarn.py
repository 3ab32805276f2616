"""YaRN: rotary frequencies for contexts longer than those that a model was trained on.

Source: Peng et al., arXiv 2309.00071, in the form that DeepSeek-V3's public code has: ``rope_scaling`` of config.json.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ling3export.model.fields import is_number


@dataclass(frozen=True)
class Yarn:
    """``rope_scaling`` of the type ``yarn``, under its own names."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def context(self) -> int:
        """The range of the scaled positions."""
        return int(self.factor * self.original_max_position_embeddings)

    @property
    def softmax_factor(self) -> float:
        """The factor of the attention's scale."""
        return self._magnitude(self.mscale_all_dim) ** 2

    @property
    def rope_factor(self) -> float:
        """The factor of cosines and sines."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    def frequencies(self, plain: NDArray[np.float64], theta: float) -> NDArray[np.float64]:
        """Interpolated frequencies.

        Those that turn less than ``beta_slow`` times within the original context are divided by ``factor``, those that
        turn more than ``beta_fast`` times stay, and a line leads from one to the other.

        Args:
            plain: ``theta^(-2i/P)`` of the P / 2 pairs.
            theta: ``rope_theta``.
        """
        width = 2 * len(plain)

        def pair(turns: float) -> float:
            """The number of the pair that turns so often within the original context."""
            rotation = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return width * math.log(rotation) / (2 * math.log(theta))

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), width - 1)
        ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0, 1)
        return plain * (1 - ramp) + plain / self.factor * ramp

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


FIELDS = frozenset(field.name for field in fields(Yarn))


def yarn_of(value: Any) -> Yarn | None:
    """A ``rope_scaling`` object as YaRN; None where it is none, or has a field that is unknown or no number."""
    if not isinstance(value, dict):
        return None
    data = dict(value)
    kinds = {data.pop(name) for name in ("type", "rope_type") if isinstance(data.get(name), str)}
    if kinds != {"yarn"} or not {"factor", "original_max_position_embeddings"} <= data.keys() <= FIELDS:
        return None
    if not all(is_number(number) and number >= 0 for number in data.values()):
        return None
    original = data.pop("original_max_position_embeddings")
    yarn = Yarn(original_max_position_embeddings=int(original), **{name: float(y) for name, y in data.items()})
    sound = yarn.factor >= 1 and original == int(original) >= 1 and yarn.beta_fast > yarn.beta_slow > 0
    return yarn if sound else None
