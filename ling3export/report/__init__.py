"""The contents of an artifact, as text."""
