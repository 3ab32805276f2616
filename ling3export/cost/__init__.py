"""Costs of compiled programs, counted from their optimized HLO."""
