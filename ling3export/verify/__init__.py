"""Receipts: a reference that shares no code with the model, and what it says of an artifact's programs."""
