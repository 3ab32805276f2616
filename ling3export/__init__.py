"""Compile Ling3-Tiny ahead of time: one artifact, any machine, no compiling at start."""
