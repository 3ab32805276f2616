"""Gated multi-head latent attention: the layer, and attention over the pages of the latent pool."""
