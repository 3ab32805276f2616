"""Sampling on the devices: tokens from logits, the thresholds of top-k and top-p, and scores of given tokens."""
