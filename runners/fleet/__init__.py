"""Engines on a Ray cluster."""
