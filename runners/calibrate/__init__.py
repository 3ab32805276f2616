"""Runs an artifact's programs on a machine: how far they are from the expectations, and how long they take."""
