"""The Ling3 model: structure and numerics (flax nnx, pure functions over plain dicts)."""
