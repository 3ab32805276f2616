"""Measurements: ``python -m bench --help``. Everything is a ratio of two things measured in one run."""
