"""Artifacts in places where others find them: what is said of one, where it lies, and how it is pulled."""
