"""The FFN side of a split model: what attention sessions publish in shared memory, and what is ready to be computed."""
