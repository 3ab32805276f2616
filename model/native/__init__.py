"""Kernels for cpu that XLA calls by name, and their source; a build compiles it (ling3export/compile/kernels.py)."""
