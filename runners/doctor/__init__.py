"""Compares a machine with the requirements of an artifact."""
