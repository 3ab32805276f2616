"""What the model's operator for attention and FFN apart, and the runner that feeds it, agree on without each other."""

MASK = 1_000_000  # an expert id from here on means "no expert"
