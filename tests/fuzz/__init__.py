"""Damaged input for all readers."""
