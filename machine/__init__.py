"""This machine: its devices, what jax needs there, which programs fit it, and compiled programs as files."""
