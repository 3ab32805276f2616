"""Kimi Delta Attention: the layer, its recurrence, the tiled form of prefill, and the short convolution."""
