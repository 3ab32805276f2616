"""Checkpoints: reading the published layout, converting it to a store, and making small ones for tests."""
