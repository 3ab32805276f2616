"""Attention and FFN apart: tokens of several attention sessions, ordered by expert for one FFN worker, and back."""

from ling3export.model.ffn.dispatch import FfnBatch, ffn_worker_batching

__all__ = ["FfnBatch", "ffn_worker_batching"]
