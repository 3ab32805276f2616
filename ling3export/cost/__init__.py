"""What accelerators offer, and what a program costs on them: bounds, and estimates from its optimized HLO."""
