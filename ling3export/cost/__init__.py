"""Accelerators, and the costs of programs on them: bounds, and estimates from optimized HLO."""
