"""A synthetic micro model whose steps run under plain jit, and the float64 reference's logits for its prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ling3export.checkpoint.reader import Checkpoint
from ling3export.checkpoint.synth import synthesize
from ling3export.verify.reference import Reference
from tests.support.direct import Direct, relative
from tests.support.tolerances import MARGIN


class Case:
    """A synthetic micro model, prompts, and the reference's logits at every position of each.

    KDA heads are 32 wide. At the preset's 16, the output norm of a head that reads almost nothing amplifies rounding to
    1e-5, in the reference's own float32 form too.
    """

    def __init__(self, folder: Path, lengths: Sequence[int], seed: int = 3, **overrides: Any) -> None:
        fields = {"head_dim": 32, "num_nextn_predict_layers": 0, "layer_group_size": 3}
        synthesize(folder, "micro", seed, overrides=fields | overrides)
        checkpoint = Checkpoint.open(folder)
        self.config, self.read = checkpoint.config, checkpoint.tensor
        rng = np.random.default_rng(seed)
        self.prompts = [rng.integers(0, self.config.vocab_size, length).tolist() for length in lengths]

    def expect(self) -> "Case":
        """Runs the reference, and checks that no routing decision is so close that rounding may flip it."""
        reference = Reference(self.config, self.read)
        self.expected = reference.logits_many(self.prompts)
        assert min(reference.margins) > MARGIN
        return self

    def direct(self, **options: Any) -> Direct:
        return Direct(self.config, self.read, **options)

    def error_of_prompt(self, direct: Direct, padding: int, rows: int, *, lengths: Sequence[int], until: int) -> float:
        """Largest error for prompt 0, prefilled to each of ``lengths`` and decoded from the last to ``until``."""
        ids, expected, errors = self.prompts[0], self.expected[0], []
        for length in lengths:
            errors.append(relative(direct.sequence(padding, ids[:length]), expected[length - 1]))
        for position in range(lengths[-1], until):
            errors.append(relative(direct.decode(rows, [(1, position, ids[position])])[0], expected[position]))
        return max(errors)


class Quick(Direct):
    """Compiles without optimization, which takes half the time."""

    def step(self, phase: str, padding: int) -> Any:
        if (phase, padding) not in self.steps:
            step, _ = super().step(phase, padding)
            options = {"xla_backend_optimization_level": 0}
            self.steps[phase, padding] = step, jax.jit(step.call, donate_argnums=(1,), compiler_options=options)
        return self.steps[phase, padding]
